"""The site of docs/ builds, and a browser without a network shows and searches it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("material") is None, reason="MkDocs is missing: uv sync --group docs"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


class Fetched(HTMLParser):
    """The addresses that a browser fetches to show a page: scripts, styles, fonts and images, but not links."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"link": ["href"], "a": []}.get(tag, ["src", "srcset", "data", "href"])
        self.addresses += [value for name, value in attrs if name in names and value]


def test_no_page_fetches_anything_from_another_host(site: Path) -> None:
    pages = sorted(site.rglob("*.html"))
    fetched = {(page.name, address) for page in pages for address in Fetched(page).addresses}
    styles = "".join(style.read_text(encoding="utf-8") for style in site.rglob("*.css"))
    fetched |= {("css", address) for address in re.findall(r"(?:url\(|@import )['\"]?([^)'\"]+)", styles)}
    assert len(pages) > 20
    assert {found for found in fetched if re.match(r"(https?:)?//", found[1])} == set()


def test_the_first_page_is_the_readme_with_links_to_pages_of_the_site(site: Path) -> None:
    first = (site / "index.html").read_text(encoding="utf-8")
    assert "One command turns a TOML file" in first
    assert 'href="gpus.html"' in first
    assert 'src="images/house.svg"' in first
    assert 'href="../rl.html#how-old-rollouts-are"' in (site / "benchmarks" / "rl.html").read_text()


def test_pipes_in_the_code_of_tables_have_no_backslash(site: Path) -> None:
    cells = re.findall(r"<td>.*?</td>", (site / "config.html").read_text(encoding="utf-8"), re.DOTALL)
    assert any("<code>" in cell and "|" in cell for cell in cells)
    assert [cell for cell in cells if "\\|" in cell] == []


def test_the_search_index_holds_every_page(site: Path) -> None:
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    indexed = {entry["location"].partition("#")[0] for entry in index["docs"]}
    pages = {str(page.relative_to(site)) for page in site.rglob("*.html")} - {"404.html"}
    assert indexed == pages


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing")
def test_a_browser_searches_the_site_from_files_without_a_server(site: Path, tmp_path: Path) -> None:
    address = f"{(site / 'index.html').as_uri()}?q=staleness"
    browser = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}"]
    # Time in the page stands still while it loads, so a slow machine gives the same page.
    shown = subprocess.run(
        [*browser, "--virtual-time-budget=10000", "--dump-dom", address], capture_output=True, text=True, check=True
    )
    assert re.search(r"\d+ matching documents?", shown.stdout)
    assert "rl.html" in shown.stdout
