"""Lightning's Trainer with the callback: real fits, on one process and on two."""

from __future__ import annotations

import csv
import json
import math
import os
import pathlib
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import disthooks as dh
from disthooks import memory
from disthooks.errors import AttachError, ConfigError, UsageError
from disthooks.saved.module_class import site_of
from tests.support.ranks.harness import Ranks

L = pytest.importorskip("lightning")
pytestmark = pytest.mark.dist


from disthooks.integrations.lightning import DisthooksCallback  # noqa: E402
from tests.support.lit import NORMS, SAVE, Lit, batches, fit, strategy_of  # noqa: E402

HOOKS = {"save": SAVE, "watch": NORMS}


def _weights(trainer: Any) -> list[torch.Tensor]:
    """What this rank has of them."""
    return [getattr(p, "_local_tensor", p).detach().clone() for p in trainer.strategy.model.parameters()]


def _hooked(model: nn.Module) -> bool:
    """Whether disthooks has left anything on it."""
    return any(site_of(part) is not None for part in model.modules())


def _train(rank: int, name: str, folder: str, how: str) -> dict[str, Any]:
    """With and without the callback, which finds its configuration in one of the ways that there are."""
    from lightning.pytorch.loggers import CSVLogger

    os.chdir(folder)
    options = {"shard": name == "fsdp2", "parts": name in ("fsdp1", "fsdp2")}
    engine = {"disthooks": HOOKS} if how == "json" else {}
    common = {"devices": 2, "accumulate_grad_batches": 2, "max_steps": 2}
    if name == "ddp":
        common["gradient_clip_val"] = 0.01
    plain = fit(Lit(**options), [], strategy=strategy_of(name), **common)
    callback = DisthooksCallback(HOOKS if how == "argument" else None)
    if how == "variable":
        os.environ["DISTHOOKS_CONFIG"] = f"{folder}/named.yaml"
    elif how == "file":
        pathlib.Path("disthooks.yaml").write_text(json.dumps(HOOKS))
    try:
        model, logger = Lit(**options), CSVLogger(folder, name=name, version=0)
        trainer = fit(model, [callback], strategy=strategy_of(name, engine), logger=logger, **common)
    finally:
        os.environ.pop("DISTHOOKS_CONFIG", None)
    return {
        "same": all(torch.equal(a, b) for a, b in zip(_weights(plain), _weights(trainer), strict=True)),
        "moved": callback.saved.moved,
        "own": model.norms,
        "latest": callback.latest,
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "left": callback.prepared is not None or _hooked(model),
    }


@pytest.mark.full_tier(name=("fsdp1",))
@pytest.mark.parametrize(
    ("name", "how"), [("ddp", "variable"), ("fsdp1", "argument"), ("fsdp2", "file"), ("deepspeed", "json")]
)
def test_a_strategy(ranks: Ranks, name: str, how: str, tmp_path: pathlib.Path) -> None:
    """The same bits as without; bytes moved; the norm is the framework's own, in the loggers too, one step late."""
    if name == "deepspeed":
        pytest.importorskip("deepspeed")
    (tmp_path / "named.yaml").write_text(json.dumps(HOOKS))
    found = ranks(_train, name, str(tmp_path), how)
    for each in found:
        assert each["same"]
        assert each["moved"] > 0
        assert not each["left"]
        assert each["latest"]["step"] == 1
        own = each["own"][-1]
        assert each["latest"]["grad_norm"] == pytest.approx(own, rel=1e-5)
        assert each["metrics"]["gradients/grad_norm"] == pytest.approx(own, rel=1e-5)
    with next(tmp_path.rglob("metrics.csv")).open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("gradients/grad_norm")]
    assert [row["step"] for row in rows] == ["0", "1"]
    assert float(rows[0]["gradients/grad_norm"]) == pytest.approx(found[0]["own"][0], rel=1e-5)


