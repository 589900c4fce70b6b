// The SDK's helper for Git, which needs a git in the sandbox.
import assert from 'node:assert/strict'
import { test } from './harness.mjs'

export default async function (sandbox) {
  const { commands, files, git } = sandbox

  await test('git: a repository, its branches, and another one', async () => {
    await commands.run('git init -q --bare /tmp/remote.git')
    await git.configureUser('A User', 'user@a.test')
    assert.equal(await git.getConfig('user.name', { scope: 'global' }), 'A User')
    await git.init('repo', { initialBranch: 'main' })
    await files.write('repo/a', '1')
    const dirty = await git.status('repo')
    assert.deepEqual([dirty.currentBranch, dirty.fileStatus.map((f) => [f.name, f.status])], ['main', [['a', 'untracked']]])
    await git.add('repo')
    await git.commit('repo', 'First')
    await git.createBranch('repo', 'other')
    await git.checkoutBranch('repo', 'main')
    assert.deepEqual((await git.branches('repo')).branches.sort(), ['main', 'other'])
    await git.remoteAdd('repo', 'origin', '/tmp/remote.git')
    assert.equal(await git.remoteGet('repo', 'origin'), '/tmp/remote.git')
    await git.push('repo', { remote: 'origin', branch: 'main', setUpstream: true })
    await git.clone('/tmp/remote.git', { path: 'copy', branch: 'main' })
    assert.equal(await files.read('copy/a'), '1')
  })
}
