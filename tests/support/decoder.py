"""A small decoder in the shape of Llama, and what a step of it holds: the same measurement for real and fake ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from tests.support.oracle import LivingStorages

HEADS, HEAD = 4, 6


class Attention(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(hidden, HEADS * HEAD, bias=False) for _ in range(3))
        self.o = nn.Linear(HEADS * HEAD, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, HEAD)).transpose(1, 2).contiguous() for each in (self.q, self.k, self.v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.attention = Attention(hidden)
        self.gate, self.up = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        y = self.after(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    """A width of 37 that no number of ranks divides, so that each engine pads in its own way."""

    _tp_plan = {  # noqa: RUF012  (as in transformers)
        "layers.*.attention.q": "colwise",
        "layers.*.attention.k": "colwise",
        "layers.*.attention.v": "colwise",
        "layers.*.attention.o": "rowwise",
        "layers.*.gate": "colwise",
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
    }

    def __init__(self, hidden: int = 37, inner: int = 56, layers: int = 2, words: int = 101) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, hidden)
        self.layers = nn.ModuleList(Layer(hidden, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, words, bias=False)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Live(LivingStorages):
    """The living storages of an engine, on real ranks and in a fake world."""

    def __init__(self) -> None:
        super().__init__()
        self.paused = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it has a storage of the size of the whole and no memory, and runs on local tensors
        result = func(*args, **(kwargs or {}))
        # Under gloo the operator `split` is the first that has gloo's own copy of what a collective sends.
        if not self.paused and func is not torch.ops.aten.split.Tensor:
            tensors = [each for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
            self._see([each for each in tensors if each.device.type != "meta"])
        return result

    def resizing(self) -> Callable[..., Any]:
        """A stand-in for ``UntypedStorage.resize_``, which is no operator."""
        true: Any = torch.UntypedStorage.resize_

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = true(storage, size)
            if storage._cdata in self._sizes:
                self._change(storage._cdata, storage.nbytes())
            return result

        return resize_

    def __iter__(self) -> Iterator[int]:
        yield from (self.bytes, self.peak)
        self.begin()
