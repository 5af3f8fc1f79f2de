// Broken streams, restarts, repeats, and servers that do not come back.

import assert from 'node:assert/strict'
import { test } from 'node:test'
import { connect as connectTo, ServerUnavailable } from '../src/index.js'
import { all, rig } from './fake_server.js'

/** The next `count` rollout ids of an iterator. */
async function take(iterator, count) {
  const ids = []
  for (let i = 0; i < count; i += 1) ids.push((await iterator.next()).value.rolloutId)
  return ids
}

test('a cut stream resumes where it was', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const client = await connect()
  for (let i = 0; i < 6; i += 1) await client.submit([i], { rolloutId: `p${i}`, maxNewTokens: 1 })
  await server.until(() => server.rollouts.size === 6)
  for (const id of ['p0', 'p1', 'p2']) server.finish(id)
  const seen = await take(client.results(), 3)
  server.cut()
  server.finish('p3') // while nobody listens
  await server.until(() => server.hellos.length === 2)
  assert.equal(Number(server.hellos[1].resumeCursor), 3)
  server.finish('p4')
  server.finish('p5')
  seen.push(...(await all(client.drain())).map((result) => result.rolloutId))
  assert.deepEqual(seen, ['p0', 'p1', 'p2', 'p3', 'p4', 'p5'])
  await server.until(() => server.kept.size === 0)
  assert.deepEqual(new Set(server.starts.values()), new Set([1]))
})

test('a killed server that comes back with its memory sends what was missed, once', async (t) => {
  const { server, connect } = await rig(t)
  const client = await connect({ autoAcknowledge: false })
  for (let i = 0; i < 4; i += 1) await client.submit([i], { rolloutId: `p${i}`, maxNewTokens: 1 })
  const results = await all(client.drain())
  client.acknowledge(results[0])
  await server.until(() => server.kept.size === 3)
  await server.stop()
  await client.submit([9], { rolloutId: 'meanwhile', maxNewTokens: 1 })
  client.acknowledge(results[2], { used: true })
  await server.start()
  assert.deepEqual((await all(client.drain())).map((result) => result.rolloutId), ['meanwhile'])
  await server.until(() => server.kept.size === 3 && !server.keptIds().includes('p2'))
  for (const id of ['p1', 'p3', 'meanwhile']) client.acknowledge(id)
  await server.until(() => server.kept.size === 0)
  assert.deepEqual(server.acknowledgements.filter((one) => one.rolloutId === 'p2').map((one) => one.verdict), [1])
})

test('a server that lost its memory runs what is unfinished again, and only that', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const client = await connect()
  const group = client.generateGroup([7], { samples: 4, rolloutId: 'g', maxNewTokens: 1 })
  for (let i = 0; i < 3; i += 1) await client.submit([i], { rolloutId: `p${i}`, maxNewTokens: 1 })
  await server.until(() => server.rollouts.size === 7)
  for (const id of ['p0', 'g/0', 'g/2']) server.finish(id)
  assert.deepEqual(await take(client.results(), 1), ['p0'])
  await server.stop({ forget: true })
  server.finishAtOnce = true
  await server.start()
  assert.deepEqual((await group).map((result) => result.sampleIndex), [0, 1, 2, 3])
  assert.deepEqual((await all(client.drain())).map((result) => result.rolloutId).sort(), ['p1', 'p2'])
  await server.until(() => server.kept.size === 0)
  assert.deepEqual([server.starts.get('p0'), server.starts.get('p1')], [1, 2])
})

for (const same of [true, false]) {
  test(`a result repeated under ${same ? 'its old' : 'a new'} cursor is seen once`, async (t) => {
    const { server, connect } = await rig(t)
    const client = await connect()
    await client.submit([1], { rolloutId: 'x', maxNewTokens: 1 })
    const results = client.results()
    const finished = { rolloutId: 'x', outcome: 1, complete: true }
    assert.deepEqual(await take(results, 1), ['x'])
    if (same) server.send({ cursor: 1, finished })
    else server.durable({ finished })
    await client.submit([2], { rolloutId: 'y', maxNewTokens: 1 })
    assert.deepEqual(await take(results, 1), ['y'])
    await server.until(() => server.kept.size === 0)
  })
}

test('results of an earlier life of the consumer come again', async (t) => {
  const { server, connect } = await rig(t)
  const before = await connect({ autoAcknowledge: false })
  await before.submit([1], { rolloutId: 'x', maxNewTokens: 1 })
  await take(before.results(), 1)
  await before.close()
  const after = await connect({ autoAcknowledge: false })
  assert.deepEqual(await take(after.results(), 1), ['x'])
  after.acknowledge('x')
  await server.until(() => server.kept.size === 0)
})

test('consumers are taken over once', async (t) => {
  const { server, connect } = await rig(t)
  await connect({ takeOver: ['old'] })
  server.cut()
  await server.until(() => server.hellos.length === 2)
  assert.deepEqual(server.hellos.map((hello) => hello.takeOverConsumerIds), [['old'], []])
})

test('a server that does not come back ends every wait', async (t) => {
  const { server, connect } = await rig(t)
  server.finishAtOnce = false
  const warnings = []
  const client = await connect({ reconnectSeconds: 0.3, warn: (text) => warnings.push(text) })
  const group = client.generateGroup([1], { samples: 2, maxNewTokens: 1 })
  const next = client.results().next()
  await server.until(() => server.rollouts.size === 2)
  await server.stop()
  await Promise.all([assert.rejects(group, ServerUnavailable), assert.rejects(next, /rolloutd serve/)])
  await assert.rejects(client.submit([1], { maxNewTokens: 1 }), ServerUnavailable)
  await assert.rejects(client.setBudget({}), ServerUnavailable)
  assert.equal(warnings.length, 1)
})

test('connecting to nobody fails after reconnectSeconds', async () => {
  await assert.rejects(connectTo('127.0.0.1:1', { run: 'r', consumer: 'c', reconnectSeconds: 0.2, warn: () => {} }), ServerUnavailable)
})
