/**
 * The way to the server: channels with key and TLS, back-off, and unary calls that survive a restart.
 *
 * Invariants: a call that got no answer is tried again with back-off and jitter, for `reconnectSeconds` at most, then rejects with
 * ServerUnavailable; an answer, good or bad, is never retried. All calls of the contract may be repeated: they set values or are
 * idempotent by id. What this does not know: what is called.
 */

import { setMaxListeners } from 'node:events'
import { setTimeout as sleep } from 'node:timers/promises'
import grpc from '@grpc/grpc-js'
import { fromMessage, methodOf, toMessage } from './contract.js'
import { ClientClosed, errorOf, problemOfStatus, ServerUnavailable, textOf } from './errors.js'

const MAX_MESSAGE_BYTES = 256 * 1024 * 1024 // either way; what a server accepts it says in Limits.max_message_bytes
const FIRST_BACKOFF_SECONDS = 0.1
const MAX_BACKOFF_SECONDS = 5
const BACKOFF_FACTOR = 1.6 // gRPC's connection back-off protocol uses the same
const ANSWER_SECONDS = 30 // longest wait for the answer to a unary call, after which it counts as lost
const TRANSIENT = new Set(['UNAVAILABLE', 'DEADLINE_EXCEEDED', 'CANCELLED'])
const CHANNEL_OPTIONS = {
  'grpc.max_receive_message_length': MAX_MESSAGE_BYTES,
  'grpc.max_send_message_length': MAX_MESSAGE_BYTES,
  // A peer that vanished without a word is noticed within 40 s.
  'grpc.keepalive_time_ms': 30_000,
  'grpc.keepalive_timeout_ms': 10_000,
  // A new channel is a new connection: nothing stale is shared, and our own back-off is the only one.
  'grpc.use_local_subchannel_pool': 1,
  'grpc.initial_reconnect_backoff_ms': 100,
  'grpc.max_reconnect_backoff_ms': 1_000
}

/**
 * TLS, with the names of node:tls. PEM text or bytes.
 * @typedef {object} Tls
 * @property {string | Uint8Array} [ca] certificates to trust; left out: those of the system
 * @property {string | Uint8Array} [cert] this client's certificate, where the server asks for one (mutual TLS)
 * @property {string | Uint8Array} [key] its private key
 * @property {string} [servername] name the server's certificate must carry, when it is not the address
 */

/**
 * @typedef {object} Access
 * @property {string} target gRPC address, e.g. "127.0.0.1:50051" or "dns:///rolloutd.svc:50051"
 * @property {string} [apiKey]
 * @property {Tls | true} [tls]
 * @property {number} reconnectSeconds
 */

/**
 * Seconds on a clock that only goes forward.
 */
export function now() {
  return performance.now() / 1000
}

/**
 * A fresh channel, with a connection of its own.
 * @param {Access} access
 */
export function openChannel({ target, tls }) {
  if (!tls) return new grpc.Client(target, grpc.credentials.createInsecure(), CHANNEL_OPTIONS)
  const { ca, cert, key, servername } = tls === true ? {} : /** @type {Tls} */ (tls)
  const pem = (/** @type {string | Uint8Array | undefined} */ text) => (text === undefined ? null : Buffer.from(text))
  const credentials = grpc.credentials.createSsl(pem(ca), pem(key), pem(cert))
  const name = servername === undefined ? {} : { 'grpc.ssl_target_name_override': servername, 'grpc.default_authority': servername }
  return new grpc.Client(target, credentials, { ...CHANNEL_OPTIONS, ...name })
}

/**
 * What goes with every call.
 * @param {Access} access
 */
export function metadataOf({ apiKey }) {
  const metadata = new grpc.Metadata()
  if (apiKey !== undefined) metadata.set('authorization', `Bearer ${apiKey}`)
  return metadata
}

/**
 * Waits in seconds before the first, second, ... retry: growing, bounded, jittered by half so that clients do not march in step.
 * @returns {() => number}
 */
export function backoff() {
  let delay = FIRST_BACKOFF_SECONDS
  return () => {
    const jittered = delay * (0.5 + Math.random() / 2)
    delay = Math.min(delay * BACKOFF_FACTOR, MAX_BACKOFF_SECONDS)
    return jittered
  }
}

/**
 * The error for a server that could not be reached for that long.
 * @param {string} target
 * @param {number} seconds
 * @param {import('./errors.js').Problem} last
 */
export function unavailable(target, seconds, last) {
  return new ServerUnavailable(
    `no rolloutd server answered at ${target} for ${seconds.toFixed(0)} s; last error: ${textOf(last)}. Is it running ` +
      '(`rolloutd serve`), and is this its address? connect(..., { reconnectSeconds }) sets how long to try'
  )
}

/** A channel for unary calls. */
export class Connection {
  /** @param {Access} access */
  constructor(access) {
    this.access = access
    this.channel = openChannel(access)
    this.closed = new AbortController()
    setMaxListeners(0, this.closed.signal) // one per call in flight
  }

  /** Ends calls in flight with ClientClosed. */
  close() {
    this.closed.abort()
    this.channel.close()
  }

  /**
   * The answer as a plain object.
   * @param {string} service
   * @param {string} method
   * @param {Record<string, unknown>} request
   * @returns {Promise<Record<string, any>>}
   */
  async call(service, method, request) {
    const call = methodOf(service, method)
    if (call.streams) throw new TypeError(`${service}/${method} is a stream, not a call with one answer`)
    const message = toMessage(call.request, request)
    const delays = backoff()
    const started = now()
    for (;;) {
      if (this.closed.signal.aborted) throw new ClientClosed('the client was closed')
      const answer = await this.#once(call, message)
      if (answer.response !== undefined) return fromMessage(call.response, answer.response)
      const problem = problemOfStatus(answer.error)
      if (this.closed.signal.aborted) continue
      if (!TRANSIENT.has(problem.code) || !['', 'SHUTDOWN'].includes(problem.reason)) throw errorOf(problem, { cause: answer.error })
      const delay = delays()
      if (now() - started + delay > this.access.reconnectSeconds) throw unavailable(this.access.target, now() - started, problem)
      await sleep(delay * 1000, undefined, { signal: this.closed.signal }).catch(() => {}) // woken by close()
    }
  }

  /**
   * @param {import('./contract.js').Method} call
   * @param {Record<string, any>} message
   * @returns {Promise<{ response: Record<string, any>, error?: undefined } | { response?: undefined, error: grpc.ServiceError }>}
   */
  #once(call, message) {
    return new Promise((resolve) => {
      const request = this.channel.makeUnaryRequest(
        call.path,
        (/** @type {Record<string, any>} */ value) => /** @type {Buffer} */ (call.request.encode(value).finish()),
        (bytes) => call.response.decode(bytes),
        message,
        metadataOf(this.access),
        { deadline: Date.now() + ANSWER_SECONDS * 1000 },
        (error, response) => {
          this.closed.signal.removeEventListener('abort', cancel)
          resolve(error ? { error } : { response: /** @type {Record<string, any>} */ (response) })
        }
      )
      const cancel = () => request.cancel()
      if (this.closed.signal.aborted) cancel()
      else this.closed.signal.addEventListener('abort', cancel, { once: true })
    })
  }
}
