"""torch's rendezvous handlers as ours: a stand-in for each path, torch's own for details, torchrun for a whole job."""

from __future__ import annotations

import ctypes
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import anyio
import pytest
from kit import decided
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher, ran
from kit.ports import quiet_port
from kit.waiting import DEADLINE_S

from aelastic.agent.link import torch_handler_link
from aelastic.base.loop.mailbox import Mailbox
from aelastic.errors import (
    InputError,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
)
from aelastic.rdzv import torch_handler_thread
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.restart_policy import RestartPolicy
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.torch_handler_link import TorchHandlerLink, handler_opener
from aelastic.spec import WorkerSpec

torch_rdzv: Any = pytest.importorskip("torch.distributed.elastic.rendezvous")
torch_dist: Any = pytest.importorskip("torch.distributed")

# Older versions keep what workers of earlier rounds wrote in the store, as under torchrun.
LISTS_KEYS = pytest.mark.skipif(
    not hasattr(torch_dist.TCPStore, "list_keys"), reason="this torch's store cannot list its keys"
)

FAILURE = ProcessFailure.from_elsewhere("node7", 1, 1, 4711, 3, "it broke", "", 0)
Message = TypeVar("Message", bound=m.LeaderMessage)


class Handler:
    """A handler scripted by a test, round by round: it returns a rank and a world size, raises, or calls something."""

    use_agent_store = True

    def __init__(self, *rounds: Any, store: Any = None) -> None:
        self.rounds = list(rounds)
        self.store = store or torch_dist.HashStore()
        self.where: Any = torch_rdzv.RendezvousStoreInfo("node0", 29511)
        self.waiting: Any = 0  # or an error
        self.asked = threading.Event()
        self.shutdowns = 0
        self.has_heartbeats = True

    def next_rendezvous(self) -> Any:
        step = self.rounds.pop(0)
        if isinstance(step, BaseException):
            raise step
        if callable(step):
            step()
        rank, world_size = step if isinstance(step, tuple) else (0, 1)
        store = torch_dist.PrefixStore(str(len(self.rounds)), self.store)
        return torch_rdzv.RendezvousInfo(store, rank, world_size, self.where)

    def num_nodes_waiting(self) -> int:
        self.asked.set()
        if isinstance(self.waiting, BaseException):
            raise self.waiting
        return int(self.waiting)

    def shutdown(self) -> bool:
        self.shutdowns += 1
        return True

    def _stop_heartbeats(self) -> None:
        self.has_heartbeats = False


@dataclass
class Agent:
    """A stand-in for the supervisor."""

    link: TorchHandlerLink
    mailbox: Mailbox[m.LeaderMessage]
    node: m.Node

    async def next(self, kind: type[Message]) -> Message:
        message = await self.mailbox.next(anyio.current_time() + DEADLINE_S)
        assert isinstance(message, kind), message
        return message

    async def join(self) -> m.Assigned:
        self.link.send(m.Ready(self.node))
        return await self.next(m.Assigned)

    async def fail(self, round_: int) -> None:
        self.link.send(m.Failed("us", round_, FAILURE))

    async def succeed(self, round_: int) -> None:
        self.link.send(m.Succeeded("us", round_))


