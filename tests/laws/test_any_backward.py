"""Law 4, any backward: again, twice, partly, late, elsewhere, or never."""

from __future__ import annotations

import pathlib
import threading

import pytest
import torch

import disthooks as dh


@pytest.fixture
def graph(tmp_path: pathlib.Path) -> tuple[torch.Tensor, torch.Tensor, dh.saving]:
    """x, y = sum of exp(x)² and the block it was made in, which is closed; float64."""
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))) as saved:
        y = x.exp().square().sum()
    assert saved.report().moved > 0
    return x, y, saved


def test_retained_and_run_again(graph: tuple) -> None:
    x, y, saved = graph
    first = torch.autograd.grad(y, x, retain_graph=True)[0]
    second = torch.autograd.grad(y, x)[0]
    assert torch.equal(first, second)
    torch.testing.assert_close(first, 2 * x.detach().exp().square())
    assert saved.report().held == 0


def test_double_backward(tmp_path: pathlib.Path) -> None:
    x = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    line = dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))

    def f(x: torch.Tensor) -> torch.Tensor:
        with dh.saving(line):
            return (x.exp() @ x.sin()).square()

    assert torch.autograd.gradcheck(f, (x,))
    assert torch.autograd.gradgradcheck(f, (x,))


def test_read_through_grad_fn_any_number_of_times(graph: tuple) -> None:
    x, y, _ = graph
    square = y.grad_fn.next_functions[0][0]
    for _ in range(3):
        assert torch.equal(square._saved_self, x.exp())
    y.backward()
    with pytest.raises(RuntimeError, match="freed"):
        _ = square._saved_self


def test_in_another_thread(graph: tuple) -> None:
    x, y, _ = graph
    thread = threading.Thread(target=y.backward)
    thread.start()
    thread.join()
    torch.testing.assert_close(x.grad, 2 * x.detach().exp().square())


def test_two_threads_read_one_graph(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))):
        y = x.exp().square().sum()
    found: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(50):
            found.append(torch.autograd.grad(y, x, retain_graph=True)[0])

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 200
    assert all(torch.equal(grad, found[0]) for grad in found)


def test_dropped_without_backward(tmp_path: pathlib.Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)
    with dh.saving(dh.OnDisk(tmp_path)) as saved:
        y = x.exp()
    assert saved.report().held == x.nbytes
    del y
    assert saved.report().held == 0


def test_inside_the_block_with_a_graph_of_the_backward(tmp_path: pathlib.Path) -> None:
    """A backward inside the block packs what it saves itself."""
    x = torch.randn(64, 64, dtype=torch.float64, requires_grad=True)
    with dh.saving(dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))) as saved:
        (first,) = torch.autograd.grad(x.exp().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    torch.testing.assert_close(second, 2 * x.detach().exp().square())
    del first
    assert saved.report().held == 0
