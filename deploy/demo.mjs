// What E2B's SDK does with Cube, with the time of each step: node demo.mjs, with E2B_API_KEY, E2B_API_URL and E2B_SANDBOX_URL.
import { Sandbox } from 'e2b'

const times = []

async function step(what, run) {
  const started = performance.now()
  const result = await run()
  times.push([what, (performance.now() - started) / 1000])
  return result
}

const sandbox = await step('a sandbox of the template base', () => Sandbox.create({ timeoutMs: 300_000 }))
try {
  const python = await step('Python', () => sandbox.commands.run('python3 -c "import platform; print(\'Python\', platform.python_version(), \'on Linux\', platform.release())"'))
  console.log(python.stdout.trim())
  await step('a file written', () => sandbox.files.write('note.txt', 'written outside, read inside\n'))
  console.log((await step('and read', () => sandbox.commands.run('cat note.txt'))).stdout.trim())
  await sandbox.commands.run('i=0; while true; do i=$((i+1)); echo $i >count; sleep 0.2; done', { background: true, timeoutMs: 0 })
  await step('paused to disk', () => sandbox.pause())
  const resumed = await step('resumed', () => Sandbox.connect(sandbox.sandboxId))
  console.log(`a counter that ran before the pause is at ${(await resumed.commands.run('cat count')).stdout.trim()}`)
  const forks = await step('forked twice', () => resumed.fork({ count: 2, timeoutMs: 60_000 }))
  for (const { sandbox: child } of forks.map((f) => (f.sandbox ? f : { sandbox: f }))) {
    console.log(`fork ${child.sandboxId} has: ${(await child.files.read('note.txt')).trim()}`)
    await child.kill()
  }
} finally {
  await step('killed', () => sandbox.kill())
}
console.log()
for (const [what, seconds] of times) console.log(`${what.padEnd(58)} ${seconds.toFixed(3).padStart(8)} s`)
