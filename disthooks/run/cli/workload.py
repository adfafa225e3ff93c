"""The functions of ``check`` and ``explain`` that build a model, attach a plan to it, and run it once.

This file imports torch, so the commands import it when they run. See [Note: the command line waits for no torch].
"""

# [Note: a check attaches as a run does]
# A check does not predict which modules a pattern matches, which entries conflict, or what an engine refuses. It
# attaches the entries with the functions that a run calls, collects their errors, and takes the entries off again. So a
# check cannot say "ok" if a run would refuse the configuration on this model. Only sinks are left out, because opening
# them would create files.

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._match import Pattern, canonical_name, is_of_class, match_modules, unwrap_engine
from disthooks._registry import near
from disthooks.config.agree import check_conflicts
from disthooks.config.plan import stores_within
from disthooks.engines.detect import detect_engine
from disthooks.errors import DisthooksError, UsageError
from disthooks.grads.attach import gradients
from disthooks.grads.plan import groups_of, scope_of
from disthooks.grads.rules.base import as_rule
from disthooks.report.watch.features import tensors_of
from disthooks.saved.attach import chosen, save_activations, saving
from disthooks.saved.codecs.base import relative_error
from disthooks.saved.pipeline import Pipeline
from disthooks.saved.report import SavedReport


@dataclass
class Findings:
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def failed(self, where: str, error: BaseException | str) -> None:
        text = " ".join(str(error).split())
        self.errors.append(f"{where}: {text}" if where else text)


@dataclass
class SaveEntry:
    """One entry of ``save``.

    Attributes:
        where: its name in the file, such as "save.0".
        at: the file and the line.
        matched: for each pattern, the names of the modules that it matches.
        placed: the pipeline, with the store that a ``budget`` puts in front of its own; None before the model is known.
        modules: the modules that get hooks. A module inside another of them gets none, nor does a container that is
            never called.
    """

    where: str
    at: str
    patterns: tuple[Pattern, ...]
    pipeline: Pipeline
    matched: dict[str, list[str]] = field(default_factory=dict)
    modules: dict[str, nn.Module] = field(default_factory=dict)
    placed: Pipeline | None = None

    def parameters(self) -> int:
        """The number of elements of the parameters inside, each parameter once."""
        every = {id(p): p for module in self.modules.values() for p in module.parameters()}
        # A parameter of a lazy module that has not run has no shape yet.
        return sum(p.numel() for p in every.values() if not nn.parameter.is_lazy(p))


def entries_of(plan: Any) -> list[SaveEntry]:
    """The entries of ``save`` in ``plan``, without the fields that need a model."""
    return [
        SaveEntry(f"save.{i}", plan.source.at(("save", i, "modules")), tuple(patterns), pipeline)
        for i, (patterns, pipeline) in enumerate(plan.saves)
    ]


def place(plan: Any, entries: list[SaveEntry], model: nn.Module, findings: Findings) -> None:
    """Attach all entries to ``model``, fill in the modules that they are on, and take them off again.

    See [Note: a check attaches as a run does].
    """
    before = len(findings.errors)
    for entry in entries:
        for pattern in entry.patterns:  # one at a time, so that the check reports all patterns that match nothing
            try:
                entry.matched[str(pattern)] = list(dict(match_modules(model, [pattern])))
            except DisthooksError as error:
                findings.failed(f"{entry.at}: {entry.where}", error)
    try:
        if len(findings.errors) == before:  # each of these calls stops at its first error
            check_conflicts(model, [entry.patterns for entry in entries], plan.source)
            pairs = stores_within(plan.budget, model, plan.saves, plan.source)
            _attach_entries(entries, [pipeline for _, pipeline in pairs], model, findings)
    except DisthooksError as error:
        findings.failed("", error)
    for entry in entries:
        lost, warned = conflicts(model, entry.modules)
        findings.warnings += [f"{entry.where}: {text}" for text in warned]
        if lost and len(lost) == len(entry.modules):
            findings.failed(f"{entry.at}: {entry.where}", f"it would save nothing: {next(iter(lost.values()))}")
        else:
            findings.warnings += [f"{entry.where}: {name!r} would save nothing: {why}" for name, why in lost.items()]


