"""Name servers of a test's network, which fall silent on demand, and the files that nodes need to use them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kit.faults.netns import Net, Node

# Answers for the names in a file (RFC 1035, section 4.1) while the file exists; it is read again for each question.
PROGRAM = """
import ipaddress, pathlib, socket, struct, sys

server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 53))
print("ready", flush=True)
while True:
    asked, peer = server.recvfrom(4096)
    try:
        known = dict(line.split() for line in pathlib.Path(sys.argv[2]).read_text().splitlines())
    except FileNotFoundError:
        continue
    labels, at = [], 12
    while length := asked[at]:
        labels.append(asked[at + 1 : at + 1 + length].decode())
        at += 1 + length
    (kind,) = struct.unpack("!H", asked[at + 1 : at + 3])
    address = known.get(".".join(labels))
    question, answer = asked[12 : at + 5], b""
    if address and kind == 1:
        answer = struct.pack("!HHHIH", 0xC00C, 1, 1, 0, 4) + ipaddress.ip_address(address).packed
    flags = 0x8580 if address else 0x8583
    head = asked[:2] + struct.pack("!HHHHH", flags, 1, bool(answer), 0, 0)
    server.sendto(head + question + answer, peer)
"""


@dataclass(frozen=True)
class NameServer:
    """A name server on a node of its own.

    Args:
        node: its node.
        names: the file of known names, with a name and its address on each line; it answers while the file exists.
    """

    node: Node
    names: Path

    def learn(self, addresses: Mapping[str, str]) -> None:
        """Also answers with these addresses, by name."""
        known = dict(line.split() for line in self.names.read_text().splitlines()) if self.names.exists() else {}
        lines = [f"{name} {address}\n" for name, address in {**known, **addresses}.items()]
        new = self.names.with_suffix(".new")
        new.write_text("".join(lines))
        new.replace(self.names)

    def fall_silent(self) -> None:
        """Swallows questions from now on."""
        self.names.unlink()


def name_server(net: Net, folder: Path) -> NameServer:
    """Starts a name server, which is silent until it knows a name."""
    node = net.node("names")
    names = folder / f"names-{node.number}"
    popen = net.start(node, sys.executable, "-c", PROGRAM, node.v4(), str(names))
    assert popen.stdout is not None and popen.stdout.readline() == b"ready\n"
    return NameServer(node, names)


def files_of(servers: Sequence[NameServer], folder: Path, options: str = "") -> dict[str, Path]:
    """The /etc files of a node that asks these name servers in order, and knows no name itself.

    Args:
        servers: at most three.
        folder: for the files.
        options: resolver options, as in resolv.conf(5).
    """
    lines = [*(f"nameserver {server.node.v4()}" for server in servers), f"options {options}"]
    contents = {
        "hosts": "127.0.0.1 localhost\n",
        "resolv.conf": "".join(f"{line}\n" for line in lines),
        "nsswitch.conf": "hosts: files dns\n",
    }
    for name, text in contents.items():
        (folder / name).write_text(text)
    return {name: folder / name for name in contents}
