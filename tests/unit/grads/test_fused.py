"""The kernels of the statistics without a GPU: interpreted, and compiled for what is not there."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import subprocess
import sys
import warnings

import pytest
import torch

from disthooks.grads.stats import fused
from disthooks.grads.stats.magnitudes import BINS, first_code
from tests.support import ROOT

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")


def test_on_a_cpu_the_kernels_are_not_even_imported() -> None:
    work = (
        "import sys, torch, disthooks as dh\n"
        "model = torch.nn.Linear(3, 2); model(torch.ones(1, 3)).sum().backward()\n"
        "optimizer = torch.optim.SGD(model.parameters())\n"
        "with dh.gradients(model, optimizer, stats=dh.stats.standard()): optimizer.step()\n"
        "print('disthooks.grads.stats.kernels' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_device_where_kernels_do_not_work_is_named_once() -> None:
    fused._works.cache_clear()
    try:
        with pytest.warns(UserWarning, match="many torch operations instead of one kernel on meta"):
            assert not fused._works(torch.device("meta"), torch.float32)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not fused._works(torch.device("meta"), torch.float32)
    finally:
        fused._works.cache_clear()


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
def test_interpreted_they_find_what_torch_finds() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "tests/support/interpreted_statistics.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "30 passed" in done.stdout, done.stdout[-500:]


def compiled(name: str, types: dict[str, str], constants: dict[str, object]) -> str:
    """PTX of a kernel for sm_90; ptxas has accepted it and made no use of local memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from disthooks.grads.stats import kernels

    kernel = getattr(kernels, name)
    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n, kind in types.items() if kind[0] == "*"}
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    assert b".nv.local" not in binary.asm["cubin"]  # nothing is spilled
    return binary.asm["ptx"]


def found(ptx: str, pattern: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(pattern, ptx))


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("is_counted", [True, False])
@pytest.mark.parametrize("dtype", fused._DTYPES, ids=str)
def test_compiled_they_read_wide_and_reduce_once_a_chunk(dtype: torch.dtype, is_counted: bool) -> None:
    import triton.language as tl

    types = {"table_ptr": "*i64", "owners_ptr": "*i64", "partials_ptr": "*fp64", "counts_ptr": "*i64"}
    wide = 16 // dtype.itemsize
    constants = {"DTYPE": getattr(tl, fused._DTYPES[dtype]), "ALIGNED": True, "COUNTED": is_counted, "WIDE": wide}
    constants |= {"DEEP": fused._PER_THREAD // wide, "LANES": fused._LANES, "TILES": fused._TILES}
    constants |= {"FIRST": first_code(torch.float32), "BINS": BINS}
    ptx = compiled("read", types | {"copies": "i32", "rows": "i32"}, constants)
    # The 16 elements of a thread are loaded 16 bytes at a time, but in the last tile of a gradient.
    assert found(ptx, r"ld\.global\.v4\.b32")["ld.global.v4.b32"] == 16 // wide
    # Threads exchange numbers at the end of a chunk only: no lane of a tile is reduced across threads but the codes.
    assert sum(found(ptx, r"shfl\.sync").values()) < 100
    assert bool(found(ptx, r"(atom|red)\.global")) == is_counted  # Triton of torch 2.15 takes the second


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
def test_compiled_the_merge_spills_nothing() -> None:
    types = {"table_ptr": "*i64", "partials_ptr": "*fp64", "out_ptr": "*fp64", "gradients": "i32"}
    compiled("merge", types, {"CHUNK": fused._CHUNK, "LANES": 256})
