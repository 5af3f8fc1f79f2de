// Key and TLS: what the server sees, and that a certificate nobody vouches for is not trusted.

import assert from 'node:assert/strict'
import { execFileSync } from 'node:child_process'
import { mkdtempSync, readFileSync, rmSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'
import { test } from 'node:test'
import grpc from '@grpc/grpc-js'
import { connect, ServerUnavailable } from '../src/index.js'
import { FakeServer } from './fake_server.js'

/** A self-signed certificate for the name "rolloutd.test" and its key, as PEM; null without openssl. */
function certificate() {
  const folder = mkdtempSync(join(tmpdir(), 'rolloutd-'))
  try {
    const [key, cert] = [join(folder, 'key.pem'), join(folder, 'cert.pem')]
    const names = ['-subj', '/CN=rolloutd.test', '-addext', 'subjectAltName=DNS:rolloutd.test']
    execFileSync('openssl', ['req', '-x509', '-newkey', 'rsa:2048', '-nodes', '-days', '2', ...names, '-keyout', key, '-out', cert], { stdio: 'ignore' })
    return { key: readFileSync(key), cert: readFileSync(cert) }
  } catch (error) {
    if (error.code === 'ENOENT') return null
    throw error
  } finally {
    rmSync(folder, { recursive: true })
  }
}

const pem = certificate()

test('mutual TLS with a key', { skip: pem === null && 'no openssl to make a certificate with' }, async (t) => {
  const { key, cert } = pem
  const server = new FakeServer()
  await server.start(grpc.ServerCredentials.createSsl(cert, [{ private_key: key, cert_chain: cert }], true))
  t.after(() => server.stop())
  const options = { run: 'r', consumer: 'c', apiKey: 'k', reconnectSeconds: 0.5, warn: () => {} }
  const tls = { ca: cert, cert, key, servername: 'rolloutd.test' }
  const client = await connect(server.target, { ...options, tls })
  assert.equal((await client.generate([1], { maxNewTokens: 1 })).outcome, 'completed')
  await client.close()
  assert.deepEqual(server.keys, ['Bearer k'])
  for (const wrong of [true, { ...tls, servername: 'other.test' }, { ...tls, ca: undefined }, { ...tls, cert: undefined, key: undefined }]) {
    await assert.rejects(connect(server.target, { ...options, tls: wrong }), ServerUnavailable)
  }
  await assert.rejects(connect(server.target, options), ServerUnavailable)
  assert.equal(server.hellos.length, 1)
})
