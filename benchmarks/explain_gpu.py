"""How wrong ``dh.explain`` is on a GPU: saved bytes and the peak of a real step, beside what was predicted.

    make bench NAME=explain_gpu                                 # or: python benchmarks/explain_gpu.py --budget 540
    python benchmarks/explain_gpu.py --only "llama bf16 flash"  # one case
    python benchmarks/explain_gpu.py --device cpu --size tiny   # to see that it runs

Ten models, in float32 and under bfloat16 autocast, with each backend of attention. Each case has its own process. It
predicts from fake tensors of the CPU, with ``device="cuda"``. Then it trains three real steps on the GPU with AdamW;
gradients are None before each. The peak is that of the second step, by ``torch.cuda.max_memory_allocated()``. The
saved bytes are those of the third, by plain saved-tensor hooks: each storage once, without weights and buffers.

The saved bytes may be 1% off and the peak 3%; the exit code is 1 if one case is beyond that, or failed. Cases that
tell most come first, and those that found no time are named. torch and transformers are all that it needs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import functools
import gc
import json
import pathlib
import platform
import statistics
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves
from written import reason, write

import disthooks as dh
from disthooks.errors import UsageError
from tests.support import nets, zoo

HERE = pathlib.Path(__file__).parent
MIB = 1 << 20
SAVED, PEAK = 0.01, 0.03
DTYPES = {"fp32": None, "bf16": torch.bfloat16}
#: What torch may use for a backend, in this order: what cannot run a call leaves it to the next.
BACKENDS = {
    "flash": [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "cudnn": [SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
    "math": [SDPBackend.MATH],
}
Built = tuple[nn.Module, Any]


def _decoder(model: str, config: str, **more: int) -> Built:
    sizes = {"vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 2048} | more
    return zoo.hf(model, config, **sizes, use_cache=False), zoo.labelled(32000, 4, 1024)


def _gpt2() -> Built:
    sizes = {"n_embd": 768, "n_layer": 12, "n_head": 12, "use_cache": False}
    return zoo.hf("GPT2LMHeadModel", "GPT2Config", **sizes), zoo.labelled(50257, 4, 1024)


def _bert() -> Built:
    return zoo.hf("BertForMaskedLM", "BertConfig"), zoo.labelled(30522, 16, 512)


def _vit() -> Built:
    sizes = {"hidden_size": 768, "num_labels": 1000}
    images, classes = torch.randn(64, 3, 224, 224), torch.randint(0, 1000, (64,))
    return zoo.hf("ViTForImageClassification", "ViTConfig", **sizes), {"pixel_values": images, "labels": classes}


def _t5() -> Built:
    model = zoo.hf("T5ForConditionalGeneration", "T5Config", num_layers=6, use_cache=False, decoder_start_token_id=0)
    return model, {"input_ids": zoo.tokens(32000, 8, 512), "labels": zoo.tokens(32000, 8, 256)}


def _opt() -> Built:
    sizes = {"vocab_size": 32000, "hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12}
    sizes |= {"num_attention_heads": 12, "max_position_embeddings": 2048, "word_embed_proj_dim": 768}
    return zoo.hf("OPTForCausalLM", "OPTConfig", **sizes, use_cache=False), zoo.labelled(32000, 4, 1024)


def _network(make: Callable[[], nn.Module], *shape: int) -> Built:
    return make(), (torch.randn(shape),)


def _encoder() -> Built:
    layer = nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True)
    return nn.TransformerEncoder(layer, 8, enable_nested_tensor=False), (torch.randn(16, 512, 768),)


class Model(NamedTuple):
    """A model of the table.

    Attributes:
        build: makes it and its inputs.
        tiny: what takes its place in a tiny run, in the zoo.
        has_attention: whether the backend of attention matters to it.
    """

    build: Callable[[], Built]
    tiny: str
    has_attention: bool = True


MODELS: dict[str, Model] = {
    "llama": Model(functools.partial(_decoder, "LlamaForCausalLM", "LlamaConfig"), "llama"),
    "resnet152": Model(lambda: zoo.resnet152_full(batch=64), "resnet152", has_attention=False),
    "gpt2": Model(_gpt2, "gpt2"),
    "bert": Model(_bert, "bert"),
    "vit": Model(_vit, "vit"),
    "qwen3": Model(functools.partial(_decoder, "Qwen3ForCausalLM", "Qwen3Config", head_dim=64), "qwen3"),
    "encoder": Model(_encoder, "translator"),
    "unet": Model(functools.partial(_network, nets.UNet, 32, 3, 512, 512), "unet", has_attention=False),
    "opt": Model(_opt, "opt"),
    "t5": Model(_t5, "t5"),
}


class Case(NamedTuple):
    """A model, a dtype and a backend; "" where the model has no attention."""

    model: str
    dtype: str
    backend: str

    @property
    def name(self) -> str:
        return " ".join(filter(None, self))


def cases() -> list[Case]:
    """All, the most telling first: what most people train, then the other backends, then those that fall back."""
    found = []
    for pairs in (
        [("bf16", "flash"), ("fp32", "efficient")],
        [("bf16", "math"), ("bf16", "cudnn")],
        [("bf16", "efficient"), ("fp32", "math")],
        [("fp32", "flash"), ("fp32", "cudnn")],
    ):
        for name, model in MODELS.items():
            found += [Case(name, dtype, backend if model.has_attention else "") for dtype, backend in pairs]
    return list(dict.fromkeys(found))


# -- one case


def built(case: Case, size: str) -> Built:
    """The model in training mode, and its inputs, on the default device."""
    model = MODELS[case.model]
    module, inputs = zoo.ZOO[model.tiny]() if size == "tiny" else model.build()
    return module.train(), inputs


def loss_of(output: Any) -> torch.Tensor:
    """The loss that a model returned, or the mean of the squares of its first tensor."""
    given = getattr(output, "loss", None)
    if isinstance(given, torch.Tensor):
        return given
    first = next(each for each in tree_leaves(output) if isinstance(each, torch.Tensor) and each.requires_grad)
    return first.float().square().mean()


def device_of(kind: str) -> str:
    """The name of this machine's GPU if ``dh.explain`` knows it, or else "cuda"; "cpu" for a CPU."""
    if kind == "cpu":
        return kind
    from disthooks.predict.hardware.devices import device_named

    name = torch.cuda.get_device_name()
    try:
        device_named(name)
    except UsageError:
        return "cuda"
    return name


