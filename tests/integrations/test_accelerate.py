"""Accelerate, for real: what it prepares, clips, saves, logs and compiles, with hooks before and after."""

from __future__ import annotations

import gc
import json
import math
import pathlib
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import disthooks as dh
from disthooks import memory
from disthooks.errors import AttachError, ConfigError, UsageError
from tests.support.accelerated import ENGINES, LIMIT, accelerator, llama, step, tokens, told, weights
from tests.support.ranks.harness import Ranks

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from disthooks.integrations import accelerate as integration
from disthooks.integrations._shared import load_fit

STEPS = 3
LAYERS = "model.layers.*"


def _trained(rank: int, engine: str, when: str, folder: str) -> dict[str, Any]:
    """Losses, norms and weights; with hooks attached before ``prepare``, after, or not at all."""
    with accelerator(engine) as acc, told() as messages:
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        saving = dh.save_activations(model, LAYERS, dh.OnDisk("/tmp")) if when == "before" else None
        model, optimizer = acc.prepare(model, optimizer)
        saving = dh.save_activations(model, LAYERS, dh.OnDisk("/tmp")) if when == "after" else saving
        found: dict[str, Any] = {"steps": [], "norms": []}
        rules = [dh.ClipZScore()]  # which clips nothing at first, and remembers
        watch = None
        if saving is not None:
            watch = dh.gradients(model, optimizer, rules=rules, stats=[dh.stats.Norm()], every=1)
            integration.connect(acc, watch)
        for number in range(STEPS):
            found["steps"].append(step(acc, model, optimizer, number, rank))
            if watch is not None:
                watch.flush()
                found["norms"].append(watch.latest["grad_norm"])
        if not engine.endswith("ac"):
            acc.save_state(f"{folder}/{when}")
        found |= {"weights": weights(model), "report": saving and saving.report()}
        found["state"] = watch and watch.state_dict()
        for attached in (watch, saving):
            if attached is not None:
                attached.remove()
    return found | {"told": messages, "left": sorted({"clip_grad_norm_", "end_training"} & vars(acc).keys())}


def _loaded(rank: int, engine: str, folder: str, hooked: bool) -> dict[str, Any]:
    """What a new run goes on with after ``load_state``."""
    with accelerator(engine) as acc, told() as messages:
        torch.manual_seed(1)
        model = llama().requires_grad_(True)
        nn.init.zeros_(model.lm_head.weight)
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        watch = None
        if hooked:
            rules = [dh.ClipZScore()]
            watch = dh.gradients(model, optimizer, rules=rules, stats=[dh.stats.Norm()], every=1)
            integration.connect(acc, watch)
        acc.load_state(folder)
        return {"weights": weights(model), "state": watch and watch.state_dict(), "told": messages}


def same(left: Any, right: Any) -> bool:
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else bool(left == right)


@pytest.mark.full_tier(engine=("fsdp1",))
@pytest.mark.parametrize("engine", ENGINES)
def test_hooks_before_and_after_prepare_and_checkpoints(ranks: Ranks, engine: str, tmp_path: pathlib.Path) -> None:
    made = {when: ranks(_trained, engine, when, str(tmp_path), timeout=300) for when in ("never", "before", "after")}
    for bare, *others in zip(*made.values(), strict=True):
        for one in others:
            assert same([bare["steps"], bare["weights"]], [one["steps"], one["weights"]])
            assert one["report"].moved > 0
            assert one["report"].held == 0
            assert one["norms"] == pytest.approx([norm for _, norm in bare["steps"]], rel=1e-6)
            assert (one["left"], one["told"]) == ([], [])
        assert all(norm > LIMIT for _, norm in bare["steps"])  # so that all of it was clipped
    never, before = (
        {str(p.relative_to(at)) for p in at.rglob("*")} for at in (tmp_path / "never", tmp_path / "before")
    )
    assert before - never == {"disthooks.pt"}
    for folder, hooked in (("after", False), ("after", True), ("never", True)):
        found = ranks(_loaded, engine, f"{tmp_path}/{folder}", hooked, timeout=300)
        for one, truth in zip(found, made["after"], strict=True):
            assert same(one["weights"], truth["weights"])
            if hooked and folder == "after":
                assert one["state"]["steps"] == STEPS
                assert same(one["state"], truth["state"])
            assert len(one["told"]) == (folder == "never")
            assert all("made without disthooks" in message for message in one["told"])


