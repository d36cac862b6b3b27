"""A rank's state on its way to another rank: what it is split into, how it is cut, and what is refused."""

from __future__ import annotations

import enum
from collections import OrderedDict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from aelastic.training import Late, Value
from aelastic.training.rounds import _share
from aelastic.training.shared_state import moving
from aelastic.training.shared_state.moving import PIECE, pieces
from aelastic.training.shared_state.state import State, UnsharableStateError, is_sharded, move
from aelastic.training.shared_state.wire import Wire


class Recorded(Wire):
    """Both ends in one process: everything sent is received."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.sent: list[torch.Tensor] = []

    def send(self, buffer: torch.Tensor, target: int) -> None:
        self.sent.append(buffer.clone())

    def receive(self, buffer: torch.Tensor, source: int) -> None:
        piece = self.sent.pop(0)
        assert piece.shape == buffer.shape
        buffer.copy_(piece)


def transfer(objects: list[Any], to: list[Any]) -> list[int]:
    """Gives other objects this state; returns the lengths of the messages."""
    wire = Recorded()
    moving.send(State(objects), 1, wire)
    lengths = [len(each) for each in wire.sent]
    moving.receive(to, 0, wire)
    assert not wire.sent
    return lengths


def transferred(value: Any) -> Any:
    received = Value()
    transfer([Value(value)], [received])
    return received.value


# Trees of plain values and tensors.

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
tensors = st.builds(
    lambda dtype, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.sampled_from([*DTYPES, torch.complex64]),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.integers(0, 1000),
)
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(), tensors,
    st.sampled_from([torch.float32, torch.device("cpu"), torch.Size([2, 3])]),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text()))
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.dictionaries(keys, inner, max_size=4).map(OrderedDict),
    ),
    max_leaves=20,
)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    elif isinstance(one, dict):
        assert [*one] == [*other], "in the same order"
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other, strict=True):
            assert_same(mine, theirs)
    else:
        assert one == other


@given(trees)
@settings(deadline=None, max_examples=50)
def test_a_state_arrives_as_it_was_sent(tree: Any) -> None:
    assert_same(transferred(tree), tree)


@dataclass
class Own:
    number: int = 3


class Color(enum.Enum):
    RED = 1


@pytest.mark.parametrize("state, place", [
    (Own(), "Value 0.state_dict()"),
    ({"a": [1, Own()]}, "Value 0.state_dict()['a'][1]"),
    ({"a": ({3: Own()},)}, "Value 0.state_dict()['a'][0][3]"),
    ({Color.RED: 3}, "Value 0.state_dict()[<Color.RED: 1>]"),
])  # fmt: skip
def test_an_object_of_another_class_is_refused_and_named(state: Any, place: str) -> None:
    with pytest.raises(UnsharableStateError) as refused:
        State([Value(state)])
    assert str(refused.value).startswith(f"share: {place} is a ")
    assert "which torch.load(weights_only=True) refuses" in str(refused.value)


@pytest.mark.parametrize("tensor, why", [
    (torch.eye(2).to_sparse(), "only if it is a dense tensor"),
    (torch.empty(2, device="meta"), "on the device meta"),
])  # fmt: skip
def test_a_tensor_that_is_not_in_plain_memory_is_refused_and_named(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(UnsharableStateError, match=why) as refused:
        State([nn.Linear(1, 1), Value([tensor])])
    assert "share: Value 1.state_dict()[0] is a " in str(refused.value)


# Models and optimizers.


def trained(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.randn(3, width)).sum().backward()
        optimizer.step()
    return model, optimizer


def fresh(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width))
    return model, torch.optim.AdamW(model.parameters(), lr=0.7)


def test_a_fresh_model_and_its_fresh_optimizer_get_the_state() -> None:
    here, there = trained(), fresh()
    transfer([*here], [*there])
    assert_same([each.state_dict() for each in here], [each.state_dict() for each in there])
    assert there[1].state_dict()["state"][0]["exp_avg"].any()


def test_what_fits_is_received_where_it_is_and_takes_no_more_memory() -> None:
    here, there = trained(), trained()

    def places() -> list[int]:
        moments = [value for state in there[1].state.values() for value in state.values()]
        return [each.data_ptr() for each in [*there[0].state_dict().values(), *moments]]

    before = places()
    transfer([*here], [*there])
    assert places() == before
    assert_same(here[1].state_dict(), there[1].state_dict())


def test_a_module_of_another_form_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="size mismatch"):
        transfer([*trained(4)], [*fresh(5)])


def test_a_late_object_gets_its_state_once_it_is_made() -> None:
    here, late = trained(), Late()
    transfer([here[1]], [late])
    _, optimizer = fresh()
    late.attach(optimizer)
    assert_same(here[1].state_dict(), optimizer.state_dict())


def test_a_state_moves_to_other_objects_of_the_same_process() -> None:
    here, there = trained(), fresh()
    move(State(here), there)
    assert_same([each.state_dict() for each in here], [each.state_dict() for each in there])


class Part:
    """The parts of a `DTensor` by which it is recognized."""

    def __init__(self, placement: Placement, ranks: int) -> None:
        self.placements = (placement,)
        self.device_mesh = SimpleNamespace(shape=(ranks,))


class Sharded(nn.Module):
    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = parts

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self.parts)


@pytest.mark.parametrize(
    "placement, ranks, expected", [(Shard(0), 2, True), (Shard(0), 1, False), (Replicate(), 2, False)]
)
def test_a_model_is_sharded_if_ranks_hold_different_parts_of_a_parameter(
    placement: Placement, ranks: int, *, expected: bool
) -> None:
    whole = nn.Parameter(torch.ones(1))
    assert is_sharded([Value(), Sharded(whole, Part(placement, ranks))]) is expected


def test_a_sharded_model_needs_the_group_that_holds_the_same_shard() -> None:
    with pytest.raises(ValueError, match="share: parameters are sharded; name the ranks that hold the same shard"):
        _share(cast("Any", None), [Sharded(Part(Shard(0), 2))], None, None, None, 1)


# Pieces.


@given(st.lists(st.integers(0, 30), max_size=8), st.integers(1, 12))
def test_pieces_have_each_byte_once_and_all_but_the_last_are_full(sizes: list[int], limit: int) -> None:
    cut = [*pieces(sizes, limit)]
    covered = [(part.tensor, part.start + index) for piece in cut for part in piece for index in range(part.length)]
    assert covered == [(tensor, index) for tensor, size in enumerate(sizes) for index in range(size)]
    lengths = [sum(part.length for part in piece) for piece in cut]
    assert all(length == limit for length in lengths[:-1]) and all(0 < length <= limit for length in lengths)
    for piece in cut:
        assert [part.offset for part in piece] == [sum(p.length for p in piece[:i]) for i in range(len(piece))]


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3])
def test_a_tensor_is_sent_in_pieces_whatever_its_size(size: int) -> None:
    tensor = torch.randint(0, 256, (size,), dtype=torch.uint8)
    received = Value()
    lengths = transfer([Value([torch.ones(3), tensor, torch.ones(2)])], [received])
    assert torch.equal(received.value[1], tensor) and torch.equal(received.value[2], torch.ones(2))
    assert max(lengths) <= PIECE
    assert sum(lengths[1:]) == 12 + size + 8, "the tree fits into the head"


@pytest.mark.parametrize("tensor", [
    torch.arange(12.0).view(3, 4).t(),
    torch.arange(12.0)[::3],
    torch.arange(6.0).expand(2, 6),
    torch.tensor([1 + 2j, 3 - 1j]).conj(),
    torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    torch.tensor(3.5),
    torch.empty(0, 3),
], ids=["transposed", "strided", "expanded", "conjugate", "negative", "a number", "empty"])  # fmt: skip
def test_a_tensor_may_have_any_form(tensor: torch.Tensor) -> None:
    assert torch.equal(transferred(tensor), tensor)


def test_a_tensor_that_is_not_contiguous_is_received_where_it_is() -> None:
    place = torch.zeros(4, 3).t()
    received = Value([place, torch.zeros(1)])
    transfer([Value([torch.arange(12.0).view(3, 4), torch.ones(1)])], [received])
    assert received.value[0] is place or received.value[0].data_ptr() == place.data_ptr()
    assert torch.equal(place, torch.arange(12.0).view(3, 4)) and place.stride() == (1, 3)


def test_the_last_tensor_is_received_where_it_is_even_if_it_is_not_contiguous() -> None:
    place = torch.zeros(4, 3).t()
    transfer([Value([torch.arange(12.0).view(3, 4)])], [Value([place])])
    assert torch.equal(place, torch.arange(12.0).view(3, 4))


def test_a_tree_may_be_longer_than_its_head() -> None:
    tree = {f"name {number}": number for number in range(20_000)}
    assert transferred([tree, torch.ones(3)])[0] == tree
