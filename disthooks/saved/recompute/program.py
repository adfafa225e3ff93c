"""A program that computes a tensor again, and the planner that finds it.

A :class:`Program` has inputs, which disthooks or autograd holds, and operators that run on them. The :class:`Planner`
follows the autograd graph back from a value until every input that it needs is held.
"""

# [Note: weights of products]
# The weight of a matrix product is too large to be copied, and it is in memory anyway. So the program refers to it. In
# backward it has to be there with the same bytes. A counted change shows in its version, as without hooks. A write
# without a count, by `.data`, does not, and an engine may free the weight and gather it again elsewhere. So a checksum
# is taken in forward. On a CPU it is compared in backward. On a device it is compared only if the weight was moved, and
# the host reads the answer later. A unit of FSDP frees its weights when its forward ends: an operator outside of the
# unit that saves the product stores it, because the weight is not there when contents are taken.

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from disthooks._streams import handed_over, stream_of
from disthooks._tensors import Layout, exotic, memory_under
from disthooks._torch import is_dispatched, node_name
from disthooks.errors import MutationError, StoreError
from disthooks.saved.counters import Counters
from disthooks.saved.packed import Handle, InPlace, Packed, changed_message
from disthooks.saved.recompute.formulas import FORMULAS, Call, NormArguments
from disthooks.saved.recompute.graph import Edge, NodeReader, NotComputable, Saved, Source, annotation, leaf_of
from disthooks.saved.recompute.verify import Verification
from disthooks.saved.weights import AutocastCopy, checksum


class ProgramStep(NamedTuple):
    """One operator of a program.

    Attributes:
        name: the operator's name, for reports.
        runs: functions of the arguments, one for each variant that may give the bits of the original, likeliest first.
        args: numbers of values: ``0, 1, ...`` are results of steps, ``-1, -2, ...`` are inputs, None is no tensor.
        key: everything that selects a kernel, besides the arguments.
        cost: how many operators read or write all elements.
        is_product: whether it is a matrix product of its last two arguments.
    """

    name: str
    runs: tuple[Callable[..., torch.Tensor], ...]
    args: tuple[int | None, ...]
    key: tuple[Any, ...]
    cost: int = 1
    is_product: bool = False


