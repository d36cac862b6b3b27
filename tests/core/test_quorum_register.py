"""The register that several stores keep together."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from aelastic.base.machine import InvalidTransition
from aelastic.rdzv.stores import register_events as ev
from aelastic.rdzv.stores.register import CAME_BETWEEN, FIRST_PATIENCE_S, LIMIT_S, PATIENCE_MAX_S, STEP_S, Register
from aelastic.rdzv.stores.register_cells import Ballot, StoreCell, Vote, cell_from_bytes, cell_to_bytes


class Story:
    """A register, and stores that answer at once unless they are silent or down."""

    def __init__(self, size: int = 3) -> None:
        self.now = 0.0
        self.cells: list[StoreCell | None] = [None] * size
        self.silent: set[int] = set()
        self.down: set[int] = set()
        self.new_client()
        self.asked: list[ev.Action] = []

    def new_client(self, name: str = "a") -> None:
        self.core = Register(len(self.cells), name)

    def ask(self, expected: str = "", new: str | None = None) -> str | ev.NoMajority:
        """The register's answer, after as much time as it needs."""
        todo = self.core.handle(ev.Requested(expected.encode(), None if new is None else new.encode()), self.now)
        while True:
            for action in todo:
                if isinstance(action, ev.Done):
                    return action.text.decode()
                if isinstance(action, ev.NoMajority):
                    return action
            answers = [answer for action in todo if (answer := self.answer(action))]
            todo = [action for answer in answers for action in self.core.handle(answer, self.now)]
            if not todo:
                assert self.core.deadline is not None
                self.now = max(self.now, self.core.deadline)
                todo = self.core.handle(ev.DeadlinePassed(), self.now)

    def answer(self, action: ev.Action) -> ev.Event | None:
        assert isinstance(action, ev.Look | ev.Write)
        self.asked.append(action)
        step, store = action.step, action.store
        if store in self.silent:
            return None
        if store in self.down:
            return ev.Unanswered(step, store, "refused")
        if isinstance(action, ev.Look):
            return ev.Looked(step, store, self.cells[store])
        is_done = self.cells[store] == action.expected
        if is_done:
            self.cells[store] = action.cell
        return ev.Written(step, store, is_done)

    def begin(self, expected: str, new: str) -> int:
        """Reads all cells for a write; returns the step that locks them."""
        locks = self.core.handle(ev.Requested(expected.encode(), new.encode()), self.now)
        while any(isinstance(each, ev.Look) for each in locks):
            answers = [answer for look in locks if (answer := self.answer(look))]
            locks = [action for answer in answers for action in self.core.handle(answer, self.now)]
        assert [type(lock) for lock in locks] == [ev.Write] * len(self.cells)
        return locks[0].step  # type: ignore[union-attr]

    def forget(self, *stores: int) -> None:
        for store in stores:
            self.cells[store] = None

    def members(self) -> list[int]:
        vote = max((cell.vote for cell in self.cells if cell and cell.vote), key=lambda vote: vote.ballot)
        return [index for index, cell in enumerate(self.cells) if cell and cell.incarnation == vote.members[index]]


def written(size: int = 3) -> Story:
    story = Story(size)
    assert story.ask("", "one") == "one"
    return story


def test_what_is_written_is_read_and_only_what_is_expected_is_replaced() -> None:
    story = Story()
    assert story.ask() == ""
    assert story.ask("", "one") == "one"
    assert story.ask("nothing", "two") == "one"
    assert story.ask("one", "two") == "two"
    story.new_client("b")
    assert story.ask() == "two"


def test_a_read_of_what_a_majority_holds_writes_nothing() -> None:
    story = written()
    story.asked.clear()
    story.down = {2}
    story.ask()
    assert {type(action) for action in story.asked} == {ev.Look}


