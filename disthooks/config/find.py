"""Which configuration is taken, when there are several."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from disthooks.errors import ConfigError

VARIABLE = "DISTHOOKS_CONFIG"
#: Files of the working directory that are looked for, in this order.
DEFAULTS = ("disthooks.yaml", "hooks.yaml")
_KEY = "the 'disthooks' of DeepSpeed's configuration"


@dataclass(frozen=True)
class Found:
    """Where the configuration is.

    Attributes:
        source: the path of a file, or a dict; what :func:`disthooks.from_config` takes.
        origin: what said so: "the argument", "DISTHOOKS_CONFIG", "the 'disthooks' of DeepSpeed's configuration" or
            "./disthooks.yaml" or "./hooks.yaml".
        passed_over: what was there too and is not read, in words, in the order of precedence.
    """

    source: str | os.PathLike[str] | Mapping[str, Any]
    origin: str
    passed_over: tuple[str, ...] = ()


def find(given: Any = None, engine_config: Mapping[str, Any] | None = None) -> Found:
    """The argument, else ``DISTHOOKS_CONFIG``, else the ``disthooks`` of DeepSpeed's JSON, else a file that is here.

    The file that is here is ``./disthooks.yaml``, else ``./hooks.yaml``.

    What comes first is taken and read, whether it can be or not: one that is named and missing is an error, never
    a reason to take the next one.

    Args:
        given: a path or a dict; None to look for one.
        engine_config: DeepSpeed's whole configuration, ``engine.config``; its ``disthooks`` is a dict, or a path.

    Raises:
        ConfigError: when there is none.

    >>> find("mine.yaml", {"disthooks": {"save": []}})
    Found(source='mine.yaml', origin='the argument', passed_over=("the 'disthooks' of DeepSpeed's configuration",))
    """
    there = [(source, origin, shown) for source, origin, shown in _places(given, engine_config) if source is not None]
    if not there:
        raise ConfigError(
            f"there is no configuration: give the path of one, set {VARIABLE} to it, put a 'disthooks' into "
            f"DeepSpeed's configuration, or write {' or '.join(f'./{name}' for name in DEFAULTS)}"
        )
    source, origin, _ = there[0]
    return Found(source, origin, tuple(shown for _, _, shown in there[1:]))


def engine_config(model: object) -> Mapping[str, Any] | None:
    """The configuration of a DeepSpeed engine; None for any other model."""
    if not any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__):
        return None
    config = getattr(model, "config", None)  # a dict, also where DeepSpeed was given a path
    return config if isinstance(config, Mapping) else None


def _places(given: Any, engine_config: Mapping[str, Any] | None) -> list[tuple[Any, str, str]]:
    variable = os.environ.get(VARIABLE) or None
    here = [name for name in DEFAULTS if pathlib.Path(name).exists()]
    return [
        (given, "the argument", "the argument"),
        (variable, VARIABLE, f"{VARIABLE}={variable}"),
        ((engine_config or {}).get("disthooks"), _KEY, _KEY),
        *((name, f"./{name}", f"./{name}") for name in here),
    ]
