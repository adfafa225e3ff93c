"""The example package adds a codec and a store, passes the conformance tests, and what is wrong fails them."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import ROOT

PLUGIN = ROOT / "examples" / "disthooks_plugin"
#: A wrong kind, the class that tests it, and the tests that it fails.
WRONG = {
    "loses a bit and does not say so": (
        "Codec",
        "def encode(self, tensor): return (tensor.bfloat16(),), tensor.dtype\n"
        "    def decode(self, tensors, spec): return tensors[0].to(spec)",
        {"test_law_1_what_comes_back", "test_law_1_gradients"},
    ),
    "keeps state": (
        "Codec",
        "last = [None]\n"
        "    def encode(self, tensor):\n        self.last[0] = tensor\n        return (tensor[:0],), None\n"
        "    def decode(self, tensors, spec): return self.last[0]",
        {"test_law_1_gradients", "test_law_7_threads"},
    ),
    "gives out its own memory": (
        "Store",
        "def put(self, tensor): return tensor.clone()\n    def get(self, ticket): return ticket\n"
        "    def drop(self, ticket): pass",
        {"test_law_1_what_comes_back"},
    ),
    "is of this rank alone": (
        "Rule",
        "def rewrite(self, work):\n"
        "        for _, grad in work.present():\n            grad.mul_(1.0 + torch.distributed.is_initialized())",
        {"test_law_11_truth_on_two_ranks"},
    ),
}
CODE = """
from dataclasses import dataclass
import pytest, torch
from disthooks.grads.rules import Rule
from disthooks.saved.codecs import Codec
from disthooks.saved.stores.base import Store
from disthooks.testing import {noun}Tests

@dataclass(frozen=True)
class Wrong({noun}):
    {body}

class TestWrong({noun}Tests):
    @pytest.fixture
    def {fixture}(self):
        return Wrong()
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The package as pip installs it, in a folder of its own."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "site"
    subprocess.run(["cp", "-r", str(PLUGIN), str(source)], check=True)
    call = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*call, "--target", str(target), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(call: list[str], *paths: pathlib.Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*map(str, paths), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(call, env=environment, capture_output=True, text=True, timeout=500, check=False, cwd=paths[0])


def pytest_in(folder: pathlib.Path, *paths: pathlib.Path) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "pytest", "-rfE", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return run(call, folder, *paths)


def test_a_configuration_uses_its_kinds(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "hooks.yaml").write_text(
        "save:\n- modules: '*'\n  at_least: 0\n  codecs: [{kind: Runs}]\n  store: {kind: Zipped, level: 9}\n"
    )
    code = """
import torch, disthooks as dh
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
with dh.prepare(model, None, "hooks.yaml") as attached:
    model(torch.ones(64, 64)).sum().backward()
print(attached.report().moved > 0, dh.config.from_config("hooks.yaml").saves[0][1])
"""
    done = run([sys.executable, "-c", code], tmp_path, installed)
    assert "True" in done.stdout, done.stderr
    assert "Runs(at_least=64), Zipped(level=9)" in done.stdout
    schema = run([sys.executable, "-m", "disthooks.config.schema"], tmp_path, installed).stdout
    assert '"title": "Zipped"' in schema


def test_it_passes_the_conformance_tests(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_plugin.py").write_text((PLUGIN / "tests" / "test_plugin.py").read_text())
    done = pytest_in(tmp_path, installed)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


@pytest.mark.full_tier
@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails(name: str, tmp_path: pathlib.Path) -> None:
    noun, body, fails = WRONG[name]
    (tmp_path / "test_wrong.py").write_text(CODE.format(noun=noun, body=body, fixture=noun.lower()))
    done = pytest_in(tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    failed = {line.split("::")[-1].split("[")[0].split(" ")[0] for line in done.stdout.splitlines() if "FAILED" in line}
    assert fails <= failed, done.stdout