def test_two_first_votes_that_come_between_each_other_leave_one_though_a_store_is_away() -> None:
    story = Story()
    story.down = {2}
    one = story.core
    writes = of_next_step(story, of_next_step(story, one.handle(ev.Requested(b"", b"one"), 0.0)))
    story.new_client("b")
    locks = of_next_step(story, story.core.handle(ev.Requested(b"", b"two"), 0.0))
    # Each write has come first in one store.
    answers = [story.answer(action) for action in (locks[0], writes[1], writes[0], locks[1])]
    assert [answer.is_done for answer in answers if isinstance(answer, ev.Written)] == [True, True, False, False]
    for name in ("c", "d"):
        story.new_client(name)
        assert story.ask("", "three") == "one"


def of_next_step(story: Story, actions: list[ev.Action]) -> list[ev.Action]:
    """The register's next requests, once all current ones are answered."""
    answers = [answer for action in actions if (answer := story.answer(action))]
    return [action for answer in answers for action in story.core.handle(answer, story.now)]


@pytest.mark.parametrize("how", ["silent", "down"])
@pytest.mark.parametrize("store", [0, 1, 2])
def test_a_minority_that_does_not_answer_costs_next_to_nothing(store: int, how: str) -> None:
    story = written()
    getattr(story, how).add(store)
    began = story.now
    assert story.ask("one", "two") == "two"
    assert story.now - began <= 2 * PATIENCE_MAX_S


def test_a_first_vote_waits_a_moment_for_a_store_that_may_know_another() -> None:
    story = Story()
    story.silent = {2}
    assert story.ask("", "one") == "one"
    assert FIRST_PATIENCE_S <= story.now < 2 * FIRST_PATIENCE_S


def test_stores_that_were_empty_at_different_moments_are_not_a_register_without_a_text() -> None:
    """The third store is slow, and each of the others is empty at the moment it is read."""
    story, late = written(), Register(3, "late")
    late.handle(ev.Requested(), 0.0)
    story.forget(1)
    late.handle(ev.Looked(1, 1, story.cells[1]), 0.0)
    assert story.ask() == "one", "which adds the store again"
    story.forget(0)
    late.handle(ev.Looked(1, 0, story.cells[0]), 0.0)
    looks = late.handle(ev.DeadlinePassed(), FIRST_PATIENCE_S)
    assert [type(look) for look in looks] == [ev.Look] * 3, "it reads again"
    story.core, story.now = late, FIRST_PATIENCE_S
    answers = [answer for look in looks[:2] if (answer := story.answer(look))]
    assert [action for answer in answers for action in late.handle(answer, story.now)] == []
    assert late.is_known


def test_an_absent_text_costs_two_looks_and_the_second_no_patience() -> None:
    story = Story()
    story.silent = {2}
    assert story.ask() == ""
    assert [type(action) for action in story.asked] == [ev.Look] * 6
    assert FIRST_PATIENCE_S <= story.now < FIRST_PATIENCE_S + 2 * PATIENCE_MAX_S


def test_without_a_majority_it_shows_which_stores_are_missing() -> None:
    story = written()
    story.down, story.silent = {0}, {2}
    assert story.ask() == ev.NoMajority({0: "refused", 2: ""})
    assert story.now == pytest.approx(LIMIT_S)
    story.silent, story.down = set(), {0, 2}
    assert story.ask() == ev.NoMajority({0: "refused", 2: "refused"}), "at once, if all have answered"
    assert story.now == pytest.approx(LIMIT_S)


