"""A program that computes a tensor again, and the planner that finds it.

A :class:`Program` is a list of inputs that somebody holds and of operators to run on them. The :class:`Planner` goes
back along the autograd graph from a value until every input that it needs is held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._streams import handed_over, stream_of
from disthooks._tensors import Layout, exotic
from disthooks._torch import node_name
from disthooks.errors import MutationError, StoreError
from disthooks.saved.packed import Handle, InPlace, Packed, changed_message
from disthooks.saved.recompute.formulas import FORMULAS, Call, Norm
from disthooks.saved.recompute.graph import Edge, NodeReader, NotComputable, Saved, Source, annotation, leaf_of
from disthooks.saved.recompute.verify import Verification
from disthooks.saved.report import Counters


class Step(NamedTuple):
    """One operator of a program.

    Attributes:
        name: for reports.
        runs: functions of the arguments, one for each variant that may give the bits of the original, likeliest first.
        args: numbers of values: ``0, 1, ...`` are results of steps, ``-1, -2, ...`` are inputs, None is no tensor.
        key: everything that selects a kernel, besides the arguments.
    """

    name: str
    runs: tuple[Callable[..., torch.Tensor], ...]
    args: tuple[int | None, ...]
    key: tuple[Any, ...]


class Vector:
    """A copy of a small tensor that may be changed or freed before backward: the weight of a norm, its statistics."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().clone()
        self._made_on = stream_of(tensor)

    def get(self) -> torch.Tensor:
        """The copy, for use on the current stream."""
        return self.tensor if self._made_on is None else handed_over(self.tensor, self._made_on)


Input = Handle | InPlace | Vector
#: Operators that move elements, or compute each element by itself: the layout of their arguments does not change a bit.
_ANYWHERE = {"relu", "neg", "mul", "div", "cast", "clone", "view", "expand", "transpose", "t", "permute", "alias"}


class Program:
    """Computes a tensor again.

    Args:
        inputs: the tensors that it is computed from.
        steps: the operators; the last one gives the result.
        layout: the layout of the result.
        device: the device of the result.
        cost: how many operators run, those that compute the inputs included.

    Attributes:
        variant: the variant that was proven.
        verification: the verification that proved it; None before.
    """

    __slots__ = ("_threads", "cost", "device", "inputs", "layout", "steps", "variant", "verification")

    def __init__(
        self, inputs: Sequence[Input], steps: Sequence[Step], layout: Layout, device: torch.device, cost: int
    ) -> None:
        self.inputs, self.steps, self.cost = tuple(inputs), tuple(steps), cost
        self.layout, self.device = layout, device
        self.variant = 0
        self.verification: Verification | None = None
        # On a CPU the kernels of silu, sigmoid, softplus and others compute the last elements of each thread's part
        # by another path, so the number of threads selects the bits (decision 81).
        self._threads = torch.get_num_threads()

    @property
    def name(self) -> str:
        """The names of its operators in the order in which they run."""
        return " > ".join(step.name for step in self.steps)

    @property
    def variants(self) -> int:
        """How many variants there are."""
        return max(len(step.runs) for step in self.steps)

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that selects its kernels: programs with one key give the same bits for the same inputs."""
        steps = tuple((step.name, step.args, step.key) for step in self.steps)
        inputs = tuple(_described(each) for each in self.inputs)
        return steps, inputs, self.layout, self.device, self._threads, torch.are_deterministic_algorithms_enabled()

    def has_its_inputs(self) -> bool:
        """Whether every input is as it was when the program was made."""
        return all(map(_is_there, self.inputs))

    def run(self) -> torch.Tensor:
        """The tensor, in its layout, in memory of its own.

        Raises:
            StoreError: if a comparison has found meanwhile that the result may be wrong.
            MutationError: if an input was changed in place.
        """
        if self.verification is not None:
            self.verification.raise_if_broken(self.device)
        return self._run([_brought(each) for each in self.inputs], self.variant)

    def run_exact(self, variant: int) -> torch.Tensor | None:
        """The tensor from the exact inputs, for a comparison; None if an exact input is not there.

        Nothing that is brought back for it stays in memory.
        """
        inputs = [_exact(each) for each in self.inputs]
        return None if any(each is None for each in inputs) else self._run(inputs, variant)

    def _run(self, inputs: list[Any], variant: int) -> torch.Tensor:
        foreign = {each.untyped_storage()._cdata for each in inputs}
        with plainly(self.device.type, self._threads if self.device.type == "cpu" else None):
            return self._laid_out(self._computed(inputs, variant), foreign)

    def _computed(self, inputs: list[Any], variant: int) -> torch.Tensor:
        values: dict[int | None, Any] = {None: None} | {-1 - i: each for i, each in enumerate(inputs)}
        last = {arg: number for number, step in enumerate(self.steps) for arg in step.args}
        inputs.clear()
        for number, step in enumerate(self.steps):
            run = step.runs[min(variant, len(step.runs) - 1)]
            values[number] = run(*(values[arg] for arg in step.args))
            for arg in step.args:  # free each value after its last use
                if arg is not None and last[arg] == number:
                    values.pop(arg, None)
        result: torch.Tensor = values[len(self.steps) - 1]
        return result

    def _laid_out(self, result: torch.Tensor, foreign: set[int]) -> torch.Tensor:
        layout = self.layout
        alone = result.untyped_storage()._cdata not in foreign
        if alone and Layout.of(result) == layout and result.untyped_storage().nbytes() == result.nbytes:
            return result
        if (result.dtype, result.shape) != (layout.dtype, layout.size):
            raise ValueError(f"{self.name} gave {result.dtype} {tuple(result.shape)}")  # the formula is wrong
        if result.is_cpu and not _same_order(result, layout) and any(map(_minds_layout, self.steps)):
            raise ValueError(f"{self.name} gave strides {result.stride()}")  # other kernels ran before
        return torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=result.device).copy_(result)


@contextlib.contextmanager
def plainly(kind: str, threads: int | None) -> Iterator[None]:
    """Run without gradients and without autocast, and on a CPU with the number of ``threads`` that forward had."""
    now = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if threads is not None and threads != now:
            stack.callback(torch.set_num_threads, now)
            torch.set_num_threads(threads)
        yield


def _minds_layout(step: Step) -> bool:
    """Whether the layout of another step's result may change the bits of ``step``. Inputs have the layout they had."""
    return step.name not in _ANYWHERE and any(arg is not None and arg >= 0 for arg in step.args)


