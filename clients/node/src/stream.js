/**
 * The SubmitRollout stream of one consumer, kept alive.
 *
 * One session follows the other: open a fresh channel, say hello with the cursor up to which everything is dealt with, then read and
 * write until the stream breaks; back off, and again. After a re-attach the missed events come first, then everything not ended is
 * submitted again (by id: the server attaches it, or runs it if it has lost it).
 *
 * Invariants: reading pauses (and HTTP/2 with it the server) while the inbox is full and nobody waits for anything else; writing waits
 * while the transport is full; nobody waits for ever: when the server is gone for `reconnectSeconds`, or has fenced us, every waiter gets
 * the reason. Nothing of an ended session reaches the next. What this does not know: what an event means (dispatch.js), what callers
 * do with results.
 */

import { setTimeout as sleep } from 'node:timers/promises'
import { backoff, metadataOf, now, openChannel, unavailable } from './connection.js'
import { methodOf } from './contract.js'
import { Dispatch } from './dispatch.js'
import { ClientClosed, errorOf, Fenced, problem, problemOfStatus, textOf } from './errors.js'
import { Inbox } from './inbox.js'
import { Ledger } from './ledger.js'
import { Outbox } from './outbox.js'
import { Session } from './session.js'

const COALESCE_SECONDS = 0.002 // a busy writer waits this long after its last message, so that items gather; an idle one sends at once
const REMINDER_SECONDS = 30 // an outage is warned of this often
const ATTACH_SECONDS = 20 // longest wait for the answer to hello
const REPLAY_SECONDS = 10 // longest wait for missed events before unfinished work is submitted again
const STABLE_SECONDS = 5 // a session that lasted this long ends an outage, even if nothing happened in it
const CLOSE_SECONDS = 2 // at close: longest wait for the last acknowledgements to go out, and for the server's goodbye
const UNFINISHED_CLOSE_SECONDS = 0.2 // the latter when rollouts are unfinished: the server would go on until they end
const MAX_UNACCEPTED_BYTES = 64 * 1024 * 1024
// A stream that ends with one of these is opened again. The second set may be our own doing (a message the server chokes on), so a
// short session that ends so does not end an outage.
const PASSING = new Set(['OK', 'UNAVAILABLE', 'DEADLINE_EXCEEDED', 'CANCELLED'])
const DUBIOUS = new Set(['INTERNAL', 'UNKNOWN', 'RESOURCE_EXHAUSTED', 'ABORTED'])
const SUBMIT_ROLLOUT = methodOf('RolloutService', 'SubmitRollout')

/** @typedef {import('./ledger.js').Entry} Entry */
/** @typedef {import('./errors.js').Problem} Problem */

/**
 * @typedef {object} StreamSettings
 * @property {import('./connection.js').Access} access
 * @property {Record<string, any> & { runId: string }} hello
 * @property {number} maxUnaccepted
 * @property {number} maxBufferedResults
 * @property {(notice: import('./dispatch.js').Notice) => void} onNotice
 * @property {(text: string) => void} warn
 */

export class RolloutStream {
  #ledger = new Ledger()
  #outbox = new Outbox(() => this.#wake())
  #session = /** @type {Session | null} */ (null) // the attached one
  #failure = /** @type {Error | null} */ (null)
  #waiters = 0 // callers that wait for something else than the inbox
  #roomWaiters = /** @type {(() => void)[]} */ ([])
  #closing = new AbortController()
  #running = Promise.resolve()
  #everAttached = false

