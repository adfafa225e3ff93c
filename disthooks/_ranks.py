"""The rank of this process, the number of ranks, whether a process trains alone, and texts that ranks can compare."""

# [Note: the sources of the rank]
# Once torch.distributed is initialised, its default process group knows the rank and the number of ranks. Before that,
# only the environment has them, and each launcher has its own variables: torchrun sets RANK, LOCAL_RANK and WORLD_SIZE,
# Slurm SLURM_PROCID and SLURM_LOCALID, Open MPI OMPI_COMM_WORLD_RANK. The group and the environment may disagree: a
# launcher may have started several processes that never joined a group, and then each of them trains its own model.
# `global_rank`, `world_size` and `world_ranks` ask the process group alone, for code that is about to communicate.
# `launched_rank` falls back on the environment, for code that writes to a log before there is a group.
# `launched_world_size` asks the environment alone: `trains_alone` compares the two.

# [Note: what ranks compare]
# Ranks must not compare the `repr` of a value: the order of a set of strings depends on the hash seed of its process, a
# tensor shows its device and its values, an object without a repr shows its address. So `describe` has a text for each
# kind of value. It describes a tensor by its dtype alone: a mask that a user gives to a function may have the shape of
# this rank's part, and is on this rank's device. It describes an object of any other kind by its class alone.

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")


def has_process_group() -> bool:
    """Whether this process has joined a default process group.

    >>> has_process_group()
    False
    """
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def global_rank() -> int:
    """This process's rank in the default process group; 0 if there is none.

    >>> global_rank()
    0
    """
    return torch.distributed.get_rank() if has_process_group() else 0


def world_size() -> int:
    """How many processes are in the default process group; 1 if there is none."""
    return torch.distributed.get_world_size() if has_process_group() else 1


def world_ranks() -> tuple[int, ...]:
    """All ranks of the default process group; rank 0 alone if there is none.

    >>> world_ranks()
    (0,)
    """
    return tuple(range(world_size()))


def has_several_ranks() -> bool:
    """Whether there is a process group of several ranks.

    >>> has_several_ranks()
    False
    """
    return world_size() > 1


def launched_rank() -> int:
    """This process's rank in its process group, or else in the variable RANK; see [Note: the sources of the rank].

    >>> launched_rank()
    0
    """
    return global_rank() if has_process_group() else number_in_environment("RANK", 0)


def launched_world_size() -> int:
    """How many processes the launcher has started, by its variable WORLD_SIZE; 1 if that is not set."""
    return number_in_environment("WORLD_SIZE", 1)


def local_rank() -> str:
    """The text of the variable LOCAL_RANK, this process's number on its node; "0" if the variable is not set."""
    return os.environ.get("LOCAL_RANK", "0")


def local_world_size() -> int:
    """How many processes the launcher has started on this node, by LOCAL_WORLD_SIZE; 1 if that is not set."""
    return max(1, number_in_environment("LOCAL_WORLD_SIZE", 1))


def trains_alone() -> bool:
    """Whether several processes were started and this one shares a process group with none of the others.

    Each such process trains a model of its own, and a number that should be reduced over ranks is of one rank only.
    """
    return world_size() == 1 and launched_world_size() > 1


def first_set(variables: tuple[str, ...]) -> str | None:
    """The value of the first of these environment variables that is set and not empty."""
    return next((os.environ[name] for name in variables if os.environ.get(name)), None)


def number_in_environment(variable: str, otherwise: int) -> int:
    text = os.environ.get(variable, "").strip()
    return int(text) if text.isdecimal() else otherwise


def describe(value: Any, _inside: tuple[int, ...] = ()) -> str:
    """A text for ``value`` that is the same in every process that made the value in the same way.

    It describes the parts of containers, dataclasses and partial functions too; see [Note: what ranks compare].

    >>> describe({"*.weight", "*.bias"})
    "{'*.bias', '*.weight'}"
    >>> describe(functools.partial(max, 2, default=torch.ones(3)))
    'partial(builtins.max, 2, default=tensor(torch.float32))'
    """
    if id(value) in _inside:  # the value contains itself
        return "..."
    part = functools.partial(describe, _inside=(*_inside, id(value)))
    for kinds, text in _TEXTS:
        if isinstance(value, kinds):
            return text(value, part)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [field.name for field in dataclasses.fields(value) if field.repr]
        return f"{type(value).__qualname__}({', '.join(f'{name}={part(getattr(value, name))}' for name in shown)})"
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', None) or ''}.{named.__qualname__}".lstrip(".")


def _partial(value: functools.partial[Any], part: Callable[[Any], str]) -> str:
    given = [*map(part, value.args), *(f"{name}={part(each)}" for name, each in value.keywords.items())]
    return f"partial({', '.join([part(value.func), *given])})"


_SCALARS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, os.PathLike)
_TEXTS: list[tuple[Any, Callable[[Any, Callable[[Any], str]], str]]] = [
    (_SCALARS, lambda value, part: repr(value)),
    (torch.Tensor, lambda value, part: f"tensor({value.dtype})"),
    (torch.device, lambda value, part: f"device({value.type})"),
    (functools.partial, _partial),
    (Mapping, lambda value, part: "{" + ", ".join(f"{part(k)}: {part(v)}" for k, v in value.items()) + "}"),
    (Set, lambda value, part: "{" + ", ".join(sorted(map(part, value))) + "}"),
    ((list, tuple), lambda value, part: "[" + ", ".join(map(part, value)) + "]"),
]