def _same_order(result: torch.Tensor, layout: Layout) -> bool:
    """Whether the elements of ``result`` lie in memory in the order of ``layout``."""
    return all(n == 1 or a == b for n, a, b in zip(layout.size, result.stride(), layout.stride, strict=True))


def _described(each: Input) -> tuple[Any, ...]:
    if isinstance(each, Handle):
        return each.layout, each.packed.alias.device
    return Layout.of(each.tensor), each.tensor.device


def _is_there(each: Input) -> bool:
    if isinstance(each, Handle):
        return each.packed.is_intact
    return isinstance(each, Vector) or each.tensor._version == each.version


def _brought(each: Input) -> torch.Tensor:
    if isinstance(each, Vector):
        return each.get()
    if not _is_there(each):
        now, then = (each.packed.alias, each.packed) if isinstance(each, Handle) else (each.tensor, each)
        raise MutationError(
            f"{changed_message(each.module_name, now._version, then.version)}. Recompute computes another tensor from "
            "it, and its store has no copy of it: leave that module out of Recompute, or store it elsewhere (OnDisk)"
        )
    if isinstance(each, Handle):
        return each.packed.tensor(each)  # the contents as they were saved, although the tensor may have changed since
    if isinstance(each, InPlace) and Layout.of(each.tensor).end() * each.tensor.itemsize > _storage_bytes(each.tensor):
        raise StoreError(
            f"Recompute: a tensor of {each.module_name!r} that others are computed from was freed before backward"
        )
    return each.unpack()