@asynccontextmanager
async def agent_with(
    handler: Callable[[], Any] | Handler, role: str = "default", workers: int = 2, **options: Any
) -> AsyncIterator[Agent]:
    spec = WorkerSpec(entrypoint="train.py", **{"monitor_interval": 0.01, "max_restarts": 1, **options})
    open_handler = (lambda: handler) if isinstance(handler, Handler) else handler
    link = torch_handler_link(spec, RestartPolicy(spec.max_restarts), open_handler)
    agent = Agent(link, Mailbox(), m.Node("us", "here", role, workers, "localhost", 1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(link.run, agent.mailbox.post)
        try:
            yield agent
        finally:
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await link.aclose()


@asynccontextmanager
async def joined(handler: Callable[[], Any] | Handler, **options: Any) -> AsyncIterator[Agent]:
    """An agent in its first round."""
    async with agent_with(handler, **options) as agent:
        assert (await agent.join()).restart_count == 0
        yield agent


@asynccontextmanager
async def two(*, names_address: bool = True) -> AsyncIterator[tuple[Agent, Agent, list[Handler], list[m.Assigned]]]:
    """Two agents in their first round, with their handlers and assignments."""
    store = torch_dist.HashStore()
    handlers = [Handler((rank, 2), store=store) for rank in (0, 1)]
    for handler in handlers:
        handler.where = handler.where if names_address else None
    async with agent_with(handlers[0]) as first, agent_with(handlers[1]) as second:
        first.link.send(m.Ready(first.node))
        there = await second.join()
        yield first, second, handlers, [await first.next(m.Assigned), there]


def beside(handler: Handler, round_: str, workers: int = 1) -> Any:
    """Makes another node of a round publish its role info; returns the shared store."""
    store = torch_dist.PrefixStore(round_, handler.store)
    store.set("torchelastic/role_info/1", f'{{"role": "default", "rank": 1, "local_world_size": {workers}}}')
    return store


async def wait_for(condition: Callable[[], Any]) -> None:
    with anyio.fail_after(DEADLINE_S):
        while not condition():  # noqa: ASYNC110  threads and torch give no event
            await anyio.sleep(0.01)


async def error_of(handler: Callable[[], Any] | Handler) -> Exception:
    """The error of a node that wants to join."""
    try:
        async with agent_with(handler) as agent:
            agent.link.send(m.Ready(agent.node))
            with anyio.fail_after(DEADLINE_S):
                await anyio.sleep_forever()
    except ExceptionGroup as group:
        error: Any = group
        while isinstance(error, ExceptionGroup):
            (error,) = error.exceptions
        return error  # type: ignore[no-any-return]
    raise AssertionError("it did not end")


def torch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "torch rendezvous"]


# A round.


async def test_a_round_is_what_the_handler_returns() -> None:
    async with agent_with(Handler((0, 1))) as agent:
        assigned = await agent.join()
    assert assigned == m.Assigned(1, 0, NodeRanks(0, 1, 0, 2, 0, 2, 2), "node0", 29511, store_server="rendezvous")


async def test_nodes_agree_on_their_ranks_as_torchs_agents_do_whatever_their_roles_and_sizes() -> None:
    store = torch_dist.HashStore()
    async with (
        agent_with(Handler((0, 3), store=store), "trainer", 4) as first,
        agent_with(Handler((1, 3), store=store), "reader", 1) as second,
        agent_with(Handler((2, 3), store=store), "trainer", 2) as third,
    ):
        agents = [third, second, first]
        for agent in agents:
            agent.link.send(m.Ready(agent.node))
        ranks = [(await agent.next(m.Assigned)).ranks for agent in agents]
    assert ranks == [NodeRanks(2, 3, 5, 7, 4, 6, 2), NodeRanks(1, 3, 4, 7, 0, 1, 1), NodeRanks(0, 3, 0, 7, 0, 6, 4)]


@pytest.mark.parametrize(
    "options, where",
    [
        ({}, ("node0", 29511)),
        ({"master_addr": "node9", "master_port": 1234}, ("node9", 1234)),
        ({"master_port": 1234, "rdzv": RendezvousSettings("torch:c10d", "node1:29400")}, ("node0", 29511)),
    ],
)
@pytest.mark.parametrize("is_shared, store_server", [(False, "worker"), (True, "rendezvous")])
async def test_the_handler_names_who_serves_the_workers_store_and_the_spec_by_which_address_they_know_it(
    options: dict[str, Any], where: tuple[str, int], is_shared: bool, store_server: str
) -> None:
    handler = Handler((0, 1))
    handler.use_agent_store = is_shared
    async with agent_with(handler, **options) as agent:
        assigned = await agent.join()
    assert (assigned.store_server, assigned.master_addr, assigned.master_port) == (store_server, *where)


async def test_a_handler_that_names_no_address_has_the_nodes_agree_on_one() -> None:
    async with two(names_address=False) as (_, _, _, (here, there)):
        assert (there.master_addr, there.master_port) == (here.master_addr, here.master_port)
        assert (there.store_server, here.store_server) == ("worker", "worker")
        assert here.master_port > 0


# While workers run.


CLOSED = torch_rdzv.RendezvousClosedError("closed")
# Results of a handler by round, the agent's options, and what follows: the agent's steps, and the messages it gets.
STORIES: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "a node that waits interrupts the round for free, and a failure after that costs nothing either": (
        [(0, 1), (0, 1)], {"max_restarts": 0},
        "joins 1 0, waiting 2, interrupted 2 nodes wait for the next round, waiting 0, fails 1, joins 2 0",
    ),
    "a failure pays from this agent's budget, and the last one closes the rendezvous once its workers are stopped": (
        [(0, 1), (0, 1)], {"max_restarts": 1},
        ("joins 1 0, fails 1, interrupted restart 1 of 1, joins 2 1, fails 1, fails 2, " "ended FAILED rank 1 failed on node7; the only restart is used up, shutdowns 0, leaves, shutdowns 1"),
    ),
    "our own failure is the cause where no round follows it": (
        [(0, 1), CLOSED], {},
        "joins 1 0, fails 1, interrupted restart 1 of 1, ready, ended FAILED closed",
    ),
    "waiting for others ends in time, and leaves the rendezvous to them": (
        [(0, 2)], {"exit_barrier_timeout_s": 0.1},
        "joins 1 0, succeeds 1, ended SUCCEEDED other nodes did not finish within 0.1 s, leaves, shutdowns 0",
    ),
    "a node that has finished starts again with the others": (
        [(0, 2), (0, 1)], {},
        "joins 1 0, succeeds 1, waiting 1, interrupted 1 node waits, waiting 0, joins 2 0",
    ),
    "a node that has finished has succeeded though the others go before it can start again": (
        [(0, 2), CLOSED], {},
        "joins 1 0, succeeds 1, waiting 1, interrupted 1 node, ready, ended SUCCEEDED, leaves, shutdowns 0",
    ),
    "too few nodes are a verdict without a round": (
        [torch_rdzv.RendezvousTimeoutError("too late")], {},
        "ready, ended TIMED_OUT, leaves, shutdowns 0",
    ),
    "a spare that was never needed has succeeded": (
        [torch_rdzv.RendezvousGracefulExitError("is closed, terminating pending rendezvous")], {},
        "ready, ended SUCCEEDED, leaves, shutdowns 0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
async def test_the_story_of_a_node(name: str) -> None:
    rounds, options, text = STORIES[name]
    handler = Handler(*rounds)
    if (0, 2) in rounds:
        beside(handler, str(len(rounds) - 1))
    steps, _, after = text.partition(", leaves, ")
    async with agent_with(handler, **options) as agent:
        for line in steps.split(", "):
            word, _, rest = line.partition(" ")
            if word == "joins":
                assigned = await agent.join()
                assert f"{assigned.round} {assigned.restart_count}" == rest
            elif word == "ready":
                agent.link.send(m.Ready(agent.node))
            elif word == "waiting":
                handler.waiting = int(rest)
            elif word == "fails":
                await agent.fail(int(rest))
            elif word == "succeeds":
                await agent.succeed(int(rest))
            elif word == "interrupted":
                assert rest in wording.text_of((await agent.next(m.Interrupted)).decision)
            elif word == "ended":
                ended, (outcome, _, words) = await agent.next(m.Ended), rest.partition(" ")
                assert ended.outcome.name == outcome and words in wording.text_of(ended.decision)
                assert ended.cause == (FAILURE if outcome == "FAILED" else None)
            else:
                assert f"shutdowns {handler.shutdowns}" == line
    assert not after or f"shutdowns {handler.shutdowns}" == after


async def test_a_link_that_is_closed_twice_at_once_shuts_its_handler_down() -> None:
    handler, has_begun, may_end = Handler((0, 1)), threading.Event(), threading.Event()

    def shutdown() -> bool:
        has_begun.set()
        may_end.wait(DEADLINE_S)
        handler.shutdowns += 1
        return True

    handler.shutdown = shutdown  # type: ignore[method-assign]
    async with joined(handler, max_restarts=0) as agent:
        await agent.fail(1)
        await agent.next(m.Ended)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(agent.link.aclose)
            await wait_for(has_begun.is_set)
            tasks.start_soon(agent.link.aclose)
            await anyio.wait_all_tasks_blocked()
            may_end.set()
    assert handler.shutdowns == 1


async def test_workers_continue_while_the_rendezvous_cannot_be_asked(caplog: pytest.LogCaptureFixture) -> None:
    handler = Handler((0, 1))
    handler.waiting = torch_rdzv.RendezvousConnectionError("no route")
    async with joined(handler) as agent:
        for _ in range(3):
            await wait_for(handler.asked.is_set)
            handler.asked.clear()
        handler.waiting = 1
        await agent.next(m.Interrupted)
    (message,) = [record.message for record in caplog.records if "no route" in record.message]
    assert message.startswith("torch's rendezvous does not answer; the workers continue: ")


async def test_a_failure_is_answered_though_the_handler_hangs() -> None:
    hangs, handler = threading.Event(), Handler((0, 1))

    def num_nodes_waiting() -> int:
        handler.asked.set()
        hangs.wait(DEADLINE_S)
        return 0

    handler.num_nodes_waiting = num_nodes_waiting  # type: ignore[method-assign]
    async with joined(handler, max_restarts=0) as agent:
        await wait_for(handler.asked.is_set)
        await agent.fail(1)
        assert (await agent.next(m.Ended)).outcome is m.Outcome.FAILED
        hangs.set()


# The end.


async def test_a_node_that_has_finished_waits_for_the_others_and_then_the_rendezvous_is_closed() -> None:
    async with two() as (first, second, handlers, _):
        await first.succeed(1)
        handlers[0].asked.clear()
        await wait_for(handlers[0].asked.is_set)  # it polls while it waits
        await second.succeed(1)
        ends = [await each.next(m.Ended) for each in (first, second)]
    assert ends == [m.Ended(m.Outcome.SUCCEEDED, decided.SUCCEEDED)] * 2
    assert [handler.shutdowns for handler in handlers] == [1, 1]


async def test_torchs_own_exit_barrier_and_ours_are_one() -> None:
    barrier = pytest.importorskip("torch.distributed.elastic.utils.store").barrier
    handler = Handler((0, 2))
    store = beside(handler, "0", workers=3)
    async with agent_with(handler) as agent:
        assert (await agent.join()).ranks == NodeRanks(0, 2, 0, 5, 0, 5, 2)
        await agent.succeed(1)
        await anyio.to_thread.run_sync(barrier, store, 2, "torchelastic/agent/terminal_state", DEADLINE_S)
        assert (await agent.next(m.Ended)).outcome is m.Outcome.SUCCEEDED


# No round.


@pytest.mark.parametrize(
    "theirs, ours",
    [
        (torch_rdzv.RendezvousClosedError("closed"), RendezvousClosedError),
        (torch_rdzv.RendezvousConnectionError("no route"), RendezvousConnectionError),
        (torch_dist.DistStoreError("wait timeout"), RendezvousConnectionError),
        (torch_rdzv.RendezvousStateError("garbage"), RendezvousStateError),
        (torch_rdzv.RendezvousError("something"), RendezvousError),
        (KeyError("a bug in the handler"), RendezvousError),
    ],
)
async def test_an_error_of_torchs_is_one_of_ours(theirs: Exception, ours: type[Exception]) -> None:
    handler = Handler(theirs)
    error = await error_of(handler)
    assert type(error) is ours
    assert str(error) == f"torch's rendezvous cannot be joined: {type(theirs).__name__}: {theirs}"
    assert handler.shutdowns == 0


@pytest.mark.parametrize("theirs", [SystemExit(3), KeyboardInterrupt()])
async def test_a_handler_that_asks_to_exit_ends_the_agent(theirs: BaseException) -> None:
    error = await error_of(Handler(theirs))
    assert type(error) is torch_handler_thread.HandlerExit
    assert str(error) == f"torch's rendezvous cannot be joined: its handler raised {theirs!r}"


async def test_a_handler_that_asks_to_exit_while_workers_run_ends_the_agent() -> None:
    handler = Handler((0, 1))
    handler.waiting = SystemExit(3)
    error = await error_of(handler)
    assert str(error) == "torch's rendezvous cannot be asked: its handler raised SystemExit(3)"


async def test_a_handler_that_cannot_be_made_is_the_users_to_fix() -> None:
    settings = RendezvousSettings(backend="torch:c10d", endpoint="localhost:0", config={"is_host": "perhaps"})
    error = await error_of(handler_opener("torch:c10d", settings, "job"))
    assert isinstance(error, InputError)
    assert "is_host" in str(error)


async def test_a_torch_without_the_private_parts_we_need_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_handler_thread, "_ENTER_BARRIER", "torch.distributed.elastic.utils.store:_no_more")
    error = await error_of(Handler())
    assert isinstance(error, InputError)
    assert "has no torch.distributed.elastic.utils.store:_no_more" in str(error)


# Leaving.


async def test_leaving_does_not_close_the_rendezvous_and_stops_saying_that_we_live() -> None:
    handler = Handler((0, 1))
    async with joined(handler) as agent:
        agent.link.send(m.Left("us", "told to stop"))
    await wait_for(lambda: not torch_threads())
    assert (handler.shutdowns, handler.has_heartbeats) == (0, False)


async def test_a_link_that_was_never_used_closes() -> None:
    async with agent_with(Handler()):
        pass


@pytest.mark.all
def test_a_program_ends_though_its_handler_blocks_forever() -> None:
    code = """
        import anyio, sys, time
        from aelastic.rdzv.protocol.messages import Node, Ready
        from aelastic.rdzv.torch_handler_link import TorchHandlerLink
        from aelastic.rdzv.restart_policy import RestartPolicy

        class Handler:
            def next_rendezvous(self):
                loop.call_soon_threadsafe(loop.call_later, 0.1, begun.set)  # most likely asleep by then
                time.sleep(10000)

        async def main():
            global loop, begun
            import asyncio
            loop, begun = asyncio.get_running_loop(), anyio.Event()
            link = TorchHandlerLink(Handler, RestartPolicy(3), monitor_interval_s=0.1, exit_barrier_timeout_s=300.0)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(link.run, print)
                link.send(Ready(Node("us", "here", "default", 1, "", 0)))
                await begun.wait()
                tasks.cancel_scope.cancel()
            await link.aclose()
            print("closed", flush=True)

        anyio.run(main)
    """
    program = [sys.executable, "-c", textwrap.dedent(code)]
    done = ran(*program)
    assert (done.returncode, done.stdout) == (0, "closed\n"), done.stderr


# Names.  Those of installed packages are in test_imports_of_torch.py.


def test_a_name_that_the_program_registered_itself_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = torch_rdzv.rendezvous_handler_registry
    monkeypatch.setitem(registry._registry, "raven", lambda _: None)
    handler_opener("torch:raven", RendezvousSettings(backend="torch:raven"), "job")


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"'torch:raven' is not known to torch either: use one of .*c10d, .*static"):
        handler_opener("torch:raven", RendezvousSettings(backend="torch:raven"), "job")


