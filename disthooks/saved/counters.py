"""``Counters`` count what one attachment does with saved tensors, for each module.

The errors of codecs and the warnings of the attachment are kept beside them.
"""

# [Note: counts take no lock]
# Several counts are made for each saved tensor, and a lock for each would cost more than the count. CPython changes the
# thread only where it checks for interrupts: when a Python function begins, when a loop jumps back, and after a call.
# `module.kept += nbytes` and `counts[name] += nbytes` have none of these between reading and writing, so no other
# thread's count is lost. `name` has to be a str, and `counts` a dict whose factory is a C function.

from __future__ import annotations

import collections
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from disthooks import memory
from disthooks._handles import is_power_of_two
from disthooks._locks import new_lock
from disthooks._streams import on_accelerator
from disthooks._tensors import format_bytes
from disthooks._torch import in_transform
from disthooks.saved.report import SavedReport, SiteReport, shared_out
from disthooks.saved.stores.base import Store

_STEPS = 16  # how many steps a report has figures of

_STEPPED_BACK = (
    "disthooks stepped back in {where}, which runs inside {what}: what it saves is computed again anyway. To save the "
    "checkpoint's inputs instead, attach to the module around the checkpoint, or wrap it: SaveWith(checkpointed, ...). "
    "report().passed counts these calls; this is said once"
)
_HELD = (
    "a checkpoint inside {where} gets {nbytes} of tensors with a history as variables of a lambda or inner function, "
    "or inside a tuple, list or dict. They stay in memory, because the checkpoint holds them itself: pass each of them "
    "as an argument of the checkpoint. This is said once; report().kept_by has the bytes under 'held by a checkpoint'"
)
_RECORDED = (
    "{what} records the forward of {where} without the hooks of disthooks, so nothing that the recorded module saves "
    "goes to the store. Train the Python module, compiled by torch.compile where you want speed, or wrap what is "
    "recorded: SaveWith(recorded, ...). report().passed counts it; this is said once"
)
_TRANSFORMED = (
    "{where} is called inside a transform of torch.func (vmap, grad, ...), whose tensors belong to the transform: it "
    "goes without hooks. Around a vmap hooks work: attach to the module whose forward calls vmap, or put the call into "
    "saving(...). report().passed counts these calls; this is said once"
)
_DISABLED = (
    "{where} is called where torch.autograd.graph.disable_saved_tensors_hooks forbids hooks: it goes without "
    "hooks. Call it outside of that block to store what it saves. report().passed counts these calls; this is said "
    "once"
)
# The warning for each reason why a call ran without hooks. The other reasons need no action of the user.
_ADVICE = {
    "torch.jit.trace": _RECORDED.replace("{what}", "torch.jit.trace"),
    "torch.jit.script": _RECORDED.replace("{what}", "torch.jit.script"),
    "hooks disabled": _TRANSFORMED,
    "checkpoint": _STEPPED_BACK.replace("{what}", "an activation checkpoint"),
    "backward": _STEPPED_BACK.replace("{what}", "a backward (a reentrant checkpoint, most likely)"),
}
_GRAPHS = (
    "what {where} saves lies in memory of the CUDA graphs that torch.compile(mode='reduce-overhead') made: it stays "
    "there, as without disthooks, because the graph of its backward reads it there. If you want it in the store, "
    "compile this module in another mode ('default', 'max-autotune-no-cudagraphs'). report().kept_by['CUDA graph'] has "
    "the bytes; this is said once"
)
_IN_PLACE = (
    "{store} stores nothing of {where}: what it saves is in CPU memory, where this store would put it. To take it out "
    "of memory give OnDisk(directory); to make it smaller put a codec in front of the store, Compact() or "
    "Cast(torch.bfloat16). With the model on a GPU this store does its work"
)
_NOTHING = (
    "in a saving(...) block autograd saved nothing. Hooks are of one thread: if other threads did the work, attach to "
    "the modules that they call, with save_activations"
)
_ELSEWHERE = (
    "{where} saved nothing in the thread that called it, though gradients flow to its weights. If its forward runs its "
    "layers in threads of its own, they run without hooks, because hooks are those of one thread: attach to the "
    "layers themselves, by a pattern or a class, and their hooks open in the thread that calls them"
)

_given: dict[str, str] = {}  # the warnings of blocks that this process has given


class WarnedOnce:
    """The warnings of one attachment. Each is given once, and every report after that contains it.

    Attributes:
        texts: the warnings so far, by topic.
    """

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def warn(self, topic: str, text: str) -> None:
        """Give the warning ``text``, unless this attachment has warned of ``topic`` before."""
        # One call of C decides between two threads that arrive together, so no lock is needed.
        if self.texts.setdefault(topic, text) is text:
            warnings.warn(text, stacklevel=5)