@pytest.mark.parametrize("writes", [1, 3])
def test_a_store_that_goes_in_the_middle_of_a_write_does_not_hold_it_where_another_is_back(writes: int) -> None:
    """The store goes away when it should be locked or written."""
    story = written()
    story.down = {0}
    answer, seen = story.answer, list[ev.Write]()

    def go(action: ev.Action) -> ev.Event | None:
        if isinstance(action, ev.Write):
            seen.append(action)
            if len(seen) == writes:
                story.down, story.silent = set(), {2}
        return answer(action)

    story.answer = go  # type: ignore[method-assign]
    assert story.ask("one", "two") == "two"
    assert STEP_S <= story.now < 2 * STEP_S
    assert story.members() == [0, 1, 2]


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_an_answer_that_comes_late_is_not_in_vain(steps: int) -> None:
    """A lossy network delays answers by a second, and the attempt continues with them."""
    story = written()
    story.down = {2}
    actions = story.core.handle(ev.Requested(b"one", b"two"), story.now)
    for _ in range(steps):
        actions = of_next_step(story, actions)
        story.now, actions = story.now + PATIENCE_MAX_S, actions or passed(story, PATIENCE_MAX_S)
    late = [answer for action in actions if (answer := story.answer(action))]
    for _ in range(4):
        assert not any(isinstance(each, ev.Write) for each in passed(story, STEP_S))
    actions = [action for answer in late for action in story.core.handle(answer, story.now)]
    while not any(isinstance(action, ev.Done) for action in actions):
        actions = of_next_step(story, actions) or passed(story, PATIENCE_MAX_S)
    assert actions == [ev.Done(b"two")]
    assert {action.cell.promised.number for action in story.asked if isinstance(action, ev.Write)} == {1, 2}, (
        "a single attempt"
    )


def passed(story: Story, seconds: float) -> list[ev.Action]:
    """The register's requests after this much time."""
    story.now += seconds
    return story.core.handle(ev.DeadlinePassed(), story.now)


def test_a_store_that_refused_is_asked_again_while_another_is_slow() -> None:
    story = written()
    story.silent, story.down = {1}, {2}
    looks = story.core.handle(ev.Requested(), story.now)
    assert of_next_step(story, looks) == []
    story.down = set()
    (again,) = passed(story, STEP_S)
    assert isinstance(again, ev.Look) and again.store == 2
    assert of_next_step(story, [again]) == []
    assert passed(story, PATIENCE_MAX_S) == [ev.Done(b"one")]


def test_a_store_that_is_back_gives_slow_ones_more_time_in_each_try() -> None:
    """Otherwise no write would ever finish if answers take longer than a step."""
    story = written()
    late_s = list[float]()
    answer = story.answer

    def go(action: ev.Action) -> ev.Event | None:
        if isinstance(action, ev.Write) and action.store == 1:
            late_s.append(story.core._step_s)
            return answer(action) if late_s[-1] > STEP_S else None
        story.down = (
            {0} if isinstance(action, ev.Look) and len(late_s) == 0 and story.core.phase == "looking" else set()
        )
        return answer(action)

    story.answer = go  # type: ignore[method-assign]
    assert story.ask("one", "two") == "two"
    assert late_s[:2] == [STEP_S, 2 * STEP_S]
    story.core.handle(ev.Requested(), story.now)
    assert story.core.deadline == story.now + STEP_S, "the next operation begins as usual"


def test_a_lock_of_an_earlier_try_that_comes_late_is_ignored_for_this_one() -> None:
    story = written()
    story.down = {0}
    looks = story.core.handle(ev.Requested(b"one", b"two"), story.now)
    locks = of_next_step(story, looks) or passed(story, PATIENCE_MAX_S)
    (late,) = [lock for lock in locks if isinstance(lock, ev.Write) and lock.store == 1]
    story.down, story.silent = set(), {1}
    again = of_next_step(story, locks)
    while story.core.phase != "looking":  # store 0 is back, so another attempt begins
        again = of_next_step(story, again) or passed(story, STEP_S)
    story.silent = set()
    assert {type(lock) for lock in of_next_step(story, again)} == {ev.Write} and story.core.phase == "locking"
    story.core.handle(ev.Written(late.step, late.store, True), story.now)
    assert not story.core._try.locked


