"""Programs other than a store that may be at an endpoint: they answer every request with the same bytes, or not at all."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def silent() -> Iterator[socket.socket]:
    """A port that accepts connections and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


@contextmanager
def answering(data: bytes) -> Iterator[int]:
    """A port that answers every request with the same data, and hangs up."""

    def run() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return  # closed
            with connection, suppress(OSError):  # a probe sends nothing
                connection.settimeout(5)
                connection.recv(4096)
                connection.sendall(data)

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield server.getsockname()[1]
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


@contextmanager
def http_server(status: int = 200, body: bytes = b"", name: str = "Canned/1") -> Iterator[int]:
    """The port of an HTTP server with a single answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", "0")))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_PUT = do_DELETE = do_POST  # noqa: N815

        def version_string(self) -> str:
            return name

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()
