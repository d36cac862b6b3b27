"""Options that parse but have no effect: a warning, or a refusal if nothing sensible remains."""

from __future__ import annotations

import logging

import pytest
from kit.arguments import complaint, invoke, spec_of

ENDPOINT = "--rdzv-backend c10d --rdzv-endpoint node0"
ETCD = "--rdzv-backend etcd --rdzv-endpoint a"
WARNED = [
    (f"{ENDPOINT} --rdzv-conf join_timout=3", "unknown key join_timout is ignored: did you mean join_timeout?"),
    (
        f"{ENDPOINT} --rdzv-conf lease=5,lease=6",
        "--rdzv-conf: key lease is given several values, and the last one is used",
    ),
    ("--nnodes 2 --master-addr a --rdzv-conf zzz=3", "--rdzv-conf: unknown key zzz is ignored"),
    (f"{ENDPOINT} --rdzv-conf timeout=5'", "key timeout has no effect with c10d: it is for static, etcd"),
    (f"{ENDPOINT} --rdzv-conf password=p4ss", "key password has no effect with c10d: it is for etcd, etcd-v2, etcd-v3"),
    (
        f"{ETCD} --rdzv-conf endpoints=soon",
        "--rdzv-conf: key endpoints has no effect with etcd: it is for c10d, static",
    ),
    (f"{ETCD} --rdzv-conf survivor=endpoint", "key survivor has no effect with etcd: it is for c10d"),
    ("--nnodes 2 --master-addr a --rdzv-conf last_call_timeout=x", "last_call_timeout has no effect with static"),
    ("--nnodes 2 --master-addr a --rdzv-conf is_host=perhaps", "key is_host has no effect with static: it is for c10d"),
    ("--tee 0:1,9:3 --nproc-per-node 2", "--tee 0:1,9:3: no worker here has local rank 9: ranks are 0 to 1"),
    ("--nnodes 2", "the nodes meet at 127.0.0.1, which is this machine: use --master-addr with node rank 0's address"),
    ("-r 7:1", "--redirects 7:1: no worker here has local rank 7: the only rank is 0"),
    ("--local-ranks-filter 0,7,8", "--local-ranks-filter 0,7,8: no worker here has local ranks 7, 8"),
    ("-r 3 --local-ranks-filter 7", "no worker here has local rank 7"),
    ("--expect-output x:5 --expect-output-ranks 0,9", "--expect-output-ranks 0,9: no worker here has rank 9"),
    (
        "--duplicate-stdout-filters x",
        "--duplicate-stdout-filters x: no effect, stdout does not go to files: add --tee 1",
    ),
    ("--duplicate-stderr-filters x --tee 1", "no effect, stderr does not go to files: add --tee 2"),
]
QUIET = [
    f"{ENDPOINT} --rdzv-conf join_timeout=3,last_call_timeout=1,close_timeout=3,is_host=1,read_timeout=9",
    f"{ENDPOINT} --rdzv-conf lease=5,lease=5",
    f"{ENDPOINT} --nnodes 1:2 --rdzv-conf survivor=endpoint",
    "--standalone --rdzv-conf timeout=5,last_call_timeout=3,rank=0",
    "--rdzv-backend etcd-v3 --rdzv-endpoint a --rdzv-conf user=me,password=x,etcd_prefix=/p",
    "--rdzv-backend torch:c10d --rdzv-endpoint node0:1 --rdzv-conf whatever=1",
    "--tee 0:1,1:3 --nproc-per-node 2 --local-ranks-filter 1",
    f"{ENDPOINT} --nnodes 2:4 --tee 7:3 --local-ranks-filter 7",  # another node may have more workers
    f"{ENDPOINT} --nnodes 2:4 --expect-output x:5 --expect-output-ranks 3",
    "--nnodes 2 --master-addr node0",
    "--nnodes 2 --rdzv-endpoint node0:29500",
    "--duplicate-stdout-filters x -r 1",
    "--duplicate-stderr-filters x --tee 0:2",
]
REFUSED = [
    ("--local-ranks-filter 7", "--local-ranks-filter 7: no worker has local rank 7: the only rank is 0"),
    ("--nproc-per-node 4 --local-ranks-filter 4,5", "no worker has local ranks 4, 5: ranks are 0 to 3"),
    ("--expect-output x:5 --expect-output-ranks 9", "--expect-output-ranks 9: no worker has rank 9"),
]


@pytest.mark.parametrize("options, words", WARNED)
def test_what_has_no_effect_is_reported_and_the_job_runs(
    script: str, options: str, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    spec_of(script, options)
    assert [words in record.getMessage() for record in caplog.records] == [True], caplog.text


@pytest.mark.parametrize("options", QUIET)
def test_what_has_an_effect_is_not_warned_of(script: str, options: str, caplog: pytest.LogCaptureFixture) -> None:
    spec_of(script, options)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("options, words", REFUSED)
def test_a_job_that_would_show_or_watch_nothing_is_refused(script: str, options: str, words: str) -> None:
    assert words in complaint(*options.split(), script)


@pytest.mark.parametrize(
    "after, name",
    [("--nproc-per-node 2", "--nproc-per-node"), ("x --nnodes=2", "--nnodes"), ("--rdzv_id a", "--rdzv-id")],
)
def test_an_option_of_ours_after_the_script_is_pointed_out(
    script: str, after: str, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert invoke(script, *after.split()).spec.args[2:] == tuple(after.split())
    assert f"{name} was passed to {script}, not to aelastic: put aelastic's options before the script" in caplog.text


@pytest.mark.parametrize("before, after", [("", "--log-dir x --role y --max-restart 2"), ("--nnodes 1", "--nnodes 2")])
def test_an_option_of_the_script_is_its_own(
    script: str, before: str, after: str, caplog: pytest.LogCaptureFixture
) -> None:
    invoke(*before.split(), script, *after.split())
    assert not caplog.records


@pytest.mark.parametrize(
    "typed, meant",
    [
        ("--nprocs", "--nproc-per-node"),
        ("--num_processes", "--nproc-per-node"),
        ("--verison", "--version"),
        ("--hlep", "--help"),
        ("--num-machines", "--nnodes"),
        ("--max-restrats", "--max-restarts"),
        ("--nprocpernode", "--nproc-per-node"),
    ],
)
def test_the_option_that_was_meant_is_suggested(script: str, typed: str, meant: str) -> None:
    assert f"unknown option {typed}: did you mean {meant}?" in complaint(f"{typed}=2", script)
