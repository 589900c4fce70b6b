// Templates that the SDK builds: every kind of step, what is done only once, what fails and where, tags, and sandboxes of them.
import assert from 'node:assert/strict'
import { mkdirSync, symlinkSync, writeFileSync } from 'node:fs'
import { fileURLToPath } from 'node:url'
import { sdk, test, until } from './harness.mjs'

const { Sandbox, Template, waitForFile } = sdk
const image = 'cube.local/base:bookworm'
const small = { cpuCount: 1, memoryMB: 512 }

// build builds, and returns what was told.
async function build(template, name, options) {
  const lines = []
  const info = await Template.build(template, name, { ...small, ...options, onBuildLogs: (l) => lines.push(l.message) })
  return { ...info, lines }
}

export default async function () {
  const context = fileURLToPath(new URL('context', import.meta.url))
  mkdirSync(`${context}/tree/deep`, { recursive: true })
  writeFileSync(`${context}/one.txt`, 'one\n')
  writeFileSync(`${context}/tree/deep/two.sh`, '#!/bin/bash\necho two "$@"\n', { mode: 0o755 })
  symlinkSync('deep/two.sh', `${context}/tree/link`)
  const whole = () =>
    Template({ fileContextPath: context })
      .fromImage(image)
      .setEnvs({ COLOUR: 'blue', SKY: 'light' })
      .setWorkdir('/srv/app')
      .copy('one.txt', 'copied/', { user: 'user', mode: 0o640 })
      .copy('tree', '/srv/tree')
      .runCmd('id -un > who; pwd >> who; echo "$COLOUR $SKY" >> who', { user: 'root' })
      .setUser('user')
      .runCmd('sleep 0.1; id -un > /tmp/user; echo "told so"')
      .setStartCmd('echo started > /tmp/started; exec sleep 6543', waitForFile('/tmp/started'))

  let first, took
  await test('build: every kind of step, and a sandbox of it', async () => {
    assert.equal(await Template.exists('whole'), false)
    const began = Date.now()
    first = await build(whole(), 'whole:v1', { tags: ['v1', 'stable'] })
    took = Date.now() - began
    assert.deepEqual(first.tags, ['v1', 'stable'])
    assert(first.lines.some((l) => /Uploaded 'one.txt'/.test(l)) && first.lines.includes('told so'), first.lines.join('\n'))
    assert.equal(await Template.exists('whole'), true)
    const sandbox = await Sandbox.create('whole:stable')
    try {
      const { stdout } = await sandbox.commands.run('cat /srv/app/who /tmp/user; pgrep -c -x -f "sleep 6543"; id -un; pwd; echo "$COLOUR"; stat -c "%U %a" copied/one.txt; /srv/tree/link 3; readlink /srv/tree/link')
      assert.equal(stdout, 'root\n/srv/app\nblue light\nuser\n1\nuser\n/srv/app\nblue\nuser 640\ntwo 3\ndeep/two.sh\n')
    } finally {
      await sandbox.kill()
    }
  })

  await test('build: the same again is not done again', async () => {
    const began = Date.now()
    const again = await build(whole(), 'whole:v2')
    assert(again.lines.some((l) => /Skipping upload of 'one.txt'/.test(l)) && !again.lines.includes('told so'), again.lines.join('\n'))
    assert.equal(again.templateId, first.templateId)
    assert.notEqual(again.buildId, first.buildId)
    console.error(`the first build took ${took} ms, the second ${Date.now() - began} ms`)
  })

  await test('build: a step that fails is the one that is told', async () => {
    const template = Template().fromImage(image).runCmd('true').runCmd('echo looking; echo "no such thing" >&2; exit 3')
    await assert.rejects(build(template, 'failing'), (e) => {
      assert(e instanceof sdk.BuildError && /3/.test(e.message) && /no such thing/.test(e.message) && /templates\.mjs/.test(e.stack), `${e.message} ${e.stack}`)
      return true
    })
    await assert.rejects(Sandbox.create('failing'), /not found/)
  })

  await test('build: what runs in it is never ready', async () => {
    const template = Template().fromTemplate('whole:v1').setStartCmd('echo hm; exec sleep 6544', 'echo "not yet"; exit 7')
    await assert.rejects(build(template, 'unready'), (e) => e instanceof sdk.BuildError && /not yet|exit status 7/.test(e.message))
  })

  await test('build: of another template, without waiting', async () => {
    const info = await Template.buildInBackground(Template().fromTemplate('whole:v1').runCmd('echo child > /tmp/child'), 'child', small)
    let status
    const over = () => status && status.status !== 'waiting' && status.status !== 'building'
    await until('the end of the build', over, async () => (status = await Template.getBuildStatus(info)))
    assert.equal(status.status, 'ready', status.reason?.message)
    const sandbox = await Sandbox.create('child')
    try {
      const { stdout } = await sandbox.commands.run('cat /tmp/child /srv/app/who; pgrep -c -x -f "sleep 6543"')
      assert.equal(stdout, 'child\nroot\n/srv/app\nblue light\n1\n')
    } finally {
      await sandbox.kill()
    }
  })

  await test('tags: more of them, fewer, and what they stand for', async () => {
    const tagged = await Template.assignTags('whole:v1', ['production'])
    assert.deepEqual(tagged, { buildId: first.buildId, tags: ['production'] })
    await Template.removeTags('whole', ['stable', 'v2'])
    const tags = await Template.getTags(first.templateId)
    assert.deepEqual(tags.map((t) => [t.tag, t.buildId]), [['production', first.buildId], ['v1', first.buildId]])
    await assert.rejects(Template.removeTags('whole', 'nope'), /not found/)
  })
}
