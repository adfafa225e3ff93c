"""Transformers' Trainer and TRL's, for real: norms before clipping, logs, checkpoints, what is trained again."""

from __future__ import annotations

import json
import math
import os
import pathlib
from typing import Any

import pytest
import torch

from disthooks import memory
from disthooks.errors import MatchError, UsageError
from tests.support.accelerated import llama, surroundings
from tests.support.ranks.harness import Ranks

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from disthooks.integrations.transformers import DisthooksCallback

os.environ["HF_HUB_OFFLINE"] = "1"
LAYERS = {"modules": "model.layers.*", "store": {"kind": "OnDisk", "directory": "/tmp"}}
NORM = [{"kind": "Norm"}]


class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        x = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": x, "labels": x}


def config(rules: Any = (), save: Any = (LAYERS,), every: int = 1, sinks: Any = ()) -> dict[str, Any]:
    watch = {"every": every, "stats": NORM, "rules": list(rules), "sinks": list(sinks)}
    return {"save": list(save), "watch": watch}


def trainer(folder: Any, callbacks: Any, model: Any = None, **options: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    defaults = {"use_cpu": True, "per_device_train_batch_size": 2, "max_steps": 4, "logging_steps": 1}
    defaults |= {"save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    defaults |= {"max_grad_norm": 0.1, "learning_rate": 1e-2}
    args = TrainingArguments(output_dir=str(folder), **{**defaults, **options})
    return Trainer(model=model or llama(), args=args, train_dataset=Rows(), eval_dataset=Rows(), callbacks=callbacks)


def logged(made: Any) -> list[dict[str, Any]]:
    return [entry for entry in made.state.log_history if "loss" in entry]


def agree(entries: list[dict[str, Any]], share: float = 1.0) -> bool:
    """Whether the Trainer's norm is ours; with a rule that scales, a share of it."""
    pairs = [(entry["grad_norm"], entry["gradients/grad_norm"] * share) for entry in entries]
    return bool(pairs) and all(math.isclose(*pair, rel_tol=1e-6) for pair in pairs)


def _ddp(rank: int, folder: str) -> dict[str, Any]:
    """Accumulation, clipping, evaluation, checkpoints, on two ranks; without hooks, with them, gone on with."""
    options = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps"}
    options |= {"eval_steps": 2, "ddp_backend": "gloo"}
    found: dict[str, Any] = {}
    for kind in ("bare", "hooked", "resumed"):
        with surroundings("ddp"):
            callback = DisthooksCallback(config(rules=[{"kind": "ClipZScore"}]))
            hooks = [] if kind == "bare" else [callback]
            made = trainer(f"{folder}/{kind}", hooks, **options)
            made.train(resume_from_checkpoint=f"{folder}/hooked/checkpoint-2" if kind == "resumed" else None)
            entries = logged(made)
            found[kind] = [
                [(entry["loss"], entry["grad_norm"]) for entry in entries],
                {name: p.detach().clone() for name, p in made.model.named_parameters()},
            ]
            if kind != "bare":
                found[kind] += [agree(entries), callback.saved, callback.prepared]
    return found


def test_on_two_ranks(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    for found in ranks(_ddp, str(tmp_path), timeout=240):
        for kind in ("hooked", "resumed"):
            numbers, weights, agrees, saved, left = found[kind]
            assert numbers == found["bare"][0]
            assert len(numbers) == 4
            assert all(torch.equal(weights[name], value) for name, value in found["bare"][1].items())
            assert (agrees, saved.held, left) == (True, 0, None)
            assert all(norm > 0.1 for _, norm in numbers)  # all of it was clipped, and ours is from before
            assert saved.moved > 0
            assert saved.passed["no_grad"] > 0
    first, last = (
        torch.load(tmp_path / "hooked" / f"checkpoint-{step}" / "disthooks.pt", weights_only=True) for step in (2, 4)
    )
    again = torch.load(tmp_path / "resumed" / "checkpoint-4" / "disthooks.pt", weights_only=True)
    assert (first["steps"], last["steps"], again["steps"]) == (2, 4, 4)
    assert again["rules"][0][1] == last["rules"][0][1]
    assert int(last["rules"][0][1]["count"]) == 4
    names = [{p.name for p in (tmp_path / kind / "checkpoint-4").iterdir()} for kind in ("bare", "hooked")]
    assert names[1] - names[0] == {"disthooks.pt"}


def _fsdp(rank: int, folder: str) -> list[Any]:
    """FSDP2 with its activation checkpointing, gone on with from a sharded checkpoint."""
    wrap = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    plugin = {"version": 2, "activation_checkpointing": True, "state_dict_type": "SHARDED_STATE_DICT", **wrap}
    options = {"use_cpu": False, "fsdp": True, "fsdp_config": plugin, "save_strategy": "steps", "save_steps": 2}
    found: list[Any] = []
    for resumed in (False, True):
        with surroundings("fsdp2"):
            callback = DisthooksCallback(config(rules=[{"kind": "ClipZScore"}]))
            made = trainer(folder, [callback], **options)
            made.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumed else None)
            entries = logged(made)
            found += [agree(entries), callback.saved.moved > 0, [entry["grad_norm"] for entry in entries][2:]]
    state = torch.load(f"{folder}/checkpoint-4/disthooks.pt", weights_only=True)
    return [*found, type(made.model_wrapped).__name__, state["steps"], int(state["rules"][0][1]["count"])]


def test_on_two_ranks_of_fsdp(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    for first, moved, norms, again, moved_again, same, kind, steps, count in ranks(_fsdp, str(tmp_path), timeout=240):
        assert (first, moved, again, moved_again, kind) == (True, True, True, True, "FSDPLlamaForCausalLM")
        assert same == pytest.approx(norms, rel=1e-6)
        assert (steps, count) == (4, 4)


def _deepspeed(rank: int, folder: str) -> list[Any]:
    """ZeRO-2 without hooks, and with a budget, a statistic and a checkpoint."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    auto = dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"), "auto")
    zero = {**auto, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    options = {"deepspeed": zero, "ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 3}
    memory.release_promptly()
    found: list[Any] = []
    for fitted in (False, True):
        with surroundings("zero"):
            fit = {"fit": True, "budget": "8 GiB"} if fitted else {}
            callback = DisthooksCallback({**config(), **fit})
            made = trainer(f"{folder}/{fitted}", [callback] if fitted else [], **options)
            made.train()
            found.append([(entry["loss"], entry["grad_norm"]) for entry in logged(made)])
    kept = callback.saved.budget
    assert kept is not None
    return [*found, type(made.model_wrapped).__name__, agree(logged(made), 1.0), callback.saved.moved, kept]


def test_on_two_ranks_of_deepspeed(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("deepspeed")
    for bare, hooked, kind, agrees, moved, kept in ranks(_deepspeed, str(tmp_path), timeout=240):
        assert kind == "DeepSpeedEngine"
        assert len(bare) == 4
        assert hooked == bare
        assert (agrees, moved > 0) == (True, True)
        assert (kept.steps, kept.over) == (4, 0)
    files = {p.name for p in (tmp_path / "True" / "checkpoint-3").glob("disthooks*")}
    assert files == {"disthooks.pt", "disthooks_fit_0_rank_0.pt", "disthooks_fit_0_rank_1.pt"}


def test_logs_tensorboard_and_sinks(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Trainer logs each third step, the configuration each second one; rules come before the Trainer's norm."""
    tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "tb"))
    sink = {"kind": "Jsonl", "path": str(tmp_path / "run.jsonl")}
    made_of = config(rules=[{"kind": "Scale", "factor": 0.5}], save=(), every=4, sinks=[sink])
    callback = DisthooksCallback(made_of)
    made = trainer(tmp_path, [callback], report_to="tensorboard", logging_steps=3, max_steps=7, logging_first_step=True)
    assert made.callback_handler.callbacks[0] is callback
    made.train()
    entries = logged(made)
    assert [entry["step"] for entry in entries] == [1, 3, 6]
    assert agree(entries, 0.5)
    assert "gradients/grad_norm" not in made.state.log_history[-1]  # of the whole training
    events = tensorboard.EventAccumulator(str(tmp_path / "tb")).Reload()
    ours, theirs = (events.Scalars(f"train/{name}") for name in ("gradients/grad_norm", "grad_norm"))
    assert [event.step for event in ours] == [event.step for event in theirs] == [1, 3, 6]
    assert [event.value / 2 for event in ours] == pytest.approx([event.value for event in theirs])
    lines = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 2, 4, 5]
    losses = {entry["step"] - 1: entry["loss"] for entry in made.state.log_history if "loss" in entry}
    assert {line["step"]: line["loss"] for line in lines if "loss" in line} == pytest.approx(losses)


