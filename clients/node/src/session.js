/**
 * One gRPC stream, from hello to its end.
 *
 * Invariants: it ends once, with a problem that another session may get over or an error that none does; after `stop` nothing is read
 * or written. What this does not know: what is said on it.
 */

/** @typedef {import('@grpc/grpc-js').ClientDuplexStream<Record<string, any>, Record<string, any>>} Call */
/** @typedef {import('./errors.js').Problem} Problem */

export class Session {
  over = false
  blocked = false // the transport holds enough
  saidGoodbye = false
  lastSentAt = 0
  sendTimer = /** @type {NodeJS.Timeout | null} */ (null)
  replayTimer = /** @type {NodeJS.Timeout | undefined} */ (undefined)

  /** @param {Call} call */
  constructor(call) {
    this.call = call
    /** @type {(problem: Problem) => void} */
    this.end = () => {}
    /** @type {(error: any) => void} */
    this.fail = () => {}
    this.ended = /** @type {Promise<Problem>} */ (
      new Promise((resolve, reject) => {
        this.end = resolve
        this.fail = reject
      })
    )
    /** @type {() => void} */
    this.onSaid = () => {}
    /** Everything that was pending has been handed to the transport. */
    this.said = /** @type {Promise<void>} */ (
      new Promise((resolve) => {
        this.onSaid = resolve
      })
    )
  }

  /** Half-closes, after all that was written. */
  goodbye() {
    this.saidGoodbye = true
    this.call.end()
    this.onSaid()
  }

  /** Nothing more is read or written. */
  stop() {
    this.over = true
    if (this.sendTimer !== null) clearTimeout(this.sendTimer)
    clearTimeout(this.replayTimer)
    this.call.resume() // a paused stream would keep what it holds
    this.call.cancel()
  }
}
