"""The link between a device and the host: each hazard on purpose, by streams that stand still."""

from __future__ import annotations

import time

import pytest
import torch

from disthooks._streams import current_stream, event_on, new_stream, on
from disthooks.saved.stores import copies
from disthooks.saved.stores.copies import Link
from tests.support.sim import simulated
from tests.support.sim.carried import only_simulated

N = 4096
TIME = 0.02  # seconds in which what does not wait would be done


def numbers(device: torch.device, add: float = 0.0) -> torch.Tensor:
    return torch.arange(N, device=device, dtype=torch.float32) + add


def pinned() -> torch.Tensor:
    return torch.zeros(N, pin_memory=True)


TRUTH = torch.arange(N, dtype=torch.float32)


def test_it_is_sent_after_what_computes_it(device: torch.device) -> None:
    only_simulated(device)
    link, x = Link(device), numbers(device)
    y = torch.empty_like(x)
    torch.accelerator.synchronize(device)
    with simulated.held(current_stream(device)):
        y.copy_(x)
        sent = link.send(y, pinned())
        time.sleep(TIME)
    assert torch.equal(sent.wait(), TRUTH)
    assert sent.source is None


def test_both_ends_are_held_until_it_is_copied(device: torch.device) -> None:
    """Nobody but the link has them; freed memory would be overwritten."""
    only_simulated(device)
    link = Link(device)
    host, x = pinned(), numbers(device)
    torch.accelerator.synchronize(device)
    with simulated.held(link._out):
        sent = link.send(x, host)
        before = torch.accelerator.memory_allocated(device)
        del x
        link.poll()
        assert sent.source is not None
        assert torch.accelerator.memory_allocated(device) == before
    sent.done.synchronize()
    link.poll()
    assert sent.source is None
    assert torch.accelerator.memory_allocated(device) < before
    assert torch.equal(host, TRUTH)


def test_a_source_is_let_go_of_without_waiting(device: torch.device) -> None:
    """Its memory is used again at once by what comes later on the stream, which waits for the copy."""
    only_simulated(device)
    link = Link(device)
    host, x = pinned(), numbers(device)
    torch.accelerator.synchronize(device)
    with simulated.counted() as counts, simulated.held(link._out):
        sent = link.send(x, host)
        del x
        before = torch.accelerator.memory_allocated(device)
        link.let_go(sent)
        assert sent.source is None
        assert torch.accelerator.memory_allocated(device) < before
        after = torch.empty(N, device=device)
        after.copy_(host.new_full((N,), -1.0).pin_memory(), non_blocking=True)
    assert counts.waits == 0
    assert torch.equal(sent.wait(), TRUTH)
    assert torch.equal(after.cpu(), torch.full((N,), -1.0))


def test_memory_that_is_filled_is_not_used_by_others_before(device: torch.device) -> None:
    """Reload buffers are the current stream's: what had the memory before is done with it when the copy begins."""
    only_simulated(device)
    link = Link(device)
    sent = link.send(numbers(device), pinned())
    sent.wait()
    main = current_stream(device)
    x = torch.empty(N, device=device)
    out = pinned()
    torch.accelerator.synchronize(device)
    with simulated.held(main):
        x.copy_(sent.host.new_full((N,), 5.0).pin_memory(), non_blocking=True)
        out.copy_(x, non_blocking=True)
        del x
        coming = link.bring(sent.host, sent.done)
        back = link.take(coming)
    torch.accelerator.synchronize(device)
    assert torch.equal(out, torch.full((N,), 5.0))
    assert torch.equal(back.cpu(), TRUTH)


def test_it_comes_back_only_when_all_of_it_has_gone_out(device: torch.device) -> None:
    only_simulated(device)
    link, x = Link(device), numbers(device)
    torch.accelerator.synchronize(device)
    with simulated.held(link._out):
        sent = link.send(x, pinned())
        coming = link.bring(sent.host, sent.done)
        time.sleep(TIME)
    assert torch.equal(link.take(coming).cpu(), TRUTH)


def test_what_nobody_takes_is_held_until_it_has_come(device: torch.device) -> None:
    only_simulated(device)
    link = Link(device)
    sent = link.send(numbers(device), pinned())
    sent.wait()
    link.poll()
    torch.accelerator.synchronize(device)
    before = torch.accelerator.memory_allocated(device)
    with simulated.held(link._back):
        coming = link.bring(sent.host, sent.done)
        del coming
        link.poll()
        others = [torch.zeros(N, device=device) for _ in range(4)]
        assert torch.accelerator.memory_allocated(device) >= before + 5 * N * 4
    torch.accelerator.synchronize(device)
    link.poll()
    assert all(torch.equal(other.cpu(), torch.zeros(N)) for other in others)
    del others
    assert torch.accelerator.memory_allocated(device) == before


def test_it_is_taken_on_another_stream(device: torch.device) -> None:
    only_simulated(device)
    link, other = Link(device), new_stream(device)
    sent = link.send(numbers(device), pinned())
    sent.wait()
    with simulated.held(link._back):
        coming = link.bring(sent.host, sent.done)
        out = pinned()
        with on(other):
            back = link.take(coming)
            out.copy_(back, non_blocking=True)
        del back
        others = [torch.zeros(N, device=device) for _ in range(4)]
        torch.accelerator.current_stream(device).synchronize()
    torch.accelerator.synchronize(device)
    assert torch.equal(out, TRUTH)
    assert all(torch.equal(other.cpu(), torch.zeros(N)) for other in others)


@pytest.mark.parametrize("way", ["send", "bring"])
def test_an_interrupt_in_the_middle_of_a_copy(device: torch.device, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits for it, and nothing stands in the way of the next."""
    link = Link(device)
    sent = link.send(numbers(device), pinned())
    sent.wait()
    link.poll()
    calls = []

    def interrupted(stream: torch.Stream, timed: bool = False) -> torch.Event:
        calls.append(stream)
        if timed and len([True for call in calls if call is stream]) == 2:  # the end of the copy
            raise KeyboardInterrupt
        return event_on(stream, timed)

    begin = {"send": lambda: link.send(numbers(device), pinned()), "bring": lambda: link.bring(sent.host, sent.done)}[
        way
    ]
    with monkeypatch.context() as patch:
        patch.setattr(copies, "event_on", interrupted)
        with pytest.raises(KeyboardInterrupt):
            begin()
    for i in range(3):
        again = link.send(numbers(device, i), pinned())
        assert torch.equal(link.take(link.bring(again.host, again.done)).cpu(), TRUTH + i)
    torch.accelerator.synchronize(device)
    link.poll()
    assert not link._sent
    assert not link._coming
