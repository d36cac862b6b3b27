"""Where nodes and workers meet, compared with torchrun: the same command line gives the same rendezvous."""

from __future__ import annotations

from typing import Any

import pytest
from kit.arguments import spec_of
from kit.workers.torch_versions import picks_a_free_port

from aelastic.cli.arguments import parse
from aelastic.errors import InputError
from aelastic.rdzv.settings import RendezvousSettings, split_endpoint

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


# The user's job names that torchrun drops.
GIVEN = {"--rdzv-id x": "x", COMMANDS[2]: "y"}
# A single node without any option for where its workers meet.
OF_A_FREE_PORT = {"", "--local-addr 10.0.0.1", "--rdzv-id x"}


def torchruns_config(torch_run: Any, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The config with which torchrun would launch."""
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
def test_the_rendezvous_is_torchruns(
    script: str, command: str, torch_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command in OF_A_FREE_PORT and not picks_a_free_port(torch_run.get_args_parser()):
        pytest.skip("this torchrun takes port 29500 then")
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.launcher.api import _get_addr_and_port

    config = torchruns_config(torch_run, [*command.split(), script], monkeypatch)
    master = _get_addr_and_port(
        RendezvousParameters(
            config.rdzv_backend, config.rdzv_endpoint, config.run_id or "x", config.min_nodes, config.max_nodes
        )
    )
    spec = spec_of(script, command)

    # torchrun replaces a given id with a random one; then nobody could name the job.
    run_id = None if is_random(config.run_id) else config.run_id
    assert spec.run_id == (GIVEN.get(command) or run_id)
    if spec.rdzv is None:
        is_static = config.rdzv_backend == "static"
        assert is_static or config.rdzv_endpoint in {"", "localhost:0"}
        assert (spec.master_addr, spec.master_port) == (
            master if is_static else (config.local_addr or "localhost", None)
        )
        return
    rank = config.rdzv_configs.pop("rank", None)
    if " timeout" not in command and ",timeout" not in command:
        del config.rdzv_configs["timeout"]  # torchrun's default, for any back end
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
        settings = parse(["--nnodes=2", f"--rdzv-conf={text}", script], {}).spec.rdzv
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
