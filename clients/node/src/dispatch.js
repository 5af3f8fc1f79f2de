/**
 * What each event of the stream means for what is in flight.
 *
 * Invariants: a durable event is taken once, by cursor (within one memory of the server) and by rollout id (across restarts); a
 * repeated result is acknowledged again without reaching the caller; a refusal that says "later" is tried again after the time it
 * names, unless the submission's own time is up. Everything here is synchronous. What this does not know: the stream.
 */

import { now } from './connection.js'
import { fromMessage, numberOf, typeOf } from './contract.js'
import { problem, problemOfError, RolloutdError, textOf } from './errors.js'
import { resultOf } from './results.js'

const LATER_SECONDS = 0.05 // least wait after a refusal that says "later"
const WITHDRAWN = problem('CANCELLED', 'CANCELLED', 'cancelled before the server had room for it')
const [ACCEPTED, REJECTED, PROGRESS, NOTICE] = ['Accepted', 'Rejected', 'Progress', 'Notice'].map(typeOf)

/** @typedef {import('./ledger.js').Entry} Entry */
/** @typedef {import('./errors.js').Problem} Problem */

/**
 * News about the run or the server.
 * @typedef {object} Notice
 * @property {'no_capacity' | 'budget_changed' | 'budget_lease_expired' | 'draining' | 'results_expired' |
 *   'version_published' | null} kind
 * @property {string} message
 * @property {number} seconds as the kind says; 0: not applicable
 * @property {number} policyVersion
 */

export class Dispatch {
  #missedEvents = 0 // still to come of those the server sends again
  #cursor = 0 // newest durable event taken
  #unfinishedAtAttach = /** @type {Entry[]} */ ([]) // to be submitted again after the replay
  #replayed = false
  attachedAt = 0
  progressed = false // an event came since the owner reset this

  /**
   * @param {object} parts
   * @param {string} parts.runId
   * @param {import('./ledger.js').Ledger} parts.ledger
   * @param {import('./outbox.js').Outbox} parts.outbox
   * @param {import('./inbox.js').Inbox} parts.inbox
   * @param {(notice: Notice) => void} parts.onNotice
   * @param {(text: string) => void} parts.warn
   * @param {() => void} parts.onRoom called whenever something was accepted or has ended
   */
  constructor(parts) {
    this.parts = parts
  }

