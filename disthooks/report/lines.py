"""``Lines``: the lines of a log as bytes of UTF-8, however the file is packed."""

from __future__ import annotations

import codecs
import gzip
import pathlib
import zlib
from collections.abc import Iterator
from typing import IO

from disthooks.errors import UsageError

_BLOCK = 1 << 20
_GZIP = b"\x1f\x8b"
#: Byte order marks; that of UTF-32 begins with that of UTF-16.
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


class Lines:
    """The whole lines of a file that were written since they were last iterated over; ``rest`` stands behind the last.

    Text with a byte order mark, and files of gzip, are read too.
    """

    def __init__(self, file: pathlib.Path) -> None:
        self.file = file
        self._at = self._size = 0
        self._rest: list[bytes] = []
        self._decoder: codecs.IncrementalDecoder | None = None

    @property
    def rest(self) -> bytes:
        return b"".join(self._rest)

    def is_shorter(self) -> bool:
        return self.file.exists() and self.file.stat().st_size < self._size

    def __iter__(self) -> Iterator[bytes]:
        """The lines, without their ends; UsageError if the file cannot be read, or holds no text."""
        try:
            size = self.file.stat().st_size
            if size == self._size:
                return
            self._size = size
            with self.file.open("rb") as raw:
                stream = self._unpacked(raw)
                stream.seek(self._at)
                while block := stream.read(_BLOCK):
                    yield from self._split(block)
                    self._at += len(block)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UsageError(f"{self.file} is a gzip file that is cut off or damaged: {error}") from error
        except OSError as error:
            raise UsageError(f"{self.file}: cannot be read: {error.strerror}") from error

    def _unpacked(self, raw: IO[bytes]) -> IO[bytes] | gzip.GzipFile:
        head = raw.read(16)
        raw.seek(0)
        if head.startswith(_GZIP):
            return gzip.open(raw)
        if b"\0" in head and not head.startswith(tuple(_MARKS)):
            what = "a binary file, or text without a byte order mark that is not UTF-8"
            raise UsageError(f"{self.file} is {what}; give what the sink Jsonl wrote")
        return raw

    def _split(self, block: bytes) -> Iterator[bytes]:
        if self._at == 0:
            name = next((name for mark, name in _MARKS.items() if block.startswith(mark)), None)
            self._decoder = codecs.getincrementaldecoder(name)("replace") if name else None
        if self._decoder is not None:
            block = self._decoder.decode(block).encode()
        *lines, rest = block.split(b"\n")
        for line in lines:
            yield b"".join([*self._rest, line])
            self._rest = []
        self._rest.append(rest)
