"""The registry: the class for each ``kind:`` of a configuration, from this library and from other packages.

A new kind needs only ``@register("codec")`` on its class. The class then has its ``kind:`` in a configuration
and its place in the JSON schema, it is ``disthooks.<Name>`` (a statistic ``disthooks.stats.<Name>``, a sink
``disthooks.sinks.<Name>``), and docs/reference.md has a row for it. See [Note: where kinds are looked for].
"""

# [Note: where kinds are looked for]
#
# A name is looked for in three places, and the first that has it wins:
#
# 1. The table of this library, ``disthooks/_kinds.py``. ``tools/generate.py`` writes it from the decorators, so that no
#    module has to be imported to know which one to import, and ``import disthooks`` stays cheap.
# 2. The classes that ``@register`` has decorated in this process: those of a script.
# 3. The entry points of installed packages, in groups such as ``disthooks.codecs``. They are read only when a name is
#    in neither of the first two, or when all names are listed, because reading them takes tens of milliseconds. A
#    package is imported only when one of its kinds is used, so a broken package is an error only for its own users.
#
# [Note: kinds that a file can name]
#
# An object can be written to a file only if the process that reads the file finds its kind. It finds the kinds
# of this library and of installed packages. A kind that a script has registered is unknown to every other process, so
# an object of it is written by module and class, or not at all.

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.metadata
import inspect
import sys
import typing
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from disthooks._kinds import KINDS
from disthooks.errors import UsageError

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True)
class Noun:
    """One sort of kinds, such as stores or codecs.

    Attributes:
        group: the group of entry points with which other packages add kinds; None if they cannot add any.
        base: ``module:Class``, the class of which every object is an instance; None if it may be any function.
    """

    group: str | None
    base: str | None


#: The sorts of kinds. The bases are texts, so that this table imports none of them.
NOUNS: dict[str, Noun] = {
    "store": Noun("disthooks.stores", "disthooks.saved.stores.base:Store"),
    "recompute": Noun(None, "disthooks.saved.recompute.verify:Recompute"),
    "codec": Noun("disthooks.codecs", "disthooks.saved.codecs.base:Codec"),
    "rule": Noun("disthooks.rules", "disthooks.grads.rules.base:Rule"),
    "stat": Noun("disthooks.stats", "disthooks.grads.stats.base:Stat"),
    "sink": Noun("disthooks.sinks", None),
    "engine": Noun("disthooks.engines", "disthooks.engines.base:Engine"),
}


class UnknownKindError(UsageError):
    """No kind has this name, or the package that has it cannot be imported; the message says which of the two."""


@dataclass(frozen=True)
class Kind:
    """The class or function that a ``kind:`` stands for.

    Attributes:
        name: the text of ``kind:``.
        noun: a key of :data:`NOUNS`.
        target: the class or function; it is called with the other keys of the entry as arguments.
        made: the class of the objects that ``target`` returns; None if it is not known.
        given: the parameter that no file can hold, and whose argument is given when the object is attached: the engine.
        hidden: the parameters that no file can hold, and that have a default.
        package: the distribution that has the entry point; None for this library and for classes of a script.
    """

    name: str
    noun: str
    target: Callable[..., Any]
    made: type | None = None
    given: str | None = None
    hidden: tuple[str, ...] = ()
    package: str | None = None

    def parameters(self) -> dict[str, inspect.Parameter]:
        """The parameters that a file can hold, by name."""
        every = inspect.signature(self.target).parameters
        return {name: it for name, it in every.items() if name not in self.hidden and name != self.given}

    def hints(self) -> dict[str, Any]:
        """The annotations of the parameters, by name; an empty dict if they cannot be evaluated.

        >>> import fractions
        >>> Kind("own", "store", fractions.Fraction.limit_denominator).hints()
        {}
        """
        function = self.target.__init__ if inspect.isclass(self.target) else self.target
        try:
            return typing.get_type_hints(function)
        except Exception:  # an annotation may name anything, such as an import for type checkers only
            return {}

    @property
    def takes_any_name(self) -> bool:
        return any(it.kind is it.VAR_KEYWORD for it in self.parameters().values())


