"""The ways that the saved tensors of a GPU can go in ``gpu.py``: those of others, and ours."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerator import Device
from names import (
    CHECKPOINT,
    ENGINE,
    FOUR,
    FOUR_HERE,
    INPUTS,
    NOTHING,
    ON_CPU,
    OURS,
    PRODUCTS,
    RECOMPUTE,
    RECOMPUTE_HERE,
    TRL,
    TUNE,
)
from torch.utils.checkpoint import checkpoint
from workloads import Workload

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from disthooks.saved.report import SavedReport

Context = contextlib.AbstractContextManager[Any]
Rows = Mapping[str, Mapping[str, Any]]


class Absent(Exception):
    """A way that cannot run here, and why."""


@dataclass
class Way:
    """One way, for one workload.

    Attributes:
        attached: entered once, around all steps of a row, as in training: what one step learns, the next one knows.
        around: entered around the forward of each step.
        aside: entered around a step of nothing that stands between two steps of this way.
        report: what ours says of the bytes since it was attached.
        exact: it promises the gradients of plain autograd, bit for bit.
    """

    attached: Callable[[], Context] = contextlib.nullcontext
    around: Callable[[], Context] = contextlib.nullcontext
    aside: Callable[[], Context] = contextlib.nullcontext
    report: Callable[[], SavedReport | None] = lambda: None
    exact: bool = True


class Ways:
    """Makes them by name; what holds page-locked memory is here, to be let go of."""

    def __init__(self, device: Device, work: Workload) -> None:
        self.device, self.work, self.store = device, work, dh.OnCpu()
        # In a step of nothing our hooks step back, as torch asks for (see `aside`), and say so once.
        warnings.filterwarnings("ignore", ".* is called inside a transform of torch.func")
        self.made: dict[str, Callable[[Rows], Way]] = {
            NOTHING: lambda rows: Way(),
            CHECKPOINT: lambda rows: Way(around=self._checkpointed),
            RECOMPUTE_HERE: lambda rows: self._ours([dh.Recompute(), dh.OnDevice()]),
            FOUR_HERE: lambda rows: self._ours([dh.Recompute(), dh.Quantize(4), dh.OnDevice()]),
            OURS: lambda rows: self._ours([self.store]),
            FOUR: lambda rows: self._ours([dh.Quantize(4), self.store]),
        }
        first, *others = work.peaks
        self._tiered(FOUR, first, lambda: [dh.Quantize(4)])
        self.made[RECOMPUTE] = lambda rows: self._ours([dh.Recompute(), self.store])
        for name in reversed(work.peaks):  # from the peaks that are worth it to those at the link's limit
            self._tiered(RECOMPUTE, name, lambda: [dh.Recompute()])
        if hasattr(work.model, "between"):
            self.made[PRODUCTS] = lambda rows: self._ours([dh.Recompute(products=1), dh.OnDevice()])
        for name in reversed(work.peaks):
            self._tiered(OURS, name, lambda: [])
        self.made[INPUTS] = lambda rows: self._ours([self.store], self._checkpointed)
        for name in others:
            self._tiered(FOUR, name, lambda: [dh.Quantize(4)])
        self.made[TRL] = lambda rows: self._module("trl.models.activation_offloading")
        self.made[TUNE] = lambda rows: self._module("torchtune.training")
        self.made[ENGINE] = lambda rows: self._engine()
        self.made[ON_CPU] = lambda rows: Way(around=self._save_on_cpu)

    def names(self) -> list[str]:
        """The most telling first; others that page-lock after ours, whose memory is one pool; what locks most last."""
        return list(self.made)

    def rest(self, name: str) -> None:
        """Let go of memory, for the way ``name``: the host has not room for others' page-locked memory and ours."""
        if not name.startswith("disthooks"):
            self.store.release_idle()
        self.device.empty()

    # -- those of others

    @contextlib.contextmanager
    def _checkpointed(self) -> Iterator[None]:
        """Non-reentrant, around each block."""
        for block in self.work.blocks:
            block.forward = functools.partial(checkpoint, type(block).forward.__get__(block), use_reentrant=False)
        try:
            yield
        finally:
            for block in self.work.blocks:
                del block.forward

    def _save_on_cpu(self) -> Context:
        return torch.autograd.graph.save_on_cpu(pin_memory=self.device.cuda)

    def _module(self, name: str) -> Way:
        """The context of TRL or torchtune, one for all steps as their trainers have it."""
        if not self.device.cuda:
            raise Absent("it moves tensors of a GPU")
        try:
            context = __import__(name, fromlist=["OffloadActivations"]).OffloadActivations()
            if hasattr(context, "update_model_params"):  # newer ones leave parameters where they are
                context.update_model_params(self.work.model)
        except Exception as error:
            raise Absent(f"{type(error).__name__}: {error}") from error
        return Way(around=lambda: context)

    def _engine(self) -> Way:
        """TransformerEngine's, around each layer."""
        if not hasattr(self.work.model, "between"):
            raise Absent("it is for a list of layers")
        try:
            from transformer_engine.pytorch import get_cpu_offload_context

            count = len(self.work.blocks)
            options = {"model_layers": count, "offload_activations": True, "offload_weights": False}
            between = get_cpu_offload_context(enabled=True, num_layers=count - 1, **options)
        except Exception as error:
            raise Absent(f"{type(error).__name__}: {error}") from error

        @contextlib.contextmanager
        def around() -> Iterator[None]:
            self.work.model.between = between
            try:
                yield
            finally:
                self.work.model.between = None

        return Way(around=around)

    # -- ours

    def _ours(self, stages: Sequence[Any], around: Callable[[], Context] = contextlib.nullcontext) -> Way:
        """The model attached as it is, once for all steps. In a step of nothing its hooks step back."""
        attachments: list[Any] = []

        @contextlib.contextmanager
        def attached() -> Iterator[None]:
            with dh.save_activations(self.work.model, "", pipeline(*stages)) as saving:
                attachments[:] = [saving]
                yield

        def aside() -> Context:
            return torch.autograd.graph.disable_saved_tensors_hooks("a step of nothing")

        exact = not any(getattr(stage, "lossy", False) for stage in stages)
        return Way(attached, around, aside, lambda: attachments[0].report() if attachments else None, exact)

    def _tiered(self, like: str, name: str, stages: Callable[[], list[Any]]) -> None:
        """The way ``like``, with as much left on the device as its own peak leaves room for."""

        def make(rows: Rows) -> Way:
            parts = stages()
            if "peak_bytes" not in rows.get(like, {}):
                raise Absent(f"{like!r} has to run first, and did not")
            limit = self._room(rows, like, self.work.peaks[name])
            if limit <= 0:
                raise Absent(f"{like!r}, which leaves nothing on the device, has a higher peak than this")
            return self._ours([*parts, dh.Tiered(dh.OnDevice(limit), self.store)])

        self.made[f"{like.replace('OnCpu', 'Tiered')} at {name}"] = make

    def _room(self, rows: Rows, like: str, peak: float) -> int:
        if not self.device.cuda:  # where the tensors' own peak is not known: half of them
            return max(1 << 16, rows[like]["stored_bytes"] // 2)
        wanted = peak if peak > 2 else peak * rows[NOTHING]["peak_bytes"]
        # A little less: how far copies have got when memory is asked for differs from step to step.
        return int(0.99 * wanted - rows[like]["peak_bytes"])
