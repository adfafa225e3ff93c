"""``stats.Fingerprints`` on every engine, and ``disthooks diff`` of runs of different engines and world sizes."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import disthooks as dh
from disthooks import stats
from disthooks.run.cli.app import app
from tests.support.engines import ENGINES, FIRST, loss_of, make
from tests.support.ranks.harness import Ranks


def _logged(rank: int, engine: str, file: str, flip: tuple[str, int] | None = None, steps: int = 3) -> None:
    """Train in float64, where the order of two summands changes no bit; ``flip`` changes one bit on one rank."""
    model = make(engine, torch.float64)
    inner: Any = getattr(model, "module", model)

    def on_output(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + 1e-15 * output.detach() if seen[0] == 1 else output

    def on_gradient(grad: torch.Tensor) -> torch.Tensor:
        return grad * (1 + 1e-15) if seen[0] == 1 else grad

    seen = [0]
    if flip is not None and flip[0] == "start":
        with torch.no_grad():
            inner.mid[1].weight.mul_(1 + 1e-15)
    elif flip is not None and flip[1] == rank:
        if flip[0] == "output":
            inner.mid[1].register_forward_hook(on_output)
        else:
            inner.embed.weight.register_hook(on_gradient)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sinks = [dh.sinks.Jsonl(file)]
    with dh.gradients(model, optimizer, stats=[stats.Fingerprints(), stats.Norm()], sinks=sinks, every=1):
        for step in range(steps):
            seen[0] = step
            optimizer.zero_grad()
            loss_of(model, step, engine, rank).backward()
            optimizer.step()


def differ(one: pathlib.Path, other: pathlib.Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["diff", str(one), str(other), "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    found: dict[str, Any] = json.loads(result.stdout)
    return found


@pytest.mark.first_tier(engine=FIRST)
@pytest.mark.dist
@pytest.mark.full_tier(engine=("fsdp1", "fsdp1flat", "fsdp1none"))
@pytest.mark.parametrize("engine", [*ENGINES, "fsdp1none", "hsdp12"])
def test_an_engine_is_the_same_as_ddp(ranks: Ranks, engine: str, tmp_path: pathlib.Path) -> None:
    """Aligned by name: modules, own gradients, final gradients and parameters, bit for bit."""
    files = [tmp_path / name for name in ("ddp.jsonl", "engine.jsonl")]
    ranks(_logged, "ddp", str(files[0]))
    ranks(_logged, engine, str(files[1]))
    found = differ(*files)
    assert found["same"], found
    assert found["whole"], found
    assert found["steps"] == [0, 1, 2]
    assert found["compared"] == 8 + 3 * (
        2 * 5 + 3 * 8
    )  # parameters at the start, modules with input and output, parameters


@pytest.mark.dist
@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ["ddp", "fsdp1", "fsdp2"])
def test_other_weights_from_the_start_are_told_from_other_code(
    ranks: Ranks, engine: str, tmp_path: pathlib.Path
) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("as it is", "start")]
    ranks(_logged, engine, str(files[0]))
    ranks(_logged, engine, str(files[1]), ("start", 0))
    found = differ(*files)
    assert (found["first"]["step"], found["first"]["what"], found["first"]["where"]) == (0, "start", "mid.1.weight")
    assert found["sentences"][0] == "mid.1.weight differs at the start: the runs began with other weights."
    assert found["first"]["counts"]["start"] == 1


@pytest.mark.dist
@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("rank", [0, 1])
def test_one_changed_bit_is_named(ranks: Ranks, engine: str, rank: int, tmp_path: pathlib.Path) -> None:
    files = [tmp_path / f"{name}.jsonl" for name in ("as it is", "output", "gradient")]
    ranks(_logged, engine, str(files[0]))
    ranks(_logged, engine, str(files[1]), ("output", rank))
    first = differ(files[0], files[1])["first"]
    wanted = {"step": 1, "what": "output", "where": "mid.1", "rank": rank, "has_same_input": True}
    assert {name: first[name] for name in wanted} == wanted
    if engine == "ddp":  # FSDP2 gives no gradient of a parameter to a hook of its user
        ranks(_logged, engine, str(files[2]), ("gradient", rank))
        first = differ(files[0], files[2])["first"]
        wanted = {"step": 1, "what": "own", "where": "embed.weight", "rank": rank, "has_same_input": None}
        assert {name: first[name] for name in wanted} == wanted


@pytest.mark.dist
def test_runs_of_other_world_sizes_are_compared_by_gradients(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """One process and two: a sum of eight terms is rounded in another order, so the gradients are named."""
    one, two = tmp_path / "one.jsonl", tmp_path / "two.jsonl"
    _logged(0, "plain", str(one))
    ranks(_logged, "ddp", str(two))
    found = differ(one, two)
    assert found["notes"] == [
        "The runs have 1 and 2 ranks, so their batches differ from rank to rank: only final gradients and parameters "
        "were compared."
    ]
    assert found["first"]["what"] == "grad"
    assert found["first"]["step"] == 0
    assert found["first"]["rank"] is None
    _logged(0, "plain", str(tmp_path / "again.jsonl"))
    assert differ(one, tmp_path / "again.jsonl")["same"]


def test_it_says_so_and_the_exit_code_tells_scripts(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "plain.jsonl"
    file.write_text('{"step": 0, "loss": 1.0}\n')
    result = CliRunner().invoke(app, ["diff", str(file), str(file)])
    assert result.exit_code == 2
    assert "give stats.Fingerprints() to gradients" in result.stderr
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    _logged(0, "plain", str(one))
    _logged(0, "plain", str(other), ("output", 0))
    same = CliRunner().invoke(app, ["diff", str(one), str(one), "--exit-code"])
    assert (same.exit_code, same.stdout.splitlines()[0][:39]) == (0, "The runs are the same bit for bit: 110 ")
    found = CliRunner().invoke(app, ["diff", str(one), str(other), "--exit-code"])
    assert found.exit_code == 1
    begins = "and its input is the same: the difference begins in this module."
    assert found.stdout.splitlines()[:2] == [
        f"Step 1 on rank 0: the output of mid.1 differs, {begins}",
        "1 compared steps before it are the same, 0 to 0.",
    ]


def test_inputs_that_a_module_changes_in_place_and_several_calls(tmp_path: pathlib.Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.act = nn.Linear(3, 3), nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.layer(self.act(self.layer(x)) + x))

    def prints(shift: float) -> dict[str, Any]:
        torch.manual_seed(0)
        model = Twice()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with dh.gradients(model, optimizer, stats=[stats.Fingerprints()]) as watch:
            model(torch.ones(2, 3) + shift).sum().backward()
            optimizer.step()
        return watch.latest

    one, other = prints(0.0), prints(1e-3)
    assert prints(0.0)["fingerprint/output/module/act"] == one["fingerprint/output/module/act"]
    assert one["fingerprint/input/module/act"] != one["fingerprint/output/module/act"]
    assert one["fingerprint/output/module/layer"] != other["fingerprint/output/module/layer"]


def test_steps_in_between_have_none(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "run.jsonl"
    model = make("plain")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kinds = [stats.Fingerprints(every=4), stats.Activations("mid.*"), stats.Norm()]
    with dh.gradients(model, optimizer, stats=kinds, sinks=[dh.sinks.Jsonl(file)], every=2):
        for step in range(9):
            loss_of(model, step, "plain").backward()
            optimizer.step()
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines if "fingerprint/output" in line["module"]] == [0, 4, 8]
    assert [line["step"] for line in lines] == [0, 2, 4, 6, 8]
    with pytest.raises(dh.errors.UsageError, match="every how many steps"):
        stats.Fingerprints(every=0)
