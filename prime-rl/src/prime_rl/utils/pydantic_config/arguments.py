"""Reads environment variables, and options: `--a.b-c value`, `--a.b_c=value`, `--flag`, `--no-flag`, `--section`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from prime_rl.utils.errors import MAX_FAULTS, ConfigError, ConfigWarning
from prime_rl.utils.pydantic_config.faults import advice_for_key, nearest_keys
from prime_rl.utils.pydantic_config.layers import Layer, NoSuchItem, merged, set_at
from prime_rl.utils.pydantic_config.schema import (
    KeySite,
    Section,
    find_key,
    find_negated,
    is_boolean_flag,
    is_table,
    list_items,
    sections_among,
    shortcuts_of,
)
from prime_rl.utils.pydantic_config.values import NULLS, BadText, parse_text
from prime_rl.utils.scratch import LAUNCH_VARIABLE
from prime_rl.utils.tables import KeyPath

__all__ = [
    "ParsedArguments",
    "arguments_layer",
    "is_boolean_flag",
    "parse_arguments",
    "parse_unknown_args",
    "to_kebab_case",
]

MAX_WORDS = 10_000
_BOOLEANS = ("true", "false", "yes", "no", "on", "off", "1", "0")


_LIKELY_KEYS = ("name", "id", "type")
"""What somebody means who gives a section a word, the likeliest first."""


@dataclass
class ParsedArguments:
    """The values of options, the other words, and the faults."""

    values: dict[KeyPath, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    extras: list[str] = field(default_factory=list)
    """Unknown options and their values, if they are allowed."""
    plain: list[str] = field(default_factory=list)
    """Words that belong to no known option, such as a file without `@`, in order."""
    faults: list[str] = field(default_factory=list)
    strays: dict[int, str] = field(default_factory=dict)
    """Words of `plain` that are faults if nobody takes them, by the index of the fault."""

    def take(self, word: str) -> str:
        """Remove a plain word, which means something to the caller, with its fault."""
        self.plain.remove(word)
        index = next((index for index, stray in self.strays.items() if stray == word), None)
        if index is not None:
            del self.strays[index]
            self.faults[index] = ""
        return word

    def checked(self) -> ParsedArguments:
        """Raises ConfigError: a word is not an option, or its value cannot be parsed."""
        if faults := [fault for fault in self.faults if fault]:
            raise ConfigError(faults)
        return self

    def assign(self, site: KeySite, flag: str, value: Any) -> None:
        """Set a value. A repeated option extends a list, merges a table, and replaces anything else."""
        earlier = self.values.get(site.path)
        if isinstance(earlier, list) and isinstance(value, list):
            value = earlier + value
        self.values[site.path] = merged(earlier, value)
        self.origins[site.path] = flag

    def layer(self) -> Layer:
        """Return all values as one table. An option for one key wins over JSON for its section.

        Raises:
            ConfigError: an option sets an item beyond the end of a list that another option gives.
        """
        data: dict[str, Any] = {}
        for path in sorted(self.values, key=lambda path: (len(path), [part for part in path if isinstance(part, int)])):
            try:
                set_at(data, path, self.values[path])
            except NoSuchItem as error:
                raise ConfigError([f"{self.origins[path]}: {error}"]) from None
        return Layer("command line", data, self.origins)


def parse_arguments(root: Section, args: Sequence[str], allow_extras: bool = False) -> ParsedArguments:
    """Parse arguments without `@`.

    An unknown option is a fault. With `allow_extras` it is kept in `extras` with its values, unless its first word is
    a section of `root`: then it is a misspelled key.

    Raises:
        ConfigError: there are too many words.
    """
    parsed = ParsedArguments()
    if len(args) > MAX_WORDS:
        raise ConfigError([f"{len(args)} words: at most {MAX_WORDS:_}; write the values to a file"])
    words = list(args)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            if allow_extras:
                parsed.extras.append(word)
                continue
            if not word.startswith("-"):
                parsed.plain.append(word)
                parsed.strays[len(parsed.faults)] = word
            parsed.faults.append(_stray(root, word, after="".join(args[: -1 - len(words)][-1:])))
            continue
        flag, equals, text = word.partition("=")
        try:
            _read_option(root, parsed, flag, text if equals else None, words)
        except KeyError:
            if allow_extras and not _is_below_section(root, flag):
                parsed.extras += [word, *_values_after(words)]
            else:
                values = _values_after(words, at_most=1)
                # The word after an unknown option may be its value, or the config's file.
                parsed.plain += [
                    value for value in values if not (value.startswith("-") or _is_below_section(root, flag))
                ]
                told = len(parsed.faults) < MAX_FAULTS
                advice = advice_for_key(root, flag[2:], as_flag=True) if told else None
                parsed.faults.append(f"{flag}: unknown option; {advice}" if advice else f"{flag}: unknown option")
        except BadText as error:
            parsed.faults.append(f"{flag}: {error}")
    return parsed


def arguments_layer(root: Section, args: Sequence[str]) -> Layer:
    """Return the values that arguments without `@` set.

    Raises:
        ConfigError: an argument cannot be parsed. There is one fault for each such argument.
    """
    return parse_arguments(root, args).checked().layer()


def parse_unknown_args(args: Sequence[str], config_cls: Section) -> tuple[list[str], list[str]]:
    """Split arguments into options of `config_cls` and others, each with its values."""
    unknown = parse_arguments(config_cls, args, allow_extras=True).extras
    left = list(unknown)
    known = []
    for word in args:
        if left and word == left[0]:
            left.pop(0)
        else:
            known.append(word)
    return known, unknown


def to_kebab_case(args: list[str]) -> list[str]:
    """Replace underscores in option names by dashes, in place. Values are not changed."""
    for index, word in enumerate(args):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            args[index] = name.replace("_", "-") + equals + value
    return args


def _read_option(root: Section, parsed: ParsedArguments, flag: str, text: str | None, words: list[str]) -> None:
    """Assign one option. Raises KeyError for an unknown key, and BadText for a malformed value."""
    name = flag[2:]
    site = find_key(root, shortcuts_of(root).get(name, name))
    if site is None:
        site = find_negated(root, name)
        if site is None:
            raise KeyError(flag)
        if text is not None:
            raise BadText("takes no value")
        parsed.assign(site, flag, False if site.is_flag else None)
        return
    if site.path == ("toml_files",):
        raise BadText("is a key of files; name a file with `@ file`")
    if text is None:
        text = _value_for(site, words)
    if text is None:
        parsed.assign(site, flag, True if site.is_flag else {})
    else:
        parsed.assign(site, flag, parse_text(text, site.kinds))


def _value_for(site: KeySite, words: list[str]) -> str | None:
    """Remove the option's value from `words`. Return None for a flag or section without a value."""
    follows = words[0] if words and not words[0].startswith("--") else None
    if site.is_flag and (follows is None or follows.lower() not in (*_BOOLEANS, "null", "none")):
        return None
    if site.is_section and (follows is None or not (follows.startswith("{") or follows in NULLS)):
        return None
    if follows is None:
        raise BadText("needs a value")
    return words.pop(0)