@pytest.mark.full_tier(engine=("fsdp1ac",))
@pytest.mark.parametrize("engine", ["fsdp1ac", "fsdp2ac"])
def test_with_the_plugins_activation_checkpointing(ranks: Ranks, engine: str, tmp_path: pathlib.Path) -> None:
    """Around the checkpoint its inputs are moved; inside it hooks step back, and say so."""
    bare, before, after = (
        ranks(_trained, engine, when, str(tmp_path), timeout=300)[0] for when in ("never", "before", "after")
    )
    for hooked in (before, after):
        assert same([bare["steps"], bare["weights"]], [hooked["steps"], hooked["weights"]])
    inputs = STEPS * 2 * 4 * 64 * 32 * 4  # of two layers, in float32
    assert inputs <= after["report"].moved < 2 * inputs
    assert after["told"] == []
    assert before["report"].moved == 0
    assert before["report"].passed == {"checkpoint": 4 * STEPS}
    assert len(before["told"]) == 1
    assert "attach to the module around the checkpoint" in before["told"][0]


def _zero(rank: int) -> list[Any]:
    with accelerator("zero") as acc:
        model = llama()
        model, optimizer = acc.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        with integration.prepare(acc, model, optimizer) as prepared:  # configured in DeepSpeed's own JSON
            norms = [step(acc, model, optimizer, number, rank)[1] for number in range(2)]
            prepared.gradients.flush()
            return [norms[-1], prepared.gradients.latest["grad_norm"], prepared.gradients.steps]


def test_deepspeed_configured_in_its_own_json(ranks: Ranks) -> None:
    for theirs, ours, steps in ranks(_zero, timeout=300):
        assert (math.isclose(theirs, ours / 2, rel_tol=1e-5), steps) == (True, 2)  # theirs is after our rule


# --- in one process

CONFIG = {"watch": {"every": 1, "stats": [{"kind": "Norm"}], "rules": [{"kind": "Scale", "factor": 0.5}]}}


def _pair(acc: Any, seed: int = 0) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(4, 3)
    return acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


def _backward(acc: Any, model: nn.Module, seed: int, scale: float = 10.0) -> float:
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
    acc.backward(model(x).square().mean() * scale)
    scaled = acc.scaler.get_scale() if acc.scaler else 1.0
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm()) / scaled


def _norm(model: nn.Module) -> float:
    return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())


def test_accumulation_and_both_ways_of_clipping() -> None:
    with accelerator("one", gradient_accumulation_steps=2) as acc:
        model, optimizer = _pair(acc)
        prepared = integration.prepare(acc, model, optimizer, CONFIG)
        for batch in range(4):
            with acc.accumulate(model):
                true = _backward(acc, model, batch)
                acc.unscale_gradients()  # which some do in every micro-batch
                if acc.sync_gradients:
                    theirs = acc.clip_grad_norm_(model.parameters(), 0.5)
                    acc.clip_grad_value_(model.parameters(), 0.2)
                optimizer.step()
                if acc.sync_gradients:
                    prepared.gradients.flush()
                    assert prepared.gradients.latest["grad_norm"] == pytest.approx(true)
                    assert (float(theirs), _norm(model) <= 0.5) == (pytest.approx(true / 2), True)
                optimizer.zero_grad()
        assert prepared.gradients.steps == 2
        prepared.remove()
        assert not {"clip_grad_norm_", "clip_grad_value_", "unscale_gradients", "end_training"} & vars(acc).keys()


def test_two_optimizers_and_a_spike_of_the_loss() -> None:
    """The loss is taken from ``backward``; both optimizers leave the step out, and accelerate clips both together."""
    torch.manual_seed(0)
    with accelerator("one") as acc:
        model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
        optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in model]
        model, *optimizers = acc.prepare(model, *optimizers)
        rules = [dh.SkipSpike(least=3, norm=False), dh.ClipNorm(1.0)]
        with (
            dh.gradients(model, optimizers, rules=rules, stats=[dh.stats.Loss()], every=1) as watch,
            integration.connect(acc, watch),
        ):
            for number in range(6):
                loss = 50.0 if number == 4 else 1.0 + 0.1 * (number % 2)
                acc.backward(model(torch.ones(3, 2)).square().mean() * 1e-2 + loss)
                before = [p.detach().clone() for p in model.parameters()]
                norm = acc.clip_grad_norm_(model.parameters(), 1e-3)
                assert math.isclose(float(norm), float(watch.norm), rel_tol=1e-5), "it was measured before the clip"
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                watch.flush()
                moved = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
                assert moved == [number != 4] * 4
                assert watch.latest["spike"] == (number == 4)


