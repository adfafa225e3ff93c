"""How large the house is, how far a value travels in it, and how many files know a class.

    make house                                            # or: python benchmarks/house.py --against before.json
    python benchmarks/house.py --root ../other-checkout   # another commit, with the scripts of this one

Prints a Markdown table and writes the same figures as JSON. ``--against FILE`` puts the figures of an older JSON beside
them. ``house_source.py`` defines what is counted in the source, ``house_trips.py`` what a call and a switch are. No
module of the library is named here, so that commits whose files have other names are measured by the same lines.

A *place to touch* is a file other than the class's own that names the class, in code or in a string (comments and
docstrings do not count, and other kinds of files count as they are). It is counted for a small class of each kind, in
the library, docs, tests, and elsewhere (benchmarks, examples, demo, launch). What a script writes is counted apart:
the JSON schema, golden files, and the parts of other files that say so.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from typing import Any

from house_source import File, Package, measured

HERE = pathlib.Path(__file__).parent
TRIPS = {
    "disk": "a saved tensor to disk and back",
    "gradient": "`.grad` through ClipNorm and Norm to a JSONL line",
    "yaml": "one YAML rule to its object",
    "worker": "a worker of `disthooks launch`, two steps",
}
# The class that stands for each kind. An engine's class is no public name, so it is found in any spelling.
KINDS = {
    "codec": r"Compress",
    "rule": r"ClipValue",
    "statistic": r"MaxAbs",
    "store": r"OnDevice",
    "sink": r"MLflow",
    "engine": r"Fsdp2(?:Engine)?",
}
AREAS = ("library", "generated", "docs", "tests", "elsewhere")
# What stands between these was written by a script; a file that says so in its first line has no end.
GENERATED = re.compile(r"[Gg]enerated by .*(?:[^\n]*\n)+?(?:.*What is generated ends here|\Z)")
IGNORED = {".git", ".venv", "build", "runs", "results", "__pycache__"}


def trip(name: str, root: pathlib.Path, runs: int) -> dict[str, Any]:
    """The figures of one trip, made in a process of its own."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(HERE / "house_trips.py"), name, "--root", str(root), "--runs", str(runs)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise SystemExit(f"the trip {name!r} failed:\n{done.stdout}{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def places(root: pathlib.Path, package: Package) -> dict[str, Any]:
    """For the class of each kind, the files that name it."""
    scripts = {root / "benchmarks" / each.name for each in HERE.glob("house*.py")}
    every = {path: _words(path, package) for path in _files(root) if path not in scripts}
    found = {}
    for kind, pattern in KINDS.items():
        name = re.compile(pattern, re.IGNORECASE if kind == "engine" else 0)
        own = next(file.path for file in package.files if any(name.fullmatch(node.name) for node in file.classes()))
        areas: dict[str, list[str]] = {area: [] for area in AREAS}
        for path, (by_hand, generated) in every.items():
            if path != own and any(map(name.fullmatch, by_hand | generated)):
                area = _area(path.relative_to(root)) if any(map(name.fullmatch, by_hand)) else "generated"
                areas[area].append(str(path.relative_to(root)))
        found[kind] = {"class": pattern.partition("(")[0], "own_file": str(own.relative_to(root)), "named_in": areas}
    return found


def _files(root: pathlib.Path) -> Iterator[pathlib.Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(each for each in folders if each not in IGNORED and not each.endswith(".egg-info"))
        for name in sorted(names):
            if name.endswith((".py", ".md", ".json", ".yaml", ".yml", ".toml", ".cfg", ".txt")):
                yield pathlib.Path(folder, name)


def _words(path: pathlib.Path, package: Package) -> tuple[set[str], set[str]]:
    """The words of a file that were written by hand, and those that a script wrote."""
    text = path.read_text()
    generated: set[int] = set()  # lines
    if "docs/generate.py" in text and path.name != "generate.py":
        for part in GENERATED.finditer(text):
            generated.update(range(text.count("\n", 0, part.start()) + 1, text.count("\n", 0, part.end()) + 2))
    if path.suffix != ".py":
        lines = list(enumerate(text.splitlines(), 1))
    else:
        file = next((each for each in package.files if each.path == path), None) or File(path, path.parent)
        told = (token for token in file.tokens if token.type != tokenize.COMMENT)
        lines = [(token.start[0], token.string) for token in told if token.start[0] not in file.docstrings]
    words: tuple[set[str], set[str]] = (set(), set())
    for line, said in lines:
        words[line in generated].update(re.findall(r"\w+", said))
    return words


def _area(path: pathlib.Path) -> str:
    if path.suffix == ".json":
        return "generated"
    if path.suffix == ".md":
        return "docs"
    return {"disthooks": "library", "tests": "tests", "docs": "docs"}.get(path.parts[0], "elsewhere")


def house(root: pathlib.Path, trips: list[str], runs: int) -> dict[str, Any]:
    """All figures of the checkout at ``root``."""
    package = Package(root / "disthooks")
    import torch

    machine = {"python": platform.python_version(), "torch": torch.__version__}
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "machine": machine,
        "commit": commit.stdout.strip() or None,
        "source": measured(package),
        "trips": {name: trip(name, root, runs) for name in trips},
        "places": places(root, package),
    }


def rows(figures: dict[str, Any]) -> dict[str, str]:
    """The lines of the table: what is measured, and its figure as text."""
    source = figures["source"]
    spread = "{median} / {p90} / {max}".format_map
    found = {
        "lines": f"{source['lines']:,}",
        "code lines": f"{source['code_lines']:,}",
        "lines of docstrings": f"{source['docstring_lines']:,}",
        "lines with a comment": f"{source['comment_lines']:,}",
        "comments per 1,000 lines": f"{source['comments_per_1000_lines']:.0f}",
        "files": f"{source['files']:,}",
        "modules (files but `__init__`, `__main__`)": f"{source['modules']:,}",
        "lines a file, median / p90 / max": spread(source["file_lines"]),
        "functions": f"{source['functions']:,}",
        "functions per 1,000 lines": f"{source['functions_per_1000_lines']:.0f}",
        "code lines of a body, median / p90 / max": spread(source["body_lines"]),
        "private functions named in at most one place": (
            f"{source['private_functions_used_once']:,} of {source['private_functions']:,}"
        ),
        "classes": f"{source['classes']:,}",
        "attributes of the largest classes": ", ".join(
            f"{each['class'].rpartition('.')[2]} {each['attributes']}" for each in source["largest_classes"][:5]
        ),
        "classes with more than 12 attributes": f"{source['classes_with_more_than_12_attributes']}",
        "class names that stand twice or more": f"{len(source['class_names_used_twice'])}",
        "circles of imports (TYPE_CHECKING and functions counted)": f"{len(source['circles'])}",
    }
    for name, figure in figures["trips"].items():
        numbers = (f"{figure[what]:,}" for what in ("calls", "functions", "files", "switches"))
        found[f"{TRIPS[name]}: calls / functions / files / switches of file"] = " / ".join(numbers)
    for kind, figure in figures["places"].items():
        what = f"files other than its own that name the {kind} {figure['class']}: {' / '.join(AREAS)}"
        found[what] = " / ".join(str(len(figure["named_in"][area])) for area in AREAS)
    return found


def table(now: dict[str, Any], before: dict[str, Any] | None) -> str:
    """The figures as Markdown, beside older ones if there are any."""
    new = rows(now)
    if before is None:
        return "\n".join(["| | |", "|---|---|", *(f"| {what} | {figure} |" for what, figure in new.items())])
    old = rows(before)
    lines = [f"| {what} | {old.get(what, '')} | {new.get(what, '')} |" for what in {**old, **new}]
    return "\n".join(["| | before | after |", "|---|---|---|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=pathlib.Path, default=HERE.parent, help="the checkout; default this one")
    parser.add_argument("--against", type=pathlib.Path, help="the JSON of an older run, to stand beside this one")
    parser.add_argument("--trips", nargs="*", choices=[*TRIPS], default=[*TRIPS], help="which trips; default all")
    parser.add_argument("--runs", type=int, default=15, help="how often each trip is made")
    parser.add_argument("--json", type=pathlib.Path, default=HERE / "results" / "house.json")
    args = parser.parse_args()
    figures = house(args.root.resolve(), args.trips, args.runs)
    print(table(figures, json.loads(args.against.read_text()) if args.against else None))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
