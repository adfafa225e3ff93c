"""torch's caching allocator, rule by rule, and against a slow model of the same rules."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disthooks.predict.hardware.allocator import (
    Block,
    CachingAllocator,
    events_of,
    round_up,
    segment_bytes,
    simulate,
)
from disthooks.predict.recording.record import Allocation, Change, StepRecord

KiB, MiB = 1 << 10, 1 << 20


def births(*sizes: int) -> list[tuple[int, int]]:
    return list(enumerate(sizes))


def free_blocks(allocator: CachingAllocator) -> list[Block]:
    return [block for pool in (allocator._small, allocator._large) for _, _, block in pool.free]


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


def test_a_rest_of_up_to_one_mebibyte_stays_in_a_large_block() -> None:
    """And ``memory_allocated`` counts it: 22 MiB for 21 MiB, but 20.5 MiB for 20.5 MiB, whose rest is 1.5 MiB."""
    assert simulate([(0, 21 * MiB)]).allocated_peak == 22 * MiB
    assert simulate([(0, 41 * MiB // 2)]).allocated_peak == 41 * MiB // 2


def test_a_rest_of_512_bytes_is_cut_from_a_small_block() -> None:
    allocator = CachingAllocator()
    for _ in range(2):
        allocator.allocate(MiB - 512)
    assert allocator.reserved == 2 * MiB
    assert [block.size for block in free_blocks(allocator)] == [1024]
    allocator.allocate(512)
    assert [block.size for block in free_blocks(allocator)] == [512]


def test_small_requests_share_a_segment_and_never_use_a_large_one() -> None:
    assert simulate(births(*[1000] * 2048)).reserved_peak == 2 * MiB
    assert simulate(births(*[1000] * 2049)).reserved_peak == 4 * MiB
    report = simulate([(0, 5 * MiB), (0, 0), (1, MiB)])
    assert report.reserved_peak == 22 * MiB


def test_medium_requests_are_packed_into_20_mebibytes() -> None:
    assert simulate(births(*[9 * MiB] * 2)).reserved_peak == 20 * MiB
    assert simulate(births(*[9 * MiB] * 3)).reserved_peak == 40 * MiB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MiB) for size in (64, 32, 16)]
    _, middle, small = (block.address for block in blocks)
    for block in blocks:
        allocator.free(block)
    assert allocator.allocate(20 * MiB).address == middle
    assert allocator.allocate(16 * MiB).address == small
    assert allocator.reserved == 112 * MiB


def test_of_two_equal_blocks_the_lower_address_is_taken() -> None:
    allocator = CachingAllocator()
    first, second = allocator.allocate(16 * MiB), allocator.allocate(16 * MiB)
    allocator.free(second)
    allocator.free(first)
    assert allocator.allocate(16 * MiB).address == min(first.address, second.address)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (1, 3, 0, 2)])
def test_neighbours_are_joined_in_any_order(order: tuple[int, ...]) -> None:
    allocator = CachingAllocator()
    whole = allocator.allocate(80 * MiB)
    address = whole.address
    allocator.free(whole)
    parts = [allocator.allocate(20 * MiB) for _ in range(4)]
    assert free_blocks(allocator) == []
    for i in order:
        allocator.free(parts[i])
    assert [(block.address, block.size) for block in free_blocks(allocator)] == [(address, 80 * MiB)]
    assert allocator.reserved == 80 * MiB


def test_neighbours_of_other_segments_are_not_joined() -> None:
    events = [*births(30 * MiB, 30 * MiB), (0, 0), (1, 0), (2, 60 * MiB)]
    assert simulate(events).reserved_peak == 120 * MiB


def test_cached_segments_go_back_to_the_driver_before_memory_runs_out() -> None:
    events = [*births(30 * MiB, 30 * MiB), (0, 0), (1, 0), (2, 60 * MiB)]
    report = simulate(events, limit=60 * MiB)
    assert (report.fits, report.reserved_peak) == (True, 60 * MiB)


def test_a_segment_that_is_partly_in_use_does_not_go_back() -> None:
    """The known trap: 79 of 80 MiB are free, and 60 MiB do not fit."""
    events = [(0, 80 * MiB), (0, 0), (1, 39 * MiB), (2, 2 * MiB), (3, 39 * MiB), (1, 0), (3, 0), (4, 60 * MiB)]
    report = simulate(events, limit=100 * MiB)
    assert not report.fits
    assert report.allocated_peak == report.reserved_peak == 80 * MiB
    assert simulate(events, limit=140 * MiB).fits


def test_the_limit_itself_fits() -> None:
    assert simulate(births(*[20 * MiB] * 4), limit=80 * MiB).fits
    report = simulate(births(*[20 * MiB] * 4), limit=80 * MiB - 1)
    assert (report.fits, report.allocated_peak) == (False, 60 * MiB)


def test_a_growing_batch_leaves_slivers() -> None:
    events, serial = [], 0
    for batch in range(20, 30):
        for tensor in range(8):
            events.append((serial + tensor, (1 + tensor % 2) * batch * MiB))
        for tensor in range(8):
            events.append((serial + tensor, 0))
        serial += 8
    report = simulate(events)
    assert report.reserved_peak > 1.5 * report.allocated_peak == 1.5 * 12 * 29 * MiB


def test_nothing_is_needed_for_nothing() -> None:
    report = simulate([(0, 0), (0, 0)], limit=0)
    assert report == (0, 0, 0, True)


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


# -- any sequence


@dataclasses.dataclass
class Slow:
    """The rules, without any structure that makes them fast: lists of [size, tensor]."""

    limit: int | None
    segments: dict[int, tuple[bool, list[list[int | None]]]] = dataclasses.field(default_factory=dict)
    made: int = 0

    def reserved(self) -> int:
        return sum(size or 0 for _, blocks in self.segments.values() for size, _ in blocks)

    def allocated(self) -> int:
        return sum(size or 0 for _, blocks in self.segments.values() for size, used in blocks if used is not None)

    def allocate(self, tensor: int, nbytes: int) -> bool:
        size = -(-nbytes // 512) * 512
        is_small = size <= MiB
        best: tuple[int, int, int] | None = None
        for number, (small, blocks) in self.segments.items():
            for i, (room, used) in enumerate(blocks):
                assert room is not None
                if small == is_small and used is None and room >= size and (best is None or room < best[0]):
                    best = (room, number, i)
        if best is None:
            room = 2 * MiB if is_small else 20 * MiB if size < 10 * MiB else -(-size // (2 * MiB)) * 2 * MiB
            if self.limit is not None and self.reserved() + room > self.limit:
                self.segments = {k: v for k, v in self.segments.items() if len(v[1]) > 1 or v[1][0][1] is not None}
                if self.reserved() + room > self.limit:
                    return False
            best = (room, self.made, 0)
            self.segments[self.made] = (is_small, [[room, None]])
            self.made += 1
        room, number, i = best
        blocks = self.segments[number][1]
        blocks[i] = [room, tensor]
        if room - size >= 512 if is_small else room - size > MiB:
            blocks[i : i + 1] = [[size, tensor], [room - size, None]]
        return True

    def free(self, tensor: int) -> None:
        for _, blocks in self.segments.values():
            for block in blocks:
                if block[1] == tensor:
                    block[1] = None
            i = 0
            while i + 1 < len(blocks):
                if blocks[i][1] is None and blocks[i + 1][1] is None:
                    blocks[i : i + 2] = [[(blocks[i][0] or 0) + (blocks[i + 1][0] or 0), None]]
                else:
                    i += 1


_sizes = st.one_of(
    st.integers(1, 4 * KiB),
    st.integers(1, 2 * MiB),
    st.integers(1, 40 * MiB),
    st.sampled_from([512, MiB, MiB + 1, 10 * MiB, 10 * MiB - 512, 19 * MiB, 19 * MiB - 512, 20 * MiB]),
)
#: A positive number is a birth; a negative one the death of the tensor that is so far back among those alive.
_steps = st.lists(st.one_of(_sizes, st.integers(-8, -1)), max_size=60)
_limits = st.one_of(st.none(), st.integers(20, 200).map(lambda count: count * MiB))


def as_events(steps: list[int]) -> list[tuple[int, int]]:
    events: list[tuple[int, int]] = []
    alive: list[int] = []
    for serial, step in enumerate(steps):
        if step > 0:
            events.append((serial, step))
            alive.append(serial)
        elif alive:
            events.append((alive.pop(max(step, -len(alive))), 0))
    return events


@settings(max_examples=300, deadline=None)
@given(_steps, _limits)
@example([30 * MiB, 30 * MiB, -1, -1, 60 * MiB], 60 * MiB)
def test_it_does_what_the_slow_model_does(steps: list[int], limit: int | None) -> None:
    events, slow = as_events(steps), Slow(limit)
    allocated = reserved = 0
    fits = True
    for tensor, nbytes in events:
        if nbytes == 0:
            slow.free(tensor)
        elif not slow.allocate(tensor, nbytes):
            fits = False
            break
        reserved = max(reserved, slow.reserved())
        allocated = max(allocated, slow.allocated())
    report = simulate(events, limit)
    assert (report.allocated_peak, report.reserved_peak, report.fits) == (allocated, reserved, fits)


@settings(max_examples=100, deadline=None)
@given(_steps)
def test_what_fits_without_a_limit_fits_under_its_own_peak(steps: list[int]) -> None:
    """What fits without a limit fits under a limit of the same peak, and more memory never makes it fail."""
    events = as_events(steps)
    peak = simulate(events).reserved_peak
    assert simulate(events, peak).fits
    assert simulate(events, peak + 2 * MiB).fits