def test_the_loss_of_the_trainer(tmp_path: pathlib.Path) -> None:
    """It is the mean of the micro-batches, which the model returns; the Trainer gives backward a part of it."""
    callback = DisthooksCallback(config(rules=[{"kind": "SkipSpike", "least": 2, "sigmas": 50.0}], save=()))
    made = trainer(tmp_path, [callback], gradient_accumulation_steps=2)
    made.train()
    entries = logged(made)
    assert [entry["gradients/spike"] for entry in entries] == [0.0] * 4
    latest = callback.prepared.gradients.latest if callback.prepared else {}
    for entry in entries[2:]:
        assert entry["gradients/loss_limit"] > entry["loss"] > 0
    if latest:
        assert math.isclose(latest["loss"], entries[-1]["loss"], rel_tol=1e-3)


def test_trained_twice_and_after_a_training_that_raised(tmp_path: pathlib.Path) -> None:
    callback = DisthooksCallback(config())

    class Stops(type(callback).__mro__[1]):  # type: ignore[misc]
        armed = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.armed and state.global_step == 2:
                raise KeyboardInterrupt

    stops = Stops()
    made = trainer(tmp_path, [callback, stops])
    with pytest.raises(KeyboardInterrupt):
        made.train()
    assert callback.prepared is not None
    stops.armed = False
    for _ in range(2):
        made.train()
        assert agree(logged(made))
        assert len(logged(made)) == 4
        assert callback.prepared is None
        assert callback.saved.moved > 0
        assert not {"clip_grad_norm_", "unscale_gradients"} & vars(made.accelerator).keys()
    callback.remove()


