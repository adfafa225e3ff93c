"""For trying accelerate's and DeepSpeed's files where there is no GPU: put this folder first on PYTHONPATH.

    PYTHONPATH=launch/cpu accelerate launch --config_file launch/accelerate/fsdp2.yaml --num_processes 2 ...

Python imports this file at its start, so the training script stays as it is. What it changes:

- accelerate (seen with 1.15) asks for CUDA where it chooses the backend, and without it every process believes to be
  alone. Here the choice is gloo, and the device the CPU. That replaces a private function: for trying, not for runs.
- DeepSpeed (seen with 0.19) compiles an operator for shared memory first, a minute, and waits for ever for the lock of
  a compiler that was killed. It does without.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
os.environ["ACCELERATE_BYPASS_DEVICE_MAP"] = "true"  # DDP gets no device_ids
if os.environ.get("FSDP_VERSION") == "1":  # what accelerate has no device for; each rank makes the same weights itself
    os.environ["FSDP_SYNC_MODULE_STATES"] = os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"


def _accelerate_uses_gloo(state: Any) -> None:
    def prepare_backend(self: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        if "LOCAL_RANK" not in os.environ:
            return original(self, cpu, *args, **kwargs)
        return "gloo", state.DistributedType.MULTI_CPU if cpu else state.DistributedType.MULTI_GPU

    original = state.PartialState._prepare_backend
    state.PartialState._prepare_backend = prepare_backend


def _deepspeed_compiles_nothing(comm: Any) -> None:
    comm.build_shm_op = lambda: None


class _Patches(importlib.abc.MetaPathFinder):
    """Changes a module when it is imported, so that a process that does not use it does not import it."""

    waiting = {"accelerate.state": _accelerate_uses_gloo, "deepspeed.comm.torch": _deepspeed_compiles_nothing}  # noqa: RUF012

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The module's own spec, whose loader changes the module when it is done."""
        change = self.waiting.pop(name, None)
        spec = importlib.util.find_spec(name) if change else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Patches())
