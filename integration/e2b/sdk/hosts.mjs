// Servers in a sandbox, as who has its host name reaches them; URLs that are signed for others.
import assert from 'node:assert/strict'
import { createHash } from 'node:crypto'
import { readFile } from 'node:fs/promises'
import { connect } from 'node:http2'
import { text } from 'node:stream/consumers'
import { WebSocket } from 'undici'
import { byDomain, get, test, to, until } from './harness.mjs'

// ask asks by HTTP/2, and tells whether TLS has agreed on that.
async function ask(at) {
  const session = connect(at.url)
  try {
    const stream = session.request({ ':path': '/', ...at.headers })
    const [body] = await Promise.all([text(stream), new Promise((resolve, reject) => stream.once('response', resolve).once('error', reject))])
    return { body, alpn: session.alpnProtocol }
  } finally {
    session.close()
  }
}

export default async function (sandbox) {
  await sandbox.files.write('server.mjs', await readFile(new URL('server.mjs', import.meta.url), 'utf8'))
  await sandbox.commands.run('node server.mjs', { background: true, timeoutMs: 0 })

  await test('hosts: HTTP/1.1', async () => {
    assert.equal(sandbox.getHost(3000), `3000-${sandbox.sandboxId}.${sandbox.sandboxDomain}`)
    let r
    await until('the server', () => r?.status === 200, async () => { r = await get(sandbox, 3000, '/a%2Fb?c=%26', { accept: 'text/x' }) })
    const seen = await r.json()
    assert.deepEqual([seen.url, seen.version, seen.headers.accept], ['/a%2Fb?c=%26', '1.1', 'text/x'])
    assert.equal(seen.headers.host, byDomain ? sandbox.getHost(3000) : new URL(process.env.E2B_SANDBOX_URL).host)
    assert.equal(seen.headers['x-forwarded-proto'], byDomain ? 'https' : 'http')
    assert.equal(Object.keys(seen.headers).some((h) => h.startsWith('e2b-')), false)
    const closed = await get(sandbox, 3999, '/')
    assert.deepEqual([closed.status, (await closed.json()).message], [502, 'The sandbox is running but port is not open'])
  })

  await test('hosts: a body of 2 MB in pieces', async () => {
    const at = to(sandbox, 3000, '/'), piece = Buffer.alloc(100_000, 'x')
    const body = new ReadableStream({ start(c) { for (let i = 0; i < 20; i++) c.enqueue(piece); c.close() } })
    const seen = await (await fetch(at.url, { method: 'POST', headers: at.headers, body, duplex: 'half' })).json()
    assert.equal(seen.digest, createHash('sha256').update(Buffer.alloc(2_000_000, 'x')).digest('hex'))
  })

  await test('hosts: HTTP/2', async () => {
    if (byDomain) {
      const r = await ask(to(sandbox, 3000, '/'))
      assert.deepEqual([r.alpn, JSON.parse(r.body).headers.host], ['h2', sandbox.getHost(3000)])
    } else {
      // Who begins with HTTP/2 without TLS speaks it with the server.
      assert.deepEqual(await ask(to(sandbox, 3001, '/')), { body: 'HTTP/2.0', alpn: 'h2c' })
    }
  })

  await test('hosts: server-sent events come one by one', async () => {
    const r = await get(sandbox, 3000, '/events')
    assert.equal(r.headers.get('content-type'), 'text/event-stream')
    let seen = ''
    const reading = (async () => { for await (const d of r.body) seen += Buffer.from(d) })().catch(() => {})
    await until('the first', () => seen === 'data: 0\n\n')
    await get(sandbox, 3000, '/next')
    await until('the second', () => seen === 'data: 0\n\ndata: 1\n\n')
    await sandbox.commands.run('true')
    void reading
  })

  await test('hosts: WebSocket', async () => {
    const at = to(sandbox, 3000, '/ws', 'ws')
    const ws = new WebSocket(at.url, { headers: at.headers })
    await new Promise((resolve, reject) => { ws.onopen = resolve; ws.onerror = (e) => reject(e.error ?? new Error(e.message)) })
    for (const text of ['hello', 'again']) {
      const answer = new Promise((resolve) => { ws.onmessage = (e) => resolve(e.data) })
      ws.send(text)
      assert.equal(await answer, text + '!')
    }
    const closed = new Promise((resolve) => { ws.onclose = resolve })
    ws.close()
    await closed
  })

  await test('signed URLs: upload and download without a token', async () => {
    // By headers, who uses one has to say which sandbox it is of.
    const { headers } = to(sandbox, 49983, '')
    const use = (url, init) => fetch(url, { ...init, headers })
    const upload = async (url, name) => {
      const body = new FormData()
      body.append('file', new Blob(['signed']), name)
      return use(url, { method: 'POST', body })
    }
    const put = await sandbox.uploadUrl('up load.txt', { useSignatureExpiration: 600 })
    if (byDomain) assert(put.startsWith(`https://${sandbox.getHost(49983)}/files?`), put)
    assert.equal((await upload(put, 'x')).status, 200)
    assert.equal(await sandbox.files.read('up load.txt'), 'signed')
    assert.equal((await upload(await sandbox.uploadUrl(), 'named.txt')).status, 200)
    assert.equal(await sandbox.files.read('named.txt'), 'signed')
    const url = await sandbox.downloadUrl('up load.txt', { useSignatureExpiration: 600 })
    const r = await use(url)
    assert.deepEqual([r.status, await r.text()], [200, 'signed'])
    assert.equal(await (await use(await sandbox.downloadUrl('/etc/shadow', { user: 'root' }))).text().then((s) => s.includes('root:')), true)
    for (const [bad, message] of [
      [await sandbox.downloadUrl('up load.txt', { useSignatureExpiration: -10 }), 'signature is already expired'],
      [url.replace('load.txt', 'load.tyt'), 'invalid signature'],
      [url.replace(/signature_expiration=\d+/, 'signature_expiration=99999999999'), 'invalid signature'],
      [url.replace(/signature=[^&]+&/, ''), 'missing signature query parameter'],
      [put, 'invalid signature'],
    ]) {
      const refused = await use(bad)
      assert.deepEqual([refused.status, (await refused.json()).message], [401, message])
    }
  })
}
