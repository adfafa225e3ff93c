"""Fake tensors of the CPU that save for backward what an NVIDIA GPU's operators would save.

=======================  ============================================================================================
operator                 what it does on CUDA, and what it saves
=======================  ============================================================================================
attention                the backend that torch would choose (:func:`as_on_cuda`): query, key, value, output, and

                         - flash: logsumexp float32 ``[B, H, T]``, 24 bytes of random state
                         - efficient: logsumexp float32 ``[B, H, T rounded up to 32]``, 16 bytes, the mask as it is
                           read: of the query's dtype, its rows padded to 8 elements
                         - cudnn: logsumexp float32 ``[B, H, T, 1]``, 16 bytes, the mask of the query's dtype
                         - math: what the operators of the formula save
dropout                  ``native_dropout``: a mask of one byte an element
batch, instance norm     ``cudnn_batch_norm`` or ``native_batch_norm``: the input, two float32 a channel
layer norm               the input, mean and reciprocal deviation in float32
group norm               the same, in the weight's dtype if it is not the input's; a channels-last input is copied
rms norm                 ``_fused_rms_norm``: the input, a float32 a row
LSTM, GRU, RNN           ``_cudnn_rnn``: input, output, states, weights, and a reserve
LSTMCell, GRUCell        ``_thnn_fused_lstm_cell``, ``_thnn_fused_gru_cell``: gates, states, a workspace
softmax, log_softmax     of float16 with ``dtype=torch.float32``: without a float32 copy of the input
embedding_bag            the bag of each index, the size of each bag
=======================  ============================================================================================

What cannot be known from torch's source is counted as follows:

=======================  ============================================================================================
the reserve of an RNN    cuDNN does not say how many bytes it is. An estimate from what backward needs:
                         :data:`RNN_RESERVE` elements for each element of the hidden state, layer, direction and step
its dropout state        0: one buffer for each device, which all modules share
the reserve of           0: cuDNN has one for channels-last inputs only, and it is small
batch norm
ctc_loss                 as on the CPU. cuDNN's is used for int32 targets on the CPU with blank 0
packed sequences         as on the CPU: their batch sizes are data
convolutions             as on the CPU: the same bytes. cuDNN may choose another memory format for the output
a custom operator        what its own fake kernel says
=======================  ============================================================================================

All other operators save on CUDA what they save on the CPU.
"""

# [Note: above and below autograd]
# An operator saves what its formula in autograd names: inputs and outputs. If CUDA runs *another* operator, it must be
# exchanged above autograd: kernels at the dispatch key AutogradCPU do that (`_KERNELS`). If CUDA runs the *same*
# operator, and its outputs have other shapes or dtypes, only the outputs must be made as CUDA makes them, below
# autograd: `_CudaOutputs` does that, between autograd and the fake tensors.
#
# [Note: the fused rms norm]
# `_fused_rms_norm` has a formula in autograd, but torch uses it only for backends that have a kernel. The CPU has none:
# there it is composed of other operators. So the call goes to the key AutogradCUDA; a build without CUDA gets an empty
# kernel at CUDA for that time, which nothing ever runs, because the Python key comes before it.
#
# [Note: the choice of a backend]
# torch tries the backends in the order of `sdp_utils.cpp`: flash, efficient, math, cudnn; and cudnn first on compute
# capability 9 and 10 with cuDNN above 9.15.0 (torch 2.13 for CUDA 13 has that). The first one whose conditions hold is
# used. The conditions below are torch's, without those about nested tensors. `torch.nn.attention.sdpa_kernel` and the
# switches `torch.backends.cuda.enable_flash_sdp` etc. hold as on CUDA.

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import is_fake
from torch.utils._python_dispatch import TorchDispatchMode

from disthooks.explain.overrides import Kernel, Overrides, has_kernel, has_operator, original

aten: Any = torch.ops.aten

Backend = Literal["flash", "efficient", "cudnn", "math"]

#: Elements of cuDNN's reserve for each element of the hidden state, layer, direction and step: an estimate, from what
#: backward needs. LSTM: four gates, the cell's state, its output; GRU: three gates, a product, its output.
RNN_RESERVE = {0: 2, 1: 2, 2: 6, 3: 5}
_RELU, _TANH, _LSTM, _GRU = range(4)  # cuDNN's numbers


