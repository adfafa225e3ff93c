"""Saved tensors of a GPU: exact, really moved, and ordered on the streams that use them."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

import pytest
import torch

import disthooks as dh
from tests.support.models import build, identical, stores
from tests.support.switch import repeatable

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.fixture(autouse=True)
def deterministic() -> object:
    """cuDNN and scatter-adds may differ from themselves; what is compared must not."""
    repeatable()
    yield
    repeatable(False)


@pytest.mark.parametrize("kind", ["cpu", "disk"])
def test_device_memory_falls(kind: str, tmp_path: pathlib.Path) -> None:
    layers = torch.nn.Sequential(
        *[part for _ in range(8) for part in (torch.nn.Linear(512, 512), torch.nn.Tanh())]
    ).cuda()
    x = torch.randn(16_384, 512, device="cuda")

    def held(context: object, wait: Callable[[], None]) -> int:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with context:
            y = layers(x)
        wait()  # until then half a gigabyte may be on its way
        held = torch.cuda.memory_allocated() - before
        y.sum().backward()
        return held

    plain = held(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), torch.cuda.synchronize)
    store = stores(tmp_path)[kind]
    assert held(dh.saving(store), store.wait) < plain / 4


def test_pinned_memory_is_used_and_bounded() -> None:
    store = dh.OnCpu("8 MiB")
    ticket = store.put(torch.ones(1 << 20, device="cuda"))
    assert store.peek(ticket).is_pinned()
    with pytest.raises(dh.errors.StoreError, match="full"):
        store.put(torch.ones(2 << 20, device="cuda"))


def test_a_side_stream_in_forward_and_in_backward(tmp_path: pathlib.Path) -> None:
    """What a side stream fills is copied in its order, and what one stream brings back another may use."""
    x = torch.randn(4096, 1024, device="cuda", requires_grad=True)

    def run(context: object) -> torch.Tensor:
        x.grad = None
        side = torch.cuda.Stream()
        with context:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                y = x
                for _ in range(20):
                    y = (y @ torch.eye(1024, device="cuda")).tanh()
                z = y.exp()
            torch.cuda.current_stream().wait_stream(side)
            w = y.sin() + z.cos()
        w.sum().backward()
        torch.cuda.synchronize()
        return x.grad.clone()

    truth = run(torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t))
    for kind in ("cpu", "disk"):
        for _ in range(5):
            assert torch.equal(run(dh.saving(stores(tmp_path)[kind])), truth)


def test_autocast_and_accumulation(tmp_path: pathlib.Path) -> None:
    model, x = build("transformer")
    model, x = model.cuda().eval(), x.cuda()

    def run() -> list:
        model.zero_grad()
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(x).float().square().mean()
            loss.backward()
        return [p.grad.clone() for p in model.parameters()]

    truth = run()
    with dh.save_activations(model, "blocks.*", dh.OnCpu()) as saving:
        for _ in range(2):  # what the device had not said by the end of one forward is settled in a later one
            assert identical(run(), truth)
            torch.cuda.synchronize()
    assert saving.report().recast > 0