@pytest.mark.parametrize("is_written", [False, True])
def test_a_write_of_another_client_has_a_moment_to_end_before_it_is_disturbed(is_written: bool) -> None:
    story = written()
    locks = story.begin("one", "two")
    other = story.core
    writes = [each for each in story.asked if isinstance(each, ev.Look) and each.step == locks - 1]
    assert writes
    locked = [other._try.lock_of(store) for store in range(2)]
    story.cells[:2] = list(locked)
    story.new_client("b")
    looks = story.core.handle(ev.Requested(b"one", b"three"), story.now)
    assert of_next_step(story, looks) == [] and story.core.phase == "pausing"
    if is_written:
        for store in range(3):
            other.handle(ev.Written(locks, store, is_done=store < 2), story.now)
        story.cells[:2] = [each.replace(vote=other._try.vote) for each in locked]
    before = len(story.asked)
    assert finish(story) == (ev.Done(b"two") if is_written else ev.Done(b"three"))
    assert any(isinstance(each, ev.Write) for each in story.asked[before:]) is not is_written


def finish(story: Story) -> ev.Action:
    actions = list[ev.Action]()
    while not any(isinstance(action, ev.Done | ev.NoMajority) for action in actions):
        actions = of_next_step(story, actions) or passed(story, max(0.0, (story.core.deadline or 0.0) - story.now))
    return actions[-1]


def test_stores_that_were_slow_for_one_operation_cost_the_next_one_no_time() -> None:
    story = written()
    story.silent = {1, 2}
    story.ask()
    story.core.handle(ev.Requested(), story.now)
    assert story.core.deadline == story.now + STEP_S


def test_a_store_that_came_back_empty_is_taken_in_by_the_next_operation() -> None:
    story = written()
    story.forget(0)
    assert story.ask() == "one"
    assert story.members() == [0, 1, 2]
    story.down = {1}
    assert story.ask("one", "two") == "two"


def test_a_store_that_has_forgotten_is_counted_by_no_client_before_it_is_taken_in() -> None:
    story = written()
    story.forget(0)
    story.silent = {1}
    for name in ("a", "b", "c"):  # including one that has never known the job, and comes after others have tried
        story.new_client(name)
        assert story.ask() == ev.NoMajority({1: ""}, (0,))
    story.silent = set()
    assert story.ask() == "one"


def test_a_store_that_is_back_with_a_cell_of_an_earlier_life_is_counted_by_no_client_and_begins_another() -> None:
    story = written()
    earlier = story.cells[0]
    story.forget(0)
    assert earlier and story.ask("one", "two") == "two"
    story.cells[0], story.silent = earlier, {1}
    assert story.ask() == ev.NoMajority({1: ""})
    story.silent = set()
    assert story.ask() == "two"
    assert story.members() == [0, 1, 2] and story.cells[0] and story.cells[0].incarnation != earlier.incarnation


def test_a_client_that_has_known_the_job_does_not_begin_another() -> None:
    story = written()
    story.forget(0, 1)
    story.silent = {2}
    assert story.ask("", "two") == ev.NoMajority({2: ""}, (0, 1))


def test_when_a_majority_has_forgotten_all_begin_again_with_what_one_still_knows() -> None:
    story = written()
    story.forget(0, 1)
    assert story.ask() == "one"
    assert story.members() == [0, 1, 2]
    story.forget(0, 1, 2)
    assert story.ask("", "two") == "two"


def test_a_vote_that_only_a_store_has_that_was_to_be_taken_in_does_not_speak_for_it() -> None:
    """An attempt to add store 2 was overtaken at the members: its write to store 2 alone never took effect."""
    one, five, six = Ballot(1, "a"), Ballot(5, "b"), Ballot(6, "a")
    story = Story()
    newest = StoreCell(one, six, Vote(six, (one, one, None), b"new"))
    story.cells = [newest, newest, StoreCell(five, five, Vote(five, (one, one, five), b"old"))]
    story.silent = {1}
    assert isinstance(story.ask(), ev.NoMajority)
    story.silent = set()
    assert story.ask() == "new"


