"""Found by hostile review of rules and engines: each of these was wrong once."""

from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import stats
from tests.support.engines import close, grads_of, loss_of, make, whole
from tests.support.ranks.harness import Ranks

NAN = math.nan


def small(**options: Any) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1, **options)


# --- 1. a second attachment undoes what the first one withheld


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("second", [{"stats": [stats.Norm()]}, {"rules": [dh.ClipNorm(1.0)]}], ids=["stats", "rules"])
def test_skip_survives_a_second_attachment(second: Any, fused: bool) -> None:
    model, optimizer = small(fused=fused)
    before = model.weight.clone()
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]), dh.gradients(model, optimizer, **second):
        model(torch.full((1, 2), NAN)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_freeze_survives_a_second_attachment() -> None:
    model, optimizer = small()
    before = model.weight.clone()
    rules = [dh.only("weight", dh.Freeze())]
    with dh.gradients(model, optimizer, rules=rules), dh.gradients(model, optimizer, stats=[stats.Norm()]):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert torch.equal(model.weight, before)
    assert model.weight.grad is not None


def _two(rank: int, engine: str) -> bool:
    model = make(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()])
    second = dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)])
    (loss_of(model, 0, engine, rank) * (NAN if rank == 1 else 1.0)).backward()
    optimizer.step()
    first.remove()
    second.remove()
    return any(bool(torch.isnan(whole(p)).any()) for p in model.parameters())


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "hsdp", "fsdp1"])
def test_skip_survives_a_second_attachment_on_ranks(ranks: Ranks, engine: str) -> None:
    assert ranks(_two, engine) == [False, False]


# --- 2. predicates are shown this rank's part, not the parameter


def _chosen(rank: int, engine: str) -> Any:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = [dh.only(lambda name, p: p.numel() > 20, dh.ClipNorm(1.0))]
    with dh.gradients(model, optimizer, rules=rules, every=1) as watch:
        loss_of(model, 0, engine, rank).backward()
        optimizer.step()
    (norm,) = [value for name, value in watch.latest.items() if name.startswith("grad_norm/")]
    return norm, grads_of(model)


@pytest.mark.dist
def test_a_predicate_sees_the_whole_parameter_under_fsdp1(ranks: Ranks) -> None:
    truth = _chosen(0, "plain")
    for found in ranks(_chosen, "fsdp1"):
        assert close(found, truth, 1e-5)


def _flat_ones(rank: int, engine: str) -> dict[str, torch.Tensor]:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with dh.gradients(model, optimizer, rules=[dh.only(lambda name, p: p.ndim < 2, dh.Scale(0.0))]):
        loss_of(model, 0, engine, rank).backward()
        optimizer.step()
    return grads_of(model)


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])  # fsdp2 holds
def test_biases_by_predicate(ranks: Ranks, engine: str) -> None:
    truth = _flat_ones(0, "plain")
    for found in ranks(_flat_ones, engine):
        assert close(found, truth, 1e-5)


def _zero_chosen(rank: int, stage: int) -> list[list[str]]:
    from tests.support import zero

    engine = zero.engine_of(stage)
    found = []
    for predicate in (lambda name, p: p.ndim < 2, lambda name, p: p.numel() > 10):
        with dh.gradients(engine, rules=[dh.only(predicate, dh.ClipNorm(1.0))]) as watch:
            found.append(sorted(watch._shards[i].name for i in watch._plan.rules[0].indices))
    return found


@pytest.mark.dist
def test_a_predicate_sees_the_whole_parameter_under_zero_3(ranks: Ranks) -> None:
    assert ranks(_zero_chosen, 3, timeout=120) == ranks(_zero_chosen, 1, timeout=120)


