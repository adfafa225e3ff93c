"""Law 11 for statistics of forwards: on every engine they are what one process finds in the ranks' own batches."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import disthooks as dh
from disthooks import stats
from tests.support import needs
from tests.support.engines import ENGINES, FIRST, close, loss_of, make
from tests.support.ranks.harness import Ranks

LEAVES = ["embed", "mid.0", "mid.1", "mid.2"]  # the module "head" is never called
STATS = [stats.Activations(), stats.Loss(), stats.Times()]


def _watched(rank: int, engine: str, micro: int = 1) -> list[dict[str, Any]]:
    model = make(engine, torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    records = []
    with dh.gradients(model, optimizer, stats=STATS, every=1) as watch:
        for step in range(2):
            optimizer.zero_grad()
            with torch.no_grad():
                loss_of(model, 50, engine, rank)  # a validation does not count
            for batch in range(micro):
                loss = loss_of(model, 10 * step + batch, engine, rank)
                watch.note_loss(loss)
                loss.backward()
            optimizer.step()
            watch.flush()
            records.append(watch.latest)
    return records


def _rms(tensors: list[torch.Tensor]) -> float:
    return float(torch.cat([each.detach().flatten() for each in tensors]).square().mean().sqrt())


def _truth(ranks: int, micro: int) -> dict[str, Any]:
    """The record of step 0, by hand: its model has been moved by nobody."""
    model, seen = make("plain", torch.float64), [{name: [] for name in LEAVES} for _ in range(ranks)]
    losses = [[] for _ in range(ranks)]
    for rank in range(ranks):
        handles = [
            model.get_submodule(name).register_forward_hook(lambda m, a, out, keep=seen[rank][name]: keep.append(out))
            for name in LEAVES
        ]
        for batch in range(micro):
            losses[rank].append(float(loss_of(model, batch, "ddp" if ranks > 1 else "plain", rank).detach()))
        for handle in handles:
            handle.remove()
    means = [sum(each) / micro for each in losses]
    found: dict[str, Any] = {"loss": sum(means) / ranks}
    if ranks > 1:
        found |= {"loss/max_rank": max(means), "loss/argmax_rank": means.index(max(means))}
        found["loss/of_ranks"] = {str(rank): mean for rank, mean in enumerate(means)}
    for name in LEAVES:
        both = [each for rank in range(ranks) for each in seen[rank][name]]
        largest = [max(float(each.detach().abs().max()) for each in seen[rank][name]) for rank in range(ranks)]
        own = [_rms(seen[rank][name]) for rank in range(ranks)]
        found |= {
            f"activation_rms/module/{name}": _rms(both),
            f"activation_max/module/{name}": max(largest),
            f"activation_zeros/module/{name}": 0.0 if name == "mid.2" else None,
            f"activation_nonfinite/module/{name}": 0.0,
        }
        if ranks > 1:
            found |= {
                f"activation_rms/max_rank/module/{name}": max(own),
                f"activation_rms/mean_rank/module/{name}": sum(own) / ranks,
                f"activation_rms/argmax_rank/module/{name}": own.index(max(own)),
                f"activation_max/argmax_rank/module/{name}": largest.index(max(largest)),
            }
    return found


def _compare(record: dict[str, Any], truth: dict[str, Any]) -> None:
    for name, value in truth.items():
        assert close(record[name], value, 1e-10), name


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat", "fsdp1none"))
@pytest.mark.dist
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("engine", [*ENGINES, "fsdp1none"])
def test_every_engine_equals_one_process(ranks: Ranks, engine: str, micro: int) -> None:
    truth = _truth(2, micro)
    for records in ranks(_watched, engine, micro):
        _compare(records[0], truth)
        assert records[1]["activation_rms/module/mid.2"] != records[0]["activation_rms/module/mid.2"]
        assert records[1]["forward_seconds/max_rank"] >= records[1]["forward_seconds"] > 0
        assert records[1]["backward_seconds"] > 0
        seconds = records[1]["forward_seconds/of_ranks"]
        assert (list(seconds), max(seconds.values())) == (["0", "1"], records[1]["forward_seconds/max_rank"])


@pytest.mark.parametrize("engine", ["plain", "dp"])
def test_one_process(engine: str) -> None:
    records = _watched(0, engine)
    _compare(records[0], _truth(1, 1))
    assert not [name for name in records[0] if name.endswith("_rank")]


def _spoiled(rank: int, slow: int) -> list[dict[str, Any]]:
    """Rank 1 makes a NaN in one layer, and rank ``slow`` is late with its batch and slow in its forward."""
    model = make("ddp", torch.float64)
    inner: Any = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def spoil(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        if rank == slow:
            time.sleep(0.1)
        return output * float("nan") if rank == 1 else output

    inner.mid[1].register_forward_hook(spoil)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], stats=STATS, every=1) as watch:
        for step in range(3):
            optimizer.zero_grad()
            if rank == slow:
                time.sleep(0.2)
            loss_of(model, step, "ddp", rank).backward()
            optimizer.step()
        watch.flush()
    return watch.latest


@pytest.mark.dist
def test_a_rank_that_makes_a_nan_and_one_that_is_slow_are_named(ranks: Ranks) -> None:
    for record in ranks(_spoiled, 0):
        assert record["activation_nonfinite/module/mid.1"] == 20.0
        assert record["activation_rms/argmax_rank/module/mid.1"] == 1
        assert record["activation_nonfinite/module/mid.0"] == 0.0
        assert (record["input_seconds/argmax_rank"], record["forward_seconds/argmax_rank"]) == (0, 0)
        assert record["input_seconds/max_rank"] > 0.19
        assert record["forward_seconds/max_rank"] > 0.09


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_twice_counts_once(reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 3, requires_grad=True)
    with dh.gradients(model, optimizer, stats=[stats.Activations()], every=1) as watch:
        for _ in range(2):
            with torch.no_grad():
                truth = float(model[0](x).square().mean().sqrt())
            model[2](checkpoint(model[:2], x, use_reentrant=reentrant)).sum().backward()
            facts = [index for index, _ in watch._runner.forward_hooks._facts]
            optimizer.step()
            watch.flush()
            assert sorted(facts) == [0, 1, 2]
            assert close(watch.latest["activation_rms/module/0"], truth)


def test_modules_are_chosen_by_pattern() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Sequential(nn.ReLU()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, stats=[stats.Activations("2")]) as watch:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [n for n in watch.latest if n.startswith("activation_rms/module/")] == ["activation_rms/module/2"]
    with pytest.raises(dh.errors.MatchError):
        dh.gradients(model, optimizer, stats=[stats.Activations("3")])
    with pytest.raises(dh.errors.UsageError, match="a single number"):
        dh.gradients(model, optimizer, stats=[stats.Loss()]).note_loss(torch.ones(2))


def test_the_loss_of_what_a_model_returns() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            out = self.inner(x)
            return {"loss": out.square().mean(), "logits": out}

    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, stats=[stats.Loss(), stats.Updates()]) as watch:
        loss = model(torch.ones(1, 2))["loss"]
        loss.backward()
        optimizer.step()
    assert watch.latest["loss"] == pytest.approx(float(loss.detach()))
    assert watch.latest["lr"] == 0.1


def _on_deepspeed(rank: int, stage: int) -> tuple[dict[str, Any], dict[str, tuple[int, float]]]:
    """The record of a step, and what hooks of the test saw of each module on this rank: elements, sum of squares."""
    from tests.support.zero import engine_of, step

    engine = engine_of(stage, "fp32")
    seen: dict[str, tuple[int, float]] = {}

    def see(name: str, output: torch.Tensor) -> None:
        count, squares = seen.get(name, (0, 0.0))
        seen[name] = count + output.numel(), squares + float(output.detach().double().square().sum())

    leaves = [(n, m) for n, m in engine.module.named_modules() if not list(m.children())]
    handles = [m.register_forward_hook(lambda _, a, out, name=n: see(name, out)) for n, m in leaves]
    kinds = [*stats.full(), stats.Fingerprints()]
    with dh.gradients(engine, stats=kinds, every=1) as watch:
        step(engine, rank)
    for handle in handles:
        handle.remove()
    return watch.latest, seen


@needs("deepspeed")
@pytest.mark.dist
@pytest.mark.first_tier(stage=(2,))
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed(ranks: Ranks, stage: int) -> None:
    (record, first), (_, second) = ranks(_on_deepspeed, stage)
    assert len(first) > 2
    for name in first:
        count, squares = (a + b for a, b in zip(first[name], second[name], strict=True))
        assert close(record[f"activation_rms/module/{name}"], (squares / count) ** 0.5, 1e-5), name
        assert int(record[f"fingerprint/output/module/{name}"], 16) > 0
    assert record["update_ratio"] > 0
    assert record["backward_seconds"] > 0
    assert record["grad_max_abs/max_rank"] > 0


def test_a_learning_rate_that_the_optimizer_finds_itself() -> None:
    """Adafactor of transformers has None; a rate may be a tensor."""
    model = nn.Linear(2, 1)
    for rate, logged in ((None, None), (torch.tensor(0.25), 0.25), (0.5, 0.5)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dh.gradients(model, optimizer, stats=[stats.Updates()]) as watch:
            # It runs after disthooks has seen the rate of this step: SGD itself needs a number.
            optimizer.register_step_pre_hook(lambda self, *_: self.param_groups[0].update(lr=0.1))
            model(torch.ones(1, 2)).sum().backward()
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()
        assert watch.latest.get("lr") == logged


def test_outputs_in_few_bits() -> None:
    class Few(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach().to(torch.float8_e4m3fn)

    few, layer = Few(), nn.Linear(2, 1)
    model = nn.ModuleList([few, layer])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, stats=[stats.Activations(), stats.Fingerprints()]) as watch:
        few(torch.tensor([[3.0, 4.0]]))
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert watch.latest["activation_max/module/0"] == 4.0


def _late(rank: int, engine: str) -> list[dict[str, Any]]:
    model = make(engine)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    records = []
    with dh.gradients(model, optimizer, stats=[stats.Times()], every=1) as watch:
        for step in range(4):
            optimizer.zero_grad()
            time.sleep(0.2 if rank == 1 else 0.0)
            loss_of(model, step, engine, rank).backward()
            optimizer.step()
            watch.flush()
            records.append(watch.latest)
    return records


@pytest.mark.dist
@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_the_input_tells_the_slow_rank_where_forward_waits(ranks: Ranks, engine: str) -> None:
    for records in ranks(_late, engine):
        for record in records[1:]:
            most, mean = record["input_seconds/max_rank"], record["input_seconds"]
            assert record["input_seconds/argmax_rank"] == 1
            assert 2 * mean - most < most / 2, "the other rank waits in forward"
