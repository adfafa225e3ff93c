"""Law 2, weights stay.

"Parameters, their views (`weight.t()`), FSDP's unsharded parameters and a DataParallel replica's copies are never
copied into a store. An autocast copy of a weight is not stored either: it is cast again at unpack."

This file shows it in one process; tests/engines shows it for FSDP.
"""

from __future__ import annotations

import gc
import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from disthooks.saved.weights import AutocastCopy
from tests.support.models import identical
from tests.support.replicas import replicate

pytestmark = pytest.mark.any_device


def test_parameters_and_their_views_stay(tmp_path: pathlib.Path) -> None:
    weight = nn.Parameter(torch.randn(64, 64))
    x = torch.randn(8, 64, requires_grad=True)
    with dh.saving(pipeline(dh.OnDisk(tmp_path), at_least=0)) as saved:
        y = x @ weight + x @ weight.t() + x @ weight.view(64, 64)[:].t()
    y.sum().backward()
    assert saved.report().stored == x.nbytes
    assert saved.report().kept_by["parameter"] == 3 * weight.nbytes


def test_a_buffer_and_a_detached_weight_stay(tmp_path: pathlib.Path) -> None:
    class Masked(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x * self.mask, self.weight.detach()) + self.mask[:1]

    layer = Masked(64, 64)
    layer.register_buffer("mask", torch.rand(8, 64))
    wrapped = dh.SaveWith(layer, dh.OnDisk(tmp_path), at_least=0)
    wrapped(torch.randn(8, 64, requires_grad=True)).sum().backward()
    assert wrapped.report().stored == 0
    assert wrapped.report().kept_by == {"buffer": layer.mask.nbytes, "parameter": layer.weight.nbytes}


def test_replicas_keep_their_copies(tmp_path: pathlib.Path) -> None:
    model = dh.SaveWith(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), dh.OnDisk(tmp_path), at_least=0)
    for copy in replicate(model, 2):
        copy(torch.randn(8, 64, requires_grad=True)).sum().backward()
    report = model.report()
    assert report.kept_by["parameter"] == 2 * 2 * 64 * 64 * 4
    assert report.stored == 2 * 2 * 8 * 64 * 4  # two inputs for each replica; the ReLU shares the second


# --- Autocast's copies of weights


class Narrow(nn.Module):
    """Two layers under autocast.

    The last operation saves nothing large, so that nothing is pending when the forward ends.
    """

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(64, 64).requires_grad_(not frozen), nn.Linear(64, 64)
        self.conv = nn.Conv1d(8, 8, 3).to(memory_format=torch.preserve_format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.conv(self.two(self.one(x).relu())).float()


def _taken(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The gradients, taken off."""
    leaves = [leaf for leaf in (x, *model.parameters()) if leaf.grad is not None]
    found = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return found


def _narrow(frozen: bool = False) -> tuple[Narrow, torch.Tensor, list[torch.Tensor]]:
    torch.manual_seed(0)
    model, x = Narrow(frozen), torch.randn(8, 64, requires_grad=True)
    model(x).sum().backward()
    return model, x, _taken(model, x)


def _live(nbytes: int) -> int:
    """Narrow tensors of ``nbytes`` bytes that are alive, a graph's packed ones included."""
    alive = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.dtype is torch.bfloat16]
    return sum(t.untyped_storage().nbytes() == nbytes for t in alive)


@pytest.mark.parametrize("frozen", [False, True])
def test_an_autocast_copy_is_dropped_and_cast_again(frozen: bool, tmp_path: pathlib.Path) -> None:
    model, x, truth = _narrow(frozen)
    with dh.save_activations(model, "", pipeline(dh.OnDisk(tmp_path), at_least="2 KiB")) as saving:
        y = model(x)
        report = saving.report()
        assert report.recast == 2 * 64 * 64 * 2
        assert report.stored == 0  # the activations are small here
        assert _live(64 * 64 * 2) == 0
        y.sum().backward(retain_graph=True)
        assert identical(_taken(model, x), truth)
        y.sum().backward()
        assert identical(_taken(model, x), truth)


def test_a_copy_that_others_hold_is_not_cast_again(tmp_path: pathlib.Path) -> None:
    """Autocast keeps its copies until its block ends, and a backward inside that block uses them."""
    model, x, truth = _narrow()
    with torch.autocast("cpu", torch.bfloat16), dh.save_activations(model, "", dh.OnDisk(tmp_path)) as saving:
        y = model(x)
        assert saving.report().recast == 2 * 64 * 64 * 2
        y.sum().backward()
    assert identical(_taken(model, x), truth)


def test_a_copy_whose_weight_has_changed_since_raises(tmp_path: pathlib.Path) -> None:
    model, x, _ = _narrow()
    with dh.save_activations(model, "", dh.OnDisk(tmp_path)):
        y = model(x)
        with torch.no_grad():
            model.two.weight.mul_(2)
        with pytest.raises(dh.errors.MutationError, match=r"weight was changed.*before the optimizer steps"):
            y.sum().backward()


UNCOUNTED = {
    "written through .data": lambda weight: weight.data.mul_(2),
    "exchanged": lambda weight: setattr(weight, "data", torch.rand_like(weight)),
    "rounded and back": lambda weight: setattr(weight, "data", weight.data.to(torch.float8_e4m3fn).float()),
    "in another order": lambda weight: setattr(weight, "data", weight.data.t().contiguous().t()),
}


@pytest.mark.parametrize("change", UNCOUNTED)
def test_a_weight_that_changed_uncounted_raises(change: str, tmp_path: pathlib.Path) -> None:
    """No version counter shows the change, but the copy that is cast in backward has another checksum."""
    model, x, _ = _narrow()
    with dh.save_activations(model, "", dh.OnDisk(tmp_path)) as saving:
        y = model(x)
    assert saving.report().recast > 0
    UNCOUNTED[change](model.two.weight)
    with pytest.raises(dh.errors.MutationError, match="a weight was changed"):
        y.sum().backward()


def test_a_weight_that_was_moved_is_cast_again(tmp_path: pathlib.Path) -> None:
    """ZeRO-3 gathers a weight again for backward: the same values lie in other memory."""
    model, x, truth = _narrow()
    with dh.save_activations(model, "", dh.OnDisk(tmp_path)):
        y = model(x)
    model.two.weight.data = model.two.weight.data.clone()
    y.sum().backward()
    assert identical(_taken(model, x), truth)


def test_a_stale_copy_stays(tmp_path: pathlib.Path) -> None:
    """Autocast's cache does not see that a weight was changed.

    Its old copy is not what a new cast gives, and must be kept.
    """

    def run(attached: bool) -> list[torch.Tensor]:
        model, x, _ = _narrow()
        saving = dh.save_activations(model, "", dh.OnDisk(tmp_path)) if attached else None
        with torch.autocast("cpu", torch.bfloat16):
            model(x)
            with torch.no_grad():
                model.two.weight.mul_(2)
            y = model(x)
        if saving is not None:
            assert saving.report().kept_by["autocast weight"] == 64 * 64 * 2
            assert saving.report().recast == 3 * 64 * 64 * 2
        y.sum().backward()
        return _taken(model, x)

    assert identical(run(True), run(False))


def test_a_replicas_copy_and_a_cast_view_stay(tmp_path: pathlib.Path) -> None:
    model, x, _ = _narrow()
    line = pipeline(dh.OnDisk(tmp_path), at_least="4 KiB")
    wrapped = dh.SaveWith(model, line)
    for copy in replicate(wrapped, 2):
        copy(x).sum().backward()
    assert (wrapped.report().recast, wrapped.report().stored) == (0, 0)
    assert wrapped.report().kept_by["autocast weight"] == 2 * 2 * 64 * 64 * 2
    flat = nn.Parameter(torch.randn(2, 64 * 64))
    with dh.saving(line) as saved:
        y = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True) @ flat[1].view(64, 64).to(torch.bfloat16)
        y.sum().backward()
    assert saved.report().stored == 0
    assert saved.report().kept_by["autocast weight"] == 64 * 64 * 2


