"""Law 1, exact, for every operator in torch's own database: outputs and gradients by bits, or the same error."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_map_only

import disthooks as dh
from tests.support.ops import (
    COPYING,
    Outcome,
    Tally,
    differentiable,
    each_dtype,
    gradients,
    outcome,
    pipelines,
    quiet,
    share,
    some,
    tensors,
)
from tests.support.switch import KIND

pytestmark = pytest.mark.any_device
GELSY = "torch gives LAPACK's gelsy pivots from memory that nobody wrote (pytorch#187411); no gradient uses the result"


#: Operators whose outputs, hooks or not, may be rounded otherwise at every call. Their gradients are compared by bits.
NONDETERMINISTIC = {"linalg.lstsq": GELSY, "linalg.lstsq grad_oriented": GELSY}


#: What torch 2.13 computes wrongly on some CPUs, other numbers from call to call: the double backward in bfloat16 of
#: this convolution, where oneDNN runs it.
GARBAGE = {("nn.functional.conv_transpose3d", torch.bfloat16)}

#: Operators that save a view with a version counter of its own, so that torch does not see that an input is changed
#: and computes wrong gradients. A store that copies gives those of the inputs as they were.
UNSEEN = {"kron": "_unsafe_view of its inputs"}
Hooks = contextlib.AbstractContextManager[object]
Run = Callable[[Any, Any, Hooks, Outcome], None]  # of an operator, on a sample


def twice(op: Any, sample: Any, hooks: Hooks, noted: Outcome) -> None:
    """The first backward runs with the hooks on.

    The tensors that it saves for the second backward go through them, too.
    """
    by = differentiable((sample.input, sample.args, sample.kwargs))
    with hooks:
        result = op(sample.input, *sample.args, **sample.kwargs)
        ends = differentiable(sample.output_process_fn_grad(result))
        first, along = gradients(ends, by, create_graph=True)
    noted.outputs = [tensor.detach() for tensor in tensors(result)]
    noted.gradients = [gradient if gradient is None else gradient.detach() for gradient in first]
    noted.gradients += gradients(differentiable(first), [*by, *along])[0]


def once(op: Any, sample: Any, hooks: Hooks, noted: Outcome) -> None:
    with hooks:
        result = op(sample.input, *sample.args, **sample.kwargs)
        ends = differentiable(sample.output_process_fn_grad(result))
    noted.outputs = [tensor.detach() for tensor in tensors(result)]
    by = differentiable((sample.input, sample.args, sample.kwargs))
    noted.gradients = gradients(ends, by)[0]


def changed(what: str, op: Any, sample: Any, hooks: Hooks, noted: Outcome) -> None:
    """Change the inputs or the result in place between forward and backward: backward must raise if they were saved."""
    given = (sample.input, sample.args, sample.kwargs)
    copies = tree_map_only(torch.Tensor, torch.clone, given)
    with hooks:
        result = op(copies[0], *copies[1], **copies[2])
        ends = differentiable(sample.output_process_fn_grad(result))
    if isinstance(hooks, dh.saving):
        hooks._site.pipeline.store.wait()  # a change that torch does not count reaches what is not written yet
    with torch.no_grad():
        for tensor in tensors({"inputs": copies, "result": result}.get(what)):
            tensor.zero_()
    noted.gradients = gradients(ends, differentiable(given))[0]


RUNS: dict[str, Run] = {
    "first order": once,
    "double backward": twice,
    "inputs changed": functools.partial(changed, "inputs"),
    "result changed": functools.partial(changed, "result"),
}


def kinds_of(op: Any) -> dict[str, tuple[Any, Run]]:
    """What is done with a sample: the operator, or its in-place variant on a copy, and how to run it."""

    def in_place(given: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return op.inplace_variant(given.clone(), *args, **kwargs)

    runs = {kind: run for kind, run in RUNS.items() if op.supports_gradgrad or run is not twice}
    kinds = {kind: (op, run) for kind, run in runs.items()}
    if op.inplace_variant and op.supports_inplace_autograd:
        kinds |= {f"in place, {kind}": (in_place, run) for kind, run in runs.items() if kind != "inputs changed"}
    return kinds


def attempt(op: Any, run: Run, sample: Any, hooks: Mapping[str, Hooks], store: str) -> Outcome:
    return outcome(functools.partial(run, op, sample, hooks[store]))


def as_if_seen(op: Any, run: Run, sample: Any, hooks: Mapping[str, Hooks], store: str) -> Outcome:
    """Where torch does not see the change, a store that copies must give the gradients of the inputs as they were."""
    got = attempt(op, run, sample, hooks, store)
    return got if store or got.error else attempt(op, functools.partial(changed, "nothing"), sample, hooks, store)


def name_of(op: Any) -> str:
    return f"{op.name} {op.variant_test_name}".strip()


def dtypes_of(op: Any) -> Any:
    return op.supported_backward_dtypes(KIND) if op.supports_autograd else ()


def samples_of(op: Any, dtype: torch.dtype) -> Any:
    """All samples of an operator, the conjugated ones included.

    They are not seeded one by one, because that is slow.
    """
    conjugated = op.test_conjugated_samples and dtype.is_complex
    return op.sample_inputs(KIND, dtype, requires_grad=True, set_seed=False, include_conjugated_inputs=conjugated)


@pytest.mark.first_tier(dtype=(torch.bfloat16,))
@pytest.mark.full_tier(dtype=(torch.float32, torch.complex64, torch.complex128))
@each_dtype
def test_gradients_of_every_operator(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    lines, tally = pipelines(tmp_path), Tally(dtype, NONDETERMINISTIC)
    with quiet():
        for op, stores in share(op_db, dtypes_of, dtype):
            name = name_of(op)
            saving = {store: dh.saving(lines[store]) for store in stores}
            hooks: dict[str, Hooks] = {"": contextlib.nullcontext(), **saving}
            samples = some(samples_of(op, dtype))
            for sample in samples:
                for kind, (called, run) in kinds_of(op).items():
                    if run is twice and (name, dtype) in GARBAGE:
                        continue
                    groups = {attempt: stores}
                    if name in UNSEEN and kind == "inputs changed":
                        copying = [store for store in stores if store in COPYING]
                        groups = {as_if_seen: copying, attempt: [store for store in stores if store not in COPYING]}
                    for how, group in groups.items():
                        tally.check(name, kind, group, functools.partial(how, called, run, sample, hooks))
            for store in stores:
                tally.add(name, store, len(samples), saving[store].report)
    tally.finish()