  /**
   * The first response of a session. RolloutdError when it is not the answer to hello.
   * @param {Record<string, any>} response
   */
  attach(response) {
    const attached = response.events[0]?.attached
    if (!attached) throw new RolloutdError('the server did not answer hello with attached: is this a rolloutd server of this release?')
    const { ledger, outbox } = this.parts
    this.attachedAt = now()
    this.#cursor = Math.min(this.#cursor, numberOf(attached.cursor)) // lower: the server lost its memory and counts anew
    this.#missedEvents = numberOf(attached.pendingEvents)
    this.#replayed = false
    outbox.reattached(attached)
    this.#unfinishedAtAttach = ledger.entries()
    for (const entry of this.#unfinishedAtAttach) {
      ledger.unaccept(entry)
      entry.stopRetry()
    }
    if (this.#missedEvents === 0) this.resubmit()
    for (const event of response.events.slice(1)) this.#onEvent(event)
  }

  /** Submits again what had not ended at the attach: after the missed events, or when they take too long. Once per attach. */
  resubmit() {
    if (this.#replayed) return
    this.#replayed = true
    this.parts.outbox.resubmit(this.#unfinishedAtAttach.splice(0))
  }

  /**
   * Any later response.
   * @param {Record<string, any>} response
   */
  take(response) {
    for (const event of response.events) this.#onEvent(event)
  }

  /**
   * Does not try an entry again. One that only waits for its next try ends here and now.
   * @param {Entry} entry
   */
  withdraw(entry) {
    entry.cancelled = true
    if (entry.retry !== null) this.refuse(entry, WITHDRAWN)
  }

  /**
   * Cancels all rollouts of an entry.
   * @param {Entry} entry
   */
  cancel(entry) {
    this.withdraw(entry)
    if (entry.state !== 'ended') this.parts.outbox.cancel(entry)
  }

  /**
   * It will not run: its rollouts end here.
   * @param {Entry} entry
   * @param {Problem} problem
   */
  refuse(entry, problem) {
    entry.problem = problem
    const results = entry.refusedResults(this.parts.runId, problem)
    this.parts.ledger.end(entry)
    entry.sink.refuse(problem, results)
    entry.settle()
    this.parts.onRoom()
  }

  /**
   * Nothing more will come: everybody who waits is told.
   * @param {Error} error
   */
  fail(error) {
    for (const entry of this.parts.ledger.entries()) {
      entry.stopRetry()
      entry.sink.fail(error)
      entry.settle()
    }
    this.parts.inbox.fail(error)
    this.parts.onRoom()
  }

  /** @param {Record<string, any>} event */
  #onEvent(event) {
    this.progressed = true
    const cursor = numberOf(event.cursor)
    if (cursor > 0) {
      this.#missedEvents -= 1
      const last = this.#missedEvents <= 0
      const known = cursor <= this.#cursor
      this.#cursor = Math.max(this.#cursor, cursor)
      if (!known) this.#onNews(event, cursor)
      if (last) this.resubmit()
    } else this.#onNews(event, cursor)
  }

  /**
   * @param {Record<string, any>} event
   * @param {number} cursor
   */
  #onNews(event, cursor) {
    if (event.finished) this.#onFinished(cursor, event.finished)
    else if (event.accepted) this.#onAccepted(event.accepted)
    else if (event.rejected) this.#onRejected(event.rejected)
    else if (event.progress) this.#onProgress(event.progress)
    else if (event.notice) this.parts.onNotice(/** @type {Notice} */ (fromMessage(NOTICE, event.notice)))
    // The end of a group, or a kind that this client does not know: nobody has to deal with it.
    else if (cursor > 0) this.parts.outbox.passed(cursor)
  }

  /**
   * @param {number} cursor
   * @param {Record<string, any>} message
   */
  #onFinished(cursor, message) {
    const { ledger, outbox, inbox, onRoom } = this.parts
    const { rolloutId } = message
    const { arrival, entry } = ledger.arrive(rolloutId)
    if (arrival === 'repeated' && !outbox.acknowledgements.isOpen(rolloutId)) {
      outbox.passed(cursor)
      outbox.acknowledge({ rolloutId })
      return
    }
    outbox.acknowledgements.arrived(cursor, rolloutId)
    if (arrival === 'repeated') return
    const result = resultOf(message)
    if (entry === undefined) {
      ledger.remember(rolloutId)
      inbox.put(result)
      return
    }
    if (entry.acceptance === null) {
      // It was accepted on a stream that broke.
      const { rolloutId, message } = entry
      entry.acceptance = /** @type {any} */ (fromMessage(ACCEPTED, ACCEPTED.create({ ...message, rolloutId, attached: true })))
      entry.settle()
    }
    entry.sink.deliver(result)
    onRoom()
  }

  /** @param {Record<string, any>} message */
  #onAccepted(message) {
    const entry = this.parts.ledger.get(message.rolloutId)
    if (entry === undefined || entry.retry !== null) return // its results came first, or another of its samples was refused for now
    this.parts.ledger.accept(entry)
    entry.acceptance ??= /** @type {any} */ (fromMessage(ACCEPTED, message))
    entry.settle()
    this.parts.onRoom()
  }

  /** @param {Record<string, any>} message */
  #onRejected(message) {
    const { kind, rolloutId, error } = fromMessage(REJECTED, message)
    const refusal = problemOfError(error)
    if (kind !== 'submission') {
      this.parts.warn(`rolloutd refused the ${kind} of ${rolloutId}: ${textOf(refusal)}`)
      return
    }
    const entry = this.parts.ledger.get(rolloutId)
    if (entry === undefined || entry.retry !== null) return // ended or tried again already, because of another of its samples
    if (refusal.code !== 'RESOURCE_EXHAUSTED') {
      this.refuse(entry, refusal)
      return
    }
    const delay = Math.max(refusal.retryAfterSeconds, LATER_SECONDS) * (1 + Math.random() / 4)
    if (entry.cancelled) this.refuse(entry, WITHDRAWN)
    else if (now() + delay > entry.giveUpAt) this.refuse(entry, refusal)
    else {
      this.parts.ledger.unaccept(entry)
      entry.retry = setTimeout(() => {
        entry.retry = null
        this.parts.outbox.submit(entry)
      }, delay * 1000)
    }
  }

  /** @param {Record<string, any>} message */
  #onProgress(message) {
    const entry = this.parts.ledger.get(message.rolloutId)
    entry?.onProgress?.(/** @type {any} */ (fromMessage(PROGRESS, message)))
  }
}
