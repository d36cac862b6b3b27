"""Networks for tests: nodes in network namespaces, and a router between them that can cut and slow their links.

A namespace has no name: a process holds it and ends with the test's process, even if that crashes.  So nothing is left
behind, and parallel tests do not meet.  This needs only iproute2 and util-linux.

Each node has an address in each of its networks: 10.71.N.2 and fd00:71::N:2 in the first, 10.72.N.2 in the second.
Packets on a cut link vanish without an answer (a `blackhole` rule of the router), or as the test chooses.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kit.servers.programs import running

COMMAND_LIMIT_S = 60.0


@dataclass(frozen=True)
class Node:
    """A machine of the test's network.

    Args:
        number: unique, and part of its addresses.
        pid: the process that holds its namespaces.
        networks: the numbers of its networks.
        files: files in its /etc, by name.
    """

    number: int
    pid: int
    networks: Sequence[int]
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])

    def v4(self, network: int = 1) -> str:
        return f"10.{70 + network}.{self.number}.2"

    def v6(self, network: int = 1) -> str:
        return f"fd00:{70 + network}::{self.number}:2"

    @property
    def prefix(self) -> list[str]:
        """The beginning of a command that runs on the node."""
        words = ["nsenter", f"--target={self.pid}", "--net", "--uts", "--"]
        if not self.files:
            return words
        mounts = [f"mount --bind '{path}' /etc/{name}" for name, path in self.files.items()]
        return [*words, "unshare", "--mount", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]

    def run(self, script: str) -> None:
        """Runs lines of shell on the node."""
        _do(self.prefix, script)


class Net:
    """A router and its nodes.

    Args:
        has_v4: whether nodes have IPv4 addresses.
        has_v6: whether nodes have IPv6; if not, it is switched off, as in Docker's networks.
    """

    def __init__(self, *, has_v4: bool = True, has_v6: bool = False) -> None:
        self.has_v4, self.has_v6 = has_v4, has_v6
        self._ending = ExitStack()
        self._count = 0
        self._filters = itertools.count()

    def open(self) -> None:
        self._router = Node(0, self._new_namespace("router"), ())
        self._router.run("echo 1 >/proc/sys/net/ipv4/ip_forward")
        if self.has_v6:
            self._router.run("echo 1 >/proc/sys/net/ipv6/conf/all/forwarding")

    def node(
        self,
        host_name: str = "node",
        *,
        networks: Sequence[int] = (1,),
        default_route: int | None = None,
        files: Mapping[str, Path] | None = None,
    ) -> Node:
        """Adds a machine.

        Args:
            host_name: need not be unique.
            networks: the numbers of its networks.
            default_route: the network through which it reaches everything else; `None` if it does not.
            files: files in its /etc, by name.
        """
        self._count += 1
        number = self._count
        node = Node(number, self._new_namespace(host_name), tuple(networks), files or {})
        for network in networks:
            end, interface = f"n{number}w{network}", f"net{network}"
            self._router.run(f"ip link add {end} type veth peer name {interface} netns {node.pid}")
            self._join(node, network, end, interface)
        if default_route is not None:
            node.run(f"ip route add default dev net{default_route} via 10.{70 + default_route}.{number}.1")
        return node

    def _join(self, node: Node, network: int, end: str, interface: str) -> None:
        high, number = 70 + network, node.number
        self._router.run(f"ip link set {end} up")
        node.run(f"ip link set {interface} up")
        if self.has_v4:
            self._router.run(f"ip addr add 10.{high}.{number}.1/24 dev {end}")
            node.run(
                f"ip addr add {node.v4(network)}/24 dev {interface}\n"
                f"ip route add 10.{high}.0.0/16 via 10.{high}.{number}.1"
            )
        if self.has_v6:
            self._router.run(f"ip addr add fd00:{high}::{number}:1/112 dev {end} nodad")
            node.run(
                f"ip addr add {node.v6(network)}/112 dev {interface} nodad\n"
                f"ip -6 route add fd00:{high}::/64 via fd00:{high}::{number}:1"
            )

    def filter(self, *rules: str) -> Callable[[], None]:
        """Makes the router apply rules of `nft(8)` to packets; call the result to undo this."""
        if shutil.which("nft") is None:
            pytest.skip("there is no nft (Debian: nftables)")
        table = f"filter{next(self._filters)}"
        chain = "{ type filter hook forward priority 0; }"
        adding = [f"nft 'add chain ip {table} way {chain}'", *(f"nft 'add rule ip {table} way {r}'" for r in rules)]
        self._router.run("\n".join([f"nft add table ip {table}", *adding]))
        return lambda: self._router.run(f"nft delete table ip {table}")

    def forward(self, address: str, node: Node) -> None:
        """Makes the router forward packets for an address to a node that does not know this address."""
        if shutil.which("nft") is None:
            pytest.skip("there is no nft (Debian: nftables)")
        chain = "{ type nat hook prerouting priority -100; }"
        rule = f"ip daddr {address} dnat to {node.v4()}"
        self._router.run(f"nft add table ip nat\nnft 'add chain ip nat in {chain}'\nnft 'add rule ip nat in {rule}'")

    def slow_down(self, node: Node, rate: str) -> Callable[[], None]:
        """Limits the rate of each link of a node, in both directions; call the result to undo this."""
        ways = [(self._router, f"n{node.number}w{network}") for network in node.networks]
        ways += [(node, f"net{network}") for network in node.networks]
        for where, device in ways:
            where.run(f"tc qdisc add dev {device} root tbf rate {rate} burst 4000 latency 800ms")

        def undo() -> None:
            for where, device in ways:
                where.run(f"tc qdisc del dev {device} root")

        return undo

    def pull_out(self, node: Node) -> Callable[[], None]:
        """Unplugs a node's cables; call the result to undo this."""
        ends = [f"n{node.number}w{network}" for network in node.networks]
        self._router.run("\n".join(f"ip link set {end} down" for end in ends))
        return lambda: self._router.run("\n".join(f"ip link set {end} up" for end in ends))

    def isolate(
        self, node: Node, others: Sequence[Node], *, inbound: bool = True, outbound: bool = True
    ) -> Callable[[], None]:
        """Drops all packets to a node from some others, or the other way round; call the result to undo this."""
        pairs = [(other, node) for other in others if inbound] + [(node, other) for other in others if outbound]
        return self.filter(*(f"ip saddr {source.v4()} ip daddr {target.v4()} drop" for source, target in pairs))

    def start(self, node: Node, *command: str) -> subprocess.Popen[bytes]:
        """Starts a program on a node; it is killed with the network.  Its output is a pipe."""
        return self._hold(*node.prefix, *command)

    def _hold(self, *command: str) -> subprocess.Popen[bytes]:
        return self._ending.enter_context(running(*command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def _new_namespace(self, host_name: str) -> int:
        # `cat` ends when no process can write to it any more, with the test's own process at the latest.
        script = 'hostname "$1" && ip link set lo up && echo ready && exec cat'
        popen = self._hold("unshare", "--net", "--uts", "sh", "-c", script, "sh", host_name)
        assert popen.stdout is not None and popen.stdout.readline() == b"ready\n"
        # An IPv6 address becomes usable only after a second, unless duplicate address detection is off.
        switch = (
            "echo 0 >$conf/accept_dad; echo 1 >$conf/keep_addr_on_down" if self.has_v6 else "echo 1 >$conf/disable_ipv6"
        )
        script = f"for conf in /proc/sys/net/ipv6/conf/*; do {switch}; done"
        Node(0, popen.pid, ()).run(script)
        return popen.pid

    def close(self) -> None:
        self._ending.close()


@contextmanager
def opened(*, has_v4: bool = True, has_v6: bool = False) -> Iterator[Net]:
    """Opens a network for the test; skips the test on a machine that cannot make one."""
    if reason := why_not():
        pytest.skip(f"no network of our own can be made here: {reason}")
    net = Net(has_v4=has_v4, has_v6=has_v6)
    try:
        net.open()
        yield net
    finally:
        net.close()


def why_not() -> str:
    """Why this machine cannot make networks; empty if it can."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if missing:
        return f"there is no {' and no '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid():
        return "only root may"
    done = subprocess.run(["unshare", "--net", "--uts", "--mount", "true"], capture_output=True, check=False, text=True)
    return done.stderr.strip()


def _do(prefix: Sequence[str], script: str) -> None:
    done = subprocess.run(
        [*prefix, "sh", "-ec", script], capture_output=True, check=False, text=True, timeout=COMMAND_LIMIT_S
    )
    assert done.returncode == 0, f"{script}: {done.stderr}"
