"""The pairs of hooks that torch's own cases are run with: each store, around a block and around a module."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch

import disthooks as dh
from disthooks._torch import top_hooks
from disthooks.saved.pipeline import pipeline
from tests.support.functions import Made

LINES: dict[str, Callable[[object], object]] = {
    "disk": lambda folder: pipeline(dh.OnDisk(folder), at_least=0),
    "cpu": lambda folder: dh.OnCpu(),
    "functions": lambda folder: dh.Functions(lambda t: t.detach().clone(), lambda t: t),
}
PAIRS = [f"{store}, {way}" for store in LINES for way in ("saving", "SaveWith")]


class Pair:
    """Calls functions with a pair of hooks on."""

    def __init__(self, name: str, folder: pathlib.Path) -> None:
        self.store, self.way = name.split(", ")
        self.line = LINES[self.store](folder)
        self.checked = self.store != "functions"  # torch checks no versions under hooks, Functions keep its contract
        self._reports: list[Callable[[], Any]] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return run(self.line, self.way, function, *args, reports=self._reports)

    @property
    def held(self) -> int:
        return sum(report().held for report in self._reports)

    @property
    def packed(self) -> int:
        return sum(report().stored + report().kept for report in self._reports)


def run(line: Any, way: str, function: Callable[..., Any], *args: Any, reports: list | None = None) -> Any:
    """``function(*args)`` with the hooks of ``line`` on; none are left afterwards."""
    before = top_hooks(True)
    hooks = dh.saving(line) if way == "saving" else dh.SaveWith(Made(function), line)
    if reports is not None:
        reports.append(hooks.report)
    try:
        if way == "saving":
            with hooks:
                return function(*args)
        return hooks(*args)
    finally:
        assert top_hooks(True) == before


def ones(*size: int, scale: float = 1.0) -> torch.Tensor:
    """A leaf of distinct values, float64."""
    count = torch.Size(size).numel()
    return torch.linspace(0.1 * scale, scale, count, dtype=torch.float64).reshape(size).requires_grad_()
