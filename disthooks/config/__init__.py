"""One YAML file for what to save and what to watch.

.. code-block:: yaml

    save:                       # a list: which modules, and where their saved tensors go
      - modules: "blocks.*"     # one pattern or a list of them
        at_least: 4 KiB         # optional
        codecs: [{kind: Quantize, bits: 8}]               # optional; {kind: Cast, dtype: bfloat16}, ...
        store: {kind: OnDisk, directory: /scratch}        # {kind: Tiered, stores: [{kind: OnDevice, ...}, ...]}
    watch:                      # the arguments of disthooks.gradients
      every: 50
      groups: {attention: "*.attn.*"}                   # optional
      rules: [{kind: ClipNorm, max_norm: 1.0}]
      stats: [{kind: Norm}, {kind: MaxAbs}, {kind: NonFinite}]
      sinks: [{kind: Jsonl, path: runs/gradients.jsonl}]       # TensorBoard, WandB, MLflow: the active run

``kind`` is the name of a class of disthooks, or ``package.module:Class`` for one of your own; the other keys are
its arguments. pydantic and PyYAML (``pip install disthooks[config]``) are imported when a file is read.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, cast

import torch
from torch import nn

from disthooks._handles import Attachment
from disthooks._match import Pattern
from disthooks.errors import ConfigError, UsageError
from disthooks.grads import rules, sinks, stats
from disthooks.grads.attach import gradients
from disthooks.grads.attached import Gradients
from disthooks.saved import codecs
from disthooks.saved.inplace import save_activations
from disthooks.saved.pipeline import AtLeast, Pipeline, pipeline
from disthooks.saved.report import SavedReport
from disthooks.saved.stores import cpu, disk, tiers
from disthooks.saved.stores.base import Store


def _tiered(stores: Sequence[Store]) -> tiers.Tiered:
    return tiers.Tiered(*stores)


def _wandb(prefix: str = "gradients/") -> sinks.WandB:
    """A file cannot hold a run: it is the active one."""
    return sinks.WandB(prefix=prefix)


_KINDS: dict[str, dict[str, Callable[..., Any]]] = {
    "store": {"OnCpu": cpu.OnCpu, "OnDevice": tiers.OnDevice, "OnDisk": disk.OnDisk, "Tiered": _tiered},
    "codec": {
        "Cast": codecs.Cast,
        "Compact": codecs.Compact,
        "Compress": codecs.Compress,
        "Quantize": codecs.Quantize,
    },
    "rule": {
        "ClipAdaptive": rules.ClipAdaptive,
        "ClipNorm": rules.ClipNorm,
        "ClipPercentile": rules.ClipPercentile,
        "ClipValue": rules.ClipValue,
        "ClipZScore": rules.ClipZScore,
        "Freeze": rules.Freeze,
        "Noise": rules.Noise,
        "Sanitize": rules.Sanitize,
        "Scale": rules.Scale,
        "SkipNonFinite": rules.SkipNonFinite,
        "only": rules.only,
    },
    "stat": {
        "Agreement": stats.Agreement,
        "Extremes": stats.Extremes,
        "Histogram": stats.Histogram,
        "MaxAbs": stats.MaxAbs,
        "Moments": stats.Moments,
        "NoiseScale": stats.NoiseScale,
        "NonFinite": stats.NonFinite,
        "Norm": stats.Norm,
        "Spread": stats.Spread,
        "Updates": stats.Updates,
        "Weights": stats.Weights,
        "Zeros": stats.Zeros,
    },
    "sink": {
        "Console": sinks.Console,
        "Jsonl": sinks.Jsonl,
        "MLflow": sinks.MLflow,
        "TensorBoard": sinks.TensorBoard,
        "WandB": _wandb,
    },
}


# YAML 1.1 takes 1e-3 for text: it wants 1.0e-3.
_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


class Prepared(Attachment):
    """What :meth:`Plan.prepare` attached.

    Attributes:
        saving: what ``save`` attached; None when the configuration has no ``save``.
        gradients: what ``watch`` attached; None when it has no ``watch``.
    """

    def __init__(self, saving: SavingPlan | None, gradients: Gradients | None) -> None:
        super().__init__()
        self.saving, self.gradients = saving, gradients
        for part in (saving, gradients):
            if part is not None:
                self.on_remove(part.remove)


class SavingPlan(Attachment):
    """What :meth:`Plan.save` attached: one handle for all entries of ``save``."""

    def __init__(self, parts: Sequence[Any]) -> None:
        super().__init__()
        self._parts = parts
        for part in parts:
            self.on_remove(part.remove)

    def report(self) -> SavedReport:
        """The sum over all entries, on this rank."""
        return sum((part.report() for part in self._parts), SavedReport())


@dataclass(frozen=True)
class Plan:
    """What a configuration file says, checked; made by :func:`from_config`.

    Attributes:
        saves: patterns of modules, and the pipeline for what they save.
        watches: keyword arguments of :func:`disthooks.gradients`, with rules, stats and sinks as factories: a
            sink opens its file when it is attached, not when the file is read.
    """

    saves: tuple[tuple[tuple[Pattern, ...], Pipeline], ...]
    watches: Mapping[str, Any]

    def save(self, model: nn.Module) -> SavingPlan:
        """Attach ``save`` to ``model``; see :func:`disthooks.save_activations` for the errors."""
        attached: list[Any] = []
        try:
            for patterns, line in self.saves:
                attached.append(save_activations(model, patterns, line))
        except BaseException:
            for part in attached:
                part.remove()
            raise
        return SavingPlan(attached)

    def prepare(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Prepared:
        """Attach ``save`` and ``watch``, whichever there are; if one fails, neither is."""
        saving = self.save(model) if self.saves else None
        try:
            watching = self.watch(model, optimizer, [saving] if saving else []) if self.watches else None
        except BaseException:
            if saving is not None:
                saving.remove()
            raise
        return Prepared(saving, watching)

    def watch(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, also: Iterable[Any] = ()
    ) -> Gradients:
        """Attach ``watch``; see :func:`disthooks.gradients` for ``also`` (what ``save`` returned), and the errors."""
        if not self.watches:
            raise ConfigError("the configuration has no 'watch': add rules or stats to it, or leave out plan.watch()")
        made: dict[str, Any] = {
            key: [make() for make in value] if isinstance(value, list) else value for key, value in self.watches.items()
        }
        return gradients(model, optimizer, also=also, **made)


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: str | os.PathLike[str] | None = None,
) -> Prepared:
    """Attach what a configuration says to ``model`` and ``optimizer``, after the engine took them.

    Args:
        model: what DDP, FSDP, ``deepspeed.initialize`` or accelerate returned; the model itself for ``fully_shard``.
        optimizer: the one that steps; none for a DeepSpeed engine, which has its own.
        config: the file; by default what ``DISTHOOKS_CONFIG`` names, else ``disthooks.yaml`` in the working directory.

    Returns:
        A handle with ``saving``, ``gradients`` and ``remove()``; also a context manager.

    Raises:
        ConfigError: when there is no configuration, or it says something unknown.
        MatchError, AttachError: see :func:`disthooks.save_activations` and :func:`disthooks.gradients`.
    """
    return from_config(config or os.environ.get("DISTHOOKS_CONFIG") or "disthooks.yaml").prepare(model, optimizer)


def from_config(path: str | os.PathLike[str]) -> Plan:
    """Read a YAML file; every key and value is checked before anything is attached.

    Args:
        path: the file.

    Raises:
        ConfigError: when the file is missing, is not YAML, has an unknown key, kind or argument (the message
            names the nearest right one and where it stands), or when pydantic or PyYAML is not installed.

    >>> import tempfile, pathlib
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "hooks.yaml")
    ...     _ = file.write_text("save: [{modules: '*.mlp', store: {kind: OnCpu}}]")
    ...     from_config(file).saves[0][0]
    ('*.mlp',)
    """
    document = _read(path)
    try:
        return _plan(document)
    except ConfigError as error:
        raise ConfigError(f"{os.fspath(path)}: {error}") from None


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading a configuration file needs PyYAML: pip install 'disthooks[config]'") from error
    try:
        return yaml.safe_load(pathlib.Path(path).read_text()) or {}
    except OSError as error:
        raise ConfigError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{os.fspath(path)}: is not YAML: {error}") from error


def _plan(document: Any) -> Plan:
    checked = _schema(document)
    saves = tuple(
        (_patterns(entry["modules"]), _pipeline(entry, f"save.{i}")) for i, entry in enumerate(checked["save"])
    )
    watch = checked["watch"]
    if watch is None:
        return Plan(saves, {})
    made: dict[str, Any] = {"every": watch["every"], "groups": watch["groups"]}
    for key, noun in (("rules", "rule"), ("stats", "stat"), ("sinks", "sink")):
        entries = watch[key]
        made[key] = [_maker(entry, noun, f"watch.{key}.{i}") for i, entry in enumerate(entries)]
    return Plan(saves, made)


def _schema(document: Any) -> dict[str, Any]:
    try:
        import pydantic
    except ImportError as error:
        raise ConfigError("reading a configuration file needs pydantic: pip install 'disthooks[config]'") from error
    strict = pydantic.ConfigDict(extra="forbid")
    steps: Any = Annotated[int, pydantic.Field(ge=1, strict=True)]
    kinds: Any = (list[dict[str, Any]], [])
    save: Any = pydantic.create_model(
        "save",
        __config__=strict,
        modules=(str | list[str], ...),
        at_least=(str | int | None, None),
        codecs=kinds,
        store=(dict[str, Any], ...),
    )
    groups: Any = (dict[str, str | list[str]], {})
    watch: Any = pydantic.create_model(
        "watch", __config__=strict, every=(steps, 50), groups=groups, rules=kinds, stats=kinds, sinks=kinds
    )
    whole: Any = pydantic.create_model("hooks", __config__=strict, save=(list[save], []), watch=(watch | None, None))
    try:
        return cast("dict[str, Any]", whole.model_validate(document).model_dump())
    except pydantic.ValidationError as error:
        known = [name for model in (whole, save, watch) for name in model.model_fields]
        raise ConfigError("; ".join(_explained(item, known) for item in error.errors())) from None


def _explained(item: Mapping[str, Any], known: Sequence[str]) -> str:
    where = ".".join(map(str, item["loc"])) or "the file"
    if item["type"] == "extra_forbidden":
        return f"{where} is not known{_near(str(item['loc'][-1]), known)}"
    return f"{where}: {item['msg'].lower()}, got {item['input']!r}"


def _near(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(sorted(known))}"


def _patterns(modules: str | list[str]) -> tuple[Pattern, ...]:
    return (modules,) if isinstance(modules, str) else tuple(modules)


def _pipeline(entry: Mapping[str, Any], where: str) -> Pipeline:
    stages: list[Any] = []
    if entry["at_least"] is not None:
        stages.append(_called(AtLeast, {"size": entry["at_least"]}, f"{where}.at_least"))
    stages += [_maker(codec, "codec", f"{where}.codecs.{i}")() for i, codec in enumerate(entry["codecs"])]
    return pipeline(*stages, _maker(entry["store"], "store", f"{where}.store")())


def _maker(entry: Mapping[str, Any], noun: str, where: str) -> Callable[[], Any]:
    """A call that makes the object of ``entry``; unknown kinds and arguments are found now."""
    if "kind" not in entry:
        raise ConfigError(f"{where} has no kind; a {noun} is one of {', '.join(sorted(_KINDS[noun]))}")
    kind = _kind(str(entry["kind"]), noun, where)
    arguments = {key: _value(key, value, noun, f"{where}.{key}") for key, value in entry.items() if key != "kind"}
    known = list(inspect.signature(kind).parameters)
    for key in arguments:
        if key not in known:
            raise ConfigError(f"{where}.{key} is no argument of {entry['kind']}{_near(key, known)}")
    if noun != "sink":
        _called(kind, arguments, where)
    return lambda: _called(kind, arguments, where)


def _kind(name: str, noun: str, where: str) -> Callable[..., Any]:
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return cast("Callable[..., Any]", getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{where}: kind {name!r} cannot be imported: {error}") from error
    if name not in _KINDS[noun]:
        raise ConfigError(f"{where}: {name!r} is no {noun}{_near(name, list(_KINDS[noun]))}")
    return _KINDS[noun][name]


def _value(key: str, value: Any, noun: str, where: str) -> Any:
    if key == "dtype" and isinstance(value, str):
        dtype = getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ConfigError(f"{where}: {value!r} is no dtype of torch")
        return dtype
    if isinstance(value, str) and _EXPONENT.fullmatch(value):
        return float(value)
    if isinstance(value, list):
        return [_value(key, each, noun, f"{where}.{i}") for i, each in enumerate(value)]
    return _maker(value, noun, where)() if isinstance(value, dict) and "kind" in value else value


def _called(kind: Callable[..., Any], arguments: Mapping[str, Any], where: str) -> Any:
    try:
        return kind(**arguments)
    except (UsageError, TypeError) as error:
        raise ConfigError(f"{where}: {error}") from error