class CodecErrors:
    """The largest relative error of each lossy codec, in a sample of the tensors that it changed (decision 33)."""

    def __init__(self, lock: Any) -> None:
        self._lock = lock
        self._changed: collections.Counter[int] = collections.Counter()  # tensors, by the codec's position
        self._unread: list[tuple[str, torch.Tensor]] = []
        self._largest: dict[str, float] = {}

    def is_due(self, position: int) -> bool:
        """Whether to measure the codec at ``position`` on this tensor: the 1st, 2nd, 4th, 8th, ... that it changed."""
        with self._lock:
            self._changed[position] += 1
            return is_power_of_two(self._changed[position])

    def add(self, codec: str, error: torch.Tensor) -> None:
        """Remember ``error``, a scalar. It stays on its device, because the host would have to wait to read it."""
        with self._lock:
            self._unread.append((codec, error))

    def read(self) -> dict[str, float]:
        """The largest errors by codec. Waits for the devices of the errors that were not read before."""
        with self._lock:
            unread, self._unread = self._unread, []
        for device in {error.device for _, error in unread if on_accelerator(error)}:
            torch.accelerator.synchronize(device)  # each error was computed on the stream of its tensor
        read = [(codec, float(error)) for codec, error in unread]
        with self._lock:
            for codec, error in read:
                self._largest[codec] = max(self._largest.get(codec, 0.0), error)
            return dict(self._largest)


class ModuleCounts:
    """The counts of one module: the fields of a :class:`SiteReport`, which can be added to.

    Attributes:
        name: of the module; "" for a block of code.
        all: the counts of the attachment.
    """

    __slots__ = (*SiteReport.__dataclass_fields__, "all", "name")

    def __init__(self, counters: Counters, name: str) -> None:
        self.all, self.name = counters, name
        self.tensors = self.saved = self.stored = self.moved = self.shared = self.kept = 0
        self.recast = self.recomputed = self.loaded = 0
        self.pack_seconds = self.unpack_seconds = self.codec_seconds = self.copy_seconds = 0.0

    def count_put(self, stored: int, moved: int, seconds: float, saved: int) -> None:
        """Count one content of ``saved`` bytes that the store took."""
        self.tensors += 1
        self.saved += saved
        self.stored += stored
        self.moved += moved
        self.pack_seconds += seconds

    def count_moved(self, moved: int) -> None:
        """Count bytes that have left the memory they were in after they were counted as stored."""
        self.moved += moved

    def count_got(self, loaded: int, seconds: float, copied: float = 0.0) -> None:
        """Count bytes that the store gave back, the seconds that backward waited, and the seconds of the copies."""
        self.loaded += loaded
        self.unpack_seconds += seconds
        self.copy_seconds += copied
        self.all.has_returned = True

    def count_kept(self, reason: str, nbytes: int) -> None:
        self.kept += nbytes
        self.all.kept[reason] += nbytes

    def count_recomputed(self, how: str, nbytes: int) -> None:
        """Count bytes that are dropped because the operators ``how`` compute them again."""
        self.recomputed += nbytes
        self.all.count_recomputed(how, nbytes)


