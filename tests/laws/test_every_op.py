"""Law 1 over torch's own operator database: a sample of it; every tensor really goes to the store."""

from __future__ import annotations

import contextlib
import pathlib
import warnings

import pytest
import torch
from torch.utils._pytree import tree_leaves

import disthooks as dh

EVERY = 7  # each 7th operator

pytest.importorskip("expecttest", reason="torch's operator database needs expecttest")


def _gradients(op: object, sample: object, context: contextlib.AbstractContextManager[object]) -> list | None:
    leaves = [
        leaf
        for leaf in tree_leaves((sample.input, sample.args, sample.kwargs))
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad
    ]
    torch.manual_seed(0)
    with context:
        result = sample.output_process_fn_grad(op(sample.input, *sample.args, **sample.kwargs))
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        return None
    torch.manual_seed(1)
    directions = [torch.randn_like(t) for t in outputs]
    return list(torch.autograd.grad(outputs, leaves, directions, allow_unused=True))


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    if left.layout is not torch.strided:
        left, right = left.to_dense(), right.to_dense()
    return torch.equal(torch.nan_to_num(left), torch.nan_to_num(right)) and left.stride() == right.stride()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients_of_a_sample_of_operators(dtype: torch.dtype, tmp_path: pathlib.Path) -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    line = dh.pipeline(dh.AtLeast(0), dh.OnDisk(tmp_path))
    wrong: set[str] = set()
    samples = moved = 0
    ops = [op for op in op_db if op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for op in ops[::EVERY]:
            for sample in op.sample_inputs("cpu", dtype, requires_grad=True):
                truth = _gradients(op, sample, contextlib.nullcontext())
                if truth is None:
                    continue
                saved = dh.saving(line)
                got = _gradients(op, sample, saved)
                samples, moved = samples + 1, moved + saved.report().moved
                if not all(map(_same, truth, got)):
                    wrong.add(op.name)
    print(f"{samples} samples of {len(ops[::EVERY])} operators, {moved} bytes moved")
    assert wrong == set()
    assert samples > 500
    assert moved > 100_000
