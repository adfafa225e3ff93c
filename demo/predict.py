"""What ``dh.explain`` predicts of the demo's own step: a page, and the memory that a step adds."""

from __future__ import annotations

import argparse
import pathlib
from typing import Any

import torch
from model import GPT, Shape
from ranks import Ranks

import disthooks as dh
from disthooks.predict.explanation import Memory

#: What is in memory before a step begins, and during all of it.
RESTING = ("parameters", "optimizer state", "communication")


def predict(options: argparse.Namespace, ranks: Ranks, shape: Shape, plan: Any) -> dict[str, Any]:
    """Write the page into the folder of the run. Nothing is computed: the model has shapes and no memory."""

    def build() -> tuple[GPT, tuple[torch.Tensor, torch.Tensor]]:
        batch = torch.zeros(options.batch, shape.context, dtype=torch.int64)
        return GPT(shape), (batch, batch)

    engine = None if options.engine == "plain" else options.engine
    device = ranks.device.type
    said = dh.explain(build, plan=plan, device=device, engine=engine, world=ranks.world, optimizer="adamw")
    page = pathlib.Path(options.run, "explain.html")
    page.write_text(said.to_html(), encoding="utf-8")
    return {
        "page": str(page),
        "predicted_without": _added(said.memory),
        "predicted_with": None if said.planned is None else _added(said.planned),
    }


def _added(memory: Memory) -> int:
    """The bytes at the peak that are not there between two steps."""
    return memory.peak.nbytes - sum(memory.peak.by_category.get(each, 0) for each in RESTING)
