import { connect, Refused, type Notice, type RolloutResult } from 'rolloutd'

async function main(): Promise<void> {
  const client = await connect('127.0.0.1:1', { run: 'r', consumer: 'c', tls: { ca: 'pem' }, onNotice: (notice: Notice) => notice.kind })
  const group: RolloutResult[] = await client.generateGroup(Uint32Array.of(1), { samples: 2, maxNewTokens: 1, rolloutClass: 'critical' })
  const lengths: number[] = group.map((result) => result.tokens.length + (result.logprobs[0] ?? 0))
  for await (const result of client.results()) client.acknowledge(result, { used: lengths.length > 0, reward: 1 })
  const submission = await client.submit('text', { maxNewTokens: 1, engineParams: { any: ['thing'] } })
  const position: number = (await submission.accepted()).queuePosition
  await client.cancel(submission.rolloutIds, { groupIds: [String(position)] })
  await client.setBudget({ maxRunningRollouts: 1, classes: [{ rolloutClass: 'reusable', share: 0.5 }] })
  await client.close()
  // @ts-expect-error no such class
  await client.generate([1], { maxNewTokens: 1, rolloutClass: 'urgent' })
  // @ts-expect-error no such option
  await client.generate([1], { maxNewToken: 1 })
  // @ts-expect-error the run is required
  await connect('127.0.0.1:1', {})
}

main().catch((error: unknown) => console.error(error instanceof Refused ? error.fields : error))
