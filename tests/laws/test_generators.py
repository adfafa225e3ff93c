"""Law 7 for generators: their own code runs with the hooks on, their consumer's with them off."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Generator, Iterator

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks._torch import top_hooks


class Steps(nn.Module):
    """Gives what each of its layers made, as a decoder gives tokens; told to skip by what is sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.closed = False

    def forward(self, x: torch.Tensor) -> Generator[torch.Tensor, bool, str]:
        try:
            for layer in self.layers:
                try:
                    skip = yield (x := layer(x).tanh())
                except ValueError:
                    skip = yield (x := x.exp())
                x = x.detach() if skip else x
            return "done"
        finally:
            self.closed = True


def _line(folder: pathlib.Path) -> object:
    return dh.pipeline(dh.AtLeast(0), dh.OnDisk(folder))


def _consume(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    total = x.sum() * 0
    for y in model(x):
        assert top_hooks(True) is None
        total = total + y.cos().sum()  # the consumer's own: it saves y without hooks
    total.backward()
    return x.grad


@pytest.mark.parametrize("how", ["wrapper", "in place", "decorator"])
def test_the_body_is_hooked_and_its_consumer_is_not(how: str, tmp_path: pathlib.Path) -> None:
    torch.manual_seed(0)
    model = Steps()
    x = torch.randn(8, 64)
    truth = _consume(model, x.requires_grad_()).clone()
    x.grad = None
    report = None
    if how == "wrapper":
        wrapped = dh.SaveWith(model, _line(tmp_path))
        got, report = _consume(wrapped, x), wrapped.report()
    elif how == "in place":
        with dh.save_activations(model, "", _line(tmp_path)) as saving:
            got, report = _consume(model, x), saving.report()
    else:
        saved = dh.saving(_line(tmp_path))
        got, report = _consume(saved(model.forward), x), saved.report()
    assert torch.equal(got, truth)
    # the three layers' inputs, and the last tanh's output, which the consumer saves too but not under ours
    assert report.stored == 4 * x.nbytes
    assert report.held == 0
    assert report.calls == 5 if how != "in place" else report.calls >= 4


def test_what_is_sent_thrown_and_returned_passes(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(Steps(), _line(tmp_path))
    body = model(torch.randn(8, 64))
    first = next(body)
    second = body.throw(ValueError())
    assert torch.equal(second, first.exp())
    third = body.send(True)
    assert third.grad_fn is not None
    next(body)
    with pytest.raises(StopIteration) as stop:
        next(body)
    assert stop.value.value == "done"
    assert model.unwrapped.closed
    assert top_hooks(True) is None


def test_an_error_inside_leaves_no_hook(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(Steps(), _line(tmp_path))
    body = model(torch.randn(8, 64))
    next(body)
    with pytest.raises(KeyError):
        body.throw(KeyError())
    assert top_hooks(True) is None
    assert model.unwrapped.closed


def test_a_generator_that_is_left_is_closed(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(Steps(), _line(tmp_path))
    body = model(torch.randn(8, 64))
    y = next(body)
    assert model.report().held > 0
    del body
    assert model.unwrapped.closed
    assert top_hooks(True) is None
    del y
    assert model.report().held == 0


def test_two_that_take_turns(tmp_path: pathlib.Path) -> None:
    one, two = (dh.SaveWith(Steps(), _line(tmp_path)) for _ in range(2))
    x = torch.randn(8, 64)
    for a, b in zip(one(x), two(x), strict=True):
        (a.sum() + b.sum()).backward(retain_graph=True)
    assert one.report().moved == two.report().moved > 0


def test_what_is_asynchronous_is_refused(tmp_path: pathlib.Path) -> None:
    class Later(nn.Linear):
        async def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(dh.errors.AttachError, match="asynchronous"):
        dh.save_activations(Later(2, 2), "", dh.OnDisk(tmp_path))
    with pytest.raises(dh.errors.UsageError, match="asynchronous"):
        dh.SaveWith(Later(2, 2), dh.OnDisk(tmp_path))
    with pytest.raises(dh.errors.UsageError, match="asynchronous"):
        dh.saving(dh.OnDisk(tmp_path))(Later(2, 2).forward)


def test_a_context_manager_made_of_a_generator(tmp_path: pathlib.Path) -> None:
    """A decorated function under ``contextlib.contextmanager``: its two halves are hooked, the block between is not."""
    saved = dh.saving(_line(tmp_path))
    x = torch.randn(8, 64, requires_grad=True)

    @contextlib.contextmanager
    @saved
    def halves() -> Iterator[list[torch.Tensor]]:
        made = [x.sin()]
        yield made
        made.append(made[0].sin())

    with halves() as made:
        y = made[0].cos()
    (made[1].sum() + y.sum()).backward()
    assert saved.report().stored == 2 * x.nbytes