class Gpu(NamedTuple):
    """What the choice of an operator depends on.

    Attributes:
        order: attention's backends, the first choice first.
        capability: the GPU's compute capability, such as ``(9, 0)``.
    """

    order: tuple[Backend, ...]
    capability: tuple[int, int]


_ORDERS: dict[str, tuple[Backend, ...]] = {
    "flash": ("flash", "efficient", "math"),
    "efficient": ("efficient", "math"),
    "cudnn": ("cudnn", "flash", "efficient", "math"),
    "math": ("math",),
}


def attention_order(backend: Backend | None, capability: tuple[int, int]) -> tuple[Backend, ...]:
    """The backends of attention that torch tries, the first choice first; see [Note: the choice of a backend].

    Args:
        backend: the one to try first, and after it those that torch falls back to. None is torch's default.
        capability: the GPU's compute capability.

    >>> attention_order(None, (8, 0))
    ('flash', 'efficient', 'math')
    >>> attention_order(None, (9, 0))
    ('cudnn', 'flash', 'efficient', 'math')
    >>> attention_order("efficient", (9, 0))
    ('efficient', 'math')
    """
    if backend is None:
        backend = "cudnn" if capability[0] in (9, 10) else "flash"
    if backend not in _ORDERS:
        raise ValueError(f"attention has the backends {', '.join(map(repr, _ORDERS))}, not {backend!r}")
    return _ORDERS[backend]


@contextlib.contextmanager
def as_on_cuda(backend: Backend | None = None, *, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Let fake tensors of the CPU save for backward what CUDA's operators would save, in this thread.

    Open it inside the ``FakeTensorMode``, and a mode that records operators inside of it. Backward has to run inside,
    too. Real tensors and other threads are not affected.

    Args:
        backend: the backend of attention to try first; None is torch's default for ``capability``.
        capability: the GPU's compute capability: ``(8, 0)`` for an A100, ``(9, 0)`` for an H100 or H200.

    Raises:
        ValueError: if there is no such backend.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with FakeTensorMode(), as_on_cuda("flash"):
    ...     q = torch.ones(1, 2, 16, 8, dtype=torch.bfloat16, requires_grad=True)
    ...     out = torch.nn.functional.scaled_dot_product_attention(q, q, q)
    ...     type(out.grad_fn).__name__, out.grad_fn._saved_logsumexp.nbytes
    ('ScaledDotProductFlashAttentionBackward0', 128)
    """
    gpu = Gpu(attention_order(backend, capability), capability)
    with _overrides.active(gpu), _CudaOutputs():  # type: ignore[no-untyped-call]
        yield


# --- attention ---


class _Attention(NamedTuple):
    """The arguments of one call."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    is_grouped: bool

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key, self.value

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)


def _is_enabled(backend: str) -> bool:
    return bool(getattr(torch.backends.cuda, f"{backend}_sdp_enabled")())


def _has_dtype(call: _Attention, *dtypes: torch.dtype) -> bool:
    return call.query.dtype in dtypes and all(tensor.dtype == call.query.dtype for tensor in call.tensors)


def _is_dense(call: _Attention, *, supports_groups: bool, same_key_value_heads: bool = True) -> bool:
    """Whether batch sizes, heads and lengths are what every fused backend needs."""
    query, key, value = call.tensors
    if any(tensor.dim() != 4 for tensor in call.tensors) or not query.size(0) == key.size(0) == value.size(0):
        return False
    if query.size(-2) == 0 or key.size(-2) == 0:
        return False
    heads, key_heads, value_heads = query.size(1), key.size(1), value.size(1)
    if not (call.is_grouped and supports_groups):
        return heads == key_heads == value_heads
    if same_key_value_heads and key_heads != value_heads:
        return False
    return heads % key_heads == 0 and heads % value_heads == 0


def _is_last_dim_dense(call: _Attention, *, ignore_singleton: bool) -> bool:
    is_dense = all(tensor.stride(-1) == 1 for tensor in call.tensors) or (ignore_singleton and call.query.size(-1) == 1)
    return is_dense and (call.mask is None or call.mask.stride(-1) == 1)


