// Calls of a published SDK against the API, where there are no machines behind it: what a user of the SDK is told. Of sandboxes that
// are made of snapshots, and of forks, there can be two. Prints a line for each test: "ok NAME", or "not ok NAME" and after a tab why.
//   node sdk.mjs FILE-OF-THE-SDK API-URL KEY-OF-TEAM-BLUE
import assert from 'node:assert/strict'

const [file, apiUrl, apiKey] = process.argv.slice(2)
const { Sandbox, Template, AuthenticationError, BuildError, InvalidArgumentError, NotFoundError, SandboxError, SandboxNotFoundError, ServiceBusyError, ALL_TRAFFIC } = await import(file)
const opts = { apiUrl, apiKey }
const none = 'inone'
// isShort: the machine has no room, for which 2.45 has no class of its own.
const isShort = (e) => e instanceof (ServiceBusyError ?? SandboxError) && /memory: 1 GiB is short/.test(e.message)

async function test(name, run) {
  try {
    await run()
    console.log(`ok ${name}`)
  } catch (e) {
    console.log(`not ok ${name}\t${String(e?.stack ?? e).replaceAll('\n', ' | ')}`)
    process.exitCode = 1
  }
}

// about: it has taken as long, but for what it takes to make a sandbox.
function about(took, ms) {
  assert(Math.abs(took - ms) < 5000, `${took} ms, not ${ms}`)
}

// all is what a paginator has.
async function all(paginator) {
  const items = []
  while (paginator.hasNext) items.push(...(await paginator.nextItems()))
  return items
}

const network = { allowOut: ['1.1.1.1', '10.0.0.0/8'], denyOut: [ALL_TRAFFIC], allowPublicTraffic: false, maskRequestHost: 'localhost:${PORT}' }
let box

await test('create: all options', async () => {
  box = await Sandbox.create('base', {
    ...opts, metadata: { 'k 1': 'v&2', plain: 'x' }, envs: { X: '1' }, timeoutMs: 60_500, secure: true, allowInternetAccess: true,
    network, lifecycle: { onTimeout: 'pause', autoResume: true },
  })
  assert.match(box.sandboxId, /^[a-z0-9]+$/)
  assert.equal(box.sandboxDomain, 'sandbox.localhost:3002')
  assert.equal(box.getHost(8080), `8080-${box.sandboxId}.sandbox.localhost:3002`)
  assert.match(box.trafficAccessToken, /^[0-9a-f]{64}$/)
})

await test('create: nothing but the default', async () => {
  const b = await Sandbox.create(opts)
  assert.equal(b.trafficAccessToken, undefined)
  const info = await b.getInfo()
  about(info.endAt - info.startedAt, 300_000)
  assert.equal(await b.kill(), true)
})

await test('info', async () => {
  const info = await box.getInfo()
  assert.equal(info.sandboxId, box.sandboxId)
  assert.deepEqual(info.metadata, { 'k 1': 'v&2', plain: 'x' })
  assert.equal(info.state, 'running')
  about(info.endAt - info.startedAt, 61_000)
  assert.equal(info.cpuCount, 2)
  assert.equal(info.memoryMB, 1024)
  assert.equal(info.allowInternetAccess, true)
  assert.deepEqual(info.network.allowOut, network.allowOut)
  assert.equal(info.network.allowPublicTraffic, false)
  assert.deepEqual(info.lifecycle, { autoResume: true, onTimeout: 'pause' })
})

await test('list: filters and pages', async () => {
  const boxes = []
  for (let i = 0; i < 5; i++) boxes.push(await Sandbox.create({ ...opts, metadata: { n: String(i), of: 'list' } }))
  const ids = boxes.map((b) => b.sandboxId)
  assert.deepEqual((await all(Sandbox.list({ ...opts, limit: 2, query: { metadata: { of: 'list' } } }))).map((b) => b.sandboxId), ids.toReversed())
  assert.deepEqual((await all(Sandbox.list({ ...opts, query: { metadata: { 'k 1': 'v&2' } } }))).map((b) => b.sandboxId), [box.sandboxId])
  assert.deepEqual((await all(Sandbox.list({ ...opts, query: { metadata: { 'k 1': 'v' } } }))).length, 0)
  await boxes[3].pause()
  assert.deepEqual((await all(Sandbox.list({ ...opts, limit: 1, query: { state: ['paused'] } }))).map((b) => b.sandboxId), [ids[3]])
  assert.equal((await all(Sandbox.list({ ...opts, query: { state: ['running', 'paused'], metadata: { of: 'list' } } }))).length, 5)
  for (const b of boxes) await b.kill()
})

await test('timeout', async () => {
  await box.setTimeout(60_000)
  await assert.rejects(Sandbox.setTimeout(none, 1000, opts), SandboxNotFoundError)
})

await test('pause and connect', async () => {
  assert.equal(await box.pause(), true)
  assert.equal(await box.pause(), false)
  assert.equal((await box.getInfo()).state, 'paused')
  const again = await Sandbox.connect(box.sandboxId, { ...opts, timeoutMs: 30_000 })
  assert.equal(again.sandboxId, box.sandboxId)
  assert.equal((await box.getInfo()).state, 'running')
  assert.equal(await box.pause({ keepMemory: false }), true)
  await box.connect()
  await assert.rejects(Sandbox.pause(none, opts), SandboxNotFoundError)
  await assert.rejects(Sandbox.connect(none, opts), SandboxNotFoundError)
})