def test_the_loss_is_handed_in_and_no_time_is_made_up() -> None:
    """Lightning calls training_step and not forward, so nobody knows when a forward begins."""
    kinds = [{"kind": "Loss"}, {"kind": "Times"}, {"kind": "Norm"}]
    callback, losses = DisthooksCallback({"watch": {"every": 1, "stats": kinds}}), []

    class Kept(Lit):
        def training_step(self, *args: Any) -> Any:
            loss = super().training_step(*args)
            losses.append(float(loss.detach()))
            return loss

    fit(Kept(), [callback], max_steps=2, accumulate_grad_batches=2)
    assert callback.latest["loss"] == pytest.approx(sum(losses[-2:]) / 2)
    assert "backward_seconds" not in callback.latest or callback.latest["forward_seconds"] > 0


def test_its_rules_and_lightnings_own_clipping() -> None:
    """Ours clips as Lightning does; with both, ours comes first and what is logged is from before either."""
    theirs = fit(Lit(), [], gradient_clip_val=0.01)
    clip = {"watch": {"every": 1, "rules": [{"kind": "ClipNorm", "max_norm": 0.01}]}}
    callback, plain = DisthooksCallback(clip), Lit()
    ours = fit(Lit(), [callback])
    torch.testing.assert_close(_weights(ours), _weights(theirs))
    fit(plain, [], max_steps=1)
    both = DisthooksCallback({"watch": NORMS})
    fit(Lit(), [both], max_steps=1, gradient_clip_val=0.01)
    assert both.latest["grad_norm"] == pytest.approx(plain.norms[0])
    assert plain.norms[0] > 0.01
    assert callback.latest["grad_norm_clipped"] == pytest.approx(0.01, rel=1e-3)


ZCLIP = {"watch": {"every": 1, "rules": [{"kind": "ClipZScore", "warmup_steps": 2, "z_thresh": 0.5}]}}


def test_what_rules_learned_goes_with_checkpoints(tmp_path: pathlib.Path) -> None:
    """Two fits of two steps give the bits of one of four; fit called twice goes on counting."""
    whole = DisthooksCallback(ZCLIP)
    trained = fit(Lit(), [whole], count=1)  # of two batches: Lightning resumes where an epoch begins
    half = fit(Lit(), [DisthooksCallback(ZCLIP)], max_steps=2, count=1)
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = DisthooksCallback(ZCLIP)
    resumed = fit(Lit(), [rest], ckpt_path=tmp_path / "half.ckpt", count=1)
    assert rest.latest["step"] == 3
    assert str(rest.state_dict()) == str(whole.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(_weights(trained), _weights(resumed), strict=True))

    again = DisthooksCallback(ZCLIP)
    trainer = fit(Lit(), [again], max_steps=2, count=1)
    trainer.fit_loop.epoch_loop.max_steps = 4
    trainer.fit(trainer.lightning_module, batches(1))
    assert again.latest["step"] == 3
    fit(Lit(), [again], max_steps=1)  # another trainer begins anew
    assert again.latest["step"] == 0
    with pytest.raises(UsageError, match="the state is of the rules"):
        fit(Lit(), [DisthooksCallback({"watch": NORMS})], ckpt_path=tmp_path / "half.ckpt")


def test_an_exception_detaches() -> None:
    model, callback = Lit(fail=2), DisthooksCallback(HOOKS)
    with pytest.raises(RuntimeError, match="a bad batch"):
        fit(model, [callback])
    assert callback.prepared is None
    assert not _hooked(model)
    assert callback.latest["step"] == 1
    fit(Lit(), [callback])
    assert callback.latest["step"] == 3


def test_a_skipped_step_inside_the_closure() -> None:
    """Lightning runs backward inside ``optimizer.step(closure)``: what is skipped there moves nothing."""
    skip = {"watch": {"every": 1, "rules": [{"kind": "SkipNonFinite"}]}}
    callback = DisthooksCallback(skip)
    with_nan = fit(Lit(nan=1), [callback], max_steps=2)
    without = fit(Lit(), [], max_steps=1)
    assert callback.latest["skipped"] == 1
    assert all(torch.equal(a, b) for a, b in zip(_weights(with_nan), _weights(without), strict=True))