_registered: dict[str, dict[str, Kind]] = {noun: {} for noun in NOUNS}


def register(
    noun: str,
    name: str | None = None,
    *,
    build: Callable[..., Any] | None = None,
    made: type | None = None,
    given: str | None = None,
    hidden: Iterable[str] = (),
) -> Callable[[T], T]:
    """Decorate a class so that ``kind: Name`` in a configuration makes an object of it.

    Args:
        noun: "store", "codec", "rule", "stat", "sink", "engine" or "recompute".
        name: the text of ``kind:``; by default the name of the class.
        build: a function whose parameters are the keys of an entry, and that returns the object. It is needed if the
            constructor has parameters that a file cannot hold.
        made: the class of the objects, if a function is decorated instead of a class.
        given: the parameter whose argument is given when the object is attached, not in the file: the model.
        hidden: the parameters that no file can hold.

    Raises:
        UsageError: if there is no such noun, or another class of this noun has the name.

    >>> @register("sink")
    ... class Forget:
    ...     def __call__(self, record): ...
    >>> find_kind("sink", "Forget").target is Forget
    True
    """
    if noun not in NOUNS:
        raise UsageError(f"register({noun!r}): a kind is one of {', '.join(NOUNS)}")

    def decorate(target: T) -> T:
        cls = made or (target if inspect.isclass(target) else None)
        kind = Kind(name or target.__name__, noun, build or target, cls, given, tuple(hidden))
        first = _registered[noun].get(kind.name)
        own = KINDS[noun].get(kind.name, f"{target.__module__}:{target.__qualname__}")
        is_taken = own != f"{target.__module__}:{target.__qualname__}"
        if first is not None:
            # A notebook may import a module again, and so register a class with the same name and module: no error.
            old, new = first.made or first.target, kind.made or kind.target
            is_taken = is_taken or (old.__module__, old.__qualname__) != (new.__module__, new.__qualname__)
        if is_taken:
            raise UsageError(f"register: there is a {noun} {kind.name!r} already: {own if first is None else first}")
        _registered[noun][kind.name] = kind
        return target

    return decorate


def find_kind(noun: str, name: str) -> Kind | None:
    """The kind with this name; None if there is none. Its module is imported.

    See [Note: where kinds are looked for].

    Raises:
        UnknownKindError: if the package that has the kind cannot be imported, or several packages have it.

    >>> find_kind("codec", "Cast").target.__name__, find_kind("codec", "OnCpu")
    ('Cast', None)
    """
    if name in KINDS[noun]:  # the import runs the decorator, which registers the kind
        importlib.import_module(KINDS[noun][name].partition(":")[0])
    if name in _registered[noun]:
        return _registered[noun][name]
    points = [point for point in _entry_points(noun) if point.name == name]
    packages = sorted({_package(point) for point in points})
    if len(packages) > 1:
        raise UnknownKindError(f"{name!r} is a {noun} of several packages, {' and '.join(packages)}: uninstall one")
    return _load(noun, points[0]) if points else None


def kind_names(noun: str) -> list[str]:
    """The sorted names of all kinds, those of installed packages too; no package is imported.

    >>> kind_names("codec")
    ['Cast', 'Compact', 'Quantize']
    """
    return sorted({*KINDS[noun], *_registered[noun], *(point.name for point in _entry_points(noun))})


def own_kinds(noun: str) -> list[Kind]:
    """The kinds of this library, in the order of their names.

    >>> [kind.name for kind in own_kinds("recompute")]
    ['Recompute']
    """
    return _find_kinds(noun, KINDS[noun])


def other_kinds(noun: str) -> list[Kind]:
    """The kinds of a script and of installed packages.

    Raises:
        UnknownKindError: if one of the packages cannot be imported.
    """
    return _find_kinds(noun, {*kind_names(noun)} - {*KINDS[noun]})


def _find_kinds(noun: str, names: Iterable[str]) -> list[Kind]:
    return [kind for name in sorted(names) if (kind := find_kind(noun, name)) is not None]


