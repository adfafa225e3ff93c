"""What went through a store: bytes, and the time its threads took for them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes unless it says seconds.

    Attributes:
        put: given to the store.
        written: of those, written to their arena.
        never_written: dropped before a thread came to write them.
        from_memory: wanted while they still were in memory.
        ahead: read before they were wanted.
        in_vain: read ahead, and given up again for others.
        read: read from the arena, ahead or not.
        write_seconds: time that threads were writing.
        read_seconds: time that threads, the caller's too, were reading.
    """

    put: int = 0
    written: int = 0
    never_written: int = 0
    from_memory: int = 0
    ahead: int = 0
    in_vain: int = 0
    read: int = 0
    write_seconds: float = 0.0
    read_seconds: float = 0.0
