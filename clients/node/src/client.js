/**
 * The client: `connect` and what can be done with it.
 *
 * Invariants: every rollout submitted here ends exactly once for the caller, in `results()` (or `drain()`) if it came by `submit`, else
 * in what `generateGroup` or `generate` resolves to or rejects with; a submission that the server refuses ends there too, as results
 * with outcome "refused". With autoAcknowledge the server forgets a result as soon as the caller has it in hand; without, it keeps it
 * until `acknowledge` says what became of it. What this does not know: gRPC (stream.js, connection.js).
 */

import { Connection } from './connection.js'
import { toMessage, typeOf } from './contract.js'
import { ClientClosed, Refused, RolloutFailed } from './errors.js'
import { Collector, discard } from './inbox.js'
import { Entry } from './ledger.js'
import { RolloutStream } from './stream.js'
import { submissionOf } from './submissions.js'

const RECONNECT_SECONDS = 120 // a restart of the server takes seconds, a rescheduled pod a minute or two
const MAX_UNACCEPTED = 4096 // as the server's default queue per class
const MAX_BUFFERED_RESULTS = 1024
const [UNSPECIFIED, USED, DROPPED] = [0, 1, 2] // Verdict
const HELLO = typeOf('Hello')

/** @typedef {import('./results.js').RolloutResult} RolloutResult */
/** @typedef {import('./submissions.js').RolloutOptions} RolloutOptions */
/** @typedef {import('./submissions.js').Prompt} Prompt */
/** @typedef {import('./ledger.js').Progress} Progress */

/**
 * @typedef {object} ConnectOptions
 * @property {string} run the training job
 * @property {string} [consumer] name of this trainer rank within the run, the same after a restart of the rank: unacknowledged results
 *   of its earlier life come again in `results()`. Left out: no stream is opened, and only the control calls work
 * @property {number} [epoch] incarnation of the trainer; a higher one fences lower ones out. Left out: 0 on the stream, and unfenced
 *   control calls
 * @property {string[]} [takeOver] consumers whose results and unfinished rollouts pass to this one
 * @property {boolean} [autoAcknowledge] true unless said otherwise
 * @property {string} [apiKey] key of this trainer, where the server asks for one
 * @property {import('./connection.js').Tls | true} [tls] true: TLS with the system's certificates
 * @property {number} [reconnectSeconds] how long a server may be away before everything that waits rejects (120)
 * @property {number} [maxUnaccepted] submissions the server has not answered, above which `submit` waits (4096)
 * @property {number} [maxBufferedResults] results waiting in `results()`, above which the stream is not read on unless something else
 *   waits (1024)
 * @property {(notice: import('./dispatch.js').Notice) => void} [onNotice] called with each notice; an exception of it ends the client
 * @property {(text: string) => void} [warn] told of outages and refused acknowledgements; console.warn unless said otherwise
 */

/**
 * Limits of one class or task type within a budget.
 * @typedef {{ maxRunningRollouts?: number, share?: number, floorRollouts?: number }} Quota
 */

/**
 * @typedef {object} Budget
 * @property {number} [maxRunningRollouts]
 * @property {number} [maxKvTokens]
 * @property {number} [trainingReservedMb]
 * @property {number} [maxInferenceMb]
 * @property {(Quota & { rolloutClass: 'critical' | 'reusable' | 'background' })[]} [classes]
 * @property {(Quota & { taskType: 'generation' | 'reward' | 'state_query' | 'replay' })[]} [tasks]
 * @property {number} [leaseSeconds] 0 or left out: until replaced
 */

/**
 * @typedef {object} StepReport
 * @property {'training' | 'waiting' | 'syncing' | 'paused'} [trainerState]
 * @property {number} [samplesNeeded]
 * @property {number} [consumeSamplesPerSecond]
 * @property {number} [consumeTokensPerSecond]
 * @property {number} [policyEntropy]
 * @property {number} [bufferFill]
 * @property {number} [updatePeriodSeconds]
 * @property {number} [stepSeconds]
 */

/**
 * A client, once it is attached.
 *
 * Rejects with ServerUnavailable, Unauthorized, Refused or Fenced when that does not come about.
 * @param {string} target gRPC address, e.g. "127.0.0.1:50051" or "dns:///rolloutd.svc:50051"
 * @param {ConnectOptions} options
 */
export async function connect(target, options) {
  const client = new Client(target, options)
  await client.start()
  return client
}

/** One consumer of one run. Made by `connect`. */
export class Client {
  #connection
  #hello
  #options
  #stream = /** @type {RolloutStream | null} */ (null)
  #closed = /** @type {Promise<void> | null} */ (null)