def test_a_copy_stays_until_its_proof_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """On a GPU nothing waits for the comparison: the copy stays until a later forward knows the result."""
    known: list[bool] = []
    compare = AutocastCopy._compare
    monkeypatch.setattr(AutocastCopy, "_compare", lambda *args: compare(*args) if known else None)
    model, x, truth = _narrow()
    with dh.save_activations(model, "", dh.OnDisk(tmp_path)) as saving:
        one = model(x)
        assert saving.report().recast == 0
        known.append(True)
        two = model(x)
        assert saving.report().recast == 4 * 64 * 64 * 2
        assert len(saving._pipeline.contents.undecided) == 0
        one.sum().backward()
        assert identical(_taken(model, x), truth)
        two.sum().backward()
        assert identical(_taken(model, x), truth)


# --- Weights whose memory is taken away or exchanged in forward


def test_an_activation_at_the_address_of_a_weight_that_went_is_stored(tmp_path: pathlib.Path) -> None:
    """FSDP1 exchanges the memory of parameters in forward, so the next activation may lie where a parameter was."""

    class Exchanged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(nn.Parameter(torch.ones(4096)) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = x * torch.full((4096,), 2.0)
                weight.data = torch.empty(0)
            return x

    model = dh.SaveWith(Exchanged(), dh.OnDisk(tmp_path), at_least=4096)
    model(torch.ones(4096, requires_grad=True)).sum().backward()
    assert model.report().stored == 8 * 4096 * 4
    assert model.report().kept == 0


def test_a_weight_that_changed_since_is_caught(tmp_path: pathlib.Path) -> None:
    layer = nn.Linear(64, 64)
    with dh.saving(dh.OnDisk(tmp_path)):
        y = layer(torch.randn(8, 64, requires_grad=True))
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(dh.errors.MutationError, match="inplace"):
        y.sum().backward()


def test_a_weight_whose_memory_is_taken_away_in_forward_is_right(tmp_path: pathlib.Path) -> None:
    """FSDP2 frees a gathered weight before the forward ends.

    ``weight.detach()``, which was saved, shares its memory.
    """
    weight, x = torch.randn(64, 64), torch.randn(8, 64, requires_grad=True)
    content = weight.clone()
    with dh.saving(dh.OnDisk(tmp_path)):
        y = x @ weight.detach()
        weight.untyped_storage().resize_(0)
    weight.untyped_storage().resize_(content.nbytes)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(content)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(8, 64) @ content.t())
