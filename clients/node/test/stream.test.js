// Rollouts over the stream: what the caller gets, what the server is told, and that neither side is flooded.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import grpc from '@grpc/grpc-js'
import { ClientClosed, Fenced, Refused, RolloutFailed, Unauthorized } from '../src/index.js'
import { tokensOfBytes } from '../src/tokens.js'
import { all, rig } from './fake_server.js'

test('a group comes back in sample order', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const client = await connect()
  const group = client.generateGroup([1, 2, 3], { samples: 3, rolloutId: 'g', maxNewTokens: 4 })
  await server.until(() => server.rollouts.size === 3)
  for (const id of ['g/2', 'g/0', 'g/1']) server.finish(id)
  assert.deepEqual((await group).map((result) => result.rolloutId), ['g/0', 'g/1', 'g/2'])
  await server.until(() => server.kept.size === 0)
})

test('prompts travel as little-endian bytes and options under their own names', async (t) => {
  const { server, connect } = await rig(t)
  const client = await connect({ epoch: 5, takeOver: ['old'] })
  await client.generate([1, 2 ** 32 - 1], { maxNewTokens: 4, temperature: 0, rolloutClass: 'reusable', seeds: [2n ** 62n] })
  await client.generate('words', { maxNewTokens: 4 })
  const [tokens, text] = server.messages.flatMap((message) => message.submissions)
  assert.deepEqual(tokensOfBytes(tokens.tokenBytes), Uint32Array.of(1, 2 ** 32 - 1))
  assert.deepEqual([tokens.sampling.maxNewTokens, tokens.sampling.temperature, tokens.rolloutClass], [4, 0, 2])
  assert.equal(String(tokens.seeds[0]), String(2n ** 62n))
  assert.equal(Object.hasOwn(tokens.sampling, 'topP'), false)
  assert.equal(text.text, 'words')
  assert.deepEqual([Number(server.hellos[0].trainerEpoch), server.hellos[0].takeOverConsumerIds], [5, ['old']])
})

test('drain ends when everything submitted has come', async (t) => {
  const { server, connect } = await rig(t)
  const client = await connect()
  for (let i = 0; i < 20; i += 1) await client.submit([i], { rolloutId: `p${i}`, maxNewTokens: 1 })
  assert.equal((await all(client.drain())).length, 20)
  assert.deepEqual(await all(client.drain()), [])
  await server.until(() => server.kept.size === 0)
})

test('a result is kept by the server until it is acknowledged, and a verdict goes with it', async (t) => {
  const { server, connect } = await rig(t)
  const client = await connect({ autoAcknowledge: false })
  for (const rolloutId of ['a', 'b', 'c']) await client.submit([1], { rolloutId, maxNewTokens: 1 })
  const results = await all(client.drain())
  client.acknowledge(results[1], { used: true, reward: 0.5 })
  await server.until(() => server.kept.size === 2)
  assert.deepEqual(server.keptIds(), ['a', 'c'])
  client.acknowledge('a', { used: false, dropReason: 'stale' })
  client.acknowledge('c')
  await server.until(() => server.kept.size === 0)
  const told = Object.fromEntries(server.acknowledgements.map((one) => [one.rolloutId, [one.verdict, one.dropReason, one.reward]]))
  assert.deepEqual(told, { a: [2, 'stale', null], b: [1, '', 0.5] })
  assert.throws(() => client.acknowledge('c', { dropReason: 'x' }), TypeError)
  assert.throws(() => client.acknowledge('c', { reward: NaN }), RangeError)
})

test('a refusal rejects the group that asked and is a result of the iterator', async (t) => {
  const { server, connect } = await rig(t)
  const error = { code: 3, reason: 'INVALID_ARGUMENT', message: 'too long', fieldViolations: [{ field: 'token_bytes', description: 'shorten it' }] }
  server.refusals = [error, error]
  const client = await connect()
  await assert.rejects(client.generate([1], { maxNewTokens: 1 }), (refused) => {
    assert.ok(refused instanceof Refused)
    assert.match(refused.message, /too long; token_bytes: shorten it \(INVALID_ARGUMENT/)
    return true
  })
  const submission = await client.submit([1], { maxNewTokens: 1, samples: 2 })
  await assert.rejects(submission.accepted(), Refused)
  assert.deepEqual((await all(client.drain())).map((result) => [result.outcome, result.sampleIndex]), [['refused', 0], ['refused', 1]])
})

test('a refusal that says later is tried again', async (t) => {
  const { server, connect } = await rig(t)
  server.refusals = [{ code: 8, reason: 'QUEUE_FULL', message: 'full' }]
  const client = await connect()
  assert.equal((await client.generate([1], { maxNewTokens: 1, rolloutId: 'x' })).outcome, 'completed')
  server.refusals = [{ code: 8, reason: 'QUEUE_FULL', message: 'full' }]
  await assert.rejects(client.generate([1], { maxNewTokens: 1, failFast: true }), { reason: 'QUEUE_FULL' })
})

test('aborting a signal cancels the group, and its results are forgotten', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const client = await connect({ autoAcknowledge: false })
  const controller = new AbortController()
  const group = client.generateGroup([1], { samples: 2, rolloutId: 'g', maxNewTokens: 1, signal: controller.signal })
  await server.until(() => server.rollouts.size === 2)
  controller.abort(new Error('enough'))
  await assert.rejects(group, /enough/)
  await server.until(() => server.rollouts.size === 0 && server.kept.size === 0)
})

