/**
 * What can go wrong, and which question each class answers.
 *
 *     RolloutdError               did anything of rolloutd fail?
 *     +-- ServerUnavailable       was there no server to talk to, for longer than `reconnectSeconds`?
 *     +-- Fenced                  has somebody taken my place (a newer trainer epoch, another stream of my consumer)?
 *     +-- Refused                 did the server answer "no"? `code`, `reason` and `fields` say why
 *     |   +-- Unauthorized        is it because of who I am (no key, wrong key, somebody else's run)?
 *     +-- RolloutFailed           did a rollout end without completing? `result` says how and holds what there is of it
 *     +-- ClientClosed            did I use, or wait on, a client after it was closed?
 *
 * Arguments that cannot be sent are TypeError or RangeError.
 */

import { status } from '@grpc/grpc-js'
import protobuf from 'protobufjs'

/**
 * Why the server refused or failed something.
 * @typedef {object} Problem
 * @property {string} code canonical gRPC code, e.g. "INVALID_ARGUMENT"
 * @property {string} reason machine-readable, e.g. "QUEUE_FULL"; "" when the server gave none
 * @property {string} message for a person
 * @property {{ field: string, description: string }[]} fields which fields were wrong
 * @property {number} retryAfterSeconds 0: at once or never, by the code
 */

/** Anything of rolloutd that failed. */
export class RolloutdError extends Error {
  /**
   * @param {string} message
   * @param {ErrorOptions} [options]
   */
  constructor(message, options) {
    super(message, options)
    this.name = new.target.name
  }
}

/** No server answered within `reconnectSeconds`. */
export class ServerUnavailable extends RolloutdError {}

/** A newer trainer epoch, or another stream of the same consumer, took this client's place. Do not reconnect. */
export class Fenced extends RolloutdError {}

/** The client was closed. */
export class ClientClosed extends RolloutdError {}

/** The server said no. */
export class Refused extends RolloutdError {
  /**
   * @param {Problem} problem
   * @param {ErrorOptions} [options]
   */
  constructor(problem, options) {
    super(textOf(problem), options)
    this.problem = problem
    this.code = problem.code
    this.reason = problem.reason
    this.fields = problem.fields
    this.retryAfterSeconds = problem.retryAfterSeconds
  }
}

/** No key, a wrong key, or something that belongs to another run. */
export class Unauthorized extends Refused {}

/** A rollout ended without completing. */
export class RolloutFailed extends RolloutdError {
  /** @param {import('./results.js').RolloutResult} result */
  constructor(result) {
    super(`rollout ${result.rolloutId} ended as ${result.outcome}${result.problem ? `: ${textOf(result.problem)}` : ''}`)
    this.result = result
  }
}

/**
 * A problem of our own making.
 * @param {string} code
 * @param {string} reason
 * @param {string} message
 * @returns {Problem}
 */
export function problem(code, reason, message) {
  return { code, reason, message, fields: [], retryAfterSeconds: 0 }
}

/**
 * A problem in one line.
 * @param {Problem} problem
 */
export function textOf({ code, reason, message, fields }) {
  const unsaid = fields.filter(({ description }) => !message.includes(description))
  const named = unsaid.map(({ field, description }) => `; ${field}: ${description}`).join('')
  return `${message}${named} (${code}${reason ? `, ${reason}` : ''})`
}

/**
 * The contract's Error, as a plain object.
 * @param {Record<string, any>} error
 * @returns {Problem}
 */
export function problemOfError(error) {
  const { reason, message, fieldViolations, retryAfterSeconds } = error
  return { code: status[error.code] ?? `CODE_${error.code}`, reason, message, fields: fieldViolations, retryAfterSeconds }
}

/**
 * A gRPC status with whatever google.rpc details it carries.
 * @param {{ code: number, details: string, metadata?: import('@grpc/grpc-js').Metadata }} answer
 * @returns {Problem}
 */
export function problemOfStatus({ code, details, metadata }) {
  const found = problem(status[code] ?? `CODE_${code}`, '', details || 'no details')
  for (const value of metadata?.get('grpc-status-details-bin') ?? []) {
    for (const { typeUrl, value: bytes } of /** @type {any} */ (STATUS.decode(Buffer.from(value))).details) {
      const name = typeUrl.slice(typeUrl.lastIndexOf('/') + 1)
      const detail = DETAILS[name] === undefined ? null : /** @type {any} */ (DETAILS[name].decode(bytes))
      if (name === 'google.rpc.ErrorInfo') found.reason = detail.reason
      if (name === 'google.rpc.BadRequest') found.fields = Array.from(detail.fieldViolations, ({ field, description }) => ({ field, description }))
      if (name === 'google.rpc.RetryInfo') found.retryAfterSeconds = Number(detail.retryDelay?.seconds ?? 0) + (detail.retryDelay?.nanos ?? 0) / 1e9
    }
  }
  return found
}

/**
 * The exception for an answer of the server.
 * @param {Problem} problem
 * @param {ErrorOptions} [options]
 */
export function errorOf(problem, options) {
  if (problem.code === 'ABORTED' && problem.reason === 'FENCED') return new Fenced(textOf(problem), options)
  const Class = ['UNAUTHENTICATED', 'PERMISSION_DENIED'].includes(problem.code) ? Unauthorized : Refused
  return new Class(problem, options)
}

/** @param {Record<string, [string, number, string?]>} fields name to type, number and rule */
function type(fields) {
  return { fields: Object.fromEntries(Object.entries(fields).map(([name, [type, id, rule]]) => [name, { type, id, rule }])) }
}

// The parts of google/rpc/status.proto and error_details.proto that a status of rolloutd carries.
const rpc = protobuf.Root.fromJSON({
  nested: {
    Any: type({ typeUrl: ['string', 1], value: ['bytes', 2] }),
    Status: type({ details: ['Any', 3, 'repeated'] }),
    ErrorInfo: type({ reason: ['string', 1] }),
    FieldViolation: type({ field: ['string', 1], description: ['string', 2] }),
    BadRequest: type({ fieldViolations: ['FieldViolation', 1, 'repeated'] }),
    Duration: type({ seconds: ['int64', 1], nanos: ['int32', 2] }),
    RetryInfo: type({ retryDelay: ['Duration', 1] })
  }
})
const STATUS = rpc.lookupType('Status')
const DETAILS = /** @type {Record<string, protobuf.Type>} */ ({
  'google.rpc.ErrorInfo': rpc.lookupType('ErrorInfo'),
  'google.rpc.BadRequest': rpc.lookupType('BadRequest'),
  'google.rpc.RetryInfo': rpc.lookupType('RetryInfo')
})