def kind_of_object(value: object) -> Kind | None:
    """The kind whose objects have exactly the class of ``value``; None if no other process would find such a kind.

    See [Note: kinds that a file can name].
    """
    for noun, kinds in _registered.items():
        for name, kind in kinds.items():
            if type(value) is kind.made:
                if name in KINDS[noun]:
                    return kind
                points = [point for point in _entry_points(noun) if point.name == name]
                return kind if points and _load(noun, points[0]).made is kind.made else None
    # An installed package may have made the object without a use of its entry point. The names are compared first, so
    # that no other package is imported.
    named = f"{type(value).__module__}:{type(value).__qualname__}"
    for noun in NOUNS:
        for point in _entry_points(noun):
            if point.value.replace(" ", "") == named:
                return _load(noun, point)
    return None


def base_of(noun: str) -> type | None:
    """The class of which every object of ``noun`` is an instance; None for sinks, which may be any function.

    >>> base_of("codec").__name__
    'Codec'
    """
    path = NOUNS[noun].base
    if path is None:
        return None
    module, _, name = path.partition(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def noun_of(value: object) -> str | None:
    """The noun of ``value``: "store", "codec", "rule" and so on; None if it is an object of none of them."""
    return next((noun for noun in NOUNS if (base := base_of(noun)) is not None and isinstance(value, base)), None)


def near(name: str, known: Iterable[str]) -> str:
    """The end of an error text: the known name nearest to ``name``; if none is near, all known names."""
    known = list(known)
    close = nearest(name, known)
    return f"; did you mean {close!r}?" if close else f"; there are {', '.join(sorted(known)) or 'none'}"


#: Names that papers and other libraries give to what is here, in small letters without underscores.
_ELSEWHERE = {
    "agc": "ClipAdaptive",
    "autoclip": "ClipPercentile",
    "zclip": "ClipZScore",
    "clipgradnorm": "ClipNorm",
    "clipgradvalue": "ClipValue",
    "skipstep": "SkipSpike",
}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is nearest to ``name``, or that stands for the same; None if none is near.

    >>> nearest("onDisk", ["OnCpu", "OnDisk"]), nearest("many", ["OnCpu"]), nearest("ZClip", ["ClipNorm", "ClipZScore"])
    ('OnDisk', None, 'ClipZScore')
    """
    known = list(known)
    same = _ELSEWHERE.get(name.lower().replace("_", ""))
    if same in known:
        return same
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    if not close:  # the same letters in another case, or with underscores: ON_DISK for OnDisk
        folded = {each.lower().replace("_", ""): each for each in known}
        close = difflib.get_close_matches(name.lower().replace("_", ""), list(folded), n=1, cutoff=0.6)
        close = [folded[each] for each in close]
    return close[0] if close else None


def _load(noun: str, point: importlib.metadata.EntryPoint) -> Kind:
    """The kind of an entry point. If its class is decorated too, the arguments of the decorator hold.

    Raises:
        UnknownKindError: if it cannot be imported, or is neither a class nor a function.
    """
    try:
        target = point.load()
    except Exception as error:  # another package may raise anything when it is imported
        said = " ".join(str(error).split())
        raise UnknownKindError(
            f"{point.name!r} is a {noun} of the installed package {_package(point)!r}, and {point.value!r} cannot be "
            f"imported: {type(error).__name__}: {said}"
        ) from error
    if not callable(target):
        raise UnknownKindError(
            f"{point.name!r} is a {noun} of the installed package {_package(point)!r}, and {point.value!r} is no class"
        )
    known = (kind for kind in _registered[noun].values() if target in (kind.target, kind.made))
    made = target if inspect.isclass(target) else None
    kind = next(known, None) or Kind(point.name, noun, target, made)
    return replace(kind, name=point.name, package=_package(point))


def _package(point: importlib.metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else point.value.partition(":")[0]


def _entry_points(noun: str) -> tuple[importlib.metadata.EntryPoint, ...]:
    group = NOUNS[noun].group
    return () if group is None else _entry_points_on(group, tuple(sys.path))


@functools.cache
def _entry_points_on(group: str, path: tuple[str, ...]) -> tuple[importlib.metadata.EntryPoint, ...]:
    # `path` is only a key of the cache: a script may add a folder to sys.path, and packages there are found then.
    return tuple(importlib.metadata.entry_points(group=group))