def test_a_handler_is_made_with_what_torchrun_would_give_it() -> None:
    settings = RendezvousSettings(backend="torch:static", endpoint="node0:29511", min_nodes=2, max_nodes=2, node_rank=1)
    static = handler_opener("torch:static", settings, "job")()
    assert (static.master_addr, static.master_port, static.rank, static.world_size) == ("node0", 29511, 1, 2)
    assert (static.run_id, static.timeout) == ("job", timedelta(seconds=900))


# torch's own handler.


def c10d(nodes: int = 1) -> Callable[[], Any]:
    endpoint = f"127.0.0.1:{quiet_port()}"
    settings = RendezvousSettings("torch:c10d", endpoint, nodes, nodes, local_addr="127.0.0.1", config={"is_host": "1"})
    return handler_opener("torch:c10d", settings, "job")


@LISTS_KEYS
async def test_no_worker_reads_what_one_of_an_earlier_round_wrote() -> None:
    async with agent_with(c10d(), workers=1) as agent:
        assigned = await agent.join()
        workers = torch_dist.TCPStore(assigned.master_addr, assigned.master_port, is_master=False)
        workers.set("default_pg/0", "the address of a worker that will be dead")
        await agent.fail(1)
        await agent.next(m.Interrupted)
        again = await agent.join()
        assert (again.master_addr, again.master_port) == (assigned.master_addr, assigned.master_port)
        assert not workers.check(["default_pg/0"])
        await agent.succeed(2)
        assert (await agent.next(m.Ended)).outcome is m.Outcome.SUCCEEDED


