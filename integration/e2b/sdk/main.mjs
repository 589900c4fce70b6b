// Calls of a published SDK against a stack with the template base: what its users do with sandboxes. Prints a line for each
// test: "ok NAME" or "not ok NAME", and after a tab how long it took, or why.
//   node main.mjs PACKAGE PART…
// Environment: E2B_API_KEY, E2B_API_URL and E2B_SANDBOX_URL, or E2B_DOMAIN; OTHER_KEY, a key of another team; SERVER, an address
// outside that answers a line at port 7000 with the same.
import { finish, sdk, test } from './harness.mjs'

let sandbox
const made = await test('create, as it is by default', async () => {
  sandbox = await sdk.Sandbox.create({ metadata: { part: 'shared' } })
  await sandbox.setTimeout(1_800_000)
})
if (made) {
  // What a part leaves behind is the next one's sandbox: it is the same one, connected to again.
  for (const part of process.argv.slice(3)) sandbox = (await (await import(`./${part}.mjs`)).default(sandbox)) ?? sandbox
  await test('kill what all tests have used', () => sandbox.kill())
}
finish()
