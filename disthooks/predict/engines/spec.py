"""What an engine makes of a model on one rank: parameters, gradients, optimizer state and communication buffers.

:func:`apply_engine` gives a model to plain PyTorch, DDP, FSDP1, FSDP2, HSDP, tensor parallelism, FSDP2 over tensor
parallelism, or DeepSpeed's ZeRO-0 to ZeRO-3, as a training script would. Inside `fake_world` and a FakeTensorMode
nothing is allocated and no other rank is needed; in a real process group the same call trains. All the code that runs
is that of torch and DeepSpeed, except DDP's C++ reducer, which has a stand-in
(:mod:`disthooks.predict.engines.reducer`), and the values that DeepSpeed reads from tensors
(:mod:`disthooks.predict.engines.zero`).

Counted by :func:`state_bytes`, each storage once and whole, with its padding, on this rank alone: parameters; the fp32
master weights of DeepSpeed; gradients; the optimizer's state; buckets and other tensors that the engine holds between
steps; the buffers of the modules.

Not counted: what the communication library and the device's context take; the copies with which an engine sends the
first rank's parameters when it is made; fragmentation. Everything here is on the CPU, so a copy from the host to the
device is not seen where an engine offloads: the bytes of offloaded parameters and of offloaded state are those of the
host, and `host` names them.
"""

# [Note: the step of the shards]
# The operators of an optimizer on DTensors are those on this rank's parts, once DTensor has found out how their results
# are placed. For the lists of all parameters of a large model this takes longer than forward and backward. In a
# prediction an optimizer of torch that treats each element alone is given the parts themselves. It makes the same
# tensors at the same moments. Where a gradient is placed in another way than its parameter, DTensor would send it
# around, so such a step stays as it is; and so does the step of another optimizer, which may gather whole tensors.

from __future__ import annotations

import collections
import contextlib
import dataclasses
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from disthooks._tensors import parts_of
from disthooks.errors import UsageError
from disthooks.predict.engines import zero