  /**
   * @param {string} target
   * @param {ConnectOptions} options
   */
  constructor(target, options) {
    const { run, consumer = '', epoch, takeOver = [], apiKey, tls, reconnectSeconds = RECONNECT_SECONDS } = options
    const { maxUnaccepted = MAX_UNACCEPTED, maxBufferedResults = MAX_BUFFERED_RESULTS } = options
    if (!run) throw new TypeError('connect(target, { run }) must name the run, i.e. the training job')
    if (!(maxUnaccepted >= 1 && maxBufferedResults >= 1)) throw new RangeError('maxUnaccepted and maxBufferedResults are at least 1')
    this.run = run
    this.epoch = epoch
    this.autoAcknowledge = options.autoAcknowledge ?? true
    this.#options = { maxUnaccepted, maxBufferedResults, onNotice: options.onNotice ?? (() => {}), warn: options.warn ?? console.warn }
    this.#hello = { ...toMessage(HELLO, { runId: run, consumerId: consumer, trainerEpoch: epoch, takeOverConsumerIds: takeOver }), runId: run }
    this.#connection = new Connection({ target, apiKey, tls, reconnectSeconds })
    if (consumer) this.#stream = new RolloutStream({ access: this.#connection.access, hello: this.#hello, ...this.#options })
  }

  /** Attaches. Called by `connect`. */
  async start() {
    try {
      await this.#stream?.start()
    } catch (error) {
      await this.close()
      throw error
    }
  }

