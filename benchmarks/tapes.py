"""Record the tapes of two large models: every size, and the order of saves, reads and releases.

    python benchmarks/tapes.py                # writes benchmarks/tapes/*.json; one minute, and no memory to speak of

The models run on the meta device, which computes shapes and no numbers. A storage is followed from the operator that
makes it until nobody holds it. An operator takes the longer of its bytes at the speed of device memory and its products
at the speed of the matrix units; ``simulated.py`` then scales forward and backward to what a step is assumed to take.
Which storages Recompute drops is read from a small run of the same model on the CPU: the storages that its store gets
have the same contents as those that are saved without it.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import pathlib
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import decoder
import torch
import torch.nn.functional as F
from models import resnet
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

import disthooks as dh
from disthooks.saved.pipeline import pipeline
from disthooks.saved.stores.base import Store
from tests.support.sim.clock import Rates, Saved, Step, Tape

HERE = pathlib.Path(__file__).parent
FOLDER = HERE / "tapes"
SMALLEST = 64 << 10  # bytes: a storage below this stays where it is


class Packed:
    """What autograd holds instead of a saved tensor: the number of its storage, and its shape."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number = number
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.dtype = tensor.dtype


class Recorder(TorchDispatchMode):
    """Follows every storage of one step on the meta device.

    Attributes:
        saved: the storages that were saved.
        steps: what happened, as :class:`tests.support.sim.clock.Tape` has it.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.saved: list[Saved] = []
        self.steps: list[Step] = []
        self._rates = Rates()
        self._live: dict[int, tuple[weakref.ref[Any], int]] = {}  # storages by identity: bytes
        self._maker: dict[int, tuple[str, str]] = {}  # the operator and the module that wrote them last
        self._numbers: dict[int, int] = {}  # storages that are saved, by identity
        self._packs: dict[int, int] = {}  # how many `Packed` there are of a saved storage
        self._again: dict[int, weakref.ref[Any]] = {}  # storages that backward has been given, by number
        self._rest = 0  # bytes that are not saved
        self._told = -1
        self._module = [""]
        self._weights = {id(p.untyped_storage()): p.untyped_storage() for p in (*model.parameters(), *model.buffers())}
        self.flops = 0.0
        self.operators = [0]  # in forward, and in backward
        for tensor in (*model.parameters(), *model.buffers()):
            self._follow(tensor)
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, name=name: self._module.append(name))
            module.register_forward_hook(self._leave)

    def _leave(self, *_: Any) -> None:
        self._module.pop()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        tensors = [t for t in tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor) and t.is_meta]
        made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.is_meta]
        for tensor in made:
            self._follow(tensor)
        if not function.is_view and str(function.overloadpacket) not in (
            "aten.empty",
            "aten.empty_strided",
            "aten.detach",
        ):
            for tensor in made:
                self._maker[id(tensor.untyped_storage())] = (str(function.overloadpacket), self._module[-1])
            count = flop_registry.get(function.overloadpacket)
            flops = float(count(*args, **(kwargs or {}), out_val=result)) if count else 0.0
            nbytes = sum({id(t.untyped_storage()): t.nbytes for t in tensors}.values())
            self.flops += flops
            self.operators[-1] += 1
            self._tell_rest()
            self.steps.append(("run", self._rates.operator(nbytes, flops)))
        return result

    # -- autograd's hooks

    def pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._weights or (key not in self._numbers and storage.nbytes() < SMALLEST) or not tensor.is_meta:
            return tensor
        self._follow(tensor)
        if key not in self._numbers:
            number = self._numbers[key] = len(self.saved)
            maker = self._maker.get(key, ("input", ""))
            self.saved.append(Saved(storage.nbytes(), *maker, str(tensor.dtype).removeprefix("torch.")))
            self._rest -= storage.nbytes()
            self.steps.append(("put", number))
        number = self._numbers[key]
        packed = Packed(number, tensor)
        self._packs[number] = self._packs.get(number, 0) + 1
        weakref.finalize(packed, self._unpacked, number)
        return packed

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        storage = self._storage(packed.number)
        tensor = torch.empty(0, dtype=packed.dtype, device="meta")
        return tensor.set_(storage, packed.offset, packed.size, packed.stride)

    def _storage(self, number: int) -> Any:
        """The storage itself where somebody holds it still, or the one that backward was given, or another like it."""
        found = self._again[number]() if number in self._again else None
        if number not in self._again:
            self.steps.append(("get", number))
            mine = (key for key, other in self._numbers.items() if other == number)
            found = next((self._live[key][0]() for key in mine if key in self._live), None)
        if found is None:
            tensor = torch.empty(self.saved[number].nbytes, dtype=torch.uint8, device="meta")
            found = tensor.untyped_storage()
            self._follow(tensor, number)
        self._again[number] = weakref.ref(found)
        return found

    def _unpacked(self, number: int) -> None:
        self._packs[number] -= 1
        self._drop_if_over(number)

    # -- storages

    def _follow(self, tensor: torch.Tensor, number: int | None = None) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._live and self._live[key][0]() is storage:
            if number is not None and key not in self._numbers:  # it was counted when it was made
                self._numbers[key] = number
                self._rest -= storage.nbytes()
            return
        self._live[key] = (weakref.ref(storage, lambda _: self._died(key)), storage.nbytes())
        if number is None:
            self._rest += storage.nbytes()
        else:
            self._numbers[key] = number

    def _died(self, key: int) -> None:
        _, nbytes = self._live.pop(key)
        self._maker.pop(key, None)
        number = self._numbers.pop(key, None)
        if number is None:
            self._rest -= nbytes
        elif number not in self._again:
            self.steps.append(("release", number))
        if number is not None:
            self._drop_if_over(number)

    def _drop_if_over(self, number: int) -> None:
        """Nobody can read it any more: autograd has let go of it, and so have the operators."""
        is_over = not self._packs.get(number) and number not in self._numbers.values()
        if is_over and ("drop", number) not in self.steps:
            self.steps.append(("drop", number))

    def _tell_rest(self) -> None:
        if self._rest != self._told:
            self._told = self._rest
            self.steps.append(("rest", self._rest))


def record(name: str, model: nn.Module, loss: Callable[[], torch.Tensor], about: dict[str, Any]) -> Tape:
    """The tape of one forward and backward of ``model``, whose gradients are made by it."""
    recorder = Recorder(model)
    with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack):
        result = loss()
        about = about | {"forward_flops": recorder.flops}
        recorder.steps.append(("backward", 0))
        recorder.operators.append(0)
        result.backward()
    about |= {"operators": recorder.operators}
    return Tape(name, tuple(recorder.saved), tuple(_merged(recorder.steps)), about)


def _merged(steps: list[Step]) -> list[Step]:
    """Operators in a row are one, and of several sizes of the rest within a row the largest counts for all of them."""
    merged: list[Step] = []
    for kind, value in steps:
        if kind == "run" and len(merged) > 1 and merged[-1][0] == "run":
            merged[-1] = ("run", merged[-1][1] + value)
        elif kind == "rest" and len(merged) > 1 and merged[-1][0] == "run" and merged[-2][0] == "rest":
            merged[-2] = ("rest", max(merged[-2][1], value))
        else:
            merged.append((kind, value))
    return merged


# -- what Recompute drops, from a small run


class Fingerprints(Store):
    """Keeps tensors as they are, and the fingerprint of each one's contents."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        self.seen.append(fingerprint(tensor))
        return tensor

    def get(self, ticket: torch.Tensor) -> torch.Tensor:
        return ticket

    def drop(self, ticket: torch.Tensor) -> None:
        pass