KINDS = ("plain", "ddp", "fsdp1", "fsdp2", "hsdp", "tp", "fsdp2+tp", "zero0", "zero1", "zero2", "zero3")
#: A class of blocks with less than this part of all parameters becomes no unit of its own.
SMALLEST_UNITS = 0.05

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclasses.dataclass(frozen=True)
class EngineSpec:
    """An engine and how it is asked to train.

    Attributes:
        kind: one of :data:`KINDS`.
        world: the number of ranks.
        mesh: the sizes of the two dimensions of "hsdp" (replicas, shards) and "fsdp2+tp" (shards, tensor); their
            product is ``world``. Empty: 8 ranks, as on one machine, are the second dimension.
        wrap: the name or names of the classes whose modules become units of FSDP; empty: :func:`block_classes` finds
            them; None: the whole model is the only unit.
        tp_plan: patterns of module names to styles of ``torch.distributed.tensor.parallel`` or to the names that
            transformers has for them; None: the model's own ``_tp_plan``.
        dtype: the dtype in which forward and backward compute, by the engine's own means (``MixedPrecisionPolicy``,
            ``MixedPrecision``, DeepSpeed's "bf16" or "fp16"); gradients are reduced in fp32 by FSDP. None: as it is.
        options: what the engine is called with besides: keyword arguments of ``DistributedDataParallel``,
            ``FullyShardedDataParallel`` or ``fully_shard``; the configuration of DeepSpeed.

    Raises:
        UsageError: for an unknown kind, or a mesh that does not fit.

    >>> EngineSpec("hsdp", world=64).mesh_shape
    (8, 8)
    """

    kind: str = "plain"
    world: int = 1
    mesh: tuple[int, ...] = ()
    wrap: tuple[str, ...] | str | None = ()
    tp_plan: Mapping[str, Any] | None = None
    dtype: torch.dtype | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UsageError(f"there is no engine {self.kind!r}; there are {', '.join(KINDS)}")
        if self.dtype is not None and self.kind in ("plain", "ddp", "tp"):
            raise UsageError(f"{self.kind} has no dtype of its own; convert the model, or use torch.autocast")
        _ = self.mesh_shape

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """The sizes of the mesh of ranks, outermost first."""
        if self.kind not in ("hsdp", "fsdp2+tp"):
            if self.mesh not in ((), (self.world,)):
                raise UsageError(f"{self.kind} has a mesh of one dimension, ({self.world},), not {self.mesh}")
            return (self.world,)
        shape = self.mesh or (self.world // 8, 8)
        if len(shape) != 2 or shape[0] * shape[1] != self.world:
            raise UsageError(f"{self.kind} needs a mesh of two sizes whose product is {self.world}, not {shape}")
        return shape

    @property
    def is_deepspeed(self) -> bool:
        return self.kind.startswith("zero")


@dataclasses.dataclass
class Prepared:
    """A model that an engine has taken, on one rank.

    Attributes:
        model: what a training loop calls; for DeepSpeed its engine.
        units: the names of the modules that were wrapped on their own, in model order; "" is the root.
        optimizer: over this rank's parameters; for DeepSpeed what it made of that.
    """

    model: Any
    spec: EngineSpec
    units: tuple[str, ...]
    optimizer: Any = None

    def backward(self, loss: torch.Tensor) -> None:
        if self.spec.is_deepspeed:
            zero.backward(self.model, loss)
        else:
            loss.backward()  # type: ignore[no-untyped-call]

    def step(self) -> None:
        """The optimizer's step; then gradients are None, as after ``zero_grad()``."""
        if self.spec.is_deepspeed:
            zero.step(self.model)
            return
        if self.optimizer is None:
            raise UsageError("there is no optimizer: give apply_engine a function that makes one")
        with local_parameters(self.optimizer):
            self.optimizer.step()
        self.optimizer.zero_grad()


def apply_engine(model: nn.Module, spec: EngineSpec, optimizer: Factory | None = None) -> Prepared:
    """Give ``model``, with parameters on the CPU, to the engine, which changes its modules in place.

    Call it inside ``fake_world`` of ``spec.world`` ranks, with the FakeTensorMode on under which ``model`` was built;
    or in a real process group of as many ranks, with a real model. A plain model needs none. ``optimizer`` gets the
    parameters that this rank trains; without it DeepSpeed has one in its configuration.

    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> prepared = apply_engine(model, EngineSpec("plain"), torch.optim.AdamW)
    >>> prepared.backward(prepared.model(torch.ones(2, 4)).sum())
    >>> state_bytes(prepared)["gradients"]
    160
    """
    if spec.kind != "plain" and (not dist.is_initialized() or dist.get_world_size() != spec.world):
        found = dist.get_world_size() if dist.is_initialized() else 0
        raise UsageError(f"{spec.kind} of {spec.world} ranks needs a process group of as many; there is one of {found}")
    if spec.is_deepspeed:
        engine = zero.initialize(model, int(spec.kind[-1]), spec.dtype, spec.options, optimizer)
        return Prepared(engine, spec, ("",), engine.optimizer)
    wrapped, units = _APPLY[spec.kind](model, spec)
    made = None if optimizer is None else optimizer([p for p in wrapped.parameters() if p.requires_grad])
    for group in () if made is None else made.param_groups:
        # torch's operators on lists of tensors refuse a mixture, as tensor parallelism of some layers makes it.
        if group.get("foreach") is None and len({type(_local(p)) is type(p) for p in group["params"]}) > 1:
            group["foreach"] = False
    return Prepared(wrapped, spec, units, made)


#: torch's optimizers that treat each element alone, so that a step on the shards is the step on the whole.
_ELEMENTWISE = ("Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")


@contextlib.contextmanager
def local_parameters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the optimizer has this rank's parts in place of DTensors. See [Note: the step of the shards]."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    parts = {weight: _local(weight) for weight in weights}
    kind = type(optimizer)
    is_torch = kind.__module__.startswith("torch.optim.") and kind.__name__ in _ELEMENTWISE
    if not is_torch or all(parts[each] is each for each in weights) or not all(map(_is_local, weights)):
        yield
        return
    state: Any = optimizer.state
    for weight, part in parts.items():
        if part is not weight:
            part.grad = None if weight.grad is None else _local(weight.grad)
            if weight in state:
                state[part] = {name: _local(each) for name, each in state.pop(weight).items()}
    whole = [(group, group["params"]) for group in optimizer.param_groups]
    for group, params in whole:
        group["params"] = [parts[each] for each in params]
    try:
        yield
    finally:
        for group, params in whole:
            group["params"] = params
        for weight, part in parts.items():
            if part is not weight:
                part.grad = None
                if part in state:
                    state[weight] = {name: _placed(each, part, weight) for name, each in state.pop(part).items()}


def _placed(value: Any, part: torch.Tensor, weight: Any) -> Any:
    """A tensor of an optimizer's state as a DTensor like ``weight``, if it is one for each element of ``part``."""
    if not isinstance(value, torch.Tensor) or value.shape != part.shape or not part.dim():
        return value
    return type(weight)(value, weight._spec, requires_grad=False)


def _is_local(weight: torch.Tensor) -> bool:
    """Whether the step needs this rank's part of a fake parameter alone: its gradient is placed as it is."""
    part, grad = _local(weight), weight.grad
    if not isinstance(part, FakeTensor):
        return False
    if part is weight:
        return True
    placements: Any = getattr(weight, "placements", None)
    is_plain = all(each.is_shard() or each.is_replicate() for each in placements)
    return is_plain and (grad is None or getattr(grad, "placements", None) == placements)


def _ddp(model: nn.Module, spec: EngineSpec) -> tuple[nn.Module, tuple[str, ...]]:
    if spec.options.get("mixed_precision") is not None:
        raise UsageError("DDP's own mixed precision is not explained; use autocast, or convert the model")
    return nn.parallel.DistributedDataParallel(model, **spec.options), ("",)


def _fsdp1(model: nn.Module, spec: EngineSpec) -> tuple[nn.Module, tuple[str, ...]]:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    options: dict[str, Any] = {"use_orig_params": True, "device_id": torch.device("cpu")}
    classes = {type(module) for module in blocks(model, spec.wrap).values()}
    if classes:
        options["auto_wrap_policy"] = ModuleWrapPolicy(classes)
    if spec.dtype is not None:
        options["mixed_precision"] = MixedPrecision(param_dtype=spec.dtype, reduce_dtype=torch.float32)
    wrapped = FullyShardedDataParallel(model, **options | dict(spec.options))
    names = [n for n, module in wrapped.named_modules() if isinstance(module, FullyShardedDataParallel)]
    return wrapped, tuple(name.replace("_fsdp_wrapped_module.", "").rstrip(".") for name in names)


def _fsdp2(model: nn.Module, spec: EngineSpec) -> tuple[nn.Module, tuple[str, ...]]:
    names = {"hsdp": ("replicate", "shard")}.get(spec.kind, ("shard",))
    return _fully_shard(model, spec, _mesh(spec, names))


def _fully_shard(model: nn.Module, spec: EngineSpec, mesh: Any) -> tuple[nn.Module, tuple[str, ...]]:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    options: dict[str, Any] = {"mesh": mesh}
    if spec.dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=spec.dtype, reduce_dtype=torch.float32)
    options |= spec.options
    found = blocks(model, spec.wrap)
    for block in found.values():
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model, ("", *found)


