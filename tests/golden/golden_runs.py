"""What small runs on one process leave: names in the log, layouts of states, attributes of handles."""

from __future__ import annotations

import json
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import disthooks as dh
from disthooks.errors import DisthooksError
from disthooks.saved.pipeline import pipeline

STEPS = 4

#: One of each, with the arguments that it cannot do without; the others are made without arguments.
STATS: dict[str, Callable[[], Any]] = {
    "Activations": lambda: dh.stats.Activations(),
    "Loss": lambda: dh.stats.Loss(),
    "Times": lambda: dh.stats.Times(),
    "Histogram": lambda: dh.stats.Histogram(),
    "NoiseScale": lambda: dh.stats.NoiseScale(batch_size=4, per_parameter=True),
}
RULES: dict[str, Callable[[], Any]] = {
    "ClipAdaptive": lambda: dh.ClipAdaptive(),
    "ClipNorm": lambda: dh.ClipNorm(0.5),
    "ClipNorm(by='parameter')": lambda: dh.ClipNorm(0.5, by="parameter"),
    "ClipNorm(norm_type=inf)": lambda: dh.ClipNorm(0.5, norm_type=float("inf")),
    "ClipPercentile": lambda: dh.ClipPercentile(10.0, 5),
    "ClipValue": lambda: dh.ClipValue(0.1),
    "ClipZScore": lambda: dh.ClipZScore(warmup_steps=2),
    "ClipZScore(max_norm)": lambda: dh.ClipZScore(warmup_steps=2, max_norm=1.0),
    "Sanitize": lambda: dh.Sanitize(),
    "Scale": lambda: dh.Scale(0.5),
    "SkipNonFinite": lambda: dh.SkipNonFinite(),
    "only(ClipNorm)": lambda: dh.only("0.*", dh.ClipNorm(0.5)),
    "only(ClipValue, local)": lambda: dh.only("0.*", dh.ClipValue(0.1), at="local"),
    "only(ClipZScore)": lambda: dh.only("*.bias", dh.ClipZScore(warmup_steps=2)),
    "function": lambda: lambda name, grad: grad * 2,
}


def _kinds() -> Iterator[tuple[str, dict[str, Any]]]:
    """The arguments of ``gradients`` for each statistic and each rule."""
    for name in dh.stats.__all__:
        kind = getattr(dh.stats, name)
        if isinstance(kind, type) and issubclass(kind, dh.stats.Stat) and kind is not dh.stats.Stat:
            make = STATS.get(name)
            yield f"stats.{name}", {"stats": [make() if make else kind(per_parameter=True)]}
    yield "stats.Norm(1.0)", {"stats": [dh.stats.Norm(1.0)]}
    yield "stats.standard()", {"stats": dh.stats.standard()}
    for name, make in RULES.items():
        yield name, {"rules": [make()]}


def model() -> nn.Sequential:
    """A model so small that all of its names can be written down."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def _trained(file: pathlib.Path, arguments: dict[str, Any], bad: bool = False) -> Any:
    """Attach, train for a few steps and remove; ``bad``: the last gradients have a NaN."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    sinks = [dh.sinks.Jsonl(file)]
    asked: dict[str, Any] = {"every": 1, "groups": {"biases": "*.bias"}, "sinks": sinks, **arguments}
    try:
        watch = dh.gradients(net, optimizer, **asked)
    except DisthooksError:  # rules that log nothing refuse sinks
        del asked["sinks"]
        watch = dh.gradients(net, optimizer, **asked)
    with watch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.arange(12.0).view(4, 3) * (step + 1)
            for _ in range(2):  # micro-batches: NoiseScale compares them
                net(x * (torch.nan if bad and step == STEPS - 1 else 1)).square().mean().backward()
            optimizer.step()
    return watch


def _keys(records: list[dict[str, Any]]) -> dict[str, str]:
    """Every key with the types of its values; a number that is not finite is a number, too."""
    found: dict[str, set[str]] = {}
    for record in records:
        for key, value in record.items():
            found.setdefault(key, set()).add("seconds" if "_seconds" in key else kind(value))
    return {key: " or ".join(sorted(kinds)) for key, kinds in found.items()}


def kind(value: Any) -> str:
    """The type of a value in JSON."""
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return "float"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {kind(each)}' for key, each in value.items())}}}"
    if isinstance(value, list):
        return f"list of {' or '.join(sorted({kind(each) for each in value})) or 'nothing'}"
    return "null" if value is None else type(value).__name__


