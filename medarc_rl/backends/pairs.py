"""Options that are given as `NAME=VALUE`, several times."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from medarc_rl.jobs.redaction import is_secret_name, redacted

VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Name of an environment variable."""
NAME = re.compile(r"[^=]+")

ValueT = TypeVar("ValueT")


def pairs(
    option: str,
    words: Sequence[str],
    faults: list[str],
    advice: str,
    read: Callable[[str], ValueT | None],
    name_pattern: re.Pattern[str] = NAME,
) -> dict[str, ValueT]:
    """The values of an option by name. Each word that is no pair is a fault, which does not repeat a value.

    Args:
        advice: what to write instead.
        read: the value of a text; None if it is none, which is a fault too.
    """
    found: dict[str, ValueT] = {}
    for word in words:
        name, equals, text = word.partition("=")
        fits = equals and name_pattern.fullmatch(name)
        value = read(text) if fits else None
        if value is None:
            shown = f" {redacted(name)!r}" if equals and name else ""
            faults.append(f"{option}{shown}: {advice}")
        elif name in found:
            faults.append(f"{option} {name}: given twice")
        else:
            found[name] = value
    return found


def plain_variables(words: Sequence[str], faults: list[str], instead: str) -> dict[str, str]:
    """`--env NAME=VALUE`. A literal secret is a fault, and left out.

    Args:
        instead: how a secret is given, with `{name}` for its variable.
    """
    advice = "write NAME=VALUE, as in --env OMP_NUM_THREADS=8; a name has letters, digits and underscores"
    found = pairs("--env", words, faults, advice, str, VARIABLE)
    secrets = [name for name, value in found.items() if is_secret_name(name) or redacted(value) != value]
    faults += [
        f"--env {name}: a secret, which everyone who sees the job could read: {instead.format(name=name)}"
        for name in secrets
    ]
    return {name: value for name, value in found.items() if name not in secrets}
