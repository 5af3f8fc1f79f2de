/**
 * What is to be sent, cut into messages.
 *
 * Invariants: one message holds at most what the server's limits and ours allow, except that a single submission may exceed ours;
 * within a message and between messages a submission goes before its cancellation. Nothing is dropped: what a broken stream may have
 * lost is put back by `reattached` and `resubmit`. What this does not know: the stream.
 */

import { Acknowledgements } from './acknowledgements.js'
import { numberOf } from './contract.js'
import { problem } from './errors.js'

const MAX_ITEMS_PER_MESSAGE = 512 // past some hundred items a message gains nothing and delays what is behind it
const MAX_MESSAGE_BYTES = 1024 * 1024 // several messages fit an HTTP/2 window, so that the peer works while we send
const FRAME_BYTES = 16 // tag and length of one item, generously

/** @typedef {import('./ledger.js').Entry} Entry */

export class Outbox {
  acknowledgements = new Acknowledgements()
  #entries = /** @type {Entry[]} */ ([])
  #cancelled = /** @type {Entry[]} */ ([])
  #maxItems = MAX_ITEMS_PER_MESSAGE
  #serverMaxBytes = 0

  /** @param {() => void} onSomething called whenever there is something to send */
  constructor(onSomething) {
    this.onSomething = onSomething
  }

  /** Whether nothing is to be sent. */
  get empty() {
    return this.#entries.length === 0 && this.#cancelled.length === 0 && !this.acknowledgements.pending
  }

  /** Whether waiting for more would not make the next message any bigger. */
  get fullMessage() {
    return this.#entries.length >= this.#maxItems
  }

  /** @param {Entry} entry */
  submit(entry) {
    this.#entries.push(entry)
    this.onSomething()
  }

  /**
   * Send the cancellation of all its rollouts, after its submission.
   * @param {Entry} entry
   */
  cancel(entry) {
    entry.cancelled = true
    this.#cancelled.push(entry)
    this.onSomething()
  }

  /**
   * The caller has dealt with a result.
   * @param {import('./acknowledgements.js').Acknowledgement} acknowledgement
   */
  acknowledge(acknowledgement) {
    this.acknowledgements.acknowledge(acknowledgement)
    this.onSomething()
  }

  /**
   * A durable event that needs nobody arrived.
   * @param {number} cursor
   */
  passed(cursor) {
    this.acknowledgements.passed(cursor)
    this.onSomething()
  }

  /**
   * A new stream is open: send acknowledgements again that the old one may have lost. Submissions follow by `resubmit`.
   * @param {Record<string, any>} attached
   */
  reattached(attached) {
    const limits = attached.server?.limits
    this.#maxItems = Math.min(MAX_ITEMS_PER_MESSAGE, limits?.maxItemsPerMessage || MAX_ITEMS_PER_MESSAGE)
    this.#serverMaxBytes = numberOf(limits?.maxMessageBytes ?? 0)
    this.acknowledgements.reattached(numberOf(attached.cursor))
    this.#entries = []
    this.#cancelled = []
  }

  /**
   * Send all of these, before what was submitted since, and the cancellations of those that were cancelled.
   * @param {Entry[]} entries
   */
  resubmit(entries) {
    this.#entries.unshift(...entries)
    this.#cancelled.push(...entries.filter((entry) => entry.cancelled))
    this.onSomething()
  }

  /** The next message (null: nothing after all), and entries that cannot be sent with the reason. */
  nextMessage() {
    const submissions = /** @type {Record<string, any>[]} */ ([])
    const unsendable = /** @type {{ entry: Entry, problem: import('./errors.js').Problem }[]} */ ([])
    const maxBytes = Math.min(MAX_MESSAGE_BYTES, this.#serverMaxBytes || MAX_MESSAGE_BYTES)
    let sizeBytes = 0
    let looked = 0
    while (looked < this.#entries.length && submissions.length < this.#maxItems) {
      const entry = this.#entries[looked]
      if (submissions.length > 0 && sizeBytes + entry.sizeBytes + FRAME_BYTES > maxBytes) break
      looked += 1
      if (entry.state !== 'waiting') continue
      if (this.#serverMaxBytes !== 0 && entry.sizeBytes + FRAME_BYTES > this.#serverMaxBytes) {
        const message = `a submission of ${entry.sizeBytes} bytes does not fit the server's max_message_bytes of ${this.#serverMaxBytes}`
        unsendable.push({ entry, problem: problem('INVALID_ARGUMENT', 'INVALID_ARGUMENT', message) })
        continue
      }
      entry.state = 'sent'
      submissions.push(entry.message)
      sizeBytes += entry.sizeBytes + FRAME_BYTES
    }
    this.#entries.splice(0, looked)
    const cancelRolloutIds = /** @type {string[]} */ ([])
    while (this.#cancelled.length > 0 && submissions.length + cancelRolloutIds.length < this.#maxItems && this.#entries.length === 0) {
      const entry = /** @type {Entry} */ (this.#cancelled.shift())
      if (entry.state !== 'ended') cancelRolloutIds.push(entry.rolloutId)
    }
    const room = this.#maxItems - submissions.length - cancelRolloutIds.length
    const { acknowledgements, through } = this.acknowledgements.take(room)
    const items = submissions.length + cancelRolloutIds.length + acknowledgements.length
    const message = { submissions, cancelRolloutIds, acknowledgements, acknowledgeThroughCursor: through }
    return { message: items > 0 || through > 0 ? message : null, unsendable }
  }
}