def _can_flash(call: _Attention, gpu: Gpu) -> bool:
    query, key, value = call.tensors
    if not _is_enabled("flash") or call.mask is not None or gpu.capability < (8, 0):
        return False
    if not _is_dense(call, supports_groups=True) or not _is_last_dim_dense(call, ignore_singleton=True):
        return False
    head = query.size(-1)
    if head > 256 or key.size(-1) != head or value.size(-1) != head:
        return False
    is_small = (8, 6) <= gpu.capability <= (8, 9) or (12, 0) <= gpu.capability <= (12, 1)
    if is_small and call.needs_grad and head > 192 and (call.dropout > 0 or head <= 224):
        return False
    if call.is_causal and query.size(-2) != key.size(-2):
        return False
    return _has_dtype(call, torch.float16, torch.bfloat16)


def _can_efficient(call: _Attention, gpu: Gpu) -> bool:
    if not _is_enabled("mem_efficient") or gpu.capability < (5, 0):
        return False
    if not _is_dense(call, supports_groups=False) or not _is_last_dim_dense(call, ignore_singleton=False):
        return False
    head, value_head = call.query.size(-1), call.value.size(-1)
    alignment = _gemm_alignment(call.query.dtype, gpu)
    if head != call.key.size(-1) or head == 0 or head % alignment or value_head == 0 or value_head % alignment:
        return False
    if gpu.capability < (8, 0):
        return _has_dtype(call, torch.float16, torch.float32)
    return _has_dtype(call, torch.float16, torch.float32, torch.bfloat16)


def _gemm_alignment(dtype: torch.dtype, gpu: Gpu) -> int:
    is_half = dtype in (torch.float16, torch.bfloat16)
    alignment = 4 if gpu.capability >= (8, 0) else 1
    has_tensor_cores = gpu.capability >= (8, 0) or (gpu.capability >= (7, 0) and is_half)
    return max(alignment, 128 // (16 if is_half else 32)) if has_tensor_cores else alignment


def _can_cudnn(call: _Attention, gpu: Gpu) -> bool:
    if not _is_enabled("cudnn") or gpu.capability < (8, 0):
        return False
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        return False
    if not _is_dense(call, supports_groups=True, same_key_value_heads=False):
        return False
    if not _is_last_dim_dense(call, ignore_singleton=True) or not _is_cudnn_mask(call):
        return False
    if call.dropout * 16 != math.floor(call.dropout * 16) or (call.dropout and call.query.size(2) == 1):
        return False
    head, value_head = call.query.size(-1), call.value.size(-1)
    limit = 192 if gpu.capability[0] in (9, 10) and (head, value_head) == (192, 128) else 128
    if head > limit or value_head > limit or head % 8 or value_head % 8 or call.key.size(2) == 1:
        return False
    return max(call.query.shape[:2]) <= 65535 and _has_dtype(call, torch.float16, torch.bfloat16)


def _is_cudnn_mask(call: _Attention) -> bool:
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))[-mask.dim() :]
    return all(size in (1, want) for size, want in zip(mask.shape, wanted, strict=True))


def choose_backend(call: _Attention, gpu: Gpu) -> Backend:
    """The backend of ``gpu.order`` that torch would use for ``call``."""
    can = {"flash": _can_flash, "efficient": _can_efficient, "cudnn": _can_cudnn}
    for backend in gpu.order:
        if _is_enabled("math") if backend == "math" else can[backend](call, gpu):
            return backend
    raise RuntimeError("No available kernel for scaled_dot_product_attention: the math backend has been disabled")


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean ``mask`` as zeros and -inf of ``dtype``; any other mask as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -math.inf, dtype=dtype, device=mask.device))


def _flash(call: _Attention) -> torch.Tensor:
    head = call.query.size(-1)
    padded = [F.pad(tensor, (0, -head % 8)) if head % 8 else tensor for tensor in call.tensors]
    scale = 1 / math.sqrt(head) if call.scale is None else call.scale
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        *padded, call.dropout, call.is_causal, False, scale=scale
    )[0]
    return out[..., :head] if head % 8 else out


