// Calls of the published SDK against a daemon, as E2B_DEBUG=true has it: what a user of the SDK sees, with the daemon's user
// "user" at /home/user. Prints a line for each test: "ok NAME" or "not ok NAME", and after a tab how long it took, or why.
//   node suite.mjs PACKAGE
import assert from 'node:assert/strict'
import { createServer } from 'node:http'
import { buffer } from 'node:stream/consumers'

const sdk = await import(process.argv[2])
const { Sandbox, CommandExitError, TimeoutError, NotFoundError, InvalidArgumentError, FileType, FilesystemEventType } = sdk
const base = 'http://localhost:49983'
const sandbox = await Sandbox.create()
const { commands, files, pty } = sandbox
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

// until waits for what is told by events.
async function until(what, ready, onTick) {
  const deadline = Date.now() + 20_000
  while (!ready()) {
    assert(Date.now() < deadline, `${what} has not come`)
    if (onTick) await onTick()
    await new Promise((r) => setImmediate(r))
  }
}

await test('run: output, exit code, environment, directory', async () => {
  const r = await commands.run('echo out; echo err >&2; pwd; id -un; echo "$HOME $USER $LOGNAME $E2B_SANDBOX $A"', { envs: { A: 'b c' } })
  assert.equal(r.stdout, 'out\n/home/user\nuser\n/home/user user user true b c\n')
  assert.equal(r.stderr, 'err\n')
  assert.equal(r.exitCode, 0)
  assert.equal((await commands.run('pwd', { cwd: '/tmp' })).stdout, '/tmp\n')
})

await test('run: as another user, with its groups', async () => {
  assert.equal((await commands.run('id -un; pwd', { user: 'root' })).stdout, 'root\n/root\n')
  assert.equal((await commands.run('id -Gn')).stdout, 'user sudo shared\n')
  await assert.rejects(commands.run('true', { user: 'nobody-here' }), /there is no user "nobody-here"/)
})

await test('run: failures are told', async () => {
  await assert.rejects(commands.run('exit 3'), (e) => e instanceof CommandExitError && e.exitCode === 3)
  await assert.rejects(commands.run('true', { cwd: '/nowhere' }), InvalidArgumentError)
})

await test('run: all of the output, in order, by callbacks', async () => {
  let got = ''
  const r = await commands.run('for i in $(seq 200000); do echo $i; done', { onStdout: (s) => { got += s } })
  assert.equal(r.stdout.length, 1288895)
  assert.equal(got, r.stdout)
  assert(r.stdout.endsWith('\n200000\n'))
})

await test('timeout kills the command and all it has started', async () => {
  const started = Date.now()
  let left
  await assert.rejects(commands.run('sleep 4321; true', { timeoutMs: 1000 }), TimeoutError)
  assert(Date.now() - started < 15_000)
  await until('the end of sleep', () => left === '', async () => { left = (await commands.run('pgrep -f "^sleep 4321" || true')).stdout })
})
await test('a client that goes away leaves the command running', async () => {
  const h = await commands.run('read line; echo "got $line"', { background: true, stdin: true, timeoutMs: 0 })
  await h.disconnect()
  const again = await commands.connect(h.pid)
  await commands.sendStdin(h.pid, 'hello\n')
  assert.equal((await again.wait()).stdout, 'got hello\n')
})

await test('list, stdin, its end, kill', async () => {
  const h = await commands.run('cat; echo end', { background: true, stdin: true })
  const listed = (await commands.list()).find((p) => p.pid === h.pid)
  assert.equal(listed.cmd, '/bin/bash')
  assert.deepEqual(listed.args, ['-l', '-c', 'cat; echo end'])
  await commands.sendStdin(h.pid, 'a\nb\n')
  if (commands.closeStdin) await commands.closeStdin(h.pid)
  else await h.kill()
  assert.equal((await h.wait()).stdout, 'a\nb\nend\n')
  const sleeping = await commands.run('sleep 1000; true', { background: true })
  assert.equal(await sleeping.kill(), true)
  await assert.rejects(sleeping.wait(), (e) => e instanceof CommandExitError && /killed/.test(e.message))
  assert.equal(await commands.kill(sleeping.pid), false)
  await assert.rejects(commands.connect(1), NotFoundError)
})

await test('without stdin a command reads nothing', async () => {
  assert.equal((await commands.run('cat; echo end')).stdout, 'end\n')
  const h = await commands.run('cat', { background: true })
  await h.wait()
})

