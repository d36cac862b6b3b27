"""`python -m deepspeed.launcher.launch`, which DeepSpeed's runner starts on each node, as a command line of aelastic.

The runner passes the devices of each node (`--world_info`), the first node's address, and this node's rank.
Options that only aelastic has are variables (`PET_MAX_RESTARTS`).
"""

from __future__ import annotations

import base64
import json
import os
import sys
from argparse import REMAINDER, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence

from aelastic.errors import InputError


def parser() -> ArgumentParser:
    """Returns a parser of DeepSpeed's launcher options, as of 0.19; those that do not concern us are ignored."""
    options = ArgumentParser(prog="deepspeed.launcher.launch", allow_abbrev=False)
    for name, default in (("--node_rank", 0), ("--master_port", 29500), ("--save_pid", 0)):
        options.add_argument(name, type=int, default=default)
    for name, text in (
        ("--master_addr", "127.0.0.1"),
        ("--world_info", "None"),
        ("--enable_each_rank_log", "None"),
        ("--bind_core_list", None),
        ("--log_level", "info"),
        ("--min_elastic_nodes", None),
        ("--max_elastic_nodes", None),
    ):
        options.add_argument(name, default=text)
    for name in ("--module", "--no_python", "--no_local_rank", "--bind_cores_to_rank", "--enable_elastic_training"):
        options.add_argument(name, action="store_true")
    options.add_argument("-q", "--quiet", action="store_true")
    options.add_argument("training_script")
    options.add_argument("training_script_args", nargs=REMAINDER)
    return options


def devices_by_node(world_info: str) -> Mapping[str, Sequence[int]]:
    """Returns the devices of each node, in the order of their ranks.

    Raises:
        InputError: the text is not from DeepSpeed's runner.
    """
    try:
        devices = json.loads(base64.urlsafe_b64decode(world_info))
        return {str(node): [int(each) for each in devices[node]] for node in devices}
    except (ValueError, TypeError):
        raise InputError(f"--world_info={world_info}: use the value that DeepSpeed's runner passes") from None


def translate(args: Namespace) -> tuple[list[str], dict[str, str]]:
    """Returns the command line of aelastic, and the variables that it adds to the environment of the workers.

    Raises:
        InputError: values that do not fit together.
    """
    nodes = devices_by_node(args.world_info)
    if not 0 <= args.node_rank < len(nodes):
        raise InputError(f"--node_rank={args.node_rank}: --world_info has {len(nodes)} nodes")
    devices = list(nodes.values())[args.node_rank]
    command = [f"--nnodes={len(nodes)}", f"--nproc-per-node={len(devices)}"]
    command += [
        f"--node-rank={args.node_rank}",
        f"--master-addr={args.master_addr}",
        f"--master-port={args.master_port}",
    ]
    command += ["--module"] if args.module else []
    command += ["--no-python"] if args.no_python else []
    if args.enable_each_rank_log != "None":
        command += ["--redirects=3", f"--log-dir={args.enable_each_rank_log}"]
    command += ["--", args.training_script]
    command += [] if args.no_local_rank else ["--local_rank=${local_rank}"]
    chosen = ",".join(map(str, devices))
    ranks = {"CROSS_RANK": str(args.node_rank), "CROSS_SIZE": str(len(nodes)), "LOCAL_SIZE": str(len(devices))}
    return [*command, *args.training_script_args], {"CUDA_VISIBLE_DEVICES": chosen, **ranks}


def main() -> None:
    """Runs the job as this process.  A usage error exits with 2."""
    args = parser().parse_args()
    try:
        command, added = translate(args)
    except InputError as error:
        print(f"aelastic: error: {error}", file=sys.stderr)
        sys.exit(2)
    if args.bind_cores_to_rank or args.enable_elastic_training:
        print("aelastic: ignoring deepspeed's --bind_cores_to_rank and --enable_elastic_training", file=sys.stderr)
    os.execve(sys.executable, [sys.executable, "-m", "aelastic", *command], {**os.environ, **added})


if __name__ == "__main__":
    main()
