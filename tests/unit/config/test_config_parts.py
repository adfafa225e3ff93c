"""The parts of a configuration: where values stand, paths, precedence, budget, conflicts, the way back to a file."""

from __future__ import annotations

import json
import pathlib
import re
import sys
from typing import Any

import jsonschema
import pytest
import torch
import yaml

import disthooks as dh
from disthooks._kinds import KINDS
from disthooks.config import dump, find
from disthooks.config import schema as schema_command
from disthooks.config.schema import FILE, text
from disthooks.errors import AttachError, ConfigError, MatchError, UsageError
from disthooks.saved.pipeline import pipeline
from tests.support import ROOT
from tests.support.models import Tiny, step, tokens


def _file(folder: pathlib.Path, written: str) -> pathlib.Path:
    file = folder / "hooks.yaml"
    file.write_text(written.replace("{folder}", str(folder)))
    return file


def _read(folder: pathlib.Path, written: str) -> dh.config.Plan:
    return dh.config.from_config(_file(folder, written))


# What is written


def test_merged_keys_and_aliases(tmp_path: pathlib.Path) -> None:
    plan = _read(
        tmp_path,
        "save:\n- &first\n  modules: norm\n  store: &store {kind: OnCpu, limit: 1 MiB}\n"
        "- {<<: *first, modules: embed}\n- {modules: blocks.0, store: {<<: *store, limit: 2 MiB}}\n",
    )
    assert [patterns for patterns, _ in plan.saves] == [("norm",), ("embed",), ("blocks.0",)]
    again = (
        "save:\n- modules: norm\n  store: &b {<<: &a {kind: OnCpu, limit: 1}, limit: 2}\n- {modules: x, store: *b}\n"
    )
    assert [line.store for _, line in _read(tmp_path, again).saves] == [dh.OnCpu(2)] * 2
    assert [line.store for _, line in plan.saves] == [dh.OnCpu("1 MiB"), dh.OnCpu("1 MiB"), dh.OnCpu("2 MiB")]


def test_numbers_as_people_write_them(tmp_path: pathlib.Path) -> None:
    plan = _read(tmp_path, 'watch: {rules: [{kind: Scale, factor: 1e-3}], groups: {"1e3": "*"}}')
    assert [make() for make in plan.watches["rules"]] == [dh.Scale(1e-3)]
    assert list(plan.watches["groups"]) == ["1e3"]
    with pytest.raises(ConfigError, match="a number is needed, got '1e-3'"):
        _read(tmp_path, "watch: {rules: [{kind: Scale, factor: '1e-3'}]}")  # in quotes it is a text


