"""All statistics of gradients in every step of training the decoder, beside the same step without them."""

from __future__ import annotations

import statistics
import warnings
from typing import Any

import torch
from accelerator import Device
from workloads import language

import disthooks as dh


def measure(device: Device, size: str, repeats: int) -> dict[str, Any]:
    """Milliseconds of a step with and without, the share that is added, and what waited for the device.

    The two take turns. ``waits`` is what torch said where something made the host wait, empty where nothing did, and
    None where torch cannot tell.
    """
    work = language(size, device.device)
    optimizer = torch.optim.AdamW(work.model.parameters(), lr=0.0, weight_decay=0.0, foreach=True)

    def step() -> float:
        optimizer.zero_grad()
        device.wait()
        begin = device.mark()
        work.forward().backward()
        optimizer.step()
        end = device.mark()
        device.wait()
        return device.between(begin, end)

    plain, watched = [], []
    for number in range(-2, max(repeats, 2)):
        seconds = step()
        with dh.gradients(work.model, optimizer, stats=dh.stats.standard(), every=1):
            step()  # what it makes at the first step it has at all others
            ours = step()
        if number >= 0:
            plain.append(seconds)
            watched.append(ours)
    without, having = statistics.median(plain), statistics.median(watched)
    found: dict[str, Any] = {"step_ms": round(1e3 * without, 3), "with_statistics_ms": round(1e3 * having, 3)}
    found |= {"share": round((having - without) / without, 5), "parameters": len(list(work.model.parameters()))}
    return found | {"waits": waits(device, work, optimizer)}


def waits(device: Device, work: Any, optimizer: torch.optim.Optimizer) -> str | None:
    """What waited in three steps of which each is logged, that is after the first, and not in those without."""
    if not device.cuda:
        return None
    plain = _said(work, optimizer, 3)
    with dh.gradients(work.model, optimizer, stats=dh.stats.standard(), every=1):
        _said(work, optimizer, 1)
        device.wait()
        ours = _said(work, optimizer, 3)
    return ours[-1] if len(ours) > len(plain) else ""


def _said(work: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[str]:
    """What torch says of each that waits in so many steps; its own do not count, and an error would end a backward."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(steps):
                work.forward().backward()
                optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [text.splitlines()[0] for one in said if "synchronizing CUDA" in (text := str(one.message))]
