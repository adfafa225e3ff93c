"""What is trained in ``gpu.py``: a model, a batch, and how a loss is made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import decoder
import torch
import torch.nn.functional as F
from models import Bottleneck, resnet
from torch import nn

GB = 1e9
#: Blocks of each stage, images and their pixels; "first" is a ResNet-50 that takes seconds on a GPU.
IMAGES: dict[str, tuple[tuple[int, ...], int, int]] = {
    "full": ((3, 8, 36, 3), 256, 224),
    "first": ((3, 4, 6, 3), 32, 224),
    "tiny": ((1, 1), 4, 32),
}


@dataclass
class Workload:
    """A model on its device.

    Attributes:
        forward: the loss of one step.
        blocks: what a checkpoint is put around.
        peaks: bytes of peak memory to reach, by name; a share of nothing's where it is under 2.
        about: its sizes, for the results.
    """

    model: nn.Module
    forward: Callable[[], torch.Tensor]
    blocks: Sequence[nn.Module]
    peaks: dict[str, float]
    about: dict[str, Any]


def image(size: str, device: torch.device, bf16: bool = False, channels_last: bool = False) -> Workload:
    """ResNet-152 at batch 256."""
    torch.manual_seed(0)
    depths, batch, pixels = IMAGES[size]
    model = resnet(depths).to(device)
    x = torch.randn(batch, 3, pixels, pixels, device=device)
    labels = torch.randint(0, 1000, (batch,), device=device)
    if channels_last:
        model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)

    def forward() -> torch.Tensor:
        narrow = torch.autocast(device.type, torch.bfloat16) if bf16 else contextlib.nullcontext()
        with narrow:
            return F.cross_entropy(model(x), labels)

    blocks = [part for part in model.modules() if isinstance(part, Bottleneck)]
    peaks = {f"{n} GB": n * GB for n in (5, 10, 20, 30)}
    about = {"depths": depths, "batch": batch, "pixels": pixels, "autocast": bf16, "channels_last": channels_last}
    return Workload(model, forward, blocks, peaks, about)


def language(size: str, device: torch.device) -> Workload:
    """The decoder, in bfloat16."""
    torch.manual_seed(0)
    config = decoder.SIZES[size]
    model, tokens = decoder.build(config, device, torch.bfloat16)
    about = vars(config) | {"parameters": sum(p.numel() for p in model.parameters()), "dtype": "bfloat16"}
    return Workload(model, lambda: model(tokens), list(model.layers), {"-30%": 0.7, "-50%": 0.5}, about)


#: The most important first.
WORKLOADS: dict[str, Callable[[str, torch.device], Workload]] = {
    "ResNet-152 fp32": image,
    "decoder bf16": language,
    "ResNet-152 bf16 channels_last": lambda size, device: image(size, device, bf16=True, channels_last=True),
    "ResNet-152 bf16": lambda size, device: image(size, device, bf16=True),
    "ResNet-152 fp32 channels_last": lambda size, device: image(size, device, channels_last=True),
}
