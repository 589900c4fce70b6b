// Calls of the published SDK against a stack with the template base: what its users do with sandboxes. Prints a line for each
// test: "ok NAME" or "not ok NAME", and after a tab how long it took, or why.
//   node suite.mjs PACKAGE
import assert from 'node:assert/strict'

const { Sandbox, SandboxNotFoundError, NotFoundError, CommandExitError } = await import(process.argv[2])
let failed = 0

async function test(name, run) {
  const started = Date.now()
  try {
    await run()
    console.log(`ok ${name}\t${Date.now() - started} ms`)
  } catch (e) {
    failed++
    console.log(`not ok ${name}\t${String(e?.stack ?? e).replaceAll('\n', ' | ')}`)
  }
}

// all drains a paginator.
async function all(paginator) {
  const items = []
  while (paginator.hasNext) items.push(...(await paginator.nextItems()))
  return items
}

let sandbox
await test('create', async () => {
  sandbox = await Sandbox.create({ metadata: { 'k 1': 'v&2', suite: 'sdk' }, envs: { FROM_CREATE: 'a b' }, timeoutMs: 600_000 })
  assert.match(sandbox.sandboxId, /^[a-z0-9]+$/)
})
if (!sandbox) process.exit(1)

await test('commands: Python, environment, identity', async () => {
  const r = await sandbox.commands.run('python3 -c "print(6 * 7)"; id -un; echo "$FROM_CREATE $E2B_SANDBOX_ID"; cat /run/e2b/.E2B_SANDBOX_ID; hostname')
  const [answer, user, env, rest] = r.stdout.split('\n')
  assert.deepEqual([answer, user, env], ['42', 'user', `a b ${sandbox.sandboxId}`])
  assert(rest.startsWith(sandbox.sandboxId), rest)
  await assert.rejects(sandbox.commands.run('exit 3'), (e) => e instanceof CommandExitError && e.exitCode === 3)
})

await test('commands: root owns the machine', async () => {
  const r = await sandbox.commands.run('sudo id -u; sudo mkdir /sys/fs/cgroup/mine && sudo rmdir /sys/fs/cgroup/mine && echo cgroup; ls /dev/fuse /dev/loop-control /dev/net/tun; sudo unshare -Ur id -u; df -m /dev/shm | tail -n 1 | tr -s " " | cut -d " " -f 2')
  const lines = r.stdout.trim().split('\n')
  assert.deepEqual(lines.slice(0, 6), ['0', 'cgroup', '/dev/fuse', '/dev/loop-control', '/dev/net/tun', '0'])
  assert(Number(lines[6]) > 180, `/dev/shm has ${lines[6]} MiB`)
})

await test('files', async () => {
  await sandbox.files.write('dir/hello.txt', 'hello')
  assert.equal(await sandbox.files.read('dir/hello.txt'), 'hello')
  assert.equal((await sandbox.files.list('dir')).length, 1)
  assert.equal(await sandbox.files.exists('nowhere'), false)
})

await test('info and lists', async () => {
  const info = await sandbox.getInfo()
  assert.equal(info.sandboxId, sandbox.sandboxId)
  assert.equal(info.state, 'running')
  assert.deepEqual(info.metadata, { 'k 1': 'v&2', suite: 'sdk' })
  const mine = await all(Sandbox.list({ query: { metadata: { 'k 1': 'v&2' } } }))
  assert.deepEqual(mine.map((s) => s.sandboxId), [sandbox.sandboxId])
  assert.deepEqual(await all(Sandbox.list({ query: { metadata: { 'k 1': 'other' } } })), [])
  assert.equal(await sandbox.isRunning(), true)
})

await test('timeout', async () => {
  const before = (await sandbox.getInfo()).endAt
  await sandbox.setTimeout(900_000)
  assert((await sandbox.getInfo()).endAt > before)
})

let counter
await test('pause and connect: memory, processes and files go on', async () => {
  counter = await sandbox.commands.run('i=0; while true; do i=$((i+1)); echo $i >/tmp/count; sleep 0.1; done', { background: true, timeoutMs: 0 })
  await sandbox.commands.run('until [ -s /tmp/count ]; do sleep 0.1; done')
  const id = sandbox.sandboxId
  await (sandbox.betaPause ?? sandbox.pause).call(sandbox)
  const paused = await all(Sandbox.list({ query: { state: ['paused'] } }))
  assert(paused.some((s) => s.sandboxId === id), 'it is not listed as paused')
  assert.equal(await sandbox.isRunning(), false)
  sandbox = await Sandbox.connect(id, { timeoutMs: 600_000 })
  assert.equal(sandbox.sandboxId, id)
  const first = Number((await sandbox.commands.run('cat /tmp/count')).stdout)
  await sandbox.commands.run('sleep 1')
  assert(Number((await sandbox.commands.run('cat /tmp/count')).stdout) > first, 'the process does not go on')
  assert.equal(await sandbox.files.read('dir/hello.txt'), 'hello')
  const drift = Math.abs(Date.now() / 1000 - Number((await sandbox.commands.run('date +%s')).stdout))
  assert(drift < 30, `the clock is ${drift} s off`)
})

await test('snapshot, and a sandbox of it', async () => {
  if (!sandbox.createSnapshot) return
  await sandbox.files.write('mark', 'saved')
  const snapshot = await sandbox.createSnapshot()
  await sandbox.files.write('mark', 'later')
  const child = await Sandbox.create(snapshot.snapshotId, { timeoutMs: 300_000 })
  try {
    assert.notEqual(child.sandboxId, sandbox.sandboxId)
    assert.equal(await child.files.read('mark'), 'saved')
    assert.equal((await child.commands.run('echo $E2B_SANDBOX_ID')).stdout.trim(), child.sandboxId)
    assert.equal(await sandbox.files.read('mark'), 'later')
  } finally {
    await child.kill()
  }
  assert.equal(await Sandbox.deleteSnapshot(snapshot.snapshotId), true)
})

await test('fork', async () => {
  if (!sandbox.fork) return
  await sandbox.files.write('mark', 'forked')
  const results = await sandbox.fork({ count: 2, timeoutMs: 300_000 })
  const children = results.map((r) => r.sandbox ?? r).filter((c) => c.sandboxId)
  assert.equal(children.length, 2, JSON.stringify(results.map((r) => String(r.error ?? 'ok'))))
  for (const child of children) {
    assert.equal(await child.files.read('mark'), 'forked')
    await child.kill()
  }
})

await test('hosts', async () => {
  assert.equal(sandbox.getHost(3000), `3000-${sandbox.sandboxId}.sandbox.localhost:3002`)
})

await test('kill', async () => {
  assert.equal(await sandbox.kill(), true)
  assert.equal(await sandbox.isRunning(), false)
  await assert.rejects(Sandbox.connect(sandbox.sandboxId), (e) => e instanceof (SandboxNotFoundError ?? NotFoundError))
  assert.equal(await Sandbox.kill(sandbox.sandboxId), false)
})

await test('an unknown template', async () => {
  await assert.rejects(Sandbox.create('no-such-template'), /404.*no-such-template.*not found/)
})

process.exit(failed ? 1 : 0)
