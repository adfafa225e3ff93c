"""A world of many ranks in one process: this process is one of them, and no other exists.

torch's "fake" process group takes part in every collective and moves nothing, so the code of DDP, FSDP, DTensor and
DeepSpeed runs as it would on that rank: shapes, dtypes, padding and the moments at which memory is taken and freed are
theirs. What those need besides, under fake tensors, is patched while the world exists, and only then.
"""

# [Note: meshes are made of real numbers]
# A `DeviceMesh` reads the ranks out of a tensor (`tolist`). Under a FakeTensorMode that tensor would have no values. So
# the methods that compute with it run with all dispatch modes off. `init_device_mesh` itself makes the first tensor,
# before any method is called; it is always `arange(size)`, and `__init__` makes it anew when it is fake. A user's own
# fake tensor has no values that could be known, and is refused.
#
# [Note: shapes of the whole]
# DTensor finds the shape of an operator's result by running the operator on fake tensors of the *global* shape. Nothing
# of that exists on a rank. `FakeWorld.around_propagation` is told when it happens, so that a recorder pauses.
#
# [Note: addresses]
# FSDP and DeepSpeed ask by the address of their memory whether two tensors share it, and whether there is any. The
# address of each fake tensor is 0. Here a fake storage has one, which is that of the storage object: it differs between
# storages, and it is 0 when the storage is empty.
#
# [Note: collectives as in eager code]
# Under a fake mode DTensor believes that a compiler traces it. Then it pads where eager code does not, and waits for
# each collective at once, by an operator whose fake kernel makes a second tensor. Eager code waits later and makes
# none. So DTensor is told that nothing traces, and a fake tensor that is waited for is returned itself.
#
# [Note: one chunk of many]
# `fully_shard` makes a view of each parameter for every rank, and uses this rank's and the first. On fake tensors that
# takes 40 s for 300 parameters and 1,024 ranks, so the views are made when they are asked for.

# [Note: what DTensor remembers]
# DTensor remembers, for each operator and the layouts of its arguments, the layout and the local shape of the result.
# The key has the mesh and not the rank. On two ranks of one process the shapes may differ, if a size does not divide.
# So DTensor forgets everything when a world begins, and when it ends: a real run may follow in this process.

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from disthooks.errors import UsageError
from disthooks.predict.engines.reducer import FakeLogger, FakeReducer, broadcast_coalesced

#: The methods of `DeviceMesh` that compute with tensors of ranks. Some exist in some versions of torch only.
_MESH_METHODS = (
    "__getitem__",
    "_concatenate",
    "_flatten",
    "_get_all_submeshes",
    "_unflatten",
    "from_group",
    "get_all_groups",
    "get_local_rank",
)
#: The function that makes the mesh of `reshard_after_forward=8`.
_SMALLER_MESH = "_get_post_forward_mesh_info"
_PROPAGATION = (
    "_propagate_tensor_meta",
    "_propagate_tensor_meta_cached",
    "_propagate_tensor_meta_non_cached",
)
_FAKE_ADDRESS = "Accessing the data pointer of FakeTensor"

Rank = int | Literal["largest", "smallest"]


@dataclasses.dataclass
class FakeWorld:
    """A world of ``size`` ranks, of which this process is ``rank``. :func:`fake_world` makes it.

    Attributes:
        stack: what is undone at the end; code that patches something for the time of the world adds to it.
        around_propagation: makes a context manager, inside which DTensor computes the shapes of the whole. See
            [Note: shapes of the whole].
    """

    size: int
    rank: int
    stack: ExitStack
    around_propagation: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


_worlds: list[FakeWorld] = []


def current_world() -> FakeWorld | None:
    return _worlds[-1] if _worlds else None


