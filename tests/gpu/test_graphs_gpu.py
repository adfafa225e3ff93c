"""CUDA graphs: a capture with hooks in it is refused; the compiler's keep what they save, and the rest is stored."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.errors import AttachError
from disthooks.saved.pipeline import pipeline
from disthooks.saved.report import SavedReport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


class Net(nn.Module):
    """Three blocks; the one in the middle is compiled, if asked for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.third = (
            nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)).sin())


def _capture(call: object) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()  # type: ignore[operator]
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()  # type: ignore[operator]
    return graph


def test_a_capture_of_forward_and_backward_is_refused_and_works_once_removed() -> None:
    model, x = Net().cuda(), torch.randn(64, 128, device="cuda")

    def step() -> None:
        model(x).square().sum().backward()

    saving = dh.save_activations(model, ["first", "third"], dh.OnCpu())
    with pytest.raises(AttachError, match=r"'first'.*CUDA graph is being captured"):
        _capture(step)
    torch.cuda.synchronize()
    saving.remove()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    graph = _capture(step)
    for parameter in model.parameters():
        parameter.grad.zero_()
    graph.replay()
    got = [p.grad.clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad.zero_()
    step()
    assert all(torch.allclose(a, p.grad) for a, p in zip(got, model.parameters(), strict=True))


def test_a_capture_that_begins_inside_a_block_of_hooks_is_refused() -> None:
    layer, x = nn.Linear(128, 128).cuda(), torch.randn(256, 128, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(AttachError, match=r"a saving\(\.\.\.\) block"), dh.saving(dh.OnCpu()), torch.cuda.graph(graph):
        layer(x.tanh()).sum()


def test_make_graphed_callables_is_refused_with_hooks_inside_and_works_beside_them() -> None:
    model, x = Net().cuda(), torch.randn(64, 128, device="cuda", requires_grad=True)
    truth = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    saving = dh.save_activations(model, "second.*", dh.OnCpu())
    with pytest.raises(AttachError, match="make_graphed_callables"):
        torch.cuda.make_graphed_callables(model.second, (x.detach().requires_grad_(),))
    torch.cuda.synchronize()
    saving.remove()
    model.second = torch.cuda.make_graphed_callables(model.second, (x.detach().requires_grad_(),))
    with dh.save_activations(model, ["first", "third"], pipeline(dh.OnCpu(), at_least=0)) as saving:
        for _ in range(3):
            got = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    assert all(torch.allclose(a, b) for a, b in zip(got, truth, strict=True))
    assert saving.report().moved > 0


def test_a_captured_step_with_rules_is_refused() -> None:
    model, x = nn.Linear(64, 64).cuda(), torch.randn(8, 64, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()

    with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)]), pytest.raises(AttachError, match="optimizer's step"):
        _capture(step)
    torch.cuda.synchronize()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("steps", [12])
def test_reduce_overhead_keeps_its_own_and_the_rest_is_stored(steps: int) -> None:
    """Other numbers each step, hooks around everything: gradients are those of the same compiled model without."""

    def train(hooked: bool) -> tuple[list[torch.Tensor], SavedReport | None]:
        torch._dynamo.reset()
        model = Net().cuda()
        model.second.compile(mode="reduce-overhead", fullgraph=True)
        to = pipeline(dh.OnCpu(), at_least=0)
        saving = dh.save_activations(model, ["first", "second", "third"], to) if hooked else None
        found = []
        for number in range(steps):
            torch.compiler.cudagraph_mark_step_begin()
            x = torch.randn(512, 128, device="cuda", generator=torch.Generator("cuda").manual_seed(number))
            model.zero_grad()
            model(x).square().mean().backward()
            found += [p.grad.clone() for p in model.parameters()]
        return found, saving and saving.report()

    truth, _ = train(hooked=False)
    with pytest.warns(UserWarning, match="reduce-overhead"):
        got, report = train(hooked=True)
    assert all(torch.equal(a, b) for a, b in zip(got, truth, strict=True))
    assert report is not None
    assert report.moved > 0
    assert report.kept_by["CUDA graph"] > 0