def _attach_entries(entries: list[SaveEntry], pipelines: list[Pipeline], model: nn.Module, findings: Findings) -> None:
    with contextlib.ExitStack() as attached:
        for entry, pipeline in zip(entries, pipelines, strict=True):
            try:
                attached.enter_context(save_activations(model, entry.patterns, pipeline))
            except DisthooksError as error:
                findings.failed(f"{entry.at}: {entry.where}", error)
            else:
                entry.modules, entry.placed = dict(chosen(model, entry.patterns)), pipeline


def conflicts(model: nn.Module, modules: Mapping[str, nn.Module]) -> tuple[dict[str, str], list[str]]:
    """The modules that save nothing because of checkpointing or compiled code, with the reason; other warnings."""
    lost: dict[str, str] = {}
    warned: list[str] = []
    for name, region in unwrap_engine(model).named_modules():
        whole = canonical_name(name)
        is_compiled = "_orig_mod" in region._modules or getattr(region, "_compiled_call_impl", None) is not None
        # transformers sets this attribute on its layers, and on models that checkpoint layers in their own forward.
        is_on = getattr(region, "gradient_checkpointing", False) is True
        what = ""
        if is_of_class(region, "CheckpointWrapper"):
            what = "a CheckpointWrapper of torch"
        elif is_on and is_of_class(region, "GradientCheckpointingLayer"):
            what = "which transformers' gradient_checkpointing computes again"
        if not (is_compiled or is_on or what):
            continue
        parts = {id(part) for part in region.modules() if part is not region}
        inside = [each for each, module in modules.items() if id(module) in parts]
        if what:
            remedy = f"what is saved there is computed again anyway; take {whole!r} itself, or a module around it"
            lost |= dict.fromkeys(inside, f"it is inside {whole!r}, {what}: {remedy}")
        elif is_on and inside and not any(is_of_class(m, "GradientCheckpointingLayer") for m in region.modules()):
            warned.append(
                f"gradient_checkpointing is on in {whole or 'the model'!r}: if it checkpoints {inside[0]!r}, the hooks "
                "there save nothing; give example inputs, and a run will tell"
            )
        if is_compiled:
            warned += [
                f"{each!r} is inside {whole or 'the model'!r}, which is compiled: its graph breaks there; compile the "
                "modules that have the hooks, each by itself"
                for each in inside
            ]
    return lost, warned


def find(name: str) -> Callable[[], Any]:
    """The function that makes the model."""
    where, _, function = name.rpartition(":")
    if not where or not function:
        raise UsageError(f"{name!r}: give package.module:function, or path/to/file.py:function, which makes the model")
    if where.endswith(".py") and not pathlib.Path(where).is_file():
        beside = [path.name for path in pathlib.Path(where).parent.glob("*.py")]
        raise UsageError(f"{name}: there is no file {where!r}{near(pathlib.Path(where).name, beside)}")
    try:
        module = _imported(where)
    except Exception as error:
        raise UsageError(f"{name}: {said(error)}") from error
    if not hasattr(module, function):
        there = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        own = [each for each in there if inspect.getmodule(getattr(module, each)) is module]
        raise UsageError(f"{name}: {where} has no {function!r}{near(function, own or there)}")
    found: Callable[[], Any] = getattr(module, function)
    return found


def build(name: str) -> tuple[Any, Any]:
    """Call the function that makes the model, and return the module and its example inputs. No tensor has memory."""
    from disthooks.predict.fake.fake_run import fake_run

    function = find(name)
    try:
        with fake_run():
            made = function()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{name}: {said(error)}") from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} gave {type(made).__name__}: it has to return a module, or (module, example inputs)")
    return model, inputs


