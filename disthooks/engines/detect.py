"""Which engine has taken a model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import nn

from disthooks._match import is_of_class, unwrap_to_engine
from disthooks._registry import other_kinds, own_kinds
from disthooks.engines.base import (
    DataParallel,
    Engine,
    Plain,
    refuse_lazy,
    refuse_mixed,
    refuse_nested,
    refuse_unwrapped,
)
from disthooks.errors import AttachError


def detect_engine(model: nn.Module) -> Engine:
    """The engine of ``model``, which stays as it is; parameters that FSDP2 holds gathered are sharded again.

    Raises:
        UsageError: when ``model`` is no module.
        AttachError: for an engine on which hooks would not fire; the message says what works.

    >>> detect_engine(nn.DataParallel(nn.Linear(2, 2))).label
    'DataParallel'
    >>> [shard.name for shard in detect_engine(nn.Linear(2, 2)).shards]
    ['weight', 'bias']
    """
    model = unwrap_to_engine(model)
    refuse_lazy(model)
    found = next(kind for kind in _kinds() if kind.recognises(model))(model)
    refuse_nested(found.model)
    refuse_mixed(found)
    if not is_of_class(model, "DeepSpeedEngine"):
        refuse_unwrapped(model)
    if not found.shards:
        raise AttachError(f"{type(model).__name__} has no parameters")
    return found


def _kinds() -> Iterator[type[Engine]]:
    """The engines of this library, those of installed packages, and the plain one, which takes any module."""
    yield DataParallel
    if torch.distributed.is_available():
        yield from (cast("type[Engine]", kind.made) for kind in own_kinds("engine") if kind.made is not Plain)
    yield from (cast("type[Engine]", kind.made) for kind in other_kinds("engine"))
    yield Plain