class Gan(Lit):
    """Manual optimization: the second optimizer steps twice a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        first, second = self.optimizers()
        for optimizer, times in ((first, 1), (second, 2)):
            for _ in range(times):
                optimizer.zero_grad()
                self.manual_backward(self.net(batch[0]).square().mean())
                optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in self.net]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        held = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.norms.append(float(torch.cat([grad.flatten() for grad in held]).norm()))


def test_several_optimizers() -> None:
    with pytest.raises(AttachError, match="gave 2 optimizers"):
        fit(Gan(), [DisthooksCallback({"watch": NORMS})])
    with pytest.raises(AttachError, match="optimizer=2"):
        fit(Gan(), [DisthooksCallback({"watch": NORMS}, optimizer=2)])
    model, records = Gan(), [DisthooksCallback({"watch": NORMS}, optimizer=i, prefix=f"{i}/") for i in (0, 1)]
    trainer = fit(model, [DisthooksCallback({"save": SAVE}), *records], max_steps=6)
    assert [callback.latest["step"] for callback in records] == [1, 3]
    assert trainer.callback_metrics["0/grad_norm"] == pytest.approx(model.norms[3])
    assert trainer.callback_metrics["1/grad_norm"] == pytest.approx(model.norms[5])


def _amp(**options: Any) -> dict[str, Any]:
    from lightning.pytorch.plugins import MixedPrecision

    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))], **options}


def test_a_grad_scaler() -> None:
    """Gradients, ranks' own ones too, are in the user's units."""
    own = {"every": 1, "stats": [{"kind": "Norm"}, {"kind": "Spread"}]}
    model, callback = Lit(), DisthooksCallback({"watch": own})
    fit(model, [callback], **_amp())
    assert callback.latest["grad_norm"] == pytest.approx(model.norms[-1], rel=1e-5)
    assert callback.latest["grad_norm/mean_rank"] == pytest.approx(model.norms[-1], rel=1e-3)
    with pytest.raises(AttachError, match="fused=False"):
        fit(Lit(make=lambda p: torch.optim.AdamW(p, fused=True)), [callback], **_amp())


def test_what_would_do_nothing_is_an_error(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    whole = {"save": [{"modules": "*", "store": {"kind": "OnCpu"}}]}
    model = Lit()
    with pytest.raises(ConfigError, match="there is no configuration"):
        fit(model, [DisthooksCallback()])
    with pytest.raises(AttachError, match="matches the Lit itself"):
        fit(model, [DisthooksCallback(whole)])
    assert not _hooked(model)
    with pytest.raises(UsageError, match="calls its closure more than once"):
        fit(
            Lit(make=lambda p: torch.optim.LBFGS(p)),
            [DisthooksCallback({"watch": {"rules": [{"kind": "SkipNonFinite"}]}})],
        )
    fit(Lit(make=lambda p: torch.optim.LBFGS(p, max_iter=2)), [watch := DisthooksCallback({"watch": NORMS})])
    assert watch.latest["step"] == 3


def test_a_compiled_module() -> None:
    model, callback = Lit(), DisthooksCallback(HOOKS)
    fit(torch.compile(model, backend="eager"), [callback])
    assert callback.saved.moved > 0
    assert callback.latest["grad_norm"] == pytest.approx(model.norms[-1])


SPAWNED = """
import json, sys
import pytorch_lightning as pl, torch
from disthooks.integrations.lightning import DisthooksCallback
from torch.utils.data import DataLoader, TensorDataset

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)
    def training_step(self, batch, index):
        return self.net(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

if __name__ == "__main__":
    callback = DisthooksCallback({"watch": {"every": 1, "stats": [{"kind": "Norm"}]}})
    assert isinstance(callback, pl.Callback)
    trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp_spawn", max_steps=2, logger=False,
        callbacks=callback, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(16, 8)), 4))
    print(json.dumps({key: float(value) for key, value in trainer.callback_metrics.items()}))
