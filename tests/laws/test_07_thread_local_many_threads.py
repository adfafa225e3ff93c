"""Law 7, thread-local, under load.

Many threads over one store and one attachment, and the collector.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.support.models import Block, Conv, Recurrent, Tiny, identical
from tests.support.replicas import replicate
from tests.support.stores.copies import Copies
from tests.support.threads import together


@pytest.fixture(autouse=True)
def many_switches() -> Iterator[None]:
    """Threads change places a hundred times as often as usual, and operators use no threads of their own."""
    interval, count = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(5e-5)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(interval)
    torch.set_num_threads(count)


FULL = bool(os.environ.get("DISTHOOKS_FULL"))


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """A thread that collects garbage at random times: destructors run there, while others pack and unpack."""
    stop, chance = threading.Event(), random.Random(0)

    def collect() -> None:
        while not stop.wait(chance.uniform(0, 0.05)):
            gc.collect(chance.randrange(3))

    thread = threading.Thread(target=collect)
    gc.freeze()  # what is there already, torch itself, is not looked through again and again
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        gc.unfreeze()


def _filled(model: nn.Module, seed: int) -> nn.Module:
    """Fills the weights from a generator of its own.

    All threads share the global one, so dropout is switched off, too.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    for part in model.modules():
        part.training = not isinstance(part, Block)
    return model


def _linear() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4))


KINDS: list[tuple[Callable[[], nn.Module], Callable[[torch.Generator], torch.Tensor], object]] = [
    (_linear, lambda g: torch.randn(8, 16, generator=g), nn.Linear),
    (Conv, lambda g: torch.randn(2, 3, 8, 8, generator=g), "features*"),
    (lambda: Tiny(1, 16), lambda g: torch.randint(0, 50, (2, 8), generator=g), "blocks.*"),
    (Recurrent, lambda g: torch.randn(2, 4, 16, generator=g), "rnn"),
]


def train(seed: int, steps: int, store: object | None, check: Callable[[], object] = lambda: None) -> list:
    """Weights after some steps of a small model whose kind the seed decides; attached, wrapped, or in a block."""
    make, example, pattern = KINDS[seed % len(KINDS)]
    model = _filled(make(), seed)
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    block: contextlib.AbstractContextManager = contextlib.nullcontext()
    if store is not None:
        line = pipeline(store, at_least=seed % 3 * 512)
        way = seed // len(KINDS) % 3
        if way == 0:
            dh.save_activations(model, pattern, line)
        elif way == 1:
            model = dh.SaveWith(model, line)
        else:
            block = dh.saving(line)
    for step in range(steps):
        check()
        optimizer.zero_grad()
        with block:
            loss = model(example(generator)).square().mean()
            if step % 10 == 3:
                loss.me = loss  # a cycle: the graph waits for the collector
        if step % 7 != 3:
            loss.backward(retain_graph=step % 5 == 0)
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.first_tier(kind=("copies",))
@pytest.mark.full_tier(kind=("disk",))
@pytest.mark.parametrize("kind", ["disk", "copies"])
def test_thirty_two_threads_share_one_store(kind: str, tmp_path: pathlib.Path) -> None:
    """Models of every kind: each thread gets, bit for bit, what it gets alone and without hooks.

    Hundreds of steps in the full run; here fewer, for they are slow: threads change places all the time.
    """
    steps = 300 if FULL else 60 if kind == "disk" else 15
    alone = [train(seed, steps, None) for seed in range(32)]
    store = dh.OnDisk(tmp_path) if kind == "disk" else Copies()
    with collecting():
        found = together([lambda seed=seed: train(seed, steps, store) for seed in range(32)], limit=600 if FULL else 60)
    assert [seed for seed in range(32) if not isinstance(found[seed], list)] == []
    assert [seed for seed in range(32) if not identical(found[seed], alone[seed])] == []
    gc.collect()
    assert store.budget.held == 0


def _weights(copy: nn.Module) -> list[torch.Tensor]:
    return [weight for part in copy.modules() for weight in part._former_parameters.values()]


@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_eight_replicas_share_one_attachment(how: str, tmp_path: pathlib.Path) -> None:
    """Eight replicas share counters, inputs and weights' storages; gradients of each are those without hooks."""
    plain, x = _filled(Block(16, 2), 0), torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0))
    line = pipeline(dh.OnDisk(tmp_path), at_least=0)
    truth = torch.autograd.grad(plain(x).square().sum(), list(plain.parameters()))
    model = dh.SaveWith(plain, line) if how == "wrapper" else plain
    attached = model if how == "wrapper" else dh.save_activations(plain, "", line)

    def step(copy: nn.Module) -> list:
        found = []
        for _ in range(20):
            y = copy(x).square().sum()  # the same input everywhere: one content for all
            found = list(torch.autograd.grad(y, _weights(copy)))
        return found

    with collecting():
        for found in together([lambda c=c: step(c) for c in replicate(model, 8)]):
            assert identical(found, list(truth))
    assert attached.report().moved > 0
    assert attached.report().held == 0


@pytest.mark.parametrize("parts", [1, 2, 4])
def test_what_threads_save_at_the_same_moment_is_stored_once(parts: int) -> None:
    """Each thread saves the same tensor, or halves or quarters of it: several of them find no content yet."""
    for _ in range(100):
        x, store = torch.randn(64, 64, requires_grad=True), Copies()
        saved, shares = dh.saving(store, at_least=0), (x * 1).chunk(parts)
        y = sum(share.square().sum() for share in shares)
        (truth,) = torch.autograd.grad(y, x, retain_graph=True)

        def work(shares: tuple[torch.Tensor, ...] = shares, saved: Any = saved) -> torch.Tensor:
            with saved:
                return sum(share.square().sum() for share in shares)

        ys = together([work] * 4)
        assert saved.report().stored == x.nbytes
        for y in ys:
            assert torch.equal(*torch.autograd.grad(y, x, retain_graph=True), truth)


def test_no_count_is_lost_between_threads() -> None:
    """Counts take no lock, so a change of threads must not come between reading and writing one of them."""
    saved, interval, count = dh.saving(Copies(), at_least=0), sys.getswitchinterval(), 4000
    counters = saved._site.pipeline.counters

    def work() -> None:
        for _ in range(count):
            counts = counters.of_module("layer")
            counts.count_kept("small", 1)
            counts.count_put(2, 3, 1.0, 2)
            counts.count_got(4, 1.0)
            counters.count_call("layer")

    sys.setswitchinterval(1e-6)
    try:
        together([work] * 4)
    finally:
        sys.setswitchinterval(interval)
    report = saved.report()
    assert (report.kept, report.kept_by, report.stored) == (4 * count, {"small": 4 * count}, 8 * count)
    assert (report.moved, report.loaded, report.tensors, report.calls) == (12 * count, 16 * count, 4 * count, 4 * count)
    assert (report.pack_seconds, report.unpack_seconds) == (4 * count, 4 * count)
