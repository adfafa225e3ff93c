"""``FakeKernels``: a fake mode that goes on where torch's own cannot, and says what it assumed.

A fake tensor has no elements. So code that looks at one (``.item()``, ``nonzero()``, an index by a mask) gets an
assumed answer here, and an operator without a fake kernel an assumed shape. Each assumption is told once.
"""

# [Note: what is assumed]
# The number of elements that are not zero is assumed to be the largest that it can be, so that memory is not
# underestimated. What `any` asks is assumed to be False, and another truth value True: such questions look for what
# should not be, or ask whether all is well. An integer is assumed to be 1 and a float 0. A prediction with an
# assumption in it names it. A loop that waits for another answer would never end, so there is a limit.
#
# [Note: kernels that differ]
# Some of torch's fake kernels give other shapes, dtypes or formats than the operators. The statistics of a
# normalisation of half-precision input with float32 weights are float32 on every device. The gradient of a layer norm's
# input is contiguous, and so are the results of a batch norm that are not channels last. A mean or a sum of losses lies
# over the memory of the single losses, which torch makes first. The grouped matrix product takes float32. The
# multilabel margin loss of one row has no dimension. Padding by reflection or replication on the CPU keeps the format
# channels last, which the fake kernels of torch 2.9 and 2.11 lose. The workspace of oneDNN's LSTM is not empty: its
# size is known to oneDNN alone, so this operator runs for real, on zeros, if its tensors are small.
#
# [Note: dtypes that differ]
# The products of matrices, the convolutions and `index_put` refuse tensors of different dtypes. Their fake kernels take
# them. So a model that no device runs would have a prediction. Here it is refused as in a run.

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
    run_fallback_kernel,
    unset_fake_temporarily,
)
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch

from disthooks._tensors import bytes_of, parts_of
from disthooks.errors import UsageError
from disthooks.predict.fake.shape_cache import ShapeCache
from disthooks.predict.fake.values import value_of

aten: Any = torch.ops.aten
_Mode: Any = fake_tensor.FakeTensorMode

#: An operator without a fake kernel runs for real, on zeros, if its inputs have at most so many bytes.
_SMALL = 64 << 20
#: A model that reads more values than that reads them in a loop that does not end.
_MOST_ANSWERS = 10_000
_NARROW = (torch.bfloat16, torch.float16)
_LOG = "torch._subclasses.fake_tensor"


