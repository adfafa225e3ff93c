"""What tests look at inside of stores at work: one place to change when the stores change."""

from __future__ import annotations

from typing import Any

import torch

import disthooks as dh


def worker_of(store: dh.OnDisk) -> Any:
    """What moves the tensors of the store between memory and its file."""
    return store.open().worker


def file_of(store: dh.OnDisk) -> Any:
    return store.open().file


def offload_of(store: dh.OnCpu, device: torch.device) -> Any:
    """What copies the tensors of ``device``."""
    return store.open().offload(device)


def queue_of(tiers: dh.Tiered, tier: int, device: torch.device) -> Any:
    """The tensors that have to make room in a tier."""
    return tiers.open().queue(tier, device)


def device_bytes(store: Any, device: torch.device | None = None) -> int:
    """Bytes that a store, or all stores of a ``Tiered``, have on ``device`` for a while; None for all devices."""
    opened = store.open()
    return sum(tier.device_bytes(device) for tier in getattr(opened, "stores", (opened,)))


def in_host(store: dh.OnCpu, ticket: Any) -> torch.Tensor:
    """The tensor of ``ticket`` in host memory; the host waits for its copy."""
    found = store.open().peek(ticket)
    assert found is not None
    return found


def limit_device(store: dh.OnCpu | dh.OnDisk, nbytes: int, device: torch.device) -> None:
    """Let the store hold at most ``nbytes`` on ``device``, as a ``Tiered`` does."""
    store.open().set_device_limit(nbytes, device)
