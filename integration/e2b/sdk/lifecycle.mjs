// Pause and connect, timeouts, metrics, snapshots and forks.
import assert from 'node:assert/strict'
import { all, long, sdk, second, test, until } from './harness.mjs'

const { Sandbox, SandboxNotFoundError, TimeoutError } = sdk

export default async function (sandbox) {
  const id = sandbox.sandboxId

  await test('timeout: from now on, shorter too; connect never shortens it', async () => {
    const left = async () => ((await sandbox.getInfo()).endAt - Date.now()) / 1000
    const near = async (seconds) => { const l = await left(); assert(Math.abs(l - seconds) < 60, `it has ${l} s left, not ${seconds}`) }
    await sandbox.setTimeout(3_600_000)
    await near(3600)
    await Sandbox.connect(id, { timeoutMs: 60_000 })
    await near(3600)
    await Sandbox.setTimeout(id, 900_000)
    await near(900)
    await sandbox.connect({ timeoutMs: 1_800_000 })
    await near(1800)
  })

  await test('metrics', async () => {
    const [m] = (await sandbox.getMetrics()).slice(-1)
    assert(Math.abs(m.timestamp - Date.now()) < 600_000)
    assert.equal(m.cpuCount, 2)
    assert(m.cpuUsedPct >= 0 && m.memUsed > 0 && m.memUsed < m.memTotal && m.diskUsed > 0 && m.diskUsed < m.diskTotal, JSON.stringify(m))
    assert.deepEqual(await Sandbox.getMetrics(id, { start: new Date(Date.now() + 3_600_000) }), [])
  })

  await test('pause and connect: memory, processes and files go on', async () => {
    await sandbox.files.write('hello.txt', 'hello')
    const h = await sandbox.commands.run('i=0; while true; do i=$((i+1)); echo $i >/tmp/next; mv /tmp/next /tmp/count; sleep 0.1; done', { background: true, timeoutMs: 0 })
    await sandbox.commands.run('until [ -s /tmp/count ]; do sleep 0.1; done')
    assert.equal(await sandbox.pause(), true)
    await assert.rejects(h.wait())
    assert.deepEqual(await Promise.all([sandbox.isRunning(), sandbox.getInfo().then((i) => i.state), Sandbox.pause(id)]), [false, 'paused', false])
    assert.deepEqual((await all(Sandbox.list({ query: { state: ['paused'] } }))).map((s) => s.sandboxId), [id])
    await assert.rejects(sandbox.updateNetwork({}), /409/)
    await assert.rejects(sandbox.fork().then((r) => { throw r[0] }), /409/)
    const token = sandbox.envdAccessToken
    sandbox = await Sandbox.connect(id, { timeoutMs: 1_800_000 })
    assert.deepEqual([sandbox.sandboxId, sandbox.envdAccessToken], [id, token])
    const [before, now] = (await sandbox.commands.run('cat /tmp/count; date +%s')).stdout.split('\n').map(Number)
    assert(Math.abs(Date.now() / 1000 - now) < 30, `the clock is ${Date.now() / 1000 - now} s off`)
    let count
    await until('the process', () => count > before, async () => { count = Number((await sandbox.commands.run('cat /tmp/count')).stdout) })
    assert.equal(await sandbox.files.read('hello.txt'), 'hello')
    const again = await sandbox.commands.connect(h.pid)
    assert.equal(await again.kill(), true)
  })

  // Either of them asks for it; a boot takes its time.
  const without = [
    ['pause without memory', { keepMemory: false }, {}],
    ['connect without memory', {}, { onResume: 'reboot' }],
  ].slice(long || !second ? 0 : 1, second ? 2 : 1)
  for (const [name, pausing, resuming] of without) {
    await test(`${name}: the disk stays, the machine boots anew`, async () => {
      const boot = (await sandbox.commands.run('cat /proc/sys/kernel/random/boot_id; echo gone > /dev/shm/word')).stdout
      await sandbox.pause(pausing)
      await sandbox.connect({ timeoutMs: 1_800_000, ...resuming })
      const after = (await sandbox.commands.run('cat /proc/sys/kernel/random/boot_id; cat hello.txt; test ! -e /dev/shm/word')).stdout
      assert.equal(after.slice(boot.length), 'hello')
      assert.notEqual(after.slice(0, boot.length), boot)
    })
  }

  await test('snapshots: create, list, a sandbox of one, delete', async () => {
    await sandbox.files.write('mark', 'saved')
    const unnamed = await sandbox.createSnapshot()
    const named = await Sandbox.createSnapshot(id, { name: 'named-one' })
    assert.match(named.snapshotId, /named-one/)
    await sandbox.files.write('mark', 'later')
    const mine = await all(sandbox.listSnapshots({ limit: 1 }))
    assert.deepEqual(mine.map((s) => s.snapshotId).sort(), [unnamed.snapshotId, named.snapshotId].sort())
    assert.deepEqual((await all(Sandbox.listSnapshots({ name: 'named-one' }))).map((s) => s.snapshotId), [named.snapshotId])
    const child = await Sandbox.create(unnamed.snapshotId, { envs: { OF: 'child' } })
    try {
      assert.notEqual(child.sandboxId, id)
      assert.equal(await child.files.read('mark'), 'saved')
      assert.equal((await child.commands.run('echo $OF $E2B_SANDBOX_ID')).stdout, `child ${child.sandboxId}\n`)
      assert.equal(await sandbox.files.read('mark'), 'later')
    } finally {
      await child.kill()
    }
    for (const s of mine) assert.equal(await Sandbox.deleteSnapshot(s.snapshotId), true)
    assert.equal(await Sandbox.deleteSnapshot(named.snapshotId), false)
    await assert.rejects(Sandbox.create(unnamed.snapshotId), /404/)
  })

  await test('fork', async () => {
    await sandbox.commands.run('echo forked > /dev/shm/mark')
    const children = await sandbox.fork({ count: 2, timeoutMs: 300_000 })
    try {
      assert.equal(new Set([id, ...children.map((c) => c.sandboxId)]).size, 3, children.map(String).join())
      const words = await Promise.all([sandbox, ...children].map((s) => s.commands.run('cat /dev/shm/mark; echo $E2B_SANDBOX_ID')))
      assert.deepEqual(words.map((w) => w.stdout), [sandbox, ...children].map((s) => `forked\n${s.sandboxId}\n`))
    } finally {
      await Promise.all(children.map((c) => c.kill?.()))
    }
  })

  await test('kill: it is not there any more', async () => {
    const gone = await Sandbox.create({ timeoutMs: 300_000 })
    assert.equal(await gone.kill(), true)
    assert.deepEqual([await gone.isRunning(), await gone.kill(), await Sandbox.kill(gone.sandboxId)], [false, false, false])
    for (const call of ['connect', 'getInfo', 'pause', 'getMetrics', 'createSnapshot']) await assert.rejects(gone[call](), SandboxNotFoundError, call)
    await assert.rejects(gone.setTimeout(1000), SandboxNotFoundError)
    await assert.rejects(gone.updateNetwork({}), SandboxNotFoundError)
    await assert.rejects(gone.commands.run('true'), SandboxNotFoundError)
    await assert.rejects(gone.files.read('a'), TimeoutError)
  })
  return sandbox
}
