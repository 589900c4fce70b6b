// Files and directories.
import assert from 'node:assert/strict'
import { buffer } from 'node:stream/consumers'
import { sdk, test, until } from './harness.mjs'

const { FileNotFoundError, FileType, FilesystemEventType, InvalidArgumentError, NotFoundError } = sdk

export default async function (sandbox) {
  const { commands, files } = sandbox
  const bytes = Uint8Array.from({ length: 3_000_000 }, (_, i) => (i * i) >> 3)
  const text = 'compressible '.repeat(100_000)

  await test('write and read: text, bytes, stream, blob, nothing', async () => {
    const w = await files.write('dir/a.txt', 'text')
    assert.deepEqual([w.name, w.path, w.type], ['a.txt', '/home/user/dir/a.txt', 'file'])
    assert.equal(await files.read('dir/a.txt'), 'text')
    await files.write('/tmp/bytes', bytes.buffer)
    assert.deepEqual(await files.read('/tmp/bytes', { format: 'bytes' }), bytes)
    assert.deepEqual(new Uint8Array(await buffer(await files.read('/tmp/bytes', { format: 'stream' }))), bytes)
    assert.deepEqual(new Uint8Array(await (await files.read('/tmp/bytes', { format: 'blob' })).arrayBuffer()), bytes)
    await files.write('empty', new Blob([]))
    assert.equal(await files.read('empty'), '')
  })

  await test('write: many at once, as octets, compressed, as another user', async () => {
    const many = await files.write([{ path: 'm/one', data: '1' }, { path: '/tmp/two', data: new Blob(['2']) }])
    assert.deepEqual(many.map((f) => f.path), ['/home/user/m/one', '/tmp/two'])
    assert.equal(await files.read('/tmp/two'), '2')
    await files.write('octets', new Blob([text]).stream(), { useOctetStream: true })
    assert.equal(await files.read('octets'), text)
    await files.write('packed', text, { gzip: true })
    assert.equal(await files.read('packed', { gzip: true }), text)
    await files.write('/root/x/y', 'r', { user: 'root' })
    assert.equal((await commands.run('wc -c < packed; stat -c "%U %G %a" m m/one; sudo stat -c %U /root/x/y')).stdout, `${text.length}\nuser user 755\nuser user 644\nroot\n`)
  })

  await test('metadata of files', async () => {
    const w = await files.write('meta', 'x', { metadata: { author: 'me', Color: 'blue' } })
    assert.deepEqual(w.metadata, { author: 'me', color: 'blue' })
    assert.deepEqual((await files.getInfo('meta')).metadata, { author: 'me', color: 'blue' })
    await files.write('meta', 'y')
    assert.equal((await files.getInfo('meta')).metadata, undefined)
  })

  await test('what is not there, or is a directory', async () => {
    await assert.rejects(files.read('missing'), (e) => e instanceof (FileNotFoundError ?? NotFoundError))
    await assert.rejects(files.read('/tmp'), InvalidArgumentError)
    await assert.rejects(files.write('/tmp', 'x'), InvalidArgumentError)
    await assert.rejects(files.list('missing'), NotFoundError)
    await assert.rejects(files.list('empty'), InvalidArgumentError)
    await assert.rejects(files.rename('missing', 'x'), NotFoundError)
    await assert.rejects(files.watchDir('missing', () => {}), NotFoundError)
  })

  await test('directories: make, list, info, move, remove, exists', async () => {
    assert.deepEqual([await files.makeDir('t/u/v'), await files.makeDir('t/u/v')], [true, false])
    await files.write('t/u/f', 'abc')
    await commands.run('ln -s u/f t/l; chmod 640 t/u/f')
    assert.deepEqual((await files.list('t')).map((e) => [e.name, e.type]), [['l', FileType.FILE], ['u', FileType.DIR]])
    assert.deepEqual((await files.list('t', { depth: 3 })).map((e) => e.path).sort(), ['l', 'u', 'u/f', 'u/v'].map((n) => `/home/user/t/${n}`))
    const info = await files.getInfo('t/u/f')
    assert.deepEqual([info.type, info.size, info.mode, info.permissions, info.owner, info.group], [FileType.FILE, 3, 0o640, '-rw-r-----', 'user', 'user'])
    assert(Math.abs(info.modifiedTime - Date.now()) < 600_000)
    assert.equal((await files.getInfo('t/l')).symlinkTarget, '/home/user/t/u/f')
    assert.equal((await files.rename('t/u', 't/w')).path, '/home/user/t/w')
    assert.deepEqual([await files.exists('t/u'), await files.exists('t/w/f')], [false, true])
    await files.remove('t')
    assert.equal(await files.exists('t'), false)
  })

  await test('watch a directory', async () => {
    await files.makeDir('watched')
    const seen = []
    const has = (name, type) => () => seen.some((e) => e.name === name && e.type === type)
    let ended = false
    const w = await files.watchDir('watched', (e) => { seen.push(e) }, { onExit: () => { ended = true } })
    await files.write('watched/new', 'x')
    await until('create', has('new', FilesystemEventType.CREATE))
    await until('write', has('new', FilesystemEventType.WRITE))
    await commands.run('cd watched; chmod 600 new; mv new old; rm old; mkdir sub; touch sub/deep last')
    await until('chmod', has('new', FilesystemEventType.CHMOD))
    await until('rename', has('new', FilesystemEventType.RENAME))
    await until('remove', has('old', FilesystemEventType.REMOVE))
    await until('the last', has('last', FilesystemEventType.CREATE))
    assert(seen.every((e) => e.name !== 'sub/deep'), JSON.stringify(seen))
    await w.stop()
    await until('the end', () => ended)
  })

  await test('watch a tree, with entries', async () => {
    await files.makeDir('tree/a')
    const seen = []
    const w = await files.watchDir('tree', (e) => { seen.push(e) }, { recursive: true, includeEntry: true, timeoutMs: 0 })
    await commands.run('mkdir -p tree/a/b/c; echo x > tree/a/b/c/f')
    await until('the file', () => seen.some((e) => e.name === 'a/b/c/f'))
    assert.equal(seen.find((e) => e.name === 'a/b').entry?.type, FileType.DIR)
    await w.stop()
  })
}
