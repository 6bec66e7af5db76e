"""Text for terminals and logs: a value from a config, a model or a data set never acts as a command of the terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

_COLOUR = re.compile("\x1b\\[[0-9;:]*m")
_ACTING = re.compile(
    # C0 without tab, newline and return (progress bars use it), DEL and C1.
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"
    # Marks, overrides and isolates of writing directions, which reorder what is read.
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    # Separators that some programs take for the end of a line, a byte-order mark, annotations, invisible tags.
    "\u2028\u2029\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"
    # Surrogates: bytes of a file name that are not UTF-8.
    "\ud800-\udfff]"
)


def escaped(text: str) -> str:
    """`text` with each character that acts on a terminal written as an escape.

    Newlines, tabs and returns stay. So do the characters that languages need and `str.isprintable` refuses, such as
    non-breaking spaces and zero-width joiners.
    """
    return _ACTING.sub(lambda found: ascii(found[0])[1:-1], text)


def plain(text: str) -> str:
    """`escaped` text without colours, which libraries write where they take a file for a terminal."""
    return escaped(_COLOUR.sub("", text))


def cut_inside(text: str, max_chars: int) -> str:
    """At most `max_chars` characters of a message: its beginning and its end.

    What is wrong stands at the beginning, what to do about it at the end.
    """
    if len(text) <= max_chars:
        return text
    head = (max_chars - 3) // 2
    return f"{text[:head]} … {text[len(text) - (max_chars - 3 - head) :]}"


class TextOnly:
    """A text stream that writes `plain` text, and has its own escapes for what its encoding lacks.

    Rich, whose own sequences move the cursor and set colours, writes to the stream behind: `rich_proxied_file` is the
    attribute by which it asks for that.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        return self.rich_proxied_file.write(plain(text))

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def write_text_only() -> None:
    """Let this process's stdout and stderr pass on text only. Call it first in a program.

    Characters that the encoding of a stream lacks become escapes: a terminal may be Latin-1.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, TextOnly):
            continue
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
        setattr(sys, name, cast(TextIO, TextOnly(stream)))


def stream_behind(stream: TextIO) -> TextIO:
    """The stream for a writer that escapes each value itself and adds colours."""
    return stream.rich_proxied_file if isinstance(stream, TextOnly) else stream


def shortened(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}…"


def say(line: str) -> None:
    """Write a line to stdout at once, even if stdout is a file."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def tell(line: str) -> None:
    """Write a line to stderr at once."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
