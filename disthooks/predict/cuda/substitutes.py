"""Fake tensors of the CPU that save for backward what an NVIDIA GPU's operators would save.

=======================  ============================================================================================
operator                 what it does on CUDA, and what it saves
=======================  ============================================================================================
attention                by the backend that torch would choose: query, key, value, output, and

                         - flash: logsumexp float32 ``[B, H, T]``, 24 bytes of random state
                         - efficient: logsumexp float32 ``[B, H, T rounded up to 32]``, 16 bytes, the mask as it is
                           read: of the query's dtype, its rows padded to 8 elements
                         - cudnn: logsumexp float32 ``[B, H, T, 1]``, 16 bytes, the mask of the query's dtype
                         - math: what the operators of the formula save
dropout                  ``native_dropout``: a mask of one byte an element
batch, instance norm     ``cudnn_batch_norm`` or ``native_batch_norm``: the input, two float32 a channel
SyncBatchNorm            the same, and an int32 a rank
layer norm               the input, mean and reciprocal deviation in float32
group norm               the same, in the weight's dtype if it is not the input's; a channels-last input is copied
rms norm                 ``_fused_rms_norm``: the input, a float32 a row
LSTM, GRU, RNN           ``_cudnn_rnn``: input, output, states, weights, and a reserve
LSTMCell, GRUCell        ``_thnn_fused_lstm_cell``, ``_thnn_fused_gru_cell``: gates, states, a workspace
softmax, log_softmax     of float16 with ``dtype=torch.float32``: without a float32 copy of the input
embedding_bag            the bag of each index, the size of each bag
logsigmoid               the input alone
reflection pad, ...      the same bytes; the outputs of ``reflection_pad2d``, ``replication_pad2d`` and
                         ``pixel_shuffle`` are never channels last
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

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, is_fake
from torch.utils._python_dispatch import TorchDispatchMode

from disthooks.predict.cuda.attention import Backend, Gpu, attention, attention_order, torch_priority
from disthooks.predict.cuda.overrides import Kernel, Overrides, Replacements, has_kernel, has_operator, original
from disthooks.predict.fake.queries import DEVICE_OF, device_of

aten: Any = torch.ops.aten

#: Elements of cuDNN's reserve for each element of the hidden state, layer, direction and step: an estimate, from what
#: backward needs. LSTM: four gates, the cell's state, its output; GRU: three gates, a product, its output.
RNN_RESERVE = {0: 2, 1: 2, 2: 6, 3: 5}
_RELU, _TANH, _LSTM, _GRU = range(4)  # cuDNN's numbers


@contextlib.contextmanager
def as_on_cuda(backend: Backend | None = None, *, capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    """Let fake tensors of the CPU save for backward what CUDA's operators would save, in this thread.

    Open it inside the ``FakeTensorMode``, and a mode that records operators inside of it. Backward has to run inside,
    too. Real tensors and other threads are not affected.
    """
    gpu = Gpu(attention_order(backend, capability), capability, torch_priority())
    with _overrides.active(gpu), _modules.active(gpu), _CudaOutputs():  # type: ignore[no-untyped-call]
        yield


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


# --- batch norm over all ranks ---


class SyncBatchNorm(torch.autograd.Function):
    """Saves what the function behind ``nn.SyncBatchNorm`` saves. torch's own has no fake kernels and reads data."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, weight: Any, bias: Any, world: int) -> torch.Tensor:
        is_kept = tensor.is_contiguous() or _format(tensor) != torch.contiguous_format
        tensor = tensor if is_kept else tensor.contiguous()
        mean = tensor.new_empty(tensor.size(1), dtype=_accumulated(tensor.dtype))
        counts = tensor.new_empty((world, 1), dtype=torch.int32)
        ctx.save_for_backward(tensor, weight, mean, torch.empty_like(mean), counts)
        return torch.empty_like(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        tensor, weight, *_ = ctx.saved_tensors
        parameter = None if weight is None else torch.empty_like(weight)
        return torch.empty_like(tensor), parameter, None if weight is None else torch.empty_like(weight), None


def _sync_batch_norm(before: Any, module: torch.nn.SyncBatchNorm, tensor: torch.Tensor) -> Any:
    distributed = torch.distributed
    is_initialized = distributed.is_available() and distributed.is_initialized()
    world = distributed.get_world_size(module.process_group) if is_initialized else 1
    if world == 1 or not module.training or not is_fake(tensor):
        return before(module, tensor)
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
    return SyncBatchNorm.apply(tensor, module.weight, module.bias, world)  # type: ignore[no-untyped-call]


_modules: Replacements[Gpu] = Replacements(lambda: {(torch.nn.SyncBatchNorm, "forward"): _sync_batch_norm})


# --- above autograd ---


def _if_fake(substitute: Callable[..., Any]) -> Kernel:
    def kernel(gpu: Gpu | None, operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if gpu is None or not is_fake(args[0]):
            return original(operator, *args, **kwargs)
        return substitute(gpu, operator, *args, **kwargs)

    return kernel


_KERNELS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
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
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of(args[0])
        if not all(issubclass(each, FakeTensor) or each is torch.Tensor for each in types):
            return NotImplemented  # the operator of a DTensor: the one on its local tensor comes here, too
        outputs = _OUTPUTS.get(func)
        if outputs is None or not isinstance(args[0], FakeTensor):
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


def _batch_norm_outputs(tensor: torch.Tensor, *args: Any) -> Any:
    # The statistics are there in evaluation, too.
    statistics = tensor.new_empty(tensor.size(1), dtype=_accumulated(tensor.dtype))
    return torch.empty_like(tensor), statistics, torch.empty_like(statistics)


def _cudnn_batch_norm_outputs(
    tensor: torch.Tensor,
    weight: torch.Tensor,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    statistics = weight.new_empty(tensor.size(1) if training else 0)
    reserve = tensor.new_empty(0, dtype=torch.uint8)
    return torch.empty_like(tensor), statistics, torch.empty_like(statistics), reserve


def _pad2d_outputs(tensor: torch.Tensor, padding: Any) -> Any:
    # Never channels last.
    left, right, top, bottom = padding
    return tensor.new_empty((*tensor.shape[:-2], tensor.size(-2) + top + bottom, tensor.size(-1) + left + right))


def _pixel_shuffle_outputs(tensor: torch.Tensor, factor: int) -> Any:
    *batch, channels, height, width = tensor.shape
    return tensor.new_empty((*batch, channels // factor**2, height * factor, width * factor))


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
        "log_sigmoid_forward": lambda tensor: (torch.empty_like(tensor), tensor.new_empty(0)),
        "reflection_pad2d": _pad2d_outputs,
        "replication_pad2d": _pad2d_outputs,
        "pixel_shuffle": _pixel_shuffle_outputs,
        "_embedding_bag": _embedding_bag_outputs,
        "_embedding_bag_forward_only": _embedding_bag_outputs,
        "_cudnn_rnn": _cudnn_rnn_outputs,
        "_cudnn_rnn_backward": _cudnn_rnn_gradients,
        "_thnn_fused_gru_cell": _gru_cell_outputs,
        "_thnn_fused_gru_cell_backward": _gru_cell_gradients,
    }
    return {getattr(aten, name).default: outputs for name, outputs in by_name.items() if has_operator(name)}


_OUTPUTS = _outputs()
