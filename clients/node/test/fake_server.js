/**
 * A server of the SubmitRollout stream that does what a test tells it: it accepts submissions, ends rollouts when asked, keeps results
 * until they are acknowledged, sends again what a new stream has missed, and can be cut, stopped, or made to repeat itself.
 */

import { EventEmitter, once } from 'node:events'
import grpc from '@grpc/grpc-js'
import { methodOf, numberOf } from '../src/contract.js'
import { memberIds } from '../src/submissions.js'
import { bytesOfTokens } from '../src/tokens.js'

const STREAM = methodOf('RolloutService', 'SubmitRollout')
const CANCEL = methodOf('RolloutService', 'CancelRollouts')
const ACCEPTED_STATE_QUEUED = 1
const OUTCOME_COMPLETED = 1
const OUTCOME_CANCELLED = 2

export class FakeServer extends EventEmitter {
  port = 0
  hellos = []
  keys = []
  messages = []
  acknowledgements = []
  starts = new Map() // rollout id to how often it was started
  rollouts = new Map() // unfinished: id to submission
  kept = new Map() // cursor to event
  newest = 0
  stream = null
  finishAtOnce = true
  refusals = [] // errors for the next submissions
  helloStatus = null // status that answers every hello
  pad = 0 // tokens of each result

  get target() {
    return `127.0.0.1:${this.port}`
  }

  async start(credentials = grpc.ServerCredentials.createInsecure()) {
    this.server = new grpc.Server({ 'grpc.max_receive_message_length': -1 })
    const definition = (method, streams) => ({
      path: method.path,
      requestStream: streams,
      responseStream: streams,
      requestSerialize: (value) => method.request.encode(value).finish(),
      requestDeserialize: (bytes) => method.request.decode(bytes),
      responseSerialize: (value) => method.response.encode(value).finish(),
      responseDeserialize: (bytes) => method.response.decode(bytes)
    })
    this.server.addService(
      { submit: definition(STREAM, true), cancel: definition(CANCEL, false) },
      { submit: (call) => this.#serve(call), cancel: (call, answer) => answer(null, { unknownIds: call.request.rolloutIds }) }
    )
    this.port = await new Promise((resolve, reject) =>
      this.server.bindAsync(this.target, credentials, (error, port) => (error ? reject(error) : resolve(port)))
    )
  }

  /** As a kill: connections break. With `forget` its memory is gone too. */
  async stop({ forget = false } = {}) {
    this.server.forceShutdown()
    this.stream = null
    if (!forget) return
    this.rollouts.clear()
    this.kept.clear()
    this.newest = 0
  }

  /** Ends the stream with a status. */
  cut(code = grpc.status.UNAVAILABLE, reason = 'cut by the test', metadata = undefined) {
    const stream = this.stream
    this.stream = null
    stream.emit('error', { code, details: reason, metadata })
  }

  /** Ends a rollout. */
  finish(rolloutId, outcome = OUTCOME_COMPLETED) {
    const sampleIndex = Number(rolloutId.split('/')[1] ?? 0)
    if (!this.rollouts.delete(rolloutId)) throw new Error(`${rolloutId} is not running`)
    const tokenBytes = bytesOfTokens(new Uint32Array(this.pad).fill(7))
    this.durable({ finished: { rolloutId, outcome, complete: outcome === OUTCOME_COMPLETED, sampleIndex, tokenBytes } })
    this.emit('finish')
  }

  /** Sends a durable event, or keeps it until somebody attaches. */
  durable(event) {
    this.newest += 1
    const numbered = { cursor: this.newest, ...event }
    this.kept.set(this.newest, numbered)
    this.send(numbered)
    return numbered
  }

  send(event) {
    this.stream?.write({ events: [event] })
  }

  /** Resolves once `condition` holds; looked at after each message, stream and event. */
  async until(condition) {
    while (!condition()) await once(this, 'news')
  }

  keptIds() {
    return [...this.kept.values()].flatMap(({ finished }) => (finished ? [finished.rolloutId] : []))
  }

  #serve(call) {
    this.keys.push(call.metadata.get('authorization')[0])
    call.on('error', () => {})
    call.on('cancelled', () => this.#gone(call))
    call.on('data', (message) => {
      if (message.hello) this.#attach(call, message.hello)
      else this.#take(message)
      this.emit('news')
    })
    call.on('end', () => {
      this.#gone(call)
      call.end()
    })
  }

  #gone(call) {
    if (this.stream === call) this.stream = null
    this.emit('news')
  }

  #attach(call, hello) {
    this.hellos.push(hello)
    if (this.helloStatus !== null) {
      call.emit('error', this.helloStatus)
      return
    }
    this.stream = call
    this.#forgetThrough(numberOf(hello.resumeCursor))
    const missed = [...this.kept.values()]
    const attached = { cursor: this.newest, pendingEvents: missed.length, server: { limits: {} } }
    call.write({ events: [{ attached }] })
    for (const event of missed) this.send(event)
  }

  #take(message) {
    this.messages.push(message)
    for (const submission of message.submissions) this.#submit(submission)
    for (const id of message.cancelRolloutIds) {
      for (const [rolloutId, { message }] of [...this.rollouts]) if (message.rolloutId === id) this.finish(rolloutId, OUTCOME_CANCELLED)
    }
    for (const acknowledgement of message.acknowledgements) {
      this.acknowledgements.push(acknowledgement)
      for (const [cursor, { finished }] of this.kept) if (finished?.rolloutId === acknowledgement.rolloutId) this.kept.delete(cursor)
    }
    this.#forgetThrough(numberOf(message.acknowledgeThroughCursor))
  }

  #submit(message) {
    const error = this.refusals.shift()
    if (error !== undefined) {
      this.send({ rejected: { rolloutId: message.rolloutId, kind: 1, error } })
      return
    }
    for (const id of memberIds(message)) {
      const known = this.rollouts.has(id) || this.keptIds().includes(id)
      this.send({ accepted: { rolloutId: message.rolloutId, state: ACCEPTED_STATE_QUEUED, attached: known } })
      if (known) continue
      this.starts.set(id, (this.starts.get(id) ?? 0) + 1)
      this.rollouts.set(id, { message })
      if (this.finishAtOnce) this.finish(id)
    }
  }

  #forgetThrough(cursor) {
    for (const kept of this.kept.keys()) if (kept <= cursor) this.kept.delete(kept)
  }
}

/** A started fake server and `connect` to it; both closed when the test ends. */
export async function rig(test) {
  const { connect } = await import('../src/index.js')
  const server = new FakeServer()
  await server.start()
  const clients = []
  test.after(async () => {
    await Promise.all(clients.map((client) => client.close()))
    await server.stop()
  })
  return {
    server,
    connect: async (options = {}) => {
      const client = await connect(server.target, { run: 'r', consumer: 'c', warn: () => {}, ...options })
      clients.push(client)
      return client
    }
  }
}

/** All values of an async iterator. */
export async function all(iterator) {
  const values = []
  for await (const value of iterator) values.push(value)
  return values
}
