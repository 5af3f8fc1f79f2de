/**
 * What this client has submitted and is still owed, and where each result goes.
 *
 * Life of an entry: waiting to be sent -> sent -> accepted -> each of its rollouts ends once -> forgotten. A refusal that says
 * "later" puts it back to waiting; any other refusal ends all its rollouts at once.
 *
 * Invariants: every rollout of an entry is delivered to its sink exactly once, whatever the server repeats; entries keep their message
 * until the last rollout ended, because a server that lost its memory must be told again; ids of finished rollouts are remembered
 * within a bound. What this does not know: streams, acknowledgements.
 */

import { now } from './connection.js'
import { typeOf } from './contract.js'
import { refusedResult } from './results.js'
import { memberIds } from './submissions.js'

const REMEMBERED_ROLLOUTS = 16_384 // finished ids kept to recognise a repeated event
const SUBMISSION = typeOf('RolloutSubmission')

/** @typedef {import('./results.js').RolloutResult} RolloutResult */
/** @typedef {import('./errors.js').Problem} Problem */

/**
 * Where the results of an entry go.
 * @typedef {object} Sink
 * @property {(rollouts: number) => void} expect an entry of so many rollouts was taken
 * @property {(result: RolloutResult) => void} deliver called once for each of its rollouts
 * @property {(problem: Problem, remaining: RolloutResult[]) => void} refuse the server refused it; `remaining` say so, one for each
 *   rollout not delivered yet
 * @property {(error: Error) => void} fail no further result will come
 */

/**
 * Tokens were generated.
 * @typedef {{ rolloutId: string, generatedTokens: number, engineId: string }} Progress generatedTokens: so far, over all attempts
 */

/**
 * The server took a submission.
 * @typedef {object} Acceptance
 * @property {string} rolloutId
 * @property {'queued' | 'held' | 'dispatched' | 'running' | 'stopping' | 'finished' | null} state
 * @property {number} queuePosition rollouts of its run and class before it
 * @property {number} matchedPrefixTokens
 * @property {number} estimatedStartSeconds 0: now, or not known
 * @property {boolean} attached it existed already with the same payload
 * @property {number} policyVersion
 */

/** One submission that has not ended. */
export class Entry {
  /** @type {'waiting' | 'sent' | 'accepted' | 'ended'} */
  state = 'waiting'
  cancelled = false
  /** @type {Acceptance | null} */
  acceptance = null
  /** @type {Problem | null} why it was refused */
  problem = null
  /** @type {NodeJS.Timeout | null} a refusal said "later" */
  retry = null
  /** @type {(() => void)[]} told when the server has answered */
  waiters = []
  submittedAt = now()

  /**
   * @param {ReturnType<typeof import('./submissions.js').submissionOf>} message
   * @param {Sink} sink
   * @param {((progress: Progress) => void) | undefined} onProgress
   */
  constructor(message, sink, onProgress) {
    this.message = message
    this.sink = sink
    this.onProgress = onProgress
    this.sizeBytes = SUBMISSION.encode(message).finish().length
    this.rolloutIds = memberIds(/** @type {any} */ (message))
    this.remaining = new Set(this.rolloutIds)
  }

  get rolloutId() {
    return this.message.rolloutId
  }

  /** When "later" is no answer any more: its deadline or queue TTL passed, or it was to fail fast. */
  get giveUpAt() {
    const { failFast, deadlineSeconds, queueTtlSeconds } = this.message
    if (failFast) return this.submittedAt
    return this.submittedAt + Math.min(deadlineSeconds || Infinity, queueTtlSeconds || Infinity)
  }

  /** Wakes whoever waits for acceptance, refusal or failure. */
  settle() {
    for (const waiter of this.waiters.splice(0)) waiter()
  }

  stopRetry() {
    if (this.retry !== null) clearTimeout(this.retry)
    this.retry = null
  }

