"""Finds secrets in command lines and other texts, and hides them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from prime_rl.utils.private import is_secret_name

HIDDEN = "***"

_FLAGS = {"--auto-auth", "--no-auto-auth"}
"""Options that take no value, though their names look like secrets."""
_REFERENCES = {"--kms-key", "--pull-secret", "--secret", "--secret-env"}
"""Options whose values only name a secret, or where it is kept."""

_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|xox[a-z]-[\w-]{10,}"
    r"|(?:AKIA|ASIA)[A-Z0-9]{16}|glpat-[\w-]{16,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]+)"
)
"""Matches tokens of known services."""
_BEARER = re.compile(r"(?<=\bBearer )[^\s\"']+", re.IGNORECASE)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_QUERY = re.compile(r"(?<=[?&])([\w.-]*(?:key|secret|sig|signature|token))=[^&\s]+", re.IGNORECASE)
_SHORTEST = 8
"""Characters of the shortest value of a variable that is looked for in other texts."""
_SHORTEST_LINE = 16
"""Characters of the shortest line that is looked for, of a value with several lines, such as a private key."""


def secrets_of(env: Mapping[str, str]) -> list[str]:
    """The values of an environment that are secrets, as their names tell, and their lines. The longest comes first."""
    values = [value.strip() for name, value in env.items() if is_secret_name(name)]
    # Paths such as SSH_AUTH_SOCK are not secrets.
    found = {value for value in values if len(value) >= _SHORTEST and not value.startswith("/")}
    lines = {line.strip() for value in values if "\n" in value for line in value.splitlines()}
    return sorted(found | {line for line in lines if len(line) >= _SHORTEST_LINE}, key=len, reverse=True)


def redacted(text: str, env: Mapping[str, str] = os.environ) -> str:
    """A text without the tokens of known services, passwords in URLs, and values of secret variables."""
    for value in secrets_of(env):
        text = text.replace(value, HIDDEN)
    for pattern in (_SHAPES, _BEARER, _USER_IN_URL):
        text = pattern.sub(HIDDEN, text)
    return _QUERY.sub(rf"\1={HIDDEN}", text)


def redacted_argv(argv: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """The words of a command line. Values of options whose names mean a secret are hidden, too."""
    return list(_redacted_words(argv, env))


def _redacted_words(argv: Sequence[str], env: Mapping[str, str]) -> Iterator[str]:
    before = ""
    for word in argv:
        option, equals, value = word.partition("=")
        if _takes_secret(before) and not word.startswith("--"):
            yield HIDDEN
        elif _REFERENCES & {before, option}:
            yield redacted(word, env)
        elif equals and is_secret_name(option):
            yield f"{option}={HIDDEN}"
        elif "=" in value and is_secret_name(value.partition("=")[0]):
            # `--env=NAME=VALUE` holds two names.
            yield f"{option}={value.partition('=')[0]}={HIDDEN}"
        else:
            yield redacted(word, env)
        before = word


def _takes_secret(option: str) -> bool:
    """Whether the word after this option is a secret."""
    bare = option.startswith("--") and "=" not in option
    return bare and option not in _FLAGS | _REFERENCES and is_secret_name(option)
