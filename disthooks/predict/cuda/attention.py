"""Which backend of attention torch would choose on a GPU, and what it saves for backward.

The table in :mod:`disthooks.predict.cuda.substitutes` says what each backend saves.
"""

# [Note: the choice of a backend]
# torch tries the backends in the order of `sdp_utils.cpp`: flash, efficient, math, cudnn; and cudnn first on compute
# capability 9 and 10 with cuDNN above 9.15.0 (torch 2.13 for CUDA 13 has that). The first one whose conditions hold is
# used. The conditions below are torch's, without those about nested tensors. `torch.nn.attention.sdpa_kernel` and the
# switches `torch.backends.cuda.enable_flash_sdp` etc. hold as on CUDA.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

aten: Any = torch.ops.aten

Backend = Literal["flash", "efficient", "cudnn", "math"]


class Gpu(NamedTuple):
    """What the choice of an operator depends on.

    ``order`` has attention's backends, the first choice first, and ``priority`` is torch's own order when it was made.
    If a script changes that, torch's is used.
    """

    order: tuple[Backend, ...]
    capability: tuple[int, int]
    priority: tuple[int, ...] = ()


_ORDERS: dict[str, tuple[Backend, ...]] = {
    "flash": ("flash", "efficient", "math"),
    "efficient": ("efficient", "math"),
    "cudnn": ("cudnn", "flash", "efficient", "math"),
    "math": ("math",),
}


def attention_order(backend: Backend | None, capability: tuple[int, int]) -> tuple[Backend, ...]:
    """The backends of attention that torch tries, the first choice first; see [Note: the choice of a backend]."""
    if backend is None:
        backend = "cudnn" if capability[0] in (9, 10) else "flash"
    if backend not in _ORDERS:
        raise ValueError(f"attention has the backends {', '.join(map(repr, _ORDERS))}, not {backend!r}")
    return _ORDERS[backend]


class Attention(NamedTuple):
    """The arguments of one call of ``F.scaled_dot_product_attention``; tensors are ``[B, H, T, D]``."""

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


def _has_dtype(call: Attention, *dtypes: torch.dtype) -> bool:
    return call.query.dtype in dtypes and all(tensor.dtype == call.query.dtype for tensor in call.tensors)


def _is_dense(call: Attention, *, supports_groups: bool, same_key_value_heads: bool = True) -> bool:
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


def _is_last_dim_dense(call: Attention, *, ignore_singleton: bool) -> bool:
    is_dense = all(tensor.stride(-1) == 1 for tensor in call.tensors) or (ignore_singleton and call.query.size(-1) == 1)
    return is_dense and (call.mask is None or call.mask.stride(-1) == 1)


def _can_flash(call: Attention, gpu: Gpu) -> bool:
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


def _can_efficient(call: Attention, gpu: Gpu) -> bool:
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


def _can_cudnn(call: Attention, gpu: Gpu) -> bool:
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


def _is_cudnn_mask(call: Attention) -> bool:
    mask = call.mask
    if mask is None:
        return True
    if mask.requires_grad or mask.dim() not in (2, 4):
        return False
    wanted = (call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))[-mask.dim() :]
    return all(size in (1, want) for size, want in zip(mask.shape, wanted, strict=True))


_NUMBERS: dict[int, Backend] = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}


def torch_priority() -> tuple[int, ...]:
    """The order in which torch tries the backends, which ``sdpa_kernel(..., set_priority=True)`` changes."""
    return tuple(torch._C._get_sdp_priority_order())


def choose_backend(call: Attention, gpu: Gpu) -> Backend:
    can = {"flash": _can_flash, "efficient": _can_efficient, "cudnn": _can_cudnn}
    now = torch_priority() if gpu.priority else ()
    order = gpu.order if now == gpu.priority else tuple(_NUMBERS[each] for each in now if each in _NUMBERS)
    for backend in order:
        if _is_enabled("math") if backend == "math" else can[backend](call, gpu):
            return backend
    raise RuntimeError("No available kernel for scaled_dot_product_attention: the math backend has been disabled")


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A boolean ``mask`` as zeros and -inf of ``dtype``; any other mask as it is."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.full((), -math.inf, dtype=dtype, device=mask.device))


def _flash(call: Attention) -> torch.Tensor:
    head = call.query.size(-1)
    padded = [F.pad(tensor, (0, -head % 8)) if head % 8 else tensor for tensor in call.tensors]
    scale = 1 / math.sqrt(head) if call.scale is None else call.scale
    out: torch.Tensor = aten._scaled_dot_product_flash_attention(
        *padded, call.dropout, call.is_causal, False, scale=scale
    )[0]
    return out[..., :head] if head % 8 else out


def _efficient(call: Attention) -> torch.Tensor:
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


def _cudnn(call: Attention) -> torch.Tensor:
    mask = _additive(call.mask, call.query.dtype)
    out: torch.Tensor = aten._scaled_dot_product_cudnn_attention(
        *call.tensors, mask, call.needs_grad, call.dropout, call.is_causal, False, scale=call.scale
    )[0]
    return out


def _math(call: Attention) -> torch.Tensor:
    mask = _additive(call.mask, call.query.dtype)
    arguments = (*call.tensors, mask, call.dropout, call.is_causal)
    out: torch.Tensor = aten._scaled_dot_product_attention_math(
        *arguments, scale=call.scale, enable_gqa=call.is_grouped
    )[0]
    return out


_BACKENDS: dict[Backend, Callable[[Attention], torch.Tensor]] = {
    "flash": _flash,
    "efficient": _efficient,
    "cudnn": _cudnn,
    "math": _math,
}


def attention(
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
    call = Attention(query, key, value, mask, dropout, is_causal, scale, enable_gqa)
    return _BACKENDS[choose_backend(call, gpu)](call)
