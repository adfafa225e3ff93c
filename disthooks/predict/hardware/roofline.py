"""How long an operator takes, in rough: its operations and bytes against the peaks of a device.

``cost`` counts the floating-point operations and the bytes of one call, from shapes alone: fake tensors are enough.
``seconds`` divides them by what the device reaches.
"""

# [Note: what is counted]
# Floating-point operations are those of matrix products, convolutions and attention, by the formulas of
# `torch.utils.flop_counter` and a few that are missing or wrong there (`_more_formulas`). All other operators are
# counted as bytes alone, because a GPU computes them faster than it moves their bytes.
#
# Bytes: each element of an input that the operator touches is read once, and each element of an output is written
# once. An expanded dimension is one element. Inputs in one storage count at most the storage. A view reads and writes
# nothing, and neither does `empty`. Of a table (`embedding`, `index`, `gather`) only as much is read as comes out, and
# a scatter in place touches only as much as goes in. What stays in a cache between two operators, and kernels that
# read their input twice (norms of long rows), are not counted.
#
# [Note: how wrong it is]
# torch's own roofline (pytorch/pytorch#134243) predicted 784.8 ms for a step that took 853.8 ms, and its test allows
# 30%. This one has the same form, with the share of a peak that is reached from `Device` (a note there says where each
# is from). So expect the same: the order of magnitude, and the ratio between parts of a model, not the milliseconds.
#
# A kernel that does nothing takes 2 to 3 µs on a GPU, so `LAUNCH` is added to each call. The host needs more time for a
# call of torch's than the GPU needs for an empty kernel: "at least 8 us" (zdevito.github.io, 2022-12-09, by an author
# of torch). It is hidden as long as the GPU has work, so `phase_seconds` takes the larger of the two sums.

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

from disthooks.predict.hardware.devices import Device
from disthooks.predict.recording.record import Operator

__all__ = [
    "HOST_CALL",
    "LAUNCH",
    "Cost",
    "cost",
    "cost_for_record",
    "format_seconds",
    "may_use_tf32",
    "phase_seconds",
    "seconds",
    "seconds_of",
]

#: Seconds of a kernel that does nothing.
LAUNCH = 3e-6
#: Seconds of the host for a call of an operator.
HOST_CALL = 8e-6

aten = torch.ops.aten


class Cost(NamedTuple):
    """What one call of an operator costs.

    Attributes:
        flops: floating-point operations, as ``torch.utils.flop_counter.FlopCounterMode`` counts them, except for the
            operators that it does not know or has wrong.
        read: bytes read.
        written: bytes written.
        skipped: those of ``flops`` that the kernel does not do, because its mask is causal.
    """

    flops: int
    read: int
    written: int
    skipped: int = 0


_NOTHING = Cost(0, 0, 0)


# -- flops


def _size(tensor: torch.Tensor) -> int:
    return int(tensor.numel())


def _attention(args: Sequence[Any], out: Any) -> int:
    """Two products of matrices: scores, and weights with values."""
    query, key, value = args[0].shape, args[1].shape, args[2].shape
    return int(2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3]))