def test_under_its_grad_scaler() -> None:
    """Accelerate allows float16 on GPUs alone; its scaler works here too. A step that overflows is never made."""
    with accelerator("one") as acc:
        acc.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        acc.native_amp, acc.state._mixed_precision = True, "fp16"
        model, optimizer = _pair(acc)
        with integration.prepare(acc, model, optimizer, CONFIG) as prepared:
            for seed, scale in enumerate((10.0, math.inf, 10.0)):
                before = model.weight.detach().clone()
                true = _backward(acc, model, seed, scale)
                theirs = acc.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                prepared.gradients.flush()
                assert optimizer.step_was_skipped == torch.equal(before, model.weight) == (scale == math.inf)
                if scale < math.inf:
                    assert prepared.gradients.latest["grad_norm"] == pytest.approx(true, rel=1e-3)
                    assert float(theirs) == pytest.approx(true / 2, rel=1e-3)


@pytest.mark.parametrize("precision", ["no", "fp16"])
def test_its_flag_tells_of_a_step_that_a_rule_left_out(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The schedule that the Accelerator prepared waits, as it does when its own scaler keeps a step back."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    acc = Accelerator(cpu=True)
    if precision == "fp16":
        acc.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, schedule = acc.prepare(model, optimizer, schedule)
    found = []
    rules = [dh.SkipSpike(least=2, window=8, sigmas=3.0, loss=False), dh.ClipNorm(1.0)]
    with dh.gradients(model, optimizer, rules=rules) as watch:
        for step in range(6):
            acc.backward(model(torch.full((1, 2), 1.0 + 0.01 * (step % 3))).sum() * (1e6 if step == 4 else 1.0))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            found.append((acc.optimizer_step_was_skipped, watch.was_skipped))
    AcceleratorState._reset_state(True)
    assert found == [(False, False)] * 4 + [(True, True), (False, False)]
    assert optimizer.param_groups[0]["lr"] == 0.5**5


def test_a_tracker_with_their_numbers_and_ours(tmp_path: pathlib.Path) -> None:
    with accelerator("one", log_with="disthooks", project_dir=str(tmp_path)) as acc:
        model, optimizer = _pair(acc)
        prepared = integration.prepare(acc, model, optimizer, CONFIG)
        acc.init_trackers("run", config={"lr": 0.1, "path": tmp_path})
        true = []
        for seed in range(3):
            true.append(_backward(acc, model, seed))
            acc.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            acc.log({"loss": torch.tensor(float(seed))}, step=seed)
        acc.end_training()
        lines = [json.loads(line) for line in (tmp_path / "run" / "log.jsonl").read_text().splitlines()]
        prepared.remove()
    assert [line["loss"] for line in lines if "loss" in line] == [0.0, 1.0, 2.0]
    ours = [line for line in lines if "gradients/grad_norm" in line]
    assert [(line["step"], line["gradients/grad_norm"]) for line in ours] == [
        (seed, pytest.approx(norm)) for seed, norm in enumerate(true)
    ]
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.1, "path": str(tmp_path)}


@pytest.mark.parametrize("when", ["before", "after"])
def test_regional_compilation(when: str) -> None:
    from accelerate.utils import TorchDynamoPlugin

    torch._dynamo.reset()
    found = []
    for hooked in (False, True):
        with accelerator(
            "one", dynamo_plugin=TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=True)
        ) as acc:
            model = llama()
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            saving = dh.save_activations(model, LAYERS, dh.OnDisk("/tmp")) if hooked and when == "before" else None
            model, optimizer = acc.prepare(model, optimizer)
            if hooked and when == "after":
                saving = dh.save_activations(model, LAYERS, dh.OnDisk("/tmp"))
            steps = [step(acc, model, optimizer, number, 0) for number in range(2)]
            found.append((steps, {name.replace("_orig_mod.", ""): p.clone() for name, p in model.named_parameters()}))
    assert saving is not None
    assert saving.report().moved > 0
    assert same(*found)


def test_a_model_that_is_dropped_is_freed() -> None:
    """As where a smaller batch is tried with a new model; what is saved then is of the model that is left."""
    with accelerator("one") as acc:
        for _ in range(2):
            model, optimizer = _pair(acc)
            hooks = integration.prepare(acc, model, optimizer, CONFIG)
            _backward(acc, model, 0)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            dropped, around = weakref.ref(model), acc.clip_grad_norm_.__self__
            assert list(around.attached.values()) == [hooks.gradients]
            del model, optimizer, hooks
            acc.free_memory()
            gc.collect()
            assert (dropped(), len(around.attached)) == (None, 0)