await test('terminal: size, resize, input, end', async () => {
  let out = ''
  const p = await pty.create({ cols: 80, rows: 24, onData: (d) => { out += Buffer.from(d) }, timeoutMs: 0 })
  const type = (s) => pty.sendInput(p.pid, Buffer.from(s))
  await type('stty size; tty; test -w $(tty) && echo writa""ble; echo $TERM\n')
  await until('the size', () => out.includes('24 80') && out.includes('writable') && out.includes('xterm-256color'))
  await pty.resize(p.pid, { cols: 132, rows: 50 })
  await type('stty size\n')
  await until('the new size', () => out.includes('50 132'))
  await type(`bash -c 'echo sle""eping; sleep 1000'\n`)
  await until('sleep', () => out.includes('sleeping'))
  await type('\x03')
  await type('exit 7\n')
  await assert.rejects(p.wait(), (e) => e.exitCode === 7)
  const q = await pty.create({ cols: 80, rows: 24, onData: () => {} })
  assert.equal(await pty.kill(q.pid), true)
})

await test('files: text, bytes, stream, blob, empty, many', async () => {
  const w = await files.write('dir/a.txt', 'text')
  assert.deepEqual([w.name, w.path, w.type], ['a.txt', '/home/user/dir/a.txt', 'file'])
  assert.equal(await files.read('dir/a.txt'), 'text')
  assert.equal((await commands.run('stat -c "%U %G %a" dir dir/a.txt')).stdout, 'user user 755\nuser user 644\n')
  const all = Uint8Array.from({ length: 3_000_000 }, (_, i) => (i * i) >> 3)
  await files.write('/tmp/bytes', all.buffer)
  assert.deepEqual(await files.read('/tmp/bytes', { format: 'bytes' }), all)
  assert.deepEqual(new Uint8Array(await buffer(await files.read('/tmp/bytes', { format: 'stream' }))), all)
  assert.equal((await files.read('/tmp/bytes', { format: 'blob' })).size, all.length)
  await files.write('empty', '')
  assert.equal(await files.read('empty'), '')
  const many = await files.write([{ path: 'm/one', data: '1' }, { path: '/tmp/two', data: '2' }])
  assert.deepEqual(many.map((f) => f.path), ['/home/user/m/one', '/tmp/two'])
  assert.equal(await files.read('/tmp/two'), '2')
})

await test('files: streamed and compressed, both ways', async () => {
  const text = 'compressible '.repeat(100_000)
  await files.write('octets', new Blob([text]).stream(), { useOctetStream: true })
  assert.equal(await files.read('octets'), text)
  await files.write('packed', text, { gzip: true })
  assert.equal((await commands.run('wc -c < packed')).stdout.trim(), String(text.length))
  assert.equal(await files.read('packed', { gzip: true }), text)
})

await test('files: as another user, over a link, errors', async () => {
  await files.write('/root/x/y', 'r', { user: 'root' })
  assert.equal((await commands.run('stat -c %U /root/x/y', { user: 'root' })).stdout, 'root\n')
  await commands.run('echo before > target; chmod 750 target; ln -sf target link')
  await files.write('link', 'after')
  assert.equal((await commands.run('cat target; stat -c " %a" target; test -L link')).stdout, 'after 750\n')
  await assert.rejects(files.read('missing'), NotFoundError)
  await assert.rejects(files.read('/tmp'), InvalidArgumentError)
  await assert.rejects(files.write('/tmp', 'x'), InvalidArgumentError)
  assert.match(await files.read('/proc/version'), /^Linux version/)
})

await test('files: metadata', async () => {
  const w = await files.write('/var/tmp/meta', 'x', { metadata: { author: 'me', Color: 'blue' } })
  assert.deepEqual(w.metadata, { author: 'me', color: 'blue' })
  assert.deepEqual((await files.getInfo('/var/tmp/meta')).metadata, { author: 'me', color: 'blue' })
  await files.write('/var/tmp/meta', 'y')
  assert.equal((await files.getInfo('/var/tmp/meta')).metadata, undefined)
})

