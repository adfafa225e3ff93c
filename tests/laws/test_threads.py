"""Law 7, thread-local: hooks are on only in the thread that is inside the wrapped forward."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks._torch import top_hooks
from disthooks.saved.stores.base import Store
from tests.support.models import Tiny, identical, step, tokens
from tests.support.replicas import replicate


def _in_threads(functions: list[Callable[[], object]]) -> list[object]:
    """What each returned, or the exception; each checks that it leaves no hooks in its thread."""
    results: list[object] = [None] * len(functions)

    def run(i: int) -> None:
        try:
            results[i] = functions[i]()
        except BaseException as error:
            results[i] = error
        if top_hooks(True) is not None:
            results[i] = AssertionError("hooks were left in the thread")

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


class Shards(nn.Module):
    """Two layers whose forward can be made to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        if x[0, 0] > 1e6:
            raise ValueError("as asked")
        if x[0, 0] < -1e6:
            raise KeyboardInterrupt
        return y


@pytest.mark.parametrize("how", ["wrapper", "in place"])
def test_replicas_save_inside_their_own_forward(how: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    plain = Shards()
    halves = torch.randn(2, 8, 64).unbind()
    plain(torch.cat(halves)).sum().backward()
    truth = [p.grad.clone() for p in plain.parameters()]
    plain.zero_grad()
    if how == "wrapper":
        model = attached = dh.SaveToDisk(plain, tmp_path, at_least=0)
    else:
        model, attached = plain, dh.save_activations(plain, "", dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path)))
    copies = replicate(model, 2)
    outputs = _in_threads([lambda c=c, x=x: c(x) for c, x in zip(copies, halves, strict=True)])
    # Per replica: the two layers' inputs; Tanh's output is the second of them. No weights.
    assert attached.report().moved == 2 * 2 * halves[0].nbytes
    assert attached.report().kept_by["parameter"] > 0
    sum(y.sum() for y in outputs).backward()
    for parameter, expected in zip(plain.parameters(), truth, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-5, atol=1e-5)
    assert attached.report().held == 0


def test_replicas_use_their_own_weights(tmp_path: pathlib.Path) -> None:
    model = dh.SaveToDisk(nn.Linear(8, 8, bias=False), tmp_path)
    one, two = replicate(model, 2)
    with torch.no_grad():
        two.unwrapped.weight.zero_()
    x = torch.ones(1, 8)
    assert two(x).abs().sum() == 0
    assert one(x).abs().sum() > 0


def test_hooks_entered_outside_do_nothing_in_replicas(tmp_path: pathlib.Path) -> None:
    """Why the wrapper is needed: a block around the call does not reach into other threads."""
    copies = replicate(Shards(), 2)
    with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))) as saved:
        _in_threads([lambda c=c: c(torch.randn(8, 64)) for c in copies])
    assert saved.report().moved == 0


@pytest.mark.parametrize(("value", "kind"), [(1e7, ValueError), (-1e7, KeyboardInterrupt)])
def test_an_exception_leaves_no_hook(value: float, kind: type[BaseException], tmp_path: pathlib.Path) -> None:
    model = dh.SaveToDisk(Shards(), tmp_path, at_least=0)
    bad = torch.full((8, 64), value)
    results = _in_threads([lambda c=c, x=x: c(x) for c, x in zip(replicate(model, 2), (bad, bad / value), strict=True)])
    assert isinstance(results[0], kind)
    assert isinstance(results[1], torch.Tensor)
    with pytest.raises(kind):
        model(bad)
    assert top_hooks(True) is None
    results.clear()
    model(bad / value).sum().backward()


def test_an_outer_pair_is_there_again_after_an_exception(tmp_path: pathlib.Path) -> None:
    model = Shards()
    dh.save_activations(model, "layers", dh.OnDisk(tmp_path))
    with dh.saving(dh.OnCpu()):
        outer = top_hooks(True)
        with pytest.raises(ValueError, match="as asked"):
            model(torch.full((8, 64), 1e7))
        assert top_hooks(True) == outer
    assert top_hooks(True) is None


def test_many_threads_train_their_own_models(tmp_path: pathlib.Path) -> None:
    """Sixteen threads over one store: each gets what it would get alone."""
    store = dh.OnDisk(tmp_path)

    def train(seed: int) -> list:
        model = Shards()
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed))  # the global one is all threads'
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-0.1, 0.1 + seed / 100, parameter.numel()).view_as(parameter))
        for _ in range(20):
            with dh.save_activations(model, "layers.*", store):
                model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    alone = [train(seed) for seed in range(16)]
    together = _in_threads([lambda seed=seed: train(seed) for seed in range(16)])
    assert all(identical(a, b) for a, b in zip(alone, together, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="DataParallel needs two GPUs")
def test_data_parallel(tmp_path: pathlib.Path) -> None:
    model = Tiny().cuda()
    truth = step(model, tokens().cuda())
    for i, block in enumerate(model.blocks):
        model.blocks[i] = dh.SaveToDisk(block, tmp_path)
    got = step(nn.DataParallel(model), tokens().cuda())
    for a, b in zip(got, truth, strict=True):
        torch.testing.assert_close(a, b)
    assert model.blocks[0].report().moved > 0


class Slow(Store):
    """A store whose reads wait until they are let go on."""

    def __init__(self) -> None:
        self.reading, self.go_on = threading.Event(), threading.Event()

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        self.reading.set()
        assert self.go_on.wait(60)
        return ticket.clone()

    def drop(self, ticket: torch.Tensor) -> None:
        pass


def test_a_backward_reads_what_a_forward_saves_again() -> None:
    """One thread has the packed value and wants to count, another one counts and wants the packed value."""
    store = Slow()
    x = torch.randn(256, 64, requires_grad=True)
    with dh.saving(store) as saving:
        y = x.exp()
        z = y.sin()

        def read() -> None:
            z.sum().backward()

        def save() -> None:
            assert store.reading.wait(60)
            with saving:
                y[:64].cos()

        threads = [threading.Thread(target=one, daemon=True) for one in (read, save)]
        y.sum()  # the contents of y are taken
        for thread in threads:
            thread.start()
        assert store.reading.wait(60)
        threads[1].join(0.5)  # it saves, or waits for the reader
        store.go_on.set()
        for thread in threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
    assert saving.report().shared > 0
