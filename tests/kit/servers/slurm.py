"""A real Slurm, from Debian, for tests: a controller and two nodes on this machine, with their own ports and folders.

It is expected where `.ci/run` unpacks it, `build/slurm-debian`, or where Debian installs it.  Without it its tests are
skipped, unless `TEST_SLURM=required` makes them fail.  Each node is a `slurmd -N NAME`, whose name resolves to 127.0.0.1
in an /etc/hosts that only the nodes see.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from aelastic.base.host import proc_table
from kit.faults import netns
from kit.launching import Job, cmdline
from kit.ports import quiet_port
from kit.servers.programs import missing
from kit.waiting import wait_for

MARK = "LAUNCHED_BY_TEST"  # in the environment of all processes that a cluster starts

UNPACKED = Path(__file__).parents[3] / "build" / "slurm-debian" / "usr"
LIBRARIES = UNPACKED / "lib" / "x86_64-linux-gnu"
COMMAND_LIMIT_S = 60.0
LIMIT_S = 100.0
NODES = ("node0", "node1")

# `cred_expire` is also how long a requeued job waits in the queue.
CONFIG = """\
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,sched_min_interval=100000,batch_sched_delay=0
MailProg=/bin/true
FirstJobId={first}
ReturnToService=2
KillWait=10
NodeName={nodes[0]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[0]} CPUs=2
NodeName={nodes[1]} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
PartitionName=main Nodes=ALL Default=YES OverSubscribe=FORCE:4
"""


class Slurm:
    """A running Slurm, as a user of it sees it.

    Args:
        env: the environment of its commands; jobs inherit it, including the mark of `kit.launching`.
    """

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.folder = folder
        self.env = env
        self.daemons: dict[str, Job] = {}

    def run(self, *command: str | Path) -> str:
        """The output of a command, which must succeed."""
        done = subprocess.run(
            [str(word) for word in command],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=COMMAND_LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def is_ready(self) -> bool:
        try:
            return self.run("sinfo", "--noheader", "--format=%D %t").split() == [str(len(NODES)), "idle"]
        except AssertionError:
            return False

    def submit(self, *words: str | Path) -> str:
        """Submits options, a script and its arguments with `sbatch`; returns the job's number."""
        return self.run("sbatch", "--parsable", *words).strip()

    def fields(self, job: str) -> dict[str, str]:
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def wait_end(self, job: str) -> tuple[str, str]:
        """Waits for the end of a job; returns its state and exit code (`code:signal`)."""
        over = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"}
        wait_for(f"the end of job {job}: {self.story(job)}", lambda: self.fields(job)["JobState"] in over, LIMIT_S)
        fields = self.fields(job)
        return fields["JobState"], fields["ExitCode"]

    def wait_output(self, job: str, words: str, count: int = 1) -> None:
        """Waits until the output of a job has the words `count` times."""
        wait_for(f"{words!r} of job {job}: {self.story(job)}", lambda: self.story(job).count(words) >= count, LIMIT_S)

    def story(self, job: str) -> str:
        """The output of a job; an element of an array is `JOB_INDEX`."""
        path = self.folder / f"slurm-{job}.out"
        return path.read_text() if path.exists() else ""

    def processes(self, *words: str) -> list[int]:
        """The processes of jobs whose environment has all of these words."""
        marks = [word.encode() for word in (self.mark, *words)]
        return [
            entry.pid for entry in proc_table.processes() if all(proc_table.carries(entry.pid, mark) for mark in marks)
        ]

    def lose(self, node: str) -> None:
        """Kills everything on a node at once, as if its machine had lost power."""
        jobs = self.processes(f"SLURMD_NODENAME={node}")
        parents = {each.parent for each in map(proc_table.process, jobs) if each is not None}
        steps = [pid for pid in parents if "slurmstepd" in " ".join(cmdline(pid))]
        # `srun` has a child that ends the step when `srun` dies, and ends it itself when the batch script does; in a power
        # loss neither happens.  So all processes are stopped first, and children are killed before their parents.
        gone = [*sorted(jobs, reverse=True), *steps, *self.daemons[node].left()]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for pid in gone:
                with suppress(ProcessLookupError):
                    os.kill(pid, signum)

    def end_jobs(self) -> None:
        """Kills all jobs, and waits until no `slurmstepd` has anything left to report to the daemons."""
        self.run("scancel", "--me")
        for pid in self.processes():
            proc_table.kill(pid)
        wait_for("an empty queue", lambda: not self.run("squeue", "--noheader"), LIMIT_S)

    @property
    def mark(self) -> str:
        return f"{MARK}={self.env[MARK]}"


@contextmanager
def slurm(folder: Path, *settings: str) -> Iterator[Slurm]:
    """A Slurm whose files and outputs of jobs are in a folder.

    Args:
        settings: lines of its configuration, beside our own.
    """
    if why_not := _why_not():
        missing(why_not, "SLURM")
    config = folder / "slurm.conf"
    ports = [quiet_port() for _ in range(3)]
    text = CONFIG.format(
        folder=folder, controller=ports[0], ports=ports[1:], nodes=NODES, first=random.randrange(1, 50_000)
    )
    config.write_text(
        "\n".join([text, *settings, ""]) + (f"PluginDir={LIBRARIES / 'slurm-wlm'}\n" if UNPACKED.exists() else "")
    )
    (folder / "munge.key").write_bytes(random.randbytes(128))
    (folder / "munge.key").chmod(0o600)
    (folder / "hosts").write_text(Path("/etc/hosts").read_text() + f"127.0.0.1 {' '.join(NODES)}\n")
    (folder / "state").mkdir()
    path = [str(Path(sys.executable).parent), str(UNPACKED / "bin"), str(UNPACKED / "sbin"), os.environ["PATH"]]
    own = {"PATH": ":".join(path), "SLURM_CONF": str(config)}
    if UNPACKED.exists():
        own["LD_LIBRARY_PATH"] = f"{LIBRARIES / 'slurm-wlm'}:{LIBRARIES}"
    with ExitStack() as stack:
        cluster = Slurm(folder, {**os.environ, **own, MARK: str(uuid.uuid4())})

        def start(name: str, *command: str) -> None:
            cluster.daemons[name] = Job(folder / name, command, own)
            stack.callback(cluster.daemons[name].kill_all)

        files = {name: f"--{name}-file={folder / f'munge.{name}'}" for name in ("key", "pid", "log", "seed")}
        start("munged", "munged", "--foreground", "--force", f"--socket={folder / 'munge.sock'}", *files.values())
        wait_for("munged", (folder / "munge.sock").exists)
        start("slurmctld", _program("slurmctld"), "-D")
        for node in NODES:
            own_hosts = f"mount --bind '{folder / 'hosts'}' /etc/hosts && exec \"$@\""
            prefix = ("unshare", "--mount", "sh", "-c", own_hosts, "sh")
            start(node, *prefix, _program("slurmd"), "-D", "-N", node, "-d", _program("slurmstepd"))
        stack.callback(cluster.end_jobs)
        wait_for("two nodes of Slurm", cluster.is_ready, LIMIT_S)
        yield cluster


def _program(name: str) -> str:
    """A daemon's path; without Debian's alternatives if it was only unpacked.  Empty if it is missing."""
    unpacked = UNPACKED / "sbin" / f"{name}-wlm"
    return str(unpacked) if unpacked.exists() else shutil.which(name) or ""


def _why_not() -> str:
    if not all(_program(name) for name in ("slurmctld", "slurmd", "slurmstepd")):
        return "no Slurm here: as .ci/run does, unpack its Debian packages into build/slurm-debian"
    return netns.why_not()
