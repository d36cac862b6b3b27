"""`--virtual-local-rank` shows each worker a single device, chosen from the devices that the agent sees."""

from __future__ import annotations

import pytest

from aelastic import InputError, WorkerSpec
from aelastic.agent.group.worker_env import _local_rank_env, check_devices

CUDA, HIP = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"


def spec_of(workers: int) -> WorkerSpec:
    return WorkerSpec(entrypoint="train.py", local_world_size=workers, virtual_local_rank=True)


# The agent's variables, and what CUDA's and AMD's are for each worker; torch honours AMD's since 2.15.
@pytest.mark.parametrize(
    "seen, own",
    [
        ({}, [("0", None), ("1", None)]),
        ({CUDA: "5,7"}, [("5", None), ("7", None)]),
        ({CUDA: " 5 , 7 "}, [("5", None), ("7", None)]),
        ({CUDA: "3,2,1,0"}, [("3", None), ("2", None)]),
        ({CUDA: "GPU-8932f937-d72c,MIG-1c8e"}, [("GPU-8932f937-d72c", None), ("MIG-1c8e", None)]),
        ({CUDA: "0,0"}, [("0", None), ("0", None)]),
        ({CUDA: "0,"}, [("0", None), ("", None)]),  # no device left for the second
        ({CUDA: ""}, [("", None)]),
        ({CUDA: "-1"}, [("-1", None)]),
        ({HIP: "5, 7"}, [("5", "5"), ("7", "7")]),
        ({HIP: "1,0", CUDA: "5,7"}, [("1", "1"), ("0", "0")]),
        ({HIP: "", CUDA: "5,7"}, [("5", None), ("7", None)]),
    ],
)
def test_each_worker_has_its_own_device(seen: dict[str, str], own: list[tuple[str, str | None]]) -> None:
    spec = spec_of(len(own))
    check_devices(spec, seen)
    found = [_local_rank_env(spec, seen, rank) for rank in range(len(own))]
    assert [(env[CUDA], env.get(HIP)) for env in found] == own
    assert {env["LOCAL_RANK"] for env in found} == {"0"}


@pytest.mark.parametrize(
    "seen, words",
    [
        ({CUDA: "3"}, "CUDA_VISIBLE_DEVICES='3' has no device for local rank 1"),
        ({CUDA: ""}, "CUDA_VISIBLE_DEVICES='' has no device for local rank 1"),
        ({CUDA: "-1"}, "CUDA_VISIBLE_DEVICES='-1' has no device for local rank 1"),
        ({CUDA: "GPU-1,GPU-2"}, "has no device for local rank 2, and virtual_local_rank gives each worker its own"),
        ({HIP: "1", CUDA: "5,6,7"}, "HIP_VISIBLE_DEVICES='1' has no device for local rank 1"),
    ],
)
def test_fewer_devices_than_workers_are_refused(seen: dict[str, str], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_devices(spec_of(3), seen)
