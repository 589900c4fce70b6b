// What all parts of the suite use: the SDK that is under test, tests, waits, and the sandbox's ports.
export const sdk = await import(process.argv[2])
// The SDKs by generations of the API: 2.51 has what 2.45 lacks.
export const second = sdk.ServiceBusyError !== undefined
// byDomain: sandboxes are reached by names and TLS, not by headers.
export const byDomain = !process.env.E2B_SANDBOX_URL

// long: all of it is wanted, however long that takes.
export const long = !!process.env.CUBE_TEST_LONG

let failed = 0

export async function test(name, run) {
  const started = Date.now()
  try {
    await run()
    console.log(`ok ${name}\t${Date.now() - started} ms`)
    return true
  } catch (e) {
    failed++
    console.log(`not ok ${name}\t${String(e?.stack ?? e).replaceAll('\n', ' | ')}`)
    return false
  }
}

export const finish = () => process.exit(failed ? 1 : 0)

// until waits for what is told by events, or, with ask, for what a call says.
export async function until(what, ready, ask) {
  const deadline = Date.now() + 60_000 * Number(process.env.CUBE_TIMEOUT_SCALE || 1)
  while (!ready()) {
    if (Date.now() > deadline) throw new Error(`${what} has not come`)
    if (ask) await ask()
    await new Promise((r) => setTimeout(r, ask ? 100 : 5))
  }
}

// all drains a paginator.
export async function all(paginator) {
  const items = []
  while (paginator.hasNext) items.push(...(await paginator.nextItems()))
  return items
}

// to is how a port of a sandbox is asked for: a URL and headers.
export function to(sandbox, port, path, scheme = 'http') {
  if (byDomain) return { url: `${scheme}s://${sandbox.getHost(port)}${path}`, headers: {} }
  const url = process.env.E2B_SANDBOX_URL.replace(/^http/, scheme) + path
  return { url, headers: { 'E2b-Sandbox-Id': sandbox.sandboxId, 'E2b-Sandbox-Port': String(port) } }
}

// told is what an answer has: SDKs fill in undefined for the rest.
export const told = (answer) => JSON.parse(JSON.stringify(answer))

// get asks a port of a sandbox.
export function get(sandbox, port, path, headers) {
  const at = to(sandbox, port, path)
  return fetch(at.url, { headers: { ...at.headers, ...headers } })
}