class FakeKernels(_Mode):  # type: ignore[misc]
    """A FakeTensorMode that assumes what it cannot know, and tells ``told`` what, and what it assumed."""

    def __init__(self, told: Callable[[str, str], None] = lambda what, assumed: None) -> None:
        # Tensors with rows of several lengths need one. No number in it may stand for a value that is not known.
        shapes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        super().__init__(allow_non_fake_inputs=True, allow_fallback_kernels=True, shape_env=shapes, static_shapes=True)
        self.told = told
        self._answers = self._depth = 0
        self._thread = threading.get_ident()
        self._shapes = ShapeCache(frozenset({*_KERNELS, *_ANY, *_NOT, *_REDUCED}))

    def __enter__(self) -> Any:
        self._depth += 1  # a kernel below enters the mode again
        logging.getLogger(_LOG).addFilter(_is_quiet)  # torch logs an error even if it is handled here
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._depth -= 1
        if not self._depth:
            logging.getLogger(_LOG).removeFilter(_is_quiet)
        super().__exit__(*error)

    def from_tensor(self, tensor: torch.Tensor, **options: Any) -> Any:
        """A fake tensor like ``tensor``. A sparse one has as many elements, where torch gives it none."""
        # Torch has no fake kernels for compressed tensors with elements: they have none, and the recorder says so.
        if isinstance(tensor, FakeTensor) or tensor.layout is not torch.sparse_coo:
            return super().from_tensor(tensor, **options)
        with unset_fake_temporarily(), no_dispatch():
            parts = parts_of(tensor)
        values, indices = (super(FakeKernels, self).from_tensor(part, **options) for part in parts)
        return self._sparse(tensor, indices, values).requires_grad_(tensor.requires_grad)

    def _sparse(self, like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        with self:
            return torch.sparse_coo_tensor(
                indices, values, like.shape, is_coalesced=like.is_coalesced(), check_invariants=False
            )

    def can_run_unsafe_fallback(self, func: Any) -> bool:
        """Whether ``func`` may run for real: never by torch's own choice, because its tensors may be large."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if threading.get_ident() != self._thread:
            self.told("operators in a thread that the model started", "they save nothing and take no memory")
        if func in _OF_ONE_DTYPE:
            _refuse_dtypes(func, args)
        own = _KERNELS.get(func)
        if own is not None:
            return own(self, func, args, kwargs)
        key = self._shapes.key(self, func, args, kwargs)
        known = None if key is None else self._shapes.result(self, key, args)
        if known is not None:
            return known[0]
        return self._computed(func, types, args, kwargs, key)

    def _computed(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], key: Any) -> Any:
        """The result by torch's kernels, or by an assumption. A result without an assumption is remembered."""
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:
            return self._assumed_value(func, args)
        except DynamicOutputShapeException:
            return self._assumed_size(func, args, kwargs)
        except (UnsupportedOperatorException, NotImplementedError, RuntimeError) as error:
            if type(error) is RuntimeError and "no fake impl registered" not in str(error):
                raise
            if any(type(each) not in _PLAIN for each in pytree.tree_leaves((args, kwargs)) if torch.is_tensor(each)):
                raise
            return self._for_real(func, args, kwargs, error)
        mended = self._mended(func, args, result)
        if key is not None and mended is result:
            self._shapes.learn(key, func, args, kwargs, result)
        return mended

    def _mended(self, func: Any, args: tuple[Any, ...], result: Any) -> Any:
        """``result`` as the operator gives it. See [Note: kernels that differ]."""
        if func in _STATISTICS and args[0].dtype in _NARROW and _has_wide_weight(args[1:4]):
            with self:
                return (result[0], *(each.to(torch.float32) for each in result[1:]))
        if func is aten.clone.default and args[0].layout is torch.sparse_coo:
            return self._sparse(args[0], args[0]._indices().clone(), args[0]._values().clone())
        if func in _ANY:
            result.__dict__["_assumed"] = False
        elif func in _NOT and isinstance(args[0], FakeTensor):
            result.__dict__["_assumed"] = not args[0].__dict__.get("_assumed", True)
        elif func in _CONTIGUOUS:
            return self._contiguous(result)
        elif func in _REDUCED and not result.dim():
            return self._reduced(args)
        return result

    def _contiguous(self, result: Any) -> Any:
        """The first result in the order of its elements, or with channels last. See [Note: kernels that differ]."""
        if isinstance(result, torch.Tensor):
            with self:
                return result.contiguous()
        first = result[0]
        if first is None or first.is_contiguous():
            return result
        if first.dim() in _CHANNELS_LAST and first.is_contiguous(memory_format=_CHANNELS_LAST[first.dim()]):
            return result
        with self:
            return (first.contiguous(), *result[1:])

    def _reduced(self, args: tuple[Any, ...]) -> torch.Tensor:
        """A loss that is one number, over the memory of all losses. See [Note: kernels that differ]."""
        with self:
            losses = torch.empty(_broadcast(args[0].shape, args[1].shape), dtype=args[0].dtype)
            return losses.as_strided((), ()) if losses.numel() else losses.new_empty(())

    def _assumed_value(self, func: Any, args: tuple[Any, ...]) -> Any:
        tensor = args[0]
        name = f"{func.namespace}.{func._schema.name.rpartition('::')[2]}"
        if name == "aten.equal":
            self.told(name, "True")
            return True
        assumed: Any = 0.0 if tensor.dtype.is_floating_point else 1
        if tensor.dtype is torch.bool:
            assumed = tensor.__dict__.get("_assumed", True)
        self._answers += 1
        if self._answers > _MOST_ANSWERS:
            raise UsageError("the model reads values of tensors in a loop, and its end depends on them")
        self.told("the value of a tensor (.item())", repr(assumed))
        return assumed

    def _assumed_size(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator whose size depends on elements: the largest. See [Note: what is assumed]."""
        name = f"{func.namespace}.{func._schema.name.rpartition('::')[2]}"
        x = args[0]
        count = x.numel()
        self.told(name, f"all {count} elements count")
        with self:
            if func is aten.nonzero.default:
                return x.new_empty((count, x.dim()), dtype=torch.int64)
            if func is aten.masked_select.default:
                return x.new_empty((x.expand_as(args[1]) if x.dim() < args[1].dim() else x).numel())
            if func is aten.index.Tensor:
                return self._by_mask(x, args[1])
            if "unique" in name:
                counts = x.new_empty(count, dtype=torch.int64)
                return (x.new_empty(count), counts, counts.clone())
            if func is aten.repeat_interleave.Tensor:
                return x.new_empty(kwargs.get("output_size") or count, dtype=torch.int64)
            if func is aten.bincount.default:
                return x.new_empty(max(1, kwargs.get("minlength", 0)), dtype=torch.int64)
        raise DynamicOutputShapeException(func)

    def _by_mask(self, x: torch.Tensor, indices: Any) -> torch.Tensor:
        """``x`` indexed by masks, each of which takes everything."""
        wide: list[torch.Tensor | None] = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                wide.append(index)
            else:
                wide += [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.dim())]
        made: torch.Tensor = aten.index.Tensor(x, wide)
        return made

    def _for_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """The result of an operator without a fake kernel: of a real run on zeros, or of the first tensor's shape."""
        name = f"{func.namespace}.{func._schema.name.rpartition('::')[2]}"
        flat, spec = pytree.tree_flatten((args, kwargs))
        tensors = [each for each in flat if isinstance(each, FakeTensor)]
        if sum(map(bytes_of, tensors)) <= _SMALL:
            try:
                return run_fallback_kernel(self, func, flat, spec, UnsupportedOperatorException(func))
            except Exception:  # the kernel may need other values than zeros
                self.told(name, "its result has the shape of its first tensor")
        else:
            self.told(name, "it has no fake kernel: its result has the shape of its first tensor")
        returns = func._schema.returns
        if not tensors or any(str(each.type) != "Tensor" for each in returns):
            raise error
        with self:
            made = tuple(torch.empty_like(tensors[0]) for _ in returns)
        return made[0] if len(made) == 1 else made


_broadcast: Callable[..., Any] = torch.broadcast_shapes
_PLAIN = (FakeTensor, torch.Tensor, torch.nn.Parameter)


def _is_quiet(record: logging.LogRecord) -> bool:
    return record.levelno != logging.ERROR


def _has_wide_weight(args: tuple[Any, ...]) -> bool:
    return any(isinstance(each, torch.Tensor) and each.dtype is torch.float32 for each in args)


#: Operators whose results after the first are statistics, in float32 if a weight is. See [Note: kernels that differ].
_STATISTICS = {
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
}
#: Operators whose first result torch makes contiguous. See [Note: kernels that differ].
_CONTIGUOUS = {
    aten.native_layer_norm_backward.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten.native_batch_norm_backward.default,
    aten.mse_loss_backward.default,
}
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
#: Losses whose mean or sum lies over the memory of all losses.
_REDUCED = {aten.mse_loss.default, aten.smooth_l1_loss.default}
_ANY = {aten.any.default, aten.any.dim, aten._is_any_true.default}
#: Operators and the positions of their tensors that must have one dtype. See [Note: dtypes that differ].
_OF_ONE_DTYPE: dict[Any, tuple[int, ...]] = {
    aten.mm.default: (0, 1),
    aten.bmm.default: (0, 1),
    aten.mv.default: (0, 1),
    aten.addmm.default: (0, 1, 2),
    aten.baddbmm.default: (0, 1, 2),
    aten.addmv.default: (0, 1, 2),
    aten.convolution.default: (0, 1, 2),
    aten.index_put.default: (0, 2),
    aten.index_put_.default: (0, 2),
}
_NOT = {aten.logical_not.default, aten.bitwise_not.default}


def _refuse_dtypes(func: Any, args: tuple[Any, ...]) -> None:
    """Raise the error of a run for tensors of different dtypes. See [Note: dtypes that differ]."""
    given = [args[position] for position in _OF_ONE_DTYPE[func] if position < len(args)]
    dtypes = {each.dtype: None for each in given if isinstance(each, torch.Tensor)}
    if len(dtypes) > 1:
        raise RuntimeError(f"{func} needs tensors of one dtype, and got {' and '.join(map(str, dtypes))}")


def _grouped_mm(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    a, b = args[0], args[1]
    offsets: Any = args[2] if len(args) > 2 else kwargs.get("offs")
    if a.dim() == 2 and b.dim() == 2:
        shape: tuple[int, ...] = (offsets.shape[0], a.shape[0], b.shape[1])
    elif a.dim() == 3 and b.dim() == 3:
        shape = (a.shape[0], a.shape[1], b.shape[2])
    else:
        shape = (a.shape[0] if a.dim() == 2 else a.shape[1], b.shape[-1])
    with mode:
        return torch.empty(shape, dtype=kwargs.get("out_dtype") or a.dtype)


def _with_workspace(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator of oneDNN whose workspace only a real run knows. See [Note: kernels that differ]."""
    result = list(_Mode.__torch_dispatch__(mode, func, (), args, kwargs))
    flat, spec = pytree.tree_flatten((args, kwargs))
    if sum(each.nbytes for each in flat if isinstance(each, FakeTensor)) > _SMALL:
        mode.told("aten.mkldnn_rnn_layer", "no bytes for oneDNN's workspace")
        return tuple(result)
    real = run_fallback_kernel(mode, func, flat, spec, UnsupportedOperatorException(func))
    with mode:
        result[-1] = torch.empty(real[-1].shape, dtype=real[-1].dtype)
    return tuple(result)


def _each_its_own(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operator, each with memory of its own; torch's kernel gives one tensor twice."""
    result, seen = [], set()
    for each in _Mode.__torch_dispatch__(mode, func, (), args, kwargs):
        if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata in seen:
            with mode:
                each = torch.empty_like(each)
        if isinstance(each, torch.Tensor):
            seen.add(each.untyped_storage()._cdata)
        result.append(each)
    return tuple(result)


def lengths_of_targets(mode: FakeKernels, targets: torch.Tensor, lengths: Any) -> list[int]:
    """The length of each target of a CTC loss. A tensor without a value counts as the longest that is possible."""
    if not isinstance(lengths, torch.Tensor):
        return list(lengths)
    value = value_of(lengths)
    if value is not None:
        found: list[int] = value.reshape(-1).tolist()
        return found
    longest = targets.shape[1] if targets.dim() > 1 else targets.numel()
    mode.told("the lengths of the targets of a CTC loss", f"the longest has {longest}")
    return [longest] * lengths.numel()


def _ctc_loss(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The losses, and the table of torch's CTC loss, which is as wide as the longest target asks for."""
    log_probs, targets, lengths = args[0], args[1], args[3]
    longest = max(lengths_of_targets(mode, targets, lengths), default=0)
    batch = log_probs.shape[1] if log_probs.dim() > 2 else 1
    with mode:
        return log_probs.new_empty(batch), log_probs.new_empty(batch, log_probs.shape[0], 2 * longest + 1)


def _ctc_loss_backward(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The gradient of the logarithms of the probabilities; torch has no fake kernel for it."""
    with mode:
        return torch.empty_like(args[1], memory_format=torch.contiguous_format)


def _embedding_bag(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The bag of each index has memory for one index more, unless the bags are sums."""
    result = list(_Mode.__torch_dispatch__(mode, func, (), args, kwargs))
    kind = args[4] if len(args) > 4 else kwargs.get("mode", 0)
    if kind != 0 and result[1].numel():
        with mode:
            result[1] = result[1].new_empty(result[1].numel() + 1)[:-1]
    return tuple(result)


def _embedding_bag_backward(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The gradient of the table; torch makes the bag of each index here if the forward has not."""
    if not args[3].numel() and args[1].numel():
        with mode:
            args = (*args[:3], torch.empty_like(args[1]), *args[4:])
    return _Mode.__torch_dispatch__(mode, func, (), args, kwargs)


def _multilabel_margin_loss(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss, without a dimension if the input is one row, and which elements are targets."""
    loss, is_target = _Mode.__torch_dispatch__(mode, func, (), args, kwargs)
    if args[0].dim() > 1 or not loss.dim():
        return loss, is_target
    with mode:
        return loss.new_empty(()), is_target


def _pad2d(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    made: torch.Tensor = _Mode.__torch_dispatch__(mode, func, (), args, kwargs)
    is_channels_last = args[0].dim() == 4 and suggest_memory_format(args[0]) is torch.channels_last
    if not is_channels_last or made.is_contiguous(memory_format=torch.channels_last):
        return made
    with mode:
        return torch.empty_like(made, memory_format=torch.channels_last)


def _pinned(mode: FakeKernels, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """A copy in memory that a device can read; the machine of the prediction may have no such memory."""
    with mode:
        return torch.empty_like(args[0])


_KERNELS: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss.Tensor: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._ctc_loss_backward.Tensor: _ctc_loss_backward,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten.multilabel_margin_loss_forward.default: _multilabel_margin_loss,
    aten.reflection_pad2d.default: _pad2d,
    aten.replication_pad2d.default: _pad2d,
    aten._pin_memory.default: _pinned,
    aten._grouped_mm.default: _grouped_mm,
}
if hasattr(aten, "mkldnn_rnn_layer"):
    _KERNELS[aten.mkldnn_rnn_layer.default] = _with_workspace
    _KERNELS[aten.mkldnn_rnn_layer_backward.default] = _each_its_own
