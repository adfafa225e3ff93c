"""What a plan makes of the tensors that a model saves, on fake tensors: the hooks of disthooks run, and nothing moves.

:func:`planned` attaches a plan to a model whose tensors are fake, inside a ``FakeTensorMode``. One training step then
gives the reports that a real run gives.
"""

# [Note: a prediction runs the hooks]
# A prediction does not say again in other words what hooks do. `PlannedHooks` are the hooks of a run, with the same
# decisions, the same index of contents, Recompute with its graph and formulas, codecs, and the tiers with their plan.
# What they replace is only what looks at bits, because a fake tensor has none. Each assumption about bits stands once:
#
# - Two tensors of the same owner and version are equal (`PlannedContent.has_contents_of`). A real run stores a tensor
#   again if somebody wrote into it without a count, by `.data` or NumPy.
# - A formula of Recompute gives the bits of the original, by its first variant, if it runs on tensors of these shapes
#   and gives as many bytes (`PlannedVerification`). A real run compares, and stores what differs: kernels whose bits
#   depend on the number of threads, an eps that the graph does not show, a change that nobody counted.
# - Casting a weight again gives the bits of autocast's copy. Which weight a copy without a history was
#   cast from is not found by values, but because the cast was seen (`_SeenCasts`).
# - What a codec of disthooks asks is whether a block has an inf or a nan. The answer is no (`_Answers`).
# - If the size of what a codec makes depends on the data, the codec counts as if it saved nothing (`PlannedCodec`).

# [Note: fake tensors stand for a device]
# The tensors are fake tensors of the CPU, because a build without CUDA can make no others. `device="cuda"` says that
# they stand for those of an accelerator. Then no copy is made in `pack`, contents are shared by version, and `OnCpu`
# takes tensors out of the device's memory.

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from disthooks._hashing import keys_as_before
from disthooks._tensors import Layout, bitless, is_most_of, region_of
from disthooks._torch import StorageRef, fresh_count
from disthooks.config.agree import check_conflicts
from disthooks.config.plan import Plan, stores_within
from disthooks.predict.fake.queries import DEVICE_OF, device_of
from disthooks.predict.plans.planned_stores import PlacedBytes, PlannedStores, WatchedStore
from disthooks.saved.attach import SavingHandle, attach_to, chosen
from disthooks.saved.codecs import Codec
from disthooks.saved.codecs.base import relative_error
from disthooks.saved.codecs.compact import Compact
from disthooks.saved.contents import SmallCopy, StoredContent
from disthooks.saved.counters import Counters, WarnedOnce
from disthooks.saved.hooks import HookSite, SavedTensorHooks
from disthooks.saved.module_class import exchange_site, site_of
from disthooks.saved.packed import Place, unpack
from disthooks.saved.pipeline import OpenPipeline, Pipeline, Stage
from disthooks.saved.pipeline import pipeline as as_pipeline
from disthooks.saved.recompute.context import Recomputed
from disthooks.saved.recompute.verify import Proofs, Verification
from disthooks.saved.report import SavedReport
from disthooks.saved.stores.base import Functions
from disthooks.saved.weights import NARROW, ModuleWeights
from disthooks.saved.wrap import SaveWith

_aten: Any = torch.ops.aten
_Mode: Any = TorchDispatchMode  # torch has no types for it


# -- what is asked of tensors without bits


class _Inside(threading.local):
    """How many hooks of a prediction this thread is inside of."""

    depth = 0


_inside = _Inside()


class _Addresses(TorchFunctionMode):
    """The address of a fake tensor is that of its storage object, so that equal addresses mean the same memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            return args[0].untyped_storage()._cdata + args[0].storage_offset() * args[0].itemsize
        return func(*args, **(kwargs or {}))


class _NoAddresses(TorchFunctionMode):
    """A codec or a function of a user's gets no address of a fake tensor: there is nothing to read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.data_ptr and isinstance(args[0], FakeTensor):
            raise RuntimeError("a fake tensor has no memory that could be read")
        return func(*args, **(kwargs or {}))


