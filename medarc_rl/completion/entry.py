"""Answers a shell that asks for candidates: reads the words, prints one candidate a line."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence

from medarc_rl.completion.answers import Answer, answers
from medarc_rl.completion.hooks import LINE_VARIABLE, VARIABLE
from medarc_rl.completion.table import load

_BASH_BREAKS = re.compile(r".*[\"'@><=;|&(:]", re.DOTALL)
"""Where bash begins a word, whatever a program takes for one."""
_BASH_SPECIAL = re.compile(r"([^\w@%+=:,./~-])")


def complete(program: str) -> None:
    """Print the candidates for the words of this process."""
    shell, line = os.environ[VARIABLE], os.environ.get(LINE_VARIABLE, "")
    words = words_of_line(line)[1:] if shell == "bash" else sys.argv[1:]
    found = answers(load(program), words)
    lines = bash_lines(found, words[-1] if words else "") if shell == "bash" else described_lines(found)
    sys.stdout.writelines(f"{each}\n" for each in lines)


def words_of_line(line: str) -> list[str]:
    """The words of a command line up to the cursor; the last one may be empty, or have an open quote."""
    for closing in ("", "'", '"', "\\"):
        lexer = shlex.shlex(f"{line}{closing}", posix=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        try:
            words = list(lexer)
        except ValueError:
            continue
        return [*words, ""] if not closing and (not line or line[-1].isspace()) else words
    return []


def bash_lines(found: Sequence[Answer], current: str) -> Iterator[str]:
    """Candidates without what comes before bash's own word, escaped."""
    broken = _BASH_BREAKS.match(current)
    cut = broken.end() if broken else 0
    return (_BASH_SPECIAL.sub(r"\\\1", answer.value[cut:]) for answer in found)


def described_lines(found: Sequence[Answer]) -> Iterator[str]:
    """Value, tab, description."""
    return (f"{answer.value}\t{answer.help}" for answer in found)
