# The program of a template's init hook: takes what it is told by who has the token, each request once, and writes it down.
import http.server
import json
import os

tries = {}
taken = set()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with open("/run/e2b/.E2B_HOOK_TOKEN") as token:
            if self.path != "/who" or self.headers["X-Cube-Hook-Token"] != token.read():
                return self.answer(401, "who are you?")
        request = self.headers["Idempotency-Key"]
        tries[request] = tries.get(request, 0) + 1
        how = body["env"].get("HOOK")
        if how == "refuse" or body["event"] == "resume" and os.path.exists("refuse-resume"):
            return self.answer(422, "no such tenant")
        if how == "later" and tries[request] < 3:
            return self.answer(503, "not yet")
        if request not in taken:
            taken.add(request)
            with open("taken", "a") as log:
                log.write(json.dumps(body | {"tries": tries[request]}) + "\n")
        self.answer(204, "")

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())


http.server.HTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
