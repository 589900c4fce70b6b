// Creates with all options, what is told of sandboxes, and lists.
import assert from 'node:assert/strict'
import { all, get, sdk, second, test, told, until } from './harness.mjs'

const { Sandbox } = sdk
const metadata = { 'k 1': 'v&2=3', ключ: 'знач+%20ение' }
const ids = (list) => list.map((s) => s.sandboxId)

export default async function (plain) {
  let sandbox
  const made = await test('create with all options', async () => {
    sandbox = await Sandbox.create('base', {
      metadata, envs: { FROM_CREATE: 'a b', HOME_PAGE: '"$HOME"' }, timeoutMs: 600_001, secure: true, requestTimeoutMs: 300_000,
      network: {
        allowOut: ['10.1.2.0/24', '10.9.8.7'], denyOut: ({ allTraffic }) => [allTraffic], allowPublicTraffic: false,
        maskRequestHost: 'masked.test:${PORT}', ...(second && { httpsPorts: [8443] }),
      },
      lifecycle: { onTimeout: 'pause', autoResume: true },
    })
    assert.match(sandbox.sandboxId, /^[a-z0-9]+$/)
    assert(sandbox.trafficAccessToken)
    assert.equal(plain.trafficAccessToken, undefined)
  })
  if (!made) return

  await test('what is told of a sandbox', async () => {
    const info = await sandbox.getInfo()
    const { startedAt, endAt, network, templateId, envdVersion, ...rest } = info
    // 600,001 ms are 601 s.
    assert.equal(Math.round((endAt - startedAt) / 1000), 601)
    assert(Math.abs(Date.now() - startedAt) < 600_000)
    assert(templateId && /^\d+\.\d+\.\d+$/.test(envdVersion))
    assert.deepEqual(told(network), {
      allowOut: ['10.1.2.0/24', '10.9.8.7'], denyOut: ['0.0.0.0/0'], allowPublicTraffic: false, maskRequestHost: 'masked.test:${PORT}',
      ...(second && { httpsPorts: [8443] }),
    })
    assert.deepEqual(told(rest), {
      sandboxId: sandbox.sandboxId, name: 'base', metadata, state: 'running', cpuCount: 2, memoryMB: 512,
      lifecycle: { onTimeout: 'pause', autoResume: true }, volumeMounts: [], sandboxDomain: sandbox.sandboxDomain,
      ...(!second && { allowInternetAccess: true }), // it says so by itself
    })
    const byDefault = await Sandbox.getInfo(plain.sandboxId)
    assert.deepEqual(byDefault.lifecycle, { onTimeout: 'kill', autoResume: false })
    assert.deepEqual(told(byDefault.network), { allowPublicTraffic: true })
  })

  await test('variables that it was created with, and its own', async () => {
    const r = await sandbox.commands.run('echo "$FROM_CREATE|$HOME_PAGE|$E2B_SANDBOX|$E2B_SANDBOX_ID|$E2B_TEMPLATE_ID"; cat /run/e2b/.E2B_SANDBOX_ID; echo; hostname', { envs: { FROM_CREATE: 'c' } })
    const { templateId } = await sandbox.getInfo()
    const [vars, file, host] = r.stdout.split('\n')
    assert.equal(vars, `c|"$HOME"|true|${sandbox.sandboxId}|${templateId}`)
    assert.deepEqual([file, host.startsWith(sandbox.sandboxId)], [sandbox.sandboxId, true])
    assert.equal((await sandbox.commands.run('echo $FROM_CREATE')).stdout, 'a b\n')
    assert.match((await sandbox.commands.run('getent ahostsv4 localhost; getent hosts $(hostname)')).stdout, new RegExp(`^127\\.0\\.0\\.1[^]*^127\\.0\\.1\\.1 +${sandbox.sandboxId}$`, 'm'))
  })

  await test('a sandbox that is not public wants its traffic token', async () => {
    // A server that answers with what it was sent.
    await sandbox.commands.run(`python3 -c '
import socket
s = socket.create_server(("127.0.0.1", 8000))
while True:
  c = s.accept()[0]
  c.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n" + c.recv(65536))
  c.close()'`, { background: true, timeoutMs: 0 })
    const none = await get(sandbox, 8000, '/')
    assert.deepEqual([none.status, (await none.json()).message], [403, "Sandbox is secured with traffic access token. Token header 'e2b-traffic-access-token' is missing"])
    assert.equal((await get(sandbox, 8000, '/', { 'e2b-traffic-access-token': 'x' })).status, 403)
    let r
    await until('the server', () => r?.status === 200, async () => { r = await get(sandbox, 8000, '/', { 'e2b-traffic-access-token': sandbox.trafficAccessToken }) })
    const seen = await r.text()
    assert.match(seen, /^Host: masked\.test:8000\r?$/m)
    assert.doesNotMatch(seen, new RegExp(sandbox.trafficAccessToken))
  })

  await test('lists: by metadata, state, template, time and order, in pages', async () => {
    assert.deepEqual(ids(await all(Sandbox.list({ query: { metadata } }))), [sandbox.sandboxId])
    assert.deepEqual(await all(Sandbox.list({ query: { metadata: { ...metadata, 'k 1': 'other' } } })), [])
    const both = [sandbox.sandboxId, plain.sandboxId]
    assert.deepEqual(ids(await all(Sandbox.list())), both)
    assert.deepEqual(ids(await all(Sandbox.list({ order: 'asc', query: { state: ['running'] } }))), both.toReversed())
    assert.deepEqual(await all(Sandbox.list({ query: { state: ['paused'] } })), [])
    assert.deepEqual(ids(await all(Sandbox.list({ query: { template: 'base' } }))), both)
    assert.deepEqual(await all(Sandbox.list({ query: { template: 'no-such-template' } })), [])
    assert.deepEqual(await all(Sandbox.list({ query: { startedAfter: new Date(Date.now() + 3_600_000) } })), [])
    const pages = Sandbox.list({ limit: 1 })
    const first = await pages.nextItems()
    assert(pages.hasNext && pages.nextToken)
    const rest = Sandbox.list({ limit: 1, nextToken: pages.nextToken })
    assert.deepEqual([ids(first), ids(await all(rest))], [[both[0]], [both[1]]])
  })

  await test('a sandbox whose time is over pauses, and a call resumes it', async () => {
    await sandbox.commands.run('echo kept > /dev/shm/word')
    await sandbox.setTimeout(0)
    let state
    await until('the pause', () => state === 'paused', async () => { state = (await sandbox.getInfo()).state })
    assert.equal((await sandbox.commands.run('cat /dev/shm/word')).stdout, 'kept\n')
    const { state: resumed, endAt } = await sandbox.getInfo()
    assert.deepEqual([resumed, endAt - Date.now() > 240_000], ['running', true])
    assert.equal(await sandbox.kill(), true)
  })
}