def _unreadable(rank: int, folder: str) -> list[Any]:
    """The file is on the machine of the first rank alone; then both clip in two parts, and one logs between them."""
    with accelerator("ddp") as acc:
        model, optimizer = _pair(acc)
        watch = {"every": 1, "rules": CONFIG["watch"]["rules"]}  # which logs nothing
        pathlib.Path(folder, "hooks.yaml").write_text(json.dumps({"watch": watch}))
        with pytest.raises((ConfigError, AttachError)) as error:
            integration.prepare(acc, model, optimizer, f"{folder}/{'hooks' if rank == 0 else 'none'}.yaml")
        with integration.prepare(acc, model, optimizer, {"watch": watch}) as hooks:
            true = _backward(acc, model, 0)
            first, *rest = model.parameters()
            acc.clip_grad_norm_(first, math.inf)
            if acc.is_main_process:
                first.sum().item()
            acc.clip_grad_norm_(rest, math.inf)
            optimizer.step()
            is_half = math.isclose(_norm(model), true / 2, rel_tol=1e-5)
            return [type(error.value).__name__, is_half, hooks.gradients.steps]


def test_what_one_rank_does_leaves_none_waiting(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    first, second = ranks(_unreadable, str(tmp_path), timeout=300)
    assert (first, second) == (["AttachError", True, 1], ["ConfigError", True, 1])


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_unwrapping_leaves_the_hooks(way: str, tmp_path: pathlib.Path) -> None:
    """``extract_model_from_parallel`` takes off whatever has an attribute ``module``."""
    from accelerate.utils import extract_model_from_parallel

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if way == "wrapped":
        saving: Any = dh.SaveWith(model[1], dh.OnDisk(tmp_path), at_least=0)
        model[1] = saving
    else:
        saving = dh.save_activations(model, "1", dh.OnDisk(tmp_path), at_least=0)
    unwrapped = extract_model_from_parallel(model, recursive=True)
    assert list(unwrapped.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    unwrapped(torch.randn(3, 4)).sum().backward()
    assert saving.report().moved > 0


def test_it_is_told_what_is_no_accelerator() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UsageError, match="give the Accelerator, got Linear"):
        integration.prepare(model, model)


def test_a_checkpoint_of_other_rules_is_refused_with_its_name(tmp_path: pathlib.Path) -> None:
    with accelerator("one") as acc:
        model, optimizer = _pair(acc)
        with integration.prepare(acc, model, optimizer, CONFIG):
            acc.save_state(str(tmp_path))
        other = {"watch": {"rules": [{"kind": "ClipNorm", "max_norm": 1.0}]}}
        with (
            integration.prepare(acc, model, optimizer, other),
            pytest.raises(UsageError, match=r"disthooks\.pt: the state is of the rules \['Scale'\]"),
        ):
            acc.load_state(str(tmp_path))


def _fitted(rank: int, folder: str) -> tuple[bool, list[str], int]:
    """Whether a new run begins with what fit had learnt; the files of the checkpoint; the limit in its first step."""
    config: dict[str, Any] = {"fit": True, "budget": "8 GiB"}
    config["save"] = [{"modules": LAYERS, "store": {"kind": "OnDisk", "directory": "/tmp"}}]
    memory.release_promptly()
    states, limits = [], []
    for run in range(2):
        with accelerator("ddp") as acc:
            model = llama()
            model, optimizer = acc.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
            with integration.prepare(acc, model, optimizer, config) as hooks:
                if run:
                    acc.load_state(folder)
                    states.append(hooks.saving.fitted.state_dict())
                for number in range(3):
                    step(acc, model, optimizer, number, rank)
                    limits.append(hooks.saving.fitted.report().limit)
                if not run:
                    states.append(hooks.saving.fitted.state_dict())
                    acc.save_state(folder)
            acc.wait_for_everyone()
    return states[0] == states[1], sorted(file.name for file in pathlib.Path(folder).glob("disthooks*")), limits[3]


@pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
def test_what_fit_has_learnt_is_in_the_checkpoint(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    for same, files, limit in ranks(_fitted, str(tmp_path), timeout=300):
        assert same
        assert files == ["disthooks_fit_0_rank_0.pt", "disthooks_fit_0_rank_1.pt"]
        assert limit > 0, "the first step after the restart moves no more than it has to"
    # One rank goes on where two were.
    model, mine = llama(), tmp_path / "disthooks_fit_0_rank_0.pt"
    with dh.fit(model, "8 GiB", dh.OnDisk(str(tmp_path)), modules=LAYERS) as fitted:
        load_fit(fitted, tmp_path)
        state, written = fitted.state_dict(), torch.load(mine, weights_only=True)["fit"]
        assert (state["again"], state["layers"]) == (written["again"], written["layers"])
        assert state["again"]
        assert not state["needs"]
        model(**{name: x[:2] for name, x in tokens(0, 0).items()}).loss.backward()
        assert fitted.report().saved.moved == fitted.report().saved.stored > 0
