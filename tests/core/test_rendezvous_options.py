"""Where nodes and workers meet: what command lines and variables mean."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from kit.arguments import complaint, spec_of

from aelastic.cli.arguments import parse
from aelastic.compat.launcher.launch_config import LaunchConfig, _rendezvous_fields
from aelastic.errors import InputError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.spec import WorkerSpec


def rendezvous_of(script: str, options: str = "", **environ: str) -> RendezvousSettings:
    settings = spec_of(script, options, **environ).rdzv
    assert settings is not None
    return settings


# Several nodes.


def test_a_static_job_meets_at_its_master(script: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = spec_of(script, "--nnodes 2 --node-rank 1")
    assert spec.rdzv == RendezvousSettings(
        backend="static", endpoint="127.0.0.1:29500", min_nodes=2, max_nodes=2, node_rank=1
    )
    assert (spec.master_addr, spec.master_port, spec.run_id) == ("127.0.0.1", 29500, "none")
    assert "rendezvous at 127.0.0.1:29500; use --master-addr for another address" in caplog.text


def test_nothing_is_logged_about_a_master_that_was_given(script: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec_of(script, "--nnodes 2 --master-addr node7")
    spec_of(script, "--nnodes 2 --rdzv-endpoint node7:29500")
    assert not caplog.records


def test_the_master_of_a_static_job_may_have_an_ipv6_address(script: str) -> None:
    for address in ("fd00::1", "[fd00::1]"):
        spec = spec_of(script, f"--nnodes 2 --master-addr {address}")
        assert spec.rdzv is not None and spec.rdzv.endpoint == "[fd00::1]:29500"
        assert (spec.master_addr, spec.master_port) == ("fd00::1", 29500)


def test_every_variable_of_the_rendezvous_is_read(script: str) -> None:
    spec = spec_of(
        script,
        PET_NNODES="2:4",
        PET_RDZV_BACKEND="c10d",
        PET_RDZV_ENDPOINT="node0:29400",
        PET_RDZV_ID="job-17",
        PET_RDZV_CONF="join_timeout=60,lease=2",
        PET_NODE_RANK="3",
        PET_LOCAL_ADDR="10.0.0.3",
        PET_MAX_RESTARTS="5",
    )
    assert spec.rdzv == RendezvousSettings(
        backend="c10d",
        endpoint="node0:29400",
        min_nodes=2,
        max_nodes=4,
        node_rank=3,
        local_addr="10.0.0.3",
        config={"join_timeout": "60", "lease": "2"},
        endpoint_from="PET_RDZV_ENDPOINT",
    )
    assert (spec.rdzv.join_timeout_s, spec.rdzv.lease_s) == (60.0, 2.0)
    assert (spec.run_id, spec.master_addr, spec.master_port, spec.max_restarts) == ("job-17", None, None, 5)


def test_etcd_takes_several_endpoints(script: str) -> None:
    for backend in ("etcd", "etcd-v2", "etcd-v3"):
        settings = rendezvous_of(script, f"--nnodes 2 --rdzv-backend {backend} --rdzv-endpoint a:2379,b,[::1]:2379")
        assert settings.endpoint == "a:2379,b,[::1]:2379"


def test_of_several_static_endpoints_none_is_the_masters(script: str, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = "n0:1,n1:1,n2:1"
    spec = spec_of(script, f"--nnodes 3 --rdzv-endpoint {endpoint}", PET_RDZV_CONF="lease=2")
    more = {"rank": 0, "lease": "2"}
    config = LaunchConfig(3, 3, 1, run_id="job", rdzv_backend="static", rdzv_endpoint=endpoint, rdzv_configs=more)
    launched = _rendezvous_fields(config)
    for rdzv, master in ((spec.rdzv, spec.master_addr), (launched["rdzv"], launched["master_addr"])):
        assert rdzv is not None and (rdzv.endpoint_count, master) == (3, None)
    assert not caplog.records


def test_a_master_is_not_used_by_other_back_ends_and_that_is_logged(
    script: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = "--rdzv-backend c10d --rdzv-endpoint node0:29400 --master-addr node7 --master-port 29500"
    spec = spec_of(script, f"--nnodes 2 {options}")
    assert (spec.master_addr, spec.master_port) == (None, None)
    assert "ignoring --master-addr node7: only --rdzv-backend static uses it" in caplog.text
    assert "ignoring --master-port 29500: " in caplog.text


def test_one_node_with_an_endpoint_that_others_can_reach_is_a_rendezvous(script: str) -> None:
    settings = rendezvous_of(script, "--rdzv-backend c10d --rdzv-endpoint node0:29400")
    assert (settings.min_nodes, settings.max_nodes) == (1, 1)


def test_standalone_wins_over_the_rendezvous_but_for_the_jobs_name_and_that_is_logged(
    script: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    spec = spec_of(script, "--standalone --rdzv-backend zookeeper --rdzv-id x --node-rank 3", PET_RDZV_ENDPOINT="a:1")
    assert (spec.rdzv, spec.master_addr, spec.run_id) == (None, "localhost", "x")
    for given in ("--rdzv-backend zookeeper", "PET_RDZV_ENDPOINT=a:1", "--node-rank 3"):
        assert f"ignoring {given}: --standalone takes precedence" in caplog.text


# Ranks.

C10D = "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0"


@pytest.mark.parametrize(
    "options, environ, rank",
    [
        ("", {}, None),
        ("--node-rank 0", {}, 0),
        ("--node-rank 7", {}, 7),
        ("", {"PET_NODE_RANK": "3"}, 3),
        ("", {"PET_NODE_RANK": "", "SLURM_NODEID": "4"}, 4),
        ("", {"JOB_COMPLETION_INDEX": "5", "SLURM_NODEID": "4"}, 5),
        ("", {"JOB_COMPLETION_INDEX": "", "SLURM_NODEID": ""}, None),
        ("--node-rank 0", {"JOB_COMPLETION_INDEX": "five"}, 0),
        ("", {"PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "5"}, 0),
    ],
)
def test_a_node_wishes_for_the_rank_it_is_given(
    script: str, options: str, environ: dict[str, str], rank: int | None
) -> None:
    assert rendezvous_of(script, f"{C10D} {options}", **environ).node_rank == rank


def test_a_rank_from_the_scheduler_is_logged(script: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec_of(script, C10D, JOB_COMPLETION_INDEX="5")
    assert "JOB_COMPLETION_INDEX=5 is the preferred node rank; use --node-rank for another" in caplog.text


@pytest.mark.parametrize(
    "options, environ, rank",
    [
        ("--nnodes 2", {"JOB_COMPLETION_INDEX": "1"}, 1),
        ("--nnodes 2", {"SLURM_NODEID": "1"}, 1),
        ("--nnodes 6", {"JOB_COMPLETION_INDEX": "5", "SLURM_NODEID": "4"}, 5),
        ("--nnodes 2", {"JOB_COMPLETION_INDEX": ""}, 0),
        ("--nnodes 2 --node-rank 0", {"SLURM_NODEID": "1"}, 0),
        ("--nnodes 2", {"PET_NODE_RANK": "0", "SLURM_NODEID": "x"}, 0),
        ("--nnodes 2 --rdzv-backend torch:static", {"SLURM_NODEID": "1"}, 0),
    ],
)
def test_a_static_node_has_the_rank_that_it_is_given_or_the_schedulers(
    script: str, options: str, environ: dict[str, str], rank: int
) -> None:
    assert rendezvous_of(script, f"--master-addr node0 {options}", **environ).node_rank == rank


SRUN = {"SLURM_NODEID": "1", "SLURM_NNODES": "3"}


@pytest.mark.parametrize(
    "options, environ, nodes",
    [
        ("--master-addr node0 --master-port 29500", SRUN, 3),
        ("--master-addr node0", SRUN, 3),
        ("--rdzv-endpoint node0:29500", SRUN, 3),
        ("--master-addr node0", {**SRUN, "SLURM_STEP_NUM_NODES": "2"}, 2),
        ("--master-addr 127.0.0.1", {**SRUN, "SLURM_STEP_NUM_NODES": "2"}, 2),
        ("--master-addr node0", {**SRUN, "PET_NNODES": "4"}, 4),
        ("--master-addr node0 --nnodes 2", SRUN, 2),
        # One node, as with torchrun.
        ("--master-addr node0 --nnodes 1 --master-port 29500", SRUN, None),
        ("--master-addr node0 --master-port 29500", {**SRUN, "SLURM_NNODES": "1"}, None),
        ("--master-addr localhost --master-port 29500", SRUN, None),
        ("--rdzv-endpoint [::1]:29500", SRUN, None),
        ("--master-addr node0", {"SLURM_NNODES": "3"}, None),
        ("--master-port 29500", SRUN, None),
        ("--standalone --master-addr node0", SRUN, None),
        ("", SRUN, None),
    ],
)
def test_a_static_job_with_an_address_has_as_many_nodes_as_slurm_says(
    script: str, options: str, environ: dict[str, str], nodes: int | None
) -> None:
    rdzv = spec_of(script, options, **environ).rdzv
    assert (rdzv and (rdzv.min_nodes, rdzv.max_nodes, rdzv.node_rank)) == (nodes and (nodes, nodes, 1))


@pytest.mark.parametrize(
    "environ, words",
    [
        (
            {"JOB_COMPLETION_INDEX": "five"},
            "JOB_COMPLETION_INDEX=five: .* use --node-rank, .* docs/how-to/kubernetes.md",
        ),
        ({"SLURM_NODEID": "²"}, "SLURM_NODEID=²: .* use --node-rank, or see docs/how-to/slurm.md"),
        ({"SLURM_NODEID": "2", "SLURM_NNODES": "2"}, "SLURM_NODEID=2: the node ranks of 2 nodes are 0 to 1"),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "two"}, "SLURM_NNODES=two: .* use --nnodes"),
        ({"SLURM_NODEID": "0", "SLURM_NNODES": "0"}, "SLURM_NNODES=0: at least 1 node is needed: use --nnodes"),
    ],
)
def test_what_a_scheduler_should_not_say_is_refused_by_the_variables_name(
    script: str, environ: dict[str, str], words: str
) -> None:
    nodes = () if "SLURM_NNODES" in environ else ("--nnodes=2",)
    assert re.match(words, complaint(*nodes, "--master-addr=node0", script, **environ))


@pytest.mark.parametrize("variable, value", [("JOB_COMPLETION_INDEX", "-1"), ("SLURM_NODEID", "abc")])
def test_a_wish_that_is_not_a_rank_is_refused_by_the_variables_name(script: str, variable: str, value: str) -> None:
    assert complaint(*C10D.split(), script, **{variable: value}).startswith(f"{variable}={value}: it should hold")


def test_a_foreign_handler_does_not_ask_the_scheduler(script: str) -> None:
    assert rendezvous_of(script, C10D.replace("c10d", "torch:c10d"), JOB_COMPLETION_INDEX="1").node_rank is None


# Back ends.


def test_torchs_own_handlers_go_by_their_rules(script: str) -> None:
    assert rendezvous_of(script, "--rdzv-backend torch:c10d").endpoint == ""
    spec = spec_of(script, "--nnodes 2 --node-rank 1 --rdzv-backend torch:static --master-addr node7")
    assert spec.rdzv == RendezvousSettings(
        backend="torch:static", endpoint="node7:29500", min_nodes=2, max_nodes=2, node_rank=1
    )


def test_a_handler_that_a_package_brings_is_known_by_its_name(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "zoo-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text("[torchrun.handlers]\nzookeeper = zoo:handler\nc10 = zoo:other\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("zookeeper", "torch:zookeeper", "c10"):
        settings = rendezvous_of(script, f"--nnodes 2:3 --rdzv-backend {name} --rdzv-endpoint zk://a/b")
        assert (settings.backend, settings.endpoint) == (name, "zk://a/b")
        settings = rendezvous_of(script, f"--nnodes 2:3 --rdzv-backend {name}", PET_MASTER_ADDR="node7")
        assert (settings.endpoint, settings.endpoint_from) == ("", ""), "only static falls back to the master"


# What cannot work.


def test_a_password_is_in_no_complaint(script: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert "--rdzv-conf user=u,password=…,x: x has no value" in complaint(
        *["--rdzv-conf", "user=u,password=p4ss,x"], script
    )
    words = complaint(
        *["--rdzv-backend", "etcdd", "--rdzv-endpoint", "http://u:p4ss@a"], script, PET_RDZV_CONF="password=p4ss"
    )
    assert "p4ss" not in words
    spec_of(script, "--standalone --rdzv-endpoint http://u:p4ss@a", PET_RDZV_CONF="user=u,password=p4ss")
    assert "ignoring PET_RDZV_CONF=user=u,password=…: " in caplog.text
    assert "p4ss" not in caplog.text


@pytest.mark.parametrize("run_id", ["a\nb", "a\0b", "\r"])
def test_a_run_id_has_no_line_breaks(script: str, run_id: str) -> None:
    with pytest.raises(InputError, match="use a run id without line breaks"):
        parse([f"--rdzv-id={run_id}", script], {})
    with pytest.raises(InputError, match=r"run_id is .*: use a run id without line breaks"):
        WorkerSpec(entrypoint="true", run_id=run_id)


def test_a_spec_meets_in_one_way_and_names_the_job_of_several_nodes() -> None:
    settings = RendezvousSettings(backend="c10d", endpoint="node0", min_nodes=1, max_nodes=2)
    handler = SimpleNamespace(next_rendezvous=None)
    with pytest.raises(InputError, match="rdzv and rdzv_handler are both given"):
        WorkerSpec(entrypoint="true", rdzv=settings, rdzv_handler=handler, run_id="x")
    with pytest.raises(InputError, match="run_id is empty"):
        WorkerSpec(entrypoint="true", rdzv=settings)
    assert WorkerSpec(entrypoint="true", rdzv=settings, run_id="x").rdzv is settings
    assert WorkerSpec(entrypoint="true", rdzv_handler=handler).rdzv_handler is handler


def test_the_timeout_of_a_static_rendezvous_is_its_join_timeout(script: str) -> None:
    assert rendezvous_of(script, "--nnodes 2 --rdzv-conf timeout=7").join_timeout_s == 7.0
    assert rendezvous_of(script, "--nnodes 2 --rdzv-conf timeout=7,join_timeout=8").join_timeout_s == 8.0
    assert rendezvous_of(script, f"{C10D} --rdzv-conf timeout=7").join_timeout_s == 600.0