  /** Sends what is pending and closes; unfinished rollouts go on or not by the run's on_disconnect. Once is enough. */
  close() {
    this.#closed ??= (async () => {
      try {
        await this.#stream?.close()
      } finally {
        this.#connection.close()
      }
    })()
    return this.#closed
  }

  /** For `await using`. */
  [Symbol.asyncDispose]() {
    return this.close()
  }

  /**
   * Hands a prompt over; results come in `results()`.
   *
   * Resolves without waiting for the server, unless `maxUnaccepted` submissions (or 64 MiB of them) are unanswered; then it waits, which
   * is the back-pressure of a full queue. TypeError or RangeError for what cannot be sent, and what ended the client, if anything did.
   * @param {Prompt} prompt
   * @param {RolloutOptions & { onProgress?: (progress: Progress) => void }} options
   */
  async submit(prompt, options) {
    const stream = this.#attached
    const entry = await this.#submit(prompt, stream.inbox, options)
    return {
      /** Id of the submission; with several samples it names all of them. */
      rolloutId: entry.rolloutId,
      /** Ids of its rollouts, by sample index. */
      rolloutIds: entry.rolloutIds,
      /** The server's answer; Refused when that is no. Waiting for it is never needed. */
      accepted: () => stream.acceptance(entry)
    }
  }

  /**
   * All samples of a prompt, by sample index, whatever their outcomes (look at `complete`). Refused when none ever ran. Aborting the
   * signal cancels the rollouts and rejects with its reason.
   * @param {Prompt} prompt
   * @param {RolloutOptions & { onProgress?: (progress: Progress) => void, signal?: AbortSignal }} options
   * @returns {Promise<RolloutResult[]>}
   */
  async generateGroup(prompt, { signal, ...options }) {
    signal?.throwIfAborted()
    const stream = this.#attached
    const collector = new Collector()
    const entry = await this.#submit(prompt, collector, options)
    const abort = () => {
      entry.sink = discard((result) => this.#forget(result))
      for (const result of collector.arrived) this.#forget(result)
      stream.dispatch.cancel(entry)
      collector.fail(signal?.reason)
    }
    signal?.addEventListener('abort', abort, { once: true })
    if (signal?.aborted) abort()
    try {
      const results = await stream.waiting(collector.done)
      if (this.autoAcknowledge) for (const result of results) this.#forget(result)
      return results
    } finally {
      signal?.removeEventListener('abort', abort)
    }
  }

  /**
   * One rollout from prompt to result. RolloutFailed when it ends without completing, Refused when it never ran.
   * @param {Prompt} prompt
   * @param {Omit<RolloutOptions, 'samples' | 'seeds'> & { onProgress?: (progress: Progress) => void, signal?: AbortSignal }} options
   */
  async generate(prompt, options) {
    const [result] = await this.generateGroup(prompt, options)
    if (result.outcome !== 'completed') throw new RolloutFailed(result)
    return result
  }

  /** Every result of `submit`, as it comes, without end; also those of this consumer's earlier life and of taken-over ones. */
  results() {
    return this.#iterate(false)
  }

  /** As results(), but ends once everything submitted so far by `submit` has come. */
  drain() {
    return this.#iterate(true)
  }

  /**
   * Says what became of a result (or rollout id), so that the server forgets it. Sent with the next message.
   * @param {RolloutResult | string} result
   * @param {object} [verdict]
   * @param {boolean} [verdict.used] true counts it as a valid sample, false as dropped
   * @param {string} [verdict.dropReason] a short stable word; goes with used: false
   * @param {number} [verdict.reward]
   */
  acknowledge(result, { used, dropReason, reward } = {}) {
    if (this.autoAcknowledge) throw new TypeError('results are acknowledged automatically here; connect(target, { autoAcknowledge: false })')
    if (dropReason && used !== false) throw new TypeError('dropReason goes with used: false')
    if (reward !== undefined && !Number.isFinite(reward)) throw new RangeError(`reward must be finite, not ${reward}`)
    const stream = this.#attached
    stream.raiseFailure()
    const verdict = used === undefined ? UNSPECIFIED : used ? USED : DROPPED
    const rolloutId = typeof result === 'string' ? result : result.rolloutId
    stream.acknowledge({ rolloutId, ...(verdict && { verdict }), ...(dropReason && { dropReason }), ...(reward !== undefined && { reward }) })
  }

  /**
   * Cancels rollouts, submissions (by their id) or groups, with everything below them in a tree search. Each rollout still ends with one
   * result, of outcome "cancelled" unless it was faster.
   * @param {string | string[]} rolloutIds
   * @param {{ groupIds?: string[] }} [also]
   * @returns {Promise<{ cancelledRollouts: number, finishedRollouts: number, unknownIds: string[] }>}
   */
  async cancel(rolloutIds, { groupIds = [] } = {}) {
    const remote = []
    let endedHere = 0
    for (const id of [rolloutIds].flat()) {
      const entry = this.#stream?.entry(id)
      if (entry !== undefined && (await this.#withdrawn(entry, id === entry.rolloutId))) endedHere += entry.rolloutIds.length
      else remote.push(id)
    }
    const request = { runId: this.run, trainerEpoch: this.epoch, rolloutIds: remote, groupIds }
    const nothing = { cancelledRollouts: 0, finishedRollouts: 0, unknownIds: [] }
    const asked = remote.length > 0 || groupIds.length > 0
    const answer = /** @type {typeof nothing} */ (asked ? await this.call('RolloutService', 'CancelRollouts', request) : nothing)
    return { ...answer, cancelledRollouts: answer.cancelledRollouts + endedHere }
  }

  /**
   * Changes rollouts that have not ended; the answer's `rejected` names those that could not be changed.
   * @param {string | string[]} rolloutIds
   * @param {{ rolloutClass?: RolloutOptions['rolloutClass'], deadlineSeconds?: number, neededByStep?: number }} change
   */
  async update(rolloutIds, change) {
    for (const id of [rolloutIds].flat()) {
      const entry = this.#stream?.entry(id)
      if (entry !== undefined) await this.#answered(entry)
    }
    const updates = [rolloutIds].flat().map((rolloutId) => ({ rolloutId, ...change }))
    return this.call('RolloutService', 'UpdateRollouts', { runId: this.run, trainerEpoch: this.epoch, updates })
  }

  /**
   * Replaces the whole budget: what is left out falls back to the server's default. In force when it resolves.
   * @param {Budget} budget
   */
  setBudget(budget) {
    return this.call('TrainerService', 'SetBudget', { runId: this.run, trainerEpoch: this.epoch, budget })
  }

  /**
   * Where training is and what it needs next. Rollouts needed by this step or an earlier one become critical.
   * @param {number} step
   * @param {StepReport} [report]
   */
  reportStep(step, report = {}) {
    return this.call('TrainerService', 'ReportStep', { runId: this.run, trainerEpoch: this.epoch, step, ...report })
  }

  /**
   * Any other unary call of the contract, for example call('RunService', 'PauseRun', { runId }). Fields are named as in the .proto files,
   * in camelCase, and so are those of the answer; enums are short lower-case words.
   * @param {'RolloutService' | 'RunService' | 'TrainerService' | 'EngineService'} service
   * @param {string} method
   * @param {Record<string, unknown>} request
   */
  call(service, method, request) {
    return this.#connection.call(service, method, request)
  }

  /** @returns {RolloutStream} */
  get #attached() {
    if (this.#stream === null) throw new ClientClosed('this client has no stream; name its consumer: connect(target, { run, consumer })')
    return this.#stream
  }

  /**
   * @param {Prompt} prompt
   * @param {import('./ledger.js').Sink} sink
   * @param {RolloutOptions & { onProgress?: (progress: Progress) => void }} options
   */
  async #submit(prompt, sink, { onProgress, ...options }) {
    const entry = new Entry(submissionOf(prompt, options, onProgress !== undefined), sink, onProgress)
    await this.#attached.submit(entry)
    return entry
  }

  /**
   * @param {boolean} untilIdle
   * @returns {AsyncIterableIterator<RolloutResult>}
   */
  #iterate(untilIdle) {
    const { inbox } = this.#attached
    /** @type {AsyncIterableIterator<RolloutResult>} */
    const iterator = {
      [Symbol.asyncIterator]: () => iterator,
      next: async () => {
        const result = await inbox.take(untilIdle)
        if (result === null) return { done: true, value: undefined }
        if (this.autoAcknowledge) this.#forget(result)
        return { done: false, value: result }
      }
    }
    return iterator
  }

  /** @param {RolloutResult} result */
  #forget({ rolloutId, outcome }) {
    if (outcome !== 'refused') this.#attached.acknowledge({ rolloutId }) // the server has no result of those
  }

  /** @param {Entry} entry */
  async #answered(entry) {
    try {
      await this.#attached.acceptance(entry)
    } catch (error) {
      if (!(error instanceof Refused)) throw error // refused before it could be changed: the caller gets that as its result
    }
  }

  /**
   * @param {Entry} entry
   * @param {boolean} whole
   */
  async #withdrawn(entry, whole) {
    if (whole) this.#attached.dispatch.withdraw(entry)
    await this.#answered(entry)
    return entry.problem?.code === 'CANCELLED'
  }
}
