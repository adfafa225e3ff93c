"""A document of an explanation in which every key is there, made from a real explanation of a small model."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import torch
from torch import nn

from disthooks import OnCpu, Recompute, explain
from disthooks.saved.pipeline import pipeline


class Block(nn.Module):
    """A block of a small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Small(nn.Module):
    """Six equal blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks, self.head = (
            nn.Embedding(100, 64),
            nn.ModuleList(Block() for _ in range(6)),
            nn.Linear(64, 100),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def small() -> tuple[nn.Module, torch.Tensor]:
    """The model with its inputs, which are large: nothing of it is computed."""
    return Small(), torch.zeros(8192, 128, dtype=torch.long)


def plain_document() -> dict[str, Any]:
    """What ``explain`` gives for a step on the CPU without a plan."""
    return explain(small, device="cpu", optimizer="adamw").to_dict()


def full_document() -> dict[str, Any]:
    """What it gives for a step with a plan on a GPU that is known, with every other key that a document may have."""
    plan = pipeline(Recompute(), OnCpu(), at_least="1 KiB")
    found = explain(small, device="h100", autocast="bf16", optimizer="adamw", plan=plan).to_dict()
    peak = found["plan"]["peak"]["nbytes"]
    found["plan"] |= {"yaml": "saved:\n  - store: {kind: cpu}\n"}
    return found | {
        "what_if": [_half(found)],
        "advice": [
            {"title": "Send the blocks away", "text": "They save most.", "saves": 2**20, "yaml": "saved: [1]\n"}
        ],
        "fits": {
            "limit": peak - peak // 10,
            "nbytes": peak + peak // 20,
            "does_fit": False,
            "batch": {"size": 3, "nbytes": peak // 2, "next_size": 4, "next_nbytes": peak, "text": "3 fit."},
            "seq": {"size": None, "nbytes": 0, "next_size": None, "next_nbytes": None, "text": "It cannot be set."},
            "change": {"title": "Halve it", "text": "Half is enough.", "saves": 2**21, "yaml": "saved: [2]\n"},
        },
        "unknown": [{"what": "apex::norm", "module": "blocks.0", "assumed": "it saves its input"}],
        "not_counted": ["The CUDA context"],
        "warnings": ["The loss is the output."],
    }


def _half(found: dict[str, Any]) -> dict[str, Any]:
    """A plan that keeps half of what is saved."""
    curve, peak = copy.deepcopy(found["curve"]), copy.deepcopy(found["peak"])
    position = 3 + curve["categories"].index("saved for backward")
    for point in curve["points"]:
        point[position] //= 2
    highest = max(curve["points"], key=lambda point: sum(point[3:]))
    peak["nbytes"], peak["range"] = sum(highest[3:]), [sum(highest[3:]) - 100, sum(highest[3:]) + 100]
    peak["categories"] = {name: count for name, count in zip(curve["categories"], highest[3:], strict=True) if count}
    yaml = 'saved:\n  - modules: "blocks.*"\n    store: {kind: cpu}\n'
    return {
        "name": "Half to the host",
        "yaml": yaml,
        "saved": found["saved"] // 2,
        "peak": peak,
        "curve": curve,
        "host": found["saved"] // 2,
    }


def document_of(text: str) -> dict[str, Any]:
    """The document that a page holds."""
    found = re.search(r'<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL)
    if found is None:
        raise ValueError("this text is no page of disthooks: it holds no document")
    document: dict[str, Any] = json.loads(found[1])
    return document
