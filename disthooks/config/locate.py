"""Which configuration is taken, when there are several.

The two functions with which a configuration is used.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disthooks.config.agree import check_not_alone
from disthooks.config.plan import Plan, Prepared, attach
from disthooks.config.read import plan_of
from disthooks.config.source import source_of
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


def from_config(source: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Plan:
    """Read a configuration; every key and value is checked before anything is attached.

    Args:
        source: the path of a YAML file; or a dict, such as the ``disthooks`` of DeepSpeed's JSON; or None for what
            ``DISTHOOKS_CONFIG`` names, else ``./disthooks.yaml`` or ``./hooks.yaml``.

    Raises:
        ConfigError: when there is none, it cannot be read, is not YAML, has an unknown key, kind or argument, or a
            value of the wrong type (the message has file, line and the nearest right name), or when pydantic or
            PyYAML is not installed.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "hooks.yaml")
    ...     _ = file.write_text("save: [{modules: '*.mlp', store: {kind: OnCpu}}]")
    ...     from_config(file).saves[0][0]
    ('*.mlp',)
    """
    return read_found(find() if source is None else Found(source, "the argument"))


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Prepared:
    """Attach what a configuration says to ``model`` and ``optimizer``, after the engine took them.

    Call it on every rank. What fails on one of the ranks that train the model together is an error on all of them.

    Args:
        model: what DDP, FSDP, ``deepspeed.initialize`` or accelerate returned; the model itself for ``fully_shard``.
        optimizer: the one that steps; none for a DeepSpeed engine, which has its own.
        config: a file or a dict; by default what ``DISTHOOKS_CONFIG`` names, else the ``disthooks`` of the engine's own
            configuration, if DeepSpeed took the model, else ``./disthooks.yaml`` or ``./hooks.yaml``.

    Returns:
        A handle with ``saving``, ``gradients``, ``report()`` and ``remove()``; also a context manager.

    Raises:
        ConfigError: when there is no configuration, or it says something unknown.
        MatchError, AttachError: see :func:`disthooks.save_activations` and :func:`disthooks.gradients`. Also when the
            ranks have different configurations, or a launcher started several processes and this one knows of none.

    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> config = {"save": [{"modules": "*", "store": {"kind": "OnDisk", "directory": "/tmp"}}],
    ...           "watch": {"rules": [{"kind": "ClipNorm", "max_norm": 1.0}], "every": 1}}
    >>> with prepare(model, optimizer, config) as attached:
    ...     model(torch.ones(512, 64)).sum().backward()
    ...     optimizer.step()
    >>> attached.report().moved > 0, attached.gradients.latest["grad_norm_clipped"] <= 1.0
    (True, True)
    """
    check_not_alone()
    return attach(lambda: read_found(find(config, engine_config(model))), model, optimizer)


def read_found(found: Found) -> Plan:
    """The plan of what :func:`find` found; errors say who named it."""
    try:
        return plan_of(source_of(found.source, "the configuration" if found.origin == "the argument" else found.origin))
    except ConfigError as error:
        if found.origin == "the argument" or "cannot be read" not in str(error):
            raise
        raise ConfigError(f"{error} ({found.origin} names it)") from None