def fingerprint(tensor: torch.Tensor) -> str:
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().untyped_storage())
    return hashlib.sha256(storage.numpy().tobytes()).hexdigest()


def dropped(model: nn.Module, loss: Callable[[], torch.Tensor], steps: int = 4) -> list[bool]:
    """Whether Recompute drops each storage that a step saves, in the order of saves; vectors do not count.

    Args:
        model: a small one of the same structure.
        loss: of the same batch each time.
        steps: of one attachment; the last one counts, when all places are proven.
    """
    weights = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    saved: dict[int, str] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights and pointer not in saved and tensor.dim() > 1:
            saved[pointer] = fingerprint(tensor)
            alive.append(tensor)  # so that no other storage gets the same place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss().backward()
    store = Fingerprints()
    with dh.save_activations(model, "", pipeline(dh.Recompute(), store)):
        for _ in range(steps):
            store.seen.clear()
            loss().backward()
    stored = set(store.seen)
    return [each not in stored for each in saved.values()]


# -- the two models


class RMSNorm(torch.autograd.Function):
    """The fused norm of a GPU, which saves its input and a number for each row. The meta device has only its parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return grad * x, torch.empty_like(weight)


def rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float | None = None) -> torch.Tensor:
    return RMSNorm.apply(x, weight)


def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, enable_gqa: bool) -> torch.Tensor:
    """The fused attention of a GPU; the meta device would choose the one that makes the matrix of all weights."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def image() -> Tape:
    """ResNet-152 in float32 at batch 256, 224 pixels."""
    depths = (3, 8, 36, 3)
    with torch.device("meta"):
        model, x, labels = resnet(depths), torch.empty(256, 3, 224, 224), torch.empty(256, dtype=torch.long)
    about = {"batch": 256, "pixels": 224, "dtype": "float32", "forward_s": 0.10, "backward_s": 0.20}
    tape = record("ResNet-152 fp32", model, lambda: F.cross_entropy(model(x), labels), about)
    torch.manual_seed(0)
    small, pixels, classes = resnet(depths), torch.randn(2, 3, 96, 96), torch.randint(0, 1000, (2,))
    flags = dropped(small, lambda: F.cross_entropy(small(pixels), classes))
    return flagged(tape, flags)


