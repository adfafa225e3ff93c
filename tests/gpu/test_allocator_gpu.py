"""The model of torch's caching allocator against torch's own, on a real GPU, event by event."""

from __future__ import annotations

import json
import os
import pathlib
import random
import subprocess
import sys
from typing import Any

import pytest
import torch

from disthooks.predict.hardware.allocator import Block, CachingAllocator, OutOfMemory, simulate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
ROOT = pathlib.Path(__file__).parents[2]
MiB = 1 << 20
Events = list[tuple[int, int]]


class Placed(CachingAllocator):
    """The model, with the addresses that the driver gave to the segments: they decide between equal blocks."""

    def __init__(self, addresses: list[int], limit: int | None = None) -> None:
        super().__init__(limit)
        self.addresses = list(reversed(addresses))

    def _new_block(self, pool: Any, size: int) -> Block | None:
        block = super()._new_block(pool, size)
        if block is not None:
            block.address = self.addresses.pop()
        return block


def followed(events: Events, allocator: CachingAllocator) -> tuple[list[list[int]], int | None]:
    """The allocated and reserved bytes after each event, and the index of the event that ran out of memory."""
    alive: dict[int, Block] = {}
    found = []
    for i, (serial, nbytes) in enumerate(events):
        if nbytes == 0:
            allocator.free(alive.pop(serial))
        else:
            try:
                alive[serial] = allocator.allocate(nbytes)
            except OutOfMemory:
                return found, i
        found.append([allocator.allocated, allocator.reserved])
    return found, None


def drawn(seed: int, count: int = 2000) -> Events:
    """Births and deaths in random order: small ones, those that share 20 MiB, those with segments of their own."""
    draw, alive = random.Random(seed), []
    events: Events = []
    for serial in range(count):
        if alive and (len(alive) > 60 or draw.random() < 0.45):
            events.append((alive.pop(draw.randrange(len(alive)) if draw.random() < 0.5 else -1), 0))
        else:
            most = draw.choice([4096, MiB, 9 * MiB, 40 * MiB])
            events.append((serial, draw.randrange(1, most)))
            alive.append(serial)
    return events


def on_the_gpu(**document: Any) -> dict[str, Any]:
    """Run this file in a new process, whose allocator has no cache yet."""
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "", "PYTORCH_ALLOC_CONF": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, input=json.dumps(document), env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_random_births_and_deaths(seed: int) -> None:
    events = drawn(seed)
    real = on_the_gpu(events=events, limit=None)
    found, _ = followed(events, Placed(real["segments"]))
    assert found == real["after"]
    report = simulate(events)  # without the driver's addresses
    assert report.allocated_peak == pytest.approx(max(allocated for allocated, _ in real["after"]), rel=0.01)
    assert report.reserved_peak == pytest.approx(max(reserved for _, reserved in real["after"]), rel=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_limit_gives_cached_memory_back_and_then_fails(seed: int) -> None:
    events = drawn(seed)
    whole = simulate(events)
    limit = int(whole.allocated_peak * 0.95) // (2 * MiB) * 2 * MiB + MiB  # segments are multiples of 2 MiB
    real = on_the_gpu(events=events, limit=limit)
    found, failed = followed(events, Placed(real["segments"], limit))
    assert found == real["after"]
    assert failed == real["failed"] is not None


# -- in the new process


def _begin() -> None:
    torch.cuda.init()
    torch.cuda.memory._record_memory_history("all", context=None, stacks="python")


def _trace() -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = torch.cuda.memory._snapshot()["device_traces"][0]
    return traces


def _segments(trace: list[dict[str, Any]]) -> list[int]:
    return [entry["addr"] for entry in trace if entry["action"] == "segment_alloc"]


def follow(events: Events, limit: int | None) -> dict[str, Any]:
    """Allocate and free as the events say; tell what torch counts after each."""
    _begin()
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.mem_get_info()[1])
    alive: dict[int, torch.Tensor] = {}
    after, failed = [], None
    for i, (serial, nbytes) in enumerate(events):
        if nbytes == 0:
            del alive[serial]
        else:
            try:
                alive[serial] = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                failed = i
                break
        after.append([torch.cuda.memory_allocated(), torch.cuda.memory_reserved()])
    return {"after": after, "failed": failed, "segments": _segments(_trace())}


if __name__ == "__main__":
    print(json.dumps(follow(**json.load(sys.stdin))))
