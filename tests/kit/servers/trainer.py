"""Kubeflow's status server, following its documentation: TLS with its own CA, a bearer token, one path to post to.

Like the Trainer it refuses with a Kubernetes `Status`; a test can also make it slow or broken.
"""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/llm/status"
BODY_BYTES_MAX = 1 << 16
# The fields of a `trainerStatus` and their possible values (trainer.kubeflow.org_trainjobs.yaml, v2.2).
KNOWN = {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}


class Trainer:
    """One server.

    Args:
        folder: for its certificate and the pod's token.
    """

    def __init__(self, folder: Path) -> None:
        self.statuses: list[dict[str, Any]] = []  # the accepted ones
        self.refused: list[int] = []
        self.answer = 200  # any other status code is the answer to every request
        self.go = threading.Event()  # requests wait until it is set
        self.go.set()
        self.asked = threading.Event()
        self.token, self.cert = folder / "token", folder / "ca.crt"
        self.token.write_text("the pod's\n")
        key = folder / "server.key"
        subject = ["-subj", "/CN=trainer", "-addext", "subjectAltName=DNS:localhost", "-days", "2"]
        # An elliptic-curve key takes no time; the primes of an RSA key may take seconds to find.
        kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        new = ["openssl", "req", "-x509", *kind, "-keyout", str(key), "-out", str(self.cert)]
        subprocess.run([*new, *subject], check=True, capture_output=True)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.cert, key)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True, do_handshake_on_connect=False)

    @property
    def env(self) -> dict[str, str]:
        """The variables that the Trainer sets in the pods of a TrainJob."""
        return {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://localhost:{self.server.server_port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(self.cert),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(self.token),
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        trainer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                trainer.asked.set()
                trainer.go.wait(60)
                code, message = trainer.judge(self.path, self.headers.get("Authorization", ""), body)
                answer = body if code == 200 else json.dumps({"status": "Failure", "message": message, "code": code})
                try:
                    self.send_response(code)
                    self.send_header("Content-Type", "application/json")
                    self.end_headers()
                    self.wfile.write(answer.encode() if isinstance(answer, str) else answer)
                except OSError:
                    pass  # the agent did not wait

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def judge(self, path: str, authorization: str, body: bytes) -> tuple[int, str]:
        code, message = self.answer, "Internal error"
        if path != PATH:
            code, message = 404, "Not found"
        elif authorization != f"Bearer {self.token.read_text().strip()}":
            code, message = 403, "Forbidden"
        elif code == 200:
            status = json.loads(body)["trainerStatus"]
            wrong = status.keys() - KNOWN or not 0 <= status.get("progressPercentage", 0) <= 100
            wrong = wrong or any(not isinstance(each["value"], str) for each in status["metrics"])
            code, message = (422, "Invalid payload") if wrong or len(body) > BODY_BYTES_MAX else (200, "")
            if code == 200:
                self.statuses.append(status)
        if code != 200:
            self.refused.append(code)
        return code, message


@contextmanager
def trainer(folder: Path) -> Iterator[Trainer]:
    server = Trainer(folder)
    serving = threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    serving.start()
    try:
        yield server
    finally:
        server.go.set()
        server.server.shutdown()
        server.server.server_close()
        serving.join()
