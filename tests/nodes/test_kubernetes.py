"""The manifests in `deploy/kubernetes`: the API server accepts them, and their pods run (see `kit.servers.pods`)."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.agents import Agent, Round
from kit.faults import netns
from kit.faults.netns import Net
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.servers.pods import MANIFESTS, PODS, TALKS, Cluster, dns_name, manifest, pod_template, problems, yaml

from aelastic.errors import EXIT_TRY_AGAIN

NAMES = sorted(path.stem for path in MANIFESTS.glob("*.yaml"))
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "kubernetes.md"
# A worker that saves when it is asked to exit.
SAVES = TALKS.replace(
    "begin_talk()\nis", "signal.signal(signal.SIGTERM, lambda *_: (say('saved', rank), os._exit(0)))\nbegin_talk()\nis"
)


def pod_template_of(name: str) -> dict[str, Any]:
    return next(found for each in manifest(name) if (found := pod_template(each)) is not None)


def kind_of(name: str) -> str:
    return str(next(each["kind"] for each in manifest(name) if pod_template(each) is not None))


# Contents of the manifests.


@pytest.mark.parametrize("name", NAMES)
def test_a_manifest_is_what_the_published_schemas_take(name: str) -> None:
    for thing in manifest(name):
        assert problems(thing) == []
        assert problems({**thing, "spec": {**thing["spec"], "no_such_field": 1}})


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_of_a_manifest_fit_together(name: str) -> None:
    spec = pod_template_of(name)["spec"]
    (container,) = spec["containers"]
    words = [*container["command"], *container.get("args", [])]
    (timeout,) = [float(word.partition("=")[2]) for word in words if word.startswith("--shutdown-timeout=")]
    assert spec["terminationGracePeriodSeconds"] >= timeout + 10 + 5, "workers, preStop, and the agent's own end"
    (port,) = [each["containerPort"] for each in container["ports"] if each["name"] == "health"]
    variables = {each["name"]: each.get("value") for each in container["env"]}
    assert variables["TORCHELASTIC_HEALTH_CHECK_PORT"] == f"0.0.0.0:{port}"
    assert container["livenessProbe"]["httpGet"]["path"] == "/livez"
    # The Training Operator's services publish no names of unready pods, so such a probe would wait for itself.
    ready = container.get("readinessProbe", {}).get("httpGet", {}).get("path")
    assert ready == (None if name == "pytorchjob" else "/readyz")
    before_stop = container["lifecycle"]["preStop"]["exec"]["command"]
    if name == "pytorchjob":  # its operator treats exit code 75, of a drained node, as the end of the job
        assert f"127.0.0.1:{port}" in before_stop[-1]
    else:
        assert "--force" in before_stop, "the pod exits whatever happens to the job"
        (deadline,) = [float(word.partition("=")[2]) for word in before_stop if word.startswith("--deadline=")]
        assert spec["terminationGracePeriodSeconds"] >= deadline + timeout + 5, "the drain may fail"
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert {each["name"] for each in spec["volumes"]} == set(mounted) and mounted["shm"] == "/dev/shm"
    (secret,) = [each["secret"] for each in spec["volumes"] if "secret" in each]
    assert secret["defaultMode"] == 0o400 and f"--secret-file={mounted['secret']}/secret" in words
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"], "so that it is readable"
    assert container["securityContext"]["readOnlyRootFilesystem"] and spec["securityContext"]["runAsNonRoot"]
    used = set(re.findall(r"\$\((\w+)\)", " ".join(words)))
    assert used <= {*variables}
    # Any pod may be lost, so three of them serve an endpoint.
    (endpoints,) = re.findall(r"--rdzv-endpoint=(\S+)", " ".join(words))
    hosts = [each.partition(":")[0] for each in endpoints.replace("$(JOB)", "llm").split(",")]
    assert hosts == [dns_name(kind_of(name), index) for index in range(3)]
    # It requests its memory, and does not fill its node's disk.
    resources = container["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"] and resources["requests"]["cpu"]
    assert all("sizeLimit" in each["emptyDir"] for each in spec["volumes"] if "secret" not in each)


def test_prometheus_finds_the_pods_of_each_manifest() -> None:
    monitor = yaml.safe_load((MANIFESTS.parent / "prometheus/podmonitor.yaml").read_text())
    labels = monitor["spec"]["selector"]["matchLabels"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for name in NAMES:
        template = pod_template_of(name)
        assert labels.items() <= template["metadata"]["labels"].items()
        assert endpoint["port"] in {port["name"] for port in template["spec"]["containers"][0]["ports"]}
    assert endpoint["path"] == "/metrics"


def job_specs(thing: Any) -> Iterator[dict[str, Any]]:
    if isinstance(thing, dict):
        if "podFailurePolicy" in thing:
            yield thing
        thing = list(thing.values())
    for each in thing if isinstance(thing, list) else ():
        yield from job_specs(each)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "pytorchjob"])
def test_a_verdict_ends_the_job_and_a_lost_pod_does_not(name: str) -> None:
    (spec,) = [spec for thing in manifest(name) for spec in job_specs(thing)]
    assert "backoffLimit" not in spec, "it covers the job's whole life: a few lost pods in weeks would end it"
    assert spec["backoffLimitPerIndex"] >= 10 and spec["maxFailedIndexes"] == 0
    ignored, failed = spec["podFailurePolicy"]["rules"]
    assert (ignored["action"], ignored["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    codes = failed["onExitCodes"]
    assert (failed["action"], codes["operator"]) == ("FailJob", "NotIn")
    assert {70, 75, 128 + signal.SIGKILL, 128 + signal.SIGTERM} <= set(codes["values"]) and not {1, 2} & set(
        codes["values"]
    )


def test_the_page_names_each_manifest() -> None:
    assert [name for name in NAMES if f"deploy/kubernetes/{name}.yaml" not in PAGE.read_text()] == []


# How the pods run.


@pytest.fixture
def net() -> Iterator[Net]:
    with netns.opened() as opened:
        yield opened


def started(cluster: Cluster, order: tuple[int, ...] = (2, 0, 3, 1)) -> list[Agent]:
    """Starts the pods in any order; returns them by index."""
    pods = {index: cluster.start_pod(index) for index in order}
    return [pods[index] for index in sorted(pods)]


def first_round(cluster: Cluster, pods: list[Agent]) -> Round:
    return cluster.wait_round(pods, limit_s=LAUNCH_TIMEOUT_S / 2)


@pytest.mark.all
@pytest.mark.parametrize("name", NAMES)
def test_pods_that_start_in_any_order_meet_and_finish(launch: Launcher, net: Net, name: str) -> None:
    cluster = Cluster(launch, net, name, has_dns=name != "indexed-job")
    pods = started(cluster)
    if name == "indexed-job":  # its pods start before DNS has their names
        # After ten seconds a node logs what it is waiting for.
        for pod in pods[1:]:
            pod.wait_logged(r"train-0\.train", limit_s=LAUNCH_TIMEOUT_S / 2)
        assert not any(pod.is_over or pod.starts for pod in pods), cluster.story
        cluster.publish()
    round_ = first_round(cluster, pods)
    assert [start.rank for start in round_.starts] == list(range(PODS))
    if name != "pytorchjob":  # whose pods have no index in their environment
        assert [pod.starts[-1].rank for pod in pods] == list(range(PODS))
    cluster.finish(round_)
    cluster.close()


@pytest.mark.all
def test_a_pod_that_is_evicted_with_notice_saves_and_its_replacement_joins(launch: Launcher, net: Net) -> None:
    cluster = Cluster(launch, net, "indexed-job", worker=SAVES)
    pods = started(cluster)
    before = first_round(cluster, pods)
    cluster.delete(pods[2])
    assert pods[2].wait() == EXIT_TRY_AGAIN, cluster.story
    assert "saved 2" in pods[2].stdout
    pods[0].wait_logged(r"\(by root: preStop\)")
    rest = [pods[0], pods[1], pods[3]]
    between = cluster.wait_round(rest, before)
    assert between.restart == 0, "a node that leaves costs no restart"
    pods[2] = cluster.start_pod(2)
    cluster.finish(cluster.wait_round(pods, between))
    cluster.close()


@pytest.mark.all
def test_a_lost_pod_comes_back_with_its_name_at_another_address(launch: Launcher, net: Net) -> None:
    cluster = Cluster(launch, net, "indexed-job")
    pods = started(cluster)
    round_ = first_round(cluster, pods)
    for lost in (3, 0):  # the last one serves an endpoint
        cluster.lose(pods[lost])
        round_ = cluster.wait_round([pod for pod in pods if pod is not pods[lost]], round_)  # they need not wait for it
        pods[lost] = cluster.start_pod(lost)
        round_ = cluster.wait_round(pods, round_, limit_s=LAUNCH_TIMEOUT_S / 2)
        assert round_.restart == 0 and pods[lost].starts[-1].rank == PODS - 1, cluster.story
    cluster.finish(round_)
    cluster.close()