def _imported(where: str) -> ModuleType:
    """Import a module by its path, or by its name, also from the working directory as ``python -m`` does."""
    if not where.endswith(".py"):
        sys.path.insert(0, str(pathlib.Path.cwd()))
        return importlib.import_module(where)
    path = pathlib.Path(where).resolve()
    sys.path.insert(0, str(path.parent))  # as Python does when it runs the file
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{where} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses and pickles look for it there
    spec.loader.exec_module(module)
    return module


def said(error: BaseException) -> str:
    """An error of the user's code in one line: its class, its message, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"


Placed = Sequence[tuple[str, nn.Module, Pipeline]]


def _loss(output: Any) -> torch.Tensor:
    """The ``loss`` of the output, or the sum of all its tensors that require a gradient."""
    given = getattr(output, "loss", None)
    if isinstance(given, torch.Tensor) and given.requires_grad:
        return given.sum()
    parts = [tensor.abs().sum() for tensor in tensors_of(output) if tensor.requires_grad]
    if not parts:
        raise UsageError("nothing in what the model returned requires a gradient, so there is no backward")
    return torch.stack([part.float() for part in parts]).sum()


def reports(name: str, placed: Placed) -> dict[str, SavedReport]:
    """Predict one forward and backward with the hooks of ``placed``; the report of each module, by name."""
    from disthooks.predict.explain import explain

    plan = [(functools.partial(_is_named, module), pipeline) for module, _, pipeline in placed]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `conflicts` has reported them already
        said = explain(find(name), plan=plan, device=device, loss=_loss)
    return dict(zip([module for module, _, _ in placed], said.reports, strict=True))


def _is_named(this: str, name: str, module: nn.Module) -> bool:
    return name == this


def figures(report: SavedReport) -> dict[str, Any]:
    """The figures of ``report`` that are shown. Weights are not in ``kept``, because no store would take them."""
    weights = report.kept_by.get("parameter", 0)
    keys = ("calls", "stored", "moved", "shared", "recomputed", "recast", "rerun", "rerun_flops", "passed", "errors")
    return {key: getattr(report, key) for key in keys} | {"kept": report.kept - weights, "weights": weights}


def made(plan: Any, what: str) -> list[Any]:
    """The rules, statistics or sinks of ``plan``, newly made. Making a sink does not open it."""
    return [make() for make in plan.watches.get(what, ())]


#: For each sink, by class name: the package that it needs, and the extra that installs it.
_PACKAGES = {
    "TensorBoard": ("tensorboard", "tensorboard"),
    "WandB": ("wandb", "wandb"),
    "MLflow": ("mlflow", "mlflow"),
}


def check_sinks(plan: Any, findings: Findings) -> None:
    """Add errors for sinks whose package is missing, or whose file could not be written."""
    for sink in made(plan, "sinks"):
        package, extra = _PACKAGES.get(type(sink).__name__, ("", ""))
        if package and importlib.util.find_spec(package) is None:
            remedy = f"pip install 'disthooks[{extra}]'"
            findings.failed("watch.sinks", f"{type(sink).__name__}: its package is not installed: {remedy}")
        path = getattr(sink, "path", None) or getattr(sink, "log_dir", None)
        if isinstance(path, (str, os.PathLike)) and (why := _unwritable(pathlib.Path(path))):
            findings.failed("watch.sinks", f"{type(sink).__name__}: {why}")


def _unwritable(path: pathlib.Path) -> str | None:
    """The reason why a sink could not write ``path``; None if it could. A sink makes missing directories."""
    if path.exists():
        return None if os.access(path, os.W_OK) else f"{path} cannot be written"
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        return f"{path} cannot be made: {above} is no directory"
    return None if os.access(above, os.W_OK | os.X_OK) else f"{path} cannot be made: {above} cannot be written"


def scopes(plan: Any, model: nn.Module, findings: Findings) -> dict[str, dict[str, list[str]]]:
    """The names of the parameters of each rule and each group; errors that a run would raise go to ``findings``."""
    before = len(findings.errors)
    try:
        shards = detect_engine(model).shards
    except DisthooksError as error:
        findings.failed("watch", error)
        return {"rules": {}, "groups": {}}
    rules: dict[str, list[str]] = {}
    for i, rule in enumerate(map(as_rule, made(plan, "rules"))):
        where = f"{plan.source.at(('watch', 'rules', i))}: watch.rules.{i}"
        try:
            rules[f"{i} {rule!r}"] = [shards[j].name for j in scope_of(rule, shards)]
        except DisthooksError as error:
            findings.failed(where, error)
    groups: dict[str, list[str]] = {}
    for name, patterns in plan.watches.get("groups", {}).items():
        try:
            groups[name] = [shards[i].name for i in groups_of({name: patterns}, shards)[name]]
        except DisthooksError as error:
            findings.failed(f"{plan.source.at(('watch', 'groups', name))}: watch.groups.{name}", error)
    if len(findings.errors) == before:
        _attach(plan, model, findings)
    return {"rules": rules, "groups": groups}


def _attach(plan: Any, model: nn.Module, findings: Findings) -> None:
    """Attach as a run does, but with a sink that writes nothing. See [Note: a check attaches as a run does]."""
    given: dict[str, Any] = {key: made(plan, key) for key in ("rules", "stats")}
    given["sinks"] = [lambda record: None] if made(plan, "sinks") else []
    given |= {key: plan.watches[key] for key in ("every", "recent", "groups") if key in plan.watches}
    try:
        gradients(model, torch.optim.SGD(model.parameters(), lr=0.0), **given).remove()
    except (DisthooksError, ValueError) as error:
        findings.failed("watch", error)


# -- a random tensor through a pipeline and back

_ELEMENTS = 1 << 18
DTYPES = (torch.float32, torch.bfloat16)


class RoundTrip(NamedTuple):
    """The result of one tensor that went through a pipeline and back.

    Attributes:
        error: the relative error, ``||back - there|| / ||there||``; infinite if a finite element came back infinite or
            NaN.
        before: bytes of the tensor.
        after: bytes that the store got.
        moved: those of them that left the memory they were in.
        read: bytes that the store read back, from a file or from the host.
    """

    dtype: str
    lossless: bool
    identical: bool
    error: float
    before: int
    after: int
    moved: int
    read: int


class _Keep(torch.autograd.Function):
    """A function that saves its argument for backward, and no other tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tensor)
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].expand_as(ctx.saved_tensors[0])


