"""Extents of segments and files: nothing overlaps, nothing is lost."""

from __future__ import annotations

import os
import pathlib

from disthooks.saved.stores.extents import Extents
from disthooks.saved.stores.scratch_file import ScratchFile, Waste

PAGE = 4096


def test_in_reverse_it_is_a_bump_offset() -> None:
    parts = Extents(100)
    for _ in range(3):
        several = [extent for _ in range(10) if (extent := parts.take(10)) is not None]
        assert [extent.offset for extent in several] == list(range(0, 100, 10))
        for extent in reversed(several):
            parts.give(extent)
            assert len(parts.free) == 1


def test_no_hole_in_what_is_used(tmp_path: pathlib.Path) -> None:
    """Pages of dropped tensors become holes; those that were given to others meanwhile do not."""
    file = ScratchFile(str(tmp_path), False)
    extents = [file.allocate(4 * PAGE) for _ in range(4)]
    for number, extent in enumerate(extents):
        file.write(memoryview(bytes([number + 1]) * 4 * PAGE), extent.offset)
    file.release(Waste(extents[0], PAGE, PAGE))
    file.release(Waste(extents[1], 0, 4 * PAGE))
    file.release(extents[1])
    again = file.allocate(4 * PAGE)
    assert again.offset == extents[1].offset
    file.write(memoryview(b"x" * 4 * PAGE), again.offset)
    file.shrink(keep_peak=False)
    data = bytearray(4 * PAGE)
    file.read(memoryview(data), again.offset, len(data))
    assert data == b"x" * 4 * PAGE
    file.read(memoryview(data), extents[0].offset, len(data))
    assert data[:PAGE] == b"\x01" * PAGE == data[2 * PAGE : 3 * PAGE]
    if file._has_holes:
        assert data[PAGE : 2 * PAGE] == bytes(PAGE)
        assert os.fstat(file.fileno()).st_blocks * 512 <= 15 * PAGE
