"""Where nodes and workers meet: what command lines and variables mean, by example and against torchrun itself."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest

from aelastic.cli.arguments import parse
from aelastic.errors import InputError
from aelastic.rdzv.settings import RendezvousSettings, split_endpoint
from aelastic.spec import WorkerSpec


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.touch()
    return str(path)


@pytest.fixture
def torch_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)
    return pytest.importorskip("torch.distributed.run")


def spec_of(script: str, options: str = "", **environ: str) -> WorkerSpec:
    return parse([*options.split(), script], {"PATH": os.defpath, **environ}).spec


def rendezvous_of(script: str, options: str = "", **environ: str) -> RendezvousSettings:
    settings = spec_of(script, options, **environ).rdzv
    assert settings is not None
    return settings


def complaint(script: str, options: str, **environ: str) -> str:
    with pytest.raises(InputError) as caught:
        spec_of(script, options, **environ)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Against torchrun.

COMMANDS = [
    "",
    "--standalone",
    "--standalone --nnodes 1:2 --rdzv-backend etcd --rdzv-endpoint x:1 --rdzv-id y --rdzv-conf a=b --node-rank 3",
    "--standalone --local-addr 10.0.0.1",
    "--local-addr 10.0.0.1",
    "--rdzv-id x",
    "--rdzv-id x --master-port 29555",
    "--rdzv-id= --master-port 29555",
    "--master-addr node7 --master-port 29556 --local-addr 10.0.0.1",
    "--rdzv-endpoint node7:29557",
    "--rdzv-endpoint [::1]:29557 --rdzv-id x --rdzv-conf timeout=5",
    "--rdzv-endpoint node7:29557 --master-addr node8 --master-port 29558",
    "--rdzv-backend c10d",
    "--rdzv-backend c10d --rdzv-id x --local-addr 10.0.0.1",
    "--rdzv-backend c10d --rdzv-endpoint localhost:0 --rdzv-id x",
    "--rdzv-backend c10d --rdzv-endpoint node7:29400 --rdzv-id x",
    "--nnodes 2",
    "--nnodes 2:2 --node-rank 1 --master-addr node7",
    "--nnodes 3 --node-rank 2 --master-addr node7 --master-port 29501 --local-addr node9",
    "--nnodes 2 --rdzv-endpoint node7:29501 --rdzv-id x --rdzv-conf rank=1,timeout=60",
    "--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node7",
    "--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint node7:29400 --rdzv-id x --master-port 29500",
    "--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint [fd00::1]:29400 --rdzv-conf join_timeout=60,is_host=1",
    "--nnodes 1:4 --rdzv-backend etcd-v2 --rdzv-endpoint etcd:2379 --rdzv-conf protocol=https",
    "--nnodes 4 --rdzv-backend etcd --rdzv-endpoint etcd --local-addr node9",
]


def torchruns_config(torch_run: Any, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """What torchrun is about to launch."""
    launched = []

    def launch(config: Any, entrypoint: Any) -> Any:
        launched.append(config)
        return lambda *_: None

    monkeypatch.setattr(torch_run, "elastic_launch", launch)
    monkeypatch.setattr("torch.multiprocessing._set_thread_name", lambda _: None)
    torch_run.run(torch_run.parse_args(argv))
    return launched[0]


def is_random(run_id: str) -> bool:
    return not run_id or run_id.count("-") == 4


@pytest.mark.parametrize("command", COMMANDS)
def test_the_meeting_point_is_torchruns(
    script: str, command: str, torch_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.launcher.api import _get_addr_and_port

    config = torchruns_config(torch_run, [*command.split(), script], monkeypatch)
    master = _get_addr_and_port(
        RendezvousParameters(
            config.rdzv_backend, config.rdzv_endpoint, config.run_id or "x", config.min_nodes, config.max_nodes
        )
    )
    spec = spec_of(script, command)

    assert spec.run_id == (None if is_random(config.run_id) else config.run_id)
    if spec.rdzv is None:
        is_static = config.rdzv_backend == "static"
        assert is_static or config.rdzv_endpoint in {"", "localhost:0"}
        assert (spec.master_addr, spec.master_port) == (
            master if is_static else (config.local_addr or "localhost", None)
        )
        return
    rank = config.rdzv_configs.pop("rank", None)
    if " timeout" not in command and ",timeout" not in command:
        del config.rdzv_configs["timeout"]  # torchrun's default, for whatever back end
    assert (spec.master_addr, spec.master_port) == master
    assert spec.rdzv == RendezvousSettings(
        backend=config.rdzv_backend,
        endpoint=config.rdzv_endpoint,
        min_nodes=config.min_nodes,
        max_nodes=config.max_nodes,
        node_rank=rank,
        local_addr=config.local_addr,
        config=config.rdzv_configs,
    )


@pytest.mark.parametrize(
    "text", ["", " ", "a=b", " a = b , c=d=e", "a=b,a=c", "a", "a=", "=b", "a=b,", ",a=b", "a=b c", "a==b", "a=b,,c=d"]
)
def test_the_rendezvous_configuration_is_read_as_torchrun_reads_it(script: str, text: str, torch_run: Any) -> None:
    def ours(text: str) -> Any:
        argv = ["--nnodes=2", f"--rdzv-conf={text}", script]
        settings = parse(argv, {}).spec.rdzv
        assert settings is not None
        return settings.config

    def outcome(read: Any) -> Any:
        try:
            return dict(read(text))
        except (ValueError, InputError):
            return "refused"

    assert outcome(ours) == outcome(torch_run._parse_rendezvous_config)


@pytest.mark.parametrize(
    "endpoint",
    ["host", "host:1", "host:65535", "host.example-1.org:80", "my_host:2", "10.0.0.1", "[::1]", "[fe80::1]:3", "h:0"],
)
def test_an_endpoint_is_split_as_torchs_is(endpoint: str) -> None:
    utils = pytest.importorskip("torch.distributed.elastic.rendezvous.utils")
    assert split_endpoint(endpoint, 7) == utils.parse_rendezvous_endpoint(endpoint, 7)


@pytest.mark.parametrize(
    "endpoint",
    ["", ":1", "host:", "host:http", "host:99999", "host:65536", "http://h:1", "a b:1", "a,b", "[::1", "::1"],
)
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(InputError, match="rendezvous endpoint"):
        split_endpoint(endpoint, 7)


# Several nodes.


def test_a_static_job_meets_at_its_master(script: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = spec_of(script, "--nnodes 2 --node-rank 1")
    assert spec.rdzv == RendezvousSettings(
        backend="static", endpoint="127.0.0.1:29500", min_nodes=2, max_nodes=2, node_rank=1
    )
    assert (spec.master_addr, spec.master_port, spec.run_id) == ("127.0.0.1", 29500, "none")
    assert "the nodes meet at 127.0.0.1:29500: use --master-addr for another place" in caplog.text


def test_nobody_is_told_of_a_master_that_was_given(script: str, caplog: pytest.LogCaptureFixture) -> None:
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
    )
    assert (spec.rdzv.join_timeout_s, spec.rdzv.lease_s) == (60.0, 2.0)
    assert (spec.run_id, spec.master_addr, spec.master_port, spec.max_restarts) == ("job-17", None, None, 5)


def test_etcd_takes_several_endpoints(script: str) -> None:
    for backend in ("etcd", "etcd-v2", "etcd-v3"):
        settings = rendezvous_of(script, f"--nnodes 2 --rdzv-backend {backend} --rdzv-endpoint a:2379,b,[::1]:2379")
        assert settings.endpoint == "a:2379,b,[::1]:2379"


def test_a_master_is_not_used_by_other_back_ends_and_that_is_said(
    script: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = "--rdzv-backend c10d --rdzv-endpoint node0:29400 --master-addr node7 --master-port 29500"
    spec = spec_of(script, f"--nnodes 2 {options}")
    assert (spec.master_addr, spec.master_port) == (None, None)
    assert "--master-addr node7 is not used: it is for --rdzv-backend static" in caplog.text
    assert "--master-port 29500 is not used" in caplog.text


def test_one_node_with_an_endpoint_that_others_can_reach_is_a_rendezvous(script: str) -> None:
    settings = rendezvous_of(script, "--rdzv-backend c10d --rdzv-endpoint node0:29400")
    assert (settings.min_nodes, settings.max_nodes) == (1, 1)


def test_standalone_wins_over_the_rendezvous_and_that_is_said(script: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec = spec_of(script, "--standalone --rdzv-backend zookeeper --rdzv-id x --node-rank 3", PET_RDZV_ENDPOINT="a:1")
    assert (spec.rdzv, spec.master_addr, spec.run_id) == (None, "localhost", None)
    for given in ("--rdzv-backend zookeeper", "--rdzv-id x", "PET_RDZV_ENDPOINT=a:1", "--node-rank 3"):
        assert f"{given} is not used: --standalone goes before it" in caplog.text


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
        ("", {"JOB_COMPLETION_INDEX": "five", "SLURM_NODEID": "4"}, 4),
        ("", {"JOB_COMPLETION_INDEX": "-1"}, None),
        ("", {"JOB_COMPLETION_INDEX": "²"}, None),
        ("--node-rank 0", {"JOB_COMPLETION_INDEX": "5"}, 0),
        ("", {"PET_NODE_RANK": "0", "JOB_COMPLETION_INDEX": "5"}, 0),
    ],
)
def test_a_node_wishes_for_the_rank_it_is_given(
    script: str, options: str, environ: dict[str, str], rank: int | None
) -> None:
    assert rendezvous_of(script, f"{C10D} {options}", **environ).node_rank == rank


def test_a_rank_from_the_scheduler_is_told(script: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    spec_of(script, C10D, JOB_COMPLETION_INDEX="5")
    assert "JOB_COMPLETION_INDEX=5 is this node's rank, if it can be: use --node-rank for another" in caplog.text


def test_a_static_job_and_a_foreign_handler_do_not_ask_the_scheduler(script: str) -> None:
    assert rendezvous_of(script, "--nnodes 2", JOB_COMPLETION_INDEX="1").node_rank == 0
    assert rendezvous_of(script, C10D.replace("c10d", "torch:c10d"), JOB_COMPLETION_INDEX="1").node_rank is None


# Back ends.


def test_torchs_own_handlers_go_by_their_rules(script: str) -> None:
    assert rendezvous_of(script, "--rdzv-backend torch:c10d").endpoint == ""
    spec = spec_of(script, "--nnodes 2 --node-rank 1 --rdzv-backend torch:static --master-addr node7")
    assert spec.rdzv == RendezvousSettings(
        backend="torch:static", endpoint="node7:29500", min_nodes=2, max_nodes=2, node_rank=1
    )


@pytest.mark.parametrize(
    "name, said",
    [
        ("c10", "did you mean c10d?"),
        ("C10D", "did you mean c10d?"),
        ("etcdv3", "did you mean etcd-v3?"),
        ("Static", "did you mean static?"),
        ("torch:c10", "did you mean torch:c10d?"),
        ("torch:etcdv3", "did you mean torch:etcd-v3?"),
        ("zookeeper", "use static, c10d, etcd, etcd-v2, etcd-v3, torch:NAME, or install the package"),
        ("torch:", "use static, c10d"),
    ],
)
def test_an_unknown_back_end_is_refused_with_a_hint(script: str, name: str, said: str) -> None:
    words = complaint(script, f"--rdzv-backend {name} --rdzv-endpoint node0:1")
    assert words.startswith(f"--rdzv-backend {name}: no such back end: ")
    assert said in words


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


# What cannot work.


@pytest.mark.parametrize(
    "options, said",
    [
        ("--standalone --nnodes 2", "--standalone is one node on its own: leave it out, or --nnodes 2"),
        ("--node-rank 1 --master-port 29511", "--node-rank 1: one node has rank 0"),
        ("--nnodes 2 --node-rank 2", "node rank is 2 with 2 nodes"),
        ("--nnodes 2 --node-rank -1", "--node-rank -1: use 0 or more"),
        ("--nnodes 2:3", "static takes a fixed number of nodes, not 2:3: use c10d"),
        ("--nnodes 2 --master-port 0", "port 0 is a free one, which no other node knows"),
        ("--nnodes 2 --rdzv-endpoint node7", "the port is missing: use node7:PORT"),
        ("--rdzv-endpoint node7", "the port is missing: use node7:PORT"),
        ("--nnodes 2 --rdzv-backend c10d", "c10d needs --rdzv-endpoint HOST:PORT: the same on every node"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:0", "port 0 is a free one"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint node0:70000", "the highest port is 65535"),
        ("--nnodes 2 --rdzv-backend c10d --rdzv-endpoint a:1,b:2", "use HOST:PORT"),
        ("--nnodes 2 --rdzv-backend torch:c10d", "torch:c10d needs --rdzv-endpoint"),
        ("--rdzv-backend etcd", "etcd needs --rdzv-endpoint HOST:PORT"),
        ("--rdzv-backend etcd-v3 --rdzv-endpoint a:2379,b:c", "etcd endpoint b:c: use host:port"),
        ("--rdzv-backend etcd-v2 --rdzv-endpoint a:0", "etcd endpoint a:0: use host:port"),
        ("--rdzv-backend etcd --rdzv-endpoint a --rdzv-conf protocol=ftp", "protocol=ftp: use http or https"),
        ("--rdzv-backend torch:etcd --rdzv-endpoint http://a:1", "an IPv6 address in brackets, no protocol"),
        (f"{C10D} --rdzv-id=", "use a run id that is not empty, the same on every node"),
        (f"{C10D} --rdzv-conf join_timeout=soon", "join_timeout=soon: use a number above 0"),
        (f"{C10D} --rdzv-conf keep_alive_max_attempt=0", "keep_alive_max_attempt=0: use a number above 0"),
        (f"{C10D} --rdzv-conf lease=inf", "lease=inf: use a number above 0"),
        (f"{C10D} --rdzv-conf max_nodes=3", "max_nodes has an option of its own: use --nnodes"),
        ("--nnodes 2 --rdzv-conf timeout=-1", "timeout=-1: use a number above 0"),
    ],
)
def test_a_meeting_that_cannot_take_place_is_refused(script: str, options: str, said: str) -> None:
    assert said in complaint(script, options)


def test_a_password_is_in_no_complaint(script: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert "--rdzv-conf user=u,password=…,x: x has no value" in complaint(script, "--rdzv-conf user=u,password=p4ss,x")
    words = complaint(script, "--rdzv-backend etcdd --rdzv-endpoint http://u:p4ss@a", PET_RDZV_CONF="password=p4ss")
    assert "p4ss" not in words
    spec_of(script, "--standalone --rdzv-endpoint http://u:p4ss@a", PET_RDZV_CONF="user=u,password=p4ss")
    assert "PET_RDZV_CONF=user=u,password=… is not used" in caplog.text
    assert "p4ss" not in caplog.text


@pytest.mark.parametrize("run_id", ["a\nb", "a\0b", "\r"])
def test_a_run_id_has_no_line_breaks(script: str, run_id: str) -> None:
    with pytest.raises(InputError, match="use a run id without line breaks"):
        parse([f"--rdzv-id={run_id}", script], {})
    with pytest.raises(InputError, match=r"run_id is .*: use a run id without line breaks"):
        WorkerSpec(entrypoint="true", run_id=run_id)


def test_a_spec_meets_in_one_way_and_names_the_job_of_several_nodes() -> None:
    settings = RendezvousSettings(backend="c10d", endpoint="node0", min_nodes=1, max_nodes=2)
    with pytest.raises(InputError, match="rdzv and rdzv_handler are both given"):
        WorkerSpec(entrypoint="true", rdzv=settings, rdzv_handler=object(), run_id="x")
    with pytest.raises(InputError, match="run_id is empty"):
        WorkerSpec(entrypoint="true", rdzv=settings)
    assert WorkerSpec(entrypoint="true", rdzv=settings, run_id="x").rdzv is settings
    assert WorkerSpec(entrypoint="true", rdzv_handler=settings).rdzv_handler is settings


def test_the_timeout_of_a_static_rendezvous_is_its_join_timeout(script: str) -> None:
    assert rendezvous_of(script, "--nnodes 2 --rdzv-conf timeout=7").join_timeout_s == 7.0
    assert rendezvous_of(script, "--nnodes 2 --rdzv-conf timeout=7,join_timeout=8").join_timeout_s == 8.0
    assert rendezvous_of(script, f"{C10D} --rdzv-conf timeout=x").join_timeout_s == 600.0
