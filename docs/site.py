"""MkDocs' hooks. The site also has the READMEs, AGENTS.md and the changelog; links between them lead to pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
FENCE = re.compile(r"(^```.*?^```)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]\n]*)\]\((?![a-z]+:|#)([^)\s#]+)")
BEFORE_COMMENT = re.compile(r" {3,}# ")
ESCAPED_PIPE = re.compile(r"(<code>[^<]*?)\\\|")


def pages() -> dict[str, str]:
    """Files of the repository outside docs/ that the site shows, with the names of their pages."""
    single = {
        "README.md": "index.md",
        "AGENTS.md": "agents.md",
        "CHANGELOG.md": "changelog.md",
        "prime-rl/README.md": "engine.md",
    }
    folders = [path for room in ("examples", "benchmarks") for path in sorted((ROOT / room).glob("*/README.md"))]
    return single | {path.relative_to(ROOT).as_posix(): f"{path.parent.relative_to(ROOT)}.md" for path in folders}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in pages().items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links between files of the repository become links between pages, with titles in place of file names. Comments in
    commands move closer to them, because long lines are wrapped."""
    sources = {page: source for source, page in pages().items()}
    source = sources.get(page.file.src_uri, DOCS + page.file.src_uri)
    parts = FENCE.split(markdown)
    return "".join(block(part) if part.startswith("```") else rewritten(part, source, page) for part in parts)


def block(text: str) -> str:
    return BEFORE_COMMENT.sub("  # ", text) if text.startswith("```bash") else text


def rewritten(text: str, source: str, page: Page) -> str:
    here = posixpath.dirname(page.file.src_uri)

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found[2]))
        shown = pages().get(target, target.removeprefix(DOCS))
        text = title(ROOT / target) if found[1].endswith(".md") else found[1]
        return f"[{text}]({posixpath.relpath(shown, here or '.')}"

    return LINK.sub(link, text)


def title(source: Path) -> str:
    return source.read_text(encoding="utf-8").partition("# ")[2].partition("\n")[0]


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """GitHub needs `\\|` for a pipe in the code of a table; Python-Markdown shows the backslash."""
    while ESCAPED_PIPE.search(html):
        html = ESCAPED_PIPE.sub(r"\1|", html)
    return html
