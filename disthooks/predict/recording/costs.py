"""What a call of an operator costs: the floating-point operations and the bytes, from shapes alone."""

# [Note: what is counted]
# Floating-point operations are those that `torch.utils.flop_counter` counts: matrix products, convolutions, attention
# (of a causal mask all elements). `_FORMULAS` has three more, without which the times of a kind of model would be wrong
# by more than ten times. All other operators are counted as bytes alone, because a GPU computes them faster than it
# moves their bytes.
#
# Bytes: a call reads its tensors and writes its results, each element once. A tensor has no more bytes than its
# storage, so an expanded dimension is one element. A view costs nothing, and neither does `empty`. Of a table
# (`embedding`, `index_add_`) no more bytes are touched than the other tensors have together. What stays in a cache
# between two operators is not known.

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from disthooks._tensors import bytes_of
from disthooks.predict.fake.queries import tensors_in

aten = torch.ops.aten


class Cost(NamedTuple):
    """What one call of an operator costs: floating-point operations, and bytes.

    ``dtype`` decides how fast it computes: a dtype's name, ``"tf32"``, or ``""`` without tensors of floating-point
    numbers.
    """

    flops: int
    read: int
    written: int
    dtype: str = ""


# -- flops


def _convolution_backward(args: Sequence[Any]) -> int:
    """As many as the forward, for the gradient of the input and again for that of the weight.

    torch counts the gradient of a grouped convolution's weight as if it were not grouped (2.13 too), which is hundreds
    of times too much for a depthwise one.
    """
    gradient, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    positions = x.numel() if transposed else gradient.numel()
    return int(2 * positions * weight.numel() // weight.shape[0] * sum(map(bool, wanted[:2])))


def _grouped(args: Sequence[Any]) -> int:
    """Products of groups: of rows with a matrix each, or of columns with rows. torch has no formula (2.13)."""
    a, b = args[0].shape, args[1].shape
    return int(2 * a[-2] * a[-1] * b[-1] * (a[0] if len(a) == len(b) == 3 else 1))


def _rnn(args: Sequence[Any]) -> int:
    """Each weight matrix multiplies each step of each sequence. torch has no formula (2.13)."""
    steps = args[0].numel() // args[0].shape[-1]
    return int(2 * steps * sum(weight.numel() for weight in args[1] if weight.dim() == 2))


_FORMULAS: dict[Any, Callable[[Sequence[Any]], int]] = {
    aten.convolution_backward: _convolution_backward,
    aten._grouped_mm: _grouped,
    aten._cudnn_rnn: _rnn,
    aten._cudnn_rnn_backward: lambda args: 2 * _rnn(args),
}


def _flops(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    if packet in _FORMULAS:
        return _FORMULAS[packet](args)
    formula = flop_registry.get(packet)
    try:
        return 0 if formula is None else int(formula(*args, **kwargs, out_val=out))
    except AssertionError:  # in some versions of torch, of attention with fewer heads of keys than of queries
        return 0


# -- bytes


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators that launch nothing, beside views.
_FREE = _names("""
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided detach _unsafe_view
    set_ resize_ resize_as_ record_stream
""")
#: Operators whose first argument is a table, of which they touch a part.
_TABLES = _names("""
    embedding index index_select gather take _unsafe_index nll_loss_forward nll_loss2d_forward
    index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ scatter_ scatter_add_ scatter_reduce_ put_
""")


@functools.cache
def _written(func: Any) -> frozenset[int | str]:
    """Positions and names of what an operator writes, if it returns nothing, as foreach operators in place."""
    arguments, returns = func._schema.arguments, func._schema.returns
    return frozenset(key for i, each in enumerate(arguments) if each.is_write and not returns for key in (i, each.name))


def cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Cost:
    """Count what one call of an operator costs, from the shapes of its tensors. See [Note: what is counted].

    A view, and what launches no kernel, costs nothing.
    """
    packet = func.overloadpacket
    if func.is_view or packet.__name__ in _FREE:
        return Cost(0, 0, 0)
    reads = [_bytes_of(tensor) for tensor in tensors_in(*args, *kwargs.values())]
    keys = _written(func)
    results = [value for key, value in (*enumerate(args), *kwargs.items()) if key in keys] if keys else []
    written = sum(map(_bytes_of, tensors_in(out, *results)))
    if packet.__name__ in _TABLES:
        is_in_place, others = out is args[0], sum(reads[1:])
        reads[0] = min(reads[0], others if is_in_place else max(written, others))
        written = reads[0] if is_in_place else written
    flops = _flops(packet, args, kwargs, out)
    return Cost(flops, sum(reads), written, _dtype_of(packet, args, flops))


def _bytes_of(tensor: torch.Tensor) -> int:
    """The bytes of the elements, at most as many as the storage has."""
    nbytes = bytes_of(tensor)
    return min(nbytes, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else nbytes


def _dtype_of(packet: Any, args: Sequence[Any], flops: int) -> str:
    """The name of the dtype of the first tensor of an argument that has floating-point numbers."""
    firsts = (value[0] if isinstance(value, (list, tuple)) and value else value for value in args)
    for each in firsts:
        if isinstance(each, torch.Tensor) and each.is_floating_point():
            is_tf32 = flops and each.dtype is torch.float32 and may_use_tf32(packet)
            return "tf32" if is_tf32 else str(each.dtype).removeprefix("torch.")
    return ""


def may_use_tf32(packet: Any) -> bool:
    """Whether torch's settings let this operator use TF32 for tensors of float32.

    They do for convolutions and not for matrix products, unless a program changes them.
    """
    is_convolution = "conv" in packet.__name__
    settings: Any = torch.backends.cudnn if is_convolution else torch.backends.cuda.matmul
    try:
        return bool(settings.allow_tf32)
    except RuntimeError:  # the program uses the newer settings, and torch forbids to mix them
        newer = getattr(settings, "conv", None) if is_convolution else settings
        return getattr(newer, "fp32_precision", "ieee") == "tf32"
