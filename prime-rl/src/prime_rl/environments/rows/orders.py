"""Curricula: text files with one prompt id per line, in the order of training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.environments.rows.formats import words
from prime_rl.environments.rows.sources import RowsFault, local_path
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import count_of

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Order:
    """The ids of a curriculum that a dataset has, in its order."""

    ids: list[str]
    unknown: list[str]
    """Ids of the file that the dataset does not have, or not any more after its filters."""
    repeated: int = 0
    """Lines that name an id again. They are skipped."""

    def describe(self, file: Path) -> str:
        parts = [f"{count_of('id', len(self.ids))} of {file}"]
        if self.unknown:
            more = "…" if len(self.unknown) > _SHOWN else ""
            parts.append(f"{count_of('id', len(self.unknown))} unknown ({', '.join(self.unknown[:_SHOWN])}{more})")
        if self.repeated:
            parts.append(f"{count_of('repeated line', self.repeated)} skipped")
        return ", ".join(parts)


def read_order(file: Path, known: Iterable[str]) -> Order:
    """Read a curriculum. Ids that differ only in case, spaces or punctuation from one known id are found, too.

    Raises:
        RowsFault: the file cannot be read, or names no known id.
    """
    try:
        lines = local_path(file).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RowsFault(f"order = {file}: cannot be read: {error}") from error
    ids = [line.strip() for line in lines if line.strip()]
    exact = dict.fromkeys(known)
    alike = _alike(exact)
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


def write_order(ids: Sequence[str], file: Path) -> None:
    """Write a curriculum."""
    with replacing_file(file) as scratch:
        scratch.write_text("".join(f"{each}\n" for each in ids), encoding="utf-8")
        scratch.chmod(0o600)


def _alike(known: Mapping[str, None]) -> dict[str, str]:
    """Ids by their words, without those that several share."""
    found: dict[str, str | None] = {}
    for each in known:
        found[words(each)] = None if words(each) in found else each
    return {key: each for key, each in found.items() if each is not None and key}