def test_without_clipping_and_with_an_epoch_at_a_time(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With max_grad_norm=0 the Trainer measures all the same; the configuration is found by the precedence."""
    (tmp_path / "hooks.yaml").write_text("watch: {every: 1, stats: [{kind: Norm}]}")
    monkeypatch.setenv("DISTHOOKS_CONFIG", str(tmp_path / "hooks.yaml"))
    options = {"max_grad_norm": 0.0, "logging_strategy": "epoch", "max_steps": -1, "num_train_epochs": 2}
    made = trainer(tmp_path, [DisthooksCallback], per_device_train_batch_size=16, **options)
    made.train()
    assert len(logged(made)) == 2
    assert agree(logged(made))


@pytest.mark.parametrize("inside", [False, True])
def test_gradient_checkpointing(tmp_path: pathlib.Path, inside: bool) -> None:
    """A layer holds its checkpoint inside, so attaching to it moves the inputs; what is inside steps back aloud."""
    found = []
    modules = "model.layers.*.mlp" if inside else "model.layers.?"
    callback = DisthooksCallback(config(save=[{**LAYERS, "modules": modules, "at_least": 0}]))
    for hooks in ([], [callback]):
        made = trainer(tmp_path, hooks, gradient_checkpointing=True, max_steps=2)
        if hooks and inside:
            with pytest.warns(UserWarning, match="attach to the module around the checkpoint"):
                made.train()
        else:
            made.train()
        found.append([(entry["loss"], entry["grad_norm"]) for entry in logged(made)])
    assert found[0] == found[1]
    assert agree(logged(made))
    assert (callback.saved.moved > 0, "checkpoint" in callback.saved.passed) == (not inside, inside)


def test_what_is_wrong_is_told_before_training(tmp_path: pathlib.Path) -> None:
    with pytest.raises(UsageError, match="the Trainer has a grad_norm of its own"):
        DisthooksCallback(prefix="")
    with pytest.raises(UsageError, match="none is calling"):
        DisthooksCallback(config()).on_train_begin(None, None, None)
    callback = DisthooksCallback(config(save=[{**LAYERS, "modules": "layers.*"}]))
    made = trainer(tmp_path, [callback])
    before = made.model.lm_head.weight.detach().clone()
    with pytest.raises(MatchError, match="matches no module"):
        made.train()
    assert torch.equal(before, made.model.lm_head.weight)
    assert callback.prepared is None


def test_a_checkpoint_without_our_state(tmp_path: pathlib.Path) -> None:
    trainer(tmp_path, [], save_strategy="steps", save_steps=2, max_steps=2).train()
    made = trainer(tmp_path, [DisthooksCallback(config())])
    with pytest.warns(RuntimeWarning, match="made without disthooks"):
        made.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in logged(made)][-2:] == [3, 4]
    assert agree(logged(made)[-2:])


# --- PEFT and TRL


def test_two_callbacks_and_a_trainer_that_saves_elsewhere(tmp_path: pathlib.Path) -> None:
    """Each has a file of its own in a checkpoint; where there is no checkpoint, training goes on."""

    def two() -> list[Any]:
        rules = [{"kind": "ClipZScore"}]
        return [
            DisthooksCallback(config(save=(), rules=some), prefix=prefix)
            for some, prefix in ((rules, "a/"), ((), "b/"))
        ]

    made = trainer(tmp_path, two(), save_strategy="steps", save_steps=2)
    for _ in range(2):
        made.train()
    made = trainer(tmp_path, two(), save_strategy="steps", save_steps=2)
    made.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    for entry in logged(made)[2:]:
        assert entry["a/grad_norm"] == entry["b/grad_norm"] == pytest.approx(entry["grad_norm"], rel=1e-6)
    files = [
        torch.load(tmp_path / "checkpoint-4" / name, weights_only=True) for name in ("disthooks.pt", "disthooks_1.pt")
    ]
    assert [(len(state["rules"]), state["steps"]) for state in files] == [(1, 4), (0, 4)]
    made = trainer(tmp_path / "none", two(), save_strategy="steps", save_steps=2)
    made._save_checkpoint = lambda *_: None
    with pytest.warns(RuntimeWarning, match=r"Trainer has made no .*checkpoint-2: .*is not saved"):
        made.train()
    assert made.state.global_step == 4


def test_sft_trainer_with_lora(tmp_path: pathlib.Path) -> None:
    trl = pytest.importorskip("trl", reason="trl is not installed")
    peft = pytest.importorskip("peft", reason="peft is not installed")
    import datasets
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    texts = [" ".join(f"w{(i * j) % 61}" for j in range(24)) for i in range(16)]
    callback = DisthooksCallback(config(save=[{**LAYERS, "modules": "*.layers.?"}]))
    options = {"use_cpu": True, "bf16": False, "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 2}
    options |= {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "gradient_checkpointing": True}
    made = trl.SFTTrainer(
        model=llama(),
        args=trl.SFTConfig(output_dir=str(tmp_path), max_grad_norm=0.1, **options),
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_dict({"text": texts}),
        peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]),
        callbacks=[callback],
    )
    made.train()
    assert len(logged(made)) == 3
    assert agree(logged(made))
    assert "mean_token_accuracy" in logged(made)[0]
    assert callback.saved.moved > 0


@pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
def test_what_fit_has_learnt_is_in_the_checkpoint(tmp_path: pathlib.Path) -> None:
    from transformers import TrainerCallback

    class Limits(TrainerCallback):
        def __init__(self, callback: DisthooksCallback) -> None:
            self.callback, self.seen = callback, []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seen.append(self.callback.prepared.saving.fitted.report().limit)

    memory.release_promptly()
    found = []
    for resumed in (None, f"{tmp_path}/checkpoint-3"):
        fit = {"fit": True, "budget": memory.resident() + (512 << 20), "save": [LAYERS]}
        callback = DisthooksCallback(fit)
        limits = Limits(callback)
        made = trainer(tmp_path, [callback, limits], save_strategy="steps", save_steps=3, max_steps=5)
        made.train(resume_from_checkpoint=resumed)
        found.append(limits.seen)
    assert (tmp_path / "checkpoint-3" / "disthooks_fit_0_rank_0.pt").is_file()
    assert found[0][0] == 0, "the first step of all moves everything"
    assert found[1][0] > 0
    assert len(found[1]) == 2


@pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
def test_a_budget_is_in_the_log_in_the_report_and_in_one_line(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    memory.release_promptly()
    budget = memory.resident() + (512 << 20)
    fit = {"fit": True, "budget": budget, "save": [LAYERS], "watch": {"stats": NORM}}
    callback = DisthooksCallback(fit)
    made = trainer(tmp_path, [callback], gradient_accumulation_steps=2, logging_steps=2)
    made.train()
    printed = capsys.readouterr()
    kept = callback.saved.budget
    assert (kept.nbytes, kept.steps, kept.rounds, kept.over) == (budget, 4, 8, 0)
    assert str(kept).endswith(", all 4 steps within")
    assert str(callback.saved).startswith(f"{kept}\n")
    assert f"disthooks: {kept}\n" in printed.err
    for entry in logged(made):
        assert entry["gradients/saved/budget"] == budget
        assert budget - (512 << 20) < entry["gradients/saved/peak"] <= kept.peak
    assert "gradients/saved/moved'" not in printed.out, "the terminal shows what moved in a step, and no total"
    assert printed.out.count("gradients/saved/moved_per_step'") == 2


@pytest.mark.parametrize("often", [False, True])
def test_a_step_of_the_trainer_is_run_again(tmp_path: pathlib.Path, often: bool) -> None:
    """A NaN in an output of one layer: once, so that the step is made; or in both runs, so that it is left out."""
    weights = []
    # Calls 1 to 4 are of two steps, 5 and 6 of the probe; 9 is of a second run, 11 and 13 of those that capture.
    for bad in ((), (7, 9, 11, 13) if often else (7,)):
        model, calls, log = llama(), [0], tmp_path / f"{len(bad)}.jsonl"

        def spoil(module: Any, args: Any, output: Any, calls: Any = calls, bad: Any = bad) -> Any:
            calls[0] += 1
            return output * math.nan if calls[0] in bad else output

        model.model.norm.register_forward_hook(spoil)
        hooks = config(rules=[{"kind": "SkipNonFinite"}], save=(), sinks=[{"kind": "Jsonl", "path": str(log)}])
        hooks["watch"] |= {"capture": str(tmp_path / "captures")} if often else {"rerun": True}
        made = trainer(tmp_path, [DisthooksCallback(hooks)], model, gradient_accumulation_steps=2)
        made.train()
        assert "training_step" not in vars(made)
        weights.append([each.detach().clone() for each in model.parameters()])
        said = [each for each in map(json.loads, log.read_text().splitlines()) if "rerun" in each]
        wanted = [(2, "repeats" if often else "transient", 2)] if bad else []
        assert [(each["step"], each["rerun"], each["rerun_calls"]) for each in said] == wanted
        if often and bad:
            (folder,) = said[0]["rerun_capture"]
            facts = json.loads((pathlib.Path(folder) / "capture.json").read_text())
            assert (facts["module"], facts["in_backward"], facts["left_out"]) == ("model.norm", False, [])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)) != often


class Numbered(torch.utils.data.Dataset):
    """Rows that begin with their number."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = torch.full((8,), index)
        return {"input_ids": row, "labels": row}


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rows_of_a_bad_step_are_noted(tmp_path: pathlib.Path, workers: int) -> None:
    """In the second of two epochs, and after a resumed one; each step has two batches of two rows."""
    for resumed in (False, True):
        model, seen, log = llama(), [], tmp_path / f"{resumed}.jsonl"
        bad = 2 * 2 if resumed else 5 * 2  # in the step whose first batch is this one of the training

        def spoil(module: Any, args: Any, output: Any, model: Any = model, seen: Any = seen, bad: int = bad) -> Any:
            if not model.training:
                return None
            seen.append(args[0][:, 0].tolist())
            return output * math.nan if len(seen) == bad + 1 else None

        model.model.embed_tokens.register_forward_hook(spoil)
        hooks = config(rules=[{"kind": "SkipNonFinite"}], save=(), sinks=[{"kind": "Jsonl", "path": str(log)}])
        options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "dataloader_num_workers": workers}
        made = trainer(tmp_path, [DisthooksCallback(hooks)], model, gradient_accumulation_steps=2, **options)
        made.train_dataset = Numbered()
        made.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4") if resumed else None)
        (line,) = map(json.loads, (tmp_path / f"{resumed}.jsonl.rank-0.data").read_text().splitlines())
        step = 4 + bad // 2 if resumed else bad // 2
        assert line["step"] == step
        assert line["data"] == [{"indices": rows} for rows in seen[bad : bad + 2]]


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([Numbered()[index] for index in range(12)] * 4)


def test_of_a_stream_no_rows_are_noted(tmp_path: pathlib.Path) -> None:
    """Nothing draws its samples by number."""
    log, model = tmp_path / "log.jsonl", llama()
    model.model.norm.register_forward_hook(lambda module, args, output: output * math.nan)
    hooks = config(rules=[{"kind": "SkipNonFinite"}], save=(), sinks=[{"kind": "Jsonl", "path": str(log)}])
    made = trainer(tmp_path, [DisthooksCallback(hooks)], model)
    made.train_dataset = Stream()
    made.train()
    assert '"skipped": 1' in log.read_text()
    assert not log.with_name("log.jsonl.rank-0.data").exists()
