"""``CallContext``: random number generators and autocast, as a call of a function finds them."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


class CallContext(NamedTuple):
    """The states of random number generators (torch's on the CPU and on a device, numpy's and Python's), and autocast.

    >>> before = CallContext.now(torch.device("cpu"))
    >>> drawn = torch.rand(3), random.random()
    >>> before.put_back_random()
    >>> bool((torch.rand(3) == drawn[0]).all()), random.random() == drawn[1]
    (True, True)
    """

    device: torch.device
    cpu: torch.Tensor
    on_device: torch.Tensor | None
    numpy: Any
    python: Any
    autocast: list[tuple[str, bool, torch.dtype]]

    @classmethod
    def now(cls, device: torch.device) -> CallContext:
        on_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        numpy = None if (found := sys.modules.get("numpy")) is None else found.random.get_state()
        kinds = dict.fromkeys(("cpu", device.type))
        autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        return cls(device, torch.get_rng_state(), on_device, numpy, random.getstate(), autocast)

    def put_back_random(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.on_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.on_device, self.device)
        if self.numpy is not None:
            sys.modules["numpy"].random.set_state(self.numpy)
        random.setstate(self.python)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Inside, random numbers and autocast are as they were, and gradients are made."""
        self.put_back_random()
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            for kind, is_enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, is_enabled))
            yield

    def to_json(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What JSON can hold, and the tensors beside it; :meth:`from_json` reads them."""
        numpy = None if self.numpy is None else [self.numpy[0], self.numpy[1].tolist(), *self.numpy[2:]]
        autocast = [(kind, is_enabled, str(dtype).removeprefix("torch.")) for kind, is_enabled, dtype in self.autocast]
        facts = {"device": str(self.device), "numpy": numpy, "python": self.python, "autocast": autocast}
        return facts, {"random.cpu": self.cpu} | ({} if self.on_device is None else {"random.device": self.on_device})

    @classmethod
    def from_json(
        cls, facts: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device
    ) -> CallContext:
        """The context on another device: random numbers of a GPU are put back on a GPU alone."""
        kind = torch.device(facts["device"]).type
        numpy = facts["numpy"] if "numpy" in sys.modules else None
        version, state, gauss = facts["python"]
        autocast = [
            (device.type if each == kind else each, on, getattr(torch, dt)) for each, on, dt in facts["autocast"]
        ]
        on_device = tensors.get("random.device") if device.type == kind else None
        return cls(device, tensors["random.cpu"], on_device, numpy, (version, tuple(state), gauss), autocast)
