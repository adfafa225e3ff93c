"""What frameworks put into their checkpoints for disthooks: the layout is beside the other golden files."""

from __future__ import annotations

import pathlib
import types
from typing import Any

import pytest
import torch

import disthooks as dh
from disthooks.config import Prepared
from tests.golden import golden_runs
from tests.golden.test_golden import compare

CONFIG = {"watch": {"rules": [{"kind": "ClipZScore"}], "stats": [{"kind": "NoiseScale"}]}}


def _attached() -> tuple[Any, Any, Prepared]:
    model = golden_runs.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, dh.prepare(model, optimizer, CONFIG)


def _lightning() -> dict[str, Any]:
    from disthooks.integrations.lightning import DisthooksCallback, WaitingCallback

    model, optimizer, attached = _attached()
    callback, waiting = DisthooksCallback(CONFIG), WaitingCallback(lambda optimizer: None)
    found: dict[str, Any] = {"empty": callback.state_dict(), "waiting, empty": waiting.state_dict()}
    found |= {"key": callback.state_key, "waiting, key": waiting.state_key}
    with attached:
        callback.prepared = attached
        waiting.on_fit_start(types.SimpleNamespace(optimizers=[optimizer], model=model), None)
        assert attached.gradients is not None
        waiting.join(model, attached.gradients)
        found |= {"attached": callback.state_dict(), "waiting, attached": waiting.state_dict()}
    return {name: golden_runs.layout(value) for name, value in found.items()}


def _accelerate(folder: pathlib.Path) -> dict[str, Any]:
    import accelerate

    from disthooks.integrations.accelerate import prepare

    accelerator = accelerate.Accelerator(cpu=True)
    model = golden_runs.model()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with prepare(accelerator, wrapped, optimizer, CONFIG):
        accelerator.save_state(str(folder))
    files = [file for file in folder.iterdir() if "disthooks" in file.name]
    return {file.name: golden_runs.layout(torch.load(file, weights_only=True)) for file in files}


def test_states_in_checkpoints(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("lightning")
    pytest.importorskip("accelerate")
    compare("checkpoints", {"lightning": _lightning(), "accelerate": _accelerate(tmp_path)})
