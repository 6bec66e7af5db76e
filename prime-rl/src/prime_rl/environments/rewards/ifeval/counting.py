"""Words, sentences and paragraphs, and what "at least 3" means."""

from __future__ import annotations

import re

_ABBREVIATIONS = r"(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|e\.g|i\.e|approx|Fig|No|Vol|cf|al|a\.m|p\.m|U\.S|Ph\.D)"
_SENTENCE_END = re.compile(r"(?<=[.!?…。！？।])[\"'”’)\]]*(?:\s+|$)|\n\s*\n|(?<=[。！？।])")
AROUND = 0.1
"""Share by which a number may differ from one that it is to be "around"; at least 1."""


def words(text: str) -> list[str]:
    """Runs of letters, digits and what joins them: `don't` and `well-known` are one word each."""
    return re.findall(r"\w+(?:['’\-]\w+)*", text)


def sentences(text: str) -> list[str]:
    """Ends: `.`, `!`, `?` before a space, and empty lines. Abbreviations and decimals end none."""
    guarded = re.sub(rf"\b({_ABBREVIATIONS})\.", lambda match: match[0].replace(".", "\x00"), text)
    guarded = re.sub(r"\b([A-Z])\.(?=\s+[A-Z])", "\\1\x00", guarded)
    parts = (part.replace("\x00", ".").strip() for part in _SENTENCE_END.split(guarded))
    return [part for part in parts if re.search(r"\w", part)]


def paragraphs(text: str, separator: str = r"\n\s*\n") -> list[str]:
    """Parts between separators, without empty ones."""
    return [part.strip() for part in re.split(separator, text) if part.strip()]


def occurrences(keyword: str, text: str) -> int:
    """How often a keyword or phrase stands in a text as whole words, in any case."""
    return len(re.findall(rf"(?<!\w){re.escape(keyword.strip())}(?!\w)", text, re.IGNORECASE))


def holds(count: int, relation: str | None, wanted: int) -> bool:
    """Whether a count is `at least`, `at most`, `less than`, `more than`, `around` or (unset) exactly a number."""
    if relation is None:
        return count == wanted
    test = {
        "at least": count >= wanted,
        "at most": count <= wanted,
        "less than": count < wanted,
        "more than": count > wanted,
        "around": abs(count - wanted) <= max(round(wanted * AROUND), 1),
        "exactly": count == wanted,
    }
    return test[relation.strip().lower()]
