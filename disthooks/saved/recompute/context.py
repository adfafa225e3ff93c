"""``RecomputeContext`` plans and verifies the programs of a forward; ``Recomputed`` is a content that they replace."""

from __future__ import annotations

import collections
import functools
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from disthooks._tensors import Layout, is_plain
from disthooks._torch import node_name
from disthooks.saved.contents import StoredContent
from disthooks.saved.packed import Handle, Place
from disthooks.saved.pipeline import OpenPipeline
from disthooks.saved.recompute.formulas import FORMULAS
from disthooks.saved.recompute.graph import Edge, NodeReader, NotComputable, is_as_made, metadata_of, saves_now
from disthooks.saved.recompute.program import Norms, Planner, Program
from disthooks.saved.recompute.verify import Proofs, Recompute, Verification

# [Note: an origin is no cycle]
# An `Origin` holds the node that made its tensor until the contents of the tensor are taken. If the operator of a node
# saves its own output (tanh, relu, exp), the node holds the packed value of this output, and so its origin. That is a
# cycle through C++, which no collector sees: the graph would stay in memory, although the user has dropped it, until
# the next operator saves a tensor. So the program of such a tensor is planned when the tensor is packed, and its origin
# holds the program instead of the node. A program holds values that were saved before, and no node. The programs of
# other tensors are planned later, because the same operator may save the values from which they can be computed. A node
# of the user's own (`autograd.Function`) has no formula, and its attributes may lead to anything: its outputs have no
# origin.

#: For the dtype of a tensor: the narrower dtypes from which the tensor may have been widened.
_WIDENED = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
}


#: The number of tensors that a lossy pipeline holds, the last ones, so that programs are verified with exact inputs.
_EXACT_TENSORS = 8


class Narrow(NamedTuple):
    """The dtype that a tensor was widened from, and the verification that proved it."""

    dtype: torch.dtype
    verification: Verification


class Origin(NamedTuple):
    """The node that made a packed tensor, kept for the short time until the contents of the tensor are taken.

    Attributes:
        context: of the forward in which the tensor was packed.
        edge: the output of the node that made the tensor; None after the program was planned.
        layout: the layout of the tensor in its storage.
        planned: the program, if it was planned when the tensor was packed.
    """

    context: RecomputeContext
    edge: Edge | None
    layout: Layout
    planned: Program | None = None


