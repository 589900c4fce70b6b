// Commands: run, list, stdin, kill, connect; terminals.
import assert from 'node:assert/strict'
import { sdk, test, until } from './harness.mjs'

const { CommandExitError, InvalidArgumentError, NotFoundError, TimeoutError } = sdk

export default async function (sandbox) {
  const { commands, pty } = sandbox

  await test('run: output, by callbacks too, exit code', async () => {
    let out = '', err = ''
    const r = await commands.run('seq 20000; echo bad >&2', { onStdout: (s) => { out += s }, onStderr: (s) => { err += s } })
    assert.deepEqual([r.exitCode, r.stdout.length, out === r.stdout, r.stdout.endsWith('\n20000\n')], [0, 108894, true, true])
    assert.deepEqual([r.stderr, err], ['bad\n', 'bad\n'])
    await assert.rejects(commands.run('echo why >&2; exit 3'), (e) => e instanceof CommandExitError && e.exitCode === 3 && e.stderr === 'why\n')
  })

  await test('run: output comes while the command runs', async () => {
    let out = ''
    const h = await commands.run('echo first; read line; echo "$line"', { background: true, stdin: true, onStdout: (s) => { out += s } })
    await until('the first line', () => out === 'first\n')
    await commands.sendStdin(h.pid, 'second\n')
    assert.equal((await h.wait()).stdout, 'first\nsecond\n')
  })

  await test('run: user, directory, environment', async () => {
    assert.equal((await commands.run('id -un; pwd; echo "$HOME"')).stdout, 'user\n/home/user\n/home/user\n')
    const r = await commands.run('id -un; pwd; echo "$HOME $A"', { user: 'root', cwd: '/var/tmp', envs: { A: "b 'c" } })
    assert.equal(r.stdout, "root\n/var/tmp\n/root b 'c\n")
    await assert.rejects(commands.run('true', { cwd: '/nowhere' }), InvalidArgumentError)
    await assert.rejects(commands.run('true', { user: 'nobody-here' }), /there is no user "nobody-here"/)
  })

  await test('run: a command whose time is over is killed, with all that it has started', async () => {
    await assert.rejects(commands.run('sleep 4321; true', { timeoutMs: 1000 }), TimeoutError)
    let left
    await until('the end of sleep', () => left === '', async () => { left = (await commands.run('pgrep -f "^sleep 4321" || true')).stdout })
  })

  await test('root owns the machine', async () => {
    const r = await commands.run('sudo id -u; sudo mkdir /sys/fs/cgroup/mine && sudo rmdir /sys/fs/cgroup/mine && echo cgroup; ls /dev/fuse /dev/loop-control /dev/net/tun; sudo unshare -Ur id -u; df -m /dev/shm | tail -n 1 | tr -s " " | cut -d " " -f 2')
    const lines = r.stdout.trim().split('\n')
    assert.deepEqual(lines.slice(0, 6), ['0', 'cgroup', '/dev/fuse', '/dev/loop-control', '/dev/net/tun', '0'])
    assert(Number(lines[6]) > 180, `/dev/shm has ${lines[6]} MiB`)
  })

  await test('list, connect, stdin and its end', async () => {
    const h = await commands.run('cat; echo end', { background: true, stdin: true, envs: { A: 'b' }, cwd: '/tmp', timeoutMs: 0 })
    const { cmd, args, cwd, envs } = (await commands.list()).find((p) => p.pid === h.pid)
    assert.deepEqual([cmd, args, cwd, envs], ['/bin/bash', ['-l', '-c', 'cat; echo end'], '/tmp', { A: 'b' }])
    await h.disconnect()
    const again = await commands.connect(h.pid)
    await commands.sendStdin(h.pid, 'a\n')
    await commands.sendStdin(h.pid, new TextEncoder().encode('b\n'))
    await commands.closeStdin(h.pid)
    assert.equal((await again.wait()).stdout, 'a\nb\nend\n')
    assert.equal((await commands.list()).some((p) => p.pid === h.pid), false)
  })

  await test('kill', async () => {
    const h = await commands.run('sleep 1000; true', { background: true })
    assert.equal(await h.kill(), true)
    await assert.rejects(h.wait(), (e) => e instanceof CommandExitError && /killed/.test(e.message))
    assert.equal(await commands.kill(h.pid), false)
    await assert.rejects(commands.connect(1), NotFoundError)
    await assert.rejects(commands.sendStdin(h.pid, 'x'), NotFoundError)
  })

  await test('terminal: size, input, another who looks on, kill', async () => {
    let out = '', other = ''
    const p = await pty.create({ cols: 80, rows: 24, onData: (d) => { out += Buffer.from(d) }, timeoutMs: 0, cwd: '/tmp', envs: { A: 'b' } })
    const type = (s) => pty.sendInput(p.pid, Buffer.from(s))
    await type('stty size; echo "<$TERM $PWD $A>"\n')
    await until('the size', () => out.includes('24 80') && out.includes('<xterm-256color /tmp b>'))
    await pty.resize(p.pid, { cols: 132, rows: 50 })
    const q = await pty.connect(p.pid, { onData: (d) => { other += Buffer.from(d) } })
    await type('stty size\n')
    await until('the size, to both', () => out.includes('50 132') && other.includes('50 132'))
    await q.disconnect()
    await type(`bash -c 'echo sle""eping; sleep 1000'\n`)
    await until('sleep', () => out.includes('sleeping'))
    await type('\x03')
    await type('exit 7\n')
    await assert.rejects(p.wait(), (e) => e.exitCode === 7)
    const r = await pty.create({ cols: 80, rows: 24, onData: () => {}, user: 'root' })
    assert.equal(await pty.kill(r.pid), true)
    await assert.rejects(r.wait())
    assert.equal(await pty.kill(r.pid), false)
  })
}
