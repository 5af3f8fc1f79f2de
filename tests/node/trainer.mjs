// Submits COUNT rollouts, the next always longer, and prints each result as it comes: `node trainer.mjs TARGET COUNT`.

import { connect } from 'rolloutd'

const [target, count] = process.argv.slice(2)
const client = await connect(target, { run: 'run', consumer: 'trainer', autoAcknowledge: false })
for (let i = 0; i < Number(count); i += 1) {
  await client.submit([1000 + i, 1, 2, 3], { rolloutId: `r${i}`, maxNewTokens: 20 + 20 * i, ignoreEos: true })
}
for await (const result of client.drain()) {
  client.acknowledge(result, { used: true, reward: 1 })
  console.log(result.rolloutId, result.outcome, result.tokens.length)
}
await client.close()