def _storage_bytes(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def _exact(each: Input) -> torch.Tensor | None:
    if isinstance(each, Handle):
        return exact(each.packed, each.layout)
    return _brought(each)


def exact(packed: Packed, layout: Layout) -> torch.Tensor | None:
    """The contents of ``packed`` as they were saved; nothing that is brought back for it stays in memory.

    None if only an approximation is left, by a lossy codec.
    """
    if not packed.is_intact:
        return None
    unchanged = packed.alias._version == packed.version and not packed.is_changed
    storage = packed.storage_ref.get() if unchanged else None
    if storage is not None and storage.nbytes() == packed.nbytes and not packed.is_volatile:
        now = layout.over(storage)
        # On a CPU the bytes are compared, because somebody may have written without a count.
        if not (now.is_cpu and packed.can_compare) or packed.has_contents_of(now, layout):
            return now
    if not packed.is_lossless:
        return None
    return packed.peek(layout)


_SMALL_BYTES = 1 << 20  # the weight of a norm is smaller by far, the weight of a matrix larger
# The other readers of an input come a few operators later in backward. The input counts as saved that many times its
# bytes earlier, so that it is brought back once for all of them.
_NEAR_READERS = 3
_MOST_NODES = 40  # that are looked at to plan one program, views among them


class Norms:
    """The norms of a module by their weights, and copies of these weights, for one forward.

    A weight may be freed before backward (FSDP, ZeRO), or changed by an optimizer step. So it is copied once: it is
    tiny.

    Args:
        module: the module whose forward it is; None for code that belongs to no module.
    """

    def __init__(self, module: nn.Module | None) -> None:
        self._module = module
        self._norms: list[nn.Module] | None = None
        self._vectors: dict[tuple[int, int, int], tuple[torch.Tensor, Vector]] = {}

    def of(self, weight: Saved | None) -> Norm:
        """The eps and the bias of the norm that owns ``weight``; the graph has neither.

        Raises:
            NotComputable: if there is no such module, or several that do not agree.
        """
        if weight is None or not isinstance(weight.held, InPlace):
            raise NotComputable
        norms = [_norm(each) for each in self._owners(weight.held.tensor)]
        if not norms or any(each.eps != norms[0].eps or each.bias is not norms[0].bias for each in norms):
            raise NotComputable
        return norms[0]

    def _owners(self, weight: torch.Tensor) -> list[nn.Module]:
        if self._norms is None:
            self._norms = [] if self._module is None else [each for each in self._module.modules() if _has_eps(each)]
        # Weights are compared by their address now, because engines free weights and gather others there later.
        return [each for each in self._norms if _is_over(getattr(each, "weight", None), weight)]

    def vector(self, tensor: torch.Tensor) -> Vector:
        """A copy of ``tensor`` as it is now.

        Raises:
            NotComputable: if the tensor is large, or not in memory any more.
        """
        plain = tensor.detach()
        if exotic(plain) is not None or plain.nbytes > _SMALL_BYTES or plain.numel() == 0:
            raise NotComputable
        if Layout.of(plain).end() * plain.itemsize > plain.untyped_storage().nbytes():
            raise NotComputable  # FSDP freed it when the forward of its unit ended
        if not isinstance(tensor, nn.Parameter):
            return Vector(plain)  # not shared: it may be written without a count
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
    """Plans one program.

    Args:
        counters: of the attachment. A program starts only from its packed values: those of another may be approximate.
        norms: the norms of this forward.
        limit: the largest number of operators that the program may run.
    """

    def __init__(self, counters: Counters, norms: Norms, limit: int) -> None:
        self._counters, self._norms, self._limit = counters, norms, limit
        self._inputs: list[Input] = []
        self._steps: list[Step] = []
        self._values: dict[Any, int] = {}
        self._calls: list[Call] = []  # held, because `_values` knows their arguments by id
        self._cost = self._looked = 0

    def program(self, edge: Edge, layout: Layout, device: torch.device) -> Program | None:
        """The program that computes the value of ``edge``; None if the graph tells none, or it costs too much."""
        try:
            self._computed(edge)
        except NotComputable:
            return None
        if not any(isinstance(each, Handle | InPlace) for each in self._inputs):
            return None
        return Program(self._inputs, self._steps, layout, device, self._cost)

    def _computed(self, edge: Edge) -> int:
        """Add the step that computes ``edge``, and the steps before it; the number of its result."""
        read = FORMULAS.get(node_name(edge.node))
        self._looked += 1
        if read is None or edge.number or self._looked > _MOST_NODES:
            raise NotComputable
        call = read(NodeReader(edge), self._norms.of)
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
        """The number of the value of ``source``, which becomes an input or a step the first time that it is wanted."""
        if source is None:
            return None
        if isinstance(source, Saved):
            return self._once(
                ("saved", id(source.held), source.must_copy), lambda: self._held(source.held, source.must_copy)
            )
        return self._once(source, lambda: self._found(source))

    def _once(self, key: Any, find: Any) -> int:
        if key not in self._values:
            self._values[key] = find()
        return self._values[key]

    def _found(self, edge: Edge) -> int:
        leaf = leaf_of(edge)
        if isinstance(leaf, nn.Parameter):  # other leaves may have been written since, without a count
            return self._input(self._norms.vector(leaf))
        held = annotation(edge)
        if held is not None:
            try:
                return self._held(held, False)
            except NotComputable:
                pass  # the held value cannot be used; the value may be computed
        return self._computed(edge)

    def _held(self, held: Handle | InPlace, must_copy: bool) -> int:
        if isinstance(held, InPlace):
            return self._in_place(held, must_copy)
        packed = held.packed
        if packed.counters is not self._counters or not packed.is_source or not packed.is_intact:
            raise NotComputable
        if packed.is_changed or packed.alias._version != packed.version:
            raise NotComputable  # the graph does not tell whether that was before or after its use
        self._pay(packed.cost)
        source = packed.handle(held.layout)  # not autograd's own handle, which remembers what it has read
        source.saved_bytes_before -= _NEAR_READERS * packed.nbytes
        return self._input(source)

    def _in_place(self, kept: InPlace, must_copy: bool) -> int:
        tensor = kept.tensor
        if tensor._version != kept.version:
            raise NotComputable
        if must_copy or isinstance(tensor, nn.Parameter) or kept.reason == "parameter":  # a view of one, too
            return self._input(self._norms.vector(tensor))
        if exotic(tensor) is not None:
            raise NotComputable
        return self._input(kept)

    def _input(self, held: Input) -> int:
        self._inputs.append(held)
        return -len(self._inputs)

    def _pay(self, cost: int) -> None:
        self._cost += cost
        if self._cost > self._limit:
            raise NotComputable
