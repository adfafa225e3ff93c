"""All statistics of gradients in every step of training the decoder, beside the same step without them."""

from __future__ import annotations

import statistics
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
    """What waited in three steps of which each is logged, that is after the first."""
    if not device.cuda:
        return None
    with dh.gradients(work.model, optimizer, stats=dh.stats.standard(), every=1):
        work.forward().backward()
        optimizer.step()
        device.wait()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                work.forward().backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return ""
