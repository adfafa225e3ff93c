"""A limit for weights and saved tensors together on the device of a rank."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from disthooks._match import inside
from disthooks._tensors import format_bytes, local_part, parse_bytes
from disthooks.config.source import Source
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.stores.base import Functions, Store
from disthooks.saved.stores.device import OnDevice
from disthooks.saved.stores.tiers import Tiered


def weights_of(model: nn.Module) -> int:
    """Bytes of parameters and buffers on this rank as the model is now: local shards; on "meta" as if allocated.

    >>> weights_of(nn.Linear(10, 10, device="meta"))
    440
    """
    tensors = itertools.chain(inside(model).parameters(), inside(model).buffers())
    return sum(_nbytes(tensor) for tensor in {id(tensor): tensor for tensor in tensors}.values())


def _nbytes(tensor: torch.Tensor) -> int:
    sharded = getattr(tensor, "ds_tensor", None)  # DeepSpeed's ZeRO 3: the parameter itself is empty
    return local_part(tensor if sharded is None else sharded).nbytes


def stores_within(
    budget: int | str | None, model: nn.Module, saves: Iterable[tuple[Any, Pipeline]], source: Source
) -> Sequence[tuple[Any, Pipeline]]:
    """``saves`` with a first tier on the device in front of every store: what ``budget`` leaves beside the weights.

    All share its limit. Entries with the same store share the tiers too, so that the tensors that are wanted last move.

    Raises:
        ConfigError: when the weights alone are more, or a store cannot be a tier.
    """
    saves = list(saves)
    if budget is None:
        return saves
    device = OnDevice(_left(parse_bytes(budget, "budget"), weights_of(model), source))
    tiers: list[tuple[Store, Tiered]] = []
    found = []
    for number, (patterns, line) in enumerate(saves):
        tiered = next((made for store, made in tiers if store == line.store), None)
        if tiered is None:
            tiered = _tiered(device, line.store, number, source)
            tiers.append((line.store, tiered))
        found.append((patterns, replace(line, store=tiered)))
    return found


def _left(budget: int, weights: int, source: Source) -> int:
    if weights > budget:
        source.fail(
            ("budget",),
            f": {format_bytes(budget)} ({budget} bytes) are less than the parameters and buffers of the model take on "
            f"this rank, {format_bytes(weights)} ({weights} bytes)",
        )
    return budget - weights


def _tiered(device: OnDevice, store: Store, number: int, source: Source) -> Tiered:
    below = store.stores if isinstance(store, Tiered) else (store,)
    path = ("save", number, "store")
    if any(isinstance(tier, OnDevice) for tier in below):
        source.fail(path, ": OnDevice and 'budget' both say how much stays on the device: leave out one of them")
    if any(isinstance(tier, Functions) for tier in below):
        source.fail(path, ": Functions cannot be a tier, so 'budget' cannot be kept: leave it out, or use a store")
    return Tiered(device, *below)
