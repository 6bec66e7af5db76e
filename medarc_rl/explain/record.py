"""Keeps the origins of a run's values next to its configs, so that they can still be explained later."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from medarc_rl.errors import UsageError
from medarc_rl.explain.origins import Explained, Setting
from medarc_rl.explain.screen import as_json
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import one_line
from prime_rl.utils.files import replacing_file

NAME = "origins.json"


def record_origins(paths: RunPaths, values: Sequence[Explained]) -> None:
    """Write where each value that is not a default was set."""
    paths.configs.mkdir(parents=True, exist_ok=True)
    text = json.dumps(as_json([each for each in values if each.is_of_interest]), indent=1)
    with replacing_file(paths.configs / NAME) as scratch:
        scratch.write_text(text, encoding="utf-8")


def recorded_origins(paths: RunPaths, values: Sequence[Explained]) -> list[Explained]:
    """The values of a run with the origins that were recorded when it started.

    A run that was started by another command has no record: everything then comes from its resolved config.

    Raises:
        UsageError: the record is damaged.
    """
    file = paths.configs / NAME
    if not file.exists():
        return list(values)
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        return [_with_origin(each, record.get(each.key)) for each in values]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read ({error}): delete it to see the values alone") from error


def _with_origin(value: Explained, entry: dict[str, object] | None) -> Explained:
    if entry is None:
        return replace(value, written=(), rule=None)
    lost = entry["overrides"]
    if not isinstance(lost, list):
        raise TypeError("overrides is no list")
    places = [one_line(str(each["origin"])) for each in (entry, *lost)]
    written = [Setting(*each) for each in zip((value.value, *(each["value"] for each in lost)), places, strict=True)]
    return replace(value, written=tuple(written), rule=None)