def test_a_store_that_is_being_taken_in_is_ignored_for_the_vote_that_does_so() -> None:
    story = written()
    story.forget(0)
    core, step = story.core, story.begin("one", "two")
    assert core.handle(ev.Written(step, 0, True), 0.0) == []
    assert core.handle(ev.Written(step, 1, True), 0.0) == []
    assert core.deadline == STEP_S, "two of three are locked, and one of them has lost its data: that is not a majority"
    assert core.handle(ev.Written(step, 2, False), 0.0) == []
    assert core.phase == "pausing"
    assert core._try.missing == {2: CAME_BETWEEN}


def test_a_vote_that_a_member_and_a_store_have_that_is_being_taken_in_does_not_hold_yet() -> None:
    story = written()
    story.forget(0)
    core, step = story.core, story.begin("one", "two")
    writes = [action for store in range(3) for action in core.handle(ev.Written(step, store, True), 0.0)]
    assert [type(write) for write in writes] == [ev.Write] * 3
    assert core.handle(ev.Written(step + 1, 0, True), 0.0) == core.handle(ev.Written(step + 1, 1, True), 0.0) == []
    assert core.handle(ev.Written(step + 1, 2, True), 0.0) == [ev.Done(b"two")]


def test_when_a_majority_has_forgotten_no_store_is_left_out_of_the_beginning() -> None:
    story = written()
    story.forget(0, 1)
    core, step = story.core, story.begin("one", "two")
    for store, is_done in ((0, True), (1, True), (2, False)):
        assert core.handle(ev.Written(step, store, is_done), 0.0) == []
    assert core.phase == "pausing"


def test_that_a_majority_has_forgotten_is_not_believed_of_answers_that_were_long_on_their_way() -> None:
    """A client is suspended while it reads: two stores were empty, but hold the first vote when the third answers."""
    story = Story()
    slow = story.core
    looks = slow.handle(ev.Requested(), 0.0)
    empty = [story.answer(look) for look in looks[1:]]
    story.new_client("b")
    story.down = {2}
    assert story.ask("", "one") == "one"
    story.core, story.down = slow, set()
    late = [each for answer in (*empty, story.answer(looks[0])) if answer for each in slow.handle(answer, story.now)]
    assert {type(each) for each in late} == {ev.Look}
    locks = [each for look in late if (answer := story.answer(look)) for each in slow.handle(answer, story.now)]
    incarnations = [
        (lock.expected and lock.expected.incarnation, lock.cell.incarnation)
        for lock in locks
        if isinstance(lock, ev.Write)
    ]
    assert [was == is_now for was, is_now in incarnations] == [True, True, False], (
        "the members in the vote keep their incarnations"
    )


@pytest.mark.parametrize("forgetful", [(0,), (0, 1), (0, 1, 2)])
def test_a_store_that_is_taken_in_and_each_one_that_begins_again_has_a_new_life(forgetful: tuple[int, ...]) -> None:
    """A pending write of an earlier attempt must not be mistaken for one of this incarnation."""
    story = written()
    before = [cell.incarnation for cell in story.cells if cell]
    story.forget(*forgetful)
    assert story.ask("one" if len(forgetful) < 3 else "", "two") == "two"
    incarnations = [cell.incarnation for cell in story.cells if cell]
    kept = {1, 2} if forgetful == (0,) else set[int]()
    assert {store for store in range(3) if incarnations[store] == before[store]} == kept


def test_a_store_that_a_try_began_to_take_in_is_evidence_of_a_job() -> None:
    """The attempt got no further, and another store loses its data: a new client does not begin another job."""
    story = written()
    story.forget(0)
    step = story.begin("one", "two")
    story.cells[0] = story.core._try.lock_of(0)
    story.core.handle(ev.Written(step, 0, True), 0.0)
    story.forget(1)
    story.silent = {2}
    story.new_client("b")
    assert story.ask("", "another job") == ev.NoMajority({2: ""}, (1,))


