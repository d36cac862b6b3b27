"""Each trap of recovery in place, as a training with a fault that ends like the undisturbed one, bit by bit.

Not covered: DDP that is kept across rounds, which no script of ours does, and how long gloo's loop sleeps.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.warm.interpreters import Warm
from kit.workers.in_place_training import FAULT_AT, STEPS, course, script, start

pytestmark = [pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S), pytest.mark.ci, pytest.mark.all]

# The script does not notice that a collective has failed.
SWALLOWED = """
honest = gradients


def gradients(ddp, x, step):
    try:
        return honest(ddp, x, step)
    except Exception:
        return torch.zeros(())
"""

# Rank 1 dies while the others do this.  None of it costs a survivor its process or its state.
HARMLESS = {
    "an error that is swallowed": SWALLOWED
    + """
def on_batch(step): pass


def on_loss(step):
    if is_fault(step, 1):
        die()
""",
    "errors that are swallowed in the update": """
update_all = update


def on_batch(step): pass


def update(step):
    if is_fault(step, 1):
        time.sleep(0.2)
        die()
    if is_fault(step, 0, 2, 3):
        time.sleep(0.5)
    try:
        update_all(step)
    except Exception:
        pass
""",
    "an error of the lost rank's own": """
def on_batch(step):
    if is_fault(step, 1):
        raise ValueError("the script's own mistake")
""",
    "an error that a framework has wrapped": """
honest = gradients


def gradients(ddp, x, step):
    try:
        return honest(ddp, x, step)
    except RuntimeError as error:
        raise KeyError("a framework's own error") from error
""",
    "a forward pass that has moved statistics": """
def on_batch(step): pass


def on_loss(step):
    if is_fault(step, 1):
        time.sleep(0.1)
        die()
""",
    "a wait in the store": """
def on_batch(step):
    if is_fault(step, 1):
        die()
    if is_fault(step, 2):
        dist.distributed_c10d._get_default_store().wait(["never"])
""",
    "a wait for a collective that was started before": """
def on_batch(step):
    if is_fault(step, 1):
        die()
    if is_fault(step, 0, 2, 3):
        dist.all_reduce(torch.ones(1), async_op=True).wait()
""",
    "a barrier that no other rank comes to": """
def on_batch(step):
    if is_fault(step, 1):
        die()
    if is_fault(step, 2):
        dist.barrier()
""",
    "two ranks that wait for each other": """
def on_batch(step):
    if is_fault(step, 1):
        time.sleep(0.1)
        die()
    if is_fault(step, 2, 3):
        dist.recv(torch.ones(1), 5 - dist.get_rank())
""",
    "a short sleep in Python": """
def on_batch(step):
    if is_fault(step, 1):
        die()
    if is_fault(step, 2):
        time.sleep(1)
""",
    "a short call in C": """
def on_batch(step):
    if is_fault(step, 1):
        die()
    if is_fault(step, 2):
        ctypes.CDLL(None).usleep(1_000_000)
""",
    "a short call in C with the GIL held": """
def on_batch(step):
    if is_fault(step, 1):
        die()
    if is_fault(step, 2):
        ctypes.PyDLL(None).usleep(1_000_000)
""",
    "subgroups": """
one, honest = [], gradients


def form(round):
    dist.init_process_group("gloo")
    one[:] = [dist.new_group([0, 1]), dist.new_group([2, 3])]