  /** @param {StreamSettings} settings */
  constructor(settings) {
    this.settings = settings
    this.inbox = new Inbox(settings.maxBufferedResults, () => this.#steer())
    this.dispatch = new Dispatch({
      runId: settings.hello.runId,
      ledger: this.#ledger,
      outbox: this.#outbox,
      inbox: this.inbox,
      onNotice: settings.onNotice,
      warn: settings.warn,
      onRoom: () => this.#roomWaiters.splice(0).forEach((waiter) => waiter())
    })
  }

  /** Resolves once attached. ServerUnavailable, Fenced, Refused or Unauthorized when that does not come about. */
  async start() {
    /** @type {Promise<void>} */
    const attached = new Promise((resolve) => {
      this.onAttached = resolve
    })
    this.#running = this.#sessions().catch((error) => this.#fail(error))
    await attached
    this.raiseFailure()
  }

  /** Throws what ended the stream for good, if anything did. */
  raiseFailure() {
    if (this.#failure !== null) throw this.#failure
  }

  /**
   * While `promise` is pending, the stream is read even if nobody empties the inbox.
   * @template T
   * @param {Promise<T>} promise
   * @returns {Promise<T>}
   */
  async waiting(promise) {
    this.#waiters += 1
    this.#steer()
    try {
      return await promise
    } finally {
      this.#waiters -= 1
    }
  }

  /**
   * Takes an entry, at once or as soon as enough others are accepted.
   * @param {Entry} entry
   */
  async submit(entry) {
    this.raiseFailure()
    while (this.#crowded(entry)) {
      await this.waiting(/** @type {Promise<void>} */ (new Promise((resolve) => this.#roomWaiters.push(resolve))))
      this.raiseFailure()
    }
    this.#ledger.add(entry)
    this.#outbox.submit(entry)
  }

  /**
   * The server's answer to a submission. Refused when that is no.
   * @param {Entry} entry
   */
  async acceptance(entry) {
    while (entry.acceptance === null && entry.problem === null) {
      this.raiseFailure()
      await this.waiting(/** @type {Promise<void>} */ (new Promise((resolve) => entry.waiters.push(resolve))))
    }
    if (entry.acceptance !== null) return entry.acceptance
    throw errorOf(/** @type {Problem} */ (entry.problem))
  }

  /**
   * The unfinished entry of a submission or rollout.
   * @param {string} anyId
   */
  entry(anyId) {
    return this.#ledger.get(anyId)
  }

  /** @param {import('./acknowledgements.js').Acknowledgement} acknowledgement */
  acknowledge(acknowledgement) {
    this.#outbox.acknowledge(acknowledgement)
  }

  /** Sends what is pending, says goodbye, and ends every wait with ClientClosed. */
  async close() {
    this.#closing.abort()
    const session = this.#session
    if (session !== null) {
      this.#wake()
      await this.waiting(within(CLOSE_SECONDS, Promise.race([session.said, this.#running])))
      await this.waiting(within(this.#ledger.size > 0 ? UNFINISHED_CLOSE_SECONDS : CLOSE_SECONDS, this.#running))
      session.call.cancel()
    }
    await this.#running
    this.#fail(new ClientClosed('the client was closed'))
  }

  async #sessions() {
    const { access, warn } = this.settings
    let outageSince = /** @type {number | null} */ (null)
    let delays = backoff()
    let quietUntil = 0
    for (;;) {
      const started = now()
      this.dispatch.progressed = false
      const problem = await this.#runSession()
      if (this.#closing.signal.aborted) return
      const ended = now()
      const useful = this.dispatch.progressed && PASSING.has(problem.code)
      if (useful || (ended - started > STABLE_SECONDS && this.dispatch.attachedAt > started)) {
        outageSince = ended
        delays = backoff()
      } else outageSince ??= started
      const left = outageSince + access.reconnectSeconds - ended
      if (left < 0) throw unavailable(access.target, ended - outageSince, problem)
      if (ended >= quietUntil || outageSince === ended) {
        quietUntil = ended + REMINDER_SECONDS
        warn(`stream to ${access.target} is down: ${textOf(problem)}; trying for ${left.toFixed(0)} s more`)
      }
      const delay = Math.min(Math.max(delays(), problem.retryAfterSeconds), left + 0.01)
      try {
        await sleep(delay * 1000, undefined, { signal: this.#closing.signal })
      } catch {
        return // closing
      }
    }
  }

  /**
   * One stream from hello to its end: why it ended. Rejects with what ends all sessions.
   * @returns {Promise<Problem>}
   */
  async #runSession() {
    const channel = openChannel(this.settings.access)
    const call = /** @type {import('./session.js').Call} */ (
      channel.makeBidiStreamRequest(
        SUBMIT_ROLLOUT.path,
        (message) => /** @type {Buffer} */ (SUBMIT_ROLLOUT.request.encode(message).finish()),
        (bytes) => /** @type {Record<string, any>} */ (SUBMIT_ROLLOUT.response.decode(bytes)),
        metadataOf(this.settings.access)
      )
    )
    const session = new Session(call)
    const attachTimer = setTimeout(() => session.end(problem('DEADLINE_EXCEEDED', '', `no answer to hello in ${ATTACH_SECONDS} s`)), ATTACH_SECONDS * 1000)
    const giveUp = () => (this.#session === session ? undefined : session.end(problem('CANCELLED', '', 'the client was closed')))
    this.#closing.signal.addEventListener('abort', giveUp)
    call.on('error', () => {}) // the status says the same, and comes also without an error
    call.on('status', (status) => {
      const found = problemOfStatus(status)
      const failure = errorOf(found)
      if (failure instanceof Fenced || !(PASSING.has(found.code) || DUBIOUS.has(found.code))) session.fail(failure)
      else session.end(found.code === 'OK' ? { ...found, message: 'the server ended the stream' } : found)
    })
    call.on('data', (response) => {
      if (session.over) return
      try {
        if (this.#session === session) this.dispatch.take(response)
        else this.#attach(session, response, attachTimer)
        this.#steer()
      } catch (error) {
        session.fail(error) // of whatever kind, also of a callback: those who wait get it
      }
    })
    call.write({ hello: this.#hello() })
    try {
      return await session.ended
    } finally {
      this.#session = null
      clearTimeout(attachTimer)
      this.#closing.signal.removeEventListener('abort', giveUp)
      session.stop()
      channel.close()
    }
  }

  #hello() {
    const hello = { ...this.settings.hello, resumeCursor: this.#outbox.acknowledgements.resumeCursor }
    // Taken over once; whoever came back since is to keep its stream.
    return this.#everAttached ? { ...hello, takeOverConsumerIds: [] } : hello
  }

  /**
   * @param {Session} session
   * @param {Record<string, any>} response
   * @param {NodeJS.Timeout} attachTimer
   */
  #attach(session, response, attachTimer) {
    clearTimeout(attachTimer)
    this.#session = session
    this.#everAttached = true
    session.replayTimer = setTimeout(() => this.dispatch.resubmit(), REPLAY_SECONDS * 1000)
    this.dispatch.attach(response)
    this.onAttached?.()
  }

  /** Pauses or resumes reading. */
  #steer() {
    const call = this.#session?.call
    if (call === undefined) return
    if (this.inbox.full && this.#waiters === 0) call.pause()
    else if (call.isPaused()) call.resume()
  }

  /** There may be something to send: sends it now or soon, one message at a time. */
  #wake() {
    const session = this.#session
    if (session === null || session.blocked || session.sendTimer !== null || session.saidGoodbye) return
    if (this.#outbox.empty && !this.#closing.signal.aborted) return
    const delay = this.#outbox.fullMessage ? 0 : Math.max(0, session.lastSentAt + COALESCE_SECONDS - now())
    session.sendTimer = setTimeout(() => {
      session.sendTimer = null
      this.#send(session)
    }, delay * 1000)
  }

  /** @param {Session} session */
  #send(session) {
    if (session.over) return
    const { message, unsendable } = this.#outbox.nextMessage()
    for (const { entry, problem } of unsendable) this.dispatch.refuse(entry, problem)
    if (message !== null) {
      session.lastSentAt = now()
      if (!session.call.write(message)) {
        session.blocked = true
        session.call.once('drain', () => {
          session.blocked = false
          this.#wake()
        })
      }
    }
    if (this.#closing.signal.aborted && this.#outbox.empty) session.goodbye()
    else this.#wake()
  }

  /** @param {Entry} entry */
  #crowded(entry) {
    const { unaccepted, unacceptedBytes } = this.#ledger
    if (unaccepted >= this.settings.maxUnaccepted) return true
    return unaccepted > 0 && unacceptedBytes + entry.sizeBytes > MAX_UNACCEPTED_BYTES
  }

  /** @param {any} error */
  #fail(error) {
    if (this.#failure !== null) return
    this.#failure = error
    this.dispatch.fail(error)
    this.onAttached?.()
  }
}

/**
 * Resolves when `promise` does, or after so many seconds.
 * @param {number} seconds
 * @param {Promise<void>} promise
 */
async function within(seconds, promise) {
  const done = new AbortController()
  const timer = sleep(seconds * 1000, undefined, { signal: done.signal }).catch(() => {})
  await Promise.race([promise, timer])
  done.abort()
}
