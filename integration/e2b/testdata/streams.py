# Serves streams that don't end: events, a download, and frames of a WebSocket that come back. It is in the background when it listens.
import base64
import hashlib
import http.server
import os
import sys
import time


class Streams(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.close_connection = True
        {"/events": self.events, "/download": self.download, "/socket": self.socket}[self.path]()

    def begin(self, status, **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def events(self):
        self.begin(200, Content_Type="text/event-stream")
        n = 0
        while True:
            self.wfile.write(b"data: %d\n\n" % n)
            n += 1
            time.sleep(0.1)

    def download(self):
        self.begin(200, Content_Type="application/octet-stream", Content_Length=str(1 << 40))
        n = 0
        while True:
            self.wfile.write(b"".join(b"%015d\n" % i for i in range(n, n + 4096)))
            n += 4096
            time.sleep(0.1)

    def socket(self):
        key = self.headers["Sec-WebSocket-Key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
        self.begin(101, Connection="Upgrade", Upgrade="websocket", Sec_WebSocket_Accept=accept)
        while True:
            head = self.rfile.read(6)  # of a short text: its length, and what it is masked with
            if len(head) < 6:
                return
            masked = self.rfile.read(head[1] & 127)
            text = bytes(b ^ head[2 + i % 4] for i, b in enumerate(masked))
            self.wfile.write(bytes([0x81, len(text)]) + text)


server = http.server.ThreadingHTTPServer(("0.0.0.0", 8000), Streams)
if os.fork() > 0:
    sys.exit()
server.serve_forever()
