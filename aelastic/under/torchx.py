"""A component of TorchX: `torchx run aelastic.ddp` is `torchx run dist.ddp` with aelastic in torchrun's place.

TorchX finds it by the entry point `torchx.components`, and is the only one that imports it.  It reads the types of the
options from this text, and knows those of old Pythons only; nor may `annotations` come from the future.
"""
# ruff: noqa: UP006, UP035, UP045

from typing import Dict, List, Optional

import torchx
from torchx import specs
from torchx.components import dist


def ddp(
    *script_args: str,
    script: str = "",
    m: str = "",
    image: str = torchx.IMAGE,
    name: str = "/",
    h: str = "",
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803 - TorchX's name
    j: str = "1x2",
    env: Optional[Dict[str, str]] = None,
    max_retries: int = 0,
    max_restarts: int = 3,
    rdzv_port: int = 29500,
    mounts: Optional[List[str]] = None,
) -> specs.AppDef:
    """A training on one or several nodes, each with an agent of aelastic.

    Args:
        script_args: arguments of the script or module
        script: script to run
        m: module to run
        image: image, or folder of local_cwd
        name: job name, as {experiment}/{run}
        h: a registered named resource, instead of cpu, gpu and memMB
        cpu: number of CPUs of a node
        gpu: number of GPUs of a node
        memMB: memory of a node in MB
        j: [{min_nnodes}:]{nnodes}x{nproc_per_node}
        env: variables of the job (ENV1=v1,ENV2=v2)
        max_retries: how often the scheduler starts the job again
        max_restarts: how often aelastic starts the workers again
        rdzv_port: port on the first node for the rendezvous of several nodes
        mounts: mounts of the container
    """
    app = dist.ddp(
        *script_args,
        script=script or None,
        m=m or None,
        image=image,
        name=name,
        h=h or None,
        cpu=cpu,
        gpu=gpu,
        memMB=memMB,
        j=j,
        env=env,
        max_retries=max_retries,
        rdzv_port=rdzv_port,
        mounts=mounts,
    )
    for role in app.roles:
        shell, command = role.args
        role.args = [shell, f"aelastic --max-restarts {max_restarts} {command.removeprefix('torchrun ')}"]
    return app
