"""How long an operator takes, in rough: its operations and bytes against the peaks of a device."""

# [Note: how wrong it is]
# torch's own roofline (pytorch/pytorch#134243) predicted 784.8 ms for a step that took 853.8 ms, and its test allows
# 30%. This one has the same form, with the share of a peak that is reached from `Device` (a note there says where each
# is from). So expect the same: the order of magnitude, and the ratio between parts of a model, not the milliseconds.
#
# The host needs more time for a call of torch's than a GPU needs for an empty kernel (2 to 3 µs): "at least 8 us"
# (zdevito.github.io, 2022-12-09, by an author of torch). So no call takes less than `HOST_CALL`. If the GPU is behind
# with its work, the host's time is hidden; a step with long and short calls is then a little quicker than its sum.

from __future__ import annotations

import collections
import math
from collections.abc import Iterable

from disthooks.predict.hardware.devices import Device
from disthooks.predict.recording.costs import Cost
from disthooks.predict.recording.record import Operator

#: Seconds of the host for a call of an operator.
HOST_CALL = 8e-6


def _peak(device: Device, dtype: str) -> float:
    """Operations a second; those of float32 if the device has no units for ``dtype``."""
    if dtype.startswith("float8"):
        return device.fp8 or device.fp16 or device.fp32
    units = {"bfloat16": device.bf16, "float16": device.fp16, "tf32": device.tf32, "float64": device.fp32 / 2}
    return units.get(dtype) or device.fp32


def seconds_of(call: Operator | Cost, device: Device) -> float:
    """How long a call takes: the longest of computing, of moving bytes, and of the host's call."""
    if not (call.flops or call.read or call.written):
        return 0.0
    computing = call.flops / (_peak(device, call.dtype) * device.matmul_efficiency)
    moving = (call.read + call.written) / (device.bandwidth * device.memory_efficiency)
    return max(computing, moving, HOST_CALL)  # see [Note: how wrong it is]


def phase_seconds(operators: Iterable[Operator], device: Device) -> dict[str, float]:
    times: collections.defaultdict[str, list[float]] = collections.defaultdict(list)
    for each in operators:
        times[each.phase].append(seconds_of(each, device))
    return {phase: math.fsum(each) for phase, each in times.items()}


def format_seconds(duration: float) -> str:
    """``duration`` seconds as text, with two digits.

    >>> format_seconds(1.84), format_seconds(4.2e-5), format_seconds(0.0), format_seconds(125.0)
    ('1.8 s', '42 µs', '0 µs', '125 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if duration >= size or unit == "µs":
            value = duration / size
            return f"{value:.0f} {unit}" if value >= 9.95 or math.isclose(value, 0.0) else f"{value:.1f} {unit}"
    raise AssertionError  # not reached: the last unit takes everything
