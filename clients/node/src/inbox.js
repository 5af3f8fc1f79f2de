/**
 * Results on their way to the caller: the shared buffer behind `results()`, and collectors behind `generateGroup()`.
 *
 * Invariants: a result leaves the buffer only into the hands of a caller; after a failure the buffered results can still be taken,
 * then every take rejects with it. What this does not know: acknowledgement.
 */

import { errorOf } from './errors.js'

/** @typedef {import('./results.js').RolloutResult} RolloutResult */
/** @typedef {import('./errors.js').Problem} Problem */

/** Buffer of results for whoever iterates `results()` or `drain()`. Also the sink of plain submissions. */
export class Inbox {
  #results = /** @type {RolloutResult[]} */ ([])
  #waiters = /** @type {{ untilIdle: boolean, resolve: (result: RolloutResult | null) => void, reject: (error: Error) => void }[]} */ ([])
  #failure = /** @type {Error | null} */ (null)
  #owed = 0

  /**
   * @param {number} capacity
   * @param {() => void} onTaken
   */
  constructor(capacity, onTaken) {
    this.capacity = capacity
    this.onTaken = onTaken
  }

  /** Whether it holds as much as it should. It takes more when somebody waits for other events of the stream. */
  get full() {
    return this.#results.length >= this.capacity
  }

  /** @param {number} rollouts */
  expect(rollouts) {
    this.#owed += rollouts
  }

  /**
   * A result that nobody here submitted: of an earlier incarnation, or taken over.
   * @param {RolloutResult} result
   */
  put(result) {
    this.#results.push(result)
    this.#serve()
  }

  /** @param {RolloutResult} result */
  deliver(result) {
    this.#owed -= 1
    this.put(result)
  }

  /**
   * Refused rollouts are results too, so that the caller's count comes out right.
   * @param {Problem} _problem
   * @param {RolloutResult[]} remaining
   */
  refuse(_problem, remaining) {
    for (const result of remaining) this.deliver(result)
  }

  /** @param {Error} error */
  fail(error) {
    this.#failure ??= error
    this.#serve()
  }

  /**
   * The next result, as soon as there is one. With `untilIdle`, null once nothing is expected any more.
   * @param {boolean} untilIdle
   * @returns {Promise<RolloutResult | null>}
   */
  take(untilIdle) {
    return new Promise((resolve, reject) => {
      this.#waiters.push({ untilIdle, resolve, reject })
      this.#serve()
    })
  }

  #serve() {
    let taken = 0
    while (this.#waiters.length > 0 && taken < this.#results.length) {
      this.#waiters.shift()?.resolve(this.#results[taken])
      taken += 1
    }
    if (taken > 0) {
      this.#results.splice(0, taken)
      this.onTaken()
    }
    if (this.#results.length > 0) return
    if (this.#owed === 0) {
      for (const waiter of this.#waiters.filter((waiter) => waiter.untilIdle)) waiter.resolve(null)
      this.#waiters = this.#waiters.filter((waiter) => !waiter.untilIdle)
    }
    if (this.#failure !== null) for (const waiter of this.#waiters.splice(0)) waiter.reject(this.#failure)
  }
}

/** The results of one submission, in sample order, for the one caller that waits for them. */
export class Collector {
  #missing = 0
  arrived = /** @type {RolloutResult[]} */ ([])

  constructor() {
    /** @type {(results: RolloutResult[]) => void} */
    this.resolve = () => {}
    /** @type {(error: Error) => void} */
    this.fail = () => {}
    /** All results by sample index. */
    this.done = /** @type {Promise<RolloutResult[]>} */ (
      new Promise((resolve, reject) => {
        this.resolve = resolve
        this.fail = reject
      })
    )
    this.done.catch(() => {}) // a caller that was aborted does not look
  }

  /** @param {number} rollouts */
  expect(rollouts) {
    this.#missing = rollouts
  }

  /** @param {RolloutResult} result */
  deliver(result) {
    this.arrived.push(result)
    this.#missing -= 1
    if (this.#missing === 0) this.resolve(this.arrived.sort((one, other) => one.sampleIndex - other.sampleIndex))
  }

  /**
   * Nothing ran: the caller gets an exception, unless the caller itself cancelled.
   * @param {Problem} problem
   * @param {RolloutResult[]} remaining
   */
  refuse(problem, remaining) {
    if (problem.code !== 'CANCELLED') this.fail(errorOf(problem))
    else for (const result of remaining) this.deliver(result)
  }
}

/**
 * For results whose caller has gone away: `onResult` acknowledges them, so that the server forgets them.
 * @param {(result: RolloutResult) => void} onResult
 * @returns {import('./ledger.js').Sink}
 */
export function discard(onResult) {
  return { expect() {}, deliver: onResult, refuse() {}, fail() {} }
}
