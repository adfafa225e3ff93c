"""Which module a report blames, from the log of a real training with a fault in it."""

from __future__ import annotations

import itertools
import json
import math
import pathlib
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import disthooks as dh
from disthooks.report.culprit import Culprit, Timeline
from disthooks.report.log import read
from disthooks.report.sentences import verdict
from disthooks.report.timeline import timeline
from disthooks.run.cli.app import app
from tests.support.logs import log


def test_a_backward_that_went_wrong_in_a_step_in_which_all_gradients_are_large(tmp_path: pathlib.Path) -> None:
    """The loss of step 30 counts eight times, so gradients behind the module are larger than usual too."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the fault shall not go into the weights
    now = [0]

    def spoil(grad: torch.Tensor) -> torch.Tensor | None:
        if now[0] != 30:
            return None
        spoiled = grad.clone()
        spoiled.view(-1)[5] = 1e30
        return spoiled

    model[2][0].register_forward_pre_hook(lambda module, args: args[0].register_hook(spoil) and None)
    file = tmp_path / "run.jsonl"
    watch = {"every": 1, "stats": "full", "sinks": [{"kind": "Jsonl", "path": str(file)}]}
    with dh.prepare(model, optimizer, {"watch": watch}):
        for step in range(40):
            now[0] = step
            loss = (model(torch.randn(8, 16)) ** 2).mean()
            optimizer.zero_grad()
            ((8 if step == 30 else 1) * loss).backward()
            optimizer.step()
    (run,) = read(file).runs
    found = [(culprit.kind, culprit.step, culprit.where) for culprit in timeline(run).culprits]
    assert found == [("backward", 30, "2.0")]


def run_of(folder: pathlib.Path, records: list[dict[str, Any]]) -> Any:
    file = folder / "a.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    (run,) = read(file).runs
    return run


def said_of(folder: pathlib.Path, records: list[dict[str, Any]]) -> list[str]:
    run = run_of(folder, records)
    return verdict(run, timeline(run))


def found_in(folder: pathlib.Path, records: list[dict[str, Any]]) -> list[Culprit]:
    run = run_of(folder, records)
    found = timeline(run).culprits
    faults = [culprit for culprit in found if culprit.kind != "noted"]
    assert ("Nothing stands out" in verdict(run, timeline(run))[0]) == (not faults)
    return found


def logged(folder: pathlib.Path, steps: int = 40) -> list[dict[str, Any]]:
    """The records of a training whose outputs jump in step 30 and which ends with gradients that are not finite."""
    return [json.loads(line) for line in log(folder / "a.jsonl", steps=steps, layers=6).read_text().splitlines()]


def test_a_loss_that_is_nan_stands_out(tmp_path: pathlib.Path) -> None:
    """The first step of each row of such steps; a record without a loss ends no row."""
    losses = [1.0, math.nan, math.nan, None, math.nan, 1.0, math.inf, 1.0]
    records = [{"step": 10 * at} | ({} if loss is None else {"loss": loss}) for at, loss in enumerate(losses)]
    found = found_in(tmp_path, records)
    assert [(each.kind, each.step, each.where, each.rank) for each in found] == [
        ("loss", 10, "", None),
        ("loss", 60, "", None),
    ]
    assert [each.text for each in found] == [
        "Steps 1 to 10: the loss became NaN.",
        "Steps 51 to 60: the loss became infinite.",
    ]
    assert "logarithm" in found[0].advice


@pytest.mark.parametrize("known", [{"nonfinite": 0}, {"grad_norm": 1.0}])
def test_a_loss_of_one_rank_that_is_nan_where_gradients_are_finite(
    known: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    sound = {"loss": 1.0, "loss/max_rank": 1.1, "loss/argmax_rank": 0}
    records = [{"step": step, **sound, **known} for step in range(6)]
    records[4] |= {"loss": "nan", "loss/max_rank": "nan", "loss/argmax_rank": 1}
    (found,) = found_in(tmp_path, records)
    assert found.text == "Step 4 on rank 1: the loss became NaN, and the gradients of this step were finite."
    assert (found.kind, found.step, found.rank) == ("loss", 4, 1)


def test_a_loss_that_is_nan_with_its_gradients_is_told_once(tmp_path: pathlib.Path) -> None:
    records = [{"step": step, "loss": 1.0, "nonfinite": 0} for step in range(6)]
    for record in records[3:]:
        record |= {"loss": math.nan, "nonfinite": 5}
    assert [(each.kind, each.step) for each in found_in(tmp_path, records)] == [("nonfinite", 3)]
    records[5]["nonfinite"] = 0
    assert [(each.kind, each.step) for each in found_in(tmp_path, records)] == [("nonfinite", 3)]


def test_a_loss_that_is_nan_because_an_output_jumped(tmp_path: pathlib.Path) -> None:
    lines = logged(tmp_path)
    lines[30]["loss"] = math.inf
    (found, *_) = found_in(tmp_path, lines)
    assert (found.kind, found.step) == ("forward", 30)
    assert found.text.endswith("those of 2 modules behind it; the loss then became infinite or NaN.")
    assert [each.step for each in found_in(tmp_path, lines)] == [30, 38], "it is told once"


def test_a_training_whose_loss_alone_is_nan(tmp_path: pathlib.Path) -> None:
    """``stats.full()``; what is handed in is not what was computed."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sinks = [dh.sinks.Jsonl(tmp_path / "a.jsonl")]
    with dh.gradients(model, optimizer, stats=dh.stats.full(), sinks=sinks, every=1) as watch:
        for step in range(6):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().mean()
            loss.backward()
            watch.note_loss(loss * (math.nan if step == 3 else 1.0))
            optimizer.step()
    (run,) = read(tmp_path / "a.jsonl").runs
    (found,) = timeline(run).culprits
    assert found.text == "Step 3: the loss became NaN, and the gradients of this step were finite."
    for words in (["report"], ["watch", "--once"]):
        told = CliRunner().invoke(app, [words[0], str(tmp_path), *words[1:]]).stdout
        assert found.text in told
        assert "Nothing stands out" not in told