def _efficient(call: _Attention) -> torch.Tensor:
    mask = _additive(call.mask, call.query.dtype)
    if mask is not None:
        is_aligned = mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])
        if not is_aligned:
            last = mask.size(-1)
            mask = F.pad(mask, (0, 8 - last % 8))[..., :last]
        mask = mask.expand(*call.query.shape[:3], call.key.size(2))
    out: torch.Tensor = aten._scaled_dot_product_efficient_attention(
        *call.tensors, mask, call.needs_grad, call.dropout, call.is_causal, scale=call.scale
    )[0]
    return out


def _cudnn(call: _Attention) -> torch.Tensor:
    mask = _additive(call.mask, call.query.dtype)
    out: torch.Tensor = aten._scaled_dot_product_cudnn_attention(
        *call.tensors, mask, call.needs_grad, call.dropout, call.is_causal, False, scale=call.scale
    )[0]
    return out


def _math(call: _Attention) -> torch.Tensor:
    mask = _additive(call.mask, call.query.dtype)
    arguments = (*call.tensors, mask, call.dropout, call.is_causal)
    out: torch.Tensor = aten._scaled_dot_product_attention_math(
        *arguments, scale=call.scale, enable_gqa=call.is_grouped
    )[0]
    return out


_BACKENDS: dict[Backend, Callable[[_Attention], torch.Tensor]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "math": _math,
}


