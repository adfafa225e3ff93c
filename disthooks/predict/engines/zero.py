"""DeepSpeed's engine on fake tensors: its own code runs, and what it reads from tensors is answered.

Counted: everything that the engine and its ZeRO optimizer hold, found by walking through their attributes, so that flat
buffers, padding, alignment and reduce buckets are DeepSpeed's own.

Not counted, or different on a device: the optimizer is torch's (``torch_adam``), whose state has one scalar of 4 bytes
more for each flat partition than DeepSpeed's fused kernels; memory that is written while another stream still reads it
(``overlap_comm``) is not held longer; NVMe, Mixture-of-Experts groups, pipelines and compiled kernels are not run.
"""

# [Note: DeepSpeed asks tensors for values]
# DeepSpeed compares numbers across ranks and reads norms and flags of overflow (`.item()`). A fake tensor has no
# values. While DeepSpeed makes the engine, runs backward or steps, a dispatch mode answers: a floating-point number is
# 1 (a norm must be positive), an integer is 1, a bool is False, two tensors are equal. The answer to "is there an
# overflow?" is no, because a step that is skipped allocates no optimizer state; that function is replaced. So are the
# comparisons of lists of integers between ranks: the fake process group copies nothing, so rank 0's list would never
# arrive.
#
# [Note: a view for each rank]
# ZeRO-3 makes a view for each rank of each parameter that it gathers and of each gradient that it reduces, and it joins
# the views. On fake tensors that takes minutes for hundreds of parameters and 1,024 ranks. Two functions are replaced
# by ones that take the same memory, in one block. In `AllGatherCoalescedHandle.wait`
# (runtime/zero/partition_parameters.py) each parameter gets memory of its own beside the joint buffer. In
# `reduce_scatter_coalesced` (runtime/comm/coalesced_collectives.py) the padding of all ranks is there until that
# function returns.

from __future__ import annotations

import contextlib
import importlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from disthooks.errors import UsageError
from disthooks.predict.engines.worlds import current_world, patch

_COMPARISONS = ("assert_ints_same_as_other_ranks", "assert_lst_len_same_as_other_ranks")
_RUNTIME = "deepspeed.runtime."
_OVERFLOWS = (
    ("zero.stage_1_and_2", "DeepSpeedZeroOptimizer"),
    ("zero.stage3", "DeepSpeedZeroOptimizer_Stage3"),
    ("utils", "CheckOverflow"),
)
_DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Answers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Answers for tensors without values; see [Note: DeepSpeed asks tensors for values]."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return False if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
        if func is torch.ops.aten.equal.default:
            return True
        return func(*args, **(kwargs or {}))


def _answers() -> contextlib.AbstractContextManager[Any]:
    return Answers() if current_world() is not None else contextlib.nullcontext()  # type: ignore[no-untyped-call]


def initialize(
    model: nn.Module,
    stage: int,
    dtype: torch.dtype | None,
    options: Mapping[str, Any],
    optimizer: Callable[[Any], torch.optim.Optimizer] | None,
) -> Any:
    try:
        deepspeed: Any = importlib.import_module("deepspeed")
    except ImportError as error:
        raise UsageError("an engine zero0 to zero3 is DeepSpeed's: install deepspeed") from error
    config = _configuration(stage, dtype, options, optimizer is None)
    world = current_world()
    if world is not None:
        config.setdefault("zero_force_ds_cpu_optimizer", False)
        _patch_deepspeed(world.stack, world.size, world.rank)
    with _answers():
        given: dict[str, Any] = {} if optimizer is None else {"optimizer": lambda groups: optimizer(list(groups))}
        return deepspeed.initialize(model=model, config=config, dist_init_required=False, **given)[0]


def _configuration(
    stage: int, dtype: torch.dtype | None, options: Mapping[str, Any], needs_optimizer: bool
) -> dict[str, Any]:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **options}
    if config["train_micro_batch_size_per_gpu"] == 1 and "train_batch_size" in options:
        del config["train_micro_batch_size_per_gpu"]
    config["zero_optimization"] = {"stage": stage, **config.get("zero_optimization", {})}
    if config["zero_optimization"]["stage"] != stage:
        raise UsageError(f"DeepSpeed's configuration has stage {config['zero_optimization']['stage']}, not {stage}")
    if dtype is not None:
        if dtype not in _DTYPES:
            raise UsageError(f"DeepSpeed trains in bfloat16 or float16, not {dtype}")
        config[_DTYPES[dtype]] = {"enabled": True, **config.get(_DTYPES[dtype], {})}
    if needs_optimizer:
        chosen = config.get("optimizer", {"type": "AdamW", "params": {}})
        params = dict(chosen.get("params", {}))
        if chosen["type"].lower() in ("adam", "adamw"):
            params["torch_adam"] = True
        config["optimizer"] = {**chosen, "params": params}
    return config


