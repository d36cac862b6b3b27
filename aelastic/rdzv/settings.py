"""How the agents of a job find each other: the user's settings, checked once.

The names and defaults of `config` are those of torchelastic's rendezvous (`--rdzv-conf`).  `KEYS` lists all of them
with the back ends that use each; other back ends ignore the key, whatever its value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn

from aelastic.base.setting import (
    ANY,
    BOOL,
    MAPPING,
    NAME,
    NOT_NEGATIVE,
    PATH,
    REQUIRED,
    SECONDS,
    STR,
    of_torchrun,
    optional,
    own,
    problem_of,
    rule,
    setting,
)
from aelastic.base.texts import read_address, read_flag, read_int, read_seconds
from aelastic.errors import InputError

# torch's `join_timeout`, `last_call_timeout`.
JOIN_TIMEOUT_S = 600.0
LAST_CALL_TIMEOUT_S = 30.0
# A silent agent is lost after this time.  torch waits for 3 missed heartbeats of 5 s and then does nothing.
LEASE_S = 5.0
# Nodes that a scheduler starts together arrive within this time of each other: one interruption for all.
SETTLE_TIME_S = 0.5
READ_TIMEOUT_S = 60.0  # as torch's setting of this name
# The others notice within a lease that an agent is silent; then they begin another round and start workers.
GUARD_MORE_S = 1.0

# torch's default ports.
C10D_PORT = 29400
ETCD_PORT = 2379

BACKENDS = ("static", "c10d", "etcd", "etcd-v2", "etcd-v3")
_ETCD = ("etcd", "etcd-v2", "etcd-v3")
_DYNAMIC = ("c10d", "etcd-v2", "etcd-v3")  # one kind of back end in torch


class Key(NamedTuple):
    """One key of `--rdzv-conf`.

    Args:
        backends: those that use it.
        text: what it means; empty for a key that only torch's back ends of these names read, so that command lines of
            torchrun work unchanged.
        default: for the page where it is a text; seconds or a count otherwise.
        is_time: a number above 0, or of 0 or more if `may_be_0`.
        is_for_any: back ends of other packages have it as well, since the agent reads it.
    """

    backends: tuple[str, ...]
    text: str = ""
    default: float | str = ""
    is_time: bool = False
    may_be_0: bool = False
    is_for_any: bool = False


KEYS: dict[str, Key] = {
    "join_timeout": Key(
        BACKENDS,
        "seconds to wait for `min` nodes, for a leader, for a node to stop its workers, or for the nodes of a round "
        "that only the endpoint knows",
        JOIN_TIMEOUT_S,
        is_time=True,
        is_for_any=True,
    ),
    "last_call_timeout": Key(
        ("c10d", *_ETCD),
        "seconds to wait for more nodes than `min` in the first round",
        LAST_CALL_TIMEOUT_S,
        is_time=True,
        is_for_any=True,
    ),
    "lease": Key(
        BACKENDS,
        "seconds of silence after which an agent is lost; `keep_alive_interval` × `keep_alive_max_attempt` sets the "
        "same",
        LEASE_S,
        is_time=True,
        is_for_any=True,
    ),
    "guard_timeout": Key(
        BACKENDS,
        "seconds without a sign of life from the agent after which its guard kills its workers, because [another round "
        "may have begun](#writing-only-once); 0: never",
        "`lease` + 1; never with `--nnodes 1`",
        may_be_0=True,
    ),
    "settle_time": Key(
        BACKENDS,
        "seconds from the first new node until all new nodes are admitted together",
        SETTLE_TIME_S,
        is_time=True,
        is_for_any=True,
    ),
    "endpoints": Key(("c10d", "static")),  # of older versions: refused, with what to use instead
    "read_timeout": Key(
        ("c10d", "static", "etcd-v2"),
        "c10d, static: seconds within which a store that accepts connections must answer",
        READ_TIMEOUT_S,
        is_time=True,
    ),
    "survivor": Key(
        ("c10d",),
        "c10d with one endpoint. `majority`: the nodes of the round vote, and so does the endpoint: a majority "
        "continues, fewer wait; `endpoint`: the nodes that reach the endpoint continue, however few",
        "majority",
    ),
    "secret_file": Key(
        BACKENDS, "file with the job's secret, same as `--secret-file` ([let nobody else join](../how-to/secret.md))"
    ),
    "is_host": Key(
        ("c10d",), "c10d: `true`: this agent serves the endpoint or fails (one endpoint only); `false`: it never does"
    ),
    "protocol": Key(_ETCD, "etcd: `https` for TLS, which certificates imply", "http"),
    "cacert": Key(_ETCD, "etcd: file with the certificates of its CAs, also `ca_cert`"),
    "cert": Key(_ETCD, "etcd: file with this client's certificate, also `ssl_cert`"),
    "key": Key(_ETCD, "etcd: file with its key, also `ssl_cert_key`"),
    **dict.fromkeys(("ca_cert", "ssl_cert", "ssl_cert_key"), Key(_ETCD)),
    "user": Key(_ETCD, "etcd: name of the user"),
    "password_file": Key(_ETCD, "etcd: file with the user's password"),
    "password": Key(_ETCD, "etcd: the password itself, which other users of the host can see"),
    "etcd_prefix": Key(_ETCD, "prefix of the keys in etcd", "/aelastic"),
    "keep_alive_interval": Key(BACKENDS, default=5.0, is_time=True, is_for_any=True),
    "keep_alive_max_attempt": Key(BACKENDS, default=3.0, is_time=True, is_for_any=True),
    "timeout": Key(
        ("static", "etcd"), default=JOIN_TIMEOUT_S, is_time=True
    ),  # torch's name for `join_timeout` in these two
    **dict.fromkeys(("close_timeout", "heartbeat_timeout"), Key(_DYNAMIC, default=1.0, is_time=True)),
    "cas_backoff_max_seconds": Key(_DYNAMIC, default=0.0, may_be_0=True),
    **dict.fromkeys(("store_type", "use_libuv"), Key(("c10d",))),
    "ttl": Key(("etcd-v3",)),
    "rank": Key(("static",)),
}
# Keys that `--rdzv-conf` does not take, as with torch: they have options.
_OPTIONS_OF_THEIR_OWN = {
    "backend": "--rdzv-backend",
    "endpoint": "--rdzv-endpoint",
    "run_id": "--rdzv-id",
    "min_nodes": "--nnodes",
    "max_nodes": "--nnodes",
    "local_addr": "--local-addr",
}


def is_used(key: str, backend: str) -> bool:
    """Returns whether a back end may use a key of `config`; one of another package may use any."""
    backend = backend.removeprefix("torch:")
    return backend not in BACKENDS or (key in KEYS and backend in KEYS[key].backends)


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


# Texts.


def read_nodes(text: str) -> tuple[int, int]:
    try:
        fewest, *rest = (int(part) for part in text.split(":"))
        (most,) = rest or [fewest]
    except ValueError:
        raise ValueError("use a number of nodes, or a range MIN:MAX") from None
    if fewest < 1:
        raise ValueError("at least 1 node is needed")
    if fewest > most:
        raise ValueError(f"the minimum {fewest} is above the maximum {most}: use MIN:MAX")
    return fewest, most


def read_pairs(text: str) -> dict[str, str]:
    """Reads `key=value` pairs, separated by commas; the last value of a key wins."""
    pairs = {}
    for pair in text.split(",") if text.strip() else ():
        key, _, value = (part.strip() for part in pair.partition("="))
        if not key:
            raise ValueError("use key=value pairs, separated by commas")
        if not value:
            raise ValueError(f"{key} has no value: use {key}=value")
        if key in _OPTIONS_OF_THEIR_OWN:
            raise ValueError(f"{key} has an option of its own: use {_OPTIONS_OF_THEIR_OWN[key]}")
        pairs[key] = value
    return pairs


def repeated_keys(text: str) -> list[str]:
    """Returns the keys of `key=value` pairs that have several values."""
    values: dict[str, set[str]] = {}
    for pair in text.split(","):
        key, _, value = (part.strip() for part in pair.partition("="))
        values.setdefault(key, set()).add(value)
    return [key for key, its in values.items() if len(its) > 1]


def read_admit(text: str) -> float:
    """Reads how long a new node waits for all ranks to save: `saved`, `saved:SECONDS`; 0 for `at-once`."""
    when, _, seconds = text.partition(":")
    if text == "at-once":
        return 0.0
    within_s = read_seconds(seconds or "120") if when == "saved" else 0.0
    if not 1 <= within_s < float("inf"):
        raise ValueError("use at-once, saved, or saved:SECONDS, at least 1 s")
    return within_s


# Settings.

_NODES = rule(lambda value: isinstance(value, Integral), "use an int")
_RANK = optional(_NODES, rule(lambda rank: rank >= 0, "count from 0"))


@dataclass(frozen=True)
class RendezvousSettings:
    """Where and how the agents meet (torch: `RendezvousParameters`, and `nnodes` of `torchrun`).

    The fields are described where they are defined, and in `docs/reference/api.md`; `KEYS` has the keys of `config`.

    Raises:
        InputError: a value is invalid; the message names the alternatives.
    """

    backend: str = setting(
        REQUIRED,
        STR,
        "`c10d`, `etcd`, `etcd-v2`, `etcd-v3`, `static`, or the name of a torch rendezvous handler",
        of_torchrun("--rdzv-backend", str, "NAME",
            "how the nodes find each other: static (at --master-addr; a fixed number of nodes, ranked by --node-rank), "
            "c10d (on one of the nodes; needs no other service), etcd, etcd-v2, etcd-v3, or torch:NAME for a handler "
            "of torch", default="static", rule=NAME),
    )  # fmt: skip
    endpoint: str = setting(
        "",
        STR,
        "the rendezvous endpoint, `host:port`, or several separated by commas.  For etcd, these are its members.  For "
        "c10d and static, each host serves a store, and a majority is needed.",
        of_torchrun("--rdzv-endpoint", str.strip, "HOST:PORT",
            "where the nodes meet, the same on every node; separate several with commas"),
    )  # fmt: skip
    min_nodes: int = setting(
        1,
        _NODES,
        "number of nodes that the job waits for",
        of_torchrun("--nnodes", read_nodes, "MIN:MAX",
            "nodes in the job: a number, or a range within which nodes may join and leave", default="1:1",
            rule=ANY),
    )  # fmt: skip
    max_nodes: int = setting(1, _NODES, "number of nodes that the job uses at most; further nodes wait as spares")
    node_rank: int | None = setting(
        None,
        _RANK,
        "the preferred group rank of this node, which also identifies it when its agent restarts.  With `static` it is "
        "binding.",
        of_torchrun("--node-rank", read_int, "N",
            "rank of this node: binding with static, otherwise a preference and the node's identity when it reconnects",
            default="0", rule=NOT_NEGATIVE),
    )  # fmt: skip
    local_addr: str | None = setting(
        None,
        optional(STR),
        "address where other nodes reach this one; `None`: the source address of its connections",
        of_torchrun("--local-addr", read_address, "HOST",
            "address where other nodes reach this one (default: detected)"),
    )  # fmt: skip
    config: Mapping[str, str] = setting(
        MappingProxyType({}),
        MAPPING,
        "more settings, by the keys of `--rdzv-conf`; values are texts",
        of_torchrun("--rdzv-conf", read_pairs, "K=V,K=V",
            "more settings: join_timeout, last_call_timeout, lease (seconds), and those of the back end", default=""),
    )  # fmt: skip
    endpoint_from: str = setting("", STR, "the environment variable that gave the endpoint, for messages; empty: none")
    secret_file: str | None = setting(
        None,
        optional(PATH),
        "file with the job's secret, one or two lines of at least 32 bytes; agents without it can neither join nor end "
        "the job.  Same as `secret_file` in `config`.",
        own("--secret-file", str, "PATH",
            "file with the job's shared secret (one line, 32 bytes or more); agents without it cannot join or end the "
            "job"),
    )  # fmt: skip
    bind_all: bool = setting(
        False,
        BOOL,
        "listen on all addresses of this host, not only on the one that other nodes use; for NAT and containers",
        own("--bind-all", read_flag),
    )
    drain_wait_s: float = setting(
        0.0,
        SECONDS,
        "how long the remaining nodes wait for a replacement after a drain",
        own("--drain-wait", read_seconds, "SECONDS"),
    )
    admit_s: float = setting(
        0.0,
        SECONDS,
        "seconds that a new node waits for all ranks to save at one step, before it interrupts a round; 0: it does not "
        "wait",
        own("--admit", read_admit, "WHEN",
            "when a new node may join: at-once; saved, once all ranks have saved at the same step, or after 120 s; "
            "saved:SECONDS", default="at-once"),
    )  # fmt: skip
    remote_requests: bool = setting(
        True,
        BOOL,
        "whether other nodes may request a restart or other changes, and see the status of this one",
        own("--no-remote-requests", read_flag, "",
            "ignore commands (such as aelastic restart) issued on other nodes, and report nothing to them",
            default="0"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        self._check_types()
        if not 1 <= self.min_nodes <= self.max_nodes:
            raise InputError(
                f"nodes are {self.min_nodes}:{self.max_nodes}: use MIN:MAX, at least 1 and the smaller number first"
            )
        # The same rules apply to `torch:c10d`.
        backend = self.backend.removeprefix("torch:")
        if backend in KEYS["endpoints"].backends and "endpoints" in self.config:
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
        for name, key in KEYS.items():
            if key.is_time and (key.is_for_any or backend in BACKENDS):  # even if only torch's back end reads it
                self._seconds(name)
        self._seconds("cas_backoff_max_seconds")  # only torch:c10d uses it
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
        if problem := problem_of(self):
            raise InputError(problem)
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
        is_given = is_used("is_host", self.backend) and "is_host" in self.config
        if self.max_nodes > 1 or self.backend not in {"c10d", "static"} or is_given:
            return False
        return all(is_loopback(host) for host, _ in split_endpoints(self.endpoint or "localhost", C10D_PORT))

    @property
    def join_timeout_s(self) -> float:
        """Seconds to wait for enough nodes."""
        is_torchs_name = "join_timeout" not in self.config and self.backend in KEYS["timeout"].backends
        return self._seconds("timeout" if is_torchs_name else "join_timeout")

    @property
    def last_call_timeout_s(self) -> float:
        """Seconds that the first round waits for more than `min_nodes`."""
        return self._seconds("last_call_timeout")

    @property
    def read_timeout_s(self) -> float:
        """Seconds within which a TCPStore must answer."""
        return self._seconds("read_timeout")

    @property
    def settle_time_s(self) -> float:
        """Seconds from the first new node until all new nodes are admitted together."""
        return self._seconds("settle_time")

    @property
    def lease_s(self) -> float:
        """Seconds of silence after which an agent is considered lost."""
        if "lease" not in self.config and self.config.keys() & {"keep_alive_interval", "keep_alive_max_attempt"}:
            lease_s = self._seconds("keep_alive_interval") * self._seconds("keep_alive_max_attempt")
            if not 0 < lease_s < float("inf"):
                raise InputError(
                    f"rendezvous settings keep_alive_interval times keep_alive_max_attempt are {lease_s:g} s: "
                    "use a few seconds"
                )
            return lease_s
        return self._seconds("lease")

    @property
    def guard_timeout_s(self) -> float | None:
        """Seconds of silence of an agent after which its guard kills its workers; `None`: never."""
        default = self.lease_s + GUARD_MORE_S if self.max_nodes > 1 else 0.0
        timeout_s = self._seconds("guard_timeout", default)
        if 0 < timeout_s < self.lease_s:
            least = f"at least the lease, {self.lease_s:g}"
            raise InputError(f"rendezvous setting guard_timeout={timeout_s:g}: use {least}, or 0 for never")
        return timeout_s or None

    def _seconds(self, name: str, default: float | None = None) -> float:
        key, text = KEYS[name], self.config.get(name)
        if text is None or not is_used(name, self.backend):
            return float(key.default) if default is None else default
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = -1.0
        if not (0 < value < float("inf") or (key.may_be_0 and value == 0)):
            least = "of 0 or more" if key.may_be_0 else "above 0"
            raise InputError(f"rendezvous setting {name}={text}: use a number {least}; times are in seconds")
        return value
