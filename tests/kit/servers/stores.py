"""A TCPStore that is not served by an agent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kit.servers.programs import running

# Prints its port, and lasts as long as its stdin; its argument is the port, or 0 for any.
STORE = """
import sys
from aelastic.workers.tcpstore.server import ask_no_name_server, import_store

ask_no_name_server()
store = import_store("quick")(
    host_name="localhost", port=int(sys.argv[1]), world_size=None, is_master=True, wait_for_workers=False
)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def external_store() -> Iterator[str]:
    """The endpoint of a TCPStore on this machine."""
    with running(sys.executable, "-c", STORE, "0", stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"


def in_each_store(folder: Path, body: str) -> dict[str, str]:
    """An environment in which a store's process, recognized by its command line, first runs this line."""
    folder.mkdir(exist_ok=True)
    code = f'import os, sys\nif "workers/tcpstore/server.py" in " ".join(sys.orig_argv):\n    {body}\n'
    (folder / "sitecustomize.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
