"""Law 20, what was seen is true.

"A record has its own step, all ranks it concerns and the first parameters in model order; a watcher that measured
nothing says so."

This file shows it for records of gradients, features and reports of saved tensors, in one process and on two ranks;
tests/engines shows it for more engines and for ranks that differ.
"""

from __future__ import annotations

import math
import pathlib

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from disthooks.report.watch.watchers import nonfinite_line
from tests.support.engines import ENGINES, FIRST, loss_of, make
from tests.support.ranks.harness import Ranks

# --- A record has its own step


@pytest.mark.parametrize("every", [1, 2, 3])
def test_a_record_has_the_number_and_the_values_of_its_own_step(every: int) -> None:
    """A record is read one step late, and the last record at the end."""
    factors = [1.0, 10.0, 100.0, 2.0, 20.0, 200.0, 3.0]  # the norms of the gradients
    weight, records = nn.Parameter(torch.zeros(2)), []
    model = nn.ParameterList([weight])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, stats=[stats.Norm()], sinks=[records.append], every=every):
        for factor in factors:
            weight.grad = torch.tensor([0.6, -0.8]) * factor
            optimizer.step()
    assert [record["step"] for record in records] == list(range(0, 7, every))
    assert [record["grad_norm"] for record in records] == pytest.approx(factors[::every])


def test_a_step_that_is_not_finite_has_a_record_of_its_own_between_logged_ones() -> None:
    weight, records = nn.Parameter(torch.zeros(2)), []
    optimizer = torch.optim.SGD([weight], lr=0.0)
    model = nn.ParameterList([weight])
    with dh.gradients(model, optimizer, stats=[stats.NonFinite()], sinks=[records.append], every=10) as watch:
        for step in range(12):
            weight.grad = torch.tensor([1.0, math.inf if step == 4 else 1.0])
            optimizer.step()
    assert [record["step"] for record in records] == [0, 4, 10, 11]
    assert [record.get("nonfinite") for record in records] == [0, 1, 0, None]  # of the last one only the peak is told
    assert watch.last_nonfinite["step"] == 4


def test_parameters_are_named_in_the_order_of_the_model() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(12)))
    optimizer = torch.optim.SGD(reversed(list(model.parameters())), lr=0.0)
    with dh.gradients(model, optimizer, stats=[stats.NonFinite()], every=1) as watch:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    assert [at["param"] for at in watch.latest["nonfinite_at"]] == names[:-11:-1]  # decision 177: the last ones first
    assert watch.latest["nonfinite_params"] == 24


def test_the_parameters_named_first_bracket_the_layer_where_a_nan_of_backward_begins() -> None:
    """It is born in the backward of layer 9 of 20, and spreads to all layers before it."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, stats=[stats.NonFinite()], every=1) as watch:
        hidden = model[:9](torch.ones(1, 2))
        hidden.register_hook(lambda grad: grad * math.nan)
        model[9:](hidden).sum().backward()
        optimizer.step()
    found = watch.latest["nonfinite_at"]
    assert found[:2] == [
        {"param": "8.bias", "count": 2, "rank": 0, "before": "9.weight"},
        {"param": "8.weight", "count": 4, "rank": 0},
    ]
    assert (len(found), watch.latest["nonfinite_params"]) == (10, 18)
    assert nonfinite_line(watch.latest).endswith(
        ": 8.bias on rank 0 (9.weight behind it is finite), 8.weight on rank 0, 7.bias on rank 0 and 15 more"
    )


# --- A watcher that measured nothing says so


def test_features_of_a_module_that_did_not_run_say_so() -> None:
    model = nn.ModuleDict({"one": nn.Linear(2, 2), "two": nn.Linear(2, 2)})
    with dh.features(model, "*") as seen:
        model["one"](torch.ones(1, 2))
    assert list(seen) == ["one"]
    with pytest.raises(dh.errors.NotSeenError, match="'two' is watched but did not run"):
        seen["two"]


def test_a_report_of_hooks_that_never_ran_says_so(tmp_path: pathlib.Path) -> None:
    saving = dh.save_activations(nn.Linear(2, 2), "", dh.OnDisk(tmp_path))
    assert "no call ran with the hooks on" in str(saving.report())
    model = dh.SaveWith(nn.Linear(2, 2), dh.OnDisk(tmp_path), at_least=4096)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert "no call ran with the hooks on; calls without: " in str(model.report())


def test_gradients_that_were_never_stepped_have_no_record() -> None:
    model, records = nn.Linear(2, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, stats=[stats.Norm()], sinks=[records.append]) as watch:
        model(torch.ones(1, 2)).sum().backward()
    assert (watch.steps, watch.latest, records) == (0, {}, [])


def test_a_statistic_without_a_gradient_is_nan_and_not_zero() -> None:
    model = nn.ModuleDict({"used": nn.Linear(2, 2), "unused": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    watched = [stats.Moments(per_parameter=True)]
    with dh.gradients(model, optimizer, stats=watched) as watch:
        model["used"](torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert watch.latest["grad_mean/param/used.weight"] == 1.0
    assert math.isnan(watch.latest["grad_mean/param/unused.weight"])


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


def test_advice_is_about_what_went_to_a_disk(tmp_path: pathlib.Path) -> None:
    x = torch.ones(64, 64, requires_grad=True)
    with dh.saving(dh.Functions(lambda t: t, lambda t: t)) as functions:
        x.exp().sum().backward()
    with dh.saving(dh.OnCpu()) as in_place:
        (x.exp() + x[0, :2].exp().sum()).sum().backward()
    assert functions.report().advice() == []
    assert not any("worth moving" in advice for advice in in_place.report().advice())
    with dh.saving(dh.OnDisk(tmp_path, in_flight=0), at_least=0) as small:
        y = x.exp().sin().cos().sum()
    y.backward()
    assert "less than is worth moving" in str(small.report())


# --- Which rank, which parameter, which step


def _zeros(name: str, grad: torch.Tensor) -> torch.Tensor:
    """Makes the update leave the parameters finite."""
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
