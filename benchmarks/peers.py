"""The ways that saved tensors can go, each as a context around the forward."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import disthooks as dh

NOTHING, ON_CPU, TRL, TUTORIAL = "nothing", "torch save_on_cpu", "trl OffloadActivations", "torch.save, a file a tensor"
OURS, OURS_CAST = "disthooks OnDisk", "disthooks Cast(bf16), OnDisk"


def _nothing() -> None:
    pass


@dataclass
class Way:
    """One way.

    Attributes:
        name: what it is called in tables.
        context: makes what is entered around a forward, for one step.
        exact: it promises the gradients of plain autograd, bit for bit.
        why_not: why it cannot run here; empty where it can.
        may_fail: that is found out in the first step only.
        written: bytes it has written since the process began, by its own count.
        flush: wait until all that forward saved is where it goes.
        rest: let go of what is kept from one step to the next, so that no other way is charged for it.
    """

    name: str
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    exact: bool = True
    why_not: str = ""
    may_fail: bool = False
    written: Callable[[], int] = field(default=lambda: 0)
    flush: Callable[[], None] = _nothing
    rest: Callable[[], None] = _nothing


class TemporaryFile:
    """The tutorial's file: it is deleted when the tensor saved in it is not needed any more."""

    written = 0

    def __init__(self, tensor: torch.Tensor, folder: str) -> None:
        self.name = os.path.join(folder, str(uuid.uuid4()))
        torch.save(tensor, self.name)
        TemporaryFile.written += os.path.getsize(self.name)

    def __del__(self) -> None:
        os.remove(self.name)


def tutorial(folder: str, at_least: int = 4096) -> contextlib.AbstractContextManager[Any]:
    """The way of torch's tutorial: each saved tensor in a file of its own; small ones stay, at the gate of ours."""

    def pack(tensor: torch.Tensor) -> object:
        return tensor if tensor.nbytes < at_least else TemporaryFile(tensor, folder)

    def unpack(packed: object) -> torch.Tensor:
        return torch.load(packed.name) if isinstance(packed, TemporaryFile) else packed

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def _trl(model: nn.Module, device: str) -> Way:
    """TRL's way, one context for all steps as its trainer has it; with the reason where it cannot run."""
    if device == "cpu":
        why = "it moves tensors from an accelerator to the CPU, and they are there already"
        return Way(TRL, contextlib.nullcontext, why_not=why)
    try:
        from trl.models.activation_offloading import OffloadActivations

        context = OffloadActivations()
        if hasattr(context, "update_model_params"):  # newer ones leave parameters where they are
            context.update_model_params(model)
    except Exception as error:  # it is not installed, or does not know the accelerator: the others still can run
        return Way(TRL, contextlib.nullcontext, why_not=f"{type(error).__name__}: {error}")
    return Way(TRL, lambda: context, may_fail=True)


def _ours(name: str, folder: str, *codecs: dh.Cast) -> Way:
    store = dh.OnDisk(folder)
    # What it writes is in the report of each context.
    return Way(name, lambda: dh.saving(*codecs, store), exact=not codecs, flush=store.wait, rest=store.release_idle)


def all_ways(model: nn.Module, device: str, folder: str) -> list[Way]:
    """Every way, nothing first."""
    return [
        Way(NOTHING, contextlib.nullcontext),
        Way(ON_CPU, torch.autograd.graph.save_on_cpu),
        _trl(model, device),
        Way(TUTORIAL, lambda: tutorial(folder), written=lambda: TemporaryFile.written),
        _ours(OURS, folder),
        _ours(OURS_CAST, folder, dh.Cast(torch.bfloat16)),
    ]


def nothing_and_ours(folder: str) -> list[Way]:
    """The two that the limit of the disk is shown with."""
    return [Way(NOTHING, contextlib.nullcontext), _ours(OURS, folder)]