_HYDRA = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)
"""An assignment as Hydra and OmegaConf read it: `optim.lr=1e-4`, `+new.key=1`."""


def _values_after(words: list[str], at_most: int | None = None) -> list[str]:
    """Remove the values of an unknown option from `words`."""
    values = list(takewhile(lambda word: not word.startswith("--"), words))[:at_most]
    del words[: len(values)]
    return values


def _is_below_section(root: Section, flag: str) -> bool:
    head, dot, _ = flag[2:].partition(".")
    site = find_key(root, head)
    return bool(dot) and site is not None and (site.is_section or is_table(site.kinds) or _holds_sections(site))


def _holds_sections(site: KeySite) -> bool:
    return bool(sections_among(list_items(site.kinds) or ()))


def _stray(root: Section, word: str, after: str) -> str:
    """What is wrong with a word that belongs to no option. `after` is the word before it."""
    if word.endswith(".toml"):
        return f"{word}: unexpected argument; to read a config file, write `@ {word}`"
    if word.startswith("-"):
        return f"{word}: unknown option; options start with two dashes"
    if (assigned := _HYDRA.fullmatch(word)) is not None:
        flag = f"--{assigned['key'].replace('_', '-')} {assigned['value']}".rstrip()
        return f"{word}: unexpected argument; a key is set as {flag}"
    site = find_key(root, after[2:]) if after.startswith("--") and "=" not in after else None
    if site is not None and site.is_section:
        likely = next((key for key in _LIKELY_KEYS if find_key(root, f"{after[2:]}.{key}") is not None), None)
        advice = f"did you mean {after}.{likely}?" if likely else f"set one of its keys, as {after}.KEY"
        return f"{word}: unexpected argument; {after} is a section: {advice}"
    return f"{word}: unexpected argument; items of a list are separated by commas"