@contextlib.contextmanager
def fake_world(size: int, rank: Rank = 0) -> Iterator[FakeWorld]:
    """Inside, this process is ``rank`` of a world of ``size`` ranks, none of which exists besides.

    ``init_device_mesh``, ``new_group``, DDP, FSDP, ``fully_shard`` and ``parallelize_module`` work inside, on fake
    tensors and on real ones. A collective leaves its output as it was: on real tensors the numbers are wrong.
    Afterwards there is no process group, and torch is as it was before. The "largest" rank, whose shards are the
    largest where sizes do not divide, is the first one of all engines, and the "smallest" is the last one.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> with fake_world(1024, "smallest") as world, FakeTensorMode():
    ...     mesh = torch.distributed.init_device_mesh("cpu", (128, 8), mesh_dim_names=("shard", "tensor"))
    ...     world.rank, mesh["tensor"].get_local_rank()
    (1023, 7)
    """
    number = {"largest": 0, "smallest": size - 1}.get(rank, rank) if isinstance(rank, str) else rank
    if not isinstance(number, int) or not 0 <= number < size:
        raise UsageError(f"rank {rank!r} is not in a world of {size} ranks")
    if dist.is_initialized():
        raise UsageError(
            f"this process is already rank {dist.get_rank()} of {dist.get_world_size()} in a process group of torch's; "
            "explain in a process of its own, or call torch.distributed.destroy_process_group() first"
        )
    with ExitStack() as stack:
        world = FakeWorld(size, number, stack)
        _worlds.append(world)
        stack.callback(_worlds.remove, world)
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=_FAKE_ADDRESS)
        _forget_layouts()
        stack.callback(_forget_layouts)
        patch_meshes(stack)
        _patch_propagation(stack, world)
        _patch_collectives(stack)
        _patch_chunks(stack)
        _patch_addresses(stack)
        _patch_streams(stack)
        _patch_reducer(stack)  # see [Note: DDP's reducer]
        stack.callback(_leave)
        with _disable_current_modes():
            _join(size, number)
        yield world


