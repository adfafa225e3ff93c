"""``RecomputeContext`` plans and verifies programs in one forward; ``Recomputed`` is a content that they replace."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from disthooks._tensors import Layout
from disthooks._torch import node_name
from disthooks.saved.contents import StoredContent
from disthooks.saved.pipeline import OpenPipeline
from disthooks.saved.recompute.formulas import FORMULAS
from disthooks.saved.recompute.graph import Edge, NodeReader, NotComputable, is_as_made, saves_now
from disthooks.saved.recompute.program import Norms, Planner, Program
from disthooks.saved.recompute.verify import MOST_PLACES, Proofs, Recompute, Verification

# [Note: an origin is no cycle]
# An `Origin` holds the node that made its tensor until the contents of the tensor are taken. A node whose operator
# saves its own output (tanh, relu, exp) holds the packed value of that output, and so the origin: a cycle through C++
# that no collector sees. The graph would stay in memory although the user dropped it, until the next operator saves
# something. So the program of such a tensor is planned when the tensor is packed, and its origin holds the program
# instead of the node: a program holds values that were saved before, and no node. For other tensors planning waits,
# because the same operator may save the values that they can be computed from. A node of the user's own
# (`autograd.Function`) has no formula, and may have attributes that lead to anything: its outputs have no origin.

#: The dtypes that a tensor of the key's dtype may be a widened copy of.
_WIDENED = {
    torch.float32: (torch.bfloat16, torch.float16),
    torch.float64: (torch.float32, torch.bfloat16, torch.float16),
}


#: The last tensors that a lossy pipeline holds, so that programs can be verified with exact inputs.
_EXACT_TENSORS = 8


class Narrow(NamedTuple):
    """The dtype that a tensor was widened from, and the verification that proved it."""

    dtype: torch.dtype
    verification: Verification


class Origin(NamedTuple):
    """The node that made a packed tensor, kept for the short time until the contents of the tensor are taken.

    Attributes:
        context: of the forward in which the tensor was packed.
        edge: the output of the node that made the tensor; None once the program is planned.
        layout: how the tensor lies in its storage.
        planned: the program, if it was planned when the tensor was packed.
    """

    context: RecomputeContext
    edge: Edge | None
    layout: Layout
    planned: Program | None = None

    def without_node(self, device: torch.device) -> Origin:
        """This origin, planned now if its node saves its own output. See [Note: an origin is no cycle]."""
        if self.edge is None or not saves_now(self.edge.node):
            return self
        return self._replace(edge=None, planned=self.context.plan(self.edge, self.layout, device))

    def program(self, original: torch.Tensor) -> Program | None:
        """The program that computes the tensor, if it is known and proven to give the bits of ``original``."""
        return self.context.program(self, original)

    def narrow(self, original: torch.Tensor) -> Narrow | None:
        """The dtype that the tensor was widened from, if the graph says so and the bits of ``original`` prove it."""
        return self.context.narrow(self, original)


class RecomputeContext:
    """Plans the programs of one forward and verifies them.

    Args:
        pipeline: the open pipeline of the attachment; it has the verifications of its places. If stored contents do not
            come back bit for bit, a verification needs the exact inputs of a program: the last tensors are held for
            it, as long as some place is not settled.
        module_name: the name of the module, for errors and reports.
        module: the module whose forward it is; None in a ``saving`` block.
    """

    def __init__(self, pipeline: OpenPipeline, module_name: str, module: nn.Module | None) -> None:
        self._pipeline, self._counters, self._module_name = pipeline, pipeline.counters, module_name
        self._norms = Norms(module)
        known = list(pipeline.verifications.values())
        needs_exact = not pipeline.is_lossless and not (known and all(each.is_settled for each in known))
        self._exact: collections.deque[torch.Tensor] = collections.deque(maxlen=_EXACT_TENSORS if needs_exact else 0)

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
        """The program that computes the output of ``edge``, if the graph tells one. It is not verified yet."""
        steps = cast(Recompute, self._pipeline.recompute).steps
        return Planner(self._counters, self._norms, steps).program(edge, layout, device)

    def program(self, origin: Origin, original: torch.Tensor) -> Program | None:
        """The verified program of ``origin``. See :meth:`Origin.program`."""
        program = origin.planned
        if origin.edge is not None:
            program = self.plan(origin.edge, origin.layout, original.device)
        if program is None or not program.has_its_inputs():
            return None
        verification = self._verification(program.name, program.key)
        variant = verification.choose_variant(program.run_exact, program.variants, original)
        if variant is None:
            if verification.is_different:
                self._counters.count_differed(verification.where, original.nbytes)
            return None
        program.variant, program.verification = variant, verification
        return program

    def narrow(self, origin: Origin, original: torch.Tensor) -> Narrow | None:
        """The verified dtype that the tensor of ``origin`` was widened from. See :meth:`Origin.narrow`."""
        if origin.edge is None or node_name(origin.edge.node) != "ToCopyBackward0":
            return None
        try:
            reader = NodeReader(origin.edge)
            dtype = reader.dtype_of(reader.input(0))
        except NotComputable:
            return None
        if dtype not in _WIDENED.get(original.dtype, ()):
            return None
        verification = self._verification("narrow", (dtype, origin.layout, original.device))
        variant = verification.choose_variant(lambda _: original.to(dtype).to(original.dtype), 1, original)
        return None if variant is None else Narrow(dtype, verification)

    def _verification(self, name: str, key: Any) -> Verification:
        """The verification of the place ``key`` in this module; ``name`` says its operators in errors."""
        of_attachment = self._pipeline.verifications
        found = of_attachment.get((self._module_name, key))
        if found is None:
            if len(of_attachment) > MOST_PLACES:
                of_attachment.clear()
            where = f"{self._module_name!r} ({name})" if self._module_name else f"({name})"
            found = of_attachment[self._module_name, key] = cast(Proofs, self._pipeline.proofs).verification(
                (self._module_name, key), where, cast(Recompute, self._pipeline.recompute).check == "always"
            )
        return found


def fills_storage(tensor: torch.Tensor) -> bool:
    """Whether the elements of ``tensor`` are all of its storage, each once, with no conj or neg bit."""
    if type(tensor) is not torch.Tensor or tensor._is_view() or tensor.is_conj() or tensor.is_neg():
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
    """Contents that are dropped if a verified program computes them again, and go into the store if none does.

    If a tensor is a widened copy of a narrow tensor that nobody saved, the store gets it in the narrow dtype.
    """

    __slots__ = ("_narrow", "_origin", "_program", "_wide")

    def __init__(self, origin: Origin, *args: Any) -> None:
        super().__init__(*args)
        self._origin: Origin | None = origin  # None once the contents are taken
        self._program: Program | None = None
        self._wide: torch.dtype | None = None
        self._narrow: Narrow | None = None
        self.is_in_order = self.is_in_order and self.first_layout == origin.layout

    @property
    def is_intact(self) -> bool:
        """Whether the contents can be had as they were saved: a program needs all its inputs to be intact."""
        if self.is_offloaded and self._program is not None:
            return self._program.has_its_inputs()
        return super().is_intact

    def prepare(self) -> None:
        """Drop the node that holds this content. See [Note: an origin is no cycle]."""
        if self._origin is not None:
            self._origin = self._origin.without_node(self.alias.device)

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

    def _offload(self, storage: torch.UntypedStorage) -> bool:
        origin = self._origin
        if self._copy is not None:
            storage = self._copy.untyped_storage()  # the contents as they were saved: the user may have written since
        if origin is not None and not self.is_volatile:
            original = origin.layout.over(storage)
            program = origin.program(original)
            if program is not None:
                self._program, self.cost = program, program.cost
                self.counters.count_recomputed(program.name, self.nbytes, self.module_name)
                return True
            self._narrow = origin.narrow(original)
            self._wide = None if self._narrow is None else original.dtype
        if self._narrow is None or self._wide is None:
            return super()._offload(storage)
        self.cost, self.is_in_order = 1, False
        if self._copy is not None:
            # The store gets narrow contents, while a tensor that is saved again is compared with the wide ones.
            self.release_copy()
            self._weak_copy, self._copy = None, self._store.own(self.content(storage))
        is_taken = super()._offload(storage)
        if is_taken:
            narrow = self.nbytes * self._narrow.dtype.itemsize // self._wide.itemsize
            self.counters.count_recomputed("cast", self.nbytes - narrow, self.module_name)
        return is_taken

    def content(self, storage: torch.UntypedStorage, typed: bool = False) -> torch.Tensor:
        """The contents of ``storage``, in the narrow dtype if there is one."""
        if self._narrow is None or self._wide is None:
            return super().content(storage, typed)
        elements = self.nbytes // self._wide.itemsize
        wide = torch.empty(0, dtype=self._wide, device=self.alias.device).set_(storage, 0, (elements,), (1,))
        return wide.to(self._narrow.dtype)

    def _restore(self) -> torch.Tensor:
        if self._program is not None:
            return self._program.run()
        if self._narrow is not None:
            self._narrow.verification.raise_if_broken(self.alias.device)
        content = super()._restore()
        return content if self._wide is None else content.to(self._wide)
