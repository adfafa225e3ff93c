"""Law 10, bounded: a tier that is full sends down what will be wanted last, and nothing is lost or held twice."""

from __future__ import annotations

import copy
import gc
import pathlib
import pickle
import subprocess
import threading

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import StoreError, UsageError
from tests.support.models import Tiny, identical, tokens
from tests.support.stores.copies import Copies

ALL = dh.AtLeast(0)


def _chain(x: torch.Tensor, n: int = 10) -> torch.Tensor:
    for _ in range(n):
        x = x.sin()
    return x


def _truth(x: torch.Tensor, n: int = 10) -> torch.Tensor:
    z = x.detach().requires_grad_()
    _chain(z, n).sum().backward()
    assert z.grad is not None
    return z.grad


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(64, 64, requires_grad=True)


def test_the_oldest_go_down_and_every_limit_holds(x: torch.Tensor, tmp_path: pathlib.Path) -> None:
    n = x.nbytes
    tiers = dh.Tiered(dh.OnDevice(3 * n), dh.OnCpu(2 * n), dh.OnDisk(tmp_path))
    with dh.saving(ALL, tiers) as saved:
        y = _chain(x)
        assert all(report.limit is None or report.held <= report.limit for report in tiers.report())
    tiers.wait()
    assert [report.held for report in tiers.report()] == [3 * n, 2 * n, 5 * n]
    assert tiers.report()[2].written == 5 * n
    y.sum().backward()
    assert torch.equal(x.grad, _truth(x))
    assert [report.held for report in tiers.report()] == [0, 0, 0]
    assert [tier.name.partition("(")[0] for tier in saved.report().tiers] == ["OnDevice", "OnCpu", "OnDisk"]
    assert tiers.report()[2].read + tiers.report()[2].from_memory == 5 * n  # the newest never went to disk


def test_the_newest_stay_in_the_first(x: torch.Tensor) -> None:
    tiers = dh.Tiered(dh.OnDevice(3 * x.nbytes), Copies())
    tickets = [tiers.put(torch.full((64, 64), float(i))) for i in range(8)]
    assert [tiers.tier_of(ticket) for ticket in tickets] == [1] * 5 + [0] * 3
    for i, ticket in enumerate(tickets):
        assert torch.equal(tiers.get(ticket), torch.full((64, 64), float(i)))
        tiers.drop(ticket)
    assert tiers.stores[0].account.held == tiers.stores[1].account.held == 0


def test_a_large_one_goes_past_a_small_tier(x: torch.Tensor) -> None:
    """Those that are there stay: making room would not help."""
    tiers = dh.Tiered(dh.OnDevice(2 * x.nbytes), Copies())
    small = [tiers.put(torch.zeros(64, 64)) for _ in range(2)]
    large = tiers.put(torch.zeros(640, 64))
    assert [tiers.tier_of(ticket) for ticket in (*small, large)] == [0, 0, 1]


def test_when_the_last_is_full_too(x: torch.Tensor) -> None:
    tiers = dh.Tiered(dh.OnDevice(2 * x.nbytes), Copies(x.nbytes))
    with dh.saving(ALL, tiers) as saved, pytest.raises(StoreError, match="last tier is full") as caught:
        _chain(x)
    assert caught.value.wanted == x.nbytes
    del caught
    gc.collect()
    assert saved.report().held == 0
    assert [store.account.held for store in tiers.stores] == [0, 0]
    with dh.saving(ALL, tiers):
        y = _chain(x, 3)
    y.sum().backward()
    assert torch.equal(x.grad, _truth(x, 3))


