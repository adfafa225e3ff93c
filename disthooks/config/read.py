"""Makes a plan of a configuration, and checks all that can be checked without the model."""

# [Note: from pydantic's errors to ours]
# pydantic checks the keys and the types. Its messages are made for programmers: of a union it reports an error for each
# part, its path has the names of the parts, and it knows nothing of lines. So each error is said anew. Of the errors
# at one path only one stays, and a path gives way to an error deeper inside it, because the deeper one is nearer to
# the mistake. The message has the file, the line, the path of keys, the words for what is needed, the value, and where
# possible what the user may have meant. At most three errors are named: later ones are often a result of the first.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from disthooks._registry import NOUNS, Kind, kind_names, near, nearest, noun_of
from disthooks._tensors import parse_bytes
from disthooks.config.build import BuildSpec, SpecBuilder
from disthooks.config.plan import Plan, PlanSource, make_run
from disthooks.config.source import Expansion, Path, Source, names_run
from disthooks.errors import ConfigError, UsageError
from disthooks.grads import stats
from disthooks.grads.stats.base import Stat
from disthooks.saved.fit import FREE
from disthooks.saved.pipeline import Pipeline, pipeline

_BEGIN = "; it begins with a key and a colon in the first column: save:"
_MOST = 3  # wrong values that are named in one error
# Values that may have more than one type, and the words for them: pydantic's message names one of the types only.
_UNIONS: Mapping[Any, str] = {
    "budget": "a number of bytes or a text such as 20 GiB",
    "at_least": "a number of bytes or a text such as 4 KiB",
    "modules": "a pattern or a list of them",
    "check_replicas": "a whole number of steps",
}

# The advice if the file has a mapping and a list is needed, or a list and a mapping is needed.
_SHAPES: Mapping[Path, str] = {
    ("save",): "a list of entries is needed: write '- ' in front of the first key of each, '- modules: ...'",
    ("watch",): "a mapping is needed: write its keys without '- '",
    ("watch", "groups"): "names with patterns are needed: {biases: '*.bias'}",
}


def plan_of(source: Source) -> Plan:
    """The plan that ``source`` describes."""
    checked = _checked(source)
    if checked["budget"] is not None:
        is_free = checked["budget"] == FREE
        if is_free and not checked["fit"]:
            source.fail(("budget",), ": free is measured in training, by 'fit': write fit: true, or give bytes")
        try:
            parse_bytes(0 if is_free else checked["budget"], "budget")
        except UsageError as error:
            source.fail(("budget",), f": {error}")
        if not checked["save"]:
            source.fail(("budget",), ": limits what 'save' leaves on the device, and there is no 'save'")
    elif checked["fit"]:
        source.fail(("fit",), ": keeps 'budget', and there is no 'budget': write one, such as budget: 60 GiB")
    expand = Expansion(source, checked["run"])
    # `run` has a default, so its directory is made only if the file names it, or a path is in it.
    uses_run = "run" in source.document or names_run(source.document)
    builder = SpecBuilder(source, expand)
    written = PlanSource(source, expand.run if uses_run else None)
    saves = [_entry(entry, ("save", i), builder, written, checked["exact"]) for i, entry in enumerate(checked["save"])]
    _take_watchers(checked, source)
    watches = _watches(checked["watch"], builder, source) if checked["watch"] is not None else {}
    if not (saves or watches or checked["blame"] or checked["check_replicas"]):
        source.fail((), "has neither 'save' nor 'watch': nothing would be attached")
    return Plan.read(saves, watches, checked, written)


def _take_watchers(checked: dict[str, Any], source: Source) -> None:
    """Take ``blame`` and ``check_replicas`` out of ``watch``. If nothing else is written there, it is no ``watch``."""
    watch = checked["watch"]
    if watch is None:
        return
    written = source.document["watch"]
    for key in ("blame", "check_replicas"):
        value = watch.pop(key)
        if key in written and key in source.document:
            source.fail(("watch", key), " stands beside 'watch', too: write it in one place")
        if key in written:
            checked[key] = value
    if written and written.keys() <= {"blame", "check_replicas"}:
        checked["watch"] = None


