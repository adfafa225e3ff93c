"""The codecs' kernels without a GPU: interpreted, and compiled for what is not there."""

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

from disthooks.saved.codecs import blocks, cast, quantize
from disthooks.saved.codecs.blocks import limits
from tests.support import ROOT

KERNELS = ROOT / "tests" / "support" / "interpreted_kernels.py"
needs_triton = pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
KINDS = {
    "8": quantize._KINDS[8],
    "4": quantize._KINDS[4],
    "e4m3": cast._KINDS[torch.float8_e4m3fn],
    "e5m2": cast._KINDS[torch.float8_e5m2],
}


def test_on_a_cpu_triton_is_not_even_imported() -> None:
    work = "import sys, torch, disthooks as dh; dh.Quantize().encode(torch.ones(999)); print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", work], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_device_where_kernels_do_not_work_is_said_once() -> None:
    blocks._works.cache_clear()
    try:
        with pytest.warns(UserWarning, match="many torch operations instead of one kernel on meta"):
            assert not blocks._works(torch.device("meta"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not blocks._works(torch.device("meta"))
    finally:
        blocks._works.cache_clear()


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
def test_interpreted_they_give_the_bits_of_torch() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "-p",
            "no:cacheprovider",
            str(ROOT / "tests/support/interpreted_kernels.py"),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "35 passed" in done.stdout, done.stdout[-500:]


def compiled(name: str, types: dict[str, str], constants: dict[str, object], capability: int) -> str:
    """PTX of a kernel for a device of ``capability``; ptxas has accepted it and made no use of local memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from disthooks.saved.codecs import kernels

    kernel = getattr(kernels, name)
    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    aligned = {(places[n],): [["tt.divisibility", 16]] for n, kind in types.items() if kind[0] == "*" or n == "run"}
    signature = {n: types.get(n, "constexpr") for n in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"num_warps": 4, "enable_fp_fusion": False, "maxnreg": 64}
    binary = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert b".nv.local" not in binary.asm["cubin"]  # nothing is spilled
    return binary.asm["ptx"]


def accesses(ptx: str) -> collections.Counter:
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
    ptx = compiled("encode", types, shared | constants, capability)
    wide = 16 // (4 if dtype == "fp32" else 2)
    assert accesses(ptx)["ld.global.v4.b32"] == 16 // wide  # of the 16 elements of a thread, but in the last tile
    assert accesses(ptx)["st.global.v2.b32" if name == "4" else "st.global.v4.b32"] == 1
    assert ".ftz" not in ptx
    assert "fma.rn.f32" not in ptx or name[0] == "e"
    if name == "e4m3":
        assert "cvt.rn.satfinite.e4m3x2.f32" in ptx
    types = {"codes_ptr": "*u8", "scales_ptr": "*fp32", "out_ptr": f"*{dtype}", "n": "i64"}
    ptx = compiled("decode", types, shared, capability)
    assert accesses(ptx)["ld.global.v2.b32" if name == "4" else "ld.global.v4.b32"] == 1
    assert accesses(ptx)["st.global.v4.b32"] == 16 // wide


@pytest.mark.second_tier
@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize(("name", "loads", "stores"), [("pack", 8, 1), ("unpack", 1, 8)])
def test_compiled_bits_are_read_and_written_wide(name: str, loads: int, stores: int) -> None:
    types = {"bools_ptr": "*u8", "packed_ptr": "*u8", "n": "i64", "run": "i32"}
    found = accesses(compiled(name, types, {"WORDS": 512}, 90))
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (loads, stores)