"""


def test_the_other_namespace_and_spawned_processes(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text(SPAWNED)
    env = {key: value for key, value in os.environ.items() if key not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    env["PYTHONPATH"] = str(pathlib.Path(dh.__file__).parent.parent)
    call = [sys.executable, "-W", "ignore", "train.py"]
    done = subprocess.run(call, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["gradients/grad_norm"] > 0


def test_callback_metrics_have_three_numbers_and_those_that_were_asked_for() -> None:
    """Loggers get all; a record has many numbers (of saved tensors above all), which would drown the loss."""
    many = {"save": SAVE, "watch": {**NORMS, "stats": [{"kind": "Norm"}, {"kind": "MaxAbs"}, {"kind": "Spread"}]}}
    many["watch"]["rules"] = [{"kind": "ClipNorm", "max_norm": 0.01}]
    first = {"gradients/grad_norm", "gradients/clip_ratio", "gradients/saved/moved_per_step"}
    for monitor, more in (([], set()), (["grad_max_abs", "grad_norm/max", "no_such"], {"gradients/grad_max_abs"})):
        callback = DisthooksCallback(many, monitor=monitor)
        trainer = fit(Lit(), [callback])
        ours = {name for name in trainer.callback_metrics if name.startswith("gradients/")}
        assert ours == first | more
        assert len(callback.latest) > 10
        for name in more:
            assert float(trainer.callback_metrics[name]) == callback.latest[name.removeprefix("gradients/")] > 0


def _fitted(rank: int, folder: str) -> tuple[Any, Any]:
    """What ``fit`` has learnt in a run, by its checkpoint; and what the next run begins with."""
    store = {"kind": "OnDisk", "directory": folder}
    config = {"fit": True, "budget": "8 GiB", "save": [{"modules": "net.*", "at_least": 0, "store": store}]}
    options = {"devices": 2, "strategy": "ddp", "max_steps": 3}
    path = pathlib.Path(folder, "half.ckpt")
    fit(Lit(), [DisthooksCallback(config)], **options).save_checkpoint(path)
    rest, begun = DisthooksCallback(config), []

    class Begins(L.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begun.append(rest.prepared.saving.fitted.state_dict())

    fit(Lit(), [rest, Begins()], ckpt_path=path, **(options | {"max_steps": 4}))
    (saved,) = torch.load(path, weights_only=False)["callbacks"].values()
    return saved["fit"], begun[0]


@pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
def test_what_fit_has_learnt_goes_with_checkpoints(ranks: Ranks, tmp_path: pathlib.Path) -> None:
    """The first rank's part that holds on every rank."""
    for saved, begun in ranks(_fitted, str(tmp_path), timeout=300):
        assert saved["needs"]
        assert begun["again"] == saved["again"] != {}
        assert begun["needs"] == {}


