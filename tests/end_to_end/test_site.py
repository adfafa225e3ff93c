"""The site builds without a warning, asks for nothing outside it, and works in a browser: light, dark, narrow."""

from __future__ import annotations

import functools
import http.server
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import disthooks as dh
from tests.support import ROOT
from tests.support.browser import Browser

pytest.importorskip("furo")
#: Pages of every kind: a table of contents, a guide, a drawing, long tables, docstrings, a lesson.
SEEN = ["index", "guides/does-not-fit", "concepts/saved-tensor", "gradients/rules", "api/gradients", "course/index"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(out)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_public_name_has_its_docstring_there(site: pathlib.Path) -> None:
    pages = "".join(page.read_text() for page in (site / "api").glob("*.html"))
    values = {name: getattr(dh, name) for name in dh.__all__}
    assert [name for name, value in values.items() if callable(value) and f'id="disthooks.{name}"' not in pages] == []


def test_every_page_can_be_reached(site: pathlib.Path) -> None:
    sources = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    front = (site / "index.html").read_text() + (site / "course" / "index.html").read_text()
    linked = [path.name if path.parent.name == "course" else str(path) for path in sources if path.name != "index.md"]
    assert [name for name in linked if f'href="{name.removesuffix(".md")}.html' not in front] == []


@pytest.mark.full_tier
def test_every_page_renders_and_asks_for_nothing_outside(site: pathlib.Path, chromium: Browser) -> None:
    pages = [page for page in site.rglob("*.html") if not {"_modules", "_static", "search.html"} & {*page.parts}]
    assert len(pages) > 50
    for page in pages:
        chromium.open(page)
        assert chromium.problems() == [], page
        assert [address for address in chromium.requests() if not address.startswith(("file:", "data:"))] == [], page
        assert chromium.run("[...document.images].every((image) => image.naturalWidth > 0)"), page
        assert chromium.run("document.querySelector('h1').textContent.length") > 3, page


@pytest.fixture
def served(site: pathlib.Path) -> Iterator[str]:
    """The address of the site on a server: a browser reads no other page for the one of a file."""
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.full_tier
def test_the_search_finds_a_name(site: pathlib.Path, served: str, chromium: Browser) -> None:
    chromium.open(site / "index.html")
    assert chromium.run("document.querySelector('.sidebar-search-container').getAttribute('action')") == "search.html"
    chromium.events.clear()
    chromium.call("Page.navigate", url=f"{served}/search.html?q=ClipNorm")
    chromium.wait_for(lambda: chromium.run("document.querySelectorAll('#search-results li a').length > 3"))
    links = "[...document.querySelectorAll('#search-results li a')]"
    found = chromium.run(f"{links}.map((each) => each.getAttribute('href'))")
    assert any("api/gradients.html#disthooks.ClipNorm" in address for address in found), found
    assert chromium.problems() == []


@pytest.mark.full_tier
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_light_dark_and_narrow(scheme: str, width: int, site: pathlib.Path, chromium: Browser) -> None:
    """Nothing makes the page itself wider than the screen; wide tables and code scroll by themselves."""
    chromium.resize(width, 900)
    chromium.prefer(scheme)
    for name in SEEN:
        chromium.open(site / f"{name}.html")
        assert chromium.run("document.documentElement.scrollWidth") <= width, name
        shade = chromium.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).slice(0, 3).map(Number)")
        assert (sum(shade) > 3 * 128) == (scheme == "light"), (name, shade)
    chromium.resize(1280, 900)
    chromium.prefer("light")
