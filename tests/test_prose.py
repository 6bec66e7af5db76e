"""Prose stays plain: phrases that read as translated, or that readers have to puzzle out, do not come back."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("medarc_rl", "prime-rl", "tests", "docs", "examples", "benchmarks")
ENDINGS = {".py", ".md", ".toml", ".j2", ".svg"}

PLAIN = {
    "a lone": "a single",
    "anew": "again, or a verb with re-",
    "are told": "receive",
    "at hand": "available",
    "beside": "next to, in addition to, with",
    "dealt": "distributed",
    "for ever": "until, without a limit",
    "hears of": "receives",
    "in the same bits": "bit-identical",
    "is told of": "receives",
    "nothing of it": "name what is absent",
    "of them all": "of all",
    "so many as": "as many as",
    "tells of": "reports, logs",
    "there twice": "duplicated",
    "to the bit": "bit-identical",
    "told of": "reported",
    "whoever": "name the user, caller or process",
}
"""Phrases that are not used, and what to write instead. Add one only when no text uses it any more."""

PHRASE = re.compile(r"\b(" + "|".join(map(re.escape, PLAIN)) + r")\b", re.IGNORECASE)


def texts() -> list[Path]:
    """Files with prose of the repository's own. The changelog quotes earlier words."""
    inside = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    return [*ROOT.glob("*.md"), *(path for path in inside if path.is_file() and ".venv" not in path.parts)]


def phrases_in(text: str) -> list[str]:
    """Unused phrases in a text, also across line breaks and the comment signs after them."""
    return [found.lower() for found in PHRASE.findall(re.sub(r"\s*\n\s*(?:# )?", " ", text))]


def test_texts_use_plain_phrases() -> None:
    found = {}
    for path in texts():
        if path != Path(__file__).resolve() and path.name != "CHANGELOG.md":
            for phrase in phrases_in(path.read_text(encoding="utf-8")):
                found[str(path.relative_to(ROOT)), phrase] = f"write: {PLAIN[phrase]}"
    assert found == {}


def test_phrases_are_found_across_lines_but_not_inside_words() -> None:
    assert phrases_in("    # The loop runs for\n    # ever.") == ["for ever"]
    assert phrases_in("Besides, a loner redistribute the cards.") == []