def backward(engine: Any, loss: torch.Tensor) -> None:
    with _answers():
        engine.backward(loss)


def step(engine: Any) -> None:
    """The engine's step, which also sets gradients to None."""
    with _answers():
        engine.step()


def _patch_deepspeed(stack: ExitStack, size: int, rank: int) -> None:
    """Until the world ends: DeepSpeed runs on fakes, and writes no more than warnings."""
    accelerator = importlib.import_module("deepspeed.accelerator").get_accelerator()
    kind = type(accelerator)
    patch(stack, kind, "is_fp16_supported", lambda self: True)  # the device's kernels can, whatever this CPU's do
    patch(stack, kind, "pin_memory", lambda self, tensor, align_bytes=1: tensor)
    for name in ("zero.utils", "zero.stage3", "zero.partition_parameters", "zero.partitioned_param_coordinator"):
        module = importlib.import_module(_RUNTIME + name)
        for comparison in _COMPARISONS:
            if comparison in vars(module):
                patch(stack, module, comparison, lambda numbers: None)
    for name, owner in _OVERFLOWS:
        patch(stack, getattr(importlib.import_module(_RUNTIME + name), owner), "has_overflow", lambda *a, **k: False)
    compatible: dict[str, bool] = importlib.import_module("deepspeed.ops").__compatible_ops__
    stack.callback(compatible.update, dict(compatible))
    compatible["deepspeed_shm_comm"] = False  # it would be compiled first, for a minute
    _patch_environment(stack, size, rank)
    _patch_views(stack)
    _patch_groups(stack)
    patch(
        stack, nn.functional, "linear", nn.functional.linear
    )  # ZeRO-3 sets a function of its own, and leaves it there
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    patch(stack, comm, "cdb", None)  # DeepSpeed's own notion of the process group, which it makes anew from torch's
    for logger in (logging.getLogger("DeepSpeed"), logging.getLogger("deepspeed")):
        stack.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)


