// What users are told when something is wrong: classes of errors, and messages that name the cause.
import assert from 'node:assert/strict'
import { sdk, second, test } from './harness.mjs'

const { AuthenticationError, NotEnoughSpaceError, NotFoundError, Sandbox, SandboxNotFoundError, Secret, Template, Volume } = sdk

export default async function (sandbox) {
  const id = sandbox.sandboxId

  await test('keys: a wrong one, and one of another team', async () => {
    await assert.rejects(Sandbox.create({ apiKey: 'e2b_' + '0'.repeat(40) }), (e) => e instanceof AuthenticationError && /cube key create/.test(e.message))
    const other = { apiKey: process.env.OTHER_KEY }
    for (const call of ['getInfo', 'connect', 'pause', 'createSnapshot', 'getMetrics']) await assert.rejects(Sandbox[call](id, other), SandboxNotFoundError, call)
    await assert.rejects(Sandbox.setTimeout(id, 1000, other), SandboxNotFoundError)
    await assert.rejects(Sandbox.updateNetwork(id, {}, other), SandboxNotFoundError)
    await assert.rejects(Sandbox.fork(id, other), NotFoundError)
    assert.equal(await Sandbox.kill(id, other), false)
    assert.deepEqual(await Sandbox.list(other).nextItems(), [])
    assert.equal(await sandbox.isRunning(), true)
  })

  await test('a wrong token for the daemon in the sandbox', async () => {
    const thief = new Sandbox({ sandboxId: id, sandboxDomain: sandbox.sandboxDomain, envdVersion: '0.6.13', envdAccessToken: 'wrong' })
    await assert.rejects(thief.commands.run('true'), AuthenticationError)
    await assert.rejects(thief.files.read('/etc/passwd'), AuthenticationError)
  })

  await test('what is not supported is refused by name', async () => {
    for (const [options, name] of [
      [{ network: { rules: { 'a.test': [{ transform: { headers: { a: 'b' } } }] } } }, 'network.rules'],
      [{ network: { egressProxy: { address: 'a:1' } } }, 'network.egressProxy'],
      [{ network: { allowOut: ['a.test'], denyOut: ['0.0.0.0/0'] } }, 'network.allowOut[0]'],
      [{ network: { denyOut: ['::/0'] } }, 'network.denyOut[0]'],
      [{ volumeMounts: { '/mnt/d': 'vol1' } }, 'volumeMounts'],
      [{ iam: { tokens: { a: { audience: 'b', tokenType: 'JWT-SVID' } } } }, 'iam'],
      [{ envs: { 'a=b': 'c' } }, 'envVars'],
    ]) await assert.rejects(Sandbox.create(options), (e) => e.message.startsWith('400') && e.message.includes(name), name)
    if (!second) await assert.rejects(Sandbox.create({ secure: false, network: { allowPublicTraffic: false } }), /You cannot create a sandbox without public access unless you enable secure envd access via 'secure' flag\./)
    await assert.rejects(Volume.create('vol1'), /volumes aren't supported here/)
    await assert.rejects(Secret.list().nextItems(), /secrets aren't supported here/)
  })

  await test('templates: one that is there, and one that is not', async () => {
    await assert.rejects(Sandbox.create('no-such-template'), /404.*no-such-template.*not found/)
    assert.deepEqual([await Template.exists('base'), await Template.exists('no-such-template')], [true, false])
  })

  await test('a full disk', async () => {
    await sandbox.commands.run('sudo mkdir -p /mnt/small; sudo mount -t tmpfs -o size=64k,mode=777 small /mnt/small')
    await assert.rejects(sandbox.files.write('/mnt/small/big', 'x'.repeat(1_000_000)), NotEnoughSpaceError)
    await sandbox.files.write('/mnt/small/little', 'x')
    await sandbox.commands.run('sudo umount /mnt/small')
  })
}
