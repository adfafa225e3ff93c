"""Finds the configuration among several places, reads it (``from_config``) and attaches it (``prepare``)."""

# [Note: the order of precedence]
# A configuration can be in four places: the argument, the variable DISTHOOKS_CONFIG, the `disthooks` of DeepSpeed's
# JSON, and a file in the working directory. The first place that names one decides. If its file is missing or wrong,
# that is an error, and the next place is not tried: the user named a configuration, and a training that silently runs
# with another one would be found out too late (decision 62). The other places are listed in
# `ConfigLocation.passed_over`, so that a command can tell which configurations were not read.

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from disthooks._match import is_of_class
from disthooks.config.agree import check_not_alone
from disthooks.config.plan import Plan, Prepared, attach
from disthooks.config.read import plan_of
from disthooks.config.source import VARIABLE, source_of
from disthooks.errors import ConfigError

#: The files of the working directory that are a configuration; the first that exists is taken.
DEFAULTS = ("disthooks.yaml", "hooks.yaml")
_KEY = "the 'disthooks' of DeepSpeed's configuration"


@dataclass(frozen=True)
class ConfigLocation:
    """Where the configuration is. Its public name is ``disthooks.config.Found``.

    Attributes:
        source: the path of a file, or a dict, as :func:`disthooks.from_config` takes it.
        origin: the place that names it: "the argument", "DISTHOOKS_CONFIG", "the 'disthooks' of DeepSpeed's
            configuration", "./disthooks.yaml" or "./hooks.yaml".
        passed_over: the other places that have a configuration, which is not read, in the order of precedence.
    """

    source: str | os.PathLike[str] | Mapping[str, Any]
    origin: str
    passed_over: tuple[str, ...] = ()


def locate_config(given: Any = None, engine_config: Mapping[str, Any] | None = None) -> ConfigLocation:
    """Find the configuration; see [Note: the order of precedence]. The public name is ``disthooks.config.find``.

    The places are, in this order: ``given``, the variable ``DISTHOOKS_CONFIG``, the ``disthooks`` of DeepSpeed's JSON,
    ``./disthooks.yaml`` and ``./hooks.yaml``. The configuration is not read here.

    Args:
        given: a path or a dict; None to look in the other places.
        engine_config: DeepSpeed's whole configuration, ``engine.config``; its ``disthooks`` is a dict, or a path.

    Raises:
        ConfigError: when no place has one.

    >>> location = locate_config("mine.yaml", {"disthooks": {"save": []}})
    >>> location.source, location.origin, location.passed_over
    ('mine.yaml', 'the argument', ("the 'disthooks' of DeepSpeed's configuration",))
    """
    variable = os.environ.get(VARIABLE) or None  # an empty variable names nothing
    # Each place in the order of precedence: its configuration or None, its `origin`, and its text in `passed_over`.
    places: list[tuple[Any, str, str]] = [
        (given, "the argument", "the argument"),
        (variable, VARIABLE, f"{VARIABLE}={variable}"),
        ((engine_config or {}).get("disthooks"), _KEY, _KEY),
        *((name, f"./{name}", f"./{name}") for name in DEFAULTS if pathlib.Path(name).exists()),
    ]
    named = [place for place in places if place[0] is not None]
    if not named:
        raise ConfigError(
            f"there is no configuration: give the path of one, set {VARIABLE} to it, put a 'disthooks' into "
            f"DeepSpeed's configuration, or write {' or '.join(f'./{name}' for name in DEFAULTS)}"
        )
    source, origin, _ = named[0]
    return ConfigLocation(source, origin, tuple(shown for _, _, shown in named[1:]))


def engine_config(model: object) -> Mapping[str, Any] | None:
    if not is_of_class(model, "DeepSpeedEngine"):
        return None
    config = getattr(model, "config", None)  # a dict, also if DeepSpeed was given the path of a file
    return config if isinstance(config, Mapping) else None


def from_config(source: str | os.PathLike[str] | Mapping[str, Any] | None = None) -> Plan:
    """Read a configuration, and check every key and value. Nothing is attached.

    Args:
        source: the path of a YAML file, or a dict, such as the ``disthooks`` of DeepSpeed's JSON. With None it is the
            file that ``DISTHOOKS_CONFIG`` names, else ``./disthooks.yaml``, else ``./hooks.yaml``.

    Raises:
        ConfigError: when there is no configuration; when the file cannot be read or is not YAML; when a key, a kind
            or an argument is unknown, or a value has the wrong type (the message has the file, the line and the
            nearest right name); or when pydantic or PyYAML is not installed.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = pathlib.Path(folder, "hooks.yaml")
    ...     _ = file.write_text("save: [{modules: '*.mlp', store: {kind: OnCpu}}]")
    ...     from_config(file).saves[0][0]
    ('*.mlp',)
    """
    return read_plan(locate_config() if source is None else ConfigLocation(source, "the argument"))


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    config: str | os.PathLike[str] | Mapping[str, Any] | None = None,
) -> Prepared:
    """Attach the hooks of a configuration to ``model`` and ``optimizer``, after the engine has wrapped them.

    Call it on every rank. If it fails on one of the ranks that train the model together, it fails on all of them.

    Args:
        model: the object that DDP, FSDP, ``deepspeed.initialize`` or accelerate returned; with ``fully_shard`` the
            model itself.
        optimizer: the optimizer whose ``step`` is called; None for a DeepSpeed engine, which has its own.
        config: a file or a dict. By default it is the file that ``DISTHOOKS_CONFIG`` names; else the ``disthooks`` of
            the engine's own configuration, if the engine is DeepSpeed; else ``./disthooks.yaml`` or ``./hooks.yaml``.

    Returns:
        A handle with ``saving``, ``gradients``, ``report()`` and ``remove()``; also a context manager.

    Raises:
        ConfigError: when there is no configuration, or it has an unknown key or a wrong value.
        MatchError, AttachError: see :func:`disthooks.save_activations` and :func:`disthooks.gradients`. AttachError
            also when the ranks have different configurations, or when a launcher started several processes and this
            process knows of no other.

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
    # The configuration is read inside `attach`, so that an error of reading it on one rank is an error on all.
    return attach(lambda: read_plan(locate_config(config, engine_config(model))), model, optimizer)


def read_plan(location: ConfigLocation) -> Plan:
    """Read the configuration at ``location``. If its file cannot be read, the error says which place names the file."""
    is_argument = location.origin == "the argument"
    try:
        return plan_of(source_of(location.source, "the configuration" if is_argument else location.origin))
    except ConfigError as error:
        if is_argument or "cannot be read" not in str(error):
            raise
        raise ConfigError(f"{error} ({location.origin} names it)") from None
