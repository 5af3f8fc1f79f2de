/**
 * Which results the caller has dealt with, and what of that the server must still be told.
 *
 * Durable events carry rising cursors. An event is open from its arrival until the caller has dealt with it. The watermark is the
 * newest cursor up to which nothing is open; one number acknowledges everything up to it. Results dealt with out of order are
 * acknowledged by id, and so are verdicts.
 *
 * Invariants: the watermark never passes an open event; an acknowledgement that may have been lost with a broken stream is sent again
 * on the next one (unknown ids have no effect at the server), a verdict before anything makes the server forget what it is about.
 * Memory is bounded by the results the server keeps for us plus RESENT_VERDICTS. What this does not know: streams, time.
 */

const RESENT_VERDICTS = 4096 // newest verdicts sent again after a reconnect; older ones have long been applied

/** @typedef {{ rolloutId: string, verdict?: number, dropReason?: string, reward?: number }} Acknowledgement */

/** @typedef {{ message: Acknowledgement, cursor: number }} Told cursor 0: not known */

export class Acknowledgements {
  #arrived = /** @type {number[]} */ ([]) // cursors above the watermark, rising
  #open = /** @type {Map<string, number>} */ (new Map()) // rollout id to cursor
  #dealt = /** @type {Map<number, string>} */ (new Map()) // cursor above the watermark to rollout id, "" for no result
  #toSend = /** @type {Map<string, Told>} */ (new Map())
  #verdicts = /** @type {Told[]} */ ([]) // sent on this stream
  #watermark = 0
  #sentWatermark = 0

  /** Where a new stream resumes: the server may forget, without verdict, everything up to it. */
  get resumeCursor() {
    let cursor = this.#watermark
    for (const told of [...this.#verdicts, ...this.#toSend.values()]) {
      if (told.cursor !== 0 && hasVerdict(told)) cursor = Math.min(cursor, told.cursor - 1)
    }
    return cursor
  }

  /** Whether there is anything to tell the server. */
  get pending() {
    return this.#toSend.size > 0 || this.#watermark > this.#sentWatermark
  }

  /**
   * A result arrived and is open. Cursors must rise. The same result under a new cursor replaces the old event.
   * @param {number} cursor
   * @param {string} rolloutId
   */
  arrived(cursor, rolloutId) {
    const superseded = this.#open.get(rolloutId)
    this.#arrived.push(cursor)
    this.#open.set(rolloutId, cursor)
    if (superseded !== undefined) {
      this.#dealt.set(superseded, '')
      this.#advance()
    }
  }

  /**
   * Whether a result arrived and the caller has not dealt with it.
   * @param {string} rolloutId
   */
  isOpen(rolloutId) {
    return this.#open.has(rolloutId)
  }

  /**
   * A durable event that nobody has to deal with arrived.
   * @param {number} cursor
   */
  passed(cursor) {
    this.#arrived.push(cursor)
    this.#dealt.set(cursor, '')
    this.#advance()
  }

  /**
   * The caller has dealt with a result. With a verdict it is told by id; without, the watermark may do.
   * @param {Acknowledgement} message
   */
  acknowledge(message) {
    const told = { message, cursor: this.#open.get(message.rolloutId) ?? 0 }
    this.#open.delete(message.rolloutId)
    if (told.cursor !== 0) {
      this.#dealt.set(told.cursor, message.rolloutId)
      this.#advance()
    }
    if (hasVerdict(told) || told.cursor === 0 || told.cursor > this.#watermark) this.#toSend.set(message.rolloutId, told)
  }

  /**
   * At most `limit` acknowledgements to send now, and the cursor to acknowledge through (0: no news).
   * @param {number} limit
   */
  take(limit) {
    const acknowledgements = /** @type {Acknowledgement[]} */ ([])
    for (const [rolloutId, told] of this.#toSend) {
      if (acknowledgements.length >= limit) break
      this.#toSend.delete(rolloutId)
      if (hasVerdict(told)) this.#verdicts.push(told)
      acknowledgements.push(told.message)
    }
    if (this.#verdicts.length > 2 * RESENT_VERDICTS) this.#verdicts = this.#verdicts.slice(-RESENT_VERDICTS)
    // A watermark ahead of its verdicts would make the server forget what they are about.
    if (this.#toSend.size > 0 || this.#watermark === this.#sentWatermark) return { acknowledgements, through: 0 }
    this.#sentWatermark = this.#watermark
    return { acknowledgements, through: this.#watermark }
  }

  /**
   * A new stream is open; `newest` is the newest cursor that the server says it has sent us.
   *
   * Queues again what the old stream may have lost. A cursor below ours means the server lost events: their cursors will name others,
   * and what we still have of them is acknowledged by id.
   * @param {number} newest
   */
  reattached(newest) {
    const again = new Map(this.#verdicts.map((told) => [told.message.rolloutId, told]))
    for (const [cursor, rolloutId] of this.#dealt) {
      if (rolloutId !== '' && !again.has(rolloutId)) again.set(rolloutId, { message: { rolloutId }, cursor })
    }
    for (const [rolloutId, told] of this.#toSend) again.set(rolloutId, told)
    for (const [rolloutId, told] of again) if (told.cursor > newest) again.set(rolloutId, { ...told, cursor: 0 })
    this.#verdicts = []
    this.#toSend = again
    this.#sentWatermark = 0
    this.#watermark = Math.min(this.#watermark, newest)
    this.#arrived = this.#arrived.filter((cursor) => cursor <= newest)
    for (const cursor of this.#dealt.keys()) if (cursor > newest) this.#dealt.delete(cursor)
    for (const [rolloutId, cursor] of this.#open) if (cursor > newest) this.#open.delete(rolloutId)
  }

  #advance() {
    let passed = 0
    while (passed < this.#arrived.length && this.#dealt.has(this.#arrived[passed])) {
      this.#watermark = this.#arrived[passed]
      this.#dealt.delete(this.#watermark)
      passed += 1
    }
    if (passed > 0) this.#arrived.splice(0, passed)
  }
}

/** @param {Told} told */
function hasVerdict({ message }) {
  return message.verdict !== undefined || message.reward !== undefined
}
