"""CUDA's autocast on tensors of the CPU: the same operators cast the same arguments to the same dtypes."""

# [Note: which operators differ]
# torch registers its autocast kernels for both devices in every build, so the names of the operators come from torch:
# those that have a kernel at the key AutocastCUDA and those that have one at AutocastCPU. What a kernel does with its
# arguments cannot be asked for, so the tables below name it, and a test compares them with torch's own lists.
# An operator that both devices treat alike keeps torch's kernel. The others get a kernel of ours at AutocastCPU:
#
#   CUDA alone casts it (exp, pow, sum, softmax, layer_norm, einsum, convolution, ...)    casts as CUDA's does
#   the CPU alone casts it (cat, stack, fft, linalg, pooling, cross_entropy, ...)         casts nothing; the operators
#                                                                                         inside are cast as ever
#   both cast it, to different dtypes (prod, grid_sampler)                                casts as CUDA's does
#   CUDA forbids it (binary_cross_entropy)                                                raises as CUDA's does
#
# A thread that has not asked for CUDA's autocast gets what the CPU's kernel does.
#
# [Note: the copy of a weight]
# In one autocast region a weight is cast once, and all operators share the copy. torch keeps these copies in a table
# that Python cannot read. But an operator of torch's own list, `linalg_vecdot`, looks a weight up there, and casts it
# if it is not there. `_WeightCopy` lets that operator begin, takes the argument that it was given, and stops it. So
# a weight has one copy whether torch's kernels or ours have cast it first, and the copy ends with torch's table.
#
# [Note: autocast of a device that is not there]
# Without CUDA, `torch.autocast("cuda")` warns and casts nothing. Inside `cuda_autocast` it is `torch.autocast("cpu")`
# with CUDA's default dtype. Such a region also sets the state of CUDA's autocast, which torch keeps in every build, so
# that `torch.is_autocast_enabled("cuda")` and `torch.get_autocast_dtype("cuda")` answer a script as they do on CUDA.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.utils._python_dispatch import TorchDispatchMode

from disthooks.predict.cuda.overrides import Kernel, Overrides, Replacements, below, has_kernel

_KEY = torch._C.DispatchKey.AutocastCPU
_CPU, _CUDA = "AutocastCPU", "AutocastCUDA"