class Vector:
    """A copy of a small tensor that may be changed or freed before backward: the weight of a norm, its statistics."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().clone()
        self._made_on = stream_of(tensor)

    def get(self) -> torch.Tensor:
        """The copy, for use on the current stream."""
        return self.tensor if self._made_on is None else handed_over(self.tensor, self._made_on)


class Weight:
    """A weight of a matrix product. See [Note: weights of products]."""

    def __init__(self, tensor: torch.Tensor, module_name: str) -> None:
        self.tensor, self.version, self.module_name = tensor.detach(), tensor._version, module_name
        self._address, self._checksum = self.tensor.data_ptr(), checksum(memory_under(self.tensor))

    @property
    def is_intact(self) -> bool:
        """Whether it is in memory, and no change was counted."""
        return self.tensor._version == self.version and not _is_freed(self.tensor)

    def get(self, later: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """The weight as it was.

        Raises:
            MutationError: if it was changed.
            StoreError: if it was freed.
        """
        tensor = self.tensor
        if _is_freed(tensor):
            raise StoreError(
                f"Recompute: a weight of {self.module_name!r} is not in memory in backward, and a matrix product is to "
                "be computed again with it. Leave that module out of Recompute(products=...)"
            )
        is_same: torch.Tensor | bool = tensor._version == self.version
        if is_same and tensor.is_cpu:
            is_same = bool(checksum(memory_under(tensor)) == self._checksum)
        elif is_same and tensor.data_ptr() != self._address:
            later(checksum(memory_under(tensor)) == self._checksum)
        if not is_same:
            raise MutationError(
                f"a weight was changed between the forward of {self.module_name!r} and its backward, and Recompute "
                "computes a matrix product again with it: call backward before the optimizer steps, or leave that "
                "module out of Recompute(products=...)"
            )
        return tensor


Input = Handle | InPlace | Vector | Weight
#: Operators that move elements, or compute each element by itself: their bits do not depend on the layout of arguments.
_ANYWHERE = {"relu", "neg", "mul", "div", "cast", "clone", "view", "expand", "transpose", "t", "permute", "alias"}


class Program:
    """Computes a tensor again.

    Attributes:
        flops: the floating-point operations of its own products, once it has run.
        variant: the variant that was proven.
        verification: the verification that proved it; None before.
    """

    __slots__ = (
        "_threads",
        "cost",
        "device",
        "flops",
        "inputs",
        "layout",
        "products",
        "steps",
        "timed",
        "variant",
        "verification",
    )

    def __init__(
        self,
        inputs: Sequence[Input],
        steps: Sequence[ProgramStep],
        layout: Layout,
        device: torch.device,
        cost: int,
        products: int = 0,
    ) -> None:
        self.inputs, self.steps, self.cost, self.products = tuple(inputs), tuple(steps), cost, products
        self.flops = 0
        self.layout, self.device = layout, device
        self.variant = 0
        self.timed: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self.verification: Verification | None = None
        # On a CPU the kernels of silu, sigmoid, softplus and others compute the last elements of each thread's part
        # by another path, so the number of threads selects the bits (decision 81).
        self._threads = torch.get_num_threads()

    @property
    def name(self) -> str:
        """The names of the operators, in the order in which they run."""
        return " > ".join(step.name for step in self.steps)

    @property
    def operators(self) -> int:
        """How many operators it runs itself. Views do not count."""
        return sum(step.cost for step in self.steps)

    @property
    def variants(self) -> int:
        return max(len(step.runs) for step in self.steps)

    @property
    def key(self) -> tuple[Any, ...]:
        """Everything that selects kernels: programs with the same key give the same bits for the same inputs."""
        steps = tuple((step.name, step.args, step.key) for step in self.steps)
        inputs = tuple(
            (each.layout, each.packed.alias.device)
            if isinstance(each, Handle)
            else (Layout.of(each.tensor), each.tensor.device)
            for each in self.inputs
        )
        return steps, inputs, self.layout, self.device, self._threads, torch.are_deterministic_algorithms_enabled()

    def has_its_inputs(self) -> bool:
        return all(map(_is_intact, self.inputs))

    def run(self) -> torch.Tensor:
        """The tensor, in its layout, in memory of its own.

        Raises:
            StoreError: if a comparison has found meanwhile that the result may be wrong.
            MutationError: if an input was changed in place.
        """
        if self.verification is not None:
            self.verification.raise_if_broken(self.device)
        inputs = [self._tensor_of(each) for each in self.inputs]
        with self.timed():
            return self._run(inputs, self.variant)

    def run_exact(self, variant: int) -> torch.Tensor | None:
        """The tensor that ``variant`` computes from the exact inputs, for a comparison; None if one of them is gone.

        Inputs that come back from a store for this are freed again.
        """
        inputs = [
            exact(each.packed, each.layout) if isinstance(each, Handle) else self._tensor_of(each)
            for each in self.inputs
        ]
        return None if any(each is None for each in inputs) else self._run(inputs, variant)

    def _tensor_of(self, each: Input) -> torch.Tensor:
        if not isinstance(each, Weight):
            return _tensor_of(each)
        if self.verification is None:
            return each.tensor  # as it is in forward
        return each.get(functools.partial(self.verification.compare_later, self.variant))

    def _run(self, inputs: list[Any], variant: int) -> torch.Tensor:
        """Run ``variant`` on ``inputs``. The list is emptied, so that each input is freed after its last use."""
        layout = self.layout
        foreign = {each.untyped_storage()._cdata for each in inputs}
        values: dict[int | None, Any] = {None: None} | {-1 - i: each for i, each in enumerate(inputs)}
        last_use = {arg: number for number, step in enumerate(self.steps) for arg in step.args}
        inputs.clear()
        with plainly(self.device.type, self._threads if self.device.type == "cpu" else None):
            flops = 0
            for number, step in enumerate(self.steps):
                run = step.runs[min(variant, len(step.runs) - 1)]
                values[number] = run(*(values[arg] for arg in step.args))
                if step.is_product:
                    flops += 2 * values[number].numel() * values[step.args[-2]].shape[-1]
                for arg in step.args:
                    if arg is not None and last_use[arg] == number:
                        values.pop(arg, None)
            self.flops = flops
            result: torch.Tensor = values.pop(len(self.steps) - 1)
            # No copy is needed if the result has memory of its own and the layout of the original.
            storage = result.untyped_storage()
            if storage._cdata not in foreign and Layout.of(result) == layout and storage.nbytes() == result.nbytes:
                return result
            if (result.dtype, result.shape) != (layout.dtype, layout.size):
                raise ValueError(f"{self.name} gave {result.dtype} {tuple(result.shape)}")  # the formula is wrong
            if result.is_cpu and any(
                n != 1 and a != b for n, a, b in zip(layout.size, result.stride(), layout.stride, strict=True)
            ):
                # The steps gave other strides than forward's operators did. So a step that takes another step's result
                # may have run another kernel than in forward. Inputs have the strides that they had in forward.
                for step in self.steps:
                    if step.name not in _ANYWHERE and any(arg is not None and arg >= 0 for arg in step.args):
                        raise ValueError(f"{self.name} gave strides {result.stride()}")
            copy = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device=result.device)
            return copy.copy_(result)


@contextlib.contextmanager
def plainly(kind: str, threads: int | None) -> Iterator[None]:
    """A context manager: run without gradients and autocast, and on a CPU with as many ``threads`` as forward had."""
    now = torch.get_num_threads()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(kind):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if threads is not None and threads != now:
            stack.callback(torch.set_num_threads, now)
            torch.set_num_threads(threads)
        yield


def _is_intact(each: Input) -> bool:
    if isinstance(each, Handle):
        return each.packed.is_intact
    if isinstance(each, Weight):
        return each.is_intact
    return isinstance(each, Vector) or each.tensor._version == each.version


def _in_place(held: InPlace) -> InPlace | Vector:
    """An input for the tensor of ``held``, which stays where the user can write to it without a count.

    A small one is copied. Of a large one a CPU takes a checksum; a device would make the host wait for the answer.
    """
    tensor = held.tensor
    if tensor.dim() == 0 and is_dispatched():
        # A dispatch mode gets a number of Python's in place of the tensor that torch made of one, for which there is no
        # operator.
        return held
    if tensor.nbytes <= _SMALL_COPY:
        return Vector(tensor)
    if tensor.is_cpu and held.checksum is None:
        held.checksum = checksum(memory_under(tensor))
    return held


def _tensor_of(each: Handle | InPlace | Vector) -> torch.Tensor:
    """The tensor of an input, brought back from the store if it is there."""
    if isinstance(each, Vector):
        return each.get()
    if not _is_intact(each):
        now, then = (each.packed.alias, each.packed) if isinstance(each, Handle) else (each.tensor, each)
        raise MutationError(
            f"{changed_message(each.module_name, now._version, then.version)}. Recompute computes another tensor from "
            "it, and its store has no copy of it: leave that module out of Recompute, or store it elsewhere (OnDisk)"
        )
    if isinstance(each, Handle):
        return each.packed.tensor(each)  # the contents as they were saved, although the tensor may have changed since
    if each.checksum is not None and bool(checksum(memory_under(each.tensor)) != each.checksum):
        raise MutationError(
            f"Recompute: a tensor that {each.module_name!r} saved was changed before backward, without a new version "
            "(by .data, by NumPy), and other tensors are computed from it. Leave that module out of Recompute"
        )
    if _is_freed(each.tensor):
        raise StoreError(
            f"Recompute: a tensor of {each.module_name!r} was freed before backward, and other tensors are computed "
            "from it. Leave that module out of Recompute"
        )
    return each.unpack()


def _is_freed(tensor: torch.Tensor) -> bool:
    """Whether the storage of ``tensor`` was made too short for it, as FSDP does with weights after a unit's forward."""
    return Layout.of(tensor).end() * tensor.itemsize > tensor.untyped_storage().nbytes()


