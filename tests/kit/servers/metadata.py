"""A cloud's metadata service for an instance, with the documented paths and headers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# How long an instance has until it is shut down.
LEFT = timedelta(hours=1)


class Metadata(ThreadingHTTPServer):
    """The service of `aws`, `google` or `azure`; for any other cloud it knows nothing.

    `state` is whether the instance will be shut down (`notice`) or not (`nothing`), or how the service fails: `garbage`,
    `slow`.

    Args:
        tags: the instance's tags, without `training-`.
    """

    daemon_threads = True

    def __init__(self, cloud: str, tags: dict[str, str] | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cloud, self.tags, self.state, self.asked = cloud, tags or {}, "nothing", 0
        self.at = f"127.0.0.1:{self.server_port}"

    @contextmanager
    def served(self) -> Iterator[None]:
        with self:
            threading.Thread(target=self.serve_forever, args=[0.02], daemon=True).start()
            yield
            self.state = "notice"  # so that requests that wait for a notice end
            self.shutdown()

    def answer(self, method: str, path: str, headers: Any) -> tuple[int, str]:
        is_going, at = self.state == "notice", datetime.now(UTC) + LEFT
        match self.cloud:
            case "aws" if (method, path) == ("PUT", "/latest/api/token"):
                return (200, "a token") if headers["x-aws-ec2-metadata-token-ttl-seconds"] else (400, "")
            case "aws" if headers["x-aws-ec2-metadata-token"] != "a token":
                return 401, ""
            case "aws":
                known = {f"tags/instance/training-{name}": value for name, value in self.tags.items()}
                known["local-ipv4"] = "127.0.0.1"
                if is_going:
                    notice = {"action": "terminate", "time": f"{at:%Y-%m-%dT%H:%M:%SZ}"}
                    known["spot/instance-action"] = json.dumps(notice)
                path = path.removeprefix("/latest/meta-data/")
            case "google" if headers["metadata-flavor"] != "Google":
                return 403, ""
            case "google":
                known = {f"attributes/training-{name}": value for name, value in self.tags.items()}
                known |= {"id": "17", "network-interfaces/0/ip": "127.0.0.1", "preempted": str(is_going).upper()}
                path = path.removeprefix("/computeMetadata/v1/instance/")
            case "azure" if headers["metadata"] != "true":
                return 400, ""
            case "azure":
                other = {"EventId": "2", "EventType": "Freeze", "NotBefore": ""}
                event = {"EventId": "1", "EventType": "Preempt", "NotBefore": format_datetime(at, usegmt=True)}
                events = {"DocumentIncarnation": 1, "Events": [other, event] if is_going else [other]}
                known, path = {"/metadata/scheduledevents": json.dumps(events)}, path.partition("?api-version=")[0]
            case _:
                known = {}
        return (200, known[path]) if path in known else (404, "")


class _Handler(BaseHTTPRequestHandler):
    server: Metadata

    def do_GET(self) -> None:
        self.server.asked += 1
        if self.server.state == "slow":
            time.sleep(30)
        code, text = self.server.answer(self.command, self.path, self.headers)
        if self.server.state == "garbage":
            code, text = 200, '{"time": [\0'
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    do_PUT = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        pass
