"""What ranks must do alike, found out before anything waits for another rank."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disthooks.engines.find import find
from disthooks.errors import AttachError
from disthooks.grads import collect


def check_not_alone() -> None:
    """Refuse to go on in one of several processes that each believe to be alone.

    Each would train a model of its own, and every rule and statistic would be of one rank. ``accelerate launch`` starts
    such processes with ``MULTI_GPU`` and ``use_cpu: true``: version 1.15 makes a group of all, and wraps nothing.

    Raises:
        AttachError: when ``WORLD_SIZE`` says there are several, and torch.distributed or accelerate knows of one.
    """
    text = os.environ.get("WORLD_SIZE", "")
    said = int(text) if text.isdecimal() else 1
    world = torch.distributed
    begun = world.is_available() and world.is_initialized()
    known, what = world.get_world_size() if begun else 1, "has a group of one" if begun else "was not initialised"
    what = f"torch.distributed {what}"
    if known > 1 and _accelerates_count() == 1:
        known, what = 1, "accelerate knows of one"
    if said > 1 and known == 1:
        raise AttachError(
            f"a launcher started {said} processes (WORLD_SIZE={said}), and {what} in this one: each "
            "would train alone. Call torch.distributed.init_process_group() before; with accelerate on CPUs, set "
            "ACCELERATE_USE_CPU=true and no 'use_cpu: true' beside MULTI_GPU. Where each is meant to train alone, "
            "set WORLD_SIZE=1"
        )


def _accelerates_count() -> int | None:
    """How many processes accelerate believes there are; None where nobody uses it."""
    state = sys.modules.get("accelerate.state")
    found = state.PartialState._shared_state.get("num_processes") if state is not None else None
    return found if isinstance(found, int) else None


@dataclass(frozen=True)
class Team:
    """The ranks that train a model together.

    Attributes:
        ranks: their numbers.
        group: their process group; None for one alone.
        device: where it can reduce.
    """

    ranks: tuple[int, ...]
    group: Any
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module) -> Team:
        """The ranks of the engine that took ``model``; this one alone before any has, or where none can be told."""
        try:
            engine = find(model)
        except AttachError:  # to save tensors no engine need be known; with gradients it is raised again
            return cls((0,), None, torch.device("cpu"))
        group = collect.group_of(engine.ranks)
        return cls(tuple(engine.ranks), group, collect.device_for(group, engine.shards[0].parameter.device))

    def agree(self, failure: Exception | None, described: str, name: str) -> None:
        """One collective, in which every rank takes part, whatever happened on it.

        Raises:
            AttachError: when another rank failed, or has another plan.
            Exception: ``failure``, if there is one.
        """
        described = "" if failure else described
        failed, alike = collect.agree(self.group, self.device, failure is not None, described)
        if failure is not None:
            raise failure
        if failed:
            raise AttachError(f"{name}: another of the ranks {_shown(self.ranks)} failed; its error says why")
        if not alike:
            raise AttachError(
                f"{name}: the ranks {_shown(self.ranks)} have different configurations: give all of them the same one; "
                f"this one says {described if len(described) < 500 else described[:500] + ' ...'}"
            )


def _shown(ranks: tuple[int, ...]) -> str:
    return str(list(ranks)) if len(ranks) <= 8 else f"[{ranks[0]}, ..., {ranks[-1]}]"
