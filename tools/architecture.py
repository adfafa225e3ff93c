"""The picture and the list of Notes of docs/architecture.md, made from the code.

    make architecture                        # or: python tools/architecture.py [--check]

Writes docs/img/architecture.svg and the part of docs/architecture.md between its two marks. With ``--check`` nothing
is written, and the exit code is 1 if something would be. Equal code gives equal files. The number of lines in a box
stays as it is until the real one differs from it by more than a tenth, so that not every commit changes the picture.
"""

from __future__ import annotations

import argparse
import ast
import collections
import itertools
import pathlib
import re
import sys
import textwrap
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

ROOT = pathlib.Path(__file__).parents[1]
sys.path.append(str(ROOT / "tools"))
from package import File, Package  # noqa: E402  (it stands beside)

PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "img" / "architecture.svg"
BEGIN, END = "<!-- made by tools/architecture.py: make architecture -->", "<!-- end of what is made -->"

# Hue of each floor, from the top; the same in both schemes.
COLOURS = ("#8250df", "#e5534b", "#d4661f", "#bf8700", "#2da44e", "#2f81f7", "#6e7781", "#1b7c83", "#bf3989")
WIDTH, MARGIN, GAP, PAD = 1000, 16, 20, 14
LANES = 128  # the room right of the boxes, where arrows go down
TITLE, TEXT = 17, 12.5


@dataclass
class Box:
    """A package in the picture, or the modules below all packages.

    Attributes:
        name: the package; "base" for the modules beside the packages.
        words: what it is for.
        groups: its modules, by subpackage; "" for its own.
        lines: how many lines its files have.
        uses: the packages that it imports from.
    """

    name: str
    words: str
    groups: dict[str, list[str]]
    lines: int
    uses: set[str] = field(default_factory=set)
    colour: str = ""
    x: float = 0
    y: float = 0
    width: float = 0
    height: float = 0


# What has no package whose docstring could say it.
WORDS = {
    "base": "torch's private functions, tensors, streams, patterns, locks: everything above may use it",
    "names": "what import disthooks gives; all of it is imported when the first name is used",
}


def floors() -> list[list[str]]:
    """The packages by floor, from the top, as the contract in pyproject.toml says; those above all in one row."""
    text = (ROOT / "pyproject.toml").read_text().partition("layers = [")[2].partition("]")[0]
    layers = [[name.strip() for name in layer.split("|")] for layer in re.findall(r'"([^"]+)"', text)]
    return [layer for layer in layers if layer != ["__main__"]]


def boxes(package: Package, floors: Sequence[Sequence[str]]) -> dict[str, Box]:
    """A box for each package; ``base`` has the modules beside the packages that no package stands above."""
    above = {"", "_front", "testing"}
    found: dict[str, Box] = {}
    for file in package.files:
        name = _box(file.name, above)
        words = WORDS.get(name) or _first_sentence(package.by_name[f"{package.folder.name}.{name}"])
        box = found.setdefault(name, Box(name, words, {}, 0))
        box.lines += len(file.text.splitlines())
        if file.path.name not in ("__init__.py", "__main__.py"):
            *group, module = file.name.split(".")[1 if name in WORDS else 2 :]
            box.groups.setdefault(".".join(group), []).append(module)
        targets = {_box(each.target, above) for each in package.imports(file) if each.target in package.by_name}
        box.uses |= set() if name == "names" else targets - {name, "names"}
    return found


def _box(module: str, above: set[str]) -> str:
    parts = module.split(".")[1:]
    if parts == ["__main__"]:
        return "run"
    if len(parts) < 2 and (parts[0] if parts else "") in above:
        return "names"
    return parts[0] if (ROOT / "disthooks" / parts[0]).is_dir() else "base"


def _first_sentence(file: File) -> str:
    """The first sentence of a module's docstring, as plain text."""
    text = " ".join((ast.get_docstring(file.tree) or "").split("\n\n")[0].split()).replace("``", "")
    return re.split(r"(?<=[a-z)])[.] |;", text)[0].rstrip(".:")


def arrange(found: dict[str, Box], rows: list[list[str]]) -> float:
    """Give each box its place, row by row from the top; the height of the picture."""
    y = float(MARGIN)
    for row, colour in zip(rows, COLOURS, strict=False):
        y += 6 * sum(len(_users(found, name)) for name in row[:-1])  # arrows come from above
        whole = WIDTH - 2 * MARGIN - LANES - 12 * (len(row) - 1)
        weights = [max(found[name].lines, 1200) ** 0.5 for name in row]
        x = float(MARGIN)
        for name, weight in zip(row, weights, strict=True):
            box = found[name]
            box.colour, box.x, box.y = colour, x, y
            box.width = round(whole * weight / sum(weights))
            x += box.width + 12
        height = max(len(_inside(found[name])) for name in row) * 17 + 44
        for name in row:
            found[name].height = height
        y += height + GAP
    return y - GAP + MARGIN