await test('tree: make, list, info, move, remove, exists', async () => {
  assert.equal(await files.makeDir('t/u/v'), true)
  assert.equal(await files.makeDir('t/u/v'), false)
  await files.write('t/u/f', 'abc')
  await commands.run('ln -s u/f t/l; ln -s nowhere t/broken; chmod 640 t/u/f')
  const one = await files.list('t')
  assert.deepEqual(one.map((e) => e.name).sort(), ['l', 'u'])
  const all = await files.list('t', { depth: 3 })
  assert.deepEqual(all.map((e) => e.path).sort(), ['l', 'u', 'u/f', 'u/v'].map((n) => `/home/user/t/${n}`))
  const info = await files.getInfo('t/u/f')
  assert.deepEqual([info.type, info.size, info.mode, info.permissions, info.owner, info.group], [FileType.FILE, 3, 0o640, '-rw-r-----', 'user', 'user'])
  assert(Math.abs(info.modifiedTime - Date.now()) < 600_000)
  const link = await files.getInfo('t/l')
  assert.deepEqual([link.type, link.symlinkTarget], [FileType.FILE, '/home/user/t/u/f'])
  assert.equal((await files.rename('t/u', 't/w')).path, '/home/user/t/w')
  assert.equal(await files.exists('t/u'), false)
  assert.equal(await files.exists('t/w/f/x'), false)
  assert.equal(await files.exists('t/w/f'), true)
  await files.remove('t')
  await files.remove('t')
  assert.equal(await files.exists('t'), false)
  await assert.rejects(files.list('t'), NotFoundError)
  await assert.rejects(files.list('empty'), InvalidArgumentError)
  await assert.rejects(files.rename('t', 'x'), NotFoundError)
})

await test('watch: what is made, written, renamed, removed', async () => {
  await files.makeDir('watched')
  const seen = []
  const has = (name, type) => () => seen.some((e) => e.name === name && e.type === type)
  let ended = false
  const w = await files.watchDir('watched', (e) => { seen.push(e) }, { onExit: () => { ended = true } })
  await files.write('watched/new', 'x')
  await until('create', has('new', FilesystemEventType.CREATE))
  await until('write', has('new', FilesystemEventType.WRITE))
  await commands.run('chmod 600 watched/new; mv watched/new watched/old; rm watched/old; mkdir watched/sub; touch watched/sub/deep')
  await until('chmod', has('new', FilesystemEventType.CHMOD))
  await until('rename', has('new', FilesystemEventType.RENAME))
  await until('remove', has('old', FilesystemEventType.REMOVE))
  await until('create', has('sub', FilesystemEventType.CREATE))
  assert(seen.every((e) => !e.name.startsWith('.') && e.name !== 'sub/deep'), JSON.stringify(seen))
  await w.stop()
  await until('the end', () => ended)
})

await test('watch: a tree, with entries', async () => {
  await files.makeDir('tree/a')
  const seen = []
  const w = await files.watchDir('tree', (e) => { seen.push(e) }, { recursive: true, includeEntry: true })
  await commands.run('mkdir -p tree/a/b/c; echo x > tree/a/b/c/f')
  await until('the file', () => seen.some((e) => e.name === 'a/b/c/f'))
  const b = seen.find((e) => e.name === 'a/b')
  assert.equal(b.entry?.type, FileType.DIR)
  await w.stop()
  await assert.rejects(files.watchDir('nowhere', () => {}), NotFoundError)
})

await test('the daemon itself: health, metrics, envs, CORS', async () => {
  assert.equal((await fetch(`${base}/health`)).status, 204)
  const m = await (await fetch(`${base}/metrics`)).json()
  assert(m.cpu_count >= 1 && m.mem_total > m.mem_used && m.disk_total > m.disk_used && Math.abs(m.ts - Date.now() / 1000) < 60)
  assert.equal((await (await fetch(`${base}/envs`)).json()).E2B_SANDBOX, 'true')
  const preflight = await fetch(`${base}/process.Process/List`, {
    method: 'OPTIONS',
    headers: { Origin: 'https://a.test', 'Access-Control-Request-Method': 'POST', 'Access-Control-Request-Headers': 'authorization,x-access-token' },
  })
  assert.equal(preflight.headers.get('access-control-allow-origin'), '*')
  assert.match(preflight.headers.get('access-control-allow-headers'), /authorization,x-access-token/)
})

await test('a server on loopback is reached at the address of the network card, again after a restart', async () => {
  const serve = async (text) => {
    const s = createServer((_, res) => res.end(text))
    await new Promise((r) => s.listen(8123, '127.0.0.1', r))
    return s
  }
  const get = async () => { try { return await (await fetch('http://192.0.2.2:8123', { headers: { connection: 'close' } })).text() } catch { return '' } }
  for (const text of ['first', 'second']) {
    const s = await serve(text)
    let got
    await until(text, () => got === text, async () => { got = await get() })
    s.closeAllConnections()
    await new Promise((r) => s.close(r))
  }
  // The port is free for who listens on all addresses.
  let all
  await until('the port', () => all, () => new Promise((r) => {
    const s = createServer().once('error', r).listen(8123, '0.0.0.0', () => { all = s; r() })
  }))
  all.close()
})

process.exit(failed ? 1 : 0)
