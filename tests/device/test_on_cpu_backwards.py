"""OnCpu from a device under any backward: several, of several graphs, threads, streams, micro-batches, devices."""

from __future__ import annotations

import collections
import threading

import pytest
import torch

import disthooks as dh
from disthooks._streams import current_stream, event_on, new_stream, on
from tests.support.sim.carried import chain, every, given, gradient, is_clean, step, tier
from tests.support.threads import together

IN_FLIGHT = ["512 MiB", "500 KiB", 0]


@pytest.fixture(params=IN_FLIGHT)
def store(request: pytest.FixtureRequest) -> dh.OnCpu:
    return dh.OnCpu(in_flight=request.param)


def test_twice_through_one_graph(device: torch.device, store: dh.OnCpu) -> None:
    x = given(device)
    truth = gradient(x)
    for _ in range(3):
        with dh.saving(every(store)):
            y = chain(x)
        for _ in range(3):
            assert torch.equal(torch.autograd.grad(y, x, retain_graph=True)[0], truth)
        del y
        assert is_clean(store, device)


def test_double_backward(device: torch.device, store: dh.OnCpu) -> None:
    x = given(device)

    def twice() -> torch.Tensor:
        (first,) = torch.autograd.grad(chain(x, 6), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    truth = twice()
    for _ in range(3):
        with dh.saving(every(store)):
            found = twice()
        assert torch.equal(found, truth)
    assert is_clean(store, device)


def test_several_graphs_in_any_order(device: torch.device, store: dh.OnCpu) -> None:
    leaves = [given(device, seed=i) for i in range(4)]
    truths = [gradient(x) for x in leaves]
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3]):
        graphs = {}
        for i, x in enumerate(leaves):
            with dh.saving(every(store)):
                graphs[i] = chain(x)
        for i in order:
            assert torch.equal(torch.autograd.grad(graphs.pop(i), leaves[i])[0], truths[i])
        graphs.clear()
        assert is_clean(store, device)


@pytest.mark.parametrize("warm_up", [0, 1, 3])
def test_micro_open_of_a_pipeline(device: torch.device, store: dh.OnCpu, warm_up: int) -> None:
    """One forward, one backward, in turn, after some forwards ahead: the stages of a 1F1B schedule."""
    leaves = [given(device, seed=i) for i in range(8)]
    truths = [gradient(x) for x in leaves]
    for _ in range(3):
        alive: collections.deque[tuple[int, torch.Tensor]] = collections.deque()
        found = {}
        for i, x in enumerate(leaves):
            with dh.saving(every(store)):
                alive.append((i, chain(x)))
            if len(alive) > warm_up:
                j, y = alive.popleft()
                found[j] = torch.autograd.grad(y, leaves[j])[0]
        while alive:
            j, y = alive.popleft()
            found[j] = torch.autograd.grad(y, leaves[j])[0]
        del y
        assert all(torch.equal(found[i], truth) for i, truth in enumerate(truths))
        assert is_clean(store, device)


def test_the_last_stage_keeps_every_micro_batch(device: torch.device) -> None:
    """Its backward follows at once: nothing is copied once that is known."""
    x = given(device)
    store = dh.OnCpu(in_flight=20 * x.nbytes)
    for _ in range(3):
        before = tier(store).written
        graphs = []
        for _ in range(4):
            with dh.saving(every(store)):
                y = chain(x)
            torch.autograd.grad(y, x)
            graphs.append(y)
        graphs.clear()
        del y
        assert is_clean(store, device)
    assert tier(store).written == before > 0


def test_backward_in_another_thread(device: torch.device, store: dh.OnCpu) -> None:
    x = given(device)
    truth = gradient(x)
    found = []
    for _ in range(3):
        with dh.saving(every(store)):
            y = chain(x)
        graph = [y]
        del y
        thread = threading.Thread(target=lambda graph=graph: found.append(torch.autograd.grad(graph.pop(), x)[0]))
        thread.start()
        thread.join()
        assert torch.equal(found[-1], truth)
        assert is_clean(store, device)


def test_threads_at_once(device: torch.device, store: dh.OnCpu) -> None:
    truths = {i: gradient(given(device, seed=i)) for i in range(3)}
    wrong = []

    def work(i: int) -> None:
        x = given(device, seed=i)
        with on(new_stream(device)):
            current_stream(device).wait_event(event_on(main))
            for _ in range(6):
                if not torch.equal(step(store, x), truths[i]):
                    wrong.append(i)
            torch.accelerator.synchronize(device)

    main = current_stream(device)
    torch.accelerator.synchronize(device)
    assert set(together([lambda i=i: work(i) for i in range(3)])) == {None}
    assert not wrong
    assert is_clean(store, device)


def test_a_stream_of_its_own_in_forward(device: torch.device, store: dh.OnCpu) -> None:
    """What one stream makes and another saves; autograd runs the backward of each on its own."""
    x = given(device, 30_000)

    def run(context: object) -> torch.Tensor:
        side, main = new_stream(device), current_stream(device)
        with context:
            side.wait_event(event_on(main))
            with on(side):
                y = x.sin().exp().sin()
            main.wait_event(event_on(side))
            z = (y.cos() * x.exp()).sin()
        return torch.autograd.grad(z.sum(), x)[0]

    truth = run(torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t))
    torch.accelerator.synchronize(device)
    for _ in range(8):
        assert torch.equal(run(dh.saving(every(store))), truth)
    assert is_clean(store, device)