class RecomputeContext:
    """Plans the programs of one forward and verifies them.

    Args:
        pipeline: the open pipeline of the attachment; it has the verifications of its places. A verification needs the
            exact inputs of a program. So if a codec is lossy, the last tensors are held for verifications, as long as
            some place is not settled, or always if every tensor is compared. If a comparison is due later, as many are
            held in the next forward as it takes.
        module_name: the name of the module, for errors and reports.
        module: the module whose forward it is; None in a ``saving`` block.
    """

    def __init__(self, pipeline: OpenPipeline, module_name: str, module: nn.Module | None) -> None:
        self._pipeline, self._counters, self._module_name = pipeline, pipeline.counters, module_name
        self._norms = Norms(module, module_name)
        held = 0 if pipeline.is_lossless else self._tensors_to_hold()
        self._exact: collections.deque[torch.Tensor] = collections.deque(maxlen=held)

    def _tensors_to_hold(self) -> int:
        """How many of the last tensors are held in this forward, so that a comparison has its exact inputs."""
        known = [each for ref in self._pipeline.verifications.valuerefs() if (each := ref()) is not None]
        is_settled = bool(known) and all(each.is_settled for each in known)
        if not is_settled or cast(Recompute, self._pipeline.recompute).check == "always":
            return _EXACT_TENSORS
        return max((each.reach for each in known if each.is_due), default=0)

    def remember(self, tensor: torch.Tensor) -> None:
        """Hold ``tensor``, which is being packed, if later verifications may need its exact values."""
        self._exact.append(tensor.detach())

    def origin(self, owner: torch.Tensor) -> Origin | None:
        """The origin of ``owner``; None if its node has no formula, or ``owner`` is not a whole, unchanged storage."""
        node: Any = owner.grad_fn
        if node is None or node_name(node) not in FORMULAS:
            return None
        if not is_as_made(owner, node) or not fills_storage(owner):
            return None
        edge, layout = Edge(node, owner.output_nr), Layout.of(owner)
        return Origin(self, edge, layout)

    def plan(self, edge: Edge, layout: Layout, device: torch.device) -> Program | None:
        """The program that computes the output of ``edge``, not verified yet; None if the graph has none."""
        asked = cast(Recompute, self._pipeline.recompute)
        return Planner(self._counters, self._norms, asked.steps, asked.products).program(edge, layout, device)

    def program(self, origin: Origin, original: torch.Tensor) -> Program | None:
        """The program that computes the tensor of ``origin``; None if none is proven to give ``original``'s bits.

        None, too, if nothing more may be dropped.
        """
        droppable = self._pipeline.droppable
        if not droppable.may():
            return None
        program = origin.planned
        if origin.edge is not None:
            program = self.plan(origin.edge, origin.layout, original.device)
        if program is None or not program.has_its_inputs():
            return None
        verification = self._verification(program.name, program.key)
        if not droppable.may(verification.where):
            return None
        waits = verification.waits
        attempt = (
            program.run_exact if self._exact.maxlen == 0 else functools.partial(self._run_exact, program, verification)
        )
        variant = verification.choose_variant(attempt, program.variants, original)
        if verification.waits != waits:
            self._counters.count_proof_wait()
        if variant is None:
            if verification.is_different:
                self._counters.count_differed(verification.where, original.nbytes)
            return None
        program.variant, program.verification = variant, verification
        droppable.take(verification.where, original.nbytes)
        if droppable.watch is not None:
            program.timed = functools.partial(droppable.watch.part, verification.where, original.nbytes)
        return program

    def _run_exact(self, program: Program, verification: Verification, variant: int) -> torch.Tensor | None:
        """Run ``variant``, and remember in ``verification`` how many tensors had to be held for that."""
        found = program.run_exact(variant)
        inputs = {each.packed.storage_ref.address for each in program.inputs if isinstance(each, Handle)}
        ages = [age for age, held in enumerate(reversed(self._exact), 1) if held.untyped_storage()._cdata in inputs]
        if found is not None and ages:
            verification.reach = max(verification.reach, ages[-1])
        return found

    def narrow(self, origin: Origin, original: torch.Tensor) -> Narrow | None:
        """The dtype from which the tensor of ``origin`` was widened; None if it was not, or that is not proven."""
        if origin.edge is None or node_name(origin.edge.node) != "ToCopyBackward0":
            return None
        try:
            dtype = metadata_of(NodeReader(origin.edge).input(0)).dtype
        except NotComputable:
            return None
        if dtype not in _WIDENED.get(original.dtype, ()):
            return None
        verification = self._verification("narrow", (dtype, origin.layout, original.device))
        variant = verification.choose_variant(lambda _: original.to(dtype).to(original.dtype), 1, original)
        return None if variant is None else Narrow(dtype, verification)

    def _verification(self, name: str, key: Any) -> Verification:
        """The verification of the place ``key`` in this module; ``name`` has its operators, for errors."""
        where = f"{self._module_name!r} ({name})" if self._module_name else f"({name})"
        always = cast(Recompute, self._pipeline.recompute).check == "always"
        found = cast(Proofs, self._pipeline.proofs).verification((self._module_name, key), where, always)
        self._pipeline.verifications[id(found)] = found
        return found


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` are all of its storage, each once, with no conj or neg bit."""
    if not is_plain(tensor) or tensor._is_view() or tensor.is_conj() or tensor.is_neg():
        return False
    if tensor.nbytes != tensor.untyped_storage().nbytes() or tensor.storage_offset():
        return False
    expected = 1
    for step, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n != 1 and step != expected:
            return False
        expected *= n
    return True


class Recomputed(StoredContent):
    """Contents that are dropped if a verified program computes them again, and go into the store otherwise.

    If a tensor is a widened copy of a narrow tensor that was not saved, the store gets it in the narrow dtype.
    """

    __slots__ = ("_narrow", "_origin", "_program", "_wide", "cost", "products")
    may_stay = False  # other tensors are computed from what is stored

    def __init__(self, origin: Origin | None, *args: Any) -> None:
        StoredContent.__init__(self, *args)
        self.cost = self.products = 0
        self._origin: Origin | None = origin  # None after the contents were taken
        self._program: Program | None = None
        self._wide: torch.dtype | None = None
        self._narrow: Narrow | None = None
        if origin is not None:
            self.is_in_order = self.is_in_order and self.first_layout == origin.layout

    @property
    def is_intact(self) -> bool:
        """Whether the contents can come back as they were saved: a program needs all its inputs to be intact."""
        if self.place == "offloaded" and self._program is not None:
            return self._program.has_its_inputs()
        return super().is_intact

    def is_own_memory(self, tensor: torch.Tensor) -> bool:
        return self._program is not None or super().is_own_memory(tensor)

    def prepare(self) -> None:
        """Plan the program now if its node holds this content. See [Note: an origin is no cycle]."""
        origin = self._origin
        if origin is not None and origin.edge is not None and saves_now(origin.edge.node):
            planned = origin.context.plan(origin.edge, origin.layout, self.alias.device)
            self._origin = origin._replace(edge=None, planned=planned)

    def stay_in_memory(self) -> None:
        """Keep the tensor where it is, and drop the node that made it."""
        super().stay_in_memory()
        self._origin = None

    def offload(self) -> None:
        """Drop, store or compute the contents, and drop the node that made them."""
        try:
            super().offload()
        finally:
            self._origin = None

    def _offload(self, storage: torch.UntypedStorage) -> Place:
        origin = self._origin
        if self._copy is not None:
            storage = self._copy.untyped_storage()  # the contents as they were saved; the user may have changed them
        if origin is not None and self.nature == "result":
            original = origin.layout.over(storage)
            program = origin.context.program(origin, original)
            if program is not None:
                self._program, self.cost, self.products = program, program.cost, program.products
                self.counts.count_recomputed(program.name, self.nbytes)
                return "offloaded"
            self._narrow = origin.context.narrow(origin, original)
            self._wide = None if self._narrow is None else original.dtype
        if self._narrow is None or self._wide is None:
            return super()._offload(storage)
        self.cost, self.is_in_order = 1, False
        if self._copy is not None:
            # The store gets the narrow contents. If the tensor is saved again, it is compared with the wide ones.
            self.release_copy()
            self._weak_copy, self._copy = None, self._store.own(self.content(storage))
        place = super()._offload(storage)
        if place == "offloaded":
            narrow = self.nbytes * self._narrow.dtype.itemsize // self._wide.itemsize
            self.counts.count_recomputed("cast", self.nbytes - narrow)
        return place

    def content(self, storage: torch.UntypedStorage, typed: bool = False) -> torch.Tensor:
        if self._narrow is None or self._wide is None:
            return super().content(storage, typed)
        elements = self.nbytes // self._wide.itemsize
        wide = torch.empty(0, dtype=self._wide, device=self.alias.device).set_(storage, 0, (elements,), (1,))
        return wide.to(self._narrow.dtype)

    def _restore(self, is_as_packed: bool = False) -> torch.Tensor:
        if self._program is not None:
            result = self._program.run()
            self.counts.all.count_rerun(self._program.operators, self._program.flops)
            return result
        if self._narrow is not None:
            self._narrow.verification.raise_if_broken(self.alias.device)
        content = super()._restore(is_as_packed)
        return content if self._wide is None else content.to(self._wide)
