"""Twenty-two causes of steps that are not finite: each is captured here, and replayed from its folder elsewhere."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
from unittest import mock

import pytest
import torch

import disthooks as dh
from disthooks.errors import UsageError
from disthooks.report.replay import replay
from tests.support import ROOT
from tests.support.causes import CAUSES, batch, build

Told = dict[str, dict[str, object]]


def captured(name: str, folder: pathlib.Path, model: torch.nn.Module | None = None) -> pathlib.Path:
    """The capture of one step of the cause."""
    torch.manual_seed(0)
    model, records = build(name) if model is None else model, []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite()], sinks=[records.append], every=1) as watch:
        call = watch.rerun(lambda x: model(x).float().square().mean().backward(), folder)
        call(batch(name))
        optimizer.step()
    (record,) = records
    assert (record["rerun"], record["skipped"]) == ("repeats", 1.0)
    return pathlib.Path(record["rerun_capture"][0])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """What another process says of the captures, from the folders alone."""
    folder = tmp_path_factory.mktemp("captures")
    folders = {name: captured(name, folder / name) for name in CAUSES}
    script = (
        "import sys\nfrom disthooks.run.cli.app import run\n"
        "for each in sys.argv[1:]:\n    name, _, folder = each.partition('=')\n"
        "    run(['replay', folder, '--model', f'tests.support.causes:{name}', '--json'])\n"
    )
    words = [f"{name}={path}" for name, path in folders.items()]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    decoder, text, found = json.JSONDecoder(), done.stdout.lstrip(), {}
    for name in CAUSES:
        found[name], end = decoder.raw_decode(text)
        text = text[end:].lstrip()
    return found


@pytest.mark.second_tier
@pytest.mark.parametrize("name", CAUSES)
def test_the_operator_is_named_and_whether_the_precision_is_the_cause(name: str, told: Told) -> None:
    cause, found = CAUSES[name], told[name]
    assert found["is_reproduced"]
    assert found["where"] == f"step 0, rank 0: 1 (Part), call 0{', in backward' if cause.node else ''}"
    operator = found["operator"]
    assert operator["name"].rpartition(".")[0] == cause.operator
    assert operator["node"] == cause.node
    assert f"causes.py:{cause.function.__code__.co_firstlineno}" in operator["line"]
    assert any("inf" in text or "NaN" in text for text in operator["made"])
    assert not any("NaN" in text for text in operator["given"])
    assert found["finite_in"]["float64"] == cause.is_precision
    assert ("the precision is the cause" in found["verdict"]) == cause.is_precision


def test_a_weight_that_was_bad_before_is_named(tmp_path: pathlib.Path) -> None:
    model = build("exp_in_half")
    torch.nn.init.constant_(model[1].weight, torch.inf)
    found = replay(captured("exp_in_half", tmp_path, model), lambda: build("exp_in_half"))
    assert (found.operator, found.bad_before) == (None, ("state.weight",))
    assert found.verdict == "state.weight were not finite before the call"


def test_another_model_is_an_error(tmp_path: pathlib.Path) -> None:
    folder = captured("log_of_zero", tmp_path)
    with pytest.raises(UsageError, match=r"the model that was built has no module '1'"):
        replay(folder, lambda: torch.nn.Linear(1, 1))
    with pytest.raises(UsageError, match=r"the model that was built is another: .*'weight'"):
        replay(folder, lambda: torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity()))
    (folder / "tensors.safetensors").write_bytes(b"half")
    for wrong in (tmp_path, folder):
        with pytest.raises(UsageError, match=r"is no capture of rerun\(capture=...\)"):
            replay(wrong, lambda: build("log_of_zero"))


def test_what_is_finite_here_is_said(tmp_path: pathlib.Path) -> None:
    folder = captured("log_of_zero", tmp_path)
    model = build("log_of_zero")
    model[1].function = torch.nn.functional.relu
    assert replay(folder, lambda: model).verdict == "it is not reproduced here: what the call gives is finite"


def test_memory_that_nobody_filled_made_nothing(tmp_path: pathlib.Path) -> None:
    """torch fills it with NaN if all is to be deterministic; elsewhere it may have anything."""

    def half(x: torch.Tensor) -> torch.Tensor:
        out, some, others = torch.empty_like(x), torch.tensor([0, 1]), torch.tensor([2, 3])
        out[:, some] = x[:, some]
        out[:, others] = x[:, others].log()
        return out

    def made() -> torch.nn.Module:
        model = build("log_of_zero")
        model[1].function = half
        return model

    folder = captured("log_of_zero", tmp_path, made())
    torch.use_deterministic_algorithms(True)
    try:
        assert replay(folder, made).operator.name == "aten.log.default"
    finally:
        torch.use_deterministic_algorithms(False)


class LogOfLinear(torch.nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).log()


def test_a_weight_that_is_left_out_is_that_of_the_model_in_each_dtype(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Sequential(torch.nn.Identity(), LogOfLinear(4, 4, bias=False))
    with mock.patch("disthooks.grads.capture._MOST", 50):
        folder = captured("log_of_zero", tmp_path, model)
    found = replay(folder, lambda: model)
    assert found.left_out == ("state.weight: too large, 64 B",)
    assert found.finite_in == {"float32": False, "float64": False}