def exact(packed: Packed, layout: Layout) -> torch.Tensor | None:
    """The contents of ``packed`` as they were saved; None if a lossy codec has left only an approximation.

    Contents that come back from a store for this do not stay in memory.
    """
    if not packed.is_intact:
        return None
    storage = None if packed.is_changed() else packed.storage_ref.get()
    if storage is not None and storage.nbytes() == packed.nbytes and packed.nature == "result":
        now = layout.over(storage)
        # On a CPU the bytes are compared, because a write may have left the version as it was. If there is nothing to
        # compare them with, backward gets what was stored, so that is exact.
        if not now.is_cpu or packed.has_contents_of(now, layout):
            return now
    if not packed.is_lossless:
        return None
    return packed.peek(layout)


_SMALL_COPY = 1 << 16  # a copy of so few bytes costs less than it would to compare them later
_SMALL_BYTES = 1 << 20  # the weight of a norm is much smaller, the weight of a large layer is larger
# The other readers of an input come a few operators later in backward. So the position of the input in the order of
# saved bytes is moved back by this many times its own bytes: then it comes back once for all of its readers.
_NEAR_READERS = 3
_MOST_NODES = 40  # nodes that are read to plan one program, including views


class Norms:
    """The norms of a module by their weights, and copies of these weights, for one forward.

    A weight may be freed before backward (FSDP, ZeRO), or changed by an optimizer step. So it is copied; it is small.
    The weight of a matrix product is not: see [Note: weights of products].
    """

    def __init__(self, module: nn.Module | None, module_name: str = "") -> None:
        self._module, self._module_name = module, module_name
        self._with_eps: list[nn.Module] | None = None  # the modules that have an eps, once they are needed
        self._vectors: dict[tuple[int, int, int], tuple[torch.Tensor, Vector]] = {}
        self._weights: dict[tuple[Any, ...], Weight] = {}

    def of(self, weight: Saved | None) -> NormArguments:
        """The eps and the bias of the norm that owns ``weight``; the graph has neither.

        Raises:
            NotComputable: if there is no such module, or several that do not agree.
        """
        if weight is None or not isinstance(weight.held, InPlace):
            raise NotComputable
        if self._with_eps is None:
            modules = () if self._module is None else self._module.modules()
            self._with_eps = [each for each in modules if isinstance(_eps_of(each), (float, type(None)))]
        saved, norms = weight.held.tensor, []
        for module in self._with_eps:
            own: Any = getattr(module, "weight", None)
            # Weights are compared by their address now: an engine frees weights, and gathers others there later.
            is_plain = type(own) in (torch.Tensor, nn.Parameter)
            if own is not saved and not (is_plain and own.data_ptr() == saved.data_ptr() != 0):
                continue
            bias = getattr(module, "bias", None)
            norms.append(NormArguments(_eps_of(module), bias if isinstance(bias, torch.Tensor) else None))
        if not norms or any(each.eps != norms[0].eps or each.bias is not norms[0].bias for each in norms):
            raise NotComputable
        return norms[0]

    def vector(self, tensor: torch.Tensor) -> Vector:
        """A copy of ``tensor`` as it is now.

        Raises:
            NotComputable: if the tensor is large, or its memory was freed.
        """
        plain = tensor.detach()
        if exotic(plain) is not None or plain.nbytes > _SMALL_BYTES or plain.numel() == 0:
            raise NotComputable
        if _is_freed(plain):
            raise NotComputable
        if not isinstance(tensor, nn.Parameter):
            return Vector(plain)  # a new copy each time: a write may leave the version of a buffer as it was
        key = id(tensor), tensor._version, tensor.data_ptr()
        if key not in self._vectors:
            self._vectors[key] = tensor, Vector(plain)
        return self._vectors[key][1]

    def weight(self, tensor: torch.Tensor) -> Weight:
        """``tensor``, a weight or a view of one, for a matrix product.

        Raises:
            NotComputable: if its memory was freed.
        """
        plain = tensor.detach()
        if exotic(plain) is not None or plain.numel() == 0 or _is_freed(plain):
            raise NotComputable
        key = plain.untyped_storage()._cdata, Layout.of(plain), plain._version
        found = self._weights.get(key)
        if found is None or not found.is_intact:
            found = self._weights[key] = Weight(plain, self._module_name)
        return found


