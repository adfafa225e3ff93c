"""Models that the tests of the command line name with ``--model``, each by a function without arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from disthooks.saved.codecs import Codec
from tests.support.models import Tiny, tokens


def whole() -> tuple[nn.Module, torch.Tensor]:
    return Tiny(), tokens()


def alone() -> nn.Module:
    return Tiny()


def small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)), torch.ones(5, 3)


def named() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Tiny(), {"tokens": tokens()}


def wrapped() -> tuple[nn.Module, torch.Tensor]:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Tiny()
    model.blocks[0] = checkpoint_wrapper(model.blocks[0])
    return model, tokens()


class Hidden(Tiny):
    """Checkpoints its blocks in a forward of its own, as older models do."""

    gradient_checkpointing = True

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.norm(x)


def hidden() -> tuple[nn.Module, torch.Tensor]:
    return Hidden(), tokens()


def llama() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    model.gradient_checkpointing_enable()
    model.train()
    return model, {"input_ids": tokens(), "labels": tokens()}


def compiled() -> nn.Module:
    return torch.compile(Tiny())


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def raising() -> nn.Module:
    raise KeyError("no such size")


def number() -> int:
    return 3


@dataclass(frozen=True)
class Careless(Codec):
    """Says that it loses nothing."""

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        return (tensor.half(),), tensor.dtype

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        return tensors[0].to(spec)


@dataclass(frozen=True)
class Endless(Careless):
    """Says that it loses something, and loses all of it."""

    lossy = True

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: Any) -> torch.Tensor:
        return torch.full_like(tensors[0], torch.inf).to(spec)
