"""A table of pass rates: for each prompt, how many of its attempts were right. Written by `medarc_train passk`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.environments.rows.sources import RowsFault, read_rows
from prime_rl.utils.files import replacing_file


@dataclass(frozen=True, slots=True)
class PassRate:
    """What the attempts at one prompt came to."""

    prompt_id: str
    n: int
    """Attempts that were scored."""
    correct: int
    env: str = ""
    pass_at: Mapping[int, float] | None = None
    """Estimate of pass@k by k."""
    mean_reward: float | None = None

    @property
    def rate(self) -> float:
        """Share of right attempts, which is the estimate of pass@1."""
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
    """The table in a file, by prompt id. Raises RowsFault."""
    found: dict[str, PassRate] = {}
    for number, row in enumerate(read_rows(str(file)), start=1):
        try:
            each = PassRate(str(row["prompt_id"]), int(row["n"]), int(row["correct"]))
        except (KeyError, TypeError, ValueError) as error:
            raise RowsFault(
                f"{file}: row {number} is not one of a table of pass rates, with prompt_id, n and correct: {error!r}"
            ) from error
        if not 0 <= each.correct <= each.n or each.n == 0:
            raise RowsFault(f"{file}: row {number}: {each.correct} of {each.n} attempts cannot be right")
        if each.prompt_id in found:
            raise RowsFault(f"{file}: row {number}: the prompt {each.prompt_id} is duplicated")
        found[each.prompt_id] = each
    if not found:
        raise RowsFault(f"{file}: the table is empty")
    return found


def write_pass_rates(rates: Iterable[PassRate], file: Path) -> None:
    """Write the table as JSON Lines or, if the file's name ends in `.csv`, as CSV."""
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