def test_a_full_disk_spills_to_the_next(x: torch.Tensor, tmp_path: pathlib.Path) -> None:
    """A real one: nothing is lost, nothing raises, and the disk is used again when it is empty."""
    disk = tmp_path / "small"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "t", str(disk)], check=False).returncode:
        pytest.skip("mounting a small tmpfs needs privileges")
    try:
        tiers = dh.Tiered(dh.OnDisk(disk, in_flight=0), Copies())
        for _ in range(3):
            x.grad = None
            with dh.saving(ALL, tiers):
                y = _chain(x, 20)
                assert tiers.stores[1].account.held > 0
            assert tiers.report()[0].held > 0
            y.sum().backward()
            assert torch.equal(x.grad, _truth(x, 20))
            del y
            assert [store.account.held for store in tiers.stores] == [0, 0]
    finally:
        del tiers
        gc.collect()
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_model_under_a_limit(tmp_path: pathlib.Path) -> None:
    plain, model = Tiny(), Tiny()
    model.load_state_dict(plain.state_dict())
    tiers = dh.Tiered(dh.OnDevice("32 KiB"), dh.OnDisk(tmp_path))
    with dh.save_activations(model, "blocks.*", dh.pipeline(ALL, tiers)) as saving:
        for _ in range(3):
            for one in (plain, model):
                torch.manual_seed(0)
                one.zero_grad()
                one(tokens()).square().mean().backward()
            assert identical([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        assert saving.report().held == 0
        assert tiers.report()[1].written > 0


def test_a_constant_that_is_returned_as_a_gradient(tmp_path: pathlib.Path) -> None:
    """It is still where it was, in the first tier: what is made of the gradient must not reach it."""

    class Prepared(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(gradient)  # type: ignore[attr-defined]
            return (x * gradient).sum()

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            return ctx.saved_tensors[0], None  # type: ignore[attr-defined]

    gradient, x = torch.rand(64, 64), torch.ones(64, 64, requires_grad=True)
    content = gradient.clone()
    with dh.saving(ALL, dh.Tiered(dh.OnDevice("1 MiB"), dh.OnDisk(tmp_path))):
        loss = Prepared.apply(x, gradient)
    for _ in range(3):
        loss.backward(retain_graph=True)
    assert torch.equal(gradient, content)
    torch.testing.assert_close(x.grad, 3 * content)


def test_threads_share_the_tiers(tmp_path: pathlib.Path) -> None:
    tiers = dh.Tiered(dh.OnDevice("64 KiB"), dh.OnCpu("64 KiB"), dh.OnDisk(tmp_path))
    found: dict[int, torch.Tensor] = {}

    def train(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(32, 32, generator=generator).requires_grad_()
        total = torch.zeros(32, 32)
        for i in range(30):
            x.grad = None
            with dh.saving(ALL, tiers):
                y = _chain(x, 5 + (seed + i) % 7)
            y.sum().backward()
            total += x.grad - _truth(x, 5 + (seed + i) % 7)
        found[seed] = total

    threads = [threading.Thread(target=train, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(torch.equal(found[seed], torch.zeros(32, 32)) for seed in range(8))
    gc.collect()
    assert [store.account.held for store in tiers.stores] == [0, 0, 0]


def test_what_is_dropped_while_another_thread_is_at_it_is_let_go_of() -> None:
    class Slow(dh.OnCpu):
        def get(self, ticket: object) -> torch.Tensor:
            began.set()
            go_on.wait(10)
            return super().get(ticket)

    began, go_on = threading.Event(), threading.Event()
    store = Slow()
    tiers = dh.Tiered(store, dh.OnDevice("1 MiB"))
    ticket = tiers.put(torch.ones(100))
    thread = threading.Thread(target=tiers.get, args=(ticket,))
    thread.start()
    assert began.wait(10)
    tiers.drop(ticket)
    assert store.account.held == 400
    go_on.set()
    thread.join(10)
    assert store.account.held == 0


def test_a_share_of_the_node(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    for store in (dh.OnDisk(tmp_path, "1 MiB per node"), dh.OnCpu("1 MiB per node"), dh.OnDevice("1 MiB per node")):
        assert store.report()[0].limit == 1 << 18
        assert pickle.loads(pickle.dumps(store)).report()[0].limit == 1 << 18


def test_what_it_refuses_and_copies(tmp_path: pathlib.Path) -> None:
    functions = dh.Functions(lambda t: t, lambda t: t)
    for bad in [(), (dh.OnCpu(),), (dh.OnCpu(), functions), (dh.OnCpu(), "disk")]:
        with pytest.raises(UsageError, match="Tiered takes two or more"):
            dh.Tiered(*bad)
    with pytest.raises(UsageError, match=r"without a limit takes everything.*such as OnDevice\('8 GiB'\)"):
        dh.Tiered(dh.OnDevice(), dh.OnDisk(tmp_path))
    tiers = dh.Tiered(dh.OnDevice("1 MiB"), dh.OnDisk(tmp_path))
    for other in (copy.deepcopy(tiers), pickle.loads(pickle.dumps(tiers))):
        assert repr(other) == repr(tiers)
        assert other == tiers
    model = dh.SaveWith(nn.Linear(64, 64), tiers)
    model(torch.ones(64, 64)).sum().backward()
    assert "OnDevice" in str(model.report())
