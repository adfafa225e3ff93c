"""Law 20, what was seen is true.

"A record has its own step, all ranks it concerns and the first parameters in model order; a watcher that measured
nothing says so."
"""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from tests.support.engines import ENGINES, FIRST, loss_of, make
from tests.support.ranks.harness import Ranks

# --- What a report of saved tensors says


@pytest.mark.any_device
def test_an_attached_module_that_had_no_call_is_in_the_report(tmp_path: pathlib.Path) -> None:
    model = nn.ModuleDict({"one": nn.Linear(64, 64), "two": nn.Linear(64, 64), "three": nn.Linear(64, 64)})
    with dh.save_activations(model, "*", dh.OnDisk(tmp_path)) as saving:
        assert saving.report().uncalled == ()  # the first call may be to come
        model["one"](torch.randn(64, 64)).sum().backward()
        with torch.no_grad():
            model["three"](torch.randn(64, 64))
    assert saving.report().uncalled == ("two",)
    assert any("never called so far: two." in advice for advice in saving.report().advice())


ALL = dh.AtLeast(0)


def test_advice_is_about_what_went_to_a_disk(tmp_path: pathlib.Path) -> None:
    x = torch.ones(64, 64, requires_grad=True)
    with dh.saving(dh.Functions(lambda t: t, lambda t: t)) as functions:
        x.exp().sum().backward()
    with dh.saving(dh.OnCpu()) as in_place:
        (x.exp() + x[0, :2].exp().sum()).sum().backward()
    assert functions.report().advice() == []
    assert not any("worth moving" in advice for advice in in_place.report().advice())
    with dh.saving(ALL, dh.OnDisk(tmp_path, in_flight=0)) as small:
        y = x.exp().sin().cos().sum()
    y.backward()
    assert "less than is worth moving" in str(small.report())


# --- Which rank, which parameter, which step


def _zeros(name: str, grad: torch.Tensor) -> torch.Tensor:
    """So that the update leaves the parameters finite."""
    return torch.zeros_like(grad)


def _began(rank: int, engine: str) -> list[object]:
    """In step 1, in the first of two micro-batches, rank 1's own gradient of one parameter breaks."""
    model, bad = make(engine), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def breaks(grad: torch.Tensor) -> torch.Tensor | None:
        return grad.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(math.inf)) if bad else None

    seen = []
    with (
        dh.on_gradient(model, "head.weight", breaks, at="local"),
        dh.gradients(model, optimizer, rules=[_zeros], stats=[stats.NonFinite()], every=1) as watch,
    ):
        for step in range(3):
            optimizer.zero_grad()
            for micro in range(2):
                bad[:] = [1] if (rank, step, micro) == (1, 1, 0) else []
                loss_of(model, step, engine, rank).backward()
            optimizer.step()
            watch.flush()
            seen.append(watch.latest["nonfinite_at"])
    return seen


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.parametrize("engine", ENGINES)
def test_a_record_names_the_rank_and_the_parameter_where_it_began(ranks: Ranks, engine: str) -> None:
    found = ranks(_began, engine)
    assert found[0] == found[1]
    assert found[0] == [[], [{"param": "head.weight", "count": 1, "rank": 1}], []]


def _blamed(rank: int) -> list[object]:
    """Rank 1's own gradient breaks in step 0; in step 1 it breaks after the reduction."""
    model, now = make("ddp"), [True]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen = []
    with (
        dh.on_gradient(model, "scale", lambda grad: grad * math.inf if rank == 1 and now[0] else None, at="local"),
        dh.gradients(model, optimizer, rules=[_zeros], stats=[stats.NonFinite()], every=1) as watch,
    ):
        for step in range(2):
            now[0] = step == 0
            optimizer.zero_grad()
            loss_of(model, step, "ddp", rank).backward()
            if step == 1:
                model.module.scale.grad[0, 0] = math.nan
            optimizer.step()
            watch.flush()
            seen.append([(item["param"], item["rank"]) for item in watch.latest["nonfinite_at"]])
    return seen


@pytest.mark.dist
def test_a_rank_is_not_blamed_for_an_earlier_step(ranks: Ranks) -> None:
    assert ranks(_blamed) == [[[("scale", 1)], [("scale", None)]]] * 2
