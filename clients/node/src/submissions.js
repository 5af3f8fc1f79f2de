/**
 * From a prompt and options to the contract's RolloutSubmission.
 *
 * Invariants: an option that is left out stays unset on the wire, so the run's or the engine's default applies; every option is
 * accepted by name and type or refused here with a message that names it. What this does not know: limits that only the server
 * knows (vocabulary, context, queue); those come back as refusals of the one submission.
 */

import { randomUUID } from 'node:crypto'
import { toMessage, typeOf } from './contract.js'
import { bytesOfTokens } from './tokens.js'

const SUBMISSION = typeOf('RolloutSubmission')
const SAMPLING = typeOf('SamplingParams')
const OWN = new Set(['tokenIds', 'tokenBytes', 'text', 'wantProgress', 'sampling']) // set from the prompt and the other options
const NAMES = [...Object.keys(SAMPLING.fields), ...Object.keys(SUBMISSION.fields).filter((name) => !OWN.has(name))]

/** @typedef {string | Iterable<number>} Prompt text, or token ids */

/**
 * What may be said about a rollout: the fields of the contract's RolloutSubmission and SamplingParams under one roof. Their comments
 * say units, limits and defaults. `maxNewTokens` is required except for task type "replay".
 * @typedef {object} RolloutOptions
 * @property {number} [maxNewTokens]
 * @property {number} [minNewTokens]
 * @property {number} [temperature]
 * @property {number} [topP]
 * @property {number} [topK]
 * @property {number} [minP]
 * @property {number} [frequencyPenalty]
 * @property {number} [presencePenalty]
 * @property {number} [repetitionPenalty]
 * @property {string[]} [stop]
 * @property {number[]} [stopTokenIds]
 * @property {string[]} [stopRegex]
 * @property {boolean} [ignoreEos]
 * @property {boolean} [skipSpecialTokens]
 * @property {boolean} [spacesBetweenSpecialTokens]
 * @property {boolean} [noStopTrim]
 * @property {Record<number, number>} [logitBias]
 * @property {string} [jsonSchema]
 * @property {string} [regex]
 * @property {string} [ebnf]
 * @property {string} [structuralTag]
 * @property {Record<string, unknown>} [customParams]
 * @property {string} [rolloutId] left out: a fresh one
 * @property {number} [samples]
 * @property {(number | bigint)[]} [seeds]
 * @property {'critical' | 'reusable' | 'background'} [rolloutClass]
 * @property {'generation' | 'reward' | 'state_query' | 'replay'} [taskType]
 * @property {string} [pool]
 * @property {Record<string, string>} [engineLabels]
 * @property {string} [groupId]
 * @property {number} [groupSize]
 * @property {number} [groupKeep]
 * @property {string} [sessionId]
 * @property {number} [turn]
 * @property {string} [parentRolloutId]
 * @property {string} [stratum]
 * @property {'current_policy' | 'replay' | 'exploration' | 'evaluation'} [origin]
 * @property {number} [neededByStep]
 * @property {number} [deadlineSeconds]
 * @property {number} [queueTtlSeconds]
 * @property {number} [progressTimeoutSeconds]
 * @property {number} [maxAttempts]
 * @property {'keep_partial' | 'restart' | 'never'} [onPreempt]
 * @property {boolean} [failFast]
 * @property {boolean} [clipMaxNewTokens]
 * @property {boolean} [logprobs]
 * @property {number} [topLogprobs]
 * @property {Record<string, unknown>} [engineParams]
 * @property {number} [minVersion]
 * @property {number} [exactVersion]
 * @property {number} [maxStaleness]
 * @property {number} [maxPartialSpan]
 */

/**
 * The submission for a prompt. TypeError or RangeError for what cannot be sent.
 * @param {Prompt} prompt
 * @param {RolloutOptions} options
 * @param {boolean} wantProgress
 * @returns {Record<string, any> & { rolloutId: string }}
 */
export function submissionOf(prompt, options, wantProgress) {
  const submission = /** @type {Record<string, unknown>} */ ({ rolloutId: randomUUID() })
  const sampling = /** @type {Record<string, unknown>} */ ({})
  if (typeof prompt === 'string') submission.text = prompt
  else if (typeof prompt === 'object' && prompt !== null) submission.tokenBytes = bytesOfTokens(prompt)
  else throw new TypeError(`prompt must be text or token ids, not ${String(prompt)}`)
  for (const [name, value] of Object.entries(options)) {
    if (!NAMES.includes(name)) throw new TypeError(`unknown option ${name}; there are ${NAMES.join(', ')}`)
    if (value === undefined || value === null) continue
    if (Object.hasOwn(SAMPLING.fields, name)) sampling[name] = value
    else submission[name] = value
  }
  if (options.taskType !== 'replay' || Object.keys(sampling).length > 0) submission.sampling = sampling
  if (wantProgress) submission.wantProgress = true
  return /** @type {any} */ (toMessage(SUBMISSION, submission))
}

/**
 * Ids of the rollouts of a submission, by sample index.
 * @param {{ rolloutId: string, samples?: number }} submission
 */
export function memberIds({ rolloutId, samples = 1 }) {
  return samples <= 1 ? [rolloutId] : Array.from({ length: samples }, (_, index) => `${rolloutId}/${index}`)
}
