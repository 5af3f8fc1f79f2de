/**
 * Node client of rolloutd.
 *
 *     const client = await connect('127.0.0.1:50051', { run: 'grpo-7b', consumer: 'rank0' })
 *     const group = await client.generateGroup(promptIds, { samples: 8, maxNewTokens: 1024, rolloutClass: 'critical' })
 *     await client.close()
 */

export { Client, connect } from './client.js'
export { ClientClosed, Fenced, Refused, RolloutdError, RolloutFailed, ServerUnavailable, Unauthorized } from './errors.js'

/** @typedef {import('./client.js').Budget} Budget */
/** @typedef {import('./client.js').ConnectOptions} ConnectOptions */
/** @typedef {import('./client.js').StepReport} StepReport */
/** @typedef {import('./connection.js').Tls} Tls */
/** @typedef {import('./dispatch.js').Notice} Notice */
/** @typedef {import('./errors.js').Problem} Problem */
/** @typedef {import('./ledger.js').Acceptance} Acceptance */
/** @typedef {import('./ledger.js').Progress} Progress */
/** @typedef {import('./results.js').Attempt} Attempt */
/** @typedef {import('./results.js').RolloutResult} RolloutResult */
/** @typedef {import('./results.js').Span} Span */
/** @typedef {import('./submissions.js').Prompt} Prompt */
/** @typedef {import('./submissions.js').RolloutOptions} RolloutOptions */