async def test_torchs_handler_gives_up_joining_when_this_node_leaves() -> None:
    async with agent_with(c10d(nodes=2)) as agent:
        agent.link.send(m.Ready(agent.node))
        await wait_for(lambda: agent.link._calls._handler is not None)
        await wait_for(lambda: agent.link._calls._handler._state_holder.state.participants)
        agent.link.send(m.Left("us", "told to stop"))
    # On an idle machine it checks every second; the join itself would take minutes.
    await wait_for(lambda: not torch_threads())


async def test_a_call_that_ends_as_it_is_given_up_ends_the_thread_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception must not arrive while the thread closes its handler, or later."""
    begun, may_end, closes, given_up, closed = (threading.Event() for _ in range(5))

    def call() -> None:
        begun.set()
        may_end.wait(DEADLINE_S)

    def close() -> None:
        closes.set()
        given_up.wait(DEADLINE_S)
        closed.set()

    def give_up(ident: Any, error: Any, really: Any = ctypes.pythonapi.PyThreadState_SetAsyncExc) -> None:
        may_end.set()
        closes.wait(0.2)  # enough time to get that far, if it can
        really(ident, error)
        given_up.set()

    monkeypatch.setattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc", give_up)
    monkeypatch.setattr(torch_handler_thread, "END_TIMEOUT_S", DEADLINE_S)  # it does not block
    thread = torch_handler_thread.CallThread(close)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(thread.call, call)
        await wait_for(begun.is_set)
        await thread.stop()
        tasks.cancel_scope.cancel()
    assert closed.is_set()
    await wait_for(lambda: not torch_threads())


# Among torchrun agents.

WORKER = """
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    say("sum", int(tensor), "rank", dist.get_rank(), "of", dist.get_world_size())
    dist.barrier()  # every rank has said its sum
    if os.environ["RANK"] == sys.argv[1] and not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        os._exit(3)
    dist.all_reduce(tensor)
    say("done", dist.get_rank())
    dist.destroy_process_group()