def _tp(model: nn.Module, spec: EngineSpec) -> tuple[nn.Module, tuple[str, ...]]:
    _parallelize(model, spec, _mesh(spec, ("tensor",)))
    return model, ("",)


def _fsdp2_tp(model: nn.Module, spec: EngineSpec) -> tuple[nn.Module, tuple[str, ...]]:
    mesh = _mesh(spec, ("shard", "tensor"))
    _parallelize(model, spec, mesh["tensor"])
    return _fully_shard(model, spec, mesh["shard"])


def _mesh(spec: EngineSpec, names: tuple[str, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", spec.mesh_shape, mesh_dim_names=names)


_APPLY: dict[str, Callable[[nn.Module, EngineSpec], tuple[nn.Module, tuple[str, ...]]]] = {
    "plain": lambda model, spec: (model, ("",)),
    "ddp": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "hsdp": _fsdp2,
    "tp": _tp,
    "fsdp2+tp": _fsdp2_tp,
}


# ---------------------------------------------------------------------------------------------- the blocks of a model


def block_classes(model: nn.Module) -> tuple[str, ...]:
    """The names of the classes of repeated blocks: transformers' ``_no_split_modules``, if the model has such modules.

    Otherwise the classes that occur several times in a ``ModuleList`` or ``Sequential``, outside of other such blocks,
    and hold at least 5% of all parameters.
    """
    named = {type(module).__name__ for module in model.modules()}
    own = [name for name in getattr(model, "_no_split_modules", None) or () if name in named]
    return tuple(own) or _repeated(model)


def _repeated(model: nn.Module) -> tuple[str, ...]:
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    sizes: dict[str, list[int]] = collections.defaultdict(list)
    inner: set[int] = set()
    for group in lists:
        if id(group) in inner:
            continue
        for child in group.children():
            if isinstance(child, (nn.ModuleList, nn.Sequential)):
                continue
            inner.update(id(module) for module in child.modules())
            sizes[type(child).__name__].append(sum(parameter.numel() for parameter in child.parameters()))
    total = sum(parameter.numel() for parameter in model.parameters())
    return tuple(n for n, each in sizes.items() if len(each) > 1 and sum(each) >= max(1, SMALLEST_UNITS * total))


def blocks(model: nn.Module, classes: Sequence[str] | str | None = ()) -> dict[str, nn.Module]:
    """The modules, by name and in model order, that become units of FSDP: those of ``classes``, the outermost only.

    Without classes :func:`block_classes` finds them. None: no module becomes a unit.
    """
    if classes is None:
        return {}
    classes = (classes,) if isinstance(classes, str) else tuple(classes)
    wanted = classes or block_classes(model)
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and type(module).__name__ in wanted and not is_inside:
            found[name] = module
    missing = set(classes) - {type(module).__name__ for module in found.values()}
    if missing:
        there = sorted({type(module).__name__ for module in model.modules()})
        raise UsageError(f"no module to wrap is a {', '.join(sorted(missing))}; the classes are {', '.join(there)}")
    return found


# ------------------------------------------------------------------------------------------------- tensor parallelism


def _parallelize(model: nn.Module, spec: EngineSpec, mesh: Any) -> None:
    from torch.distributed.tensor.parallel import parallelize_module

    plan = tensor_plan(model, spec.tp_plan)
    parallelize_module(model, mesh, plan)


def tensor_plan(model: nn.Module, plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plan of ``parallelize_module``: each module's name and the style that shards it.

    The patterns of ``plan``, or of the model's own ``_tp_plan``, name torch's styles or transformers' names for them.
    """
    patterns = plan if plan is not None else getattr(model, "_tp_plan", None)
    if not patterns:
        raise UsageError(f"{type(model).__name__} has no plan of tensor parallelism (_tp_plan); give tp_plan")
    names = [name for name, _ in model.named_modules()]
    chosen: dict[str, Any] = {}
    for pattern, style in patterns.items():
        matched = [name for name in names if _matches(name, pattern)]
        if not matched and plan is not None:
            raise UsageError(f"tp_plan: {pattern!r} matches no module")
        for name in matched:
            chosen[name] = _style(style, name) if isinstance(style, str) else style
    return {name: style for name, style in chosen.items() if style is not None}


def _matches(name: str, pattern: str) -> bool:
    parts = pattern.split(".")
    return len(parts) == name.count(".") + 1 and all(map(fnmatch.fnmatchcase, name.split("."), parts))


def _style(name: str, module: str) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    styles: dict[str, Callable[[], Any]] = {
        "colwise": ColwiseParallel,
        "colwise_rep": lambda: ColwiseParallel(output_layouts=Replicate()),
        "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
        "rowwise": RowwiseParallel,
        "rowwise_rep": lambda: RowwiseParallel(input_layouts=Replicate()),
        "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
        "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
        "sequence_parallel": SequenceParallel,
    }
    if name in ("replicated_with_grad_allreduce", "all_reduce"):
        return None
    if name not in styles:
        known = ", ".join(styles)
        raise UsageError(f"tp_plan: the style {name!r} of {module} is not known; give one of torch's, or of {known}")
    return styles[name]()


# -------------------------------------------------------------------------------------------------- counting the state


def state_bytes(prepared: Prepared) -> dict[str, int]:
    """The bytes that this rank holds now, by kind; ``host`` is the part of these in the memory of the host (offload).

    Each storage is counted whole (with padding) and once, under the first kind that has it. Where a gradient is a view
    of a bucket, the bucket is in ``gradients``. ``communication`` is buckets, and what else DeepSpeed holds.

    >>> state_bytes(apply_engine(nn.BatchNorm1d(4), EngineSpec("plain")))
    {'parameters': 32, 'master': 0, 'gradients': 0, 'optimizer': 0, 'communication': 0, 'buffers': 40, 'host': 0}
    """
    kinds = {"parameters": 0, "master": 0, "gradients": 0, "optimizer": 0, "communication": 0, "buffers": 0}
    seen: dict[int, torch.UntypedStorage] = {}
    for kind, tensor in held(prepared):
        storage = _local(tensor).untyped_storage()
        if storage._cdata not in seen:
            seen[storage._cdata] = storage
            kinds[kind] += storage.nbytes()
    return kinds | {"host": sum(host_storages(prepared).values())}


def held(prepared: Prepared) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that this rank holds now, and the kind of each, as :func:`state_bytes` counts them."""
    if prepared.spec.is_deepspeed:
        yield from zero.held(prepared.model)
        return
    model: nn.Module = prepared.model
    # FSDP1's flat parameters, which `parameters()` does not have with `use_orig_params`.
    handles = filter(None, (vars(module).get("_handle") for module in model.modules()))
    parameters = [*model.parameters(), *(handle.flat_param for handle in handles)]
    yield from (("parameters", each) for parameter in parameters for each in _parts(parameter))
    for parameter in parameters:
        yield from (("gradients", each) for each in _parts(parameter.grad))
    if prepared.optimizer is not None:
        for state in prepared.optimizer.state.values():
            yield from (("optimizer", each) for each in state.values() if isinstance(each, torch.Tensor))
    of_reducer: dict[str, list[torch.Tensor]] = getattr(getattr(model, "reducer", None), "held", {})  # in a fake run
    yield from (("communication", each) for tensors in of_reducer.values() for each in tensors)
    yield from (("buffers", each) for buffer in model.buffers() for each in _parts(buffer))


def _parts(tensor: torch.Tensor | None) -> Iterable[torch.Tensor]:
    """The tensors that hold the memory of ``tensor``: those of its values and indices if it is sparse."""
    if tensor is None:
        return ()
    return (tensor,) if tensor.layout is torch.strided else parts_of(tensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return found


def host_storages(prepared: Prepared) -> dict[int, int]:
    """The addresses and bytes of the storages that the engine keeps in the host's memory."""
    if prepared.spec.is_deepspeed:
        return zero.host_storages(prepared.model)
    options = prepared.spec.options
    policy = type(options.get("offload_policy")).__name__
    if policy != "CPUOffloadPolicy" and not getattr(options.get("cpu_offload"), "offload_params", False):
        return {}
    offloaded = [_local(tensor) for kind, tensor in held(prepared) if kind in ("parameters", "gradients", "optimizer")]
    return {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in offloaded}
