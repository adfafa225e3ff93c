"""Patterns that choose modules and parameters by name, by type or by a predicate; and what wrappers hide.

An engine wraps the user's model in a module of its own, and so do torch.compile, Fabric and activation checkpointing.
The functions here look through such wrappers: names and modules are those of the user's own model.
"""

# [Note: classes are known by their names]
# A wrapper is recognised by the name of its class, anywhere in its method resolution order. A comparison with the class
# itself would need an import of its framework: DeepSpeed takes seconds to import, FSDP1 needs torch.distributed, and a
# user of neither should not wait for them. The price: a class of the user's own with such a name is taken for the
# engine's.

from __future__ import annotations

import difflib
import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Any, TypeVar, cast

from torch import nn

from disthooks._ranks import describe
from disthooks.errors import MatchError, UsageError

Pattern = str | type | Callable[[str, Any], bool]
T = TypeVar("T")

#: The parts that wrappers put into the names of parameters and modules.
_FOREIGN = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

#: The wrappers that torch.compile and Fabric.setup put around an engine's module, and the attribute that holds it.
_AROUND_ENGINES = {"OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}

#: The wrappers that engines put around the user's model, and the attribute that holds it.
_ENGINES = dict.fromkeys(("DataParallel", "DistributedDataParallel", "DeepSpeedEngine", "_FabricModule"), "module")


def canonical_name(name: str) -> str:
    """``name`` without the parts that compilers and wrappers put into it.

    >>> canonical_name("layers.0._checkpoint_wrapped_module.fc.weight")
    'layers.0.fc.weight'
    """
    return ".".join(part for part in name.split(".") if part not in _FOREIGN)


def is_of_class(value: object, *names: str) -> bool:
    """Whether ``value`` is of a class with one of these names; see [Note: classes are known by their names].

    >>> is_of_class(nn.Linear(1, 1), "Linear"), is_of_class(nn.Linear(1, 1), "FSDPModule")
    (True, False)
    """
    return any(kind.__name__ in names for kind in type(value).__mro__)


def unwrap_engine(model: nn.Module) -> nn.Module:
    """The user's own model, inside the wrapper that an engine put around all of it.

    FSDP1's wrappers stay, because they may be around any part of the model; :func:`canonical_name` takes them out of
    names.

    Raises:
        UsageError: if ``model`` is not a module.

    >>> layer = nn.Linear(2, 2)
    >>> unwrap_engine(nn.DataParallel(layer)) is layer
    True
    """
    return _unwrap(model, _ENGINES)


def unwrap_to_engine(model: nn.Module) -> nn.Module:
    """The module that an engine returned, inside what torch.compile and Fabric put around it."""
    return _unwrap(model, _AROUND_ENGINES)


def unwrap_compiled(model: nn.Module) -> nn.Module:
    return _unwrap(model, {"OptimizedModule": "_orig_mod"})


def _unwrap(model: nn.Module, holders: Mapping[str, str]) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    while held := [holders[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in holders]:
        model = cast(nn.Module, getattr(model, held[0]))
    return model


def as_patterns(patterns: Pattern | Iterable[Pattern]) -> tuple[Pattern, ...]:
    """One pattern or several, as a tuple.

    Raises:
        UsageError: if there is no pattern, or one of them is not a pattern, such as a module.

    >>> as_patterns("*.mlp"), as_patterns([nn.Linear, "head"])[1], as_patterns({"b", "a"})
    (('*.mlp',), 'head', ('a', 'b'))
    """
    one = callable(patterns) or isinstance(patterns, (str, nn.Module)) or not isinstance(patterns, Iterable)
    if isinstance(patterns, Set):  # sorted, because the order of a set of strings differs between processes
        patterns = sorted(patterns, key=describe)
    found = (cast(Pattern, patterns),) if one else tuple(cast("Iterable[Pattern]", patterns))
    if not found:
        raise UsageError("give at least one pattern")
    for pattern in found:
        if isinstance(pattern, nn.Module) or not (isinstance(pattern, str) or callable(pattern)):
            got = type(pattern).__name__
            raise UsageError(f"a pattern is a glob over names, a class, or a predicate of name and value; got {got}")
    return found


def is_match(pattern: Pattern, name: str, value: object) -> bool:
    """Whether ``pattern`` matches ``value`` under this name.

    >>> is_match("layers.*", "layers.0", None), is_match(nn.Linear, "fc", nn.Linear(2, 2))
    (True, True)
    """
    if isinstance(pattern, str):
        return fnmatch.fnmatchcase(name, pattern)
    if isinstance(pattern, type):
        return isinstance(value, pattern)
    return bool(pattern(name, value))


def match(items: Iterable[tuple[str, T]], patterns: Iterable[Pattern], what: str) -> list[tuple[str, T]]:
    """The items whose name or value any of the patterns matches, in their own order.

    Raises:
        MatchError: if one of the patterns matches nothing; the message has the nearest names.

    >>> match([("fc.bias", 1), ("fc.weight", 2)], ["*.bias"], "parameter")
    [('fc.bias', 1)]
    """
    named = [(canonical_name(name), value) for name, value in items]
    chosen: set[int] = set()
    for pattern in patterns:
        hits = {i for i, (name, value) in enumerate(named) if is_match(pattern, name, value)}
        if not hits:
            names = [name for name, _ in named]
            shown = repr(pattern) if isinstance(pattern, str) else getattr(pattern, "__name__", repr(pattern))
            near = difflib.get_close_matches(pattern, names, n=5, cutoff=0.4) if isinstance(pattern, str) else []
            hint = f"near names: {', '.join(near)}" if near else f"there are: {', '.join(n for n in names[:8] if n)}"
            raise MatchError(f"{shown} matches no {what} of {len(names)}; {hint}. '*' matches any text, dots included")
        chosen |= hits
    return [named[i] for i in sorted(chosen)]


def match_modules(model: nn.Module, patterns: Iterable[Pattern]) -> list[tuple[str, nn.Module]]:
    """The submodules of ``model`` that any of ``patterns`` matches; the model itself is named ``""``.

    Names are those of the user's own model, without an engine's wrapper.
    """
    patterns, items = list(patterns), list(unwrap_engine(model).named_modules())
    found = match(items, patterns, "module")
    _warn_of_one_digit(patterns, [canonical_name(name) for name, _ in items], {name for name, _ in found})
    return found


def _warn_of_one_digit(patterns: Iterable[Pattern], names: Iterable[str], found: Set[str]) -> None:
    """Warn if ``?`` stands for the number of a layer, and no pattern found one of the layers from 10 on.

    Only a part of a name that is ``?`` and nothing else counts. With ``[0-3]``, ``1?`` or a list of numbers some layers
    are left out by intention. ``layers.?`` says nothing of ten, so it is an accident in a model with more layers.
    """
    names = list(names)
    for pattern in patterns:
        parts = pattern.split(".") if isinstance(pattern, str) else []
        if "?" not in parts:
            continue
        # One digit, and two or three of them. A "*" would match dots, too.
        few, *more = (".".join("[0-9]" * count if part == "?" else part for part in parts) for count in (1, 2, 3))
        missed = [name for name in names if any(fnmatch.fnmatchcase(name, longer) for longer in more)]
        hits = len(fnmatch.filter(names, few))
        if hits and missed and found.isdisjoint(missed):
            warnings.warn(
                f"{pattern!r} matches {hits} of {hits + len(missed)} modules that differ by a number: '?' is one "
                f"character, so {missed[0]!r} is not matched. Write '*' for all numbers, or [0-9] for one digit",
                stacklevel=5,
            )