def _checked(source: Source) -> dict[str, Any]:
    """The values of the file with defaults for the keys that it leaves out."""
    if not isinstance(source.document, Mapping):
        got = type(source.document).__name__
        source.fail((), f"the file: input should be a valid dictionary (run, save, watch), got a {got}{_BEGIN}")
    try:
        from pydantic import ValidationError

        from disthooks.config.yaml_keys import Hooks
    except ImportError as error:
        raise ConfigError("reading a configuration needs pydantic: pip install 'disthooks[config]'") from error
    try:
        return Hooks.model_validate(source.document).model_dump()
    except ValidationError as error:
        raise ConfigError(_explained(source, error.errors())) from None


def _explained(source: Source, errors: Sequence[Any]) -> str:
    """The text of ConfigError for the errors of pydantic; see [Note: from pydantic's errors to ours]."""
    by_path: dict[Path, Any] = {}
    # An error of a union that is not about the type comes from the part that takes a value of this type: it stays.
    for error in errors:
        path = _written(source, error["loc"])
        if path not in by_path or by_path[path]["type"].endswith("_type"):
            by_path[path] = error
    # A path gives way to one that goes on deeper from it.
    around = {path[:length] for path in by_path for length in range(len(path))}
    deepest = [(path, error) for path, error in by_path.items() if path not in around]
    messages = [_one(source, path, error) for path, error in deepest[:_MOST]]
    more = len(deepest) - len(messages)
    return "; ".join(messages) + (f"; and {more} more" if more > 0 else "")


def _written(source: Source, loc: Sequence[Any]) -> Path:
    """The path of the value in the file: pydantic's path ``loc`` without the names of the parts of unions."""
    here, path = source.document, []
    for key in loc:
        if (isinstance(here, Mapping) and key in here) or (isinstance(here, list) and key in range(len(here))):
            here = here[key]
            path.append(key)
    return tuple(path)


def _one(source: Source, path: Path, error: Mapping[str, Any]) -> str:
    """The message for one error of pydantic, from the most particular advice to pydantic's own words."""
    if error["type"] == "extra_forbidden":
        return source.say(path, f" is not known{_right_key(path)}")
    if error["type"] == "missing":
        return source.say((*path, error["loc"][-1]), ": field required")
    message, value = str(error["msg"]), source.value(path)
    if path in _SHAPES and error["type"] in ("list_type", "dict_type", "model_type"):
        return source.say(path, f": {_SHAPES[path]}, got {_shown(value)}")
    if error["type"] in ("too_short", "string_too_short"):
        return source.say(path, f" must not be empty, got {_shown(value)}")
    noun = _noun(path)
    if noun and error["type"] in ("dict_type", "list_type", "literal_error"):
        entry = "{kind: Recompute} or null" if noun == "recompute" else "{kind: Name, ...}"
        needed = f"a list of {entry}" if str(path[-1]).endswith("s") else entry
        needed = f"'standard', 'full' or {needed}" if noun == "stat" else needed
        return source.say(path, f": {needed} is needed, got {_shown(value)}{_meant(path, value, noun)}")
    union = _UNIONS.get(path[-1]) if path else None
    if union and error["type"] in ("string_type", "int_type", "list_type"):
        return source.say(path, f": {union} is needed, got {_shown(value)}")
    return source.say(path, f": {message[:1].lower()}{message[1:]}, got {_shown(value)}")


def _right_key(path: Path) -> str:
    """Advice for a key that is not known: the place where it belongs, or the nearest key that is known there."""
    from disthooks.config.yaml_keys import Hooks, Save, Watch

    key = str(path[-1])
    if len(path) == 1 and (key in Save.model_fields or key in Watch.model_fields):
        where = "an entry of 'save'" if key in Save.model_fields else "'watch'"
        return f" here; it belongs into {where}: indent it like the keys there"
    model: Any = {"save": Save, "watch": Watch}.get(str(path[0]), Hooks) if len(path) > 1 else Hooks
    return near(key, list(model.model_fields))


def _noun(path: Path) -> str | None:
    """The noun of the entries at ``path``, or in the list there; None if no ``kind`` belongs there."""
    # The key of a list is the plural of the noun: "codecs" has entries of "codec".
    key = path[-2] if path and isinstance(path[-1], int) else path[-1] if path else ""
    return str(key).removesuffix("s") if str(key).removesuffix("s") in NOUNS else None