def _names_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Operators whose floating-point arguments are cast to autocast's dtype, by CUDA's autocast.
LOWER_PRECISION = _names_of(
    """
    _convolution _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
    conv_transpose3d.input convolution cudnn_convolution cudnn_convolution_transpose prelu addmm addmv addr matmul
    einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot _thnn_fused_lstm_cell
    _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
    """
)
#: Operators that run with ``dtype=torch.float32`` if their caller names no dtype.
FLOAT32_RESULT = _names_of(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm
    linalg_matrix_norm.str_ord sum sum.dim_IntList
    """
)
#: Norms, which run as the overload that takes a dtype.
APPENDED_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
#: Operators whose arguments are all cast to the widest dtype among them.
PROMOTE = _names_of(
    """
    addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add
    """
)
BANNED = "binary_cross_entropy"
#: Builds for CUDA register its kernel apart from the others.
RNN = "_cudnn_rnn"

#: What the CPU's autocast casts to its own dtype, and what it promotes, where CUDA's does not; the rest is float32.
_CPU_LOWER_PRECISION = _names_of(
    "conv1d.padding conv2d.padding conv3d.padding _addmm_activation mkldnn_rnn_layer _native_multi_head_attention"
)
_CPU_PROMOTE = _names_of("stack cat index_copy")


@contextlib.contextmanager
def cuda_autocast() -> Iterator[None]:
    """Let autocast do to tensors of the CPU what it does to tensors of CUDA, in this thread.

    Inside, ``torch.autocast("cuda")`` works on a machine without CUDA, and ``torch.autocast("cpu")`` casts as it does.
    It is made for fake tensors; real tensors of the CPU get CUDA's dtypes, too.
    """
    with _overrides.active(True), _names.active(True):
        yield


# --- what is cast ---


def _is_eligible(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


class _WeightCopy(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Takes the cast copy of a weight from torch's table; see [Note: the copy of a weight]."""

    class Found(Exception):
        """The copy has been found."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtype = dtype
        self.copy: torch.Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        is_cast = func.namespace == "aten" and isinstance(args[0], torch.Tensor) and args[0].dtype == self.dtype
        if not is_cast:
            return func(*args, **(kwargs or {}))  # the cast itself, or a question for the device
        self.copy = args[0]
        raise self.Found


def _weight_copy(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    found = _WeightCopy(dtype)
    if weight.dim() > 0:
        with contextlib.suppress(_WeightCopy.Found), found:
            torch.linalg.vecdot(weight, weight)
    return weight.to(dtype) if found.copy is None else found.copy


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """``value`` with its eligible tensors cast to ``dtype``; lists of tensors are gone through."""
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(each, dtype) for each in value)
    if not _is_eligible(value) or value.dtype == dtype:
        return value
    is_cached = (
        dtype == torch.get_autocast_dtype("cpu")
        and value.dtype == torch.float32
        and value.requires_grad
        and value.is_leaf
        and not value._is_view()
        and torch.is_autocast_cache_enabled()
    )
    return _weight_copy(value, dtype) if is_cached else value.to(dtype)


def _call_cast(operator: Any, dtype: torch.dtype, args: Any, kwargs: Any) -> Any:
    args = [_cast(value, dtype) for value in args]
    kwargs = {name: _cast(value, dtype) for name, value in kwargs.items()}
    with _no_autocast():
        return operator(*args, **kwargs)


def _no_autocast() -> Any:
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY))


def _lower_precision(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_cast(operator, torch.get_autocast_dtype("cpu"), args, kwargs)


def _float32(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return _call_cast(operator, torch.float32, args, kwargs)


def _float32_result(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = _bind(operator, args, kwargs)
    if _is_eligible(args[0]) and arguments.get("dtype") is None:
        arguments["dtype"] = torch.float32
    with _no_autocast():
        return operator(**arguments)


def _bind(operator: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in operator._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _append_dtype(overload: str, operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    arguments = _bind(operator, args, kwargs)
    first = args[0]
    arguments["dtype"] = torch.float32 if _is_eligible(first) else first.dtype
    with _no_autocast():
        return getattr(torch.ops.aten.norm, overload.partition(".")[2])(**arguments)


def _promote(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    lower = torch.get_autocast_dtype("cpu")
    tensors = [each for value in (*args, *kwargs.values()) for each in (value if isinstance(value, list) else [value])]
    is_wide = any(_is_eligible(tensor) and tensor.dtype == torch.float32 for tensor in tensors)
    return _call_cast(operator, torch.float32 if is_wide else lower, args, kwargs)


def _nothing(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return below(operator, keys, _KEY, *args, **kwargs)


def _banned(operator: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError(
        "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast: CUDA's autocast refuses "
        "them. Use torch.nn.functional.binary_cross_entropy_with_logits or torch.nn.BCEWithLogitsLoss, without a "
        "sigmoid before it."
    )


def _rnn(operator: Any, keys: Any, tensor: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
    # CUDA's kernel casts the weights into one new buffer at each call.
    dtype = torch.get_autocast_dtype("cpu")
    weights = [weight.to(dtype) if _is_eligible(weight) else weight for weight in weights]
    return _call_cast(operator, dtype, (tensor, weights, *args), kwargs)


def cuda_policy(name: str) -> Callable[..., Any]:
    if name == RNN:
        return _rnn
    if not has_kernel(name, _CUDA):
        return _nothing
    if name == BANNED:
        return _banned
    if name in APPENDED_DTYPE:
        return functools.partial(_append_dtype, APPENDED_DTYPE[name])
    for names, policy in (
        (LOWER_PRECISION, _lower_precision),
        (FLOAT32_RESULT, _float32_result),
        (PROMOTE, _promote),
    ):
        if name in names:
            return policy
    return _float32


def cpu_policy(name: str) -> Callable[..., Any]:
    if not has_kernel(name, _CPU):
        return _nothing
    if name in _CPU_LOWER_PRECISION or name in LOWER_PRECISION:
        return _lower_precision
    return _promote if name in _CPU_PROMOTE else _float32


@functools.cache  # our own kernels would be among those that it asks for
def differing() -> frozenset[str]:
    """The operators that the two devices' autocasts treat differently. See [Note: which operators differ]."""
    every = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    asked = {name for name in every if has_kernel(name, _CPU) or has_kernel(name, _CUDA) or name == RNN}
    return frozenset(name for name in asked if cuda_policy(name) is not cpu_policy(name))


def _kernel(name: str) -> Kernel:
    cuda, cpu = cuda_policy(name), cpu_policy(name)

    def kernel(is_asked: bool | None, *args: Any, **kwargs: Any) -> Any:
        return (cuda if is_asked else cpu)(*args, **kwargs)

    return kernel


def _kernels() -> Mapping[str, Kernel]:
    return {name: _kernel(name) for name in sorted(differing())}


_overrides: Overrides[bool] = Overrides(_CPU, _kernels)


# --- the name "cuda" ---


# See [Note: autocast of a device that is not there].
def _init(
    before: Any, region: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **kwargs: Any
) -> None:
    if device_type == "cuda":
        device_type, dtype = "cpu", dtype or torch.get_autocast_dtype("cuda")
    before(region, device_type, dtype, *args, **kwargs)


def _enter(before: Any, region: Any) -> Any:
    entered = before(region)
    if region.device == "cpu":
        state = (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"))
        region.__dict__.setdefault("_cuda_state", []).append(state)
        _set_cuda(torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
    return entered


def _exit(before: Any, region: Any, *raised: Any) -> Any:
    if region.device == "cpu" and region.__dict__.get("_cuda_state"):
        _set_cuda(*region._cuda_state.pop())
    return before(region, *raised)


def _set_cuda(enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled("cuda", enabled)
    torch.set_autocast_dtype("cuda", dtype)


def _functions() -> Mapping[tuple[Any, str], Callable[..., Any]]:
    return {
        (torch.autocast, "__init__"): _init,
        (torch.autocast, "__enter__"): _enter,
        (torch.autocast, "__exit__"): _exit,
        # of `torch.amp.custom_fwd`
        (autocast_mode, "_cast"): lambda true, x, kind, dtype: true(x, "cpu" if kind == "cuda" else kind, dtype),
    }


_names: Replacements[bool] = Replacements(_functions)
