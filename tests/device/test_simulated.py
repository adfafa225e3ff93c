"""The simulated accelerator catches what goes wrong on a real one, and counts what the host does."""

from __future__ import annotations

import pytest
import torch

from disthooks._streams import event_on
from tests.support.sim import simulated
from tests.support.stores.faulty import soon

pytestmark = pytest.mark.full_tier  # a test of the tests

N = 4096


def numbers() -> torch.Tensor:
    return torch.arange(N, dtype=torch.float32)


def pinned() -> torch.Tensor:
    return torch.zeros(N, pin_memory=True)


def test_a_copy_that_does_not_wait_for_the_result_is_wrong(sim: torch.device) -> None:
    main, side = torch.accelerator.current_stream(sim), torch.Stream(sim)
    x, y, wrong, right = numbers().to(sim), torch.empty(N, device=sim), pinned(), pinned()
    produced = torch.Event(sim)
    with simulated.held(main):
        y.copy_(x)
        produced.record(main)
        with side:
            wrong.copy_(y, non_blocking=True)
        side.synchronize()
    with side:
        side.wait_event(produced)
        right.copy_(y, non_blocking=True)
    side.synchronize()
    assert torch.equal(right, numbers())
    assert not torch.equal(wrong, right)


def freed(sim: torch.device, kept: bool = False, recorded: bool = False) -> torch.Tensor:
    """What a copy on a side stream brings when its source is freed before it is done and the memory is used again."""
    side, host, source = torch.Stream(sim), pinned(), numbers().to(sim)
    address = source.data_ptr()
    with simulated.held(side):
        with side:
            host.copy_(source, non_blocking=True)
        if recorded:
            source.record_stream(side)
        if not kept:
            del source
        other = torch.zeros(N, device=sim)
        torch.accelerator.current_stream(sim).synchronize()
    assert (other.data_ptr() == address) == (not kept and not recorded)
    side.synchronize()
    return host


def test_a_source_freed_before_its_copy_is_done_is_wrong(sim: torch.device) -> None:
    assert not torch.equal(freed(sim), numbers())
    assert torch.equal(freed(sim, kept=True), numbers())
    assert torch.equal(freed(sim, recorded=True), numbers())


def test_a_host_that_runs_ahead_is_told_not_yet(sim: torch.device) -> None:
    """Of the last events; what it waited for is done, and wrong numbers come of nothing but a missing wait."""
    stream = torch.accelerator.current_stream(sim)
    with simulated.ahead(2):
        events = [event_on(stream) for _ in range(4)]
        stream.wait_event(events[3])
        torch.ones(3, device=sim).add(1).cpu()  # the stream has done all of it
        assert [event.query() for event in events] == [True, True, False, False]
        events[2].synchronize()
        assert [event.query() for event in events] == [True, True, True, False]
        torch.accelerator.synchronize(sim)
        assert events[3].query()
    with simulated.ahead():
        event = event_on(stream)
        assert torch.equal((torch.ones(3, device=sim) + 1).cpu(), torch.full((3,), 2.0))
        assert not event.query()
    assert event.query()


def test_copies_are_counted_and_the_host_waits_only_where_it_must(sim: torch.device) -> None:
    x, host = torch.ones(N, device=sim), pinned()
    with simulated.counted() as free:
        host.copy_(x, non_blocking=True)
        x.copy_(host, non_blocking=True)
        x.copy_(torch.ones(N), non_blocking=True)
        (x * 2).sum()
    assert free.waits == 0
    names = ("to_host_async", "to_device_async", "to_device_staged")
    assert [free[name] for name in names] == [1, 1, 1]
    assert [free[name + "_bytes"] for name in names] == [4 * N] * 3
    with simulated.counted() as waited:
        x.cpu()
        torch.ones(N).to(sim)
        x.sum().item()
        x[x > 0]
        torch.accelerator.synchronize()
    expected = {"to_host_blocking": 1, "to_device_blocking": 1, "operator_waits": 2, "device_waits": 1}
    assert {name: n for name, n in waited.items() if name in simulated.WAITS and n} == expected


def test_memory_is_counted_and_used_again(sim: torch.device) -> None:
    start = torch.accelerator.memory_allocated(sim)
    torch.accelerator.reset_peak_memory_stats(sim)
    x = torch.ones(N, device=sim)
    y = torch.ones(N, device=sim)
    assert torch.accelerator.memory_allocated(sim) == start + 8 * N
    address = y.data_ptr()
    del y
    assert torch.empty(N - 100, device=sim).data_ptr() == address
    del x
    assert torch.accelerator.memory_allocated(sim) == start
    assert torch.accelerator.max_memory_allocated(sim) == start + 8 * N


def test_a_query_says_not_yet_of_the_last_items_of_a_stream(sim: torch.device) -> None:
    stream, other = torch.Stream(sim), torch.Stream(sim)
    with simulated.lag(3):
        events = [event_on(stream) for _ in range(5)]
        alone = event_on(other)
        assert soon(events[0].query)
        assert [event.query() for event in events] == [True, True, False, False, False]
        assert not alone.query(), "items of another stream do not count"
        assert not stream.query()
        events[3].synchronize()
        assert [event.query() for event in events] == [True, True, True, True, False]
        stream.synchronize()
        assert events[4].query()
        assert stream.query()
        assert not alone.query()
    assert alone.query()


def test_a_missing_wait_gives_wrong_numbers_with_a_lag_too(sim: torch.device) -> None:
    main, side = torch.accelerator.current_stream(sim), torch.Stream(sim)
    x = torch.ones(N, device=sim)
    side.wait_stream(main)
    with simulated.lag():
        with simulated.held(main):
            y = x * 2
            with side:
                wrong = y + 1
                side.synchronize()
        side.wait_stream(main)
        with side:
            right = y + 1
        main.wait_stream(side)
        assert torch.equal(right.cpu(), torch.full((N,), 3.0))
        assert not torch.equal(wrong.cpu(), torch.full((N,), 3.0))