def gradients(ddp, x, step):
    loss = honest(ddp, x, step)
    total = torch.ones(1)
    dist.all_reduce(total, group=one[dist.get_rank() // 2])
    assert total.item() == 2
    return loss
""",
    "gradients that are cleared after the update": """
update_all = update


def on_batch(step): pass


def gradients(ddp, x, step):
    loss = nn.functional.mse_loss(ddp(x), x[:, :1] * x[:, 1:2])
    scaler.scale(loss).backward()
    if is_fault(step, 1):
        die()
    dist.barrier()
    return loss.detach()


def update(step):
    update_all(step)
    optimizer.zero_grad()
    second.zero_grad()
""",
    "gradients that were unscaled": """
update_all = update


def on_batch(step): pass


def update(step):
    scaler.unscale_(optimizer)
    if is_fault(step, 1):
        time.sleep(0.2)
        die()
    if is_fault(step, 0, 2, 3):
        time.sleep(0.5)
    update_all(step)
""",
    "an evaluation after the commit": """
def on_batch(step): pass


def after_update(round, step):
    if is_fault(step, 0, 1, 2, 3, at=FAULT_AT - 1):
        round.commit(step + 1)
        model.eval()
        if dist.get_rank() == 1:
            time.sleep(0.3)
            die()
        dist.barrier()
        model.train()
""",
}


@pytest.mark.parametrize("case", HARMLESS)
def test_survivors_keep_their_processes_and_lose_no_step(launch: Launcher, undisturbed: str, case: str) -> None:
    job = start(launch, script(HARMLESS[case]))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT), job.story
    assert f"3 of 4 workers kept, state of step {FAULT_AT} from rank 0" in job.stderr
    assert found.end == undisturbed, job.story


# Each survivor's state is half of one step and half of another.
TORN = {
    "a collective after the update": """
def on_batch(step): pass


def after_update(round, step):
    if is_fault(step, 1):
        time.sleep(0.3)  # the others have made the update, too
        die()
    if is_fault(step, 0, 2, 3):
        dist.barrier()
""",
    "a model that is wrapped before its state is shared": """
def form(round):
    dist.init_process_group("gloo")
    wrap()


def on_batch(step):
    if is_fault(step, 0):
        die()
""",
    "a scheduler's step after a bare except": SWALLOWED
    + """
def on_batch(step):
    if is_fault(step, 0, 2, 3):
        open(f"out-of-the-barrier-{dist.get_rank()}", "w").close()
    if is_fault(step, 1):
        for rank in 0, 2, 3:
            wait_for(f"out-of-the-barrier-{rank}")
        die()


def update(step):
    for each in lambda: scaler.step(optimizer), lambda: scaler.step(second), scaler.update:
        try:
            each()
        except:
            pass
    scheduler.step()
""",
    "an update that the scaler skips": """
update_all = update


def on_batch(step): pass


def update(step):
    if is_fault(step, 1, at=16):
        time.sleep(0.2)  # the others have the gradients, too
        die()
    if is_fault(step, 0, 2, 3, at=16):
        time.sleep(0.5)
    update_all(step)
""",
}


@pytest.mark.parametrize("case", TORN)
def test_without_a_whole_state_the_job_begins_again_in_new_processes(
    launch: Launcher, undisturbed: str, case: str
) -> None:
    job = start(launch, script(TORN[case]))
    found = course(job)
    last = found.restarts
    assert (found.kept(0, last), found.step(last)) == (set(), 0), job.story
    assert "no rank has a whole state, and there is no checkpoint" in job.stderr
    assert found.end == undisturbed, job.story


CHECKPOINT = """
torn = after_update


def after_update(round, step):
    torn(round, step)
    if step == 9 and dist.get_rank() == 0:
        torch.save([step + 1, *(each.state_dict() for each in state)], "new")
        os.rename("new", "saved")


def load():
    if not os.path.exists("saved"):
        return None
    step, *saved = torch.load("saved")
    for each, part in zip(state, saved):
        each.load_state_dict(part)
    return step
"""


def test_without_a_whole_state_survivors_load_the_checkpoint(launch: Launcher, undisturbed: str) -> None:
    job = start(launch, script(TORN["a collective after the update"] + CHECKPOINT))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, 10), job.story
    assert found.end == undisturbed, job.story


def test_a_step_whose_update_is_being_made_is_not_lost(launch: Launcher, undisturbed: str) -> None:
    """All have the step's gradients and make the update; rank 1 dies in it."""
    case = """
def on_batch(step): pass


def in_update(*_):
    if is_fault(now, 1):
        time.sleep(0.2)
        die()
    if is_fault(now, 0, 2, 3):
        time.sleep(0.6)


now = 0
second.register_step_post_hook(in_update)


def on_loss(step):
    global now
    now = step
"""
    job = start(launch, script(case))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT + 1), job.story
    assert found.end == undisturbed, job.story


def test_a_survivor_that_fails_by_itself_is_replaced_too(launch: Launcher, undisturbed: str) -> None:
    case = """
def on_batch(step):
    if is_fault(step, 1):
        die()
    if is_fault(step, 2):
        time.sleep(0.1)
        raise ValueError("the script's own mistake")
"""
    job = start(launch, script(case))
    found = course(job)
    assert (found.kept(0, found.restarts), found.step(found.restarts)) == ({0, 3}, FAULT_AT), job.story
    assert "the script's own mistake" in job.stderr
    assert found.end == undisturbed, job.story


@pytest.mark.parametrize("case", [
    """
def on_end(round):
    if restarts() == 0 and dist.get_rank() == 1:
        time.sleep(0.3)
        die()
""",
    """
def on_end(round):
    dist.barrier()
    if restarts() == 0 and dist.get_rank() == 1:
        die()
    dist.barrier()
""",
], ids=["others are done", "others wait for it"])  # fmt: skip
def test_a_rank_that_is_lost_after_the_last_step_repeats_none(launch: Launcher, undisturbed: str, case: str) -> None:
    job = start(launch, script("def on_batch(step): pass\n" + case))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, STEPS), job.story
    assert found.end == undisturbed, job.story