def lock(story: Story, *stores: int) -> None:
    """A client's first attempt gets no further than locking these stores."""
    story.begin("", "one")
    for store in stores:
        story.cells[store] = story.core._try.lock_of(store)
    story.core.handle(ev.Dropped(), story.now)


def test_a_store_that_was_locked_for_the_first_vote_and_one_that_may_have_forgotten_it_begin_nothing() -> None:
    story = written()
    assert story.cells[0]
    story.cells[0] = story.cells[0].replace(vote=None)  # the vote never reached it
    story.forget(1)
    story.silent = {2}
    story.new_client("b")
    assert story.ask() == ev.NoMajority({2: ""})
    story.silent = set()
    assert story.ask() == "one"


@pytest.mark.parametrize("stores, name", [((0,), "a"), ((0, 1), "a"), ((0, 1), "b")])
def test_a_first_try_that_got_no_further_than_its_locks_is_in_no_ones_way(stores: tuple[int, ...], name: str) -> None:
    """A client knows that it has sent no vote, and that no store in a locked majority has lost one."""
    story = Story()
    lock(story, *stores)
    story.down = {2}
    if name != "a":
        story.new_client(name)
    assert story.ask("", "two") == "two"


def test_while_a_first_try_is_locking_stores_another_client_looks_again() -> None:
    story = Story()
    lock(story, 0)
    story.down, cells = {2}, list(story.cells)
    story.new_client("b")
    looked = list[float]()

    def answer(action: ev.Action, answer: Callable[[ev.Action], ev.Event | None] = story.answer) -> ev.Event | None:
        if isinstance(action, ev.Look) and action.store == 1:
            looked.append(story.now)
            story.cells[1] = cells[0] if len(looked) == 3 else None  # the other attempt's lock arrives at last
        return answer(action)

    story.answer = answer  # type: ignore[method-assign]
    assert story.ask("", "two") == "two"
    assert len(looked) == 3 and story.now < LIMIT_S


def test_answers_of_an_earlier_step_and_second_ones_change_nothing() -> None:
    story = written()
    core = story.core
    looks = core.handle(ev.Requested(b"one", b"two"), 0.0)
    first = story.answer(looks[0])
    assert isinstance(first, ev.Looked)
    assert (
        core.handle(first, 0.0) == core.handle(first, 0.0) == core.handle(ev.Written(first.step - 1, 1, True), 0) == []
    )
    assert core.handle(ev.Unanswered(first.step, 0, "late"), 0.0) == []
    assert core.phase == "looking"
    core.handle(ev.Dropped(), 0.0)
    assert core.phase == "idle"
    assert core.handle(ev.Looked(first.step, 1, story.cells[1]), 0.0) == []


def test_one_operation_at_a_time() -> None:
    story = Story()
    story.core.handle(ev.Requested(), 0.0)
    with pytest.raises(InvalidTransition):
        story.core.handle(ev.Requested(), 0.0)


ENDPOINTS = ["n0:1", "n1:1", "n2:1"]
BALLOT = Ballot(3, 'a "b"')


@pytest.mark.parametrize("vote", [None, Vote(BALLOT, (BALLOT, None, Ballot(1, "")), b"7\n{}\n\xff")])
def test_a_cell_survives_its_bytes(vote: Vote | None) -> None:
    cell = StoreCell(BALLOT, Ballot(9, "x"), vote)
    assert cell_from_bytes(cell_to_bytes(cell, ENDPOINTS)) == (cell, ENDPOINTS)


@pytest.mark.parametrize(
    "data",
    [b"", b"0\n{}", b"quorum ", b"quorum []\n", b"quorum [1,2,3,4,5]\n", b'quorum [["a"],[1,2],[1,"a"],null,null]\n',
     b'quorum [["a"],[1,"a"],[1,"a"],[1,"a"],null]\n', b"quorum " + b"[" * 9999],
)  # fmt: skip
def test_bytes_that_no_agent_wrote_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r".*"):
        cell_from_bytes(data)
