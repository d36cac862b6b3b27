"""Values on a store that are no leader's record."""

from __future__ import annotations

import json
import urllib.parse
from base64 import b64encode

from aelastic.rdzv.record_text import MAX_BYTES
from kit.servers.etcd_servers import EtcdServer

GOOD = {"epoch": 1, "candidate": {"node_id": "a", "addresses": ["h"], "port": 1, "token": ""}, "verdict": ""}


GARBAGE = [
    b"",
    b"hello",
    b"\xff\xfe",
    b"null",
    b"[" * 50_000,
    b" " * MAX_BYTES + b"1",
    json.dumps({**GOOD, "epoch": True}).encode(),
    json.dumps({**GOOD, "epoch": "1"}).encode(),
    json.dumps({**GOOD, "epoch": 0}).encode(),
    json.dumps({**GOOD, "epoch": 1.0}).encode(),
    json.dumps({**GOOD, "verdict": None}).encode(),
    json.dumps({**GOOD, "candidate": [1]}).encode(),
    json.dumps({**GOOD, "candidate": {**GOOD["candidate"], "port": 65536}}).encode(),  # type: ignore[dict-item]
    json.dumps({**GOOD, "candidate": {**GOOD["candidate"], "addresses": [1]}}).encode(),  # type: ignore[dict-item]
    json.dumps({**GOOD, "candidate": {**GOOD["candidate"], "addresses": "h"}}).encode(),  # type: ignore[dict-item]
    json.dumps(GOOD).encode().replace(b'"epoch": 1', b'"epoch": ' + b"9" * 5000),
    json.dumps(GOOD).encode().replace(b'"port": 1', b'"port": ' + b"9" * 4000),
]


def put_v3(server: EtcdServer, key: str, value: bytes, *, lease: bool) -> None:
    lease_id = server.ask("/v3/lease/grant", {"TTL": "600"})["ID"] if lease else "0"
    message = {"key": b64encode(key.encode()).decode(), "value": b64encode(value).decode(), "lease": lease_id}
    server.ask("/v3/kv/put", message)


def put_v2(server: EtcdServer, key: str, value: bytes, *, lease: bool) -> None:
    form = {"value": value, **({"ttl": "600"} if lease else {})}
    server.ask(f"/v2/keys{urllib.parse.quote(key)}", urllib.parse.urlencode(form).encode(), method="PUT")


PUT = {"etcd-v3": put_v3, "etcd-v2": put_v2}