def _inside(box: Box) -> list[tuple[str, str]]:
    """The lines of text in a box, below its title: a class of the style sheet and the text."""
    room = int((box.width - 2 * PAD) / (TEXT * 0.56))
    lines = [("words", line) for line in textwrap.wrap(box.words, room)]
    for group, modules in sorted(box.groups.items()):
        head = f"{group}/  " if group else ""
        for number, line in enumerate(textwrap.wrap(head + "  ".join(sorted(modules)), room, drop_whitespace=True)):
            lines.append(("group" if head and number == 0 else "modules", line))
    return lines


def svg(found: dict[str, Box], rows: list[list[str]]) -> str:
    """The picture."""
    height = arrange(found, rows)
    parts = [HEAD.format(width=WIDTH, height=f"{height:g}")]
    parts += [text for name in found for text in _drawn(found[name])]
    parts += _arrows(found, rows)
    return "\n".join([*parts, "</svg>", ""])


HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"
     font-family="-apple-system, 'Segoe UI', Helvetica, 'DejaVu Sans', Arial, sans-serif">
<title>The packages of disthooks by floor; an arrow goes from a package to one that it imports from</title>
<style>
  .ground {{ fill: #ffffff }}
  .box {{ fill: #f6f8fa; stroke: #d0d7de }}
  .title {{ fill: #1f2328; font-size: 17px; font-weight: 600 }}
  .lines {{ fill: #656d76; font-size: 12px; text-anchor: end }}
  .words {{ fill: #1f2328; font-size: 12.5px }}
  .modules, .group {{ fill: #656d76; font-size: 12px }}
  .folder {{ fill: #1f2328; font-weight: 600 }}
  @media (prefers-color-scheme: dark) {{
    .ground {{ fill: #0d1117 }}
    .box {{ fill: #161b22; stroke: #30363d }}
    .title, .words, .folder {{ fill: #e6edf3 }}
    .lines, .modules, .group {{ fill: #9198a1 }}
  }}
</style>
<rect class="ground" width="{width}" height="{height}" rx="8"/>"""


def _drawn(box: Box) -> Iterator[str]:
    title = {"names": "disthooks", "base": "beside the packages"}.get(box.name, f"{box.name}/")
    x, right = box.x + PAD, box.x + box.width - PAD
    yield f'<g data-package="{box.name}" data-lines="{box.lines}">'
    yield _rect("box", box.x, box.y, box.width, box.height, 6)
    yield f'<rect x="{box.x:g}" y="{box.y:g}" width="5" height="{box.height:g}" rx="2" fill="{box.colour}"/>'
    yield f'<text class="title" x="{x:g}" y="{box.y + 25:g}">{title}</text>'
    yield f'<text class="lines" x="{right:g}" y="{box.y + 25:g}">{_rounded(box.lines)} lines</text>'
    for number, (kind, line) in enumerate(_inside(box)):
        text = escape(line)
        if kind == "group":
            folder, _, rest = text.partition("  ")
            text = f'<tspan class="folder">{folder}</tspan>  {rest}'
        place = f'x="{x:g}" y="{box.y + 46 + 17 * number:g}"'
        yield f'<text class="{kind}" xml:space="preserve" {place}>{text}</text>'
    yield "</g>"


def _rect(kind: str, x: float, y: float, width: float, height: float, radius: float) -> str:
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def _rounded(lines: int) -> str:
    return f"{round(lines, -2):,}" if lines >= 1000 else f"{max(10, round(lines, -1))}"


def _arrows(found: dict[str, Box], rows: list[list[str]]) -> Iterator[str]:
    """One line down the right side for each package that imports others, with an arrow into each of those.

    What is below all is imported by all, and gets no arrows.
    """
    order = [name for row in rows for name in row]
    sources = [name for name in order if found[name].uses - {"base"}]
    right = WIDTH - MARGIN - LANES
    edge = {name: found[name].x + found[name].width >= right - 1 for name in order}
    below = {name: row for upper, row in itertools.pairwise(rows) for name in upper}
    entered: collections.Counter[str] = collections.Counter()
    for lane, source in enumerate(reversed(sources)):
        box, x = found[source], right + 16 + lane * (LANES - 16) / max(1, len(sources))
        targets = sorted(found[source].uses - {"base"}, key=order.index)
        begin = box.y + 25
        if edge[source]:
            path = [f"M{box.x + box.width:g} {begin:g}H{x:g}"]
        elif targets == below.get(source):  # straight down
            down, top = box.x + box.width / 2, found[targets[0]].y
            yield _line(box, [targets[0]], f"M{down:g} {box.y + box.height:g}V{top - 5:g}", _head(down, top, "down"))
            continue
        else:  # from the bottom, through the gap below its row
            begin = box.y + box.height + 8
            path = [f"M{box.x + box.width - 30:g} {begin - 8:g}V{begin:g}H{x:g}"]
        heads = []
        end = begin
        for target in targets:
            other = found[target]
            number = entered[target]
            entered[target] += 1
            if edge[target]:
                y = other.y + 34 + (other.height - 44) * (number + 0.5) / len(_users(found, target))
                path.append(f"M{x:g} {y:g}H{other.x + other.width + 5:g}")
                heads.append(_head(other.x + other.width, y, "left"))
            else:  # from above, through the gap over its row
                y = other.y - 16 - 6 * number
                stop = other.x + other.width - 24 - 16 * number
                path.append(f"M{x:g} {y:g}H{stop:g}V{other.y - 5:g}")
                heads.append(_head(stop, other.y, "down"))
            end = max(end, y)
        path.append(f"M{x:g} {begin:g}V{end:g}")
        yield _line(box, targets, "".join(path), "".join(heads))


def _line(box: Box, targets: list[str], path: str, heads: str) -> str:
    return f'''\
<g data-from="{box.name}" data-to="{" ".join(targets)}">
<path d="{path}" fill="none" stroke="{box.colour}" stroke-width="1.6" stroke-linejoin="round"/>
<path d="{heads}" fill="{box.colour}"/>
</g>'''


def _users(found: dict[str, Box], target: str) -> list[str]:
    return [name for name, box in found.items() if target in box.uses]


def _head(x: float, y: float, direction: str) -> str:
    if direction == "left":
        return f"M{x:g} {y:g}l8 -4v8z"
    return f"M{x:g} {y:g}l-4 -8h8z"


def picture(package: Package, before: str) -> str:
    """The picture of ``package``; lines as in ``before``, the picture as it was, where they are about the same."""
    layers = floors()
    found = boxes(package, layers)
    for name, lines in re.findall(r'data-package="(\w+)" data-lines="(\d+)"', before):
        if name in found and abs(found[name].lines - int(lines)) <= int(lines) / 10:
            found[name].lines = int(lines)
    used = set().union(*(box.uses for box in found.values()))
    top = {name for name in found if name not in used}
    rows = [["names", *sorted(top - {"names"}, key=lambda name: found[name].lines)]]
    rows += [list(layer) for layer in layers if not set(layer) & set(top)] + [["base"]]
    return svg(found, rows)


@dataclass(frozen=True)
class Note:
    """A reason that several places depend on.

    Attributes:
        name: what it is cited by.
        file: where it stands, relative to the repository.
        line: on which line it begins.
    """

    name: str
    file: pathlib.Path
    line: int


_NAMED = re.compile(r"\[Note: ([^\]]+)\]")


def notes(package: Package) -> tuple[list[Note], list[Note]]:
    """The Notes, and where they are cited. A paragraph of comments that begins with ``[Note: name]`` is one."""
    made, cited = [], []
    for file in package.files:
        path = file.path.relative_to(package.root)
        for begin, text, is_comment in _said(file):
            for match in _NAMED.finditer(text):
                name, line = " ".join(match[1].split()), begin + text[: match.start()].count("\n")
                is_made = is_comment and bool(re.search(r"(?:\A|\n\n)\Z", text[: match.start()]))
                (made if is_made else cited).append(Note(name, path, line))
    return sorted(made, key=lambda note: (str(note.file), note.line)), cited


def _said(file: File) -> Iterator[tuple[int, str, bool]]:
    """Every block of comments, and every docstring: its first line, its text without hashes, whether it is comments."""
    block: list[str] = []
    begin = last = 0
    for token in file.tokens:
        if token.type == tokenize.STRING and token.start[0] in file.docstrings:
            yield token.start[0], token.string, False
        if token.type != tokenize.COMMENT:
            continue
        alone = not token.line[: token.start[1]].strip()
        if block and not (alone and token.start[0] == last + 1):
            yield begin, "\n".join(block), True
            block = []
        if not block:
            begin = token.start[0]
        block.append(token.string.lstrip("#: "))
        last = token.start[0]
    if block:
        yield begin, "\n".join(block), True


def listed(package: Package) -> str:
    """The list of Notes, as Markdown."""
    rows = [f"| {note.name} | [{_short(note)}](../{note.file}) |" for note in notes(package)[0]]
    return "\n".join(["| Note | stands in |", "|---|---|", *rows])


def _short(note: Note) -> str:
    return "/".join(note.file.parts[1:])


def page(package: Package, before: str) -> str:
    """The page, with the list of Notes as it is now."""
    head, _, rest = before.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{listed(package)}\n\n{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; say what would change")
    args = parser.parse_args()
    package, stale = Package(ROOT / "disthooks"), 0
    for path, make in ((PICTURE, picture), (PAGE, page)):
        before = path.read_text() if path.exists() else ""
        after = make(package, before)
        if after == before:
            continue
        stale = 1
        if args.check:
            print(f"{path.relative_to(ROOT)} is not what the code is: run make architecture")
        else:
            path.write_text(after)
    return stale if args.check else 0


if __name__ == "__main__":
    sys.exit(main())