def _attention(
    gpu: Gpu,
    operator: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    mask, dropout = attn_mask if mask is None else mask, dropout or dropout_p
    call = _Attention(query, key, value, mask, dropout, is_causal, scale, enable_gqa)
    return _BACKENDS[choose_backend(call, gpu)](call)


# --- norms, dropout, softmax ---


def _dropout(gpu: Gpu, operator: Any, tensor: torch.Tensor, p: float, train: bool) -> Any:
    if train and 0 < p < 1 and tensor.numel() > 0:
        return torch.native_dropout(tensor, p, train)[0]
    return original(operator, tensor, p, train)


def _batch_norm(
    gpu: Gpu,
    operator: Any,
    tensor: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    variance: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    is_cudnn = (
        weight is not None
        and bias is not None
        and tensor.dim() >= 3
        and 0 < tensor.numel() < 2**31 - 1
        and torch.bfloat16 not in (tensor.dtype, weight.dtype)
        and (tensor.dtype != torch.float16 or weight.dtype == torch.float32)
        and ((mean is not None and variance is not None) or (mean is None and variance is None and training))
        and tensor.size(0) <= (880801 if training else 65535)
        and torch.backends.cudnn.enabled
    )
    if not is_cudnn:
        return original(operator, tensor, weight, bias, mean, variance, training, momentum, eps, cudnn_enabled)
    tensor = tensor.contiguous(memory_format=_format(tensor))
    return aten.cudnn_batch_norm(tensor, weight, bias, mean, variance, training, momentum, eps)[0]


def _format(tensor: torch.Tensor) -> torch.memory_format:
    for dimensions, memory_format in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if tensor.dim() == dimensions and tensor.is_contiguous(memory_format=memory_format):
            return torch.contiguous_format if tensor.is_contiguous() else memory_format
    return torch.contiguous_format


def _group_norm(
    gpu: Gpu,
    operator: Any,
    tensor: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    return original(operator, tensor.contiguous(), groups, weight, bias, eps, cudnn_enabled)


def _fused_rms_norm(
    gpu: Gpu, operator: Any, tensor: torch.Tensor, shape: Any, weight: torch.Tensor | None, eps: float | None
) -> Any:
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutogradCUDA)
    return operator.redispatch(keys | torch._C.DispatchKeySet(torch._C.DispatchKey.Python), tensor, shape, weight, eps)


def _softmax(gpu: Gpu, operator: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
    if tensor.dtype != torch.float16 or dtype != torch.float32:
        return original(operator, tensor, dim, dtype)
    fused = aten._log_softmax if operator is aten.log_softmax.int else aten._softmax
    return fused(tensor, dim, True)


# --- recurrent modules ---


def _rnn(mode: int) -> Callable[..., Any]:
    def rnn(
        gpu: Gpu,
        operator: Any,
        tensor: torch.Tensor,
        hidden: Any,
        weights: list[torch.Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        if not torch.backends.cudnn.enabled or tensor.numel() == 0:
            return original(
                operator, tensor, hidden, weights, has_biases, layers, dropout, train, bidirectional, batch_first
            )
        state, cell = hidden if mode == _LSTM else (hidden, None)
        size = (state if cell is None else cell).size(2)
        projected = 0 if cell is None or state.size(2) == size else state.size(2)
        each = (4 if has_biases else 2) + bool(projected)
        out = aten._cudnn_rnn(
            tensor, weights, each, None, state, cell, mode, size, projected, layers, batch_first, dropout, train,
            bidirectional, [], None,
        )  # fmt: skip
        return out[:3] if mode == _LSTM else out[:2]

    return rnn


def _lstm_cell(
    gpu: Gpu,
    operator: Any,
    tensor: torch.Tensor,
    hidden: list[torch.Tensor],
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    state, cell = hidden
    return aten._thnn_fused_lstm_cell(tensor @ w_ih.t(), state @ w_hh.t(), cell, b_ih, b_hh)[:2]


def _gru_cell(
    gpu: Gpu,
    operator: Any,
    tensor: torch.Tensor,
    state: torch.Tensor,
    w_ih: torch.Tensor,
    w_hh: torch.Tensor,
    b_ih: torch.Tensor | None = None,
    b_hh: torch.Tensor | None = None,
) -> Any:
    return aten._thnn_fused_gru_cell(tensor @ w_ih.t(), state @ w_hh.t(), state, b_ih, b_hh)[0]


# --- above autograd ---


def _if_fake(substitute: Callable[..., Any]) -> Kernel:
    def kernel(gpu: Gpu | None, operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if gpu is None or not is_fake(args[0]):
            return original(operator, *args, **kwargs)
        return substitute(gpu, operator, *args, **kwargs)

    return kernel


_KERNELS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": _attention,
    "dropout": _dropout,
    "batch_norm": _batch_norm,
    "group_norm": _group_norm,
    "_fused_rms_norm": _fused_rms_norm,
    "softmax.int": _softmax,
    "log_softmax.int": _softmax,
    "lstm.input": _rnn(_LSTM),
    "gru.input": _rnn(_GRU),
    "rnn_tanh.input": _rnn(_TANH),
    "rnn_relu.input": _rnn(_RELU),
    "lstm_cell": _lstm_cell,
    "gru_cell": _gru_cell,
}


def _kernels() -> Mapping[str, Kernel]:
    return {name: _if_fake(function) for name, function in _KERNELS.items() if has_operator(name)}


def _empty_kernels() -> Mapping[tuple[str, str], Callable[..., Any]]:
    """See [Note: the fused rms norm]."""

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a kernel that stands for CUDA's has been called")

    name = "_fused_rms_norm"
    return {(name, "CUDA"): never} if has_operator(name) and not has_kernel(name, "CUDA") else {}


_overrides: Overrides[Gpu] = Overrides("AutogradCPU", _kernels, _empty_kernels)


# --- below autograd ---


class _CudaOutputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes the outputs of some operators as CUDA makes them; see [Note: above and below autograd]."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        outputs = _OUTPUTS.get(func)
        if outputs is None or not is_fake(args[0]):
            return func(*args, **(kwargs or {}))
        return outputs(*args, **(kwargs or {}))


def _accumulated(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _layer_norm_outputs(tensor: torch.Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    statistics = tensor.shape[: tensor.dim() - len(shape)] + (1,) * len(shape)
    mean = tensor.new_empty(statistics, dtype=_accumulated(tensor.dtype))
    return tensor.new_empty(tensor.shape), mean, torch.empty_like(mean)


def _rms_norm_outputs(tensor: torch.Tensor, shape: Any, weight: Any, eps: float | None) -> Any:
    out, rstd, _ = _layer_norm_outputs(tensor, shape, weight, None, 0.0)
    return out, rstd


def _group_norm_outputs(
    tensor: torch.Tensor, weight: Any, bias: Any, batch: int, channels: int, inner: int, groups: int, eps: float
) -> Any:
    parameter = weight if weight is not None else bias
    dtype = tensor.dtype if parameter is None else parameter.dtype
    mean = tensor.new_empty((batch, groups), dtype=dtype)
    return torch.empty_like(tensor), mean, torch.empty_like(mean)


def _batch_norm_outputs(
    tensor: torch.Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    size = tensor.size(1) if training else 0
    statistics = tensor.new_empty(size, dtype=_accumulated(tensor.dtype))
    return torch.empty_like(tensor), statistics, torch.empty_like(statistics)


def _cudnn_batch_norm_outputs(tensor: torch.Tensor, *args: Any) -> Any:
    return *_batch_norm_outputs(tensor, *args), tensor.new_empty(0, dtype=torch.uint8)


def _embedding_bag_outputs(
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> Any:
    bags, maximum = offsets.size(0) - include_last_offset, 2
    return (
        weight.new_empty(bags, weight.size(1)),
        indices.new_empty(indices.size(0)),
        indices.new_empty(offsets.size()),
        indices.new_empty((bags, weight.size(1)) if mode == maximum else 0),
    )


def _cudnn_rnn_outputs(
    tensor: torch.Tensor,
    weights: Any,
    each: int,
    buffer: Any,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    mode: int,
    hidden: int,
    projected: int,
    layers: int,
    batch_first: bool,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_sizes: Any,
    dropout_state: Any,
) -> Any:
    directions = 2 if bidirectional else 1
    out = tensor.new_empty((*tensor.shape[:2], directions * (projected or hidden)))
    reserve = RNN_RESERVE[mode] * tensor.size(0) * tensor.size(1) * layers * directions * hidden * tensor.element_size()
    return (
        out,
        tensor.new_empty(state.shape),
        tensor.new_empty(0 if cell is None else cell.shape),
        tensor.new_empty(reserve if train else 0, dtype=torch.uint8),
        tensor.new_empty(0),  # the weights themselves are its views
    )


def _cudnn_rnn_gradients(
    tensor: torch.Tensor,
    weights: Any,
    each: int,
    buffer: Any,
    state: torch.Tensor,
    cell: torch.Tensor | None,
    *args: Any,
) -> Any:
    mask = args[-1]
    return (
        torch.empty_like(tensor) if mask[0] else None,
        torch.empty_like(state) if mask[1] else None,
        torch.empty_like(cell) if mask[2] and cell is not None else None,
        [torch.empty_like(weight) for weight in weights] if mask[3] else [],
    )


def _gru_cell_outputs(inputs: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor, *biases: Any) -> Any:
    return state.new_empty(state.shape), state.new_empty(state.size(0), 5 * state.size(1))


def _gru_cell_gradients(grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool) -> Any:
    size = grad.size(1)
    gates = workspace.new_empty(workspace.size(0), 3 * size)
    bias = workspace.new_empty(3 * size)
    both = torch.empty_like(bias) if has_bias else None
    return gates, torch.empty_like(gates), torch.empty_like(grad), bias if has_bias else None, both


def _outputs() -> dict[Any, Callable[..., Any]]:
    by_name: dict[str, Callable[..., Any]] = {
        "native_layer_norm": _layer_norm_outputs,
        "_fused_rms_norm": _rms_norm_outputs,
        "native_group_norm": _group_norm_outputs,
        "native_batch_norm": _batch_norm_outputs,
        "cudnn_batch_norm": _cudnn_batch_norm_outputs,
        "_embedding_bag": _embedding_bag_outputs,
        "_embedding_bag_forward_only": _embedding_bag_outputs,
        "_cudnn_rnn": _cudnn_rnn_outputs,
        "_cudnn_rnn_backward": _cudnn_rnn_gradients,
        "_thnn_fused_gru_cell": _gru_cell_outputs,
        "_thnn_fused_gru_cell_backward": _gru_cell_gradients,
    }
    return {getattr(aten, name).default: outputs for name, outputs in by_name.items() if has_operator(name)}


_OUTPUTS = _outputs()
