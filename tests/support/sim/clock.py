"""A modelled clock: an accelerator and its link as numbers, on which a tape of saved tensors is replayed.

The simulated accelerator beside this file (``simulated.py``) has real bytes, and says whether numbers are right. This
model has no bytes at all, and says how long a step takes: a step of a model that saves 45 GB is replayed in
milliseconds. It is deterministic, and its unit of time is a modelled second.

A :class:`Machine` has streams, each of which does its items in order. An item begins when the host has issued it, when
the stream is free and when the events that it waits for have come. The streams are the computation and the two
directions of the link. Because a stream is in order, the time of an item is known when it is issued, so there is no
queue of events.

A :class:`Tape` says what a step runs, saves, reads and drops, in its order. :func:`replay` gives a tape to a
:class:`Policy`, which decides what is sent where, and returns a :class:`Result`.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# -- the machine


@dataclass(frozen=True)
class Rates:
    """How fast the parts of a machine are.

    Attributes:
        device: bytes a second that an operator reads and writes in device memory.
        to_host, to_device: bytes a second of the link; the directions do not slow each other down.
        flops: floating point operations a second of a matrix product.
        copy_s: seconds that each copy takes besides its bytes.
        host_operator_s: seconds of the host for each operator of a tape that says how many it has.
        host_tensor_s: seconds of the host for each storage that a policy keeps in a store, each way.
    """

    device: float = 4.3e12
    to_host: float = 53e9
    to_device: float = 53e9
    flops: float = 400e12
    copy_s: float = 10e-6
    host_operator_s: float = 0.0
    host_tensor_s: float = 0.0

    def operator(self, nbytes: float, flops: float = 0.0) -> float:
        """Seconds of an operator that reads and writes ``nbytes`` and computes ``flops``: the longer of the two."""
        return max(nbytes / self.device, flops / self.flops)


@dataclass(frozen=True)
class Event:
    """A point in the work of a stream, and when the stream comes to it, in seconds."""

    time: float = 0.0


@dataclass
class Stream:
    """Items that are done one after another, in seconds."""

    now: float = 0.0  # when the last item is done
    busy: float = 0.0
    stalled: float = 0.0  # while it waits for events of other streams
    spans: list[tuple[float, float]] = field(default_factory=list)  # begin and end; adjoining items are one span
    copied: list[int] = field(default_factory=list)  # bytes of each copy

    def run(self, seconds: float, issued: float, after: Sequence[Event] = ()) -> Event:
        """Do an item of so many ``seconds``, which the host issued at ``issued``, after the events ``after``."""
        free = max(self.now, issued)
        begin = max([free, *(event.time for event in after)])
        self.stalled += begin - free
        self.busy += seconds
        self.now = begin + seconds
        if seconds > 0:
            if self.spans and self.spans[-1][1] == begin:
                begin = self.spans.pop()[0]
            self.spans.append((begin, self.now))
        return Event(self.now)

    def record(self) -> Event:
        """The event of all that it was given so far."""
        return Event(self.now)

    def busy_within(self, begin: float, end: float) -> float:
        """Seconds between ``begin`` and ``end`` in which it works."""
        return sum(max(0.0, min(end, last) - max(begin, first)) for first, last in self.spans)


class Memory:
    """Bytes of device memory over modelled time; what is allocated and freed need not be told in the order of time."""

    def __init__(self) -> None:
        self._changes: list[tuple[float, int]] = []

    def allocate(self, nbytes: int, at: float) -> None:
        """``nbytes`` are taken at the second ``at``."""
        self._changes.append((at, nbytes))

    def free(self, nbytes: int, at: float) -> None:
        """``nbytes`` are given back at the second ``at``; whoever allocates in the same moment may have them."""
        self._changes.append((at, -nbytes))

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        live = peak = 0
        for _, nbytes in sorted(self._changes):  # at one time, what is freed comes first
            live += nbytes
            peak = max(peak, live)
        return peak


class Machine:
    """Streams, a host and device memory with one clock."""

    def __init__(self, rates: Rates | None = None) -> None:
        self.rates = rates or Rates()
        self.host = 0.0  # seconds, how far the host has come
        self.compute, self.out, self.back = Stream(), Stream(), Stream()
        self.memory, self.host_memory = Memory(), Memory()

    def run(self, stream: Stream, seconds: float, *after: Event) -> Event:
        """Give ``stream`` an item; the host does not wait."""
        return stream.run(seconds, self.host, after)

    def wait_event(self, stream: Stream, event: Event) -> None:
        """All later items of ``stream`` come after ``event``."""
        self.run(stream, 0.0, event)

    def synchronize(self, event: Event) -> None:
        """The host waits for ``event``."""
        self.host = max(self.host, event.time)

    def to_host(self, nbytes: int, *after: Event) -> Event:
        """Copy ``nbytes`` to host memory."""
        return self._copy(self.out, nbytes, self.rates.to_host, after)

    def to_device(self, nbytes: int, *after: Event) -> Event:
        """Copy ``nbytes`` to device memory."""
        return self._copy(self.back, nbytes, self.rates.to_device, after)

    def _copy(self, stream: Stream, nbytes: int, speed: float, after: Sequence[Event]) -> Event:
        stream.copied.append(nbytes)
        # Another thread gives copies to the streams, so they do not wait until the computing thread comes to them.
        return stream.run(self.rates.copy_s + nbytes / speed, 0.0, after)


# -- the tape


@dataclass(frozen=True)
class Saved:
    """A storage that autograd saves.

    Attributes:
        nbytes: bytes of the storage.
        operator: the operator that wrote it last before it was saved.
        module: the module in whose forward that was.
        dtype: of the tensor that was saved first.
        is_recomputable: whether ``Recompute`` drops it.
        stored: bytes that a store gets of it; as many as it has when there is no codec.
        encode_s: seconds of the device when it is put.
        restore_s: seconds of the device when it is first read.
    """

    nbytes: int
    operator: str = ""
    module: str = ""
    dtype: str = "float32"
    is_recomputable: bool = False
    stored: int = -1
    encode_s: float = 0.0
    restore_s: float = 0.0

    def __post_init__(self) -> None:
        if self.stored < 0:
            object.__setattr__(self, "stored", self.nbytes)

    @property
    def is_whole(self) -> bool:
        """Whether the store gets the storage as it is."""
        return self.stored == self.nbytes


#: What happens in a step. ``run``: operators of so many seconds. ``rest``: from now on so many bytes of the device are
#: not those of saved storages (weights, gradients, what an operator works with). ``put``: a storage is saved for the
#: first time. ``release``: forward itself needs it no more. ``get``: backward reads it for the first time. ``drop``:
#: nobody needs it any more. ``backward``: backward begins.
Step = tuple[str, float]


@dataclass(frozen=True)
class Tape:
    """One step of the model ``name``, recorded: steps name a storage by its number in ``saved``."""

    name: str
    saved: tuple[Saved, ...]
    steps: tuple[Step, ...]
    about: dict[str, Any] = field(default_factory=dict)  # where it comes from

    @property
    def nbytes(self) -> int:
        """Bytes of all saved storages, as stores get them."""
        return sum(each.stored for each in self.saved)

    def seconds(self) -> tuple[float, float]:
        """Seconds of all operators in forward and in backward."""
        times, phase = [0.0, 0.0], 0
        for kind, value in self.steps:
            phase = 1 if kind == "backward" else phase
            times[phase] += value if kind == "run" else 0.0
        return times[0], times[1]

    def timed(self, forward_s: float, backward_s: float) -> Tape:
        """The tape whose operators take ``forward_s`` and ``backward_s`` in all, in the proportions of this one."""
        was, phase, steps = self.seconds(), 0, []
        scale = [wanted / max(have, 1e-30) for wanted, have in zip((forward_s, backward_s), was, strict=True)]
        for kind, value in self.steps:
            phase = 1 if kind == "backward" else phase
            steps.append((kind, value * scale[phase] if kind == "run" else value))
        return dataclasses.replace(self, steps=tuple(steps))

    def coded(self, change: Callable[[Saved], Saved]) -> Tape:
        """The tape with ``change`` of each saved storage: what a codec makes of it."""
        return dataclasses.replace(self, saved=tuple(map(change, self.saved)))

    def write(self, path: pathlib.Path) -> None:
        """Write it as JSON: seconds in steps of a nanosecond, one storage and 24 steps in a line."""
        rows = [[each.nbytes, each.operator, each.module, each.dtype, each.is_recomputable] for each in self.saved]
        steps = [[kind, round(value, 9) if kind == "run" else int(value)] for kind, value in self.steps]
        lines = [steps[i : i + 24] for i in range(0, len(steps), 24)]
        path.write_text(
            "{\n"
            + f'"name": {json.dumps(self.name)},\n"about": {json.dumps(self.about)},\n"saved": [\n'
            + ",\n".join(map(json.dumps, rows))
            + '\n],\n"steps": [\n'
            + ",\n".join(json.dumps(line)[1:-1] for line in lines)
            + "\n]\n}\n"
        )

    @staticmethod
    def read(path: pathlib.Path) -> Tape:
        """The tape that was written to ``path``."""
        found = json.loads(path.read_text())
        saved = tuple(Saved(*row) for row in found["saved"])
        return Tape(found["name"], saved, tuple((kind, value) for kind, value in found["steps"]), found["about"])


# -- the replay


class Block:
    """A saved storage in a replay: its number in the tape, what of it is in device memory, and until when."""

    def __init__(self, number: int, saved: Saved) -> None:
        self.number, self.saved, self.nbytes = number, saved, saved.stored
        self.sent: Event | None = None  # when its copy to the host is done
        self.brought: Event | None = None  # when its copy to the device is done
        self.is_resident = False
        self.is_dropped = False
        self.in_forward = True


class Policy:
    """Decides where saved storages are. This one leaves all of them on the device.

    A policy sees the host's order of calls. It never asks what comes later, unless it was given the tape.
    """

    is_store = False  # whether the host works for each storage that is put or read

    def begin(self, machine: Machine) -> None:
        """A step begins on ``machine``."""
        self.machine = machine

    def put(self, block: Block) -> None:
        """Forward has saved ``block``, which the stream of the computation has written."""

    def begin_backward(self) -> None:
        """Backward begins."""

    def get(self, block: Block) -> None:
        """Backward reads ``block`` next: after this the stream of the computation may."""

    def drop(self, block: Block) -> None:
        """``block`` is not needed any more."""

    # -- what policies are made of

    def send(self, block: Block, ready: Event) -> Event:
        """Copy ``block`` to the host after ``ready``; the time at which it is there."""
        machine = self.machine
        event = machine.to_host(block.nbytes, ready)
        machine.host_memory.allocate(block.nbytes, event.time - block.nbytes / machine.rates.to_host)
        return event

    def bring(self, block: Block) -> None:
        """Copy ``block`` back; the copy begins when the computation has come here, and takes memory then."""
        machine = self.machine
        assert block.sent is not None
        block.brought = machine.to_device(block.nbytes, machine.compute.record(), block.sent)
        machine.host_memory.free(block.nbytes, block.brought.time)
        if not block.is_resident:
            block.is_resident = True
            began = block.brought.time - machine.rates.copy_s - block.nbytes / machine.rates.to_device
            machine.memory.allocate(block.nbytes, began)

    def give_back(self, block: Block, sent: Event, at: float) -> None:
        """``block`` is in host memory at ``sent``; its device memory is free at the second ``at``."""
        block.sent = sent
        if not (block.saved.is_whole and block.in_forward):  # `release` frees what forward reads still
            self.free(block, at)

    def free(self, block: Block, at: float) -> None:
        """The device memory of ``block`` is given back at the second ``at``."""
        if block.is_resident:
            block.is_resident = False
            self.machine.memory.free(block.nbytes, at)


@dataclass(frozen=True)
class Result:
    """What a replay of one step found: modelled seconds and bytes.

    Attributes:
        forward_s, backward_s: seconds of the two phases.
        compute_s: seconds in which the computation works, codecs and recomputation included.
        stalled_s: seconds in which the computation waits for copies.
        peak: most bytes of device memory.
        host_peak: most bytes of saved storages in host memory.
        host_s: seconds in which the host works.
        held: bytes of saved storages on the device when backward begins.
        sent: bytes over the link to the host.
        link_out, link_back: the share of forward in which the link sends, and of backward in which it brings.
    """

    forward_s: float
    backward_s: float
    compute_s: float
    stalled_s: float
    peak: int
    host_peak: int
    host_s: float
    held: int
    sent: int
    link_out: float
    link_back: float

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.forward_s + self.backward_s


class _Replay:
    """A tape on its way through a policy."""

    def __init__(self, tape: Tape, policy: Policy, machine: Machine) -> None:
        self.machine, self.policy = machine, policy
        self.blocks = [Block(i, saved) for i, saved in enumerate(tape.saved)]
        self.rest = self.held = 0
        self.forward_s = self.host_s = 0.0
        # Seconds of the host for each second of operators, in forward and in backward.
        counts = tape.about.get("operators", (0, 0))
        seconds = zip(counts, tape.seconds(), strict=True)
        self.launching = [count * machine.rates.host_operator_s / max(each, 1e-30) for count, each in seconds]
        self.in_full: set[int] = set()  # storages that a codec keeps in another size, and that are there in full
        policy.begin(machine)
        for kind, value in tape.steps:
            getattr(self, f"_{kind}")(value if kind in ("run", "rest") else self._block(kind, value))

    def _block(self, kind: str, value: float) -> Block | None:
        return None if kind == "backward" else self.blocks[int(value)]

    def _run(self, seconds: float) -> None:
        self.machine.run(self.machine.compute, seconds)
        self._host(seconds * self.launching[self.forward_s > 0])
        # The host gives operators to the stream one by one, so the last one cannot end before the host has done so.
        self.machine.compute.now = max(self.machine.compute.now, self.machine.host)

    def _host(self, seconds: float) -> None:
        """The host works."""
        self.machine.host += seconds
        self.host_s += seconds

    def _rest(self, nbytes: float) -> None:
        memory, now = self.machine.memory, self.machine.compute.now
        memory.allocate(int(nbytes) - self.rest, now) if nbytes > self.rest else memory.free(
            self.rest - int(nbytes), now
        )
        self.rest = int(nbytes)

    def _put(self, block: Block) -> None:
        machine, saved = self.machine, block.saved
        if not saved.is_whole:  # it stays in full as long as forward needs it, besides what is stored
            machine.memory.allocate(saved.nbytes, machine.compute.now)
            self.in_full.add(block.number)
        if saved.encode_s:
            machine.run(machine.compute, saved.encode_s)
        machine.memory.allocate(block.nbytes, machine.compute.now)
        block.is_resident = True
        if self.policy.is_store and block.nbytes:
            self._host(machine.rates.host_tensor_s)
        self.policy.put(block)

    def _release(self, block: Block) -> None:
        block.in_forward = False
        if block.number in self.in_full:
            self._free_full(block)
        elif block.sent is not None and block.brought is None:
            self.policy.free(block, max(block.sent.time, self.machine.compute.now))

    def _backward(self, _: Any) -> None:
        self.forward_s = self.machine.compute.now
        self.held = sum(block.nbytes for block in self.blocks if block.is_resident)
        self.policy.begin_backward()

    def _get(self, block: Block) -> None:
        machine = self.machine
        if block.in_forward:
            self._release(block)
        if self.policy.is_store and block.nbytes:
            self._host(machine.rates.host_tensor_s)
        self.policy.get(block)
        if block.brought is not None:
            machine.wait_event(machine.compute, block.brought)
        if not block.saved.is_whole:
            machine.memory.allocate(block.saved.nbytes, machine.compute.now)
            self.in_full.add(block.number)
            machine.run(machine.compute, block.saved.restore_s)

    def _drop(self, block: Block) -> None:
        if block.number in self.in_full:
            self._free_full(block)
        event = block.brought or block.sent or Event()
        self.policy.free(block, max(event.time, self.machine.compute.now))
        block.is_dropped = True
        self.policy.drop(block)

    def _free_full(self, block: Block) -> None:
        self.in_full.discard(block.number)
        self.machine.memory.free(block.saved.nbytes, self.machine.compute.now)

    def result(self) -> Result:
        machine, end = self.machine, self.machine.compute.now
        backward = end - self.forward_s
        return Result(
            forward_s=self.forward_s,
            backward_s=backward,
            compute_s=machine.compute.busy,
            stalled_s=machine.compute.stalled,
            peak=machine.memory.peak,
            host_peak=machine.host_memory.peak,
            host_s=self.host_s,
            held=self.held,
            sent=sum(machine.out.copied),
            link_out=machine.out.busy_within(0.0, self.forward_s) / max(self.forward_s, 1e-30),
            link_back=machine.back.busy_within(self.forward_s, end) / max(backward, 1e-30),
        )


def replay(tape: Tape, policy: Policy, rates: Rates | None = None, machine: Machine | None = None) -> Result:
    """Replay one step of ``tape`` with ``policy`` on ``machine``, or on a fresh one with these ``rates``."""
    return _Replay(tape, policy, machine or Machine(rates)).result()


def largest_limit(replayed: Callable[[int], Sequence[Result]], peak: float, most: int) -> int | None:
    """The largest limit in bytes, within 16 MiB, with which no step of ``replayed`` has more than ``peak`` bytes.

    No limit above ``most`` is tried. None if even a limit of nothing does not do it.
    """

    def fits(limit: int) -> bool:
        return all(result.peak <= peak for result in replayed(limit))

    low, high = 0, most
    if not fits(low) or fits(high):
        return high if fits(high) else None
    while high - low > 16 << 20:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
