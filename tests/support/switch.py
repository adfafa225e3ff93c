"""The same tests on a GPU: ``DISTHOOKS_DEVICE=cuda`` makes a device the default of the tests marked any_device.

    make test-gpu                        # DISTHOOKS_DEVICE=cuda; pieces: make test-gpu ARGS="-k 'every_op'"
    DISTHOOKS_DEVICE=sim python -m pytest $(python tests/support/switch.py)      # on the simulated accelerator

Each tensor that such a test makes without saying where is on the device then. Run as a script, this file prints the
files; with a kind of device, what is wrong if there is none.
"""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._device import DeviceContext

LAWS = pathlib.Path(__file__).parents[1] / "laws"
KIND = os.environ.get("DISTHOOKS_DEVICE", "cpu")
#: The files with tests that are marked any_device.
FILES = sorted(path.name for path in LAWS.glob("test_*.py") if "pytest.mark.any_device" in path.read_text())
_NARROW = "of the CPU's autocast; tests/gpu/test_saved_gpu.py has a GPU's, whose proof is read a forward later"
#: Tests that are of the CPU alone, by the beginning of their name, and why.
EXCEPT = {
    "test_training_in_lower_precision_": _NARROW,
    "test_an_autocast_copy_": _NARROW,
    "test_a_copy_": _NARROW,
    "test_a_weight_that_changed_uncounted_": _NARROW,
    "test_a_stale_copy_": _NARROW,
    "test_a_replicas_copy_": _NARROW,
}
if KIND == "sim":
    EXCEPT |= {
        "test_gradients_of_modules_attached_in_place_are_exact[recurrent-": "no fused recurrent kernel there",
        "test_exotic_tensors_are_kept_and_counted": "the simulated accelerator has no sparse tensors",
        "test_every_kind_of_tensor_is_exact": "nor those, nor may torch set the data of a conjugate view there",
        "test_gradients_of_every_operator": "minutes; linalg.lstsq raises something else on the simulated accelerator",
    }


class Here(DeviceContext):
    """The default device; what a generator of the CPU draws is drawn there, and so the same on each device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        generator = given.get("generator")
        if generator is None or generator.device.type != "cpu" or given.get("device") is not None:
            return super().__torch_function__(func, types, args, given)
        requires_grad = given.pop("requires_grad", False)
        return func(*args, **given, device="cpu").to(self.device).requires_grad_(requires_grad)


def load() -> None:
    """Have the device there before the first backward of the process, which starts a thread for each."""
    if KIND == "sim":
        from tests.support.sim import simulated

        simulated.load()


def repeatable(on: bool = True) -> None:
    """Have CUDA's kernels give the same bits each time, where there are such; others only warn."""
    torch.use_deterministic_algorithms(on, warn_only=True)
    torch.backends.cudnn.deterministic = on
    for kind in ("flash", "mem_efficient", "cudnn"):  # fused attention adds up in any order
        getattr(torch.backends.cuda, f"enable_{kind}_sdp")(not on)


def mark(items: list[pytest.Item]) -> None:
    """On another device than the CPU: run the laws that are marked any_device, and skip those of the CPU alone."""
    if KIND == "cpu":
        return
    for item in [item for item in items if item.path.parent == LAWS]:
        reasons = [why for name, why in EXCEPT.items() if item.name.startswith(name)]
        if item.get_closest_marker("any_device") is None and item.get_closest_marker("gpu") is None:
            items.remove(item)
        elif reasons:
            item.add_marker(pytest.mark.skip(reason=reasons[0]))


@pytest.fixture(autouse=True)
def on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """The device is where a marked test makes its tensors."""
    if KIND == "cpu" or request.node.get_closest_marker("any_device") is None:
        yield
        return
    if not torch.accelerator.is_available():
        pytest.skip(f"DISTHOOKS_DEVICE={KIND}, and there is none")
    if KIND == "cuda":
        repeatable()
    try:
        with Here(KIND):
            yield
        torch.accelerator.synchronize()
    finally:
        if KIND == "cuda":
            repeatable(False)


def refuse(kind: str) -> str | None:
    """Why nothing of ``make test-gpu`` would run on ``kind``: all of it would be skipped, and look well."""
    if kind == "sim" or (torch.accelerator.is_available() and kind == torch.accelerator.current_accelerator().type):
        return None
    return f"there is no {kind} device here; on the simulated one (needs g++): make test-gpu DEVICE=sim"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(refuse(sys.argv[1]))
    print(*[os.path.relpath(LAWS / name) for name in FILES])
