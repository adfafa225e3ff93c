"""What of a model and its optimizer should be the same on several ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from disthooks._match import canonical
from disthooks._tensors import exotic, local_part
from disthooks.engines.base import Engine
from disthooks.engines.shard import Shard
from disthooks.errors import UsageError
from disthooks.grads.checksum import signed
from disthooks.grads.held import wanted_of

Ranks = tuple[int, ...]


class Copy(NamedTuple):
    """One tensor of this rank, and the ranks that should have the same.

    ``shape`` is that of the whole; ``part`` is what is here of it, plain and strided.
    """

    name: str
    part: torch.Tensor
    shape: tuple[int, ...]
    twins: Ranks


class Copies:
    """The tensors of one engine: those that have several copies, and what all ranks must agree on beforehand.

    Args:
        engine: whose parameters they are.
        everyone: the ranks that hold a whole copy each of what is on no mesh.
        alone: whether the engine knows of one process only, so that ``everyone`` is what counts for parameters.
    """

    def __init__(self, engine: Engine, everyone: Ranks, alone: bool) -> None:
        self._engine, self._everyone, self._alone = engine, everyone, alone
        self._found: list[Copy] = []

    def add_parameters(self) -> None:
        """Every parameter."""
        for shard in self._engine.copies():
            cut = hasattr(shard.parameter, "device_mesh")
            shape = tuple(shard.part.shape) if shard.part is not None else ()
            self._add(shard.name, shard.parameter if cut else shard.values(), self._twins(shard.twins), shape)

    def add_buffers(self) -> None:
        """Every buffer, those that ``state_dict`` leaves out as well."""
        for name, buffer in self._engine.model.named_buffers():
            self._add(canonical(name), buffer, self._everyone, tuple(buffer.shape))

    def add_state(self, optimizer: Any) -> None:
        """What ``optimizer`` keeps for each parameter: tensors, and Python's numbers; a parameter's ranks are its."""
        if not self._engine.keeps_named_state:
            raise UsageError(
                f"check_replicas(optimizer=...): the optimizer of {self._engine.label} keeps its state in partitions, "
                "of which no rank has a copy: leave it out"
            )
        inner, seen = self._engine.stepping(optimizer), set[int]()
        for i in wanted_of(self._engine, self._engine.held(inner)):
            shard = self._engine.shards[i]
            if id(shard.parameter) in seen:  # FSDP1's flat ones are several of the user's
                continue
            seen.add(id(shard.parameter))
            if shard.layout == "sharded" and not hasattr(shard.parameter, "device_mesh"):
                self._must_be_alone(shard)  # and a rank that has no element of it may have no state
                continue
            for key, value in _leaves(inner.state.get(shard.parameter, {})):
                self._add(f"{shard.name}: {key}", value, self._twins(shard.twins), tuple(value.shape))

    def _must_be_alone(self, shard: Shard) -> None:
        if len(shard.twins) > 1:
            raise UsageError(
                f"check_replicas(optimizer=...): the state of {shard.name!r} lies in ranges of flat parameters "
                f"({self._engine.label}), and not every rank has the same entries of it: leave the optimizer out"
            )

    def replicated(self) -> list[Copy]:
        """Those that other ranks have as well."""
        return [copy for copy in self._found if len(copy.twins) > 1]

    def signature(self) -> int:
        """64 bits that are the same on ranks that hold tensors of the same names, shapes and dtypes, in one order."""
        lines = (f"{c.name} {list(c.shape)} {c.part.dtype} {len(c.twins)}" for c in self._found)
        digest = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
        return signed(int.from_bytes(digest, "little"))

    def __len__(self) -> int:
        return len(self._found)

    def _twins(self, twins: Ranks) -> Ranks:
        return self._everyone if self._alone else twins

    def _add(self, name: str, tensor: torch.Tensor, twins: Ranks, shape: tuple[int, ...]) -> None:
        """With the shape that all ranks know it by: none where each has another part of it."""
        if hasattr(tensor, "device_mesh"):  # its own placements tell, those of a parameter's state too
            twins = self._engine.shard(0, name, tensor).twins  # type: ignore[arg-type]
            shape = tuple(tensor.shape)
        for key, part in _plain(name, tensor):
            self._found.append(Copy(name + key, part, shape, twins))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors and numbers in nested dicts and lists, by path; in an order that does not depend on insertion."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (bool, int)):
        yield path, torch.tensor(signed(value))
    elif isinstance(value, (float, complex)):
        yield path, torch.tensor(value, dtype=torch.complex128)
    else:
        for key, inner in _items(value):
            yield from _leaves(inner, f"{path}.{key}".lstrip("."))


def _items(value: Any) -> Iterable[tuple[object, Any]]:
    if isinstance(value, dict):
        return sorted(value.items(), key=lambda item: str(item[0]))
    return enumerate(value) if isinstance(value, (list, tuple)) else ()


def _plain(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The local part as a strided tensor; of a subclass that is made of several tensors, each of them."""
    part = local_part(tensor).detach()
    reason = exotic(part)
    if reason == "subclass" and hasattr(part, "__tensor_flatten__"):
        for key in part.__tensor_flatten__()[0]:
            yield from ((f".{key}{deeper}", leaf) for deeper, leaf in _plain(name, getattr(part, key)))
    elif reason is not None:
        raise UsageError(f"{name!r} cannot be compared: its {type(part).__name__} is {reason}, not dense memory")
    else:
        yield "", part


def named(ranks: Sequence[int], last: str = ", ") -> str:
    """Some ranks in words; ``last`` stands before the last one.

    >>> named([3]), named([0, 5]), named(range(12))
    ('rank 3', 'ranks 0, 5', 'ranks 0, 1, 2, 3, 4, 5, 6, 7 and 4 more')
    >>> named([0, 5], " and "), named([1, 2, 3], " and ")
    ('ranks 0 and 5', 'ranks 1, 2 and 3')
    """
    shown = ", ".join(map(str, ranks[:8]))
    if len(ranks) > 8:
        shown += f" and {len(ranks) - 8} more"
    elif len(ranks) > 1:
        shown = last.join((", ".join(map(str, ranks[:-1])), str(ranks[-1])))
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