def _differs(rank: int) -> str:
    model = make("ddp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    names = ["embed.weight", "head.weight"]

    def mine(name: str, parameter: object) -> bool:
        return name == names[rank]

    try:
        dh.gradients(model, optimizer, rules=[dh.only(mine, dh.ClipNorm(1.0))]).remove()
    except dh.errors.AttachError as error:
        return str(error)
    return ""


@pytest.mark.dist
def test_predicates_that_choose_differently_on_ranks_are_told(ranks: Ranks) -> None:
    assert all("do not attach the same" in message for message in ranks(_differs))


# --- 3. local rules cut create_graph


def _second_order(rank: int, engine: str, local: bool) -> torch.Tensor:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    if engine == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = [dh.only("0.weight", dh.Scale(1.0), at="local")] if local else [dh.ClipNorm(1e9)]
    with dh.gradients(model, optimizer, rules=rules):
        loss = model(torch.ones(3, 2)).square().sum()
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(grad.square().sum() for grad in grads)).backward()
    return next(p.grad.clone() for n, p in model.named_parameters() if n.endswith("0.weight"))


def test_a_local_rule_does_not_lose_second_derivatives() -> None:
    # a UsageError that says so would do as well
    try:
        found = _second_order(0, "plain", True)
    except dh.errors.UsageError:
        return
    assert close(found, _second_order(0, "plain", False))


# --- 4. what a step that raised leaves behind


def _interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_fused_optimizer_is_free_again_after_removal() -> None:
    model, optimizer = small(fused=True)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()]):
        hook = optimizer.register_step_pre_hook(_interrupt)
        model(torch.full((1, 2), NAN)).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    hook.remove()
    optimizer.zero_grad()
    before = model.weight.clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert not torch.equal(model.weight, before)  # found_inf stayed on it: no step is ever made again


def test_gradients_are_back_after_removal() -> None:
    model, optimizer = small()
    with dh.gradients(model, optimizer, rules=[dh.only("weight", dh.Freeze())]):
        optimizer.register_step_pre_hook(_interrupt)
        model(torch.ones(1, 2)).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert model.weight.grad is not None


def test_a_gradient_of_a_step_that_raised_is_not_used_later() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 2)
    with dh.gradients(model, optimizer, rules=[dh.only("a.*", dh.Freeze(until=1))]):
        hook = optimizer.register_step_pre_hook(_interrupt)
        (model["a"](x) + model["b"](x)).sum().backward()
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        hook.remove()
        optimizer.zero_grad()
        before = model["a"].weight.clone()
        model["b"](x).sum().backward()
        optimizer.step()
    assert torch.equal(model["a"].weight, before)


# --- 5. on_gradient at "final" keeps the model for ever


def test_a_model_with_a_final_function_can_die() -> None:
    model, _ = small()
    dh.on_gradient(model, "weight", lambda grad: grad)  # handle not kept, as in the first lines of the docs
    ref = weakref.ref(model)
    del model, _
    gc.collect()
    assert ref() is None


# --- 6. micro-batches of steps that were never made


def _scaled(rank: int, engine: str, to_none: bool) -> float:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    watched = [stats.Spread(), stats.Norm()]
    with dh.gradients(model, optimizer, stats=watched, every=1, scaler=scaler) as watch:
        for factor in (1.0, NAN, 1.0):
            optimizer.zero_grad(set_to_none=to_none)
            scaler.scale(loss_of(model, 0, engine, rank) * factor).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    return watch.latest["grad_norm/max_rank"]


def test_a_step_that_the_scaler_skipped_is_not_in_the_spread() -> None:
    assert math.isfinite(_scaled(0, "plain", True))


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "fsdp1"])
def test_a_step_that_the_scaler_skipped_is_not_in_the_spread_of_ranks(ranks: Ranks, engine: str) -> None:
    assert all(math.isfinite(value) for value in ranks(_scaled, engine, True))


