"""``ShapeCache``: the shapes of what operators give, so that equal layers of a model are computed once."""

# [Note: equal calls give equal shapes]
# torch's fake mode has a cache of the same kind, and its keys cost most of the time of a prediction: they hold all
# that any tensor may have. Here only plain tensors are known: strided ones of this fake mode, without a constant, and
# without the bits of a conjugate or a negative. Of these, size, stride, offset, dtype, device and `requires_grad`
# decide what an operator of aten gives, unless its result depends on elements or it changes the shape of its
# argument. The cache learns a result only if it can make it again: the result must lie at the beginning of memory of
# its own and fill it, or over the memory of the first argument of a view, or be an argument itself. All other calls go
# to torch.

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

from disthooks.predict.fake.queries import tensors_in

#: More calls are not kept.
_MOST = 1 << 16
_CHANGES_SHAPE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_PLAIN = {int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format}
_in_kernel: Callable[[Any], Any] = in_kernel_invocation_manager


class _Output(NamedTuple):
    """A tensor that an operator gives.

    ``argument`` is the position of the argument that it is; -1 if it is a new tensor. ``reach`` is, for a view over the
    memory of the first argument, the bytes of that memory up to its end.
    """

    argument: int
    reach: int | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device = torch.device("cpu")


class _Unknown(Exception):
    """An argument is nothing that a key can be made of."""


class ShapeCache:
    """Remembers what operators gave for arguments of the same shapes. See [Note: equal calls give equal shapes]."""

    _results: dict[Any, tuple[Any, tuple[_Output | None, ...]]] = {}  # noqa: RUF012  # of all predictions
    _may_know: dict[Any, bool] = {}  # noqa: RUF012

    def __init__(self, excluded: frozenset[Any]) -> None:
        self._excluded = excluded

    def key(self, mode: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the result of a call depends on; None if it depends on more than can be known."""
        may_know = self._may_know.get(func)
        if may_know is None:
            may_know = self._may_know[func] = func not in self._excluded and _depends_on_shapes(func)
        if not may_know or torch.is_inference_mode_enabled():
            return None
        parts: list[Any] = [func, torch.get_default_dtype()]
        try:
            for value in args:
                _add(mode, value, parts)
            for name, value in kwargs.items():
                parts.append(name)
                _add(mode, value, parts)
        except _Unknown:
            return None
        return tuple(parts)

    def result(self, mode: Any, key: Any, args: tuple[Any, ...]) -> tuple[Any] | None:
        known = self._results.get(key)
        if known is None:
            return None
        kind, outputs = known
        for each in outputs:
            if each is not None and each.reach is not None and args[0].untyped_storage().nbytes() < each.reach:
                return None  # FSDP has freed this memory: torch decides whether this view takes it again
        made = [None if each is None else _make(mode, each, args) for each in outputs]
        if kind is None:
            return (None,)
        return (made[0],) if kind is FakeTensor else (kind(made),)

    def learn(self, key: Any, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Remember what a call gave, if the next one can be given the same."""
        kind = None if result is None else type(result)
        if kind not in (None, FakeTensor, tuple, list):
            return
        results = list(result) if kind in (tuple, list) else [] if result is None else [result]
        memory = {each.untyped_storage()._cdata for each in tensors_in(args, kwargs)}
        outputs: list[_Output | None] = []
        for each in results:
            output = None if each is None else _learned(each, func, args, memory)
            if each is not None and output is None:
                return
            outputs.append(output)
        if len(self._results) >= _MOST:
            self._results.clear()
        self._results[key] = kind, tuple(outputs)


def _depends_on_shapes(func: Any) -> bool:
    """Whether the shapes of what ``func`` gives depend on those of its arguments alone."""
    if not isinstance(func, torch._ops.OpOverload) or func.namespace != "aten":
        return False
    name = func._schema.name.rpartition("::")[2]
    is_odd = "lift" in name or "resize" in name or name in ("set_", "set", "_unsafe_view", "record_stream")
    return not is_odd and _CHANGES_SHAPE.isdisjoint(func.tags)


def _add(mode: Any, value: Any, parts: list[Any]) -> None:
    kind = type(value)
    if kind is FakeTensor:
        if value.fake_mode is not mode or value.constant is not None or value.layout is not torch.strided:
            raise _Unknown
        dtype = value.dtype
        if value.is_neg() or (dtype.is_complex and value.is_conj()) or value.is_quantized:
            raise _Unknown
        shape, stride = tuple(value.shape), value.stride()
        parts.append((shape, stride, value.storage_offset(), dtype, value.fake_device, value.requires_grad))
    elif kind in _PLAIN:
        parts.append(kind)  # 1, 1.0 and True are equal
        parts.append(value)
    elif kind is list or kind is tuple or kind is torch.Size:
        parts.append((kind, len(value)))
        for each in value:
            _add(mode, each, parts)
    else:
        raise _Unknown


def _learned(tensor: Any, func: Any, args: tuple[Any, ...], memory: set[int]) -> _Output | None:
    """Describe a tensor that ``func`` gave, so that another call can make it again; None if it is no plain tensor."""
    for position, each in enumerate(args):
        if each is tensor:
            return _Output(position)
    if type(tensor) is not FakeTensor or tensor.layout is not torch.strided or tensor.constant is not None:
        return None
    dtype = tensor.dtype
    if tensor.is_neg() or (dtype.is_complex and tensor.is_conj()) or tensor.is_quantized or tensor.requires_grad:
        return None
    storage: Any = tensor.untyped_storage()
    offset: Any = tensor.storage_offset()
    shape, stride = tuple(tensor.shape), tuple(tensor.stride())
    if not all(type(each) is int for each in (*shape, *stride, offset)):
        return None  # a size is a symbol
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    nbytes = 0 if 0 in shape else (offset + last + 1) * tensor.element_size()
    is_view = storage._cdata in memory
    if is_view:
        first = args[0] if args else None
        is_plain = func.is_view and type(first) is FakeTensor and first.untyped_storage()._cdata == storage._cdata
    else:
        is_plain = offset == 0 and storage.nbytes() == nbytes and not func.is_view
        memory.add(storage._cdata)  # the next result of this call has to lie elsewhere
    if not is_plain:
        return None
    reach = int(nbytes) if is_view else None
    return _Output(-1, reach, shape, stride, int(offset), dtype, tensor.fake_device)


def _make(mode: Any, output: _Output, args: tuple[Any, ...]) -> Any:
    if output.argument >= 0:
        return args[output.argument]
    with _in_kernel(mode):
        made = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        if output.reach is not None:
            made.set_(args[0].untyped_storage(), output.offset, output.shape, output.stride)
    return FakeTensor(mode, made, output.device)
