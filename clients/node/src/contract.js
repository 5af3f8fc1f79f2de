/**
 * The contract, read from its .proto files, and plain objects to and from its messages.
 *
 * Invariants: a plain object has the contract's field names in camelCase; enums are short lower-case words ("critical" for
 * ROLLOUT_CLASS_CRITICAL), 64-bit integers are numbers (or BigInt on the way out), google.protobuf.Struct is a plain object. A field
 * that is not in the contract, or a value that its field cannot hold, is a TypeError or RangeError that names it: nothing is
 * converted silently. In what comes in, an absent field and an unspecified or unknown enum value are null.
 * What this does not know: what any field means.
 */

import { readdirSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import protobuf from 'protobufjs'

const FOLDER = fileURLToPath(new URL('../proto', import.meta.url))
const PACKAGE = 'rolloutd/v1'
const INTEGERS = /** @type {Record<string, [bigint, bigint]>} */ ({
  int32: [-(2n ** 31n), 2n ** 31n - 1n],
  uint32: [0n, 2n ** 32n - 1n],
  int64: [-(2n ** 63n), 2n ** 63n - 1n],
  uint64: [0n, 2n ** 64n - 1n]
})

const root = new protobuf.Root()
root.resolvePath = (/** @type {string} */ _origin, /** @type {string} */ target) => (target.startsWith('google/') ? target : `${FOLDER}/${target}`)
root.loadSync(readdirSync(`${FOLDER}/${PACKAGE}`).filter((name) => name.endsWith('.proto')).map((name) => `${PACKAGE}/${name}`))
root.resolveAll()

/** @typedef {Record<string, any>} Plain */

/** @typedef {{ path: string, request: protobuf.Type, response: protobuf.Type, streams: boolean }} Method */

/**
 * A message type of rolloutd.v1 by its name.
 * @param {string} name
 */
export function typeOf(name) {
  return root.lookupType(`rolloutd.v1.${name}`)
}

/**
 * A unary or streaming call, by service and method name. TypeError when the contract has none of that name.
 * @param {string} service
 * @param {string} method
 * @returns {Method}
 */
export function methodOf(service, method) {
  const found = root.lookup(`rolloutd.v1.${service}`, protobuf.Service)
  const call = found instanceof protobuf.Service ? found.methods[method] : undefined
  if (!(found instanceof protobuf.Service) || call === undefined) throw new TypeError(`the contract has no call ${service}/${method}`)
  call.resolve()
  return {
    path: `/rolloutd.v1.${service}/${method}`,
    request: /** @type {protobuf.Type} */ (call.resolvedRequestType),
    response: /** @type {protobuf.Type} */ (call.resolvedResponseType),
    streams: Boolean(call.requestStream || call.responseStream)
  }
}

/**
 * The message for a plain object. Members that are undefined or null are left unset.
 * @param {protobuf.Type} type
 * @param {unknown} value
 * @param {string} [path] where the object is, for messages of errors
 * @returns {Plain}
 */
export function toMessage(type, value, path = '') {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw new TypeError(`${path || type.name} must be an object, not ${shown(value)}`)
  }
  if (type.fullName === '.google.protobuf.Struct') return toStruct(value, path)
  const message = /** @type {Plain} */ ({})
  const chosen = /** @type {Record<string, string>} */ ({})
  for (const [name, given] of Object.entries(value)) {
    if (given === undefined || given === null) continue
    const where = path ? `${path}.${name}` : name
    const field = Object.hasOwn(type.fields, name) ? type.fields[name] : undefined
    if (field === undefined) throw new TypeError(`unknown field ${where}; ${type.name} has ${Object.keys(type.fields).join(', ')}`)
    const oneof = field.partOf?.name
    if (oneof !== undefined && chosen[oneof] !== undefined) throw new TypeError(`${chosen[oneof]} and ${where} exclude each other`)
    if (oneof !== undefined) chosen[oneof] = where
    message[name] = toField(field, given, where)
  }
  return message
}

/**
 * The plain object of a message.
 * @param {protobuf.Type} type
 * @param {Plain} message
 * @returns {Plain}
 */
export function fromMessage(type, message) {
  if (type.fullName === '.google.protobuf.Struct') return fromStruct(message)
  const plain = /** @type {Plain} */ ({})
  for (const field of type.fieldsArray) {
    const value = message[field.name]
    if (field.repeated) plain[field.name] = Array.from(value, (item) => fromValue(field, item))
    else if (field instanceof protobuf.MapField) {
      plain[field.name] = Object.fromEntries(Object.entries(value).map(([key, item]) => [key, fromValue(field, item)]))
    } else plain[field.name] = field.partOf && !Object.hasOwn(message, field.name) ? null : fromValue(field, value)
  }
  return plain
}

/**
 * The words of an enum of rolloutd.v1.
 * @param {string} name
 */
export function wordsOf(name) {
  return [...wordTable(root.lookupEnum(`rolloutd.v1.${name}`)).keys()]
}

/**
 * A 64-bit integer of a message as a number. RangeError when it is too large to be one exactly.
 * @param {number | { toNumber(): number }} value
 */
export function numberOf(value) {
  const number = typeof value === 'number' ? value : value.toNumber()
  if (!Number.isSafeInteger(number)) throw new RangeError(`${number} came from the server and is too large for an exact number`)
  return number
}

/**
 * @param {protobuf.Field} field
 * @param {unknown} value
 * @param {string} where
 */