# Reads environment variables such as `PRIME_RL_MODEL__NAME`. The older prefix `PRIME_` works too.


PREFIXES = ("PRIME_", "PRIME_RL_")
"""The last prefix wins."""
NOT_KEYS = frozenset(
    {
        LAUNCH_VARIABLE,
        "PRIME_RL_BUCKET_CACHE",
        "PRIME_RL_CACHE",
        "PRIME_RL_ENVIRONMENT_PROCESS",
        "PRIME_RL_METRICS_KEY",
        "PRIME_RL_PROXY_API_KEY",
        "PRIME_RL_RUNTIME_DIR",
        "PRIME_RL_STORE",
        "PRIME_RL_TRANSPORT_KEY",
        "PRIME_RL_UPDATE_COUNT",
        "PRIME_RL_VENVS",
        "PRIME_RL_VLLM_PYTHON",
    }
)
"""Variables with the prefix that are no keys of a config."""


def environment_layer(root: Section, environ: Mapping[str, str]) -> Layer:
    """Return the keys of `root` that the environment sets.

    A variable whose first word is not a key at the top of `root` is ignored, since it may belong to another program. If
    it starts with `PRIME_RL_`, there is a `ConfigWarning`.

    Raises:
        ConfigError: the JSON of a section is malformed.
    """
    data: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    faults = []
    for text in _ignored(root, environ):
        warnings.warn(text, ConfigWarning, stacklevel=2)
    for variable, words in _variables(root, environ):
        site = find_key(root, ".".join(words))
        path: KeyPath = site.path if site else words
        try:
            value = parse_text(environ[variable], site.kinds) if site else environ[variable]
        except BadText as error:
            faults.append(f"{variable}: {error}")
            continue
        set_at(data, path, value)
        origins[path] = variable
    if faults:
        raise ConfigError(faults)
    return Layer("environment", data, origins)


def _variables(root: Section, environ: Mapping[str, str]) -> list[tuple[str, tuple[str, ...]]]:
    """Return variables and their paths, the weak prefix first, and the JSON of a section before its keys."""
    found = []
    for strength, prefix in enumerate(PREFIXES):
        for variable in environ:
            path = _path(variable, prefix)
            if path is not None and _is_ours(root, path):
                found.append((strength, len(path), variable, path))
    return [(variable, path) for _, _, variable, path in sorted(found)]


def _ignored(root: Section, environ: Mapping[str, str]) -> Iterator[str]:
    """One line for each variable that is meant for us and is no key of `root`."""
    # The launcher has read the environment for all of its processes.
    if LAUNCH_VARIABLE in environ:
        return
    for variable in sorted(environ):
        path = _path(variable, PREFIXES[-1])
        if path is None or _is_ours(root, path) or variable.upper() in NOT_KEYS:
            continue
        nearest = [PREFIXES[-1] + "__".join(key).upper() for key in nearest_keys(root, path)]
        hint = f"; did you mean {' or '.join(nearest)}?" if nearest else ""
        command = getattr(root, "component", "") or "this command"
        yield f"{variable} is ignored: {command} has no key {'.'.join(path)}{hint}"


def _path(variable: str, prefix: str) -> tuple[str, ...] | None:
    if not variable.upper().startswith(prefix):
        return None
    return tuple(variable[len(prefix) :].lower().split("__"))


def _is_ours(root: Section, path: tuple[str, ...]) -> bool:
    return path[0] in root.model_fields and path[0] != "toml_files"