def language() -> Tape:
    """The decoder of 2 billion parameters in bfloat16 at 8,192 tokens.

    What Recompute drops is said by a rule, because a CPU composes the norm: outputs of a norm, of the activation and of
    the gate. Its formulas know no rotation, no attention and no matrix product.
    """
    config = decoder.SIZES["full"]
    with torch.device("meta"):
        model = decoder.Decoder(config).to(torch.bfloat16)
        model.cos, model.sin = model.cos.to("meta"), model.sin.to("meta")
        tokens = torch.empty(config.batch, config.length, dtype=torch.long)
    about = {"tokens": config.length, "layers": config.layers, "dtype": "bfloat16"}
    about |= {"parameters": sum(p.numel() for p in model.parameters()), "forward_s": 0.08, "backward_s": 0.16}
    about["product_flops"] = 2 * config.batch * config.length * config.width * config.hidden  # of one `up`
    patches = mock.patch.multiple(F, scaled_dot_product_attention=flash, rms_norm=rms_norm)
    with patches:
        tape = record("decoder bf16", model, lambda: model(tokens), about)
    return flagged(tape, [each.operator in ("aten.mul", "aten.silu") for each in tape.saved])


def flagged(tape: Tape, flags: list[bool]) -> Tape:
    if len(flags) != len(tape.saved):
        raise SystemExit(f"{tape.name}: the small run saves {len(flags)} storages, the tape has {len(tape.saved)}")
    pairs = zip(tape.saved, flags, strict=True)
    return dataclasses.replace(tape, saved=tuple(dataclasses.replace(s, is_recomputable=f) for s, f in pairs))


TAPES = {"resnet152": image, "decoder": language}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--to", type=pathlib.Path, default=FOLDER, help="folder for the JSON files")
    options = parser.parse_args()
    options.to.mkdir(exist_ok=True, parents=True)
    for name, make in TAPES.items():
        tape = make()
        tape.write(options.to / f"{name}.json")
        print(
            f"{tape.name}: {len(tape.saved)} storages of at least 64 KiB, {tape.nbytes / 1e9:.2f} GB, of which", end=" "
        )
        print(f"Recompute drops {sum(s.nbytes for s in tape.saved if s.is_recomputable) / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
