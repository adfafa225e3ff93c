"""The classes of errors, and which of them wrong arguments raise; what they say is prose and free.

Here are the wrong arguments that no other test has: law 15 has many of gradients, law 9 those of stores,
``tests/end_to_end/test_wrong_files.py`` those of files.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

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


def _watch(**arguments: Any) -> Any:
    model = golden_runs.model()
    return dh.gradients(model, torch.optim.SGD(model.parameters(), lr=0.1), **arguments)


def _wrong() -> dict[str, Callable[[], Any]]:
    return {**_wrong_saving(), **_wrong_gradients(), **_wrong_watching()}


def _wrong_saving() -> dict[str, Callable[[], Any]]:
    model = golden_runs.model
    return {
        "Cast(int64)": lambda: dh.Cast(torch.int64),
        "Quantize(bits=3)": lambda: dh.Quantize(bits=3),  # type: ignore[arg-type]
        "OnDisk([])": lambda: dh.OnDisk([]),  # type: ignore[arg-type]
        "OnDisk(a file)": lambda: _saved(dh.OnDisk("/proc/version")),
        "OnCpu(a limit that is too small)": lambda: _saved(dh.OnCpu(limit=16)),
        "another's store that fails": lambda: _saved(dh.Functions(lambda tensor: 1 / 0, lambda ticket: ticket)),
        "Tiered()": lambda: dh.Tiered(),
        "Functions(1, 2)": lambda: dh.Functions(1, 2),  # type: ignore[arg-type]
        "pipeline(two stores)": lambda: pipeline(dh.OnCpu(), dh.OnCpu()),
        "save_activations(1)": lambda: dh.save_activations(model(), "*", 1),  # type: ignore[arg-type]
        "save_activations twice": lambda: _twice(),
        "SaveWith(no module)": lambda: dh.SaveWith(1, dh.OnCpu()),  # type: ignore[arg-type]
        "unwrap(no module)": lambda: dh.unwrap(1),  # type: ignore[arg-type]
        "saving(1)": lambda: dh.saving(1),  # type: ignore[arg-type]
        "memory.release_promptly('x')": lambda: dh.memory.release_promptly("x"),
    }


def _wrong_gradients() -> dict[str, Callable[[], Any]]:
    norm = dh.stats.Norm()
    return {
        "ClipNorm(by='row')": lambda: dh.ClipNorm(1.0, by="row"),  # type: ignore[arg-type]
        "ClipAdaptive(-1)": lambda: dh.ClipAdaptive(-1.0),
        "ClipPercentile(101)": lambda: dh.ClipPercentile(101.0),
        "ClipZScore(alpha=2)": lambda: dh.ClipZScore(alpha=2.0),
        "Scale(nan)": lambda: dh.Scale(float("nan")),
        "SkipNonFinite(0)": lambda: dh.SkipNonFinite(0),
        "only(at='never')": lambda: dh.only("*", dh.Scale(2.0), at="never"),  # type: ignore[arg-type]
        "stats.Histogram(quantiles=[2])": lambda: dh.stats.Histogram(quantiles=(2.0,)),
        "stats.NoiseScale(0)": lambda: dh.stats.NoiseScale(0),
        "gradients(stats='standard')": lambda: _watch(stats="standard"),
        "gradients(sinks, nothing to log)": lambda: _watch(rules=[dh.Scale(2.0)], sinks=[dh.sinks.Console()]),
        "gradients(groups, no match)": lambda: _watch(stats=[norm], groups={"a": "head.*"}),
        "gradients(no module)": lambda: dh.gradients(1, stats=[norm]),  # type: ignore[arg-type]
    }


def _wrong_watching() -> dict[str, Callable[[], Any]]:
    model = golden_runs.model
    return {
        "features(no match)": lambda: dh.features(model(), "head.*"),
        "features(keep=0)": lambda: dh.features(model(), "*", keep=0),
        "features()['0'] before a forward": lambda: dh.features(model(), "0")["0"],
        "features()['1'], not watched": lambda: dh.features(model(), "0")["1"],
        "trace(no match)": lambda: dh.trace(model(), "head.*"),
        "trace(depth=-1)": lambda: dh.trace(model(), depth=-1),
        "blame(no module)": lambda: dh.blame(1),  # type: ignore[arg-type]
        "check_replicas(no module)": lambda: dh.check_replicas(1),  # type: ignore[arg-type]
    }


def _saved(store: Any) -> None:
    model = golden_runs.model()
    with dh.save_activations(model, "*", pipeline(store, at_least=0)):
        model(torch.ones(64, 3, requires_grad=True)).sum().backward()


def _twice() -> None:
    model = golden_runs.model()
    with dh.save_activations(model, "0", dh.OnCpu()):
        dh.save_activations(model, "0", dh.OnCpu())