@pytest.mark.parametrize("where", ["form", "share"])
def test_kills_while_groups_are_formed_or_the_state_is_shared(launch: Launcher, undisturbed: str, where: str) -> None:
    """Two such kills in a row, then a round that trains: three in a row would be blamed on the script."""
    case = f"""
form_all, share_all = form, share


def on_batch(step):
    if restarts() % 3 == 0 and restarts() < 9 and step == 5 + restarts() * 3:
        dist.barrier()  # all have this step: one that has only the step before would lose it to a rank that dies next
        if dist.get_rank() == 1:
            die()


def die_soon(where):
    if where == {where!r} and restarts() % 3 and restarts() < 9 and int(os.environ["RANK"]) == 1 + restarts() % 3:
        die_after(random.Random(restarts()).uniform(0.001, 0.03))


def form(round):
    die_soon("form")
    form_all(round)


def share(round):
    die_soon("share")
    return share_all(round)
"""
    job = start(launch, script(case))
    found = course(job)
    assert found.restarts >= 9, job.story
    assert "workers kept" in job.stderr and "no rank has" not in job.stderr, job.story
    for before, after in zip((0, 3, 6), (3, 6, 9), strict=True):
        assert found.kept(before, after) == {0}, job.story
    assert found.end == undisturbed, job.story


LOADERS = """
class Batches(torch.utils.data.Dataset):
    def __init__(self, start):
        self.start = start

    def __len__(self):
        return STEPS - self.start

    def __getitem__(self, index):
        return data_of(self.start + index)


def batches(start):
    return torch.utils.data.DataLoader(Batches(start), batch_size=None, num_workers=2, multiprocessing_context="fork")


def on_batch(step):
    if is_fault(step, 1):
        with open("loaders", "w") as file:
            file.write(open(f"/proc/self/task/{os.getpid()}/children").read())
        die()


def lives(pid):
    try:
        return open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


forming = form


def form(round):
    if restarts() == 1 and os.environ["RANK"] == "1":  # their copies of the lost rank's sockets would keep them open
        loaders = open("loaders").read().split()
        assert len(loaders) == 2 and not any(map(lives, loaders))
    forming(round)
"""


def test_loaders_of_a_lost_rank_end_before_it_is_replaced(launch: Launcher, undisturbed: str) -> None:
    """Each holds a copy of the rank's sockets, so that other ranks don't see them closed."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:  # Python leaves a folder of a killed process
        env = {"PYTHON_EXEC": sys.executable, "TMPDIR": tmp}  # a warm worker of the tests is not a child of the agent
        job = start(launch, script(LOADERS), "--preload=torch,aelastic.training.rounds", env=env)
        found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT), job.story
    assert found.end == undisturbed, job.story


# Traps without an effect on the numbers.


def test_the_last_reference_to_a_group_is_not_that_of_ddp(launch: Launcher) -> None:
    """Its destructor would join gloo's threads with the GIL held, and sometimes hang."""
    case = """
import weakref

forming = form


def form(round):
    forming(round)
    if restarts() == 0:
        weakref.finalize(dist.group.WORLD, lambda: say("dropped by", threading.current_thread().name))
"""
    job = start(launch, script(case), ranks=2)
    course(job)
    assert [line for line in job.lines if line.startswith("dropped")] == ["dropped by aelastic-groups"], job.story


def test_each_round_has_a_store_of_its_own(launch: Launcher) -> None:
    case = """
forming = form


def form(round):
    forming(round)
    store = dist.distributed_c10d._get_default_store()
    say("marked", restarts(), store.check(["mark"]))
    dist.barrier()
    store.set("mark", "")
"""
    job = start(launch, script(case), ranks=2)
    course(job)
    marked = sorted(line for line in job.lines if line.startswith("marked"))
    assert marked == [f"marked {count} False" for count in (0, 0, 1, 1)], job.story


