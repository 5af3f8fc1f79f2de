// Plain objects to and from messages, token bytes, and that the written types name what the contract has.

import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { test } from 'node:test'
import { fromMessage, methodOf, toMessage, typeOf, wordsOf } from '../src/contract.js'
import { problemOfStatus } from '../src/errors.js'
import { submissionOf } from '../src/submissions.js'
import { bytesOfTokens, floatsOfBytes, tokensOfBytes } from '../src/tokens.js'

const source = (name) => readFileSync(new URL(`../src/${name}`, import.meta.url), 'utf8')

/** Names of a typedef's properties. */
function propertiesOf(file, typedef) {
  const block = source(file).match(new RegExp(`@typedef \\{object\\} ${typedef}\\n([^]*?)\\*/`))[1]
  return [...block.matchAll(/@property \{.*?\} \[?(\w+)\]?/g)].map((match) => match[1])
}

/** The words that a typedef's property may have. */
function wordsIn(file, property) {
  const line = source(file).split('\n').find((line) => line.includes('@property') && line.includes(`[${property}]`))
  return [...line.matchAll(/'(\w+)'/g)].map((match) => match[1])
}

const roundTrip = (name, plain) => {
  const type = typeOf(name)
  return fromMessage(type, type.decode(type.encode(toMessage(type, plain)).finish()))
}

test('a message survives the way there and back', () => {
  const engineParams = { a: [1, 'two', null, { b: true }], c: -0.5 }
  const submission = roundTrip('RolloutSubmission', {
    rolloutId: 'x',
    tokenBytes: bytesOfTokens([1, 2]),
    seeds: [2 ** 53 - 1, 7n],
    engineLabels: { zone: 'a' },
    neededByStep: 0,
    engineParams,
    sampling: { maxNewTokens: 3, logitBias: { 5: -1.5 }, stop: ['a'] }
  })
  assert.deepEqual(submission.engineParams, engineParams)
  assert.deepEqual(submission.seeds, [2 ** 53 - 1, 7])
  assert.deepEqual(submission.engineLabels, { zone: 'a' })
  assert.deepEqual(submission.sampling.logitBias, { 5: -1.5 })
  assert.deepEqual([submission.neededByStep, submission.rolloutClass, submission.text, submission.sampling.topP], [0, null, null, null])
  assert.deepEqual(tokensOfBytes(submission.tokenBytes), Uint32Array.of(1, 2))
})

test('what cannot be sent is refused with the name of the field', () => {
  const refused = (plain, pattern) => assert.throws(() => toMessage(typeOf('RolloutSubmission'), plain), pattern)
  refused({ samples: '8' }, /samples must be a whole number .*"8"/)
  refused({ samples: 1.5 }, /samples/)
  refused({ samples: -1 }, /samples must be in \[0, 4294967295\]/)
  refused({ samples: 2 ** 60 }, /samples/)
  refused({ sampling: { temperature: NaN } }, /sampling.temperature must be a number, not NaN/)
  refused({ sampling: { logitBias: { x: 1 } } }, /sampling.logitBias key "x"/)
  refused({ sampling: { regex: 'a', ebnf: 'b' } }, /regex and sampling.ebnf exclude each other/)
  refused({ rolloutClass: 'urgent' }, /rolloutClass must be one of critical, reusable, background, not "urgent"/)
  refused({ seeds: 7 }, /seeds must be an array/)
  refused({ engineParams: { f: () => {} } }, /engineParams.f must be a JSON value/)
  refused({ failFast: 1 }, /failFast must be a boolean/)
  refused({ topk: 3 }, /unknown field topk/)
  assert.throws(() => submissionOf([1], { maxNewToken: 1 }, false), /unknown option maxNewToken/)
  assert.throws(() => submissionOf([1, -1], {}, false), /prompt\[1\] must be in/)
  assert.throws(() => submissionOf([1, 0.5], {}, false), /prompt\[1\] must be a token id/)
  assert.throws(() => submissionOf(7, {}, false), /prompt must be text or token ids/)
  assert.throws(() => methodOf('RolloutService', 'Nothing'), /no call RolloutService\/Nothing/)
})

test('tokens are little-endian and unaligned bytes are read', () => {
  assert.deepEqual([...bytesOfTokens([1, 0x01020304])], [1, 0, 0, 0, 4, 3, 2, 1])
  const bytes = new Uint8Array([9, ...bytesOfTokens(Uint32Array.of(5, 6))]).subarray(1)
  assert.deepEqual(tokensOfBytes(bytes), Uint32Array.of(5, 6))
  assert.deepEqual(floatsOfBytes(new Uint8Array([0, 0, 0x80, 0xbf])), Float32Array.of(-1))
  assert.throws(() => tokensOfBytes(new Uint8Array(5)), RangeError)
})

test('options and results are typed as the contract has them', () => {
  const own = ['tokenIds', 'tokenBytes', 'text', 'wantProgress', 'sampling']
  const submission = Object.keys(typeOf('RolloutSubmission').fields).filter((name) => !own.includes(name))
  assert.deepEqual(propertiesOf('submissions.js', 'RolloutOptions').sort(), [...Object.keys(typeOf('SamplingParams').fields), ...submission].sort())
  const { generatedTokens: _length, error: _error, matchedTokenId: _id, matchedString: _string, ...fields } = typeOf('RolloutResult').fields
  const renamed = { tokenBytes: 'tokens', logprobBytes: 'logprobs', promptTokenBytes: 'promptTokenIds', promptLogprobBytes: 'promptLogprobs' }
  const result = [...Object.keys(fields).map((name) => renamed[name] ?? name), 'problem', 'matchedStop']
  assert.deepEqual(propertiesOf('results.js', 'RolloutResult').sort(), result.sort())
  assert.deepEqual(propertiesOf('client.js', 'Budget').sort(), Object.keys(typeOf('Budget').fields).sort())
  const step = Object.keys(typeOf('ReportStepRequest').fields).filter((name) => !['runId', 'trainerEpoch', 'step'].includes(name))
  assert.deepEqual(propertiesOf('client.js', 'StepReport').sort(), step.sort())
})

test('words are typed as the contract has them', () => {
  for (const [file, property, name] of [
    ['submissions.js', 'rolloutClass', 'RolloutClass'],
    ['submissions.js', 'taskType', 'TaskType'],
    ['submissions.js', 'origin', 'Origin'],
    ['submissions.js', 'onPreempt', 'OnPreempt'],
    ['client.js', 'trainerState', 'TrainerState']
  ]) {
    assert.deepEqual(wordsIn(file, property), wordsOf(name))
  }
  const outcomes = source('results.js').match(/@typedef \{('completed'[^]*?)\} Outcome/)[1]
  assert.deepEqual([...outcomes.matchAll(/'(\w+)'/g)].map((match) => match[1]), [...wordsOf('Outcome'), 'refused'])
})

test('a status without details is a problem without a reason', () => {
  assert.deepEqual(problemOfStatus({ code: 14, details: '' }), { code: 'UNAVAILABLE', reason: '', message: 'no details', fields: [], retryAfterSeconds: 0 })
})
