"""The names in ``kind:``, and the classes that they stand for."""

from __future__ import annotations

import difflib
import gc
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from disthooks.config.values import hints
from disthooks.errors import UsageError
from disthooks.grads import rules, sinks, stats
from disthooks.grads.rules.base import Rule
from disthooks.grads.rules.only import Only
from disthooks.grads.stats.base import Stat
from disthooks.saved import codecs
from disthooks.saved.codecs.base import Codec
from disthooks.saved.recompute.stage import Recompute
from disthooks.saved.stores import cpu, device, disk, tiers
from disthooks.saved.stores.base import Store


class Unknown(Exception):
    """A kind that is not there; the message says which are."""


@dataclass(frozen=True)
class Kind:
    """What ``kind:`` stands for.

    Attributes:
        name: as it is written.
        noun: store, recompute, codec, rule, stat or sink.
        target: what is called with the other keys.
        made: the class of what comes out, where ``target`` is a function.
        given: an argument that no file can hold, and is given when it is attached: the engine.
        hidden: arguments that no file can hold, and that have a default.
    """

    name: str
    noun: str
    target: Callable[..., Any]
    made: type | None = None
    given: str | None = None
    hidden: tuple[str, ...] = ()

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The arguments that a file can hold, by name."""
        every = inspect.signature(self.target).parameters
        return {name: it for name, it in every.items() if name not in self.hidden and name != self.given}

    def hints(self) -> dict[str, Any]:
        """Their annotations."""
        return hints(self.target)

    @property
    def open(self) -> bool:
        """Whether it takes arguments of any name."""
        return any(it.kind is it.VAR_KEYWORD for it in self.parameters().values())


def _tiered(stores: Sequence[Store]) -> tiers.Tiered:
    return tiers.Tiered(*stores)


def _accelerate_tracker(accelerator: Any, prefix: str = "gradients/") -> sinks.AccelerateTracker:
    """Numbers to every tracker of the ``Accelerator`` that prepared the model; nothing else.

    Args:
        accelerator: the model that is attached to, or the ``Accelerator``.
        prefix: put in front of every name. In names only letters, digits and ``_-. /`` stay as they are.
    """
    return sinks.AccelerateTracker(_accelerator_of(accelerator), prefix)


def _accelerator_of(model: Any) -> Any:
    """The ``Accelerator`` that prepared ``model``; an ``Accelerator`` itself.

    Nothing leads from a model to its accelerator, so all objects are looked at, once for each time it is attached.
    """
    kind = getattr(sys.modules.get("accelerate.accelerator"), "Accelerator", None)
    if kind is None or isinstance(model, kind):
        return model
    there = [each for each in gc.get_objects() if issubclass(type(each), kind)]
    found = next((each for each in there if any(one is model for one in each._models)), None)
    if found is None:
        raise UsageError(
            "AccelerateTracker: no Accelerator of this process has prepared the model: nothing can be logged"
        )
    return found


# What the values of each noun are instances of; a sink is any function of a dict, and so can a rule be.
NOUNS: dict[str, type | None] = {"store": Store, "recompute": Recompute, "codec": Codec}
NOUNS |= {"rule": Rule, "stat": Stat, "sink": None}
_OTHERS = (
    Kind("Tiered", "store", _tiered, tiers.Tiered),
    Kind("only", "rule", rules.only, Only),
    Kind("Console", "sink", sinks.Console, hidden=("print",)),
    Kind("WandB", "sink", sinks.WandB, hidden=("run",)),
    Kind("AccelerateTracker", "sink", _accelerate_tracker, sinks.AccelerateTracker, given="accelerator"),
    Kind("DeepSpeedMonitor", "sink", sinks.DeepSpeedMonitor, given="engine"),
)
_CLASSES: dict[str, tuple[Callable[..., Any], ...]] = {
    "store": (cpu.OnCpu, device.OnDevice, disk.OnDisk),
    "recompute": (Recompute,),
    "codec": (codecs.Cast, codecs.Compact, codecs.Compress, codecs.Quantize),
    "rule": (
        rules.ClipAdaptive,
        rules.ClipNorm,
        rules.ClipPercentile,
        rules.ClipValue,
        rules.ClipZScore,
        rules.Freeze,
        rules.Noise,
        rules.Sanitize,
        rules.Scale,
        rules.SkipNonFinite,
    ),
    "stat": (
        stats.Agreement,
        stats.Extremes,
        stats.Histogram,
        stats.MaxAbs,
        stats.Moments,
        stats.NoiseScale,
        stats.NonFinite,
        stats.Norm,
        stats.Spread,
        stats.Updates,
        stats.Weights,
        stats.Zeros,
    ),
    "sink": (sinks.Jsonl, sinks.MLflow, sinks.TensorBoard),
}
KINDS: dict[str, dict[str, Kind]] = {
    noun: {kind.__name__: Kind(kind.__name__, noun, kind) for kind in kinds} for noun, kinds in _CLASSES.items()
}
for _kind in _OTHERS:
    KINDS[_kind.noun][_kind.name] = _kind
_ELSEWHERE = {
    "Functions": "no file can hold its two functions: write a class of your own, kind: package.module:Class",
    "AtLeast": "write at_least: 4 KiB beside modules",
}


def kind_of(name: str, noun: str) -> Kind:
    """The kind of that name.

    Raises:
        Unknown: when there is none, with the nearest right name, or why a class cannot be imported.

    >>> kind_of("OnCpu", "store").target.__name__, kind_of("disthooks:OnCpu", "store").name
    ('OnCpu', 'disthooks:OnCpu')
    """
    if ":" in name:
        return Kind(name, noun, _imported(name))
    if name in KINDS[noun]:
        return KINDS[noun][name]
    if name in _ELSEWHERE:
        raise Unknown(f"{name!r} cannot be a {noun} here; {_ELSEWHERE[name]}")
    other = next((each for each, kinds in KINDS.items() if name in kinds), None)
    # What is something else was not meant for the one whose name is nearest.
    raise Unknown(f"{name!r} is {f'a {other}, ' if other else ''}no {noun}{near('' if other else name, KINDS[noun])}")


def near(name: str, known: Iterable[str]) -> str:
    """The nearest right name, or all there are."""
    known = list(known)
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else f"; there are {', '.join(sorted(known)) or 'none'}"


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The nearest right name, if one is near.

    >>> nearest("onDisk", ["OnCpu", "OnDisk"]), nearest("many", ["OnCpu"])
    ('OnDisk', None)
    """
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not close:  # onDisk, ON_DISK
        folded = {each.lower().replace("_", ""): each for each in known}
        close = difflib.get_close_matches(name.lower().replace("_", ""), list(folded), n=1, cutoff=0.6)
        close = [folded[each] for each in close]
    return close[0] if close else None


def _imported(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # a module of one's own may raise anything
        raise Unknown(f"kind {name!r} cannot be imported: {_said(error)}") from error
    if not callable(found):
        raise Unknown(f"kind {name!r} is no class: it is {type(found).__name__}")
    known: Callable[..., Any] = found
    return known


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: {text}"


def kind_for(value: object) -> Kind | None:
    """The built-in kind whose objects are of exactly the class of ``value``."""
    for kinds in KINDS.values():
        for kind in kinds.values():
            if type(value) is (kind.made or kind.target):
                return kind
    return None


def noun_of(value: object) -> str | None:
    """What ``value`` is: store, codec, rule or stat; None for anything else."""
    return next((noun for noun, base in NOUNS.items() if base is not None and isinstance(value, base)), None)


def described(entry: Mapping[str, Any]) -> str:
    """An entry in a few words, for an error."""
    return str(entry.get("kind", dict(entry)))
