// Copies the contract from the repository into the package, where it is not kept in git. Where there is no repository around
// it (an unpacked package) the copy that was packed stays.
import { cpSync, existsSync, rmSync } from 'node:fs'
import { fileURLToPath } from 'node:url'

const from = fileURLToPath(new URL('../../../proto/rolloutd/v1', import.meta.url))
const to = fileURLToPath(new URL('../proto/rolloutd/v1', import.meta.url))

if (existsSync(from)) {
  rmSync(to, { recursive: true, force: true })
  cpSync(from, to, { recursive: true, filter: (path) => !/\.[^/]*$/.test(path.slice(from.length)) || path.endsWith('.proto') })
} else if (!existsSync(to)) {
  throw new Error(`no contract: neither ${from} nor ${to} exists`)
}
