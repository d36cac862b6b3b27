"""Emulates the pods of a manifest in `deploy/kubernetes`, without a cluster.

A pod is a network namespace with a host name and an address.  This module does the work of the kubelet and the controllers
for a pod: the manifest's command and environment with `$(NAME)` expanded, the variables that a controller adds, names in
the headless service's DNS (a hosts file that all pods see), preStop, SIGTERM, and SIGKILL to the whole pod.  It does not
emulate images, cgroups, volumes or security contexts.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kit.agents import WORKER, Agent, Meeting, Round, Team
from kit.faults.netns import Net, Node
from kit.launching import LOOPS, PREAMBLE, Launcher
from kit.waiting import wait_for

yaml = pytest.importorskip("yaml")  # PyYAML: in the group dev

jsonschema = pytest.importorskip("jsonschema")  # in the group dev

SCHEMAS = json.loads(Path(__file__).with_name("kubernetes_schemas.json").read_text())
MANIFESTS = Path(__file__).parents[3] / "deploy" / "kubernetes"
PODS = 4
UID = "7c1c3f0e-6d3b-4f6e-9a55-0d3f2e6a1b11"
# Replacements for resources that are missing here: devices to count, and the image's files.
ARGUMENTS = {"--nproc-per-node=auto": "--nproc-per-node=1"}


def manifest(name: str) -> list[dict[str, Any]]:
    """The objects of one file."""
    return list(yaml.safe_load_all((MANIFESTS / f"{name}.yaml").read_text()))


def problems(thing: dict[str, Any]) -> list[str]:
    """The API server's objections to an object."""
    schema = {**SCHEMAS["kinds"][thing["kind"]], "$defs": SCHEMAS["$defs"]}
    return [f"{each.json_path}: {each.message}" for each in jsonschema.Draft202012Validator(schema).iter_errors(thing)]


def pod_template(thing: Any) -> dict[str, Any] | None:
    """The pod template somewhere in an object."""
    if isinstance(thing, dict) and "containers" in thing.get("spec", ()):
        return thing
    inner = thing.values() if isinstance(thing, dict) else thing if isinstance(thing, list) else ()
    return next((found for each in inner if (found := pod_template(each)) is not None), None)


def dns_name(kind: str, index: int) -> str:
    """The name by which others reach a pod."""
    names = {
        "Job": f"train-{index}.train",
        "JobSet": f"train-node-0-{index}.train",
        "PyTorchJob": f"train-worker-{index}",
        "ClusterTrainingRuntime": f"llm-node-0-{index}.llm",
    }
    return names[kind]


def injected(kind: str, index: int) -> dict[str, str]:
    """The variables that controllers add to a pod's environment.

    Indexed jobs: Kubernetes' documentation of completionMode.  PyTorchJob: `pkg/controller.v1/pytorch/elastic.go` of
    the Training Operator 1.9.  Trainer: `pkg/runtime/framework/plugins/torch/torch.go`, 2.2.
    """
    if kind == "PyTorchJob":
        return {
            "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": f"{dns_name(kind, 0)}:23456", "PET_RDZV_ID": "train",
            "PET_NNODES": f"2:{PODS}", "PET_NPROC_PER_NODE": "1", "PET_MAX_RESTARTS": "3",
        }  # fmt: skip
    env = {"JOB_COMPLETION_INDEX": str(index)}
    if kind == "ClusterTrainingRuntime":
        env |= {
            "PET_NNODES": str(PODS), "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": dns_name(kind, 0), "PET_MASTER_PORT": "29500",
        }  # fmt: skip
    return env


# A worker that reports when it talks to the others, which would wait for one that ended before that.
TALKS = WORKER.replace("begin_talk()\nrest()", "begin_talk()\nis_connected.wait(20)\nsay('talks', rank)\nrest()")


class Pod(Agent):
    """An agent whose workers' lines have the prefix of `--tee`."""

    @property
    def lines(self) -> list[str]:
        return [re.sub(r"^\[default\d+\]:", "", line) for line in super().lines]


