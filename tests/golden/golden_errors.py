"""The classes of errors, and which of them wrong arguments raise; what they say is prose and free."""

from __future__ import annotations

import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from tests.golden import golden_runs


def errors() -> dict[str, Any]:
    """The tree, and the class that each wrong call raises."""
    tree = {name: [each.__name__ for each in getattr(dh.errors, name).__bases__] for name in dh.errors.__all__}
    return {"tree": tree, "raised": {name: _raised(call) for name, call in _wrong().items()}}


def _raised(call: Callable[[], Any]) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        kind = type(error)
        return next((f"errors.{name}" for name in dh.errors.__all__ if getattr(dh.errors, name) is kind), kind.__name__)
    return "nothing"


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _watch(**arguments: Any) -> Any:
    model = golden_runs.model()
    return dh.gradients(model, _sgd(model), **arguments)


def _config(save: Any = None, watch: Any = None, **more: Any) -> Any:
    parts = {"save": save, "watch": watch}
    return dh.config.from_config({key: value for key, value in parts.items() if value is not None} | more)


def _wrong() -> dict[str, Callable[[], Any]]:
    return {**_wrong_arguments(), **_wrong_gradients(), **_wrong_watching(), **_wrong_files(), **_wrong_runs()}


def _wrong_arguments() -> dict[str, Callable[[], Any]]:
    return {
        "at_least=-1": lambda: dh.saving(dh.OnCpu(), at_least=-1),
        "at_least='much'": lambda: dh.saving(dh.OnCpu(), at_least="much"),
        "Cast(int64)": lambda: dh.Cast(torch.int64),
        "Quantize(bits=3)": lambda: dh.Quantize(bits=3),  # type: ignore[arg-type]
        "OnCpu(limit='many')": lambda: dh.OnCpu(limit="many"),
        "OnDevice(limit=-1)": lambda: dh.OnDevice(limit=-1),
        "OnDisk([])": lambda: dh.OnDisk([]),  # type: ignore[arg-type]
        "OnDisk(a file)": lambda: _saved(dh.OnDisk("/proc/version")),
        "Tiered()": lambda: dh.Tiered(),
        "Functions(1, 2)": lambda: dh.Functions(1, 2),  # type: ignore[arg-type]
        "pipeline()": lambda: pipeline(),
        "pipeline(1)": lambda: pipeline(1),  # type: ignore[arg-type]
        "pipeline(no store)": lambda: _saved(pipeline(dh.Compact())),
        "pipeline(two stores)": lambda: pipeline(dh.OnCpu(), dh.OnCpu()),
        "save_activations(no match)": lambda: dh.save_activations(golden_runs.model(), "head.*", dh.OnCpu()),
        "save_activations(1)": lambda: dh.save_activations(golden_runs.model(), "*", 1),  # type: ignore[arg-type]
        "save_activations twice": lambda: _twice(),
        "SaveWith(no module)": lambda: dh.SaveWith(1, dh.OnCpu()),  # type: ignore[arg-type]
        "unwrap(no module)": lambda: dh.unwrap(1),  # type: ignore[arg-type]
        "saving(1)": lambda: dh.saving(1),  # type: ignore[arg-type]
        "memory.release_promptly('x')": lambda: dh.memory.release_promptly("x"),
    }


def _wrong_gradients() -> dict[str, Callable[[], Any]]:
    norm = dh.stats.Norm()
    return {
        "ClipNorm(-1)": lambda: dh.ClipNorm(-1.0),
        "ClipNorm(norm_type=0)": lambda: dh.ClipNorm(1.0, norm_type=0),
        "ClipNorm(by='row')": lambda: dh.ClipNorm(1.0, by="row"),  # type: ignore[arg-type]
        "ClipValue(2, 1)": lambda: dh.ClipValue(2.0, 1.0),
        "ClipAdaptive(-1)": lambda: dh.ClipAdaptive(-1.0),
        "ClipPercentile(101)": lambda: dh.ClipPercentile(101.0),
        "ClipZScore(alpha=2)": lambda: dh.ClipZScore(alpha=2.0),
        "Scale(nan)": lambda: dh.Scale(float("nan")),
        "SkipNonFinite(0)": lambda: dh.SkipNonFinite(0),
        "only(at='never')": lambda: dh.only("*", dh.Scale(2.0), at="never"),  # type: ignore[arg-type]
        "only(no match)": lambda: _watch(rules=[dh.only("head.*", dh.Scale(2.0))]),
        "stats.Norm(0)": lambda: dh.stats.Norm(0.0),
        "stats.Histogram(quantiles=[2])": lambda: dh.stats.Histogram(quantiles=(2.0,)),
        "stats.NoiseScale(0)": lambda: dh.stats.NoiseScale(0),
        "gradients()": lambda: _watch(),
        "gradients(every=0)": lambda: _watch(stats=[norm], every=0),
        "gradients(stats=[1])": lambda: _watch(stats=[1]),
        "gradients(rules=[1])": lambda: _watch(rules=[1]),
        "gradients(sinks=[1])": lambda: _watch(stats=[norm], sinks=[1]),
        "gradients(stats='standard')": lambda: _watch(stats="standard"),
        "gradients(sinks, nothing to log)": lambda: _watch(rules=[dh.Scale(2.0)], sinks=[dh.sinks.Console()]),
        "gradients(groups, no match)": lambda: _watch(stats=[norm], groups={"a": "head.*"}),
        "gradients(a Jsonl that cannot be written)": lambda: _watch(
            stats=[norm], sinks=[dh.sinks.Jsonl("/proc/version/log.jsonl")]
        ),
        "gradients(no optimizer)": lambda: dh.gradients(golden_runs.model(), stats=[norm]),
        "gradients(another's optimizer)": lambda: dh.gradients(
            golden_runs.model(), _sgd(golden_runs.model()), stats=[norm]
        ),
        "gradients(no module)": lambda: dh.gradients(1, _sgd(golden_runs.model()), stats=[norm]),  # type: ignore[arg-type]
        "load_state_dict of other rules": lambda: _load(),
        "on_gradient(no match)": lambda: dh.on_gradient(golden_runs.model(), "head.*", lambda name, grad: grad),
        "on_gradient(no function)": lambda: dh.on_gradient(golden_runs.model(), "*", 1),  # type: ignore[arg-type]
    }