def _patch_views(stack: ExitStack) -> None:
    """See [Note: a view for each rank]."""
    partitions: Any = importlib.import_module(_RUNTIME + "zero.partition_parameters")
    collectives: Any = importlib.import_module(_RUNTIME + "comm.coalesced_collectives")
    stage3: Any = importlib.import_module(_RUNTIME + "zero.stage3")
    kind = partitions.AllGatherCoalescedHandle
    true_wait = kind.wait

    def wait(self: Any, handle_dependency: bool = True) -> None:
        if self.complete or self.quantization:
            true_wait(self, handle_dependency)
            return
        for parameter in self.params:
            parameter.data = self.partitions[0].new_empty(parameter.ds_shape).to(parameter.ds_tensor.dtype)
            parameter.ds_status = partitions.ZeroParamStatus.AVAILABLE
        self.complete = True

    def reduce_scatter(tensors: list[torch.Tensor], group: Any = None) -> list[torch.Tensor]:
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        shards = [-(-tensor.numel() // size) for tensor in tensors]
        with torch.no_grad():
            if len(tensors) == 1 and tensors[0].numel() % size == 0:
                joined = tensors[0].view(-1)
            else:
                padding = size * sum(shards) - sum(tensor.numel() for tensor in tensors)
                _held_until_return = tensors[0].new_empty(padding)
                joined = tensors[0].new_empty(size * sum(shards))
            joined.div_(size)
            mine = joined.narrow(0, rank * sum(shards), sum(shards))
            collectives._torch_reduce_scatter_fn(joined, mine, group=group)
            results, offset = [], 0
            for tensor, shard in zip(tensors, shards, strict=True):
                own = min(shard, max(0, tensor.numel() - rank * shard))
                results.append(mine.narrow(0, offset, own))
                offset += shard
        return results

    patch(stack, kind, "wait", wait)
    for owner in (collectives, stage3):
        patch(stack, owner, "reduce_scatter_coalesced", reduce_scatter)


def _patch_groups(stack: ExitStack) -> None:
    """Hide the process groups of another world, which DeepSpeed keeps in variables of a module, until this one ends."""
    groups: Any = importlib.import_module("deepspeed.utils.groups")
    kinds = (dist.ProcessGroup, dist.device_mesh.DeviceMesh)
    for name, value in list(vars(groups).items()):
        if isinstance(value, kinds):
            patch(stack, groups, name, None)
        elif not name.startswith("__") and (value is None or isinstance(value, (dict, list))):
            patch(stack, groups, name, None if value is None else type(value)())


def _patch_environment(stack: ExitStack, size: int, rank: int) -> None:
    wanted = {"RANK": rank, "LOCAL_RANK": 0, "WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": 1}
    before = {name: os.environ.get(name) for name in wanted}

    def restore() -> None:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    stack.callback(restore)
    os.environ.update({name: str(value) for name, value in wanted.items()})


# ---------------------------------------------------------------------------------------------- what the engine holds


def held(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor that the engine holds, after its kind (see ``state_bytes``). Views of one storage come several times.

    Tensors on the device "meta", in which DeepSpeed keeps shapes, have no bytes and do not come.
    """
    yield from ((kind, tensor) for kind, tensor in _held(engine) if tensor.device.type != "meta")


def _held(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    parameters = list(engine.module.parameters())
    for parameter in parameters:
        yield "parameters", parameter
        if hasattr(parameter, "ds_tensor"):
            yield "parameters", parameter.ds_tensor
    masters = [each for group in engine.basic_optimizer.param_groups for each in group["params"]]
    yield from (("master", master) for master in masters)
    for owner in (*parameters, *masters):
        grads = (owner.grad, getattr(owner, "grad_accum", None))
        yield from (("gradients", grad) for grad in grads if isinstance(grad, torch.Tensor))
    for state in engine.basic_optimizer.state.values():
        yield from (("optimizer", each) for each in state.values() if isinstance(each, torch.Tensor))
    yield from (("buffers", buffer) for buffer in engine.module.buffers())
    kinds = ("master", "gradients", "communication")  # a storage with several names has the first of these
    found = ((_kind(path), tensor) for path, tensor in _walk(engine.optimizer, "", set()))
    yield from sorted(found, key=lambda each: kinds.index(each[0]))


def _kind(path: str) -> str:
    """The kind of a tensor that DeepSpeed's optimizer holds, by the names of the attributes that lead to it."""
    if "norm" in path or "ipg" in path or "bucket" in path:
        return "communication"
    return "gradients" if "grad" in path else "master" if "fp32" in path else "communication"


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor that ``value`` reaches through attributes of DeepSpeed's objects, dicts, lists and sets."""
    if id(value) in seen or isinstance(value, (type, nn.Module, str)):
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for each in list(value.values()):
            yield from _walk(each, path, seen)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for each in list(value):
            yield from _walk(each, path, seen)
    elif type(value).__module__.startswith(("deepspeed.", "torch.optim")) and hasattr(value, "__dict__"):
        for name, each in list(vars(value).items()):
            yield from _walk(each, f"{path}.{name}", seen)


def host_storages(engine: Any) -> dict[int, int]:
    """The addresses and bytes of the storages that DeepSpeed keeps in the host's memory, by its configuration.

    With ``offload_optimizer``: the fp32 masters, the optimizer's state and this rank's partition of the gradients. With
    ``offload_param`` (stage 3): the shards of the parameters as well.
    """
    zero: Any = engine._config.zero_config
    kinds = {"master", "optimizer", "gradients"} if _is_offloaded(zero.offload_optimizer) else set()
    has_parameters = _is_offloaded(zero.offload_param)
    on_device = {p.grad.untyped_storage()._cdata for p in engine.module.parameters() if p.grad is not None}
    found: dict[int, int] = {}
    seen: set[int] = set()
    shards = {id(p.ds_tensor) for p in engine.module.parameters() if hasattr(p, "ds_tensor")}
    for kind, tensor in held(engine):
        storage = tensor.untyped_storage()
        is_shard = has_parameters and id(tensor) in shards
        if storage._cdata not in seen and storage._cdata not in on_device and (kind in kinds or is_shard):
            found[storage._cdata] = storage.nbytes()
        seen.add(storage._cdata)
    return found


def _is_offloaded(config: Any) -> bool:
    """Whether DeepSpeed's section on offload names a place; its `device` is a string or one of an enumeration."""
    device = getattr(config, "device", None)
    return str(getattr(device, "value", device)) not in ("None", "none")