def _join(size: int, rank: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def patch(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    """Set ``owner.name`` until ``stack`` ends; then it is what it was, or absent if ``owner`` itself had none."""
    has_own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    if has_own:
        stack.callback(setattr, owner, name, before)
    else:
        stack.callback(delattr, owner, name)


def _without_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call


def patch_meshes(stack: ExitStack) -> None:
    """See [Note: meshes are made of real numbers]."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    kind: Any = DeviceMesh
    true_init = kind.__init__

    @functools.wraps(true_init)
    def init(self: Any, device_type: str, mesh: Any = None, **kwargs: Any) -> None:
        is_arange = sys._getframe(1).f_code is init_device_mesh.__code__
        with _disable_current_modes():
            mesh = _real(mesh, is_arange)
            if "_rank_map" in kwargs:
                kwargs["_rank_map"] = _real(kwargs["_rank_map"], is_arange)
            if mesh is not None:
                kwargs["mesh"] = mesh
            true_init(self, device_type, **kwargs)

    patch(stack, kind, "__init__", init)
    for name in _MESH_METHODS:
        method = vars(kind).get(name)
        if isinstance(method, staticmethod):
            patch(stack, kind, name, staticmethod(_without_modes(method.__func__)))
        elif callable(method):
            patch(stack, kind, name, _without_modes(method))
    true_coordinate = _without_modes(kind.get_coordinate)

    def get_coordinate(self: Any) -> Any:
        known = vars(self).get("_coordinate_on_dim")  # DTensor asks at each operator
        return known or true_coordinate(self)

    patch(stack, kind, "get_coordinate", get_coordinate)
    if isinstance(vars(kind).get("mesh"), property):
        patch(stack, kind, "mesh", property(_without_modes(kind.mesh.fget)))
    _patch_smaller_mesh(stack)


def _patch_smaller_mesh(stack: ExitStack) -> None:
    """Let FSDP2 make the mesh of ``reshard_after_forward=8`` of real numbers."""
    for name in ("_fsdp_init", "_fully_shard"):
        module: Any = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{name}")
        if hasattr(module, _SMALLER_MESH):
            patch(stack, module, _SMALLER_MESH, _without_modes(vars(module)[_SMALLER_MESH]))


def _real(ranks: Any, is_arange: bool) -> Any:
    if not isinstance(ranks, FakeTensor):
        return ranks
    if not is_arange:
        raise UsageError("a DeviceMesh of a fake tensor has no ranks; give it a list, or call init_device_mesh")
    return torch.arange(ranks.numel(), dtype=torch.int).view(tuple(ranks.shape))


def _forget_layouts() -> None:
    """See [Note: what DTensor remembers]."""
    module: Any = sys.modules.get("torch.distributed.tensor._api")
    if module is not None:
        module.DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
        in_c: Any = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
        if in_c is not None:
            in_c()


def _patch_propagation(stack: ExitStack, world: FakeWorld) -> None:
    """See [Note: shapes of the whole]."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    def quiet(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with world.around_propagation():
                return function(*args, **kwargs)

        return call

    for name in _PROPAGATION:
        if name in vars(ShardingPropagator):
            patch(stack, ShardingPropagator, name, quiet(vars(ShardingPropagator)[name]))


def _patch_collectives(stack: ExitStack) -> None:
    """See [Note: collectives as in eager code]."""
    collectives: Any = importlib.import_module("torch.distributed._functional_collectives")

    def itself(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda tensor: tensor if isinstance(tensor, FakeTensor) else function(tensor)

    for name in ("wait_tensor", "_maybe_wrap_tensor"):
        patch(stack, collectives, name, itself(vars(collectives)[name]))
    true = collectives._are_we_tracing
    for module in ("_functional_collectives", "tensor._decompositions", "tensor._collective_utils"):
        owner = sys.modules.get(f"torch.distributed.{module}")
        if owner is not None and vars(owner).get("_are_we_tracing") is true:
            patch(stack, owner, "_are_we_tracing", lambda: False)


class _Chunks:
    """The views that ``torch.chunk`` gives, and an empty tensor for each rank without one."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._count, self._dim = tensor, num_chunks, dim

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if not 0 <= index < self._count:
            raise IndexError(index)
        rows = self._tensor.size(self._dim)
        size = -(-rows // self._count)
        start = index * size
        if rows and start >= rows:
            return self._tensor.new_empty(0)
        return self._tensor.narrow(self._dim, start, min(size, rows - start))


def _patch_chunks(stack: ExitStack) -> None:
    """See [Note: one chunk of many]."""
    module: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    if hasattr(module, "_chunk_with_empty"):
        patch(stack, module, "_chunk_with_empty", _Chunks)


def _patch_addresses(stack: ExitStack) -> None:
    """See [Note: addresses]."""
    true_address = torch.UntypedStorage.data_ptr

    def of_storage(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return true_address(storage)
        return storage._cdata if storage.nbytes() else 0

    def of_tensor(tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        return of_storage(storage) + int(tensor.storage_offset()) * tensor.element_size() if storage.nbytes() else 0

    patch(stack, torch.UntypedStorage, "data_ptr", of_storage)
    patch(stack, FakeTensor, "data_ptr", of_tensor)


def _patch_streams(stack: ExitStack) -> None:
    """FSDP1 waits for its stream if it offloads parameters. The streams of a CPU cannot be waited for."""
    if not hasattr(torch.cpu.Stream, "synchronize"):
        patch(stack, torch.cpu.Stream, "synchronize", lambda stream: None)


def _patch_reducer(stack: ExitStack) -> None:
    """DDP's own reducer is C++ and reads the memory of tensors. See :mod:`disthooks.predict.engines.reducer`."""
    from torch.nn.parallel import distributed

    patch(stack, dist, "Reducer", FakeReducer)
    patch(stack, dist, "Logger", FakeLogger)
    patch(stack, dist, "_broadcast_coalesced", broadcast_coalesced)
    module: Any = distributed
    patch(stack, module, "_verify_param_shape_across_processes", lambda *args, **kwargs: None)
    patch(stack, module, "_sync_module_states", lambda *args, **kwargs: None)
