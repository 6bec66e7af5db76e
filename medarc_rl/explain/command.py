"""The command `medarc_train explain`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from medarc_rl.cli import say
from medarc_rl.errors import UsageError

if TYPE_CHECKING:
    from medarc_rl.explain.sources import Source

Kind = Literal["rl", "sft", "dpo", "rm", "eval"]


@dataclass(frozen=True, kw_only=True)
class ExplainOptions:
    kind: Annotated[
        Kind | None, Option("--as", help="Command that CONFIG is for; by default, found from its keys.")
    ] = None
    diff: Annotated[
        Path | None, Option(metavar="OTHER", help="Show only what differs from OTHER, a config or a run's directory.")
    ] = None
    all: Annotated[bool, Option("--all", help="Show defaults, too.")] = False
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False


def explain(words: list[str], options: ExplainOptions) -> int:
    """Show where each value of a config comes from: `explain CONFIG [KEY] [options]`.

    CONFIG is a TOML file, `@ file`s, or the directory of a run. Without KEY, every value that is not a default is
    listed with the file and line, option, environment variable or rule that set it, and what it overrides. KEY is a
    key, or a section.
    """
    from medarc_rl.explain.sources import Source
    from prime_rl.utils.pydantic_config import ConfigError

    try:
        source = Source.of_words(words, options.kind)
        if options.diff is not None:
            return _differences(source, Source.of_path(options.diff, options.kind), options.json)
        return _explanation(source, options)
    except ConfigError as error:
        raise UsageError(*error.faults) from error


def _explanation(source: Source, options: ExplainOptions) -> int:
    from medarc_rl.explain.screen import as_json, details, table

    values = source.values
    if source.key is None:
        chosen = [each for each in values if options.all or each.is_of_interest]
    else:
        chosen = source.below_key()
    if options.json:
        say(json.dumps(as_json(chosen), indent=1))
    elif source.key is not None and [each.key for each in chosen] == [source.key]:
        copies = [each for each in values if each.rule == source.key]
        _print(details(source.root, chosen[0], copies))
    else:
        _print(table(chosen))
    return 0


def _differences(mine: Source, other: Source, as_json: bool) -> int:
    from medarc_rl.explain.screen import difference_lines, differences

    if mine.root is not other.root:
        raise UsageError(f"{other.name} is a config of {other.root.component}, not of {mine.root.component}")
    found = differences(mine.below_key(), other.below_key(mine.key))
    if as_json:
        say(json.dumps({each.key: each.as_json() for each in found}, indent=1))
    else:
        _print(difference_lines(found, mine.name, other.name))
    return 0


def _print(lines: Sequence[str] | Iterator[str]) -> None:
    for line in lines:
        say(line)
