"""torch's caching allocator, rule by rule, and a recorded snapshot."""

from __future__ import annotations

import pytest

from disthooks.predict.hardware.allocator import (
    CachingAllocator,
    events_of,
    round_up,
    segment_bytes,
    simulate,
)
from disthooks.predict.recording.record import Allocation, Change, StepRecord

MiB = 1 << 20
Events = list[tuple[int, int]]


def births(*sizes: int) -> Events:
    return list(enumerate(sizes))


def joined(*order: int) -> Events:
    """80 MiB are cut into four parts, which die in this order, and are wanted again as one."""
    parts = [(i, 20 * MiB) for i in range(1, 5)]
    return [(0, 80 * MiB), (0, 0), *parts, *((1 + i, 0) for i in order), (9, 80 * MiB)]


#: 79 of 80 MiB are free, and 60 MiB do not fit.
TRAP = [(0, 80 * MiB), (0, 0), (1, 39 * MiB), (2, 2 * MiB), (3, 39 * MiB), (1, 0), (3, 0), (4, 60 * MiB)]
TWO_SEGMENTS = [*births(30 * MiB, 30 * MiB), (0, 0), (1, 0), (2, 60 * MiB)]
SIZES = births(64 * MiB, 32 * MiB, 16 * MiB)
#: Births and deaths, the limit, and in MiB the most that is allocated and reserved before the end or the limit.
RULES: dict[str, tuple[Events, int | None, float, float]] = {
    "nothing needs nothing": ([(0, 0), (0, 0)], 0, 0, 0),
    "a rest of up to 1 MiB stays in a large block": (births(21 * MiB), None, 22, 22),
    "a rest of 1.5 MiB is cut from it": (births(41 * MiB // 2), None, 20.5, 22),
    "a rest of 512 bytes is cut from a small block": (births(MiB - 512, MiB - 512, 512, 512), None, 2, 2),
    "small requests share a segment": (births(*[1000] * 2048), None, 2, 2),
    "and begin another one": (births(*[1024] * 2049), None, 2 + 1 / 1024, 4),
    "a small request never uses a large segment": ([(0, 5 * MiB), (0, 0), (1, MiB)], None, 5, 22),
    "medium requests are packed into 20 MiB": (births(*[9 * MiB] * 3), None, 27, 40),
    "the smallest block that is large enough is taken": (
        [*SIZES, (0, 0), (1, 0), (2, 0), (3, 20 * MiB), (4, 60 * MiB), (5, 16 * MiB)], None, 112, 112,
    ),
    "neighbours are joined in order": (joined(0, 1, 2, 3), None, 80, 80),
    "neighbours are joined in reverse": (joined(3, 2, 1, 0), None, 80, 80),
    "neighbours are joined on both sides": (joined(0, 2, 1, 3), None, 80, 80),
    "neighbours of other segments are not joined": (TWO_SEGMENTS, None, 60, 120),
    "cached segments go back before memory runs out": (TWO_SEGMENTS, 60 * MiB, 60, 60),
    "a segment that is partly in use does not go back": (TRAP, 140 * MiB, 80, 140),
    "the limit itself fits": (births(*[20 * MiB] * 4), 80 * MiB, 80, 80),
}  # fmt: skip


# -- one rule each; the sums were made by hand from c10/cuda/CUDACachingAllocator.cpp


@pytest.mark.parametrize(
    ("nbytes", "block", "segment"),
    [
        (1, 512, 2 * MiB),
        (512, 512, 2 * MiB),
        (513, 1024, 2 * MiB),
        (MiB, MiB, 2 * MiB),
        (MiB + 1, MiB + 512, 20 * MiB),
        (10 * MiB - 1, 10 * MiB, 10 * MiB),  # the rounded size decides
        (10 * MiB - 512, 10 * MiB - 512, 20 * MiB),
        (10 * MiB, 10 * MiB, 10 * MiB),
        (10 * MiB + 1, 10 * MiB + 512, 12 * MiB),
        (100 * MiB + 1, 100 * MiB + 512, 102 * MiB),
    ],
)
def test_sizes_of_a_first_request(nbytes: int, block: int, segment: int) -> None:
    report = simulate([(0, nbytes)])
    assert round_up(nbytes) == block
    assert segment_bytes(block) == segment
    assert report.reserved_peak == segment
    assert report.requested_peak == nbytes
    rest = segment - block
    assert report.allocated_peak == (segment if 0 < rest <= MiB and block > MiB else block)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_of_the_allocator(rule: str) -> None:
    events, limit, allocated, reserved = RULES[rule]
    report = simulate(events, limit=limit)
    assert (report.allocated_peak, report.reserved_peak, report.fits) == (allocated * MiB, reserved * MiB, True)


@pytest.mark.parametrize(
    ("events", "limit", "allocated"),
    [(births(*[20 * MiB] * 4), 80 * MiB - 1, 60), (TRAP, 100 * MiB, 80)],
    ids=["a byte too little", "a segment in use"],
)
def test_what_does_not_fit_says_what_did(events: Events, limit: int, allocated: int) -> None:
    report = simulate(events, limit=limit)
    assert (report.fits, report.allocated_peak) == (False, allocated * MiB)


def test_a_recorded_step_gives_births_deaths_and_resizes() -> None:
    """As FSDP does it: a storage is freed to 0 bytes and comes back. What lies in the host's memory is left out."""
    record = StepRecord()
    record.allocations = [
        Allocation(3 * MiB, "parameters", "", 0),
        Allocation(5 * MiB, "activations", "aten.mm", 0),
        Allocation(7 * MiB, "optimizer", "", 0, "host"),
    ]
    deltas = [(0, 3 * MiB), (2, 7 * MiB), (1, 5 * MiB), (0, -3 * MiB), (0, 3 * MiB), (1, -2 * MiB), (1, -3 * MiB)]
    record.changes = [Change(moment, *delta) for moment, delta in enumerate(deltas)]
    events = [(0, 3 * MiB), (1, 5 * MiB), (0, 0), (0, 3 * MiB), (1, 0), (1, 3 * MiB), (1, 0)]
    assert events_of(record) == events
    report = simulate(events)
    assert (report.allocated_peak, report.reserved_peak) == (8 * MiB, 20 * MiB)


# -- a real record


def resnet18() -> list[int]:
    """The bytes of each parameter and buffer of torchvision's ResNet-18, in the order of ``Module.cuda()``."""

    def convolution(inputs: int, outputs: int, kernel: int) -> list[int]:  # with its batch norm
        return [4 * outputs * inputs * kernel * kernel, *[4 * outputs] * 4, 8]

    sizes = convolution(3, 64, 7)
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        sizes += convolution(inputs, outputs, 3) + convolution(outputs, outputs, 3)
        sizes += convolution(inputs, outputs, 1) if inputs != outputs else []
        sizes += convolution(outputs, outputs, 3) * 2
    return [*sizes, 4 * 512 * 1000, 4 * 1000]


def test_the_parameters_of_resnet18_lie_as_in_a_recorded_snapshot() -> None:
    """What a GPU recorded for ``resnet18().cuda()`` and an image of 3 x 224 x 224.

    The source is ``segments.svg`` of the page "Visualizing PyTorch memory usage" by torch's author of the allocator
    (zdevito.github.io, 2022-08-16). It has the bytes of the parameters in each segment, three large ones and two small
    ones; the whole of one large segment counts as allocated, though 49,152 bytes of it are a rest; the image has begun
    a third small segment, because it fits in neither of the two.
    """
    allocator = CachingAllocator()
    parameters = [(allocator.allocate(size), size) for size in resnet18()]
    image = allocator.allocate(4 * 3 * 224 * 224)
    by_segment: dict[int, tuple[int, int]] = {}
    for block, size in parameters:
        head = block
        while head.before is not None:
            head = head.before
        requested, counted = by_segment.get(head.address, (0, 0))
        by_segment[head.address] = requested + size, counted + block.size
    large = {each for each in by_segment.values() if each[0] > 2 * MiB}
    assert {requested for requested, _ in large} == {12_976_128, 20_922_368, 9_437_184}
    assert (20_922_368, 20_971_520) in large
    assert {each[0] for each in by_segment.values()} - {each[0] for each in large} == {1_756_992, 1_703_936}
    assert image.before is None
    assert allocator.reserved == 3 * 20 * MiB + 3 * 2 * MiB