  /**
   * What the caller gets for the rollouts that never came to be.
   * @param {string} runId
   * @param {Problem} problem
   */
  refusedResults(runId, problem) {
    const groupId = this.message.groupId || (this.rolloutIds.length > 1 ? this.rolloutId : '')
    const outcome = problem.code === 'CANCELLED' ? 'cancelled' : 'refused'
    return this.rolloutIds.flatMap((rolloutId, sampleIndex) =>
      this.remaining.has(rolloutId) ? [refusedResult({ rolloutId, runId, groupId, sampleIndex }, outcome, problem)] : []
    )
  }
}

/** All entries that have not ended. */
export class Ledger {
  #submissions = /** @type {Map<string, Entry>} */ (new Map())
  #rollouts = /** @type {Map<string, Entry>} */ (new Map())
  #finished = /** @type {Set<string>} */ (new Set())
  unaccepted = 0
  unacceptedBytes = 0

  get size() {
    return this.#submissions.size
  }

  /** All entries, oldest first. */
  entries() {
    return [...this.#submissions.values()]
  }

  /**
   * The entry of a submission or of one of its rollouts.
   * @param {string} anyId
   */
  get(anyId) {
    return this.#submissions.get(anyId) ?? this.#rollouts.get(anyId)
  }

  /**
   * RangeError when its id is in flight already.
   * @param {Entry} entry
   */
  add(entry) {
    if (this.#submissions.has(entry.rolloutId) || entry.rolloutIds.some((id) => this.#rollouts.has(id))) {
      throw new RangeError(`rolloutId ${entry.rolloutId} is in flight already in this client; ids are used once`)
    }
    entry.sink.expect(entry.rolloutIds.length)
    this.#submissions.set(entry.rolloutId, entry)
    for (const id of entry.rolloutIds) this.#rollouts.set(id, entry)
    this.unaccepted += 1
    this.unacceptedBytes += entry.sizeBytes
  }

  /**
   * The server has it. No effect the second time.
   * @param {Entry} entry
   */
  accept(entry) {
    if (entry.state !== 'waiting' && entry.state !== 'sent') return
    entry.state = 'accepted'
    this.unaccepted -= 1
    this.unacceptedBytes -= entry.sizeBytes
  }

  /**
   * The server may not have it any more, or not yet.
   * @param {Entry} entry
   */
  unaccept(entry) {
    if (entry.state === 'accepted') {
      this.unaccepted += 1
      this.unacceptedBytes += entry.sizeBytes
    }
    entry.state = 'waiting'
  }

  /**
   * A rollout has ended: whether it is owed to an entry, was delivered before, or was submitted by somebody else.
   * @param {string} rolloutId
   * @returns {{ arrival: 'owed', entry: Entry } | { arrival: 'repeated' | 'foreign', entry?: undefined }}
   */
  arrive(rolloutId) {
    const entry = this.#rollouts.get(rolloutId)
    if (entry === undefined) return { arrival: this.#finished.has(rolloutId) ? 'repeated' : 'foreign' }
    if (!entry.remaining.delete(rolloutId)) return { arrival: 'repeated' }
    this.accept(entry)
    if (entry.remaining.size === 0) this.end(entry)
    return { arrival: 'owed', entry }
  }

  /**
   * Recognise this rollout as delivered from now on.
   * @param {string} rolloutId
   */
  remember(rolloutId) {
    this.#finished.delete(rolloutId)
    this.#finished.add(rolloutId)
    if (this.#finished.size > REMEMBERED_ROLLOUTS) {
      for (const oldest of this.#finished) {
        this.#finished.delete(oldest)
        break
      }
    }
  }

  /**
   * Forgets an entry.
   * @param {Entry} entry
   */
  end(entry) {
    this.accept(entry)
    entry.state = 'ended'
    entry.stopRetry()
    this.#submissions.delete(entry.rolloutId)
    for (const id of entry.rolloutIds) {
      this.#rollouts.delete(id)
      if (!entry.remaining.has(id)) this.remember(id)
    }
  }
}