class Counters:
    """The counts of one attachment, for all of its threads. See [Note: counts take no lock].

    Attributes:
        lock: under which a report is made.
        kept: bytes that stayed in memory, by the reason.
        has_returned: whether a tensor came back since the step began.
        saved_bytes: bytes of all contents that were packed so far.
        warned: the warnings of the attachment.
        codec_errors: the errors of the lossy codecs.
    """

    def __init__(self) -> None:
        self.lock = new_lock()
        self.saved_bytes = 0
        self.warned, self.codec_errors = WarnedOnce(), CodecErrors(self.lock)
        # A count costs one look-up: sums over modules are made when a report is (decision 86).
        self._calls = self._inner = 0
        self._modules: dict[str, ModuleCounts] = {}
        self.kept: dict[str, int] = collections.defaultdict(int)
        self._recomputed: dict[str, int] = collections.defaultdict(int)
        self._recomputed_in_steps: collections.deque[int] = collections.deque([0], maxlen=_STEPS)
        self.has_returned = False
        self._rerun = self._rerun_flops = self._proof_waits = 0
        self._differed: dict[str, int] = collections.defaultdict(int)
        self._passed: dict[str, int] = collections.defaultdict(int)
        self._called: set[str] = set()  # names of modules

    def __reduce__(self) -> tuple[type[Counters], tuple[()]]:
        return Counters, ()  # a copy of a module begins with empty counts: it has saved nothing yet

    @property
    def has_calls(self) -> bool:
        """Whether a call was seen, with hooks or without."""
        return bool(self._called)

    def of_module(self, name: str) -> ModuleCounts:
        found = self._modules.get(name)
        return self._modules.setdefault(name, ModuleCounts(self, name)) if found is None else found

    def count_recomputed(self, how: str, nbytes: int) -> None:
        self._recomputed[how] += nbytes
        self._recomputed_in_steps[-1] += nbytes

    def count_rerun(self, operators: int, flops: int) -> None:
        self._rerun += operators
        self._rerun_flops += flops
        self.has_returned = True

    def count_proof_wait(self) -> None:
        self._proof_waits += 1

    def count_differed(self, place: str, nbytes: int) -> None:
        """Count bytes that are stored because computing them again gave other bits; ``place`` says where."""
        self._differed[place] += nbytes

    def count_call(self, module_name: str = "") -> None:
        with self.lock:
            self._calls += 1
            self._called.add(module_name)
            if self.has_returned:
                self.has_returned = False
                self._recomputed_in_steps.append(0)

    def count_inner(self) -> None:
        """Count a call whose saved tensors another attachment inside of this one takes (the inner one wins)."""
        self._inner += 1

    def count_pass(self, reason: str, module_name: str) -> None:
        """Count a call that ran without hooks, and warn once if the user can change that."""
        self._passed[reason] += 1
        self._called.add(module_name)
        if reason in _ADVICE:
            is_forbidden = reason == "hooks disabled" and not in_transform()
            advice = _DISABLED if is_forbidden else _ADVICE[reason]
            key = "hooks forbidden" if is_forbidden else reason
            self.warned.warn(key, advice.format(where=repr(module_name or "this block")))

    def warn_of_graphs(self, module_name: str) -> None:
        """Warn once that tensors in the memory of CUDA graphs stay there."""
        where = repr(module_name) if module_name else "a saving(...) block"
        self.warned.warn("CUDA graph", _GRAPHS.format(where=where))

    def warn_of_held(self, module_name: str, nbytes: int) -> None:
        """Warn once that a checkpoint holds tensors in a form that hooks do not see."""
        where = repr(module_name) if module_name else "a saving(...) block"
        self.warned.warn("held", _HELD.format(where=where, nbytes=format_bytes(nbytes)))

    def warn_of_in_place(self, module_name: str, store: Store) -> None:
        """Warn once that the tensors are already where the store would put them, if nothing at all was stored."""
        has_stored = any(self._modules[name].stored for name in list(self._modules))
        if not has_stored:
            text = _IN_PLACE.format(store=store, where=repr(module_name) if module_name else "this block")
            if module_name or _given.setdefault(text, text) is text:
                self.warned.warn("in place", text)
            self.warned.texts.setdefault("in place", text)  # each run of a block is an attachment with a report

    def warn_of_threads(self, module_name: str) -> None:
        """Warn once that the layers of a module seem to run in other threads."""
        self.warned.warn("threads", _ELSEWHERE.format(where=repr(module_name)))

    def tell_of_nothing(self) -> None:
        """Have reports say that a block saw no saved tensor. That may be right, so it is no warning."""
        self.warned.texts.setdefault("nothing", _NOTHING)

    def report(
        self, store: Store, held: int = 0, names: Sequence[str] = (), is_recompute_idle: bool = False
    ) -> SavedReport:
        # The store and the device may take a while to answer. The lock is taken after that, so that no thread that
        # trains waits for the counters meanwhile. See [Note: locks].
        tiers, errors, unreturned = store.report(), self.codec_errors.read(), memory.unreturned()
        with self.lock:
            modules = {
                name: SiteReport(*(getattr(self._modules[name], field) for field in SiteReport.__dataclass_fields__))
                for name in list(self._modules)
            }
            total = sum(modules.values(), SiteReport())
            # Before the first call no module is named: all of them may still be called.
            uncalled = [name for name in names if name and name not in self._called] if self._called else []
            return SavedReport(
                calls=self._calls,
                stored=total.stored,
                moved=total.moved,
                shared=total.shared,
                kept=total.kept,
                kept_by=dict(self.kept),
                recast=total.recast,
                recomputed=total.recomputed,
                recomputed_by=dict(self._recomputed),
                recomputed_in_steps=tuple(self._recomputed_in_steps) if self._recomputed else (),
                rerun=self._rerun,
                rerun_flops=self._rerun_flops,
                proof_waits=self._proof_waits,
                differed=dict(self._differed),
                recompute_idle=int(is_recompute_idle and not self._recomputed),
                loaded=total.loaded,
                held=held,
                passed=dict(self._passed),
                inner=self._inner,
                pack_seconds=total.pack_seconds,
                unpack_seconds=total.unpack_seconds,
                tensors=total.tensors,
                unreturned=unreturned,
                tiers=tiers,
                errors=errors,
                sites=shared_out(modules, tiers),
                told=tuple(self.warned.texts.values()),
                uncalled=tuple(uncalled),
            )