await test('network', async () => {
  await box.updateNetwork({ allowOut: ['8.8.8.8'], denyOut: ['0.0.0.0/0'] })
  assert.deepEqual((await box.getInfo()).network.allowOut, ['8.8.8.8'])
  await assert.rejects(box.updateNetwork({ allowOut: ['example.com'], denyOut: [ALL_TRAFFIC] }), /allowOut\[0\]: "example.com" is a domain/)
})

await test('fork', async () => {
  const children = await box.fork({ count: 3, timeoutMs: 20_000 })
  assert.equal(children.length, 3)
  const made = children.filter((c) => c instanceof Sandbox)
  assert.equal(new Set(made.map((c) => c.sandboxId)).size, 2)
  const failed = children.find((c) => !(c instanceof Sandbox))
  assert(isShort(failed), String(failed))
  for (const c of made) await c.kill()
  await assert.rejects(Sandbox.fork(none, opts), NotFoundError)
})

await test('snapshots', async () => {
  const unnamed = await box.createSnapshot()
  const named = await box.createSnapshot({ name: 'mine' })
  assert.equal(named.snapshotId, 'blue/mine:default')
  assert.deepEqual((await all(box.listSnapshots({ limit: 1 }))).map((s) => s.snapshotId), [named.snapshotId, unnamed.snapshotId])
  await assert.rejects(Sandbox.create(named.snapshotId, opts), isShort)
  assert.equal(await Sandbox.deleteSnapshot(named.snapshotId, opts), true)
  assert.equal(await Sandbox.deleteSnapshot(named.snapshotId, opts), false)
  assert.equal(await Sandbox.deleteSnapshot(unnamed.snapshotId, opts), true)
  await assert.rejects(Sandbox.createSnapshot(none, opts), SandboxNotFoundError)
})

await test('metrics', async () => {
  const m = await box.getMetrics()
  assert.equal(m.length, 1)
  assert.equal(m[0].memTotal, 1 << 30)
  assert.equal(m[0].cpuUsedPct, 12.5)
  await box.getMetrics({ start: new Date(0), end: new Date() })
})

await test('templates', async () => {
  assert.equal(await Template.exists('name1', opts), true)
  assert.equal(await Template.exists('none', opts), false)
  assert.deepEqual((await Template.getTags('name1', opts)).map((t) => t.tag), ['default'])
  // One that tells of each step; a command "fail" fails.
  const lines = []
  const build = (template, name, more) => Template.build(template, name, { ...opts, cpuCount: 2, memoryMB: 512, onBuildLogs: (l) => lines.push(l.message), ...more })
  const whole = () => Template({ fileContextPath: import.meta.dirname }).fromImage('debian').setEnvs({ A: '1' }).setWorkdir('/app').copy('*.mjs', 'in/', { mode: 0o600 }).runCmd('make').setUser('user').setStartCmd('serve', 'true')
  const first = await build(whole(), 'mine:v1', { tags: ['stable'] })
  assert.deepEqual(first.tags, ['v1', 'stable'])
  assert(lines.some((l) => /^Uploaded/.test(l)) && lines.some((l) => l === 'RUN ["make"]'), lines.join('\n'))
  lines.length = 0
  const second = await build(whole().skipCache(), 'mine')
  assert.equal(second.templateId, first.templateId)
  assert(lines.some((l) => /already cached/.test(l)))
  const failing = Template().fromTemplate('mine').runCmd('make').runCmd('fail')
  await assert.rejects(build(failing, 'failing'), (e) => e instanceof BuildError && /exit status 3/.test(e.message) && /sdk\.mjs/.test(e.stack))
  await assert.rejects(build(Template().fromImage('debian').setStartCmd('serve', 'never'), 'failing'), /isn't ready: exit status 1/)
  await assert.rejects(build(Template().fromImage('debian'), 'mine', { cpuCount: 3 }), /400: .*CPU count must be 1 or an even number/)
  assert.equal((await Template.assignTags('mine:v1', ['production'], opts)).buildId, first.buildId)
  await Template.removeTags('mine', ['stable'], opts)
  assert.deepEqual((await Template.getTags('mine', opts)).map((t) => t.tag), ['default', 'production', 'v1'])
})

await test('errors', async () => {
  await assert.rejects(Sandbox.create('nope', opts), (e) => e instanceof SandboxError && /404: template 'nope' not found/.test(e.message))
  await assert.rejects(Sandbox.create({ ...opts, apiKey: 'e2b_00' }), (e) => e instanceof AuthenticationError && /X-API-KEY/.test(e.message))
  await assert.rejects(Sandbox.create({ ...opts, volumeMounts: { '/mnt': 'v' } }), /400: volumeMounts: /)
  await assert.rejects(Sandbox.create({ ...opts, mcp: { browserbase: { apiKey: 'x' } } }), /400: mcp: /)
  await assert.rejects(Sandbox.create({ ...opts, network: { allowOut: ['example.com'], denyOut: [ALL_TRAFFIC] } }), /400: network.allowOut\[0\]: /)
})

await test('kill', async () => {
  assert.equal(await box.kill(), true)
  assert.equal(await Sandbox.kill(box.sandboxId, opts), false)
  await assert.rejects(box.getInfo(), SandboxNotFoundError)
})