def predicted(case: Case, kind: str, size: str) -> dict[str, Any]:
    """What ``dh.explain`` says from fake tensors of the CPU."""
    begin = time.perf_counter()
    said = dh.explain(
        lambda: built(case, size),
        optimizer="adamw",
        device=device_of(kind),
        autocast=DTYPES[case.dtype],
        backend=None if kind == "cpu" else case.backend or None,
        loss=loss_of,
    )
    found = {"saved_bytes": said.saved_bytes, "peak_bytes": said.peak_bytes, "peak_range": list(said.peak_range)}
    return found | {"phase": said.peak.phase, "seconds": round(time.perf_counter() - begin, 2)}


class Steps:
    """A real model on the device, its inputs and its optimizer."""

    def __init__(self, case: Case, kind: str, size: str) -> None:
        self.case, self.kind = case, kind
        torch.manual_seed(0)
        with torch.device(kind):
            self.model, self.inputs = built(case, size)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def step(self, hooks: Any = None) -> None:
        """Forward and loss inside ``hooks``, backward, the optimizer's step; then gradients are None."""
        with hooks or contextlib.nullcontext():
            loss = self._loss()
        loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self) -> torch.Tensor:
        dtype = DTYPES[self.case.dtype]
        chosen: Any = contextlib.nullcontext()
        if self.case.backend and self.kind == "cuda":
            chosen = sdpa_kernel(BACKENDS[self.case.backend], set_priority=True)
        with chosen, torch.autocast(self.kind, dtype or torch.bfloat16, enabled=dtype is not None):
            inputs = self.inputs
            return loss_of(self.model(**inputs) if isinstance(inputs, Mapping) else self.model(*inputs))

    def peak(self) -> int:
        """The most bytes of a step."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.step()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_allocated()
        from tests.support.oracle import LivingStorages  # a CPU has no statistics of its allocator

        living = LivingStorages(self.model, self.optimizer, tree_leaves(self.inputs))
        living.begin()
        with living:
            self.step()
        return living.peak

    def saved(self) -> int:
        """The bytes of the storages that autograd holds when the forward has ended, without weights and buffers."""
        weights = {each.untyped_storage()._cdata for each in [*self.model.parameters(), *self.model.buffers()]}
        counted: list[int] = []
        self.step(_Counting(weights, counted))
        return counted[0]


class _Held:
    """What autograd holds for a saved tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: torch.Tensor) -> None:
        # The output of a node, saved by that node, would hold the node, and the node holds this.
        self.tensor = tensor if tensor.is_leaf else tensor.detach()


class _Counting:
    """Saved-tensor hooks; at their end ``counted`` gets the bytes that autograd holds, without ``weights``."""

    def __init__(self, weights: Iterable[int], counted: list[int]) -> None:
        self._weights, self._counted = set(weights), counted
        self._held: list[weakref.ref[_Held]] = []
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: torch.Tensor) -> _Held:
        held = _Held(tensor)
        self._held.append(weakref.ref(held))
        return held

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)
        tensors = [held.tensor for held in (reference() for reference in self._held) if held is not None]
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
        self._counted.append(sum(nbytes for address, nbytes in storages.items() if address not in self._weights))