test('a rollout that did not complete rejects generate with what there is of it', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const client = await connect()
  const one = client.generate([1], { rolloutId: 'x', maxNewTokens: 1 })
  await server.until(() => server.rollouts.size === 1)
  server.finish('x', 7)
  await assert.rejects(one, (error) => error instanceof RolloutFailed && error.result.outcome === 'engine_failed')
})

test('progress and notices reach their callbacks; an exception of one ends the client', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const notices = []
  const client = await connect({ onNotice: (notice) => notices.push(notice.kind) })
  const seen = []
  const onProgress = (progress) => {
    seen.push(progress.generatedTokens)
    if (seen.length === 2) throw new Error('mine')
  }
  const one = client.generate([1], { rolloutId: 'x', maxNewTokens: 9, onProgress })
  await server.until(() => server.rollouts.size === 1)
  assert.equal(server.messages[0].submissions[0].wantProgress, true)
  server.send({ notice: { kind: 5, message: 'm', seconds: 1 } })
  server.send({ progress: { rolloutId: 'x', generatedTokens: 3 } })
  server.send({ progress: { rolloutId: 'x', generatedTokens: 5 } })
  await assert.rejects(one, /mine/)
  assert.deepEqual([notices, seen], [['draining'], [3, 5]])
})

test('a reader that stops taking results stops the server too', async (t) => {
  const { server, connect } = await rig(t)
  server.pad = 16 * 1024 // 64 KiB a result
  let read = 0
  const client = await connect({ maxBufferedResults: 4, onNotice: () => (read += 1) })
  server.on('finish', () => server.send({ notice: { kind: 3 } })) // so that a test sees how far the client has read
  for (let i = 0; i < 200; i += 1) await client.submit([1], { maxNewTokens: 1, rolloutId: `p${i}` })
  await server.until(() => server.starts.size === 200)
  const settled = async () => {
    for (let before = -1; before !== read; ) {
      before = read
      await new Promise((resolve) => setTimeout(resolve, 200))
    }
  }
  await settled()
  assert.ok(read >= 3 && read < 60, `the client read ${read} of 200 results though nobody takes any`)
  assert.equal((await all(client.drain())).length, 200)
  await settled()
  assert.equal(read, 200)
})

test('submit waits while too many submissions are unanswered', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const client = await connect({ maxUnaccepted: 2 })
  server.refusals = Array.from({ length: 2 }, () => ({ code: 8, reason: 'QUEUE_FULL', message: 'full', retryAfterSeconds: 0.3 }))
  await client.submit([1], { maxNewTokens: 1, rolloutId: 'a' })
  await client.submit([2], { maxNewTokens: 1, rolloutId: 'b' })
  await server.until(() => server.refusals.length === 0)
  await client.submit([3], { maxNewTokens: 1, rolloutId: 'c' })
  assert.ok(server.starts.size >= 1, 'the third was taken before one of the two had its place')
  await server.until(() => server.starts.size === 3)
})

test('cancel names unknown ids, and withdraws at once what waits for room', async (t) => {
  const { server, connect } = await rig(t)
  const client = await connect()
  server.refusals = [{ code: 8, reason: 'QUEUE_FULL', message: 'full', retryAfterSeconds: 60 }]
  await client.submit([1], { rolloutId: 'waits', maxNewTokens: 1 })
  await server.until(() => server.refusals.length === 0)
  const answer = client.cancel(['waits', 'nobody'])
  assert.deepEqual((await all(client.drain())).map((result) => [result.rolloutId, result.outcome]), [['waits', 'cancelled']])
  assert.deepEqual(await answer, { cancelledRollouts: 1, finishedRollouts: 0, unknownIds: ['nobody'] })
})

test('after close every wait and call rejects with ClientClosed', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const client = await connect()
  const one = client.generate([1], { maxNewTokens: 1 })
  const next = client.results().next()
  await server.until(() => server.rollouts.size === 1)
  const closed = client.close()
  await Promise.all([assert.rejects(one, ClientClosed), assert.rejects(next, ClientClosed), closed])
  await assert.rejects(client.submit([1], { maxNewTokens: 1 }), ClientClosed)
  await assert.rejects(client.cancel('x'), ClientClosed)
})

test('close sends the last acknowledgements', async (t) => {
  const { server, connect } = await rig(t)
  const client = await connect({ autoAcknowledge: false })
  const [result] = await client.generateGroup([1], { maxNewTokens: 1, rolloutId: 'x' })
  client.acknowledge(result, { used: true })
  await client.close()
  assert.deepEqual(server.acknowledgements.map((one) => one.rolloutId), ['x'])
})

test('wrong keys and old epochs are told apart, and neither is tried again', async (t) => {
  const { server, connect } = await rig(t)
  server.helloStatus = { code: grpc.status.UNAUTHENTICATED, details: 'no such key' }
  await assert.rejects(connect({ apiKey: 'k1' }), Unauthorized)
  assert.deepEqual(server.keys, ['Bearer k1'])
  server.helloStatus = null
  const client = await connect({ apiKey: 'k2' })
  const waits = client.results().next()
  const metadata = new grpc.Metadata()
  // google.rpc.Status { code: 10, details: [Any { type_url, ErrorInfo { reason: "FENCED" } }] }
  const info = Buffer.from([0x0a, 6, ...Buffer.from('FENCED')])
  const url = Buffer.from('type.googleapis.com/google.rpc.ErrorInfo')
  const any = Buffer.from([0x0a, url.length, ...url, 0x12, info.length, ...info])
  metadata.set('grpc-status-details-bin', Buffer.from([0x08, 10, 0x1a, any.length, ...any]))
  server.cut(grpc.status.ABORTED, 'somebody newer is here', metadata)
  await assert.rejects(waits, Fenced)
  assert.equal(server.hellos.length, 2)
})
