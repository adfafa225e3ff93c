"""The two functions with which a configuration is used."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from disthooks.config.attached import Prepared
from disthooks.config.find import Found, engine_config, find
from disthooks.config.plan import Plan, attach
from disthooks.config.ranks import check_not_alone
from disthooks.config.read import plan_of
from disthooks.config.source import source_of
from disthooks.errors import ConfigError


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