"""


def both(launch: Launcher, which_fails: str) -> tuple[Job, Job]:
    """A job of two nodes, one of torchrun's and one of ours; torchrun's serves the rendezvous."""
    script, marker, endpoint = launch.write("worker.py", WORKER), launch.folder / "failed", f"127.0.0.1:{quiet_port()}"
    folders = [launch.folder / name for name in ("torchrun", "ours")]
    for folder in folders:
        folder.mkdir()
    options = ["--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-id=job"]
    address = [f"--rdzv-endpoint={endpoint}", "--local-addr=127.0.0.1"]
    ours_options = [option.replace("=c10d", "=torch:c10d") for option in options]
    work = [str(script), which_fails, str(marker)]
    env = {"OMP_NUM_THREADS": "1", **launch.warm.env}
    theirs = Job(folders[0], [launch.warm.python, "-m", "torch.distributed.run", *options, *address, *work], env)
    ours = Job(folders[1], [sys.executable, "-m", "aelastic", *ours_options, *address, *work], env)
    launch.jobs += [theirs, ours]
    return theirs, ours


@pytest.mark.ci
@pytest.mark.all
@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S + 20)
@pytest.mark.parametrize(
    "which_fails",
    [
        "none",
        pytest.param("0", marks=LISTS_KEYS),
        pytest.param("3", marks=LISTS_KEYS),
    ],
)
def test_a_torchrun_agent_and_ours_do_one_job(launch: Launcher, which_fails: str) -> None:
    theirs, ours = both(launch, which_fails)
    codes = [job.wait(LAUNCH_TIMEOUT_S) for job in (theirs, ours)]
    assert codes == [0, 0], theirs.story + ours.story
    lines = theirs.lines + ours.lines
    assert sorted(line for line in lines if line.startswith("done")) == [f"done {rank}" for rank in range(4)]
    starts = [line for line in lines if line.startswith("sum")]
    assert set(starts) == {f"sum 4 rank {rank} of 4" for rank in range(4)}
    assert len(starts) == 4 if which_fails == "none" else len(starts) == 8
    assert not ours.left(), ours.left_described()
