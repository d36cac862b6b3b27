"""The state of a rank, taken apart into a plain tree and its tensors, and put together in the objects of another rank.

The tree holds what `torch.load(weights_only=True)` accepts, so no code of another process is ever run.  Only this
rank's part of a `DTensor` is taken; it becomes a `DTensor` again on a mesh of the objects that receive it.
"""

from __future__ import annotations

import copy
import io
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from aelastic.training import torch_private
from aelastic.training.kept import modules_of

Path = tuple[Any, ...]

# Values whose contents need no check.
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.Size, type(None))


class UnsharableStateError(TypeError):
    """A part of the state that cannot be sent to another rank."""

    def __init__(self, path: Path, kind: type, why: str) -> None:
        self.path, self.kind, self.why = path, kind, why
        owner, *keys = path
        place = f"{owner}.state_dict(){''.join(f'[{key!r}]' for key in keys)}"
        super().__init__(f"share: {place} is a {kind.__module__}.{kind.__qualname__}, {why}")


class State:
    """A tree, and the tensors that its leaves number; `paths` holds the place of each of them."""

    def __init__(self, objects: Sequence[Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self.originals: list[torch.Tensor] = []  # the whole `DTensor` for a part of one
        self.tree = [
            self._node(each.state_dict(), (f"{type(each).__name__} {number}",)) for number, each in enumerate(objects)
        ]

    def _node(self, value: Any, path: Path) -> list[Any]:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        kind = type(value)
        if kind in {dict, OrderedDict}:
            for key in value:
                _check_loadable(key, (*path, key))
            items = [[key, self._node(each, (*path, key))] for key, each in value.items()]
            return [kind.__name__, items, torch_private.metadata_of(value)]
        if kind in {list, tuple}:
            return [kind.__name__, [self._node(each, (*path, index)) for index, each in enumerate(value)]]
        if kind is bytes:  # torch refuses to load those of length 0
            return ["bytes", value.decode("latin-1")]
        _check_loadable(value, path)
        return ["plain", value]

    def _tensor(self, tensor: torch.Tensor, path: Path) -> list[Any]:
        part = local(tensor)
        if type(part) not in {torch.Tensor, torch.nn.Parameter} or part.layout != torch.strided or part.is_quantized:
            raise UnsharableStateError(path, type(part), "which is sent only if it is a dense tensor")
        if part.is_meta:
            raise UnsharableStateError(path, type(part), "which has no memory: it is on the device meta")
        self.tensors.append(part.detach())
        self.originals.append(tensor)
        self.paths.append(path)
        layout = _layout(tensor) if part is not tensor else None
        return ["tensor", len(self.tensors) - 1, part.dtype, tuple(part.shape), part.device.type, layout]

    def copied(self) -> State:
        """Returns this state, detached from changes of the objects.  Takes as much memory again as its tensors."""
        self.tree = copy.deepcopy(self.tree)
        self.tensors = [each.clone() for each in self.tensors]
        self.originals = self.tensors
        return self

    def packed(self) -> bytes:
        """Returns the tree, without the tensors."""
        file = io.BytesIO()
        torch.save(self.tree, file)
        return file.getvalue()


class ReceivedState:
    """The state of another rank on its way into these objects: fill its `tensors`, then call `load`."""

    def __init__(self, packed: bytes, objects: Sequence[Any]) -> None:
        """Uses the objects' own tensors if they fit, so that they need no more memory."""
        self._objects = objects
        self._tree = torch.load(io.BytesIO(packed), weights_only=True)
        own = State(objects)
        self._own = dict(zip(own.paths, zip(own.tensors, own.originals, strict=True), strict=True))
        self._meshes = _meshes(objects)
        self.tensors: list[torch.Tensor] = []
        self._originals: list[torch.Tensor] = []
        for number, (each, node) in enumerate(zip(objects, self._tree, strict=True)):
            _walk(node, (f"{type(each).__name__} {number}",), self._allocate)

    def _allocate(self, node: list[Any], path: Path) -> None:
        _, _, dtype, shape, device_type, layout = node
        own, original = self._own.get(path, (None, None))
        if (
            own is None
            or original is None
            or (own.dtype, tuple(own.shape), own.device.type) != (dtype, shape, device_type)
        ):
            own = torch.empty(shape, dtype=dtype, device=device_type)
            original = own if layout is None else _distributed(own, layout, self._meshes)
        self.tensors.append(own)
        self._originals.append(original)

    def load(self) -> None:
        load(self._objects, self._tree, self._originals)


def move(state: State, objects: Sequence[Any]) -> None:
    """Gives the state to other objects of the same rank, such as modules that are sharded over a new mesh."""
    meshes = _meshes(objects)
    originals: list[torch.Tensor] = [torch.empty(0)] * len(state.tensors)

    def place(node: list[Any], _: Path) -> None:
        part, layout = state.tensors[node[1]], node[5]
        originals[node[1]] = part if layout is None else _distributed(part, layout, meshes)

    for node in state.tree:
        _walk(node, (), place)
    load(objects, state.tree, originals)


def load(objects: Sequence[Any], tree: list[Any], tensors: list[torch.Tensor]) -> None:
    for each, node in zip(objects, tree, strict=True):
        each.load_state_dict(_value(node, tensors))


def _walk(node: list[Any], path: Path, visit: Callable[[list[Any], Path], None]) -> None:
    """Visits the tensors, in the order of their numbers."""
    kind, content = node[0], node[1]
    if kind == "tensor":
        visit(node, path)
    elif kind in {"dict", "OrderedDict"}:
        for key, each in content:
            _walk(each, (*path, key), visit)
    elif kind in {"list", "tuple"}:
        for index, each in enumerate(content):
            _walk(each, (*path, index), visit)


def _value(node: list[Any], tensors: list[torch.Tensor]) -> Any:
    kind, content = node[0], node[1]
    match kind:
        case "tensor":
            return tensors[content]
        case "dict":
            return {key: _value(each, tensors) for key, each in content}
        case "OrderedDict":
            value: Any = OrderedDict((key, _value(each, tensors)) for key, each in content)
            if node[2] is not None:
                torch_private.set_metadata(value, node[2])
            return value
        case "list":
            return [_value(each, tensors) for each in content]
        case "tuple":
            return tuple(_value(each, tensors) for each in content)
        case "bytes":
            return content.encode("latin-1")
        case _:
            return content


def _check_loadable(value: Any, path: Path) -> None:
    kind = type(value)
    if kind not in _PLAIN and not _is_loadable(value):
        why = "which torch.load(weights_only=True) refuses; see torch.serialization.add_safe_globals"
        raise UnsharableStateError(path, kind, why)


def _is_loadable(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # noqa: BLE001  whatever its type raises: it is named, and refused
        return False
    return True


# Tensors that are spread over a mesh.


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()


def is_sharded(objects: Sequence[Any]) -> bool:
    """Whether a parameter is spread over several ranks, so that these hold different parts."""
    for module in modules_of(objects):
        parameter: Any
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                sizes = zip(parameter.placements, mesh.shape, strict=True)
                if any(not placement.is_replicate() and size > 1 for placement, size in sizes):
                    return True
    return False


def _layout(tensor: Any) -> list[Any]:
    """Returns how a `DTensor` is spread, in plain values: its mesh's form, placements, global shape and stride."""
    placements = []
    for each in tensor.placements:
        fields = {name: getattr(each, name) for name in ("dim", "reduce_op", "split_factor") if hasattr(each, name)}
        placements.append([type(each).__name__, fields])
    return [_form(tensor.device_mesh), placements, tuple(tensor.shape), tuple(tensor.stride())]


def _form(mesh: Any) -> tuple[Any, ...]:
    """Returns what a mesh has in common with the one at the same place in another rank."""
    names = mesh.mesh_dim_names
    return (None if names is None else tuple(names), tuple(mesh.shape))


def _meshes(objects: Sequence[Any]) -> dict[tuple[Any, ...], Any]:
    meshes: dict[tuple[Any, ...], Any] = {}
    for module in modules_of(objects):
        for parameter in module.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                meshes[_form(mesh)] = mesh
    return meshes


def _distributed(part: torch.Tensor, layout: list[Any], meshes: dict[tuple[Any, ...], Any]) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, placement_types

    form, placements, shape, stride = layout
    if form not in meshes:
        raise ValueError(f"share: the state is spread over a mesh of dimensions {form}, and no parameter here is")
    allowed = {"Shard", "Replicate", "Partial", "_StridedShard"}
    assert all(name in allowed for name, _ in placements), placements
    spread = [getattr(placement_types, name)(**fields) for name, fields in placements]
    return DTensor.from_local(part, meshes[form], spread, run_check=False, shape=torch.Size(shape), stride=stride)
