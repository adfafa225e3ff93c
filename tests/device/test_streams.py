"""What is put on one stream and moved, read or let go of on another: each hazard on purpose, by streams that wait."""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Callable

import pytest
import torch

import disthooks as dh
from disthooks import _torch
from disthooks._streams import current_stream, event_on, new_stream, on
from disthooks.saved import contents
from disthooks.saved.pipeline import pipeline
from tests.support.sim import simulated
from tests.support.sim.carried import chain, every, given, is_clean, only_simulated
from tests.support.stores.inside import in_host, limit_device, offload_of

N = 50_000
TIME = 0.05  # seconds in which what does not wait would be done


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A clone, which a simulated stream does beside the host."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def learned(store: dh.OnCpu, x: torch.Tensor) -> None:
    """From now on the first two tensors are expected to come back at once."""
    for _ in range(2):
        tickets = [store.put(x.detach().clone()) for _ in range(2)]
        for ticket in reversed(tickets):
            store.get(ticket)
        for ticket in tickets:
            store.drop(ticket)
        tickets.clear()
        store.wait()


def beside(function: Callable[[], torch.Tensor]) -> tuple[threading.Thread, list[torch.Tensor]]:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(function().cpu()))
    thread.start()
    return thread, found


@pytest.mark.parametrize("how", ["room", "asked for"])
def test_what_stayed_is_sent_after_the_stream_that_made_it(device: torch.device, how: str) -> None:
    only_simulated(device)
    store, x, side = dh.OnCpu(in_flight=3 * N * 4), given(device).detach(), new_stream(device)
    learned(store, x)
    torch.accelerator.synchronize(device)
    with simulated.held(side):
        with on(side):
            ticket = store.put(copied(x))
        assert ticket.entry in offload_of(store, device)._staying
        thread, found = None, []
        if how == "room":
            limit_device(store, 0, device)
        else:
            thread, found = beside(lambda: in_host(store, ticket))
        time.sleep(TIME)
    if thread is not None:
        thread.join()
        assert torch.equal(found[0], x.cpu())
    assert torch.equal(in_host(store, ticket), x.cpu())
    store.drop(ticket)
    assert is_clean(store, device)


def test_a_small_copy_is_read_on_another_stream(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made in the order of the stream that saved it, and later than that."""
    only_simulated(device)

    def take(self: contents.SmallCopy, storage: torch.UntypedStorage) -> bool:
        self._copy = copied(self.content(storage))
        return True

    monkeypatch.setattr(contents.SmallCopy, "_offload", take)
    side, main = new_stream(device), current_stream(device)
    part = given(device, 8 * N).detach()[1000:3000]
    leaf = given(device, 2000)
    saving = dh.saving(pipeline(dh.OnCpu(), at_least="64 KiB"))
    saving.__enter__()
    with on(side):
        y = leaf * part
    main.wait_event(event_on(side))
    torch.accelerator.synchronize(device)
    with simulated.held(side):
        saving.__exit__(None, None, None)
        thread, found = beside(lambda: y.grad_fn._saved_other)
        time.sleep(TIME)
    thread.join()
    assert type(y.grad_fn._raw_saved_other.data.packed) is contents.SmallCopy
    assert torch.equal(found[0], part.cpu())


def test_memory_of_another_stream_is_not_used_again_too_soon(device: torch.device) -> None:
    """A graph would have held it. Its stream has it again while another one is still to read it."""
    only_simulated(device)
    store, x = dh.OnCpu(in_flight=0), given(device).detach()
    first, second = new_stream(device), new_stream(device)
    seen = torch.zeros(N, device=device)
    junk = torch.full((N,), 7.0).pin_memory()
    torch.accelerator.synchronize(device)
    with dh.saving(every(store)):
        with on(first):
            y = copied(x).requires_grad_() * 1
        second.wait_event(event_on(first))
        with on(second):
            z = y.sin().cos()  # saves y, and has it taken
        store.wait()
        with simulated.held(second):
            with on(second), torch.no_grad():
                seen.copy_(y)
            del y
            offload_of(store, device).device_bytes  # noqa: B018  what is copied is let go of
            with on(first):
                for _ in range(4):
                    torch.empty(N, device=device).copy_(junk, non_blocking=True)
            first.synchronize()
    torch.accelerator.synchronize(device)
    assert torch.equal(seen, x)
    del z


def test_no_event_is_asked_in_a_capture(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of before may be let go of while a CUDA graph is captured: a question would end the capture."""
    x = given(device)
    store = dh.OnCpu(in_flight="64 MiB")
    with dh.saving(every(store)):
        y = chain(x)
    torch.accelerator.synchronize(device)
    flying = [transfer for transfer in offload_of(store, device)._flying if transfer.outgoing.source is not None]
    with monkeypatch.context() as patch:
        patch.setattr(_torch, "_HAS_GRAPHS", True)
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        del y
        gc.collect()
        assert flying
        assert all(transfer.outgoing.source is not None for transfer in flying)  # though it is copied
    del flying
    assert is_clean(store, device)


def test_what_stays_on_the_device_is_read_in_order(device: torch.device) -> None:
    """OnDevice gives back a tensor whose stream is not done with it; the reader's stream waits."""
    only_simulated(device)
    values, back = torch.randn(4096).pin_memory(), torch.zeros(4096).pin_memory()
    side, store = new_stream(device), dh.OnDevice()
    with simulated.held(side):
        with on(side):
            made = torch.empty(4096, device=device).copy_(values, non_blocking=True)
            ticket = store.put(made)
        back.copy_(store.get(ticket), non_blocking=True)  # on another stream, which does not know of the side stream
    torch.accelerator.synchronize()
    assert torch.equal(back, values)


#: What is saved, of the tensor that is written through ``.data``.
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda written: written,
    "reshaped": lambda written: written.view(-1, 100),
    "transposed": lambda written: written.t(),
}


@pytest.mark.parametrize("stages", [(), (dh.Recompute(),)], ids=["stored", "recompute"])
@pytest.mark.parametrize(
    ("kind", "view"),
    [("leaf", "itself"), ("leaf", "reshaped"), ("constant", "itself"), ("constant", "transposed"), ("flat", "itself")],
)
def test_what_has_no_history_is_not_trusted_by_its_version(
    device: torch.device, kind: str, view: str, stages: tuple[object, ...]
) -> None:
    """Optimizers and line searches write leaves and constants through ``.data``, and a device cannot compare bytes."""

    def gradients(hooks: contextlib.AbstractContextManager[object]) -> list[torch.Tensor]:
        leaf = torch.linspace(1, 2, 200 * 100).view(200, 100).to(device).requires_grad_()
        weight = torch.ones((), device=device, requires_grad=True)
        written = leaf if kind == "leaf" else leaf.detach().clone()
        written = written.flatten() if kind == "flat" else written
        saved = VIEWS[view](written)
        with hooks:
            total = (saved * weight).sum()
            for _ in range(3):
                total = total + weight.exp()  # the contents are taken when the next operator begins
                written.data.add_(1)
                total = total + (saved * weight).sum() + (saved * weight).exp().sum() * 1e-6
        return [
            each.cpu() for each in torch.autograd.grad(total, [weight, leaf], allow_unused=True) if each is not None
        ]

    copying = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda copy: copy)
    expected = gradients(copying)
    found = gradients(dh.saving(*stages, dh.OnCpu(), at_least=0))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
