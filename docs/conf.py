"""The site: ``make docs`` writes it to build/site, from the Markdown files of this folder and the docstrings."""

from __future__ import annotations

import importlib
import inspect
import pathlib
import sys
import types

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from sphinx.application import Sphinx  # noqa: E402
from sphinx.environment import BuildEnvironment  # noqa: E402

import disthooks  # noqa: E402

project, author, copyright = "disthooks", "the disthooks authors", "2026, the disthooks authors"
version = release = disthooks.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"disthooks {release}"
html_favicon = "img/favicon.svg"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
napoleon_use_ivar = True
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}

#: The pages of the reference: the title, and the packages whose public names stand there.
API = {
    "saved": ("Saved tensors", ("saved", "_handles", "memory")),
    "gradients": ("Gradients", ("grads.attach", "grads.on", "grads.rules")),
    "statistics": ("Statistics", ("grads.stats",)),
    "sinks": ("Sinks", ("grads.sinks",)),
    "watching": ("Watching", ("report.watch",)),
    "predicting": ("Predicting", ("predict",)),
    "configuration": ("Configuration", ("config",)),
    "errors": ("Errors", ("errors",)),
}

#: The base classes of parts of one's own; each is shown with all of its methods.
BASES = (
    "saved.stores.base.Store",
    "saved.codecs.base.Codec",
    "grads.rules.base.Rule",
    "grads.rules.base.Work",
    "grads.stats.base.Stat",
    "grads.stats.base.Measure",
    "grads.stats.base.Found",
    "grads.sinks.base.SinkSpec",
    "grads.sinks.base.OpenSink",
    "engines.base.Engine",
)


#: What functions return; it is imported from its module.
RETURNED = (
    "_handles.Attachment",
    "saved.attach.SavingHandle",
    "saved.report.SavedReport",
    "saved.stores.base.StoreReport",
    "saved.fit.Fitted",
    "saved.fit.FitReport",
    "grads.attachment.Gradients",
    "report.watch.replicas.ReplicaReport",
    "predict.explanation.Explanation",
)


def public() -> dict[str, object]:
    """Every public function and class, by its name."""
    found = {f"disthooks.{name}": getattr(disthooks, name) for name in disthooks.__all__ if name != "__version__"}
    for module in ("stats", "sinks", "config", "memory", "errors"):
        inside = getattr(disthooks, module)
        names = getattr(inside, "__all__", [name for name in vars(inside) if not name.startswith("_")])
        found |= {f"disthooks.{module}.{name}": getattr(inside, name) for name in names}
    for path in RETURNED:
        module, _, name = path.rpartition(".")
        found[f"disthooks.{path}"] = getattr(importlib.import_module(f"disthooks.{module}"), name)
    return {name: value for name, value in found.items() if callable(value) and not isinstance(value, types.ModuleType)}


def write_api() -> None:
    """Write the pages of :data:`API`, from what is public now."""
    (HERE / "api").mkdir(exist_ok=True)
    names = public()
    for page, (title, packages) in API.items():
        lines = [title, "=" * len(title), ""]
        for name in sorted(names, key=lambda name: name.rpartition(".")[2].lower()):
            value = names[name]
            where = str(getattr(value, "__module__", "")).removeprefix("disthooks.")
            if where.startswith(packages) and not is_named_twice(name, value, names):
                kind = "autoclass" if inspect.isclass(value) else "autofunction"
                lines += [f".. {kind}:: {name}", ""]
        write_page(page, lines)
    lines = ["Base classes of parts of your own", "=" * 33, ""]
    write_page("parts", lines + [line for path in BASES for line in (f".. autoclass:: disthooks.{path}", "")])


def write_page(page: str, lines: list[str]) -> None:
    text, file = "\n".join(lines), HERE / "api" / f"{page}.rst"
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def is_named_twice(name: str, value: object, names: dict[str, object]) -> bool:
    """Whether a shorter public name has the same value, or the value is not of this library."""
    own = str(getattr(value, "__module__", "")).startswith("disthooks")
    return not own or any(other is value and len(short) < len(name) for short, other in names.items())


write_api()


def setup(app: Sphinx) -> None:
    """Keep pages for contributors out of the search: they name everything, and a reader looks for the page about it."""

    def hide(app: Sphinx, env: BuildEnvironment) -> None:
        for page in ("architecture", "changelog", "decisions", "upstream/index"):
            env.metadata[page]["nosearch"] = True

    app.connect("env-updated", hide)