class Parts(L.LightningModule):
    """A module of which Lightning calls parts alone, as in docs/integrations/lightning.md."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = not manual
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 8, 64, batch_first=True) for _ in range(4))

    def training_step(self, batch: Any, index: int) -> torch.Tensor | None:
        torch.manual_seed(index)  # for dropout
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def validation_step(self, batch: Any, index: int) -> None:
        torch.empty(256 << 20, dtype=torch.uint8).fill_(1)  # an evaluation that needs more than any step

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


@pytest.mark.skipif(not memory.reset_peak_resident(), reason="no such peak")
@pytest.mark.parametrize("kind", ["automatic", "manual", "accumulated"])
def test_a_budget_counts_if_lightning_calls_training_step_alone(kind: str, tmp_path: pathlib.Path) -> None:
    """The model is never called; each step is measured all the same, and what the budget allows stays in memory."""
    loader = DataLoader(TensorDataset(torch.randn(24, 256, 64, generator=torch.Generator().manual_seed(0))), 4)
    options = {"accumulate_grad_batches": 2} if kind == "accumulated" else {}
    options |= {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    options |= {"enable_model_summary": False, "val_check_interval": 3, "num_sanity_val_steps": 0, "max_epochs": 1}
    trained = []
    memory.release_promptly()
    store = {"kind": "OnDisk", "directory": str(tmp_path), "in_flight": "16 MiB"}
    config = {"fit": True, "save": [{"modules": "layers.*", "at_least": 0, "store": store}]}
    reports = []

    class Seen(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            reports.append(callback.prepared.saving.fitted.report())

    for is_fitted in (False, True):
        callback = DisthooksCallback(config | {"budget": memory.resident() + (128 << 20)})
        trainer = L.Trainer(callbacks=[callback, Seen()] if is_fitted else [], **options)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="fit: ")
            trainer.fit(Parts(kind == "manual"), loader, batches(1))
        trained.append(_weights(trainer))
    assert all(torch.equal(a, b) for a, b in zip(*trained, strict=True))
    assert [each.rounds for each in reports] == list(range(6))
    assert max(each.peak for each in reports) <= reports[0].budget
    assert reports[0].limit == 0 < reports[1].limit < reports[-1].limit
    assert 0 < callback.saved.moved < callback.saved.stored
    kept = callback.saved.budget
    assert (kept.rounds, kept.steps, kept.over) == (6, 3 if kind == "accumulated" else 6, 0)
    assert kept.peak <= kept.nbytes == reports[0].budget


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_of_lightning_is_run_again(tmp_path: pathlib.Path, accumulate: int) -> None:
    """A NaN in an output once, in the third step: the weights are those of a fit without it."""
    weights = []
    for times in (0, 1, 4):  # how often it is there: in the step, in the second run, and in the two that capture
        model, calls, log = Lit(), [0], tmp_path / f"{times}.jsonl"
        bad = [(4 + time) * accumulate for time in range(times)]  # the calls of two steps and of the probe come before

        def spoil(module: Any, args: Any, output: Any, calls: Any = calls, bad: Any = bad) -> Any:
            calls[0] += torch.is_grad_enabled()
            return output * math.nan if torch.is_grad_enabled() and calls[0] in bad else output

        model.net[1].register_forward_hook(spoil)
        watch = {"every": 1, "rules": [{"kind": "SkipNonFinite"}], "stats": [{"kind": "Norm"}], "rerun": True}
        watch |= {"capture": str(tmp_path / "captures")} if times > 1 else {}
        hooks = {"watch": watch | {"sinks": [{"kind": "Jsonl", "path": str(log)}]}}
        trainer = fit(model, [DisthooksCallback(hooks)], max_steps=4, accumulate_grad_batches=accumulate)
        assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)
        weights.append(_weights(trainer))
        said = [each for each in map(json.loads, log.read_text().splitlines()) if "rerun" in each]
        wanted = [(2, "transient" if times == 1 else "repeats", accumulate)] if times else []
        assert [(each["step"], each["rerun"], each["rerun_calls"]) for each in said] == wanted
    (folder,) = said[0]["rerun_capture"]
    assert json.loads((pathlib.Path(folder) / "capture.json").read_text())["module"] == "net.1"
    assert all(torch.equal(a, b) for a, b in zip(*weights[:2], strict=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_the_rows_of_a_bad_step_are_noted(tmp_path: pathlib.Path, workers: int) -> None:
    """In the first epoch and in the second, with a validation between them; each step has two batches of two rows."""
    rows = torch.arange(12.0)[:, None, None].expand(12, 8, 16) / 12
    for bad in (1, 4):
        seen: list[list[int]] = []

        class Numbered(Lit):
            def training_step(self, batch: Any, index: int, seen: Any = seen, bad: int = bad) -> torch.Tensor:
                seen.append((12 * batch[0][:, 0, 0]).round().int().tolist())
                loss = super().training_step(batch, index)
                return loss * math.nan if len(seen) == 2 * bad + 1 else loss

            def train_dataloader(self) -> Any:
                return DataLoader(TensorDataset(rows), 2, shuffle=True, num_workers=workers)

            def val_dataloader(self) -> Any:
                return DataLoader(TensorDataset(rows), 2)

        log = tmp_path / f"{bad}.jsonl"
        watch = {"every": 1, "rules": [{"kind": "SkipNonFinite"}], "stats": [{"kind": "Norm"}]}
        hooks = {"watch": watch | {"sinks": [{"kind": "Jsonl", "path": str(log)}]}}
        options = {"max_steps": 6, "accumulate_grad_batches": 2, "logger": False, "enable_checkpointing": False}
        options |= {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
        L.Trainer(callbacks=[DisthooksCallback(hooks)], **options).fit(Numbered())
        (line,) = map(json.loads, log.with_name(f"{log.name}.rank-0.data").read_text().splitlines())
        assert line["step"] == bad
        assert line["data"] == [{"indices": each} for each in seen[2 * bad : 2 * bad + 2]]