def test_connections_of_others_are_not_cut(launch: Launcher) -> None:
    """They were opened before the first group is made, between two groups, and after them."""
    case = """
import socket

listener = socket.create_server(("127.0.0.1", 0))
ends = []


def connect():
    ends.append((socket.create_connection(listener.getsockname()), listener.accept()[0]))


connect()


def form(round):
    if restarts() == 0:
        connect()
    dist.init_process_group("gloo")
    if restarts() == 0:
        connect()
    dist.new_group([0, 1])
    if restarts() == 0:
        connect()


def on_end(round):
    for here, there in ends:
        here.send(b"!")
        assert there.recv(1) == b"!"
    say("alive", len(ends))
"""
    job = start(launch, script(case), ranks=2)
    found = course(job)
    assert found.kept(0, 1) == {0}, job.story
    assert sorted(line for line in job.lines if line.startswith("alive")) == ["alive 1", "alive 4"], job.story


# Trainings that differ from the other tests'.

PLAIN = """
state = [model, optimizer, second]


def gradients(ddp, x, step):
    loss = nn.functional.mse_loss(ddp(x), x[:, :1] * x[:, 1:2])
    on_loss(step)
    optimizer.zero_grad()
    loss.backward()
    return loss.detach()


def overflow(): pass


def update(step):
    optimizer.step()
"""
CLOSURE = """
state = [model, optimizer, second]


def gradients(ddp, x, step):
    def closure():
        loss = nn.functional.mse_loss(ddp(x), x[:, :1] * x[:, 1:2])
        on_loss(step)
        optimizer.zero_grad()
        loss.backward()
        return loss

    return optimizer.step(closure).detach()


def overflow(): pass


def update(step): pass
"""
BARE = """
def update(step):
    try:
        optimizer.step()
    except:
        pass
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[str]:
    """The last line of the plain training without a fault."""
    launcher = Launcher(tmp_path_factory.mktemp("plain"), warm)
    yield course(start(launcher, script(PLAIN + "def on_batch(step): pass\n"))).end
    launcher.close()


@pytest.mark.parametrize("case", [PLAIN + SWALLOWED + BARE, CLOSURE], ids=["bare except", "closure"])
def test_the_update_begins_with_the_optimizers_own(launch: Launcher, plain: str, case: str) -> None:
    """A bare `except` is harmless, since the end of the step raises again; a closure computes the gradients first."""
    job = start(launch, script(case))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT), job.story
    assert found.end == plain, job.story


COMPILED = """
model.compile(backend="aot_eager")
"""


def test_a_compiled_model_is_called_again(launch: Launcher) -> None:
    undisturbed = course(start(launch, script(COMPILED + "def on_batch(step): pass\n"), name="undisturbed"))
    job = start(launch, script(COMPILED))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT), job.story
    assert found.end == undisturbed.end, job.story


def test_buckets_that_are_ordered_again_add_gradients_in_another_order(launch: Launcher) -> None:
    """Why all other trainings set `find_unused_parameters`: DDP sorts its buckets after the first step of a round."""
    case = """
def wrap():
    return DistributedDataParallel(model)
"""
    undisturbed = course(start(launch, script(case + "def on_batch(step): pass\n"), name="undisturbed"))
    found = course(start(launch, script(case)))
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT)
    assert found.end != undisturbed.end


RANK_0_IS_LOST = """
def on_batch(step):
    if is_fault(step, 0):
        die()


def result(loss):
    statistics = sum(each.double().sum() for each in model.buffers()).item()
    weights = sum(each.double().sum() for each in model.parameters()).item()
    return f"loss {loss.item():.15f} weights {weights:.15f} statistics {statistics:.15f}"
"""


def test_statistics_of_batch_normalization_are_those_of_another_rank_if_rank_0_is_lost(launch: Launcher) -> None:
    """Each rank has statistics of its own data, and DDP gives rank 0's to all before each step."""
    undisturbed = course(start(launch, script(RANK_0_IS_LOST + "def on_batch(step): pass\n"), name="undisturbed"))
    job = start(launch, script(RANK_0_IS_LOST))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {1, 2, 3}, FAULT_AT), job.story
    (weights, statistics), (expected, others) = (each.end.split(" statistics ") for each in (found, undisturbed))
    assert weights == expected and statistics != others