def one(case: Case, kind: str, size: str) -> dict[str, Any]:
    """The prediction of a case, what a real run measured, and how far apart they are."""
    said = predicted(case, kind, size)
    steps = Steps(case, kind, size)
    steps.step()
    peak = steps.peak()
    saved = steps.saved()
    off = {
        "saved_off": round(said["saved_bytes"] / saved - 1, 6),
        "peak_off": round(said["peak_bytes"] / peak - 1, 6),
    }
    met = abs(off["saved_off"]) <= SAVED and abs(off["peak_off"]) <= PEAK
    return {"predicted": said, "saved_bytes": saved, "peak_bytes": peak} | off | {"met": met}


# -- all of them


def own_process(case: Case, options: argparse.Namespace, end: float) -> dict[str, Any]:
    """The case in a process of its own; what it found, or why it found nothing."""
    left = end - time.monotonic()
    if left <= 0:
        return {"not_run": "no time was left"}
    command = [sys.executable, str(HERE / "explain_gpu.py"), "--child", case.name]
    command += ["--device", options.device, "--size", options.size]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return {"not_run": "no time was left"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}
    return json.loads(lines[-1])


def child(name: str, options: argparse.Namespace) -> None:
    """The last line of the output is the JSON of the case ``name``."""
    case = next(each for each in cases() if each.name == name)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = one(case, options.device, options.size)
    except ImportError as error:
        found = {"not_run": reason(error)}
    except Exception as error:
        found = {"failed": reason(error)}
    print(json.dumps(found))


def line(name: str, row: Mapping[str, Any]) -> str:
    """A row of the table."""
    if "met" not in row:
        return f"{name:24} " + (f"not run: {row['not_run']}" if "not_run" in row else f"FAILED: {row['failed']}")
    said = row["predicted"]
    saved = f"{said['saved_bytes'] / MIB:12.2f}{row['saved_bytes'] / MIB:12.2f}{100 * row['saved_off']:9.3f}%"
    peak = f"{said['peak_bytes'] / MIB:12.2f}{row['peak_bytes'] / MIB:12.2f}{100 * row['peak_off']:9.3f}%"
    return f"{name:24}{saved}{peak}  {'met' if row['met'] else 'MISSED'}"


def machine(kind: str) -> dict[str, Any]:
    """Where it ran."""
    found: dict[str, Any] = {"device": kind, "python": platform.python_version(), "torch": torch.__version__}
    found["gpu"] = torch.cuda.get_device_name() if kind == "cuda" else None
    return found


def summary(rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """How many cases met the bounds, and how far they are off."""
    ran = [row for row in rows.values() if "met" in row]
    found: dict[str, Any] = {
        "cases": len(rows),
        "met": sum(row["met"] for row in ran),
        "missed": [name for name, row in rows.items() if row.get("met") is False],
        "failed": [name for name, row in rows.items() if "failed" in row],
        "not_run": [name for name, row in rows.items() if "not_run" in row],
        "bounds": {"saved": SAVED, "peak": PEAK},
    }
    for key in ("saved_off", "peak_off"):
        offs = [abs(row[key]) for row in ran]
        if offs:
            found[key] = {"median": round(statistics.median(offs), 6), "most": max(offs)}
    return found


def main() -> None:
    """Run all cases, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--size", choices=["full", "tiny"], default="full")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds for all")
    parser.add_argument("--jobs", type=int, default=0, help="processes at once; default 4 on a GPU, 1 on a CPU")
    names = [case.name for case in cases()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="CASE", help=", ".join(names))
    parser.add_argument("--json", type=pathlib.Path, help="default results/explain-gpu.json; of a tiny run, nowhere")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options)
        return
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here; to see that this runs: --device cpu --size tiny")
    if options.size == "full":
        options.json = options.json or HERE / "results" / "explain-gpu.json"
    end = time.monotonic() + options.budget
    rows: dict[str, Any] = {name: {"not_run": "the run was ended before"} for name in options.only}
    found = {"machine": machine(options.device), "size": options.size, "rows": rows}
    if options.device == "cpu":
        print("A run to see that it runs: the device is a CPU, and the backends are its own.")
    print(f"{'MiB':24}{'saved: said':>12}{'measured':>12}{'off':>10}{'peak: said':>12}{'measured':>12}{'off':>10}")
    jobs = options.jobs or (4 if options.device == "cuda" else 1)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        chosen = [case for case in cases() if case.name in options.only]
        started = {pool.submit(own_process, case, options, end): case.name for case in chosen}
        for done in concurrent.futures.as_completed(started):
            rows[started[done]] = done.result()
            print(line(started[done], done.result()), flush=True)
            found["summary"] = summary(rows)
            if options.json:
                write(options.json, found)
    print(json.dumps(found["summary"], indent=1))
    sys.exit(1 if found["summary"]["missed"] or found["summary"]["failed"] else 0)


if __name__ == "__main__":
    main()
