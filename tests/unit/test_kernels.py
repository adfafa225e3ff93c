"""The kernels of codecs and of statistics without a GPU: interpreted, and compiled for what is not there."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch

from disthooks.grads.stats import fused
from disthooks.grads.stats.magnitudes import BINS, first_code
from disthooks.saved.codecs import blocks, cast, quantize
from disthooks.saved.codecs.blocks import limits
from tests.support import ROOT

needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
KINDS = {
    "8": quantize._KINDS[8],
    "4": quantize._KINDS[4],
    "e4m3": cast._KINDS[torch.float8_e4m3fn],
    "e5m2": cast._KINDS[torch.float8_e5m2],
}
ENCODE = "dh.Quantize().encode(torch.ones(999))"
STEP = (
    "model = torch.nn.Linear(3, 2); model(torch.ones(1, 3)).sum().backward()\n"
    "optimizer = torch.optim.SGD(model.parameters())\n"
    "with dh.gradients(model, optimizer, stats=dh.stats.standard()): optimizer.step()"
)


@pytest.mark.parametrize(("work", "module"), [(ENCODE, "triton"), (STEP, "disthooks.grads.stats.kernels")])
def test_on_a_cpu_the_kernels_are_not_even_imported(work: str, module: str) -> None:
    script = f"import sys, torch, disthooks as dh\n{work}\nprint({module!r} in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("works", "more"), [(blocks._works, ()), (fused._works, (torch.float32,))])
def test_a_device_where_kernels_do_not_work_is_named_once(works: Any, more: tuple[object, ...]) -> None:
    works.cache_clear()
    try:
        with pytest.warns(UserWarning, match="many torch operations instead of one kernel on meta"):
            assert not works(torch.device("meta"), *more)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not works(torch.device("meta"), *more)
    finally:
        works.cache_clear()


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("file", "passed"), [("kernels", 35), ("statistics", 30)])
def test_interpreted_they_find_what_torch_finds(file: str, passed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"tests/support/interpreted_{file}.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert f"{passed} passed" in done.stdout, done.stdout[-500:]


def compiled(
    kernel: Any, types: dict[str, str], constants: dict[str, object], capability: int = 90, **options: Any
) -> str:
    """PTX of a kernel for a device of ``capability``; ptxas has accepted it and made no use of local memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n, kind in types.items() if kind[0] == "*" or n == "run"}
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 4, **options})
    assert b".nv.local" not in binary.asm["cubin"]  # nothing is spilled
    return binary.asm["ptx"]


def of_codecs(name: str, *given: Any) -> str:
    from disthooks.saved.codecs import kernels

    return compiled(getattr(kernels, name), *given, enable_fp_fusion=False, maxnreg=64)


def of_statistics(name: str, *given: Any) -> str:
    from disthooks.grads.stats import kernels

    return compiled(getattr(kernels, name), *given)


def accesses(ptx: str) -> collections.Counter[str]:
    return collections.Counter(re.findall(r"(?:ld|st)\.global[\w.:]*", ptx))


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("name", "capability"), [("8", 90), ("4", 90), ("e4m3", 90), ("e5m2", 80)])
def test_compiled_they_read_and_write_wide(name: str, capability: int, dtype: str) -> None:
    kind, (largest, smallest) = KINDS[name], limits(torch.float32)
    shared = {**blocks._shape(128), "BITS": kind.bits, "M": kind.mantissa, "BIAS": kind.bias}
    shared |= {"HARDWARE": capability >= 89, "MOST": kind.codes.most}
    constants = {"STOCHASTIC": name in "84", "LESS": kind.codes.less, "NAN": kind.codes.nan, "LIMIT": largest}
    constants |= {"TINY": smallest, "M0": blocks.MULTIPLIERS[0], "M1": blocks.MULTIPLIERS[1], "ODD": blocks.ODD}
    types = {"x_ptr": f"*{dtype}", "codes_ptr": "*u8", "scales_ptr": "*fp32", "n": "i64", "key0": "i32", "key1": "i32"}
    ptx = of_codecs("encode", types, shared | constants, capability)
    wide = 16 // (4 if dtype == "fp32" else 2)
    assert accesses(ptx)["ld.global.v4.b32"] == 16 // wide  # of the 16 elements of a thread, but in the last tile
    assert accesses(ptx)["st.global.v2.b32" if name == "4" else "st.global.v4.b32"] == 1
    assert ".ftz" not in ptx
    assert "fma.rn.f32" not in ptx or name[0] == "e"
    if name == "e4m3":
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    types = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "out_ptr": f"*{dtype}", "n": "i64"}
    ptx = of_codecs("decode", types, shared, capability)
    assert accesses(ptx)["ld.global.v2.b32" if name == "4" else "ld.global.v4.b32"] == 1
    assert accesses(ptx)["st.global.v4.b32"] == 16 // wide


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("name", "loads", "stores"), [("pack", 8, 1), ("unpack", 1, 8)])
def test_compiled_bits_are_read_and_written_wide(name: str, loads: int, stores: int) -> None:
    types = {"bools_ptr": "*u8", "packed_ptr": "*u8", "n": "i64", "run": "i32"}
    found = accesses(of_codecs(name, types, {"WORDS": 512}, 90))
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (loads, stores)


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
    ptx = of_statistics("read", types | {"copies": "i32", "rows": "i32"}, constants)
    # The 16 elements of a thread are loaded 16 bytes at a time, but in the last tile of a gradient.
    assert accesses(ptx)["ld.global.v4.b32"] == 16 // wide
    # Threads exchange numbers at the end of a chunk only: no lane of a tile is reduced across threads but the codes.
    assert len(re.findall(r"shfl\.sync", ptx)) < 100
    assert bool(re.search(r"(atom|red)\.global", ptx)) == is_counted  # Triton of torch 2.15 takes the second


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
def test_compiled_the_merge_spills_nothing() -> None:
    types = {"table_ptr": "*i64", "partials_ptr": "*fp64", "out_ptr": "*fp64", "gradients": "i32"}
    of_statistics("merge", types, {"CHUNK": fused._CHUNK, "LANES": 256})