def lines_of(folder: pathlib.Path) -> list[dict[str, Any]]:
    """A log of 60 steps of a run without a fault."""
    lines = logged(folder, 60)
    sound = ("nonfinite", "nonfinite_at", "nonfinite_ranks", "grad_norm", "param", "module")
    for line in lines:
        line |= {name: lines[20][name] for name in sound if name in lines[20]}
        line.pop("nonfinite_at", None)
        line.pop("nonfinite_ranks", None)
    return lines


NAN = {"nonfinite": 3, "nonfinite_at": [{"param": "blocks.1.a.weight", "rank": 1}], "nonfinite_ranks": [1]}


def jumped(line: dict[str, Any]) -> dict[str, Any]:
    """The record with outputs of blocks.0.d on rank 1 that are a hundred times larger."""
    largest = [100 * each if place == 3 else each for place, each in enumerate(line["module"]["activation_max"])]
    return line | {"module": line["module"] | {"activation_max": largest}}


def differing(lines: list[dict[str, Any]]) -> None:
    """From step 40 on the copies of a weight differ, by a comparison in each tenth step."""
    differs = {"replicas/differ": 1, "replicas/names": ["blocks.0.d.weight"], "replicas/ranks": [0, 1]}
    for at, line in enumerate(lines):
        line |= {"replicas/compared": 6, "replicas/steps": at // 10 * 10}
        line |= differs if at >= 40 else {"replicas/differ": 0}


def test_a_run_without_a_fault(tmp_path: pathlib.Path) -> None:
    assert found_in(tmp_path, lines_of(tmp_path)) == []


@pytest.mark.parametrize("until", [40, 44])
def test_a_nan_that_comes_while_a_jump_lasts_came_of_it(until: int, tmp_path: pathlib.Path) -> None:
    """One that comes ten steps after the jump is over is a thing by itself."""
    lines = lines_of(tmp_path)
    for at in range(34, until):
        lines[at] = jumped(lines[at])
    lines[44] |= NAN
    found = found_in(tmp_path, lines)
    assert [(each.kind, each.step) for each in found] == [("forward", 34), ("nonfinite", 44)][: 1 if until == 44 else 2]
    then = [text for text in found[0].evidence if text.startswith("Then: Step 44: gradients were not finite on rank 1")]
    assert len(then) == (until == 44)


def test_a_nan_after_copies_began_to_differ_came_of_that(tmp_path: pathlib.Path) -> None:
    lines = lines_of(tmp_path)
    differing(lines)
    lines[34] = jumped(lines[34])
    lines[41] |= NAN
    lines[50] |= {"loss": math.inf}
    (found,) = found_in(tmp_path, lines)
    assert (found.kind, found.first, found.step, found.rank) == ("replicas", 34, 34, 1)
    assert found.text == (
        "Step 34 on rank 1: the output of blocks.0.d jumped to 100 times its usual largest magnitude, and the "
        "comparison after step 39 showed that blocks.0.d.weight differs from the copies on other ranks."
    )
    assert [text.partition(": ")[0] for text in found.evidence[1:]] == ["Then", "Then"]


def test_a_bad_batch_between_two_comparisons_is_not_what_changed_a_copy(tmp_path: pathlib.Path) -> None:
    """Outputs before the parameter's module jump too, so nothing tells which of two copies is right."""
    lines = lines_of(tmp_path)
    differing(lines)
    largest = [100 * each for each in lines[34]["module"]["activation_max"]]
    lines[34]["module"] = lines[34]["module"] | {"activation_max": largest}
    copies = next(each for each in found_in(tmp_path, lines) if each.kind == "replicas")
    assert (copies.first, copies.step, copies.rank) == (30, 39, None)
    assert copies.text == "Steps 30 to 39: blocks.0.d.weight differs from the copies on other ranks."


def test_a_step_that_was_skipped_as_a_spike_is_said_once(tmp_path: pathlib.Path) -> None:
    lines = logged(tmp_path)
    for line in lines:
        line["spike"] = line["skipped"] = 0.0
    lines[30] |= {"spike": 1.0, "skipped": 1.0}
    said = said_of(tmp_path, lines)
    assert [text.count("skipped as a spike") for text in said if "spike" in text] == [1], said
    lines[20] |= {"spike": 1.0, "skipped": 1.0}  # nothing jumped there, so nothing else says it
    assert "1 step was skipped as a spike, the first at step 20." in said_of(tmp_path, lines)


def test_a_gradient_that_became_zero_because_an_output_jumped(tmp_path: pathlib.Path) -> None:
    """A large output saturates what comes behind it, so no gradient comes back through it."""
    lines = logged(tmp_path)
    for line in lines[30:38]:
        line["param"]["grad_norm"][0] = 0.0
    (found, *_) = found_in(tmp_path, lines[:38])
    assert (found.kind, found.step) == ("forward", 30)
    assert found.text.endswith("; the gradient of blocks.0.a.weight became zero, and stays so.")
    for line in lines[30:38]:  # the same without the jump
        line["module"] = lines[29]["module"]
    assert ("dead", 30, "blocks.0.a") in [(each.kind, each.step, each.where) for each in found_in(tmp_path, lines[:38])]


def _timed(steps: int, slowest: Callable[[int], tuple[float, int]]) -> list[dict[str, Any]]:
    """Records of two ranks whose forward and backward take 10 ms, and of what the input of the slower one takes."""
    records = []
    for step in range(steps):
        seconds, rank = slowest(step)
        record: dict[str, Any] = {"step": step, "about": {"ranks": 2}}
        for phase, most in {"input": seconds, "forward": 0.011, "backward": 0.011}.items():
            times = {"": (most + 0.01) / 2, "/max_rank": most, "/argmax_rank": rank}
            record |= {f"{phase}_seconds{name}": value for name, value in times.items()}
        records.append(record)
    return records


def test_a_rank_that_led_by_less_before_it_was_slow_gives_a_range(tmp_path: pathlib.Path) -> None:
    """The step before may be the first slow one, or chance: both are in the range."""
    records = _timed(20, lambda step: ({9: 0.025}.get(step, 0.1 if step >= 10 else 0.011), int(step >= 9)))
    (found,) = found_in(tmp_path, records)
    assert (found.kind, found.where, found.rank, found.first, found.step) == ("slow", "input", 1, 9, 10)
    assert found.text.startswith(
        "Steps 9 to 10 on rank 1: its input takes 100 ms, that of the other ranks 10 ms, for 10 "
    )
    records[9] |= {"input_seconds": 0.0105, "input_seconds/max_rank": 0.011}
    (found,) = found_in(tmp_path, records)
    assert (found.first, found.step) == (10, 10)


def test_a_rank_is_slow_from_the_step_on_in_which_it_began_though_some_steps_are_long(tmp_path: pathlib.Path) -> None:
    """Another process makes forward long in steps 25 to 27 on all ranks: the lead is a small share of these steps."""
    records = _timed(50, lambda step: (0.1 if step >= 20 else 0.011, int(step >= 20)))
    for record in records[25:28]:
        record |= {"forward_seconds": 0.8, "forward_seconds/max_rank": 0.8}
    (found,) = found_in(tmp_path, records)
    assert (found.rank, found.first) == (1, 20)


@pytest.mark.parametrize("seed", range(10))
def test_ranks_that_wait_for_a_core_in_turns_are_not_slow(seed: int, tmp_path: pathlib.Path) -> None:
    """A loaded machine: one rank or the other is late for some records in a row, seven of them at times."""
    chance = random.Random(seed)
    bursts = [[(chance.choice((0.011, 0.06, 0.15)), chance.randrange(2))] * chance.randrange(1, 8) for _ in range(60)]
    known = list(itertools.chain.from_iterable(bursts))[:120]
    assert found_in(tmp_path, _timed(len(known), lambda step: known[step])) == []


def test_a_rank_that_is_late_for_a_blink_is_not_slow(tmp_path: pathlib.Path) -> None:
    assert found_in(tmp_path, _timed(60, lambda step: (0.06 if 30 <= step < 38 else 0.011, 1))) == []


# -- healthy logs: see benchmarks/healthy.py for trainings


def numbers(name: str, values: list[float], **more: Any) -> list[dict[str, Any]]:
    return [{"step": step, name: value, **more} for step, value in enumerate(values)]


def test_a_loss_of_both_signs_has_no_ratio_and_still_jumps(tmp_path: pathlib.Path) -> None:
    losses = [0.3 * math.sin(7.0 * step) for step in range(80)]
    assert found_in(tmp_path, numbers("loss", losses)) == []
    losses[70] = 9.0
    (found,) = found_in(tmp_path, numbers("loss", losses))
    assert (found.kind, found.step, found.strength) == ("batch", 70, "unusual")
    assert "times" not in found.text
    assert "the batch is bad" not in found.text, "outputs are not in the log, so the cause is not known"


def test_numbers_that_are_zero_at_times_are_compared_with_those_that_are_not(tmp_path: pathlib.Path) -> None:
    losses = [float(step % 3 == 0) * (1 + 0.1 * math.sin(step)) for step in range(100)]
    assert found_in(tmp_path, numbers("loss", losses)) == []
    losses[90] = 50.0
    (found,) = found_in(tmp_path, numbers("loss", losses))
    assert found.step == 90
    assert found.evidence[0] == "loss was 50, at most 1.1 before; it jumped in 1 of 100 logged steps"


def test_a_loss_that_rises_and_stays_is_noted(tmp_path: pathlib.Path) -> None:
    losses = [1 + 0.05 * math.sin(5.0 * step) + 3 * (step >= 60) for step in range(100)]
    (found,) = found_in(tmp_path, numbers("loss", losses))
    assert (found.kind, found.step, found.strength) == ("noted", 60, "noted")


@pytest.mark.parametrize(("before", "after"), [(15, 40), (40, 1)])
def test_a_gradient_is_dead_only_after_enough_records(before: int, after: int, tmp_path: pathlib.Path) -> None:
    records = numbers("grad_norm/param/a.weight", [1.0] * before + [0.0] * after)
    assert found_in(tmp_path, records) == []
    assert [each.kind for each in found_in(tmp_path, numbers("grad_norm/param/a.weight", [1.0] * 40 + [0.0] * 40))]


def test_a_frozen_parameter_is_not_dead(tmp_path: pathlib.Path) -> None:
    records = numbers("grad_norm/param/a.weight", [1.0] * 50 + [0.0] * 50)
    for record in records:
        record["update_ratio/param/a.weight"] = 1e-3 * float(record["step"] < 50)
    assert found_in(tmp_path, records) == []


def test_a_mask_of_infinity_is_noted_and_hides_no_nan(tmp_path: pathlib.Path) -> None:
    modules = {f"activation_nonfinite/module/{name}": 0.0 for name in ("mask", "out")}
    records = numbers("loss", [1.0] * 80, nonfinite=0, **modules)
    for record in records:
        record["activation_nonfinite/module/mask"] = 15.0
    (noted,) = timeline(run_of(tmp_path, records)).culprits
    assert (noted.kind, noted.where, noted.strength) == ("noted", "mask", "noted")
    records[60] |= {"activation_nonfinite/module/out": 4.0, "nonfinite": 7}
    found = [each for each in timeline(run_of(tmp_path, records)).culprits if each.strength == "certain"]
    assert [(each.kind, each.step, each.where) for each in found] == [("nonfinite", 60, "out")]


def test_several_masks_are_noted_once_and_behind_what_went_wrong(tmp_path: pathlib.Path) -> None:
    modules = {f"activation_nonfinite/module/blocks.{i}.mask": 15.0 for i in range(4)}
    records = numbers("loss", [1.0] * 80, nonfinite=0, **modules)
    said = said_of(tmp_path, records)
    assert said[0].startswith("Nothing stands out as a fault in 80 logged steps")
    assert said[1] == (
        "Step 0: the outputs of 4 modules have infinite or NaN elements from the first record on, as masks do "
        "(blocks.0.mask, blocks.1.mask, blocks.2.mask, ...)."
    )
    records[60]["loss"] = math.nan
    assert said_of(tmp_path, records)[0].startswith("Step 60: the loss became NaN")


def test_a_bad_batch_of_one_rank_in_a_loss_below_zero(tmp_path: pathlib.Path) -> None:
    """The loss of both signs has no ratio to that of the other rank, so their difference is compared."""
    chance = random.Random(0)
    records = []
    for step in range(80):
        of_ranks = [0.2 - step / 160 + chance.gauss(0, 0.1) for _ in range(2)]
        of_ranks[1] += 3.0 * (step == 60)
        most = max(range(2), key=of_ranks.__getitem__)
        records.append({"step": step, "about": {"ranks": 2}, "loss": sum(of_ranks) / 2})
        records[-1] |= {"loss/max_rank": of_ranks[most], "loss/argmax_rank": most}
    (found,) = found_in(tmp_path, records)
    assert (found.kind, found.step, found.rank) == ("batch", 60, 1)
    assert "times" not in found.evidence[0]


def test_a_gradient_that_was_zero_in_half_of_the_steps_and_jumped(tmp_path: pathlib.Path) -> None:
    chance = random.Random(0)
    names = [f"{i}.weight" for i in range(4)]
    records: list[dict[str, Any]] = []
    for step in range(60):
        norms = [math.exp(chance.gauss(0, 0.1)) for _ in names]
        norms[1] *= (step % 2) * (1e20 if step == 41 else 1.0)
        records.append({"step": step, "param": {"grad_norm": norms}, **({} if step else {"names": {"param": names}})})
    (found,) = found_in(tmp_path, records)
    assert (found.kind, found.step, found.where) == ("gradient", 41, "1.weight")


def test_a_rate_that_jumps_is_named_in_a_log_of_few_records(tmp_path: pathlib.Path) -> None:
    """Every 7 steps; a schedule that begins again, and a warm-up, are nothing."""
    rates = {
        "jump": [1e-3] * 10 + [0.1] * 6,
        "restart": [1e-3, 5e-4, 1e-4] * 5,
        "warm-up": [1e-4 * i for i in range(15)],
    }
    for name, column in rates.items():
        records = [{"step": 7 * at, "lr": rate, "update_ratio/param/a": rate} for at, rate in enumerate(column)]
        found = [(each.kind, each.step) for each in timeline(run_of(tmp_path, records)).culprits]
        assert found == ([("learning rate", 70)] if name == "jump" else []), name


def test_a_nan_that_was_skipped_hides_no_batch_after_it(tmp_path: pathlib.Path) -> None:
    """A skipped step changed nothing; one that was made explains what follows."""
    losses = [1 + 0.05 * math.sin(5.0 * step) for step in range(100)]
    losses[70] = 40.0
    for skipped, steps in ((1.0, [50, 70]), (0.0, [50])):
        records = numbers("loss", losses, nonfinite=0, skipped=0.0)
        records[50] |= {"nonfinite": 3, "skipped": skipped}
        assert [each.step for each in timeline(run_of(tmp_path, records)).culprits] == steps


def test_copies_that_differ_where_no_single_parameter_is_logged(tmp_path: pathlib.Path) -> None:
    """The norm jumps between two comparisons; it has no name."""
    records = numbers("grad_norm", [1.0] * 60)
    records[45]["grad_norm"] = 1e4
    for step, differ in ((9, 0), (39, 0), (49, 1)):
        names = {"replicas/names": ["a.weight"], "replicas/ranks": [1]} if differ else {}
        records[step] |= {"replicas/differ": differ, "replicas/compared": 6, "replicas/steps": step + 1} | names
    assert "replicas" in [each.kind for each in timeline(run_of(tmp_path, records)).culprits]


def test_one_thing_more_is_one_thing(tmp_path: pathlib.Path) -> None:
    losses = [math.nan if step in (10, 20, 30, 40) else 1.0 for step in range(50)]
    records = [record | {"nonfinite": int(record["loss"] != record["loss"])} for record in numbers("loss", losses)]
    said = said_of(tmp_path, records)
    assert "1 more such row begins at step 40." in said
    many = [culprit for culprit in timeline(run_of(tmp_path, records)).culprits for _ in range(2)][:4]
    assert "1 more thing stands out: it is at step" in " ".join(
        verdict(run_of(tmp_path, records), Timeline(many, [], []))
    )


def test_batches_of_one_rank_that_are_bad_again_and_again_are_one_thing(tmp_path: pathlib.Path) -> None:
    """Every tenth step: all outputs jump, beginning with those of the first module."""
    lines = [json.loads(json.dumps(line)) for line in (lines_of(tmp_path) * 2)[:100]]
    for step, line in enumerate(lines):
        line["step"] = step
        if step % 10 == 3 and step >= 43:
            line["module"]["activation_max"] = [100 * each for each in line["module"]["activation_max"]]
            line["module"]["activation_max/argmax_rank"] = [1] * len(line["module"]["activation_max"])
    (found,) = found_in(tmp_path, lines)
    assert (found.kind, found.step, found.rank) == ("batch", 43, 1)
    assert found.text == (
        "Step 43: 6 times, every 10 steps, always on rank 1, already in the first module: its input was bad."
    )
    assert found.advice.startswith("Look at the data of rank 1 in steps 43, 53, 63, 73, 83, ...")
    (once,) = found_in(tmp_path, lines[:50])
    assert "test the device of rank 1" in once.advice


def test_other_weights_after_the_first_steps_have_several_causes(tmp_path: pathlib.Path) -> None:
    """One rank edits its gradients, or has another learning rate: nothing tells which of two it is."""
    more = {"replicas/differ": 4, "replicas/compared": 4, "replicas/steps": 1, "replicas/names": ["a", "b"]}
    records = [{"step": step, "about": {"ranks": 2}} for step in range(3)]
    records[0] |= more | {"replicas/ranks": [0, 1]}
    (found,) = found_in(tmp_path, records)
    assert (found.kind, found.rank) == ("weights", None)
    assert "learning rate" in found.advice