function toField(field, value, where) {
  if (field.repeated) {
    if (typeof value === 'string' || !isIterable(value)) throw new TypeError(`${where} must be an array, not ${shown(value)}`)
    return Array.from(value, (item, index) => toValue(field, item, `${where}[${index}]`))
  }
  if (field instanceof protobuf.MapField) {
    if (typeof value !== 'object' || value === null) throw new TypeError(`${where} must be an object, not ${shown(value)}`)
    const key = field.keyType in INTEGERS ? new protobuf.Field('key', 1, field.keyType) : null
    const entries = Object.entries(value).map(([name, item]) => {
      if (key !== null) toValue(key, name.trim() === '' ? name : Number(name), `${where} key ${shown(name)}`)
      return [name, toValue(field, item, `${where}.${name}`)]
    })
    return Object.fromEntries(entries)
  }
  return toValue(field, value, where)
}

/**
 * @param {protobuf.Field} field
 * @param {unknown} value
 * @param {string} where
 */
function toValue(field, value, where) {
  if (field.resolvedType instanceof protobuf.Enum) {
    const number = wordTable(field.resolvedType).get(/** @type {string} */ (value))
    if (number !== undefined) return number
    throw new TypeError(`${where} must be one of ${[...wordTable(field.resolvedType).keys()].join(', ')}, not ${shown(value)}`)
  }
  if (field.resolvedType instanceof protobuf.Type) return toMessage(field.resolvedType, value, where)
  const bounds = INTEGERS[field.type]
  if (bounds !== undefined) {
    if (typeof value !== 'bigint' && !Number.isSafeInteger(value)) {
      throw new TypeError(`${where} must be a whole number (above 2^53 a BigInt), not ${shown(value)}`)
    }
    const whole = BigInt(/** @type {number | bigint} */ (value))
    if (whole < bounds[0] || whole > bounds[1]) throw new RangeError(`${where} must be in [${bounds[0]}, ${bounds[1]}], not ${value}`)
    if (typeof value !== 'bigint') return value
    return field.type.endsWith('64') ? /** @type {any} */ (protobuf.util.Long).fromString(String(value), field.type === 'uint64') : Number(value)
  }
  const wanted = field.type === 'bytes' ? 'Uint8Array' : field.type === 'bool' ? 'boolean' : field.type === 'string' ? 'string' : 'number'
  const fits = wanted === 'Uint8Array' ? value instanceof Uint8Array : typeof value === wanted && !Number.isNaN(value)
  if (!fits) throw new TypeError(`${where} must be a ${wanted}, not ${shown(value)}`)
  return value
}

/**
 * @param {protobuf.Field} field
 * @param {any} value
 */
function fromValue(field, value) {
  if (value === null || value === undefined) return null
  if (field.resolvedType instanceof protobuf.Enum) return wordOf(field.resolvedType, value)
  if (field.resolvedType instanceof protobuf.Type) return fromMessage(field.resolvedType, value)
  return field.type in INTEGERS ? numberOf(value) : value
}

const tables = /** @type {Map<protobuf.Enum, Map<string, number>>} */ (new Map())

/** @param {protobuf.Enum} type */
function wordTable(type) {
  let table = tables.get(type)
  if (table === undefined) {
    const prefix = type.valuesById[0].replace(/UNSPECIFIED$/, '')
    const named = Object.entries(type.values).filter(([, number]) => number !== 0)
    table = new Map(named.map(([name, number]) => [name.slice(prefix.length).toLowerCase(), number]))
    tables.set(type, table)
  }
  return table
}

/**
 * @param {protobuf.Enum} type
 * @param {number} number
 */
function wordOf(type, number) {
  if (number === 0 || type.valuesById[number] === undefined) return null
  return type.valuesById[number].slice(type.valuesById[0].length - 'UNSPECIFIED'.length).toLowerCase()
}

/**
 * @param {object} value
 * @param {string} path
 */
function toStruct(value, path) {
  const fields = Object.entries(value).map(([name, item]) => [name, toJsonValue(item, `${path}.${name}`)])
  return { fields: Object.fromEntries(fields) }
}

/**
 * @param {unknown} value
 * @param {string} where
 * @returns {Plain}
 */
function toJsonValue(value, where) {
  if (value === null) return { nullValue: 0 }
  if (typeof value === 'boolean') return { boolValue: value }
  if (typeof value === 'string') return { stringValue: value }
  if (typeof value === 'number' && Number.isFinite(value)) return { numberValue: value }
  if (Array.isArray(value)) return { listValue: { values: value.map((item, index) => toJsonValue(item, `${where}[${index}]`)) } }
  if (typeof value === 'object') return { structValue: toStruct(value, where) }
  throw new TypeError(`${where} must be a JSON value, not ${shown(value)}`)
}

/**
 * @param {Plain} struct
 * @returns {Plain}
 */
function fromStruct(struct) {
  return Object.fromEntries(Object.entries(struct.fields).map(([name, value]) => [name, fromJsonValue(value)]))
}

/**
 * @param {any} value
 * @returns {unknown}
 */
function fromJsonValue(value) {
  if (value.kind === 'structValue') return fromStruct(value.structValue)
  if (value.kind === 'listValue') return Array.from(value.listValue.values, fromJsonValue)
  return value.kind === undefined || value.kind === 'nullValue' ? null : value[value.kind]
}

/**
 * @param {unknown} value
 * @returns {value is Iterable<unknown>}
 */
function isIterable(value) {
  return typeof value === 'object' && value !== null && Symbol.iterator in value
}

/** @param {unknown} value */
function shown(value) {
  return typeof value === 'string' ? JSON.stringify(value) : Array.isArray(value) ? 'an array' : String(value)
}
