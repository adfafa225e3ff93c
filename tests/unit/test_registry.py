"""One registry: a decorator makes a kind, generated files are current, and installed packages add kinds."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Callable, Iterator

import pytest
import torch

import disthooks as dh
from disthooks import _registry
from disthooks._registry import find_kind, kind_names, kind_of_object, register
from disthooks.errors import ConfigError, UsageError
from disthooks.saved.pipeline import pipeline
from tests.support import ROOT

sys.path.append(str(ROOT / "tools"))

import generate

CODEC = """
from dataclasses import dataclass
from disthooks.saved.codecs import Codec

@dataclass(frozen=True)
class Same(Codec):
    \"\"\"Nothing is changed.

    Args:
        level: a number.
    \"\"\"
    level: int = 1

    def encode(self, tensor):
        return (tensor.clone(),), None

    def decode(self, tensors, spec):
        return tensors[0]
"""


def saving(*codecs: dict[str, object], store: str = "OnCpu") -> dict[str, object]:
    """A configuration with these codecs."""
    return {"save": [{"modules": "*", "codecs": list(codecs), "store": {"kind": store}}]}


@pytest.fixture
def install(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts a package with entry points on ``sys.path``, as pip does."""
    modules = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))

    def installed(name: str, code: str, entry_points: str) -> None:
        (tmp_path / f"{name}.py").write_text(code)
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(entry_points)
        _registry._entry_points_on.cache_clear()

    yield installed
    _registry._entry_points_on.cache_clear()
    for module in set(sys.modules) - modules:
        if module.startswith("theirs"):
            del sys.modules[module]


@pytest.fixture
def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    monkeypatch.setattr(_registry, "_registered", {noun: dict(kinds) for noun, kinds in _registry._registered.items()})


def test_generated_files_are_current() -> None:
    stale = [file.name for file, text in generate.generated() if file.read_text() != text]
    assert not stale, "run: python tools/generate.py --write"


def test_a_name_has_one_class(forgets: None) -> None:
    with pytest.raises(UsageError, match="there is a codec 'Cast' already"):
        register("codec", "Cast")(dict)
    register("sink", "Mine")(list)
    with pytest.raises(UsageError, match="there is a sink 'Mine' already"):
        register("sink", "Mine")(dict)
    with pytest.raises(UsageError, match="a kind is one of store, recompute"):
        register("coder")


def test_a_class_of_a_script(forgets: None) -> None:
    class Mine:
        """A sink."""

        def __init__(self, where: str) -> None:
            self.where = where

        def __call__(self, record: dict[str, object]) -> None:
            """Nothing."""

    register("sink")(Mine)
    plan = dh.config.from_config({"watch": {"stats": "standard", "sinks": [{"kind": "Mine", "where": "here"}]}})
    (make,) = plan.watches["sinks"]
    assert make().where == "here"
    assert kind_of_object(make()) is None, "another process does not know it"


def test_a_package_adds_a_kind(install: Callable[..., None]) -> None:
    install("theirs_good", CODEC, "[disthooks.codecs]\nSame = theirs_good:Same\n")
    assert "Same" in kind_names("codec")
    assert "theirs_good" not in sys.modules, "to list names, nothing is imported"
    document = saving({"kind": "Same", "level": 2})
    plan = dh.config.from_config(document)
    (codec,) = plan.saves[0][1].codecs
    assert (type(codec).__module__, codec.level) == ("theirs_good", 2)
    assert dh.config.Plan(saves=[("*", pipeline(codec, dh.OnCpu()))]).to_dict() == document
    kind = find_kind("codec", "Same")
    assert kind.package == "theirs_good"
    with pytest.raises(ConfigError, match=r"'Sam' is no codec; did you mean 'Same'\?"):
        dh.config.from_config(saving({"kind": "Sam"}))
    with pytest.raises(ConfigError, match=r"levels: Same has no argument 'levels'; did you mean 'level'\?"):
        dh.config.from_config(saving({"kind": "Same", "levels": 2}))


def test_the_schema_has_the_kinds_of_packages(install: Callable[..., None]) -> None:
    from disthooks.config.schema import schema

    install("theirs_schema", CODEC, "[disthooks.codecs]\nSame = theirs_schema:Same\n")
    titles = [entry.get("title") for entry in schema(others=True)["definitions"]["codec"]["anyOf"]]
    assert titles == ["Cast", "Compact", "Quantize", "Same", None]
    assert "Same" not in str(schema())


def test_a_broken_package_is_an_error_when_it_is_used(install: Callable[..., None]) -> None:
    install("theirs_broken", "raise RuntimeError('not today')\n", "[disthooks.codecs]\nBroken = theirs_broken:Broken\n")
    assert dh.config.from_config(saving({"kind": "Compact"})).saves
    with pytest.raises(ConfigError, match=r"'Broken' is a codec of the .*'theirs_broken', .*not today"):
        dh.config.from_config(saving({"kind": "Broken"}))


def test_two_packages_with_one_name(install: Callable[..., None]) -> None:
    install("theirs_one", CODEC, "[disthooks.codecs]\nSame = theirs_one:Same\n")
    install("theirs_two", CODEC, "[disthooks.codecs]\nSame = theirs_two:Same\n")
    with pytest.raises(ConfigError, match="'Same' is a codec of several packages, theirs_one and theirs_two"):
        dh.config.from_config(saving({"kind": "Same"}))


def test_a_package_adds_an_engine(install: Callable[..., None]) -> None:
    code = "from disthooks.engines.base import Plain\n\nclass Theirs(Plain):\n    label = 'Theirs'\n\n"
    code += "    @classmethod\n    def recognises(cls, model):\n        return type(model).__name__ == 'Shell'\n"
    install("theirs_engine", code, "[disthooks.engines]\nTheirs = theirs_engine:Theirs\n")
    from disthooks.engines.detect import detect_engine

    class Shell(torch.nn.Linear):
        pass

    assert detect_engine(Shell(2, 2)).label == "Theirs"
    assert type(detect_engine(torch.nn.Linear(2, 2))).__name__ == "Plain"
