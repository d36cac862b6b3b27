"""How the agents of a job find each other: the user's settings, checked once.

The names and defaults of `config` are those of torchelastic's rendezvous (`--rdzv-conf`).  `KEYS` lists all of them
with the back ends that use each; other back ends ignore the key, whatever its value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from numbers import Integral, Real
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, NoReturn

from aelastic.base.record import Record
from aelastic.errors import InputError

# torch's `join_timeout`, `last_call_timeout`.
JOIN_TIMEOUT_S = 600.0
LAST_CALL_TIMEOUT_S = 30.0
# A silent agent is lost after this time.  torch waits for 3 missed heartbeats of 5 s and then does nothing.
LEASE_S = 5.0
# The others notice within a lease that an agent is silent; then they begin another round and start workers.
GUARD_MORE_S = 1.0
# Nodes that a scheduler starts together arrive within this time of each other: one interruption for all.
SETTLE_TIME_S = 0.5
READ_TIMEOUT_S = 60.0  # as torch's setting of this name

# torch's default ports.
C10D_PORT = 29400
ETCD_PORT = 2379

BACKENDS = ("static", "c10d", "etcd", "etcd-v2", "etcd-v3")
_ETCD = ("etcd", "etcd-v2", "etcd-v3")
_DYNAMIC = ("c10d", "etcd-v2", "etcd-v3")  # one kind of back end in torch
# Each key, and the back ends that use it.  This includes keys that only torch's back ends of these names read, so that
# command lines of torchrun work unchanged.
KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("join_timeout", "lease", "guard_timeout", "settle_time", "keep_alive_interval", "keep_alive_max_attempt"),
        BACKENDS,
    ),
    "last_call_timeout": ("c10d", *_ETCD),
    "timeout": ("static", "etcd"),  # torch's name for `join_timeout` in these two
    "read_timeout": ("c10d", "static", "etcd-v2"),
    **dict.fromkeys(("survivor", "is_host"), ("c10d",)),
    "endpoints": ("c10d", "static"),  # of older versions: refused, with what to use instead
    "secret_file": BACKENDS,
    **dict.fromkeys(("protocol", "cacert", "ca_cert", "cert", "ssl_cert", "key", "ssl_cert_key"), _ETCD),
    **dict.fromkeys(("user", "password", "password_file", "etcd_prefix"), _ETCD),
    **dict.fromkeys(("close_timeout", "heartbeat_timeout", "cas_backoff_max_seconds"), _DYNAMIC),
    **dict.fromkeys(("store_type", "use_libuv"), ("c10d",)),
    "ttl": ("etcd-v3",),
    "rank": ("static",),
}
# The type of each field, and the advice for values of another type.
_KINDS: dict[str, tuple[type | tuple[type, ...], str]] = {
    **dict.fromkeys(("backend", "endpoint", "endpoint_from"), (str, "use a str")),
    "local_addr": ((str, NoneType), "use a str, or None"),
    "secret_file": ((str, os.PathLike, NoneType), "use a path, or None"),
    **dict.fromkeys(("min_nodes", "max_nodes"), (Integral, "use an int")),
    "node_rank": ((Integral, NoneType), "use an int, or None"),
    **dict.fromkeys(("drain_wait_s", "admit_s"), (Real, "use seconds, as a number")),
    "config": (Mapping, "use a dict"),
    **dict.fromkeys(("bind_all", "remote_requests"), (bool, "use a bool")),
}
# The agent reads these, so they also apply to back ends of other packages.
_TIMES = ("join_timeout", "last_call_timeout", "lease", "settle_time", "keep_alive_interval", "keep_alive_max_attempt")
# Rejected if they are not times, even if only torch's back end of that name reads them.
_TORCH_TIMES = ("timeout", "read_timeout", "close_timeout", "heartbeat_timeout")


def is_used(key: str, backend: str) -> bool:
    """Returns whether a back end may use a key of `config`; one of another package may use any."""
    backend = backend.removeprefix("torch:")
    return backend not in BACKENDS or backend in KEYS.get(key, ())


def split_endpoint(endpoint: str, default_port: int | None = None) -> tuple[str, int]:
    """Splits `host:port`, `[v6]:port` or, with a default port, `host` into host and port, without brackets.

    Raises:
        InputError: the endpoint has none of these forms.
    """
    found = re.fullmatch(r"(?:\[([\w.:%]+)\]|([\w.-]+))(?::([0-9]{1,5}))?", endpoint)
    if found is None:
        hint = "HOST:PORT, an IPv6 address in brackets" + (", no protocol" if "://" in endpoint else "")
        raise InputError(f"rendezvous endpoint {endpoint!r}: use {hint}")
    host, port = found[1] or found[2], default_port if found[3] is None else int(found[3])
    if port is None:
        raise InputError(f"rendezvous endpoint {endpoint}: the port is missing: use {endpoint}:PORT")
    if port > 65535:
        raise InputError(f"rendezvous endpoint {endpoint}: the highest port is 65535")
    return host, port


def split_endpoints(endpoints: str, default_port: int | None = None) -> list[tuple[str, int]]:
    """Returns host and port of each endpoint of a list; the order has no meaning.

    Raises:
        InputError: an endpoint is invalid, or listed twice.
    """
    found = [split_endpoint(each.strip(), default_port) for each in endpoints.split(",")]
    if twice := next((each for index, each in enumerate(found) if each in found[:index]), None):
        raise InputError(f"rendezvous endpoint {twice[0]}:{twice[1]} is in the list twice: list each host once")
    return found


class RendezvousSettings(Record):
    """Where and how the agents meet (torch: `RendezvousParameters`, and `nnodes` of `torchrun`).

    Args:
        backend: `c10d`, `etcd`, `etcd-v2`, `etcd-v3`, `static`, or the name of a torch rendezvous handler.
        endpoint: the rendezvous endpoint, `host:port`, or several separated by commas.  For etcd, these are its
            members.  For c10d and static, each host serves a store, and a majority is needed.
        min_nodes: number of nodes that the job waits for.
        max_nodes: number of nodes that the job uses at most; further nodes wait as spares.
        node_rank: the preferred group rank of this node, which also identifies it when its agent restarts.  With
            `static` it is binding.
        local_addr: address where other nodes reach this one; `None`: the source address of its connections.
        config: in seconds: `join_timeout`, `last_call_timeout`, `lease`, `guard_timeout`, `settle_time`.
            `keep_alive_interval` times `keep_alive_max_attempt` also sets `lease`.  `cas_backoff_max_seconds` affects
            only `torch:c10d`.  Further keys depend on the back end.
        endpoint_from: the environment variable that gave the endpoint, for messages; empty: none.
        secret_file: file with the job's secret, one or two lines of at least 32 bytes; agents without it can neither
            join nor end the job.  Same as `secret_file` in `config`.
        drain_wait_s: seconds that a round waits for nodes to replace drained ones.
        admit_s: seconds that a new node waits for all ranks to save at one step, before it interrupts a round; 0: it
            does not wait.
        remote_requests: whether other nodes may request a restart or other changes, and see the status of this one.
        bind_all: listen at all addresses of this host, not only at the one that the other nodes use: for NAT and
            containers.

    Raises:
        InputError: a value is invalid; the message names the alternatives.
    """

    backend: str
    endpoint: str = ""
    min_nodes: int = 1
    max_nodes: int = 1
    node_rank: int | None = None
    local_addr: str | None = None
    config: Mapping[str, str] = MappingProxyType({})
    endpoint_from: str = ""
    secret_file: str | None = None
    bind_all: bool = False
    drain_wait_s: float = 0.0
    admit_s: float = 0.0
    remote_requests: bool = True

    if not TYPE_CHECKING:  # type checkers check callers against the fields

        def __init__(self, *args: Any, **fields: Any) -> None:
            super().__init__(*args, **fields)
            self._check()

    def _check(self) -> None:  # noqa: C901  one case for each back end
        self._check_types()
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise InputError(
                f"nodes are {self.min_nodes}:{self.max_nodes}: use MIN:MAX, at least 1 and the smaller number first"
            )
        for name, seconds in (("drain wait", self.drain_wait_s), ("admit", self.admit_s)):
            if not 0 <= seconds < float("inf"):
                raise InputError(f"{name} is {seconds:g} s: use 0 or more")
        if self.node_rank is not None and self.node_rank < 0:
            raise InputError(f"node rank is {self.node_rank}: count from 0")
        # The same rules apply to `torch:c10d`.
        backend = self.backend.removeprefix("torch:")
        if backend in KEYS["endpoints"] and "endpoints" in self.config:
            raise InputError(
                f"rendezvous setting endpoints={self.config['endpoints']}: use --rdzv-endpoint to list the endpoints, "
                "HOST:PORT of each, separated by commas; a name no longer stands for several hosts",
                topic="the-endpoint-name-belongs-to-several-hosts",
            )
        match backend:
            case "static":
                self._check_static()
            case "c10d":
                self._check_c10d()
            case "etcd" | "etcd-v2" | "etcd-v3":
                self._check_etcd()
            case _:
                pass  # its handler checks
        for name in _TIMES + _TORCH_TIMES if backend in BACKENDS else _TIMES:
            self._seconds(name, 1.0)
        self._seconds("cas_backoff_max_seconds", 0.0, is_zero_fine=True)  # only torch:c10d uses it
        _ = self.join_timeout_s, self.lease_s, self.guard_timeout_s
        if (path := self.secret_path) is not None:
            from aelastic.rdzv.protocol.secret_file import SecretFile

            if self.backend.startswith("torch:"):
                raise InputError(
                    f"rendezvous {self.backend} does not use the secret file {path}: use a back end without torch:"
                )
            SecretFile(path, "")

    @property
    def secret_path(self) -> str | None:
        """Path of the file with the job's secret; `None`: no secret."""
        return self.config.get("secret_file") if self.secret_file is None else self.secret_file

    def _check_types(self) -> None:
        for name, (kind, remedy) in _KINDS.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                raise InputError(f"{name} is {value!r}: {remedy}")
        keys: list[Any] = list(self.config)
        for key in keys:
            if not isinstance(key, str):
                raise InputError(f"config has the key {key!r}: use a str")

    def _check_static(self) -> None:
        if self.min_nodes != self.max_nodes:
            raise InputError(
                f"rendezvous static takes a fixed number of nodes, not {self.min_nodes}:{self.max_nodes}: "
                "use c10d (--rdzv-backend c10d) for a range"
            )
        if self.node_rank is None or self.node_rank >= self.max_nodes:
            raise InputError(
                f"node rank is {self.node_rank} with {self.max_nodes} nodes: rendezvous static needs "
                f"--node-rank 0 to {self.max_nodes - 1}, one per node",
                topic="node-ranks-do-not-fit-together",
            )
        if not self._check_several() and split_endpoint(self.endpoint)[1] == 0:
            self._refuse_free_port()

    def _check_several(self) -> bool:
        """Checks several endpoints; returns whether there are several."""
        if not self.has_several_endpoints:
            return False
        if self.backend.startswith("torch:"):
            raise InputError(f"rendezvous {self.backend} takes one endpoint, not {self.endpoint}: leave out torch:")
        if any(port == 0 for _, port in self.endpoints):
            self._refuse_free_port()
        return True

    def _check_c10d(self) -> None:
        if not self.endpoint and self.max_nodes > 1:
            self._refuse_no_endpoint()
        if self._check_several():
            return
        _, port = split_endpoint(self.endpoint or "localhost", C10D_PORT)
        if port == 0 and self.min_nodes > 1:
            self._refuse_free_port()
        if (survivor := self.config.get("survivor", "majority")) not in {"majority", "endpoint"}:
            raise InputError(f"rendezvous setting survivor={survivor}: use majority or endpoint")

    @property
    def has_elections(self) -> bool:
        """Whether the nodes of a round elect a leader when the leader and the endpoint are lost together."""
        is_single = self.backend == "c10d" and self.max_nodes > 1 and not self.has_several_endpoints
        return is_single and self.config.get("survivor", "majority") == "majority"

    def _check_etcd(self) -> None:
        if not self.endpoint:
            self._refuse_no_endpoint()
        if self.backend in {"torch:etcd", "torch:etcd-v2"}:  # our own stores take several, and check them
            split_endpoint(self.endpoint, ETCD_PORT)

    def _refuse_no_endpoint(self) -> NoReturn:
        raise InputError(
            f"rendezvous {self.backend} needs --rdzv-endpoint HOST:PORT: the same on every node",
            topic="the-endpoint-is-missing-or-malformed",
        )

    def _refuse_free_port(self) -> NoReturn:
        raise InputError(
            f"rendezvous endpoint {self.endpoint}: port 0 picks a random port, which other nodes cannot know: "
            "give a fixed port"
        )

    @property
    def endpoint_note(self) -> str:
        """A text for messages on where the endpoint comes from; empty unless it is from a variable."""
        return f"the endpoint is from {self.endpoint_from}" if self.endpoint_from else ""

    @property
    def has_several_endpoints(self) -> bool:
        """Whether the job has more than one endpoint."""
        return self.endpoint_count > 1

    @property
    def endpoint_count(self) -> int:
        """The number of endpoints."""
        return self.endpoint.count(",") + 1

    @property
    def endpoints(self) -> list[tuple[str, int]]:
        """Host and port of each endpoint."""
        return split_endpoints(self.endpoint, C10D_PORT)

    @property
    def is_on_loopback(self) -> bool:
        """Whether only agents of this host can join, so that no port needs to be open to other hosts.

        Never true for several nodes with `localhost` as their endpoint: other nodes may know that host by another name.
        """
        from aelastic.base.host.ports import is_loopback

        if self.local_addr:
            return is_loopback(self.local_addr)
        is_told = is_used("is_host", self.backend) and "is_host" in self.config
        if self.max_nodes > 1 or self.backend not in {"c10d", "static"} or is_told:
            return False
        return all(is_loopback(host) for host, _ in split_endpoints(self.endpoint or "localhost", C10D_PORT))

    @property
    def join_timeout_s(self) -> float:
        """Seconds to wait for enough nodes."""
        if "join_timeout" not in self.config and self.backend in KEYS["timeout"]:
            return self._seconds("timeout", JOIN_TIMEOUT_S)
        return self._seconds("join_timeout", JOIN_TIMEOUT_S)

    @property
    def last_call_timeout_s(self) -> float:
        """Seconds that the first round waits for more than `min_nodes`."""
        return self._seconds("last_call_timeout", LAST_CALL_TIMEOUT_S)

    @property
    def read_timeout_s(self) -> float:
        """Seconds within which a TCPStore must answer."""
        return self._seconds("read_timeout", READ_TIMEOUT_S)

    @property
    def settle_time_s(self) -> float:
        """Seconds from the first new node until all new nodes are admitted together."""
        return self._seconds("settle_time", SETTLE_TIME_S)

    @property
    def lease_s(self) -> float:
        """Seconds of silence after which an agent is considered lost."""
        if "lease" not in self.config and self.config.keys() & {"keep_alive_interval", "keep_alive_max_attempt"}:
            lease_s = self._seconds("keep_alive_interval", 5.0) * self._seconds("keep_alive_max_attempt", 3.0)
            if not 0 < lease_s < float("inf"):
                raise InputError(
                    f"rendezvous settings keep_alive_interval times keep_alive_max_attempt are {lease_s:g} s: "
                    "use a few seconds"
                )
            return lease_s
        return self._seconds("lease", LEASE_S)

    @property
    def guard_timeout_s(self) -> float | None:
        """Seconds of silence of an agent after which its guard kills its workers; `None`: never."""
        default = self.lease_s + GUARD_MORE_S if self.max_nodes > 1 else 0.0
        timeout_s = self._seconds("guard_timeout", default, is_zero_fine=True)
        if 0 < timeout_s < self.lease_s:
            least = f"at least the lease, {self.lease_s:g}"
            raise InputError(f"rendezvous setting guard_timeout={timeout_s:g}: use {least}, or 0 for never")
        return timeout_s or None

    def _seconds(self, name: str, default: float, *, is_zero_fine: bool = False) -> float:
        text = self.config.get(name)
        if text is None or not is_used(name, self.backend):
            return default
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = -1.0
        if not (0 < value < float("inf") or (is_zero_fine and value == 0)):
            least = "of 0 or more" if is_zero_fine else "above 0"
            raise InputError(f"rendezvous setting {name}={text}: use a number {least}; times are in seconds")
        return value
