// What a sandbox reaches, and how that is changed while it runs.
import assert from 'node:assert/strict'
import { test, told } from './harness.mjs'

const server = process.env.SERVER

// reaches tells whether a sandbox gets an answer from the server outside.
export async function reaches(sandbox) {
  const r = await sandbox.commands.run(`timeout 5 bash -c 'exec 3<>/dev/tcp/${server}/7000; echo hi >&3; head -n 1 <&3' 2>/dev/null || true`)
  return r.stdout === 'hi\n'
}

export default async function (sandbox) {
  await test('network: rules by address, replaced while the sandbox runs', async () => {
    assert.equal(await reaches(sandbox), true, 'at first')
    await sandbox.updateNetwork({ denyOut: [server] })
    assert.equal(await reaches(sandbox), false, 'denied')
    assert.deepEqual(told((await sandbox.getInfo()).network), { allowPublicTraffic: true, denyOut: [server] })
    await sandbox.updateNetwork({ allowOut: [`${server}/32`], denyOut: ({ allTraffic }) => [allTraffic] })
    assert.equal(await reaches(sandbox), true, 'allowed, with all else denied')
    await sandbox.updateNetwork({ allowOut: ['10.0.0.0/8'], allowInternetAccess: false })
    assert.equal(await reaches(sandbox), false, 'without the internet')
    assert.equal((await sandbox.getInfo()).allowInternetAccess, false)
    await sandbox.updateNetwork({})
    assert.equal(await reaches(sandbox), true, 'at last')
  })
}