def _attention_backward(args: Sequence[Any], out: Any) -> int:
    """Five: the scores again, and the gradients of weights, values, queries and keys."""
    query, key, value = args[1].shape, args[2].shape, args[3].shape
    return int(2 * query[0] * query[1] * query[2] * key[2] * (3 * query[3] + 2 * value[3]))


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """As many as the forward, for the gradient of the input and again for that of the weight."""
    gradient, x, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
    positions = _size(x) if transposed else _size(gradient)
    return int(2 * positions * _size(weight) // weight.shape[0] * sum(map(bool, wanted[:2])))


def _rnn(args: Sequence[Any], out: Any) -> int:
    """Each weight matrix multiplies each step of each sequence."""
    weights = args[1] if isinstance(args[1], (list, tuple)) else args[1:3]
    steps = _size(args[0]) // args[0].shape[-1]
    return int(2 * steps * sum(_size(weight) for weight in weights if weight.dim() == 2))


def _grouped(args: Sequence[Any], out: Any) -> int:
    """Products of groups: of rows with a matrix each, or of columns with rows."""
    a, b = args[0].shape, args[1].shape
    return int(2 * a[-2] * a[-1] * b[-1] * (a[0] if len(a) == len(b) == 3 else 1))


def _inner(args: Sequence[Any], out: Any) -> int:
    """A product whose first argument is the one with the inner dimension last."""
    return int(2 * _size(out) * args[0].shape[-1])


def _added(args: Sequence[Any], out: Any) -> int:
    return int(2 * _size(out) * args[1].shape[-1])


def _more_formulas() -> dict[Any, Callable[[Sequence[Any], Any], int]]:
    """Formulas of the arguments and the output, by operator: those that torch's registry does not have, or has wrong.

    In some versions of torch the formula of a GPU's attention refuses fewer heads of keys than of queries. In all of
    them (2.13 too) the formula of a convolution's backward counts the gradient of a grouped convolution's weight as if
    it were not grouped, which is hundreds of times too much for a depthwise one.
    """
    gpu = [f"_scaled_dot_product_{name}_attention" for name in ("flash", "efficient", "cudnn")]
    better: dict[str, Callable[[Sequence[Any], Any], int]] = {
        **dict.fromkeys(gpu, _attention),
        **dict.fromkeys((f"{name}_backward" for name in gpu), _attention_backward),
        "convolution_backward": _convolution_backward,
    }
    missing: dict[str, Callable[[Sequence[Any], Any], int]] = {
        "_scaled_dot_product_flash_attention_for_cpu": _attention,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
        "_scaled_dot_product_fused_attention_overrideable": _attention,
        "_scaled_dot_product_fused_attention_overrideable_backward": _attention_backward,
        "_cudnn_rnn": _rnn,
        "_cudnn_rnn_backward": lambda args, out: 2 * _rnn(args, out),
        "miopen_rnn": _rnn,
        "miopen_rnn_backward": lambda args, out: 2 * _rnn(args, out),
        "mkldnn_rnn_layer": _rnn,
        "mkldnn_rnn_layer_backward": lambda args, out: 2 * _rnn(args, out),
        "_grouped_mm": _grouped,
        "_scaled_grouped_mm": _grouped,
        "linear": _inner,
        "matmul": _inner,
        "mv": _inner,
        "_int_mm": _inner,
        "_scaled_mm_v2": _inner,
        "dot": lambda args, out: 2 * _size(args[0]),
        "vdot": lambda args, out: 2 * _size(args[0]),
        "addmv": _added,
        "_addmm_activation": _added,
        "addbmm": lambda args, out: 2 * _size(args[1]) * args[2].shape[-1],
    }
    found = {getattr(aten, name): formula for name, formula in missing.items() if hasattr(aten, name)}
    found = {operator: formula for operator, formula in found.items() if operator not in flop_registry}
    return found | {getattr(aten, name): formula for name, formula in better.items() if hasattr(aten, name)}


# -- what an operator does with its arguments


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators that launch nothing, besides views.
_FREE = _names("""
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided _unsafe_view record_stream
    set_ resize_ resize_as_ is_same_size size stride storage_offset numel dim is_contiguous is_pinned
    sym_size sym_stride sym_numel sym_storage_offset _version _assert_tensor_metadata
""")
#: Operators in place that do not read what they overwrite.
_OVERWRITES = _names("""
    zero_ fill_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ log_normal_ cauchy_ geometric_
    _foreach_zero_ _foreach_copy_
""")
#: Operators that take from their tensor only its shape.
_CREATES = _names("""
    zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full
""")
#: Operators that read from their first argument only what comes out.
_GATHERS = _names("""
    embedding index index_select gather take _unsafe_index nll_loss_forward nll_loss2d_forward
""")
#: Operators in place that touch of their first argument only as much as goes in.
_SCATTERS = _names("""
    index_put_ _index_put_impl_ index_add_ index_copy_ index_fill_ scatter_ scatter_add_ scatter_reduce_ put_
""")
#: Formulas that look at the values of real offsets, so that shapes do not determine their result.
_BY_VALUE = _names("""
    _flash_attention_forward _flash_attention_backward
    _efficient_attention_forward _efficient_attention_backward
""")


#: Longer lists are those of foreach operators and fused optimizers, whose tensors have storages of their own.
_MANY = 16


class _Traits:
    """What is known of an operator from its name and schema; made once for each."""

    __slots__ = (
        "by_value",
        "fresh",
        "gathers",
        "is_free",
        "masked",
        "more",
        "overwrites",
        "registered",
        "scatters",
        "writes",
    )

    def __init__(self, func: Any, more: Mapping[Any, Callable[[Sequence[Any], Any], int]]) -> None:
        packet = getattr(func, "overloadpacket", func)
        name = getattr(packet, "__name__", str(packet))
        schema = getattr(func, "_schema", None)
        arguments = schema.arguments if schema is not None else ()
        returns = schema.returns if schema is not None else None
        self.more = more.get(packet)
        self.registered: Callable[..., int] | None = None if self.more is not None else flop_registry.get(packet)
        self.by_value = name in _BY_VALUE
        #: Positions and names of the arguments that are written, and of those the ones that are not read.
        self.writes = {key for i, a in enumerate(arguments) if _is_written(a, name) for key in (i, a.name)}
        self.overwrites = {key for i, a in enumerate(arguments) if a.is_out for key in (i, a.name)}
        if name in _OVERWRITES:
            self.overwrites |= self.writes
        if name in _CREATES:
            self.overwrites |= {0, "self"}
        #: For each output whether it is new memory; None if all are.
        self.fresh = None if returns is None else [each.alias_info is None for each in returns]
        is_view = returns is not None and len(returns) > 0 and not any(self.fresh or ()) and not self.writes
        self.is_free = is_view or name in _FREE or getattr(func, "namespace", "") == "prim"
        self.gathers, self.scatters = name in _GATHERS, name in _SCATTERS
        position = {a.name: i for i, a in enumerate(arguments)}
        #: Where queries, keys and the flag stand, if this is attention that may be causal; else None.
        self.masked = None
        if position.keys() >= {"query", "key", "is_causal"}:
            self.masked = position["query"], position["key"], position["is_causal"]


def _is_written(argument: Any, operator: str) -> bool:
    """Whether the schema says so. The fused optimizers write gradients only if they unscale them."""
    is_scaled = argument.name == "grads" and operator.startswith("_fused_")
    return argument.alias_info is not None and argument.alias_info.is_write and not is_scaled


_MORE = _more_formulas()
_traits: dict[Any, _Traits] = {}
_flops: dict[Any, int] = {}


def cost(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Cost:
    """Count what one call of an operator costs, from the shapes of its tensors. See [Note: what is counted].

    Returns:
        The operations and bytes; all zero for a view, and for what launches no kernel.

    >>> a, b = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    >>> cost(torch.ops.aten.mm.default, (a, b), {}, a @ b)
    Cost(flops=65536, read=10240, written=4096, skipped=0)
    >>> cost(torch.ops.aten.t.default, (a,), {}, a.t())
    Cost(flops=0, read=0, written=0, skipped=0)
    """
    traits = _traits.get(func)
    if traits is None:
        traits = _traits[func] = _Traits(func, _MORE)
    if traits.is_free:
        return _NOTHING
    reads: list[torch.Tensor] = []
    writes: list[torch.Tensor] = []
    for key, value in enumerate(args):
        _sort(traits, key, value, reads, writes)
    for name, value in kwargs.items():
        _sort(traits, name, value, reads, writes)
    written = _new_bytes(traits, out)
    if writes:
        written += _once(writes)
    read = _once(reads)
    if traits.gathers or traits.scatters:
        read, written = _sparse(traits, reads, writes, read, written)
    if traits.registered is None and traits.more is None:
        return Cost(0, read, written)
    flops = _flops_of(func, traits, args, kwargs, out)
    return Cost(flops, read, written, _skipped(traits, flops, args, kwargs))


def _sort(traits: _Traits, key: int | str, value: Any, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
    """Put the tensors of one argument, or of a list, where they belong."""
    if isinstance(value, torch.Tensor):
        tensors: Iterable[torch.Tensor] = (value,)
    elif isinstance(value, (list, tuple)) and any(isinstance(each, torch.Tensor) for each in value):
        tensors = [each for each in value if isinstance(each, torch.Tensor)]
    else:
        return
    if key in traits.writes:
        writes.extend(tensors)
    if key not in traits.overwrites:
        reads.extend(tensors)


def _touched(tensor: torch.Tensor) -> int:
    """The bytes of the elements of ``tensor``; an expanded dimension is one element."""
    count = tensor.numel()
    if tensor.layout is torch.strided and 0 in tensor.stride():
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if stride == 0 and size > 1:
                count //= size
    return int(count) * tensor.element_size()


def _once(tensors: Sequence[torch.Tensor]) -> int:
    """The bytes of ``tensors``; those of one storage count at most as much as the storage has."""
    if not 2 <= len(tensors) <= _MANY:
        return sum(map(_touched, tensors))
    total = 0
    by_storage: dict[int, tuple[int, torch.UntypedStorage]] = {}
    for tensor in tensors:
        size = _touched(tensor)
        if tensor.layout is not torch.strided:  # it has several storages
            total += size
            continue
        storage = tensor.untyped_storage()
        known = by_storage.get(storage._cdata)
        by_storage[storage._cdata] = (
            (size, storage) if known is None else (min(known[0] + size, storage.nbytes()), storage)
        )
    return total + sum(size for size, _ in by_storage.values())


def _new_bytes(traits: _Traits, out: Any) -> int:
    if isinstance(out, torch.Tensor):
        return _touched(out) if traits.fresh is None or (traits.fresh and traits.fresh[0]) else 0
    if not isinstance(out, (list, tuple)):
        return 0
    fresh = traits.fresh
    if fresh is None or len(fresh) != len(out):  # a list of tensors is one output
        return (
            sum(_touched(each) for each in out if isinstance(each, torch.Tensor)) if fresh is None or all(fresh) else 0
        )
    return sum(
        _touched(tensor)
        for each, is_fresh in zip(out, fresh, strict=True)
        if is_fresh
        for tensor in (each if isinstance(each, (list, tuple)) else (each,))
        if isinstance(tensor, torch.Tensor)
    )


def _sparse(
    traits: _Traits, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], read: int, written: int
) -> tuple[int, int]:
    """The bytes read and written, if only a part of the first argument is touched."""
    table = _touched(reads[0])
    others = max(0, read - table)
    if traits.gathers:
        return others + min(table, max(written, others)), written
    touched = min(table, others)
    return others + touched, touched if writes else written


def _flops_of(func: Any, traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    if traits.by_value:
        return _computed_flops(traits, args, kwargs, out)
    key = (func, *map(_shape, args), *((name, _shape(kwargs[name])) for name in kwargs))
    try:
        known = _flops.get(key)
    except TypeError:  # a size is a symbol, which is no key
        return _computed_flops(traits, args, kwargs, out)
    if known is None:
        known = _flops[key] = _computed_flops(traits, args, kwargs, out)
    return known


def _computed_flops(traits: _Traits, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> int:
    if traits.registered is not None:
        return int(traits.registered(*args, **kwargs, out_val=out))
    assert traits.more is not None
    return traits.more(args, out[0] if isinstance(out, (list, tuple)) else out)


def _shape(value: Any) -> Any:
    """What of an argument the formulas look at, in a form that can be a key."""
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (list, tuple)):
        return tuple(_shape(each) for each in value)
    return value


def _skipped(traits: _Traits, flops: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """The operations above the diagonal of a causal mask: nearly half of them if there are as many keys as queries."""
    if traits.masked is None:
        return 0
    query, key, flag = traits.masked
    if not (args[flag] if len(args) > flag else kwargs.get("is_causal", False)):
        return 0
    queries, keys = args[query].shape[-2], args[key].shape[-2]
    corner = min(queries, keys)
    attended = corner * (corner + 1) // 2 + (queries - corner) * keys
    return int(flops - flops * attended // (queries * keys))


def cost_for_record(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> tuple[int, int, int, str]:
    """:func:`cost` in the form that the recorder takes.

    Returns:
        The operations that the kernel does (those that a causal mask saves are not among them), the bytes read, the
        bytes written, and the type that decides how fast it computes: a dtype's name, ``"tf32"``, or ``""`` without
        tensors of floating-point numbers.

    >>> a = torch.empty(64, 32, dtype=torch.bfloat16, device="meta")
    >>> cost_for_record(torch.ops.aten.mm.default, (a, a.t()), {}, a @ a.t())
    (262144, 4096, 8192, 'bfloat16')
    """
    flops, read, written, skipped = cost(func, args, kwargs, out)
    dtype = next((each for each in map(_dtype_in, args) if each is not None), None)
    if dtype is None:
        return flops, read, written, ""
    name = "tf32" if flops and dtype is torch.float32 and may_use_tf32(func) else str(dtype).removeprefix("torch.")
    return flops - skipped, read, written, name


def _dtype_in(value: Any) -> torch.dtype | None:
    """The dtype of ``value``, or of the first tensor in it, if that is one of floating-point numbers."""
    if isinstance(value, (list, tuple)) and value:
        value = value[0]
    return value.dtype if isinstance(value, torch.Tensor) and value.is_floating_point() else None


# -- seconds


def may_use_tf32(func: Any) -> bool:
    """Whether torch's settings let this operator use TF32 for tensors of float32.

    They do for convolutions and not for matrix products, unless a program changes them.

    >>> may_use_tf32(torch.ops.aten.convolution.default), may_use_tf32(torch.ops.aten.mm.default)
    (True, False)
    """
    is_convolution = "conv" in getattr(getattr(func, "overloadpacket", func), "__name__", "")
    settings: Any = torch.backends.cudnn if is_convolution else torch.backends.cuda.matmul
    try:
        return bool(settings.allow_tf32)
    except RuntimeError:  # the program uses the newer settings, and torch forbids to mix them
        newer = getattr(settings, "conv", None) if is_convolution else settings
        return getattr(newer, "fp32_precision", "ieee") == "tf32"


_FP8 = {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    if hasattr(torch, name)
}


def _peak(device: Device, dtype: torch.dtype, tf32: bool) -> float:
    """Operations a second; those of float32 if the device has no units for ``dtype``."""
    if dtype is torch.bfloat16:
        found = device.bf16
    elif dtype is torch.float16:
        found = device.fp16
    elif dtype in _FP8:
        found = device.fp8 or device.fp16
    elif dtype is torch.float64:
        found = device.fp32 / 2
    else:
        found = device.tf32 if tf32 else None
    return found or device.fp32


def seconds(cost: Cost, device: Device, dtype: torch.dtype = torch.float32, tf32: bool = False) -> float:
    """How long one call takes on ``device``: the longer of computing and of moving bytes, and the launch.

    >>> from disthooks.predict.hardware.devices import device_named
    >>> product = Cost(flops=2 * 8192**3, read=2 * 8192**2 * 2, written=8192**2 * 2)
    >>> round(1e3 * seconds(product, device_named("h100"), torch.bfloat16), 2)
    1.39
    """
    if not (cost.flops or cost.read or cost.written):
        return 0.0
    computing = (cost.flops - cost.skipped) / (_peak(device, dtype, tf32) * device.matmul_efficiency)
    moving = (cost.read + cost.written) / (device.bandwidth * device.memory_efficiency)
    return max(computing, moving) + LAUNCH  # see [Note: how wrong it is]


def seconds_of(operator: Operator, device: Device) -> float:
    """:func:`seconds` of an operator of a record that was made with :func:`cost_for_record`.

    >>> from disthooks.predict.hardware.devices import device_named
    >>> copy = Operator("aten.clone", "forward", 0, read=10**9, written=10**9, dtype="bfloat16")
    >>> round(1e3 * seconds_of(copy, device_named("a100")), 2)
    1.16
    """
    is_tf32 = operator.dtype == "tf32"
    dtype = torch.float32 if is_tf32 else getattr(torch, operator.dtype, torch.float32)
    return seconds(Cost(operator.flops, operator.read, operator.written), device, dtype, is_tf32)


def phase_seconds(operators: Iterable[Operator], device: Device) -> dict[str, float]:
    """How long each phase takes: its operators on the device, or the host's calls of them if these take longer.

    >>> from disthooks.predict.hardware.devices import device_named
    >>> long = Operator("aten.mm", "forward", 0, flops=10**12, dtype="bfloat16")
    >>> short = Operator("aten.add", "backward", 0, read=512, written=512)
    >>> phase_seconds([long, short, short], device_named("h100"))["backward"] == 2 * HOST_CALL
    True
    """
    times: dict[str, list[float]] = {}
    for each in operators:
        times.setdefault(each.phase, []).append(seconds_of(each, device))
    return {phase: max(math.fsum(each), len(each) * HOST_CALL) for phase, each in times.items()}


def format_seconds(duration: float) -> str:
    """``duration`` seconds as text, with two digits.

    >>> format_seconds(1.84), format_seconds(0.0234), format_seconds(4.2e-5), format_seconds(0.0), format_seconds(125.0)
    ('1.8 s', '23 ms', '42 µs', '0 µs', '125 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if duration >= size or unit == "µs":
            value = duration / size
            return f"{value:.0f} {unit}" if value >= 9.95 or math.isclose(value, 0.0) else f"{value:.1f} {unit}"
    raise AssertionError  # not reached: the last unit takes everything
