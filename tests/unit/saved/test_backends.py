"""Our backends pass the conformance tests, and what only one of them promises."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection
from typing import Any

import pytest

from disthooks.errors import StoreError
from disthooks.saved.stores.backend import Backend, Checked, FileBackend, InTurn
from disthooks.testing import BackendTests

PAGE = 4096


class TestFile(BackendTests):
    @pytest.fixture(params=[True, False], ids=["direct", "buffered"])
    def backend(self, request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> FileBackend:
        self.direct = "auto" if request.param else False
        self.folder = tmp_path
        return FileBackend(str(tmp_path), limit="4 MiB", direct=self.direct)

    def reopen(self, backend: Backend[Any]) -> FileBackend:
        return FileBackend(str(self.folder), direct=self.direct)

    def traces(self, backend: Backend[Any]) -> Collection[str]:
        return os.listdir(self.folder)

    def lose(self, backend: Backend[Any]) -> None:
        os.ftruncate(backend.file.fileno(), 0)


class TestSeveral(TestFile):
    """Two directories in turn, with checksums."""

    @pytest.fixture
    def backend(self, tmp_path: pathlib.Path) -> Checked:
        self.folder = tmp_path
        self.files = []
        for name in "ab":
            (tmp_path / name).mkdir()
            self.files.append(FileBackend(str(tmp_path / name), limit="2 MiB"))
        return Checked(InTurn(self.files))

    def reopen(self, backend: Backend[Any]) -> Checked:
        return Checked(InTurn([FileBackend(str(self.folder / name)) for name in "ab"]))

    def traces(self, backend: Backend[Any]) -> Collection[str]:
        return [str(path) for path in self.folder.rglob("*")]

    def lose(self, backend: Backend[Any]) -> None:
        for file in self.files:
            os.ftruncate(file.file.fileno(), 0)


def test_a_checksum_finds_other_bytes(tmp_path: pathlib.Path) -> None:
    file = FileBackend(str(tmp_path), direct=False)
    backend = Checked(file)
    key = backend.write(memoryview(b"a" * 2 * PAGE))
    found = bytearray(2 * PAGE)
    backend.read(key, memoryview(found))
    os.pwrite(file.file.fileno(), b"b", 100)
    with pytest.raises(StoreError, match="the checksum differs"):
        backend.read(key, memoryview(found))
    backend.free_part(key, 0, PAGE)
    backend.read(key, memoryview(found))  # other bytes may be in the part that nobody needs
    assert found[PAGE:] == b"a" * PAGE
    backend.free(key)


def test_backends_in_one_directory_share_its_file(tmp_path: pathlib.Path) -> None:
    first, second = FileBackend(str(tmp_path)), FileBackend(str(tmp_path))
    assert first.file is second.file


def test_a_write_that_fails_keeps_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = FileBackend(str(tmp_path), direct=False)

    def full(*args: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="No space left") as caught:
            backend.write(memoryview(bytes(PAGE)))
    assert (caught.value.path, caught.value.wanted) == (str(tmp_path), PAGE)
    assert caught.value.free
    assert backend.file.in_use == 0
