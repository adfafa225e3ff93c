"""What operators save for backward on CUDA, by formulas, and how to count what autograd really saves.

The same cases run on fake tensors of the CPU (``tests/unit/predict``) and on a GPU (``tests/gpu``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

Forward = Callable[[], torch.Tensor]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
B, H, T, D = 2, 4, 100, 64


def saved_bytes(forward: Forward, weights: Iterable[torch.Tensor] = ()) -> int:
    """Bytes of the storages that ``forward`` saves, each counted once, without those of ``weights``; runs backward."""
    apart = {weight.untyped_storage()._cdata for weight in weights}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in apart:
            storages[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    nbytes = sum(storage.nbytes() for storage in storages.values())
    out.sum().backward()
    return nbytes


class Case(NamedTuple):
    """One forward, with its weights on a device, and the bytes that it saves."""

    make: Callable[[str], tuple[Forward, list[torch.Tensor]]]
    nbytes: int
    backend: str | None = None  # of attention
    is_exact: bool = True  # False where cuDNN does not say how many bytes it needs


def _tensor(*shape: int, dtype: torch.dtype = FP32, device: str) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=device).requires_grad_()


def _attention(
    dtype: torch.dtype, *, heads: int = H, head: int = D, mask: str = "", key_heads: int | None = None, **kwargs: object
) -> Callable[[str], tuple[Forward, list[torch.Tensor]]]:
    def make(device: str) -> tuple[Forward, list[torch.Tensor]]:
        query = _tensor(B, heads, T, head, dtype=dtype, device=device)
        key, value = (_tensor(B, key_heads or heads, T, head, dtype=dtype, device=device) for _ in range(2))
        read = {
            "": None,
            "bool": torch.ones(T, T, dtype=torch.bool, device=device),
            "aligned": torch.zeros(T, T + 4, dtype=dtype, device=device)[:, :T],
        }[mask]
        return lambda: F.scaled_dot_product_attention(query, key, value, read, **kwargs), []

    return make


def _module(
    build: Callable[[], nn.Module],
    *shape: int,
    dtype: torch.dtype = FP32,
    memory_format: torch.memory_format = torch.contiguous_format,
) -> Callable[[str], tuple[Forward, list[torch.Tensor]]]:
    def make(device: str) -> tuple[Forward, list[torch.Tensor]]:
        with torch.device(device):
            module = build()
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        tensor = tensor.to(memory_format=memory_format).requires_grad_()

        def forward() -> torch.Tensor:
            out = module(tensor)
            return out if isinstance(out, torch.Tensor) else out[0]

        return forward, [*module.parameters(), *module.buffers()]

    return make


def _function(
    function: Callable[[torch.Tensor], torch.Tensor], *shape: int, dtype: torch.dtype = FP32
) -> Callable[[str], tuple[Forward, list[torch.Tensor]]]:
    def make(device: str) -> tuple[Forward, list[torch.Tensor]]:
        tensor = _tensor(*shape, dtype=dtype, device=device)
        return lambda: function(tensor), []

    return make


def _embedding_bag(mode: str) -> Callable[[str], tuple[Forward, list[torch.Tensor]]]:
    def make(device: str) -> tuple[Forward, list[torch.Tensor]]:
        module = nn.EmbeddingBag(50, 6, mode=mode, device=device)
        indices, offsets = (torch.zeros(size, dtype=torch.long, device=device) for size in (20, 5))
        return lambda: module(indices, offsets), list(module.parameters())

    return make


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, dropout=0.5, batch_first=True)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.attention(tensor, tensor, tensor, need_weights=False)[0]


FLASH_STATE, OTHER_STATE = 24, 16
LOGSUMEXP, ROUNDED = B * H * T * 4, B * H * 128 * 4
QKVO = 4 * B * H * T * D
IMAGE = 8 * 16 * 10 * 10
# A layer of width 32 with a hidden width of 64 and 4 heads, for 16 tokens. Efficient attention in float32.
SELF_ATTENTION = 4 * 512 + 3 * 4 * 512 + 4 * 512 + 2 * 4 * 32 * 4 + OTHER_STATE + 4 * 512
ENCODER = SELF_ATTENTION + 512 + (4 * 512 + 128) + 4 * 512 + 4 * 1024 + 1024 + 4 * 1024 + 512 + (4 * 512 + 128)

CASES = {
    "flash bf16": Case(_attention(BF16, is_causal=True), 2 * QKVO + LOGSUMEXP + FLASH_STATE, "flash"),
    "flash fp16 with dropout": Case(_attention(FP16, dropout_p=0.1), 2 * QKVO + LOGSUMEXP + FLASH_STATE, "flash"),
    "flash pads heads of 60 to 64": Case(_attention(BF16, head=60), 2 * QKVO + LOGSUMEXP + FLASH_STATE, "flash"),
    "flash with grouped heads": Case(
        _attention(BF16, key_heads=2, enable_gqa=True),
        2 * (2 * B * H * T * D + 2 * B * 2 * T * D) + LOGSUMEXP + FLASH_STATE,
        "flash",
    ),
    "flash has no float32": Case(_attention(FP32), 4 * QKVO + ROUNDED + OTHER_STATE, "flash"),
    "flash has no mask": Case(_attention(BF16, mask="bool"), 2 * QKVO + ROUNDED + OTHER_STATE + T * 104 * 2, "flash"),
    "efficient bf16": Case(_attention(BF16, is_causal=True), 2 * QKVO + ROUNDED + OTHER_STATE, "efficient"),
    "efficient with an aligned mask": Case(
        _attention(BF16, mask="aligned"), 2 * QKVO + ROUNDED + OTHER_STATE + T * 104 * 2, "efficient"
    ),
    "efficient needs heads of 8": Case(
        _attention(BF16, head=60, is_causal=True), 4 * (3 * B * H * T * 60 + B * H * T * T), "efficient"
    ),
    "cudnn bf16": Case(_attention(BF16, is_causal=True), 2 * QKVO + LOGSUMEXP + OTHER_STATE, "cudnn"),
    "cudnn with a mask": Case(_attention(BF16, mask="bool"), 2 * QKVO + LOGSUMEXP + OTHER_STATE + T * T * 2, "cudnn"),
    # The formula in float32: scaled query and key, softmax, value.
    "math bf16": Case(_attention(BF16), 4 * (3 * B * H * T * D + B * H * T * T), "math"),
    # The softmax, and after dropout its mask of one byte and its output.
    "math with dropout": Case(
        _attention(FP32, dropout_p=0.5), 4 * (3 * B * H * T * D + 2 * B * H * T * T) + B * H * T * T, "math"
    ),
    "math with grouped heads and a mask": Case(
        _attention(BF16, heads=8, mask="bool", key_heads=2, enable_gqa=True),
        4 * (3 * B * 8 * T * D + B * 8 * T * T),
        "efficient",
    ),
    "dropout": Case(_function(lambda x: F.dropout(x, 0.3), 40, 50), 40 * 50),
    "dropout of everything": Case(_function(lambda x: F.dropout(x, 1.0), 40, 50), 4),
    "feature dropout": Case(_function(lambda x: F.dropout2d(x, 0.3), 4, 5, 6, 6), 4 * 4 * 5),
    "batch norm": Case(_module(lambda: nn.BatchNorm2d(16), 8, 16, 10, 10), 4 * IMAGE + 2 * 16 * 4),
    "batch norm 1d": Case(_module(lambda: nn.BatchNorm1d(16), 8, 16), 4 * 8 * 16 + 2 * 16 * 4),
    "batch norm bf16": Case(
        _module(lambda: nn.BatchNorm2d(16, dtype=BF16), 8, 16, 10, 10, dtype=BF16), 2 * IMAGE + 2 * 16 * 4
    ),
    "batch norm fp16 with float32 weights": Case(
        _module(lambda: nn.BatchNorm2d(16), 8, 16, 10, 10, dtype=FP16), 2 * IMAGE + 2 * 16 * 4
    ),
    "batch norm, evaluated": Case(_module(lambda: nn.BatchNorm2d(16).eval(), 8, 16, 10, 10), 4 * IMAGE),
    "batch norm bf16, evaluated": Case(
        _module(lambda: nn.BatchNorm2d(16, dtype=BF16).eval(), 8, 16, 10, 10, dtype=BF16), 2 * IMAGE + 2 * 16 * 4
    ),
    "instance norm": Case(_module(lambda: nn.InstanceNorm2d(16), 8, 16, 10, 10), 4 * IMAGE + 2 * 128 * 4),
    "layer norm bf16": Case(
        _module(lambda: nn.LayerNorm(10, dtype=BF16), 8, 16, 10, 10, dtype=BF16), 2 * IMAGE + 2 * 4 * IMAGE // 10
    ),
    "rms norm": Case(_module(lambda: nn.RMSNorm(10), 8, 16, 10, 10), 4 * IMAGE + 4 * IMAGE // 10),
    "rms norm bf16": Case(
        _module(lambda: nn.RMSNorm(10, dtype=BF16), 8, 16, 10, 10, dtype=BF16), 2 * IMAGE + 4 * IMAGE // 10
    ),
    "group norm": Case(_module(lambda: nn.GroupNorm(4, 16), 8, 16, 10, 10), 4 * IMAGE + 2 * 8 * 4 * 4),
    "group norm bf16": Case(
        _module(lambda: nn.GroupNorm(4, 16, dtype=BF16), 8, 16, 10, 10, dtype=BF16), 2 * IMAGE + 2 * 8 * 4 * 2
    ),
    "group norm, channels last": Case(
        _module(lambda: nn.GroupNorm(4, 16), 8, 16, 10, 10, memory_format=torch.channels_last),
        4 * IMAGE + 2 * 8 * 4 * 4,
    ),
    "LSTMCell": Case(
        _module(lambda: nn.LSTMCell(10, 20), 4, 10),
        # input, the states before, the gates twice, the cell after, the workspace
        4 * 4 * (10 + 20 + 2 * 80 + 20 + 80),
    ),
    "GRUCell": Case(_module(lambda: nn.GRUCell(10, 20), 4, 10), 4 * 4 * (10 + 20 + 2 * 60 + 100)),
    "LSTM": Case(
        _module(lambda: nn.LSTM(10, 20, 2, bidirectional=True), 7, 4, 10),
        4 * (7 * 4 * 10 + 2 * 4 * 4 * 20 + 7 * 4 * 40) + 6 * 4 * 7 * 4 * 4 * 20,
        is_exact=False,
    ),
    "GRU": Case(
        _module(lambda: nn.GRU(10, 20, batch_first=True), 4, 7, 10),
        4 * (7 * 4 * 10 + 4 * 20 + 7 * 4 * 20) + 5 * 4 * 7 * 4 * 20,
        is_exact=False,
    ),
    "softmax fp16 in float32": Case(_function(lambda x: F.softmax(x, -1, dtype=FP32), 40, 50, dtype=FP16), 4 * 2000),
    "log softmax": Case(_function(lambda x: F.log_softmax(x, -1, dtype=FP32), 40, 50, dtype=FP16), 4 * 2000),
    "log sigmoid": Case(_function(F.logsigmoid, 40, 50), 4 * 2000),
    "embedding bag, sum": Case(_embedding_bag("sum"), 8 * (20 + 5 + 20 + 5)),
    "embedding bag, max": Case(_embedding_bag("max"), 8 * (20 + 5 + 20 + 5 + 5 * 6)),
    "multi-head attention": Case(_module(_SelfAttention, 2, 8, 32), SELF_ATTENTION),
    "encoder layer": Case(_module(lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, 8, 32), ENCODER),
}
