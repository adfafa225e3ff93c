"""The example of an object store: it passes the conformance tests of a store, on a real S3 over HTTP too."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest
import torch

import disthooks as dh
from disthooks.errors import StoreError
from disthooks.saved.pipeline import pipeline
from disthooks.testing import StoreTests
from tests.support import ROOT
from tests.support.stores.faulty import soon

fsspec = pytest.importorskip("fsspec")
sys.path.insert(0, str(ROOT / "examples"))
from object_store import OnObjects  # noqa: E402


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of a bucket of a server in this process."""
    pytest.importorskip("s3fs")
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"KEY": "test", "SECRET": "test", "ENDPOINT_URL": f"http://{host}:{port}"}.items():
            patch.setitem(fsspec.config.conf.setdefault("s3", {}), name.lower(), value)
        # A worker of pytest may start a second server later, and all servers of a process share their buckets.
        bucket = f"scratch-{port}"
        fsspec.filesystem("s3", skip_instance_cache=True).mkdir(bucket)
        yield f"s3://{bucket}"
    server.stop()


@pytest.fixture(params=["memory", "file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> str:
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}"
    return f"memory://{uuid.uuid4().hex}" if request.param == "memory" else f"file://{tmp_path}"


def objects(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url, skip_instance_cache=True)
    found: list[str] = files.find(root)
    return found


@pytest.mark.full_tier(url=("memory", "file"))
class TestOnObjects(StoreTests):
    @pytest.fixture
    def store(self, url: str) -> OnObjects:
        return OnObjects(url, in_flight="64 KiB")


def test_nothing_is_left_of_a_training(url: str) -> None:
    store = OnObjects(url)
    x = torch.randn(64, 4096, requires_grad=True)
    truth = torch.autograd.grad(x.exp().sin().square().sum(), x)[0]
    for _ in range(2):
        with dh.saving(pipeline(store, at_least=0)) as saved:
            loss = x.exp().sin().square().sum()
        store.wait()
        assert saved.report().moved >= 2 * x.nbytes
        assert len(objects(url)) * x.nbytes == saved.report().stored
        assert torch.equal(torch.autograd.grad(loss, x)[0], truth)
        del loss
        assert soon(lambda: not objects(url))
    assert store.report()[0].held == 0


ENDS = """
import os, sys
from object_store import Objects
backend = Objects(sys.argv[1])
backend.write(memoryview(b"x"))
if not os.fork():
    Objects(sys.argv[1]).write(memoryview(b"x"))
    backend.write(memoryview(b"x"))
    sys.exit()
os.wait()
assert len(os.listdir(sys.argv[1].removeprefix("file://"))) == 1, "the fork removed what was its own, and no more"
"""


def test_nothing_is_left_of_a_process_that_ends(tmp_path: pathlib.Path) -> None:
    """Its own objects and those of its fork, also of backends that still live."""
    place = tmp_path / "objects"
    place.mkdir()
    python = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    call = [sys.executable, "-c", ENDS, f"file://{place}"]
    done = subprocess.run(call, env=os.environ | {"PYTHONPATH": python}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(place.iterdir()) == []


def test_a_configuration_names_it(url: str) -> None:
    ((_, stages),) = dh.config.from_config(
        {"save": [{"modules": "*", "store": {"kind": "OnObjects", "url": url}}]}
    ).saves
    assert stages.store == OnObjects(url)


def test_errors_say_where() -> None:
    with pytest.raises(StoreError, match="nowhere") as caught:
        OnObjects("nowhere://bucket").put(torch.ones(3))
    assert caught.value.path == "nowhere://bucket"
