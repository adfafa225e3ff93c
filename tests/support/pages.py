"""A document of an explanation in which every key is there, made from a real explanation of a small model."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from disthooks import explain


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


def plain_document() -> dict[str, Any]:
    """What ``explain`` gives today."""
    return explain(Small(), torch.zeros(4, 32, dtype=torch.long), device="cpu", optimizer="adamw").to_dict()


def full_document() -> dict[str, Any]:
    """The same, with every key that a document may have."""
    found = plain_document()
    peak = found["peak"]["nbytes"]
    found["peak"]["range"] = [peak - peak // 50, peak + peak // 20]
    found["situation"] |= {"hardware": "H100", "engine": "fsdp2", "world": 8, "rank": 0, "batch": 4, "seq": 32}
    for row in found["modules"]:
        row["flops"] = {"forward": row["whole"] * 1e6, "backward": row["whole"] * 2e6}
        row["seconds"] = {"forward": row["whole"] * 1e-9, "backward": row["whole"] * 2e-9}
    return found | {
        "seconds": {"forward": 0.4, "backward": 0.8, "optimizer": 0.1},
        "plan": {"name": "As it is", "yaml": "saved: []\n", "host": 0},
        "what_if": [_half(found)],
        "advice": [
            {"title": "Send the blocks away", "text": "They save most.", "saves": 2**20, "yaml": "saved: [1]\n"}
        ],
        "answers": [{"question": f"Question {number}?", "answer": "An answer."} for number in range(14)],
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
        "measured": [{"name": "saved bytes", "predicted": found["saved"], "measured": found["saved"], "difference": 0}],
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
        "link_seconds": 0.02,
    }