def names() -> dict[str, Any]:
    """The names in the log of each statistic and each rule, alone."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, arguments in _kinds():
            found[name] = _logged(pathlib.Path(folder, f"{len(found)}.jsonl"), arguments)
        bad: dict[str, Any] = {"stats": [dh.stats.NonFinite()], "every": 50}
        found["stats.NonFinite, a NaN in a step between"] = _logged(pathlib.Path(folder, "nan.jsonl"), bad, bad=True)
        bad = {"rules": [dh.SkipNonFinite()], "stats": [dh.stats.Norm()]}
        found["SkipNonFinite, a NaN"] = _logged(pathlib.Path(folder, "skip.jsonl"), bad, bad=True)
        found["also=[saving]"] = _also(pathlib.Path(folder))
    return found


def _logged(file: pathlib.Path, arguments: dict[str, Any], bad: bool = False) -> dict[str, str]:
    _trained(file, arguments, bad)
    return _keys([json.loads(line) for line in file.read_text().splitlines()]) if file.exists() else {}


def _also(folder: pathlib.Path) -> dict[str, Any]:
    """Names of saved tensors, for each store."""
    found = {}
    for store in (dh.OnCpu(), dh.OnDisk(folder), dh.Tiered(dh.OnDevice(limit=64), dh.OnDisk(folder))):
        net, file = model(), folder / f"{type(store).__name__}.jsonl"
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        sinks, norm = [dh.sinks.Jsonl(file)], dh.stats.Norm()
        line = pipeline(store, at_least=0)
        with (
            dh.save_activations(net, "*", line) as saving,
            dh.gradients(net, optimizer, stats=[norm], sinks=sinks, every=1, also=[saving]),
        ):
            for _ in range(2):
                net(torch.ones(4, 3)).sum().backward()
                optimizer.step()
        keys = _keys([json.loads(line) for line in file.read_text().splitlines()])
        found[type(store).__name__] = {key.replace(str(folder), "FOLDER"): kinds for key, kinds in keys.items()}
    return found


# -- states


def states() -> dict[str, Any]:
    """Layouts of ``state_dict()``: of modules, of what is attached, of what frameworks keep."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        found["modules"] = _of_modules(folder)
        found["gradients"] = {
            name: layout(_trained(pathlib.Path(folder, "log"), arguments).state_dict()) for name, arguments in _kinds()
        }
        both = {"rules": [dh.ClipZScore(), dh.ClipPercentile(window=3)], "stats": [dh.stats.Norm()]}
        found["gradients, several rules"] = layout(_trained(pathlib.Path(folder, "log"), both).state_dict())
        found["prepare"] = _of_prepared(folder)
    return found


def layout(value: Any) -> Any:
    """Keys, types, dtypes and shapes."""
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} on {value.device.type}"
    if isinstance(value, dict):
        return {str(key): layout(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *(layout(each) for each in value)]
    return value if isinstance(value, str) else type(value).__name__


def _of_modules(folder: str) -> dict[str, Any]:
    wrapped = {
        "nothing": model(),
        "SaveWith": dh.SaveWith(model(), dh.OnCpu()),
        "SaveWith inside": nn.Sequential(dh.SaveWith(model(), dh.OnCpu())),
    }
    in_place = model()
    with dh.save_activations(in_place, "*", dh.OnCpu()):
        found = {"save_activations": [list(in_place.state_dict()), [name for name, _ in in_place.named_modules()]]}
    for name, module in wrapped.items():
        found[name] = [list(module.state_dict()), [inner for inner, _ in module.named_modules()]]
    return found


def _of_prepared(folder: str) -> dict[str, Any]:
    save = [{"modules": "0", "store": {"kind": "OnDisk", "directory": folder}}]
    watch = {"rules": [{"kind": "ClipZScore"}], "stats": [{"kind": "NoiseScale", "batch_size": 4}]}
    found = {}
    for name, config in {"both": {"save": save, "watch": watch}, "save alone": {"save": save}}.items():
        net = model()
        with dh.prepare(net, torch.optim.SGD(net.parameters(), lr=0.01), config) as attached:
            found[name] = layout(attached.state_dict())
    return found


# -- handles


def attributes() -> dict[str, list[str]]:
    """The public attributes of handles that ``__init__`` makes: no class has them."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    handles = {
        "blame": dh.blame(net),
        "features": dh.features(net, "*"),
        "gradients": dh.gradients(net, optimizer, stats=[dh.stats.Norm()]),
        "on_gradient": dh.on_gradient(net, "*", lambda name, grad: grad),
        "prepare": dh.prepare(net, optimizer, {"watch": {"stats": [{"kind": "Norm"}]}}),
        "save_activations": dh.save_activations(net, "0", dh.OnCpu()),
        "trace": dh.trace(net, print=None),
    }
    for handle in reversed(handles.values()):
        handle.remove()
    return {name: sorted(key for key in vars(handle) if key[0] != "_") for name, handle in handles.items()}