def round_trip(pipeline: Pipeline, dtype: torch.dtype) -> RoundTrip:
    """Let autograd save a random tensor of 2**18 elements through ``pipeline``, and take it back."""
    before = _read(pipeline)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.randn(_ELEMENTS, generator=torch.Generator().manual_seed(0))
    exact = numbers.to(dtype).to(device)
    with warnings.catch_warnings(), saving(replace(pipeline, at_least=0)) as saved:
        warnings.simplefilter("ignore", UserWarning)  # OnCpu would say that it stores nothing of this block on a CPU
        node: Any = _Keep.apply(exact.clone().requires_grad_())  # type: ignore[no-untyped-call]
    pipeline.store.wait()  # else the tensor might come from memory, and the store would not be tested
    back = node.grad_fn.saved_tensors[0].detach()
    report = saved.report()
    same = back.dtype == dtype and torch.equal(_bits(back), _bits(exact))
    error = 0.0 if same else float(relative_error(back, exact))
    lossless = not any(codec.lossy for codec in pipeline.codecs)
    name = str(dtype).removeprefix("torch.")
    return RoundTrip(
        name, lossless, same, error, exact.nbytes, report.stored or report.kept, report.moved, _read(pipeline) - before
    )


def _read(pipeline: Pipeline) -> int:
    return sum(tier.read for tier in pipeline.store.report())


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)
