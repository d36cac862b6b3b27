"""What a secret costs, with and without it in turn, and what a hostile client costs a job that has one; prints JSON.

    python benchmarks/secret.py [--pairs 5] [--agents 1000] [--only frame,agents,form,attack]

`frame`: a tag on both ends of a message of 300 bytes.  `agents`: the first round of many agents (`many_agents.py`).
`form`: four agents until their workers run, and again after a worker was killed.  `attack`: that again of two agents
whose ports get the sessions of `tests/kit/hostile.py` all the time, beside two that are left alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs import Job, open_job
from one_node import Launcher

from aelastic.rdzv.protocol.handshake import Tagger

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from kit.ports import listening

HERE = Path(__file__).parent
FRAME_BYTES, FRAMES = 300, 20_000
RESTARTS = 15

HOSTILE = """
import json, random, sys
from contextlib import suppress
from kit.hostile import Knowledge, Recording, attack
from aelastic.rdzv.protocol.codec import encode
ports = json.loads(sys.argv[1])
dice = random.Random(0)
greeting = b'["Hello",{"nonce":"%s","protocol":8,"run":"00000000","keys":["%s"]}]' % (b"0" * 64, b"0" * 16)
said = tuple(len(each).to_bytes(4, "big") + each for each in (greeting, dice.randbytes(32), dice.randbytes(200)))
known = Knowledge("run", "0" * 32, [Recording(said)])
for seed in range(1 << 30):
    with suppress(OSError):
        attack(seed, "127.0.0.1", ports, known)
    if not seed % 100:
        print(seed, flush=True)
"""


def measure_frame() -> dict[str, float]:
    sender, receiver, body = Tagger(b"k" * 32), Tagger(b"k" * 32), os.urandom(FRAME_BYTES)

    def both_ends() -> None:
        frame = sender.tag(body) + body
        assert frame[:16] == receiver.tag(frame[16:])

    return {"frame_us": min(timeit.repeat(both_ends, number=FRAMES, repeat=5)) / FRAMES * 1e6}


def measure_agents(secret: Path | None, count: int) -> dict[str, float]:
    command = [sys.executable, str(HERE / "many_agents.py"), str(count), "--rounds", "1"]
    done = subprocess.run([*command, *_options(secret)], stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout)
    return {"first_s": figures["first_s"], "again_s": figures["again_s"][0]}


def measure_form(secret: Path | None) -> dict[str, float]:
    with open_job(_launcher(secret), "4", max_restarts=1) as job:
        began = job.start(4)
        running = job.wait_running(4)
        return {"form_s": running - began, "crash_s": _crash(job, 4)}


def measure_attack(secret: Path, *, is_attacked: bool) -> dict[str, float]:
    with open_job(_launcher(secret), "2", max_restarts=RESTARTS) as job:
        job.start(2)
        job.wait_running(2)
        with _attackers(job) if is_attacked else _nobody():
            return {"crash_s": statistics.median(_crash(job, 2) for _ in range(RESTARTS))}


@contextmanager
def _nobody() -> Iterator[None]:
    yield


@contextmanager
def _attackers(job: Job) -> Iterator[None]:
    ports = sorted(set().union(*(listening([agent.process.pid]) for agent in job.agents)))
    env = {**os.environ, "PYTHONPATH": f"{HERE.parent / 'tests'}"}
    command = [sys.executable, "-c", HOSTILE, json.dumps(ports)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def _crash(job: Job, count: int) -> float:
    """Seconds from the end of a worker until all run again."""
    workers = job.workers(count)
    killed_at = time.monotonic()
    os.kill(workers[count - 1].pid, signal.SIGKILL)
    return job.wait_running(count, after=killed_at) - killed_at


def _launcher(secret: Path | None) -> Launcher:
    return Launcher("aelastic", (sys.executable, "-m", "aelastic", *_options(secret)))


def _options(secret: Path | None) -> list[str]:
    return [] if secret is None else ["--secret-file", str(secret)]


Take = Callable[[], dict[str, float]]


def in_pairs(pairs: int, first: Take, other: Take) -> dict[str, object]:
    """Medians of both, measured in turn, each first as often as the other, and the median of the ratios."""
    taken = []
    for pair in range(pairs):
        found = [take() for take in ((first, other) if pair % 2 else (other, first))]
        taken.append((found[0], found[1]) if pair % 2 else (found[1], found[0]))
    return {
        key: {
            "without": statistics.median(one[key] for one, _ in taken),
            "with": statistics.median(two[key] for _, two in taken),
            "ratio": statistics.median(two[key] / one[key] for one, two in taken),
        }
        for key in taken[0][0]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="What a secret costs.")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--only", default="frame,agents,form,attack")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.touch(0o600)
        secret.write_text(os.urandom(32).hex())
        measures: dict[str, Callable[[], dict[str, object]]] = {
            "frame": lambda: dict(measure_frame()),
            "agents": lambda: in_pairs(
                options.pairs,
                lambda: measure_agents(None, options.agents),
                lambda: measure_agents(secret, options.agents),
            ),
            "form": lambda: in_pairs(options.pairs, lambda: measure_form(None), lambda: measure_form(secret)),
            "attack": lambda: in_pairs(
                options.pairs,
                lambda: measure_attack(secret, is_attacked=False),
                lambda: measure_attack(secret, is_attacked=True),
            ),
        }
        print(json.dumps({name: measures[name]() for name in options.only.split(",")}, indent=2))


if __name__ == "__main__":
    main()