def _meant(path: Path, value: Any, noun: str) -> str:
    """Advice for ``value``, a word, a mapping, a list or an object at a place where an entry is needed; or ""."""
    written = _entry_of(value, noun)
    if written:
        return f"; write [{written}]" if str(path[-1]).endswith("s") else f"; write {written}"
    if isinstance(value, str):
        bundles = ("standard", "full") if noun == "stat" else ()
        close = nearest(value, [*kind_names(noun), *bundles])
        meant = repr(close) if close in bundles else f"{{kind: {close}}}"
        listed = str(path[-1]).endswith("s") and close not in bundles
        if close:
            return f"; did you mean {f'[{meant}]' if listed else meant}?"
    elif noun_of(value):  # the configuration is a dict of the script, with an object such as OnCpu() in it
        return "; objects make a plan without a file: disthooks.config.Plan(saves=[(patterns, store)])"
    # The message says already that an entry is needed; the names help if the value is no entry and there are several.
    if isinstance(value, (Mapping, list)) or len(kind_names(noun)) == 1:
        return ""
    return f"; there are {', '.join(kind_names(noun))}"


def _entry_of(value: Any, noun: str) -> str | None:
    """The text of the entry that ``value`` was probably meant to be; None if there is no good guess."""
    if isinstance(value, list) and len(value) == 1:
        return _entry_of(value[0], noun)
    if not isinstance(value, Mapping) or not value:
        return None
    first = next(iter(value))
    if "kind" not in value and first in kind_names(noun):
        value = {"kind": first} | (value[first] if isinstance(value[first], Mapping) else {})
    if "kind" not in value:
        return None
    return f"{{{', '.join(f'{key}: {each}' for key, each in value.items())}}}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _entry(
    entry: Mapping[str, Any], path: Path, builder: SpecBuilder, written: PlanSource, exact: bool
) -> tuple[Any, Pipeline]:
    source = written.source
    stages: list[Any] = []
    least = entry["at_least"]
    if least is not None:
        try:
            parse_bytes(least, "at_least")
        except UsageError as error:
            source.fail((*path, "at_least"), f": {error}")
    if entry["recompute"] is not None:
        stages.append(builder.spec(entry["recompute"], "recompute", (*path, "recompute"))())
    for i, codec in enumerate(entry["codecs"]):
        at = (*path, "codecs", i)
        stages.append(builder.spec(codec, "codec", at)())
        if exact and stages[-1].lossy:
            source.fail(at, f": {codec['kind']} loses digits, and 'exact: true' forbids that; Compact does not")
    if names_run(entry["store"]):
        make_run(written)  # a store may open its file when it is made
    stages.append(builder.spec(entry["store"], "store", (*path, "store"))())
    try:
        found = pipeline(*stages, at_least=least, selective_checkpoints=entry["selective_checkpoints"])
        return _patterns(entry["modules"], source, (*path, "modules")), found
    except UsageError as error:
        raise ConfigError(error if isinstance(error, ConfigError) else source.say(path, f": {error}")) from None


def _patterns(modules: str | list[str], source: Source, path: Path) -> tuple[str, ...]:
    given = [modules] if isinstance(modules, str) else modules
    for i, pattern in enumerate(given):
        if pattern in given[:i]:
            first = source.at((*path, given.index(pattern)))
            source.fail((*path, i), f": {pattern!r} stands here and at {first} already: leave one out")
    return tuple(given)


def _spec_returning(stat: Stat, source: Source, path: Path) -> BuildSpec:
    return BuildSpec(Kind(type(stat).__name__, "stat", lambda: stat), {}, source, path)


def _watches(watch: Mapping[str, Any], builder: SpecBuilder, source: Source) -> dict[str, Any]:
    """The arguments of :func:`disthooks.gradients`, with specs in the place of rules, statistics and sinks."""
    watches: dict[str, Any] = {key: value for key, value in watch.items() if key not in ("rules", "stats", "sinks")}
    for key, noun in (("rules", "rule"), ("stats", "stat"), ("sinks", "sink")):
        watches[key] = []
        for i, entry in enumerate([watch[key]] if isinstance(watch[key], str) else watch[key]):
            if isinstance(entry, str):
                watches[key] += [_spec_returning(stat, source, ("watch", key)) for stat in getattr(stats, entry)()]
            else:
                watches[key].append(builder.spec(entry, noun, ("watch", key, i)))
    if not watches["rules"] and not watches["stats"]:
        source.fail(("watch",), " has neither rules nor stats, so nothing would be done: add `stats: full`, or rules")
    return watches
