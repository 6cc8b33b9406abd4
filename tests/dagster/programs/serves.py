"""Answers GET /health."""

import sys
from http.server import BaseHTTPRequestHandler, HTTPServer


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def log_message(self, *arguments: object) -> None: ...


HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