class _Answers(_Mode):  # type: ignore[misc]
    """Answers what hooks ask of bits; see [Note: a prediction runs the hooks].

    A storage of a fake tensor says that it is on "meta". A tensor that hooks make over it is on the device that the
    fake tensors have.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of(args[0])
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        if func is _aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            return False
        if func is _aten.equal.default:
            return bool(args[0].shape == args[1].shape)
        if func is _aten.set_.source_Storage_storage_offset or func is _aten.set_.source_Storage:
            # The mode of the fake tensors would remember the storage in its cache, and keep it in memory.
            with in_kernel_invocation_manager(args[0].fake_mode):
                return func(*args, **kwargs)
        return func(*args, **kwargs)


class _answered:
    """A context manager: inside, hooks run on fake tensors."""

    __slots__ = ("_modes",)

    def __enter__(self) -> None:
        self._modes: tuple[Any, ...] = _Answers(), _Addresses()
        bitless.kinds |= {FakeTensor}
        _inside.depth += 1
        for mode in self._modes:
            mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)
        _inside.depth -= 1
        if not _inside.depth:
            bitless.kinds -= {FakeTensor}


class _SeenCasts(_Mode):  # type: ignore[misc]
    """Remembers which narrow tensors were cast from which parameters."""

    def __init__(self) -> None:
        super().__init__()
        self._sources: dict[int, tuple[StorageRef, weakref.ref[nn.Parameter]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF and type(args[0]) is FakeTensor:
            return device_of(args[0])
        found = func(*args, **(kwargs or {}))
        if func is _aten._to_copy.default and found.dtype in NARROW and isinstance(args[0], nn.Parameter):
            reference = StorageRef(found.untyped_storage())
            self._sources[reference.address] = reference, weakref.ref(args[0])
        return found

    def source(self, copy: torch.Tensor) -> nn.Parameter | None:
        found = self._sources.get(copy.untyped_storage()._cdata)
        return None if found is None else found[1]()


# -- packed values


class PlannedContent(StoredContent):
    """A :class:`StoredContent` of a fake tensor, in a store that keeps no bytes."""

    __slots__ = ()

    def release_copy(self) -> None:
        copy, self._copy = self._copy, None
        is_there = self.owner() is not None or (not self.may_stay and self.storage_ref.get() is not None)
        if copy is not None and self._weak_copy is not None and is_there:
            self._checksum = 0
        self._weak_copy = None

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        """As in a run, but bytes that are there to be compared are equal; on a device none are compared."""
        copy = None if self._weak_copy is None else self._weak_copy()
        if copy is None and self._checksum is None:
            return self.place == "in place" or cast(WatchedStore, self._store).is_accelerator
        if part.untyped_storage().nbytes() != self.nbytes:
            return False
        if self.region is None and not is_most_of(layout, part.nbytes, self.nbytes):
            return region_of(layout, self.nbytes) is None or copy is not None
        return True

    def _offload(self, storage: torch.UntypedStorage) -> Place:
        place = super()._offload(storage)
        if cast(WatchedStore, self._store).is_accelerator:
            self._copy = self._weak_copy = None  # the bytes of a device are not compared
        return place

    def _measure(self, position: int, codec: Codec, tensors: Sequence[Any], encoded: Sequence[Any]) -> None:
        """Decode as a run does for its measure, because that takes memory; there is no error to be read."""
        for tensor, (parts, spec) in zip(tensors, encoded, strict=True):
            is_changed = not (len(parts) == 1 and parts[0] is tensor)
            if is_changed and tensor.is_floating_point() and self.counts.all.codec_errors.is_due(position):
                with torch.no_grad():
                    relative_error(codec.decode(parts, spec), tensor)


class PlannedRecomputed(PlannedContent, Recomputed):
    __slots__ = ()


class PlannedSmallCopy(SmallCopy):
    __slots__ = ()

    def has_contents_of(self, part: torch.Tensor, layout: Layout) -> bool:
        return hasattr(self, "_copy") and part.untyped_storage().nbytes() == self.nbytes


class PlannedVerification(Verification):
    """A verification that finds every program right that gives as many bytes as the original has."""

    __slots__ = ()

    @staticmethod
    def _different_numbers(original: torch.Tensor) -> Any:
        return original.numel()


class PlannedProofs(Proofs):
    """The verifications of one prediction; those of a real run are not touched."""

    _kind = PlannedVerification


class PlannedCodec(Codec):
    """A codec that runs on fake tensors, if it can."""

    def __init__(self, codec: Codec, is_accelerator: bool, say_unknown: Callable[[str], None]) -> None:
        self._codec, self._is_accelerator, self._say_unknown = codec, is_accelerator, say_unknown
        self.lossy: bool = codec.lossy  # type: ignore[misc]  # that of the class is for real codecs

    def __repr__(self) -> str:
        return repr(self._codec)

    def encode(self, tensor: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
        if self._is_left_alone(tensor):
            return (tensor,), None
        if self._depends_on_data(tensor):
            return self._guessed(tensor, "its size depends on the data")
        try:
            with self._without_addresses():
                parts, spec = self._codec.encode(tensor)
        except Exception as error:  # a codec of somebody else may raise anything
            return self._guessed(tensor, f"it needs the data ({type(error).__name__})")
        return parts, _Encoded(spec, tensor)

    def decode(self, tensors: tuple[torch.Tensor, ...], spec: _Encoded | None) -> torch.Tensor:
        if spec is None:  # the tensor is as it was
            return tensors[0]
        try:
            with self._without_addresses():
                return self._codec.decode(tensors, spec.spec)
        except Exception as error:
            self._say_unknown(f"{self._codec!r}: decode needs the data ({type(error).__name__})")
        return torch.empty(spec.shape, dtype=spec.dtype, device=spec.device)

    def _without_addresses(self) -> contextlib.AbstractContextManager[Any]:
        is_ours = type(self._codec).__module__.startswith("disthooks.saved.codecs.")
        return contextlib.nullcontext() if is_ours else _NoAddresses()

    def _is_left_alone(self, tensor: torch.Tensor) -> bool:
        is_chosen = isinstance(self._codec, Compact) and self._codec.floats is None
        return is_chosen and self._is_accelerator and tensor.is_floating_point()

    def _depends_on_data(self, tensor: torch.Tensor) -> bool:
        if not isinstance(self._codec, Compact):
            return False
        return self._codec.floats is not False and tensor.is_floating_point() and tensor.numel() > 0

    def _guessed(self, tensor: torch.Tensor, why: str) -> tuple[tuple[torch.Tensor, ...], Any]:
        self._say_unknown(f"{self._codec!r}: {why}; counted as if it saved nothing")
        return (tensor,), None


class _Encoded:
    """The spec of a codec, and what the encoded tensor was."""

    def __init__(self, spec: Any, tensor: torch.Tensor) -> None:
        self.spec, self.shape, self.dtype, self.device = spec, tensor.shape, tensor.dtype, tensor.device


# -- hooks


class PlannedWeights(ModuleWeights):
    """The weights of a module, whose copies are told by the casts that were seen."""

    __slots__ = ("_seen",)

    def __init__(self, module: nn.Module, seen: _SeenCasts) -> None:
        super().__init__(module)
        self._seen = seen

    def _weight_like(self, copy: torch.Tensor) -> nn.Parameter | None:
        source = self._seen.source(copy)
        if source is None or self._module is None or source.shape != copy.shape or source.dtype in NARROW:
            return None
        return source if any(source is weight for weight in self._module.parameters()) else None


def planned_unpack(held: Any) -> torch.Tensor:
    """The saved tensor, as a new fake tensor if it left memory. A graph keeps no hooks alive by it."""
    with _answered():
        return unpack(held)


class PlannedHooks(SavedTensorHooks):
    """The hooks of one call in a prediction. See [Note: a prediction runs the hooks]."""

    stored, recomputed, small = PlannedContent, PlannedRecomputed, PlannedSmallCopy

    def __init__(
        self, seen: _SeenCasts, is_accelerator: bool, pipeline: OpenPipeline, name: str, module: nn.Module | None
    ) -> None:
        super().__init__(pipeline, name, module)
        self._is_accelerator = is_accelerator
        self._fresh_count = _planned_fresh_count()
        pack = self._pack_by_function if isinstance(pipeline.store, Functions) else self._pack
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, planned_unpack)
        if module is not None:
            self._weights = PlannedWeights(module, seen)

    def _pack(self, tensor: torch.Tensor) -> Any:
        with _answered():
            return super()._pack(tensor)

    def _pack_by_function(self, tensor: torch.Tensor) -> Any:
        with _answered():
            return super()._pack_by_function(tensor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_accelerator:
            self._has_in_place = False  # the warning is about tensors of a CPU
        with _answered():
            super().__exit__(kind, error, trace)


class _FreshCounts:
    """Measures the reference count, in ``PlannedHooks._pack``, of a tensor that only the operator knows."""

    least = 0

    def _pack_fake(self, tensor: torch.Tensor) -> torch.Tensor:
        with _answered():
            return self._pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.least = sys.getrefcount(tensor)
        return tensor.detach()


@functools.cache
def _planned_fresh_count() -> int:
    counts = _FreshCounts()
    with unset_fake_temporarily(), torch.enable_grad():
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(counts._pack_fake, lambda tensor: tensor):
            leaf.exp()
    return counts.least


class _ToldOnce(WarnedOnce):
    """The warnings that a run would give; reports have them, and nobody is warned."""

    def warn(self, topic: str, text: str) -> None:
        self.texts.setdefault(topic, text)


# -- the prediction


class Planned:
    """What a plan made of the steps that ran inside :func:`planned`.

    Attributes:
        placed: the bytes that stores hold, by place, now and at most.
        inside: for each module that had hooks before, its name and the open pipeline that takes their place.
        unknown: what cannot be known without data, one sentence each.
    """

    def __init__(self, is_accelerator: bool) -> None:
        self.placed = PlacedBytes()
        self.unknown: list[str] = []
        self.warnings: list[str] = []
        self.inside: dict[str, OpenPipeline] = {}
        self._savings: list[SavingHandle] = []
        self._stores = PlannedStores(self.placed, is_accelerator, self.say_unknown)

    def begin_step(self) -> None:
        """Count from here on. The steps before were there for what a plan learns from them."""
        pipelines = {
            id(each): each for each in [*(saving._pipeline for saving in self._savings), *self.inside.values()]
        }
        for pipeline in pipelines.values():
            warned = pipeline.counters.warned
            pipeline.counters = Counters()
            pipeline.counters.warned = warned
        self._stores.begin_step()

    def reports(self) -> list[SavedReport]:
        return [saving.report() for saving in self._savings]

    def report(self) -> SavedReport:
        """The sum of the reports of all entries, and of the hooks that the model had before."""
        inside = {id(each): each for each in self.inside.values()}
        return sum((each.report() for each in inside.values()), sum(self.reports(), SavedReport()))

    def say_unknown(self, text: str) -> None:
        if text not in self.unknown:
            self.unknown.append(text)


Entries = Plan | Iterable[tuple[Any, Stage | Pipeline]]


@contextlib.contextmanager
def planned(
    model: nn.Module,
    entries: Entries,
    *,
    device: str = "cpu",
) -> Iterator[Planned]:
    """A context manager: inside, ``entries`` are attached to ``model``, whose tensors are fake. Nothing moves.

    Run one or more training steps inside, under the ``FakeTensorMode`` of the model's tensors. At the end all hooks are
    removed, and everything is as it was. Hooks that the model has already, from wrappers such as ``SaveWith`` or from
    ``save_activations``, are a part of the prediction. Those of a ``saving`` block in its code keep their tensors.

    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> from disthooks import OnDisk
    >>> with FakeTensorMode():
    ...     model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    ...     with planned(model, [("*", OnDisk("/tmp"))]) as found:
    ...         model(torch.empty(512, 256)).sum().backward()
    >>> found.report().stored, found.placed.peak["disk"]
    (1048576, 1048576)
    """
    # See [Note: fake tensors stand for a device].
    is_accelerator = device.partition(":")[0] != "cpu"  # torch.device("cuda") is the CPU where CUDA is redirected
    found = Planned(is_accelerator)
    seen = _SeenCasts()
    with contextlib.ExitStack() as stack:
        stack.callback(found.placed.note)
        with unset_fake_temporarily():
            fresh_count()  # measured once in a process, with a real tensor: before a recorder would count that tensor
            _planned_fresh_count()
        stack.enter_context(keys_as_before())
        make_hooks = functools.partial(PlannedHooks, seen, is_accelerator)

        def open_planned(stages: Pipeline) -> HookSite:
            opened = _opened(stages, found._stores, is_accelerator, found)
            return HookSite(opened, make_hooks=make_hooks)

        for undo in _exchange_sites(model, open_planned, found):
            stack.callback(undo)
        for patterns, pipeline in _pairs(model, entries):
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                modules = chosen(model, patterns)
            found.warnings += [str(each.message) for each in warned]
            saving = attach_to(modules, open_planned(pipeline))
            stack.callback(saving.remove)
            found._savings.append(saving)
        stack.enter_context(seen)
        yield found


def _exchange_sites(model: nn.Module, open_planned: Callable[[Pipeline], HookSite], found: Planned) -> Iterator[Any]:
    """Let the hooks that are on modules of ``model`` be planned. Yields functions that undo it."""
    made: dict[int, HookSite] = {}
    for name, module in model.named_modules():
        site = module._site if isinstance(module, SaveWith) else site_of(module)
        if site is None:
            continue
        own = made.get(id(site.pipeline)) or open_planned(site.pipeline.stages)
        made[id(site.pipeline)] = own
        own = own._replace(name=site.name)
        found.inside[name] = own.pipeline
        if isinstance(module, SaveWith):
            module._site, before = own, site
            yield functools.partial(setattr, module, "_site", before)
        else:
            yield functools.partial(exchange_site, module, exchange_site(module, own))


def _pairs(model: nn.Module, entries: Entries) -> Sequence[tuple[Any, Pipeline]]:
    if not isinstance(entries, Plan):
        return [(patterns, as_pipeline(to)) for patterns, to in entries]
    check_conflicts(model, [patterns for patterns, _ in entries.saves], entries.source)
    return stores_within(entries.budget, model, entries.saves, entries.source)


def _opened(stages: Pipeline, stores: PlannedStores, is_accelerator: bool, found: Planned) -> OpenPipeline:
    codecs = tuple(PlannedCodec(codec, is_accelerator, found.say_unknown) for codec in stages.codecs)
    opened = OpenPipeline(
        replace(stages, codecs=codecs, store=stores.of(stages.store)),
        None if stages.recompute is None else PlannedProofs(),
    )
    opened.counters.warned = _ToldOnce()
    opened.contents.has_bytes = not is_accelerator
    return opened
