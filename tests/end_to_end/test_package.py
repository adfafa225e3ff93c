"""The sdist and the wheel: they build, install where there is only torch, and do what each extra promises."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest
from packaging.requirements import Requirement

import disthooks as dh
from tests.support import ROOT

pytestmark = pytest.mark.full_tier


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """The folder of the sdist, and of the wheel that was built from it."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in _tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def _tracked() -> list[str]:
    """The files of the repository, as they are now."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("this is no git repository")
    return [name for name in done.stdout.split("\0") if (ROOT / name).is_file()]


def _needed(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """The distributions of these requirements, and all that they require, as they are installed here."""
    found: dict[str, importlib.metadata.Distribution] = {}
    todo = [Requirement(name) for name in names]
    while todo:
        requirement = todo.pop()
        key = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if key in found:
            continue
        try:
            found[key] = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{requirement.name} is not installed")
        for text in found[key].requires or ():
            needs = Requirement(text)
            extras = ("", *requirement.extras)
            if needs.marker is None or any(needs.marker.evaluate({"extra": extra}) for extra in extras):
                todo.append(needs)
    return found


def _bare(folder: pathlib.Path, wheel: pathlib.Path, *extras: str) -> pathlib.Path:
    """An environment with the wheel, torch, and what ``extras`` require; it returns the interpreter."""
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    required = importlib.metadata.distribution("disthooks").requires or []
    own = [Requirement(text) for text in required]
    wanted = [each for each in own if any(each.marker and _is_of(each, extra, own) for extra in extras)]
    for distribution in _needed(["torch", *(str(each).partition(";")[0] for each in wanted)]).values():
        for part in {path.parts[0] for path in distribution.files or () if path.parts[0] not in ("..", "__pycache__")}:
            if not (site / part).exists():
                (site / part).symlink_to(pathlib.Path(str(distribution.locate_file(part))))
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    # With the source on its path pip would find disthooks there, and install nothing.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([*pip, str(wheel)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return python


def _is_of(requirement: Requirement, extra: str, own: list[Requirement]) -> bool:
    """Whether ``requirement`` is of ``extra``, or of one that it includes: ``disthooks[config]``."""
    assert requirement.marker is not None
    if requirement.name == "disthooks":
        return False
    if requirement.marker.evaluate({"extra": extra}):
        return True
    inner = [each for each in own if each.name == "disthooks" and each.marker is not None]
    inner = [each for each in inner if each.marker and each.marker.evaluate({"extra": extra})]
    return any(_is_of(requirement, name, own) for each in inner for name in each.extras)


def _run(python: pathlib.Path, *command: str, folder: pathlib.Path) -> str:
    environment = {"PATH": str(python.parent), "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    words = [str(python), *command] if command[0] == "-c" else [str(python.parent / command[0]), *command[1:]]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


ALONE = """
import torch, disthooks as dh
from torch import nn

model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saving = dh.save_activations(model, "*", dh.OnDisk("."))
watch = dh.gradients(model, optimizer, rules=[dh.ClipNorm(1e-3)], every=1)
(100 * model(torch.randn(512, 256))).square().mean().backward()
optimizer.step()
watch.remove()
assert saving.report().moved > 512 * 256 * 4, saving.report()
assert watch.latest["grad_norm"] > 1 and watch.latest["grad_norm_clipped"] < 1.001e-3, watch.latest
try:
    dh.config.from_config("hooks.yaml")
except dh.errors.ConfigError as error:
    print(dh.__version__, error)
"""
HOOKS = "save: [{modules: '*', store: {kind: OnDisk, directory: .}}]\n"
CONFIG = "import disthooks as dh; print(dh.config.from_config('hooks.yaml').saves[0][0])"
SINK = """
import torch, disthooks as dh
from torch import nn

model = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with dh.gradients(model, optimizer, stats=[dh.stats.Norm()], sinks=[dh.sinks.{sink}], every=1):
    model(torch.ones(4, 4)).sum().backward()
    optimizer.step()
"""


def test_what_is_in_them(built: pathlib.Path) -> None:
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    version = dh.__version__
    assert (wheel.name, sdist.name) == (f"disthooks-{version}-py3-none-any.whl", f"disthooks-{version}.tar.gz")
    names = zipfile.ZipFile(wheel).namelist()
    package = {name for name in names if name.startswith("disthooks/")}
    here = {name for name in _tracked() if name.startswith("disthooks/")}
    assert package == here, "every tracked file of the package, and nothing else"
    assert all(name.startswith(("disthooks/", f"disthooks-{version}.dist-info/")) for name in names)
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "setup.cfg", "pyproject.toml"} <= packed


def test_with_torch_alone(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    python = _bare(tmp_path / "venv", next(built.glob("*.whl")))
    (tmp_path / "hooks.yaml").write_text(HOOKS)
    said = _run(python, "-c", ALONE, folder=tmp_path)
    assert said.startswith(dh.__version__)
    assert "pip install 'disthooks[config]'" in said


#: For each extra what it promises: commands, or Python, and a part of what is printed.
PROMISES = [
    ("config", ["-c", CONFIG], "('*',)"),
    ("cli", ["disthooks", "--help"], "explain"),
    ("tensorboard", ["-c", SINK.format(sink="TensorBoard('logs')")], ""),
    ("wandb", ["-c", SINK.format(sink="Wandb()")], ""),
]


@pytest.mark.parametrize(("extra", "command", "says"), PROMISES)
def test_with_an_extra(extra: str, command: list[str], says: str, built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    python = _bare(tmp_path / "venv", next(built.glob("*.whl")), *extra.split(","))
    (tmp_path / "hooks.yaml").write_text(HOOKS)
    (tmp_path / "run.jsonl").write_text('{"step": 0, "grad_norm": 1.0}\n')
    assert says in _run(python, *command, folder=tmp_path)


USER = """
import torch
from torch import nn

import disthooks as dh

model: nn.Module = nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
saving = dh.save_activations(model, "*", dh.Compact(), dh.OnDisk("/tmp", limit="1 GiB"))
with dh.gradients(model, optimizer, rules=[dh.ClipNorm(1.0)], stats=dh.stats.standard(), every=10) as watch:
    norm: float = watch.latest["grad_norm"]
moved: int = saving.report().moved
{wrong}
"""


def test_a_users_strict_mypy(built: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """The types of what users call are known, and wrong arguments are found."""
    python = _bare(tmp_path / "venv", next(built.glob("*.whl")))
    command = [sys.executable, "-m", "mypy", "--strict", "--python-executable", str(python), "train.py"]
    command += ["--cache-dir", str(tmp_path / "cache"), "--config-file", os.devnull]
    (tmp_path / "train.py").write_text(USER.format(wrong=""))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "train.py").write_text(USER.format(wrong='dh.OnDisk(directory=3)\ndh.ClipNorm("1")'))
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.count("error:") == 2, done.stdout