def test_aliases_of_aliases_end(tmp_path: pathlib.Path) -> None:
    bomb = "".join(f"- &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9))
    with pytest.raises(ConfigError, match="aliases of aliases"):
        _read(tmp_path, f"- &a0 [x]\n{bomb}")


def test_standard_statistics(tmp_path: pathlib.Path) -> None:
    alone = [make() for make in _read(tmp_path, "watch: {stats: standard}").watches["stats"]]
    full = [make() for make in _read(tmp_path, "watch: {stats: full}").watches["stats"]]
    assert full == list(dh.stats.full())
    among = [make() for make in _read(tmp_path, "watch: {stats: [standard, {kind: Spread}]}").watches["stats"]]
    assert alone == list(dh.stats.standard())
    assert among == [*alone, dh.stats.Spread()]


# Paths


def test_what_stands_for_what_in_paths(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a-0-3", "{run}$HERE"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("HERE", str(tmp_path))
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("RANK", "3")
    written = "run: $HERE/run\nsave:\n"
    directories = "'${HERE}/a-{local_rank}-{rank}'", "'{run}'", "'$HERE/{{run}}$$HERE'"
    entries = [f"- {{modules: '$x.[a{{]', store: {{kind: OnDisk, directory: {each}}}}}" for each in directories]
    plan = _read(tmp_path, written + "\n".join(entries))
    assert {patterns for patterns, _ in plan.saves} == {("$x.[a{]",)}  # patterns are no paths
    stores = [line.store for _, line in plan.saves]
    assert stores == [dh.OnDisk(f"{tmp_path}/{name}") for name in ("a-0-3", "run", "{run}$HERE")]
    assert plan.to_dict()["save"][1]["store"]["directory"] == "{run}"


def test_the_run_directory_is_made_when_attached(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = _read(tmp_path, "watch: {stats: standard, sinks: [{kind: Jsonl, path: '{run}/log.jsonl'}]}")
    assert not (tmp_path / "runs").exists()
    plan.watch(model, optimizer).remove()
    assert (tmp_path / "runs/disthooks/log.jsonl").exists()
    _read(tmp_path, "run: other\nwatch: {stats: standard}").prepare(model, optimizer).remove()
    assert (tmp_path / "other").is_dir()


# Precedence


def test_which_configuration_wins(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DISTHOOKS_CONFIG", "/variable.yaml")
    (tmp_path / "disthooks.yaml").touch()
    engine: Any = {"train_batch_size": 1, "disthooks": {"save": []}}
    key = "the 'disthooks' of DeepSpeed's configuration"

    def told(*given: Any) -> tuple[Any, ...]:
        found = find(*given)
        return found.source, found.origin, found.passed_over

    variable = "DISTHOOKS_CONFIG=/variable.yaml"
    assert told("given.yaml", engine) == ("given.yaml", "the argument", (variable, key, "./disthooks.yaml"))
    assert told(None, engine) == ("/variable.yaml", "DISTHOOKS_CONFIG", (key, "./disthooks.yaml"))
    monkeypatch.setenv("DISTHOOKS_CONFIG", "")
    assert told(None, engine) == ({"save": []}, key, ("./disthooks.yaml",))
    assert told(None, {"train_batch_size": 1}) == ("disthooks.yaml", "./disthooks.yaml", ())
    (tmp_path / "hooks.yaml").touch()
    assert told() == ("disthooks.yaml", "./disthooks.yaml", ("./hooks.yaml",))
    (tmp_path / "disthooks.yaml").unlink()
    assert told() == ("hooks.yaml", "./hooks.yaml", ())
    (tmp_path / "hooks.yaml").unlink()
    with pytest.raises(ConfigError, match="there is no configuration"):
        find()


# What is no YAML, or of another shape: what to write instead

_QUOTES = 'a text that begins with * stands in quotes: "{}"'
_ENTRY = "    store: {kind: OnCpu}\n"
SHAPES = [
    ("save:\n  - modules: *layers\n" + _ENTRY, 2, _QUOTES.format("*layers")),
    ("save:\n  - modules: [a, *.mlp]\n" + _ENTRY, 2, _QUOTES.format("*.mlp")),
    ("save:\n  - modules:\n      - *layers\n" + _ENTRY, 3, _QUOTES.format("*layers")),
    ("save:\n  - modules: *\n" + _ENTRY, 2, _QUOTES.format("*")),
    ("watch:\n  groups: {a: *.bias}\n  stats: standard\n", 2, _QUOTES.format("*.bias")),
    ("watch:\n  stats: standard\n  sinks: [{kind: Jsonl, path: {run}/x}]\n", 3, 'stands in quotes: "{run}/x"'),
    ("save:\n  - modules: x\n  " + _ENTRY, 3, "line 3 begins in column 7, and what is above it in columns 1, 3, 5"),
    ("save:\n  - modules: x\n" + _ENTRY[1:], 3, "line 3 begins in column 4, and what is above it in columns 1, 3, 5"),
    ("watch:\n  stats: standard\n every: 1\n", 3, "line 3 begins in column 2, and what is above it in columns 1, 3"),
    ("save:\n  - modules:x\n" + _ENTRY, 3, "a blank is missing behind ':' in line 2"),
    ('save:\n  - modules: "x\n' + _ENTRY, 4, "what is opened in line 2 is not closed"),
    ("save:\n- modules: x\nstore: {kind: OnCpu}\n", 3, "it belongs into an entry of 'save': indent it"),
    ("watch:\n  rules:\n    kind: ClipNorm\n    max_norm: 1.0\n", 2, "write [{kind: ClipNorm, max_norm: 1.0}]"),
    ("watch:\n  rules: {ClipNorm: {max_norm: 1.0}}\n", 2, "write [{kind: ClipNorm, max_norm: 1.0}]"),
    ("watch:\n  stats: {kind: Norm}\n", 2, "write [{kind: Norm}]"),
    ("save:\n  - modules: x\n    store: [{kind: OnCpu}]\n", 3, "write {kind: OnCpu}"),
    ("watch:\n  - stats: standard\n", 1, "a mapping is needed: write its keys without '- '"),
    ("- modules: x\n  store: {kind: OnCpu}\n", 1, "it begins with a key and a colon in the first column"),
]


@pytest.mark.parametrize(("text", "line", "says"), SHAPES, ids=range(len(SHAPES)))
def test_what_to_write_instead(text: str, line: int, says: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError) as raised:
        _read(tmp_path, text)
    assert f".yaml:{line}: " in str(raised.value)
    assert says in str(raised.value)


@pytest.mark.parametrize(("kind", "package"), [("WandB", "wandb"), ("MLflow", "mlflow-skinny")])
def test_a_missing_tracker_has_its_line(
    kind: str, package: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package.partition("-")[0], None)
    model = torch.nn.Linear(2, 2)
    plan = _read(tmp_path, f"watch:\n  stats: standard\n  sinks:\n    - kind: {kind}\n")
    with pytest.raises(UsageError, match=rf"yaml:4: {kind}.* needs .*: pip install {package}"):
        plan.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))


# Attaching


def test_fit_needs_a_budget_and_one_device(tmp_path: pathlib.Path) -> None:
    stored = "save:\n- {modules: '*', store: {kind: OnCpu}}"
    with pytest.raises(ConfigError, match=r"hooks\.yaml:1: fit: keeps 'budget', and there is no 'budget'"):
        _read(tmp_path, f"fit: true\n{stored}")
    for missing in ({"budget": None}, {"saves": ()}):
        with pytest.raises(ConfigError, match=r"fit=True keeps 'budget' .* one of them is missing"):
            dh.config.Plan(**{"saves": [("*", dh.OnCpu())], "budget": "1 MiB", "fit": True} | missing)
    plan = _read(tmp_path, f"budget: 1 MiB\nfit: true\n{stored}")
    with pytest.raises(UsageError, match=r"hooks\.yaml:2: fit: .* on cpu, and its saved tensors would stay there"):
        plan.save(Tiny())
    stored = stored.replace("OnCpu", f"OnDisk, directory: '{tmp_path}'")
    plan = _read(tmp_path, f"budget: 1 MiB\nfit: true\n{stored}")
    assert dh.config.Plan(plan.saves, budget="1 MiB", fit=True).to_dict()["fit"] is True
    assert _read(tmp_path, f"budget: free\nfit: true\n{stored}").budget == "free"
    with pytest.raises(ConfigError, match=r"hooks\.yaml:1: budget: free is measured in training, by 'fit'"):
        _read(tmp_path, f"budget: free\n{stored}")
    with pytest.raises(ConfigError, match="a budget of 'free' is measured in training"):
        dh.config.Plan(plan.saves, budget="free")
    model = Tiny()
    with pytest.raises(UsageError, match=r"hooks\.yaml:2: fit: .* lie on cpu already, more than .* 1\.0 MiB"):
        plan.save(model)
    assert not model._forward_pre_hooks


def test_one_entry_may_overlap_itself(tmp_path: pathlib.Path) -> None:
    plan = _read(tmp_path, "save: [{modules: ['blocks.*', blocks.0.mlp, norm], store: {kind: OnCpu}}]")
    with plan.save(Tiny()) as saving:
        assert saving.names == ("blocks.0", "blocks.1", "norm")


def test_what_fails_half_way_leaves_nothing(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    model.norm = torch.fx.symbolic_trace(model.norm)
    store = "  store: {kind: OnCpu}\n"
    plan = _read(tmp_path, f"save:\n- modules: blocks.0\n{store}- modules: norm\n{store}")
    with pytest.raises(AttachError, match=r"hooks\.yaml:4: 'norm' .*wrap it instead"):
        plan.save(model)
    assert type(model.blocks[0]) is type(Tiny().blocks[0])
    optimizer = torch.optim.SGD(Tiny().parameters(), lr=0.1)  # of another model
    plan = _read(tmp_path, f"save:\n- modules: blocks.0\n{store}watch:\n  stats: standard\n")
    with pytest.raises(AttachError, match=r"hooks\.yaml:4: "):
        plan.prepare(model, optimizer)
    assert type(model.blocks[0]) is type(Tiny().blocks[0])


def test_entries_for_several_models(tmp_path: pathlib.Path) -> None:
    first, second = torch.nn.Sequential(torch.nn.Linear(4, 4)), Tiny()
    store = "  store: {kind: OnCpu}\n"
    plan = _read(tmp_path, f"budget: 1 GiB\nsave:\n- modules: '0'\n{store}- modules: [blocks.*, norm]\n{store}")
    with plan.save(first, partly=True) as one, plan.save(second, partly=True) as other:
        assert (one.names, list(one.missed)) == (("0",), [1])
        assert (other.names, list(other.missed)) == (("blocks.0", "blocks.1", "norm"), [0])
        assert re.search(r"hooks\.yaml:5: 'blocks\.\*' matches no module", str(one.missed[1]))
    with plan.save(torch.nn.ReLU(), partly=True) as nowhere:
        assert (nowhere.names, list(nowhere.missed)) == ((), [0, 1])
    with pytest.raises(MatchError, match=r"hooks\.yaml:3: '0'"):
        plan.save(second)


def test_prepared(tmp_path: pathlib.Path) -> None:
    model = Tiny()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    file = _file(
        tmp_path,
        "save: [{modules: 'blocks.*', store: {kind: OnDisk, directory: '{folder}'}}]\n"
        "watch: {every: 1, rules: [{kind: ClipPercentile}], stats: [{kind: Norm}]}",
    )
    with dh.prepare(model, optimizer, file) as attached:
        for seed in range(2):
            step(model, tokens(seed))
            optimizer.step()
        assert attached.report().moved == attached.saving.report().moved > 0
        assert attached.report().gradients == attached.gradients.report()
        state = attached.state_dict()
        assert "saved/moved" in attached.gradients.latest
    assert state["steps"] == 2
    with dh.prepare(model, optimizer, file) as again:
        again.load_state_dict(state)
        assert again.gradients.steps == 2
    with _read(tmp_path, "save: [{modules: norm, store: {kind: OnCpu}}]").prepare(model) as alone:
        assert alone.gradients is None
        assert alone.state_dict() == {}
        alone.load_state_dict({})
        with pytest.raises(UsageError, match="this one has none"):
            alone.load_state_dict(state)


def test_a_sink_with_an_object(tmp_path: pathlib.Path) -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    records: list[Any] = []
    with _read(tmp_path, "watch: {every: 1, stats: standard}").prepare(model, optimizer, sinks=[records.append]):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [record["step"] for record in records] == [0]


# There and back

_EACH: dict[str, Any] = {"per_parameter": True}
OBJECTS: list[Any] = [
    dh.OnCpu("64 GiB per node", pin_memory=False),
    dh.OnDevice("1 MiB"),
    dh.OnDisk(pathlib.Path("/tmp"), 1 << 30, direct=False, in_flight="1 MiB"),
    dh.Tiered(dh.OnDevice("1 MiB"), dh.OnCpu("1 GiB"), dh.OnDisk("/tmp")),
    dh.Cast(torch.float8_e4m3fn),
    dh.Compact(),
    dh.Quantize(4, block=64, stochastic=False),
    dh.Recompute(3, check="always"),
    dh.ClipAdaptive(0.02),
    dh.ClipNorm(1.0, float("inf"), by="parameter"),
    dh.ClipPercentile(20, 50),
    dh.ClipValue(-0.1, 0.1),
    dh.ClipZScore(to="mean"),
    dh.Sanitize(posinf=1e4),
    dh.Scale(0.5),
    dh.SkipNonFinite(3),
    dh.SkipSpike(4.0, window=64, least=8, norm=False, max_consecutive=2),
    dh.AdaGC(1.1, warmup_steps=10),
    dh.ClipNorm({0: 5.0, 1000: 1.0}),
    dh.only(["*.bias", "norm.*"], dh.only("blocks*", dh.ClipNorm(1.0))),
    dh.only("*", dh.Sanitize(), at="local"),
    dh.stats.Activations(["layers.*", "head"]),
    dh.stats.Extremes(**_EACH),
    dh.stats.Fingerprints(10, "layers.*"),
    dh.stats.Histogram((0.5,)),
    dh.stats.Loss(),
    dh.stats.MaxAbs(),
    dh.stats.Moments(**_EACH),
    dh.stats.NoiseScale(32, decay=0.9),
    dh.stats.NonFinite(),
    dh.stats.Norm(1.0),
    dh.stats.RankMaxAbs(**_EACH),
    dh.stats.Spread(3.0),
    dh.stats.Times(),
    dh.stats.Updates(),
    dh.stats.Weights(),
    dh.stats.Zeros(),
    dh.sinks.Console(),
    dh.sinks.Jsonl("/tmp/$x/{y}.jsonl"),
    dh.sinks.MLflow("train/"),
    dh.sinks.TensorBoard("runs/7", prefix="train/"),
    dh.sinks.WandB(prefix="train/"),
]


def test_every_kind_is_among_the_objects() -> None:
    named = {dump.entry(made)["kind"] for made in OBJECTS} | {
        "DeepSpeedMonitor",
        "AccelerateTracker",
    }  # these need an engine, an accelerator
    assert named == {name for noun, kinds in KINDS.items() if noun != "engine" for name in kinds}


@pytest.mark.parametrize("made", OBJECTS, ids=lambda made: type(made).__name__)
def test_there_and_back(made: Any) -> None:
    noun = next(noun for noun, kinds in KINDS.items() if dump.entry(made)["kind"] in kinds)
    given: dict[str, Any] = {"watches": {"stats": [dh.stats.Norm()], f"{noun}s": [made]}}
    if noun in ("store", "recompute", "codec"):
        given = {"saves": [("*", pipeline(made) if noun == "store" else pipeline(made, dh.OnCpu()))]}
    plan = dh.config.Plan(**given)
    document = yaml.safe_load(plan.to_yaml())
    assert document == plan.to_dict()
    again = dh.config.from_config(document)
    assert again.to_dict() == document
    if noun in ("store", "recompute", "codec"):
        assert [line for _, line in again.saves] == [line for _, line in plan.saves]
        assert repr(again.saves) == repr(plan.saves)
    else:
        assert [make() for make in again.watches[f"{noun}s"]] == [made]
    jsonschema.validate(document, json.loads(FILE.read_text()))


def test_a_whole_plan_there_and_back(tmp_path: pathlib.Path) -> None:
    line = pipeline(dh.Compact(), dh.OnDisk(tmp_path), at_least="1 KiB")
    plan = dh.config.Plan(
        saves=[("blocks.0", line), (["blocks.1", "norm"], dh.OnCpu())],
        watches={"every": 5, "rules": [dh.ClipNorm(1.0)], "groups": {"a": ["*.bias"], "b": "*"}},
        budget="1 GiB",
        exact=True,
    )
    file = tmp_path / "hooks.yaml"
    file.write_text(plan.to_yaml())
    again = dh.config.from_config(file)
    assert (again.saves, again.budget, again.exact) == (plan.saves, plan.budget, True)
    assert again.to_yaml() == plan.to_yaml()
    with again.save(Tiny()), plan.save(Tiny()):
        pass


class Kept:
    """A sink whose argument can be read back."""

    def __init__(self, where: str, often: int = 1) -> None:
        self.where, self.often = where, often

    def __call__(self, record: dict[str, Any]) -> None:
        """Nothing."""


class Lost(Kept):
    def __init__(self, place: str) -> None:
        super().__init__(place)


def test_classes_of_ones_own() -> None:
    plan = dh.config.Plan(watches={"stats": [dh.stats.Norm()], "sinks": [Kept("here", 2)]})
    entry = {"kind": f"{__name__}:Kept", "where": "here", "often": 2}
    assert plan.to_dict()["watch"]["sinks"] == [entry]
    (made,) = (make() for make in dh.config.from_config(plan.to_dict()).watches["sinks"])
    assert (type(made), made.where, made.often) == (Kept, "here", 2)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (dh.config.Plan(watches={"sinks": [Lost("x")]}), "takes 'place', and does not keep it by that name"),
        (dh.config.Plan(watches={"sinks": [print]}), "cannot be written to a file"),
        (dh.config.Plan(watches={"rules": [dh.only("*", lambda name, grad: grad)]}), "cannot be written to a file"),
        (dh.config.Plan(watches={"sinks": [dh.sinks.Console(str.upper)]}), "no file can hold its 'print'"),
        (dh.config.Plan(saves=[(torch.nn.Linear, dh.OnCpu())]), "patterns there are texts"),
        (dh.config.Plan(saves=[("*", dh.Functions(abs, abs))]), "cannot be written to a file"),
    ],
)
def test_what_cannot_be_written(plan: dh.config.Plan, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan.to_yaml()


def test_objects_are_checked_too() -> None:
    with pytest.raises(MatchError, match=r"^'nothing' matches"):
        dh.config.Plan(saves=[("nothing", dh.OnCpu())]).save(Tiny())
    with pytest.raises(ConfigError, match="loses digits"):
        dh.config.Plan(saves=[("*", pipeline(dh.Quantize(8), dh.OnCpu()))], exact=True)


# The schema


def test_the_schema_is_current() -> None:
    assert FILE.read_text() == text(), "run: python -m disthooks.config.schema --write"


def test_the_schema_is_written_only_when_it_is_asked_for(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "hooks.schema.json"
    monkeypatch.setattr(schema_command, "FILE", file)
    with pytest.raises(SystemExit):
        schema_command.main(["--help"])
    assert "--write" in capsys.readouterr().out
    schema_command.main([])
    assert capsys.readouterr().out == text()
    assert not file.exists()
    schema_command.main(["--write"])
    assert file.read_text() == text()


def test_the_page_about_it_is_right() -> None:
    page = (ROOT / "docs" / "config.md").read_text()
    first, _ = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    jsonschema.validate(yaml.safe_load(first), json.loads(FILE.read_text()))
    known = json.loads(FILE.read_text())
    keys = {*known["properties"], *(f"{key}.{name}" for key in ("save", "watch") for name in _keys(known, key))}
    assert keys == set(re.findall(r"^\| `([\w.]+)` \|", page.split("## Keys")[1].split("## Classes")[0], re.MULTILINE))


def _keys(known: dict[str, Any], key: str) -> list[str]:
    return list(known["definitions"][key.capitalize()]["properties"])


@pytest.mark.parametrize("keys", [{"blame": True}, {"check_replicas": 5}])
def test_watchers_may_stand_in_watch(keys: dict[str, Any]) -> None:
    for given in ({"watch": keys}, keys, {"watch": {**keys, "stats": [{"kind": "Norm"}]}}):
        plan = dh.config.from_config(given)
        assert (plan.blame, plan.check_replicas) == (keys.get("blame", False), keys.get("check_replicas"))
        assert bool(plan.watches) == ("stats" in given.get("watch", {}))


def test_no_key_beside_watchers_is_dropped() -> None:
    with pytest.raises(ConfigError, match="watch has neither rules nor stats"):
        dh.config.from_config({"watch": {"blame": True, "every": 10}})
    with pytest.raises(ConfigError, match=r"watch\.check_replicas stands beside 'watch', too"):
        dh.config.from_config({"check_replicas": 3, "watch": {"check_replicas": 5, "stats": "standard"}})


def test_the_keys_of_watch_have_one_order_on_all_ranks() -> None:
    """Ranks compare plans as texts, and each process has a hash seed of its own."""
    plan = dh.config.from_config({"watch": {"rerun": True, "copies": "c.*", "every": 3, "stats": "standard"}})
    assert [key for key in plan.watches if plan.watches[key]][:4] == [
        "every",
        "optimizers",
        "copies",
        "restore_buffers",
    ]
