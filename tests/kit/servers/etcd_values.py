"""Values in a store that are not the cell of a leader."""

from __future__ import annotations

import copy
import json
import urllib.parse
from base64 import b64encode
from typing import Any

from aelastic.rdzv.protocol.codec import FRAME_MAX, to_text
from kit.servers.etcd_cells import stored_by
from kit.servers.etcd_servers import EtcdServer

GOOD = json.loads(to_text(stored_by("a")))


def _with(**changes: Any) -> bytes:
    """A cell with some fields replaced."""
    kind, fields = copy.deepcopy(GOOD)
    for name, value in changes.items():
        of = fields["cell"] if name in fields["cell"] else fields["leader"]
        of[name] = value
    return json.dumps([kind, fields]).encode()


GARBAGE = [
    b"",
    b"hello",
    b"\xff\xfe",
    b"null",
    b"[" * 50_000,
    b" " * FRAME_MAX + b"1",
    _with(term=True),
    _with(term="1"),
    _with(term=-1),
    _with(term=1.0),
    _with(leader=None),
    _with(port=65536),
    _with(addresses=[1]),
    _with(addresses="h"),
    json.dumps(GOOD).encode().replace(b'"term": 1', b'"term": ' + b"9" * 5000),
    json.dumps(GOOD).encode().replace(b'"port": 29500', b'"port": ' + b"9" * 4000),
]


def put_v3(server: EtcdServer, key: str, value: bytes, *, lease: bool) -> None:
    lease_id = server.ask("/v3/lease/grant", {"TTL": "600"})["ID"] if lease else "0"
    message = {"key": b64encode(key.encode()).decode(), "value": b64encode(value).decode(), "lease": lease_id}
    server.ask("/v3/kv/put", message)


def put_v2(server: EtcdServer, key: str, value: bytes, *, lease: bool) -> None:
    form = {"value": value, **({"ttl": "600"} if lease else {})}
    server.ask(f"/v2/keys{urllib.parse.quote(key)}", urllib.parse.urlencode(form).encode(), method="PUT")


PUT = {"etcd-v3": put_v3, "etcd-v2": put_v2}
