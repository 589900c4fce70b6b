// What a first program does.
import assert from 'node:assert/strict'
import { sdk, test } from './harness.mjs'

export default async function (sandbox) {
  await test('Python, and a file', async () => {
    assert.equal((await sandbox.commands.run('python3 -c "print(6 * 7)"')).stdout, '42\n')
    await sandbox.files.write('a.txt', 'a')
    assert.equal(await sandbox.files.read('a.txt'), 'a')
    assert.equal((await sandbox.getInfo()).sandboxId, sandbox.sandboxId)
    assert.equal(await sandbox.isRunning(), true)
  })

  await test('by its id alone', async () => {
    const same = await sdk.Sandbox.connect(sandbox.sandboxId)
    assert.equal((await same.commands.run('cat a.txt')).stdout, 'a')
  })
}
