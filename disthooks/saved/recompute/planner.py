"""Finds the program of a value: back along the graph, until all that is needed is held."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._tensors import Layout, exotic
from disthooks._torch import node_name
from disthooks.saved.kept import Kept
from disthooks.saved.ledger import Ledger
from disthooks.saved.packed import Handle
from disthooks.saved.recompute.formulas import FORMULAS, Call, Norm
from disthooks.saved.recompute.program import Input, Program, Step, Vector
from disthooks.saved.recompute.reader import Edge, Reader, Saved, Source, Unknown, leaf_of, noted

_SMALL = 1 << 20  # bytes: a weight of a norm is smaller by far, one of a matrix larger
# Its own readers come a few operators later in backward: it is brought once for all of them, rather than again.
_NEAR = 3  # times its bytes
_DEEP = 40  # nodes looked at for one value, views among them


class Norms:
    """The norms of a module by their weights, and copies of those weights; for one call.

    A weight may be freed before backward (FSDP, ZeRO) or stepped on. So it is copied, once: it is tiny.

    Args:
        module: whose forward it is; None for code that belongs to no module.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._norms: list[nn.Module] | None = None
        self._vectors: dict[tuple[int, int, int], tuple[torch.Tensor, Vector]] = {}

    def of(self, weight: Saved | None) -> Norm:
        """What the module that owns ``weight`` knows.

        Raises:
            Unknown: when there is no such module, or several that do not agree.
        """
        if weight is None or not isinstance(weight.held, Kept):
            raise Unknown
        norms = [_norm(each) for each in self._owners(weight.held.tensor)]
        if not norms or any(each.eps != norms[0].eps or each.bias is not norms[0].bias for each in norms):
            raise Unknown
        return norms[0]

    def _owners(self, weight: torch.Tensor) -> list[nn.Module]:
        if self._norms is None:
            self._norms = [] if self._module is None else [each for each in self._module.modules() if _has_eps(each)]
        # By where it is now: engines free weights and gather others at the same address.
        return [each for each in self._norms if _is_over(getattr(each, "weight", None), weight)]

    def vector(self, tensor: torch.Tensor) -> Vector:
        """A copy of ``tensor`` as it is now.

        Raises:
            Unknown: when it is large, or not in memory any more.
        """
        plain = tensor.detach()
        if exotic(plain) is not None or plain.nbytes > _SMALL or plain.numel() == 0:
            raise Unknown
        if Layout.of(plain).end() * plain.itemsize > plain.untyped_storage().nbytes():
            raise Unknown  # FSDP freed it when the forward of its unit ended
        if not isinstance(tensor, nn.Parameter):
            return Vector(plain)  # it may be written uncounted
        key = id(tensor), tensor._version, tensor.data_ptr()
        if key not in self._vectors:
            self._vectors[key] = tensor, Vector(plain)
        return self._vectors[key][1]


def _is_over(own: object, weight: torch.Tensor) -> bool:
    if own is weight:
        return True
    return type(own) in (torch.Tensor, nn.Parameter) and own.data_ptr() == weight.data_ptr() != 0  # type: ignore[attr-defined]


def _has_eps(module: nn.Module) -> bool:
    return isinstance(getattr(module, "eps", getattr(module, "variance_epsilon", "")), (float, type(None)))


def _norm(module: Any) -> Norm:
    bias = getattr(module, "bias", None)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    return Norm(eps, bias if isinstance(bias, torch.Tensor) else None)


class _Made(NamedTuple):
    number: int
    dtype: torch.dtype


class Planner:
    """Makes one program.

    Args:
        ledger: whose packed values it may start from: those of another one may be approximations.
        norms: of the call.
        limit: most operators that it runs.
    """

    def __init__(self, ledger: Ledger, norms: Norms, limit: int) -> None:
        self._ledger, self._norms, self._limit = ledger, norms, limit
        self._inputs: list[Input] = []
        self._steps: list[Step] = []
        self._values: dict[Any, int] = {}
        self._calls: list[Call] = []  # what is known by its identity has to live
        self._cost = self._looked = 0

    def program(self, edge: Edge, layout: Layout, device: torch.device) -> Program | None:
        """How to compute the value of ``edge``; None when that is not known, or not cheap."""
        try:
            self._computed(edge)
        except Unknown:
            return None
        if not any(isinstance(each, Handle | Kept) for each in self._inputs):
            return None
        return Program(self._inputs, self._steps, layout, device, self._cost)

    def _computed(self, edge: Edge) -> int:
        """The number of the value of ``edge``, as the result of a step."""
        read = FORMULAS.get(node_name(edge.node))
        self._looked += 1
        if read is None or edge.number or self._looked > _DEEP:
            raise Unknown
        call = read(Reader(edge), self._norms.of)
        self._calls.append(call)
        self._pay(call.cost)
        args = tuple(self._value(source) for source in call.args)
        self._steps.append(Step(call.name, call.runs, args, self._key(call, edge)))
        return len(self._steps) - 1

    @staticmethod
    def _key(call: Call, edge: Edge) -> tuple[Any, ...]:
        about = edge.node._input_metadata[edge.number]
        return (*call.key, tuple(about.shape), about.dtype)

    def _value(self, source: Source | None) -> int | None:
        """The number of a value; it is held, or computed, once."""
        if source is None:
            return None
        if isinstance(source, Saved):
            return self._once(("saved", id(source.held), source.copied), lambda: self._held(source.held, source.copied))
        return self._once(source, lambda: self._found(source))

    def _once(self, key: Any, find: Any) -> int:
        if key not in self._values:
            self._values[key] = find()
        return self._values[key]

    def _found(self, edge: Edge) -> int:
        leaf = leaf_of(edge)
        if isinstance(leaf, nn.Parameter):  # others may have been written since, uncounted
            return self._input(self._norms.vector(leaf))
        held = noted(edge)
        if held is not None:
            try:
                return self._held(held, False)
            except Unknown:
                pass  # it cannot be used as it is: by another way, perhaps
        return self._computed(edge)

    def _held(self, held: Handle | Kept, copied: bool) -> int:
        if isinstance(held, Kept):
            return self._kept(held, copied)
        packed = held.packed
        if packed.ledger is not self._ledger or not packed.is_source or not packed.intact:
            raise Unknown
        if packed.changed or packed.alias._version != packed.version:
            raise Unknown  # under no_grad, perhaps: the graph does not tell whether before or after it was used
        self._pay(packed.cost)
        source = packed.handle(held.layout)  # not autograd's own, which remembers what it has read
        source.place -= _NEAR * packed.nbytes
        return self._input(source)

    def _kept(self, kept: Kept, copied: bool) -> int:
        tensor = kept.tensor
        if tensor._version != kept.version:
            raise Unknown
        if copied or isinstance(tensor, nn.Parameter) or kept.reason == "parameter":  # a view of one, too
            return self._input(self._norms.vector(tensor))
        if exotic(tensor) is not None:
            raise Unknown
        return self._input(kept)

    def _input(self, held: Input) -> int:
        self._inputs.append(held)
        return -len(self._inputs)

    def _pay(self, cost: int) -> None:
        self._cost += cost
        if self._cost > self._limit:
            raise Unknown