def _wrong_watching() -> dict[str, Callable[[], Any]]:
    return {
        "features(no match)": lambda: dh.features(golden_runs.model(), "head.*"),
        "features(keep=0)": lambda: dh.features(golden_runs.model(), "*", keep=0),
        "features()['0'] before a forward": lambda: dh.features(golden_runs.model(), "0")["0"],
        "features()['1'], not watched": lambda: dh.features(golden_runs.model(), "0")["1"],
        "trace(no match)": lambda: dh.trace(golden_runs.model(), "head.*"),
        "trace(depth=-1)": lambda: dh.trace(golden_runs.model(), depth=-1),
        "blame(no module)": lambda: dh.blame(1),  # type: ignore[arg-type]
        "check_replicas(no module)": lambda: dh.check_replicas(1),  # type: ignore[arg-type]
    }


def _wrong_files() -> dict[str, Callable[[], Any]]:
    store = {"kind": "OnCpu"}
    model = golden_runs.model
    return {
        "from_config(no such file)": lambda: dh.config.from_config("/nowhere/hooks.yaml"),
        "from_config({})": lambda: dh.config.from_config({}),
        "from_config(unknown key)": lambda: _config([{"modules": "*", "store": store}], sav=1),
        "from_config(unknown kind)": lambda: _config([{"modules": "*", "store": {"kind": "OnDisc"}}]),
        "from_config(unknown argument)": lambda: _config([{"modules": "*", "store": {"kind": "OnCpu", "limt": 1}}]),
        "from_config(wrong type)": lambda: _config([{"modules": 3, "store": store}]),
        "from_config(wrong value)": lambda: _config(watch={"rules": [{"kind": "ClipNorm", "max_norm": -1}]}),
        "from_config(no such class)": lambda: _config([{"modules": "*", "store": {"kind": "a.b:C"}}]),
        "from_config(not YAML)": lambda: _file("save: [{"),
        "from_config(a list)": lambda: _file("- save"),
        "prepare(no match)": lambda: dh.prepare(model(), None, {"save": [{"modules": "head.*", "store": store}]}),
        "prepare(twice the same module)": lambda: dh.prepare(
            model(), None, {"save": [{"modules": "0", "store": store}, {"modules": "*0", "store": store}]}
        ),
        "prepare(no configuration)": lambda: _nowhere(),
    }


def _wrong_runs() -> dict[str, Callable[[], Any]]:
    return {
        "a saved tensor changed in place": lambda: _changed(),
        "SkipNonFinite(max_consecutive=1)": lambda: _skipped(),
        "blame(raise_error=True)": lambda: _blamed(),
        "another's store that fails": lambda: _saved(dh.Functions(lambda tensor: 1 / 0, lambda ticket: ticket)),
        "OnDisk(a limit that is too small)": lambda: _limited(),
        "OnCpu(a limit that is too small)": lambda: _saved(dh.OnCpu(limit=16)),
        "an optimizer with other parameters": lambda: _other_parameters(),
    }


def _saved(to: Any) -> None:
    model = golden_runs.model()
    with dh.save_activations(model, "*", to if isinstance(to, type(pipeline(dh.OnCpu()))) else _all(to)):
        model(torch.ones(64, 3, requires_grad=True)).sum().backward()


def _all(store: Any) -> Any:
    return pipeline(store, at_least=0)


def _limited() -> None:
    with tempfile.TemporaryDirectory() as folder:
        _saved(dh.OnDisk(folder, limit=16))


def _twice() -> None:
    model = golden_runs.model()
    with dh.save_activations(model, "0", dh.OnCpu()):
        dh.save_activations(model, "0", dh.OnCpu())


def _load() -> None:
    with _watch(rules=[dh.ClipZScore()]) as watch, _watch(stats=[dh.stats.Norm()]) as other:
        other.load_state_dict(watch.state_dict())


def _file(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "hooks.yaml")
        file.write_text(text)
        dh.config.from_config(file)


def _nowhere() -> None:
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ):
        os.environ.pop("DISTHOOKS_CONFIG", None)
        try:
            os.chdir(folder)
            dh.prepare(golden_runs.model())
        finally:
            os.chdir(here)


def _changed() -> None:
    x = torch.ones(64, 64, requires_grad=True)
    with dh.saving(_all(dh.OnDevice())):
        y = x * 2
        z = y * y
    y.data_ptr()
    y.add_(1)
    z.sum().backward()


def _skipped() -> None:
    model = golden_runs.model()
    optimizer = _sgd(model)
    with dh.gradients(model, optimizer, rules=[dh.SkipNonFinite(max_consecutive=1)]):
        for _ in range(4):
            model(torch.full((2, 3), torch.nan)).sum().backward()
            optimizer.step()


def _blamed() -> None:
    model = golden_runs.model()
    with dh.blame(model, raise_error=True):
        model(torch.full((2, 3), torch.nan))


def _other_parameters() -> None:
    model = golden_runs.model()
    optimizer = _sgd(model)
    with dh.gradients(model, optimizer, stats=[dh.stats.Norm()]):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
