"""Answers a shell that asks for candidates: finds what may stand at the cursor, and prints one candidate a line.

The candidates are a pure function of the words so far, a table of the commands, and the files. Imports nothing outside
the standard library until a command's own candidates need it, because it runs at every press of the key.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from medarc_rl.completion.hooks import LINE_VARIABLE, VARIABLE
from medarc_rl.completion.table import load

RUNS_BELOW = "outputs"
"""Where runs are by default."""
_MAX_ENTRIES = 2000


class Answer(NamedTuple):
    """One candidate."""

    value: str
    help: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether a space may follow."""
        return not self.value.endswith(("/", ".", "="))


Table = Mapping[str, Any]
"""What `table.build` returns, as read from its file."""


def answers(table: Table, words: Sequence[str]) -> list[Answer]:
    """Candidates for the last of the words that follow the program's name."""
    *before, current = words or [""]
    if not before:
        options = [Answer(name, text) for name, text in table["options"].items()]
        commands = [Answer(name, each["help"]) for name, each in table["commands"].items()]
        return _starting(options if current.startswith("-") else commands, current)
    command = table["commands"].get(before[0])
    if command is None:
        return _starting([Answer(shell) for shell in table["shells"]], current) if before[0] in table["options"] else []
    if "commands" in command:
        group = {**table, "commands": command["commands"], "options": {"--help": "Show the commands."}}
        return answers(group, words[1:])
    return list(_of_command(table, command, before[1:], current))


def _of_command(table: Table, command: Table, before: Sequence[str], current: str) -> Iterator[Answer]:
    keys = _keys(table, command, before)
    if current.startswith("--") and "=" in current:
        option, _, begun = current.partition("=")
        yield from (Answer(f"{option}={each.value}", each.help) for each in _values(command, keys, option, begun) or ())
    elif current.startswith("-"):
        yield from _options(command, keys, current)
    elif current.startswith("@"):
        yield from (Answer(f"@{each.value}") for each in _files(current[1:], (".toml",)))
    elif before and before[-1] == "@":
        yield from _files(current, (".toml",))
    elif before and (values := _values(command, keys, before[-1], current)) is not None:
        yield from values
    else:
        yield from _positional(command, keys, before, current)


def _keys(table: Table, command: Table, before: Sequence[str]) -> Mapping[str, Table]:
    """The config keys that the command accepts; of `explain --as sft`, those of SFT."""
    kinds = [kind for kind in command["configs"] if kind in before] or command["configs"]
    found: dict[str, Table] = {}
    for kind in reversed(kinds):
        found |= table["keys"][kind]
    return found


def _dashed(text: str) -> str:
    return text.replace("_", "-").lower()


def _options(command: Table, keys: Mapping[str, Table], current: str) -> Iterator[Answer]:
    own = [Answer(name, each["help"]) for name, each in command["options"].items()]
    yield from _starting(own, current)
    if current.startswith("--"):
        taken = set(command["options"])
        for answer in _key_answers(keys, current[2:]):
            if f"--{answer.value}" not in taken:
                yield Answer(f"--{answer.value}", answer.help)


def _key_answers(keys: Mapping[str, Table], begun: str) -> Iterator[Answer]:
    """The keys that begin with this, up to their next dot. Dashes and underscores are equal, as in a config."""
    parent, dot, _ = begun.rpartition(".")
    wanted, depth = _dashed(begun), begun.count(".")
    seen = set()
    for key, each in keys.items():
        if key.count(".") != depth or not _dashed(key).startswith(wanted):
            continue
        last = key.rpartition(".")[2]
        # What was typed stays as it is: a shell drops candidates that begin with something else.
        name = parent + dot + (last if "_" in begun else last.replace("_", "-"))
        name = begun + name[len(begun) :]
        if name not in seen:
            seen.add(name)
            yield Answer(f"{name}." if each.get("section") else name, each["help"])


def _values(command: Table, keys: Mapping[str, Table], option: str, begun: str) -> list[Answer] | None:
    """Values of an option; None if it takes none, or is no option."""
    if not option.startswith("-"):
        return None
    own = command["options"].get(option)
    key = own or keys.get(option[2:]) or keys.get(option[2:].replace("-", "_"))
    if key is None or key.get("flag"):
        return None
    if key.get("choices"):
        return _starting([Answer(choice) for choice in key["choices"]], begun)
    return list(_files(begun, ())) if key.get("path") or own is None else []


def _positional(command: Table, keys: Mapping[str, Table], before: Sequence[str], current: str) -> Iterator[Answer]:
    kind = command["argument"]
    if kind == "run":
        yield from _runs(current)
        return
    if kind == "job":
        yield from _jobs(current)
        return
    if kind is None:
        return
    if command["names_keys"] and any(not word.startswith("-") for word in before):
        yield from _key_answers(keys, current)
        return
    yield from _files(current, (".toml",))
    if command["names_keys"]:
        yield from _runs(current, folders=False)


def _runs(current: str, folders: bool = True) -> Iterator[Answer]:
    """Runs below `outputs`, newest first, then all folders."""
    runs: list[tuple[float, str]] = []
    if Path(RUNS_BELOW).is_dir():
        with os.scandir(RUNS_BELOW) as entries:
            for entry in entries:
                if entry.is_dir() and Path(entry.path, "configs").is_dir():
                    runs.append((-entry.stat().st_mtime, f"{RUNS_BELOW}/{entry.name}"))
    named = [Answer(name) for _, name in sorted(runs)]
    found = _starting(named, current) or [
        each for each in named if current and Path(each.value).name.startswith(current)
    ]
    yield from found
    taken = {f"{each.value}/" for each in found}
    if folders:
        yield from (each for each in _files(current, None) if each.value not in taken)


def _jobs(current: str) -> Iterator[Answer]:
    """Names in the job log, newest first; keys, if a key is what was begun."""
    from medarc_rl.errors import MedarcError
    from medarc_rl.jobs import LAST, JobLog

    try:
        records, _ = JobLog.of_user().read()
    except MedarcError:
        return
    names = dict.fromkeys([LAST, *(record.name for record in records)])
    keys = [record.key for record in records] if current else []
    yield from _starting([Answer(name) for name in (*names, *keys) if name.isprintable()], current)


def _files(begun: str, endings: tuple[str, ...] | None) -> Iterator[Answer]:
    """Paths that begin with this: folders, and files with these endings. () takes all files, None takes none."""
    folder, slash, name = begun.rpartition("/")
    try:
        place = Path(folder + slash or ".").expanduser()
        with os.scandir(place) as entries:
            found = sorted((entry.name, entry.is_dir()) for _, entry in zip(range(_MAX_ENTRIES), entries, strict=False))
    except (OSError, RuntimeError):  # unreadable, or `~` of an unknown user
        return
    for entry, is_folder in found:
        hidden = entry.startswith(".") and not name.startswith(".")
        fits = is_folder or (endings is not None and (not endings or entry.endswith(endings)))
        if entry.startswith(name) and fits and not hidden and entry.isprintable():
            yield Answer(f"{folder}{slash}{entry}{'/' * is_folder}")


def _starting(candidates: Sequence[Answer], begun: str) -> list[Answer]:
    return [each for each in candidates if each.value.startswith(begun)]


# What a shell asks, and the lines that it gets.


_BASH_BREAKS = re.compile(r".*[\"'@><=;|&(:]", re.DOTALL)
"""Characters after which bash begins a new word. Programs may split words differently."""
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