class Cluster(Team):
    """The pods of one manifest.

    Args:
        launcher: ends what is left of them.
        net: the pods' network.
        name: the name of the manifest.
        has_dns: pods have DNS names from the beginning.
    """

    def __init__(self, launcher: Launcher, net: Net, name: str, *, worker: str = TALKS, has_dns: bool = True) -> None:
        super().__init__(launcher, Meeting("", ""), "", worker=worker, name=name)
        objects = manifest(name)
        self.kind, template = next(
            (each["kind"], found) for each in objects if (found := pod_template(each)) is not None
        )
        (self.container,) = template["spec"]["containers"]
        self.more_args: list[str] = next(
            (each["spec"]["trainer"]["args"] for each in objects if each["kind"] == "TrainJob"), []
        )
        self._net = net
        self._has_dns = has_dns
        self._hosts, self._switch = launcher.folder / "hosts", launcher.folder / "nsswitch.conf"
        self._hosts.write_text("127.0.0.1 localhost\n")
        self._switch.write_text("hosts: files\n")
        self._addresses: dict[str, str] = {}
        self._nodes: dict[str, Node] = {}

    def start_pod(self, index: int) -> Agent:
        """Starts the pod with this index as the controllers and a kubelet do, with a new address each time."""
        dns = dns_name(self.kind, index)
        node = self._net.node(dns.partition(".")[0], files={"hosts": self._hosts, "nsswitch.conf": self._switch})
        self._addresses[dns] = node.v4()
        if self._has_dns:
            self.publish()
        name = f"{self.name}-{len(self.agents)}"
        folder = self.launcher.folder / name
        env = injected(self.kind, index)
        env |= {each["name"]: each.get("value") or _field(each) for each in self.container["env"]}
        script = self.launcher.write(f"{name}/train.py", self.worker, preamble=PREAMBLE)
        words = [*self.container["command"], *self.container.get("args", ()), *self.more_args]
        assert words[0] == "aelastic"
        secret = f"--secret-file={_mounted(self.launcher.folder / 'secret')}"
        stands_for = {
            **ARGUMENTS,
            "--secret-file=/etc/aelastic/secret": secret,
            "train.py": str(script),
            "--log-dir=/logs": f"--log-dir={folder / 'logs'}",
        }
        options = [stands_for.get(word, word) for word in (_expanded(word, env) for word in words[1:])]
        program = [sys.executable, *self.launcher.agent_program(name, ""), "--loop", LOOPS[index % 2]]
        star = self.launcher.folder / "star"
        star.mkdir(exist_ok=True)
        env |= {"LOGLEVEL": "INFO", "STAR": str(star)}
        pod = Pod(name, 1, folder, [*node.prefix, *program, *options], env, is_cold=True)
        self._nodes[name] = node
        self.launcher.jobs.append(pod)
        self.agents.append(pod)
        return pod

    def finish(self, round_: Round) -> None:
        wait_for("all pods talk", lambda: all(pod.lines[-1].startswith("talks ") for pod in self.live))
        super().finish(round_)

    def publish(self) -> None:
        """Adds the names of all started pods to the DNS, from now on."""
        self._has_dns = True
        names = [f"{address} {dns}" for dns, address in self._addresses.items()]
        self._hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))

    def delete(self, pod: Agent) -> None:
        """Ends a pod as the kubelet does on deletion or eviction: preStop, then SIGTERM to the container's process."""
        command = self.container["lifecycle"]["preStop"]["exec"]["command"]
        words = [sys.executable, *(["-m"] if command[0] == "aelastic" else []), *command[command[0] == "python" :]]
        env = {**os.environ, "XDG_RUNTIME_DIR": str(pod.folder)}
        done = subprocess.run(
            [*self._nodes[pod.name].prefix, *words],
            capture_output=True,
            text=True,
            check=False,
            env=env,
            cwd=pod.folder,  # like the container's
        )
        assert done.returncode == 0, f"preStop: {done.stderr}\n{pod.story}"
        pod.signal(signal.SIGTERM)

    @staticmethod
    def lose(pod: Agent) -> None:
        """Makes the pod's machine vanish: all of its processes at once, silently."""
        pod.kill_all()
        pod.tmp.mkdir()  # empty, because the test checks it at the end


def _mounted(folder: Path) -> Path:
    """A Secret as the kubelet mounts it: links to a file that root owns and the pod's group can read."""
    if not folder.exists():
        (folder / "..1").mkdir(parents=True)
        (folder / "..1" / "secret").write_text("a secret of the tests, in one line")
        (folder / "..1" / "secret").chmod(0o440)
        (folder / "..data").symlink_to("..1")
        (folder / "secret").symlink_to("..data/secret")
    return folder / "secret"


def _field(variable: dict[str, Any]) -> str:
    """The kubelet's value for a field of the pod; the TrainJob and its JobSet have the same name."""
    return "llm" if "jobset-name" in str(variable["valueFrom"]) else UID


def _expanded(word: str, env: Mapping[str, str]) -> str:
    """Expands `$(NAME)` as the kubelet does; names that are not set stay."""
    return re.sub(r"\$\((\w+)\)", lambda found: env.get(found[1], found[0]), word)
