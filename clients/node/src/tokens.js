/**
 * Token ids and log-probs as the contract's bytes: little-endian, 4 bytes each.
 *
 * Invariants: arrays returned own their memory and are aligned, whatever buffer the bytes came in; an id that does not fit an
 * uint32 is refused, never wrapped. What this does not know: the vocabulary.
 */

import { endianness } from 'node:os'

const SWAP = endianness() === 'BE'
const MAX_ID = 2 ** 32 - 1

/**
 * The bytes of token ids. TypeError or RangeError for what is no list of ids.
 * @param {Iterable<number>} ids
 * @returns {Buffer}
 */
export function bytesOfTokens(ids) {
  const tokens = ids instanceof Uint32Array ? ids.slice() : Uint32Array.from(ids, checked)
  const bytes = Buffer.from(tokens.buffer)
  return SWAP ? bytes.swap32() : bytes
}

/**
 * @param {Uint8Array} bytes
 * @returns {Uint32Array}
 */
export function tokensOfBytes(bytes) {
  return new Uint32Array(words(bytes))
}

/**
 * @param {Uint8Array} bytes
 * @returns {Float32Array}
 */
export function floatsOfBytes(bytes) {
  return new Float32Array(words(bytes))
}

/** @param {Uint8Array} bytes */
function words(bytes) {
  if (bytes.length % 4 !== 0) throw new RangeError(`${bytes.length} bytes are no whole number of 4-byte values`)
  const copy = new Uint8Array(bytes)
  if (SWAP) Buffer.from(copy.buffer).swap32()
  return copy.buffer
}

/**
 * @param {number} id
 * @param {number} index
 */
function checked(id, index) {
  if (!Number.isInteger(id)) throw new TypeError(`prompt[${index}] must be a token id, not ${String(id)}`)
  if (id < 0 || id > MAX_ID) throw new RangeError(`prompt[${index}] must be in [0, ${MAX_ID}], not ${id}`)
  return id
}
