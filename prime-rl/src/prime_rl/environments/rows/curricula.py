"""Reads and writes the files that choose rows: curricula, and tables of pass rates.

A curriculum is a text file with one prompt id per line, in training order. A table of pass rates (`medarc_train passk`)
says for each prompt how many of its completions were right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.environments.rows.formats import words
from prime_rl.environments.rows.sources import RowsFault, local_path, read_rows
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import count_of

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Order:
    """A curriculum, matched with the ids of a dataset."""

    ids: list[str]
    unknown: list[str]
    """Ids of the file that the dataset lacks, or that its filters left out."""
    repeated: int = 0
    """Number of lines that repeat an id. They are skipped."""

    def describe(self, file: Path) -> str:
        parts = [f"{count_of('id', len(self.ids))} of {file}"]
        if self.unknown:
            more = "…" if len(self.unknown) > _SHOWN else ""
            parts.append(f"{count_of('id', len(self.unknown))} unknown ({', '.join(self.unknown[:_SHOWN])}{more})")
        if self.repeated:
            parts.append(f"{count_of('repeated line', self.repeated)} skipped")
        return ", ".join(parts)


def read_order(file: Path, known: Iterable[str]) -> Order:
    """Read a curriculum. Case, spaces and punctuation of an id may differ from the one known id that it means.

    Raises:
        RowsFault: the file cannot be read, or names no known id.
    """
    try:
        lines = local_path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RowsFault(f"order = {file}: cannot be read: {error}") from error
    ids = [line.strip() for line in lines if line.strip()]
    exact = dict.fromkeys(known)
    alike = _by_words(exact)
    chosen: dict[str, None] = {}
    unknown, repeated = [], 0
    for each in ids:
        found = each if each in exact else alike.get(words(each))
        if found is None:
            unknown.append(each)
        elif found in chosen:
            repeated += 1
        else:
            chosen[found] = None
    if not chosen:
        shown = ", ".join(ids[:_SHOWN]) or "nothing"
        has = ", ".join(list(exact)[:_SHOWN]) or "none"
        raise RowsFault(
            f"order = {file}: none of its {len(ids)} ids is in the dataset: the file has {shown}…, rows have {has}…"
        )
    return Order(list(chosen), unknown, repeated)


def _by_words(known: Mapping[str, None]) -> dict[str, str]:
    """Ids by their normalized form, without forms that several ids share."""
    found: dict[str, str | None] = {}
    for each in known:
        found[words(each)] = None if words(each) in found else each
    return {key: each for key, each in found.items() if each is not None and key}


def write_order(ids: Sequence[str], file: Path) -> None:
    """Write a curriculum."""
    with replacing_file(file) as scratch:
        scratch.write_text("".join(f"{each}\n" for each in ids), encoding="utf-8")
        scratch.chmod(0o600)


@dataclass(frozen=True, slots=True)
class PassRate:
    """Results of one prompt."""

    prompt_id: str
    n: int
    """Number of scored completions."""
    correct: int
    env: str = ""
    pass_at: Mapping[int, float] | None = None
    """Estimates of pass@k, by k."""
    mean_reward: float | None = None

    @property
    def rate(self) -> float:
        """Share of right completions, which estimates pass@1."""
        return self.correct / self.n

    def as_row(self) -> dict[str, Any]:
        passes = {f"pass@{k}": value for k, value in (self.pass_at or {}).items()}
        return {
            "prompt_id": self.prompt_id,
            "env": self.env,
            "n": self.n,
            "correct": self.correct,
            **passes,
            "mean_reward": self.mean_reward,
        }


def read_pass_rates(file: Path) -> dict[str, PassRate]:
    """Read a table, by prompt id. Raises RowsFault."""
    found: dict[str, PassRate] = {}
    for number, row in enumerate(read_rows(str(file)), start=1):
        try:
            each = PassRate(str(row["prompt_id"]), int(row["n"]), int(row["correct"]))
        except (KeyError, TypeError, ValueError) as error:
            raise RowsFault(
                f"{file}: row {number} is not a row of a table of pass rates (prompt_id, n, correct): {error!r}"
            ) from error
        if not 0 <= each.correct <= each.n or each.n == 0:
            raise RowsFault(
                f"{file}: row {number}: {each.correct} of {each.n} attempts correct: n must be at least 1, and correct "
                "from 0 to n"
            )
        if each.prompt_id in found:
            raise RowsFault(f"{file}: row {number}: the prompt {each.prompt_id} is duplicated")
        found[each.prompt_id] = each
    if not found:
        raise RowsFault(f"{file}: the table is empty")
    return found


def write_pass_rates(rates: Iterable[PassRate], file: Path) -> None:
    """Write a table as JSON Lines or, if the file's name ends in `.csv`, as CSV."""
    rows = [rate.as_row() for rate in rates]
    with replacing_file(file) as scratch:
        if file.suffix == ".csv":
            import csv

            with scratch.open("w", encoding="utf-8", newline="") as out:
                names = list(dict.fromkeys(name for row in rows for name in row))
                table = csv.DictWriter(out, names, restval="")
                table.writeheader()
                table.writerows(rows)
        else:
            scratch.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        scratch.chmod(0o600)