def _eps_of(module: Any) -> Any:
    """The eps of a norm, under one of its two names; "" if ``module`` has none."""
    return getattr(module, "eps", getattr(module, "variance_epsilon", ""))


class Planner:
    """Plans one program.

    Args:
        counters: the counters of the attachment. A program starts only from packed values of this attachment, because
            those of another one may be approximate.
        norms: the norms of this forward.
        limit: the largest number of operators that the program may run.
        most_products: how many of them may be matrix products.
    """

    def __init__(self, counters: Counters, norms: Norms, limit: int, most_products: int = 0) -> None:
        self._counters, self._norms, self._limit = counters, norms, limit
        self._most_products, self._products = most_products, 0
        self._inputs: list[Input] = []
        self._steps: list[ProgramStep] = []
        self._values: dict[Any, int] = {}
        self._calls: list[Call] = []  # held, because `_values` knows their arguments by id
        self._cost = self._looked = 0
        self._has_activation = False  # whether an input is no weight

    def program(self, edge: Edge, layout: Layout, device: torch.device) -> Program | None:
        """The program that computes the value of ``edge``; None if the graph has none, or it has too many operators."""
        try:
            self._computed(edge)
        except NotComputable:
            return None
        if not self._has_activation:
            return None
        return Program(self._inputs, self._steps, layout, device, self._cost, self._products)

    def _computed(self, edge: Edge, is_factor: bool = False) -> int:
        """Add the step that computes ``edge``, and the steps before it. Returns the number of its result."""
        read = FORMULAS.get(node_name(edge.node))
        self._looked += 1
        if read is None or edge.number or self._looked > _MOST_NODES:
            raise NotComputable
        reader = NodeReader(edge)
        call = read(reader, self._norms.of)
        self._calls.append(call)
        self._pay(call.cost, int(call.is_product))
        is_factor = call.is_product or (is_factor and not call.cost)
        args = tuple(self._value(source, is_factor) for source in call.args)
        key = (*call.key, reader.shape, reader.dtype)
        self._steps.append(ProgramStep(call.name, call.runs, args, key, call.cost, call.is_product))
        return len(self._steps) - 1

    def _value(self, source: Source | None, is_factor: bool) -> int | None:
        """The number of the value of ``source``, which becomes an input or a step when it is first needed."""
        if source is None:
            return None
        name = "factor" if is_factor else "saved"
        key = (name, id(source.held), source.must_copy) if isinstance(source, Saved) else (name, source)
        number = self._values.get(key)
        if number is not None:
            return number
        if isinstance(source, Saved):
            number = self._held(source.held, source.must_copy, is_factor)
        elif isinstance(leaf := leaf_of(source), nn.Parameter):
            # A write may leave the version of another leaf as it was.
            is_matrix = is_factor and leaf.dim() > 1
            number = self._input(self._norms.weight(leaf) if is_matrix else self._norms.vector(leaf))
        else:
            held = annotation(source)
            if held is not None:
                with contextlib.suppress(NotComputable):  # if the held value cannot be used, it may be computed
                    number = self._held(held, False, is_factor)
            if number is None:
                number = self._computed(source, is_factor)
        self._values[key] = number
        return number

    def _held(self, held: Handle | InPlace, must_copy: bool, is_factor: bool) -> int:
        """Add an input for a value that is held. Returns its number."""
        if isinstance(held, InPlace):
            tensor = held.tensor
            if tensor._version != held.version:
                raise NotComputable
            if must_copy or isinstance(tensor, nn.Parameter) or held.reason == "parameter":  # or a view of a parameter
                is_matrix = is_factor and tensor.dim() > 1
                return self._input(self._norms.weight(tensor) if is_matrix else self._norms.vector(tensor))
            if exotic(tensor) is not None:
                raise NotComputable
            self._has_activation = True
            return self._input(_in_place(held))
        packed = held.packed
        is_source = packed.is_source or (is_factor and isinstance(packed, AutocastCopy))
        if packed.counts.all is not self._counters or not is_source or not packed.is_intact:
            raise NotComputable
        if packed.is_changed():
            raise NotComputable  # the graph does not say whether the operator ran before or after the change
        self._pay(packed.cost, packed.products)
        # autograd's own handle remembers its last read, so the program gets a handle of its own.
        self._has_activation = True
        source = packed.handle(held.layout)
        source.saved_bytes_before -= _NEAR_READERS * packed.nbytes
        return self._input(source)

    def _input(self, held: Input) -> int:
        self._inputs.append(held)
        return -len(self._inputs)

    def _pay(self, cost: int, products: int) -> None:
        self._cost += cost
        self._products += products
        if self._cost > self._limit or self._products > self._most_products:
            raise NotComputable
