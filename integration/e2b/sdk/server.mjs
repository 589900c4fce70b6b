// What a user of a sandbox may run in it: HTTP/1.1 with server-sent events and WebSockets at port 3000, HTTP/2 without TLS at 3001.
import { createHash } from 'node:crypto'
import { createServer } from 'node:http'
import { createServer as createServer2 } from 'node:http2'

let events
const server = createServer((req, res) => {
  if (req.url === '/events') {
    res.writeHead(200, { 'Content-Type': 'text/event-stream' })
    res.write('data: 0\n\n')
    events = res
  } else if (req.url === '/next') {
    events.write('data: 1\n\n')
    res.end()
  } else {
    const hash = createHash('sha256')
    req.on('data', (d) => hash.update(d))
    req.on('end', () => res.end(JSON.stringify({ url: req.url, version: req.httpVersion, headers: req.headers, digest: hash.digest('hex') })))
  }
})

// Each short text comes back with an "!".
server.on('upgrade', (req, socket) => {
  const accept = createHash('sha1').update(req.headers['sec-websocket-key'] + '258EAFA5-E914-47DA-95CA-C5AB0DC85B11').digest('base64')
  socket.write(`HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: ${accept}\r\n\r\n`)
  socket.on('data', (d) => {
    if ((d[0] & 15) !== 1) return socket.end()
    const length = d[1] & 127
    const text = d.subarray(6, 6 + length).map((b, i) => b ^ d[2 + (i & 3)])
    socket.write(Buffer.concat([Buffer.from([0x81, length + 1]), text, Buffer.from('!')]))
  })
})
server.listen(3000, '127.0.0.1')

createServer2((req, res) => res.end(`HTTP/${req.httpVersion}`)).listen(3001)