def test_a_micro_batch_that_was_thrown_away_is_not_in_the_spread() -> None:
    model, optimizer = small()
    x = torch.ones(1, 2)
    with dh.gradients(model, optimizer, stats=[stats.Spread(), stats.Norm()], every=1) as watch:
        optimizer.zero_grad()
        (model(x).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        (model(x).sum() * 100).backward()
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert math.isclose(watch.latest["grad_norm/max_rank"], watch.latest["grad_norm"], rel_tol=1e-6)


# --- 7. smaller ones


def test_an_infinite_first_norm_with_percentile_is_as_with_clip_norm() -> None:
    found = []
    for rule in (dh.ClipPercentile(), dh.ClipNorm(1.0)):
        model, optimizer = small()
        model.weight.grad, model.bias.grad = torch.tensor([[1.0, math.inf], [2.0, 3.0]]), torch.ones(2)
        with dh.gradients(model, optimizer, rules=[rule]):
            optimizer.step()
        found.append(model.weight.grad)
    assert torch.equal(found[0].isnan(), found[1].isnan())


# --- 2b. the same, where it makes ranks wait for each other (rank 0 clips 2 parameters, rank 1 three); 1b and 4b


def _of_some_size(rank: int) -> Any:
    model = make("fsdp1")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rules = [dh.only(lambda name, p: p.numel() > 8, dh.ClipNorm(1.0))]
    with dh.gradients(model, optimizer, rules=rules, every=1):
        loss_of(model, 0, "fsdp1", rank).backward()
        optimizer.step()
    return True


@pytest.mark.dist
def test_a_predicate_of_size_does_not_hang_fsdp1() -> None:
    own = Ranks(2, timeout=120)
    try:
        assert own(_of_some_size) == [True, True]
    finally:
        own.stop()


def _zeroed(rank: int, engine: str) -> dict[str, torch.Tensor]:
    model = make(engine)
    with dh.on_gradient(model, lambda name, p: p.ndim < 2, torch.zeros_like, at="local"):
        loss_of(model, 0, engine, rank).backward()
    return grads_of(model)


@pytest.mark.dist
def test_on_gradient_by_predicate_under_fsdp1(ranks: Ranks) -> None:
    truth = _zeroed(0, "plain")
    for found in ranks(_zeroed, "fsdp1"):
        assert close(found, truth, 1e-5)


def test_a_fused_optimizer_can_die_after_a_step_that_raised() -> None:
    model, optimizer = small(fused=True)
    watch = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()])
    hook = optimizer.register_step_pre_hook(_interrupt)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(KeyboardInterrupt):
        optimizer.step()
    watch.remove()
    hook.remove()
    ref = weakref.ref(optimizer)
    del model, optimizer, watch, hook
    gc.collect()
    assert ref() is None


# --- an attachment that nobody removes, a step that a rule ends, a loss scale that is no power of two


def test_a_model_and_its_optimizer_die_with_what_is_attached() -> None:
    model, optimizer = small()
    watch = dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=[stats.Norm(), stats.Spread()])
    refs = [weakref.ref(each) for each in (model, optimizer, watch)]
    del model, optimizer, watch
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3


def test_a_rule_that_raises_leaves_withheld_gradients_where_they_were() -> None:
    model, optimizer = small()

    def broken(name: str, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError

    model(torch.ones(1, 2)).sum().backward()
    with (
        dh.gradients(model, optimizer, rules=[dh.only("weight", dh.Freeze())]),
        dh.gradients(model, optimizer, rules=[dh.only("bias", broken)]),
    ):
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert model.weight.grad is not None


def test_watching_scaled_gradients_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    from disthooks.engines.base import Engine

    monkeypatch.setattr(Engine, "scale", lambda self: 1000.3)  # as of an engine with a loss scale of its own
    model = nn.ParameterList([nn.Parameter(torch.zeros(10_000))])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    before = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    model[0].grad = before.clone()
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=[stats.Norm()], every=1) as watch:
        optimizer.step()
    assert torch.equal(model[0].grad, before)
    assert watch.latest["grad_norm"] == pytest.approx(float(before.norm()) / 1000.3, rel=1e-5)
