"""An HTTP server that replies like OpenAI's chat completions."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge(ThreadingHTTPServer):
    """Replies with the entries of `script` (status, text) in order, and repeats the last one. `requests` has headers and bodies."""

    request_queue_size = 256  # with the default of 5, the kernel resets some of the concurrent connections of an evaluation

    def __init__(self, *script: tuple[int, str]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.requests = list(script), list[tuple[dict[str, str], dict[str, Any]]]()


class Handler(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/chat/completions"
        self.server.requests.append((dict(self.headers), body))
        status, text = self.server.script.pop(0) if len(self.server.script) > 1 else self.server.script[0]
        reply = json.dumps({"choices": [{"message": {"content": text}}]} if status == 200 else {"error": text}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None: ...
