"""What `sft` does with a file of rows before the first step: checks, opening, fingerprint, and its first 256 rows.

`reading-…` is one shuffled pass over the rows after that, without a tokenizer.

    uv run benchmarks/growth/preflight.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from measure import Action, Cost, measure_from_command_line, tens
from rows import WRITERS

FIRST_ROWS = 256


def prepare(kind: str, size: int, folder: Path) -> None:
    WRITERS[kind](size, folder / f"rows.{kind}")


def begin(kind: str, size: int, folder: Path) -> Action:
    import pyarrow.parquet  # noqa: F401 - so that its import is not measured

    from prime_rl.checks.data_files import data_faults
    from prime_rl.checks.start_dir import StartDir
    from prime_rl.configs.sft import SFTConfig
    from prime_rl.trainer.sft.data.sources import setup_entries
    from prime_rl.trainer.sft.resume import fingerprint_of

    config = SFTConfig(model={"name": "x"}, data={"name": str(folder / f"rows.{kind}"), "seq_len": 128}, max_steps=1)

    def work() -> None:
        assert not list(data_faults(config.datasets, StartDir()))
        entries = setup_entries(config.data)
        for position in range(min(FIRST_ROWS, size)):
            entries.at(position).read()
        fingerprint_of(config.data, NoTokenizer())

    return work


class NoTokenizer:
    """As much of a tokenizer as the fingerprint reads. A real one adds the same to every size."""

    special_tokens_map: dict[str, str] = {}  # noqa: RUF012
    chat_template = ""

    @property
    def backend_tokenizer(self) -> NoTokenizer:
        return self

    def to_str(self) -> str:
        return ""

    def __call__(self, text: str) -> None:
        """Nothing."""


def begin_reading(kind: str, size: int, folder: Path) -> Action:
    from prime_rl.configs.data import SFTDataConfig
    from prime_rl.trainer.sft.data.sources import setup_entries

    entries = setup_entries(SFTDataConfig(name=str(folder / f"rows.{kind}"), seq_len=128))

    def work() -> None:
        for position in range(size):
            entries.at(position).read()

    return work


COSTS = [
    *(Cost(f"preflight-{kind}", "rows", tens(3, 7), partial(begin, kind), partial(prepare, kind)) for kind in WRITERS),
    *(
        Cost(f"reading-{kind}", "rows", tens(3, 7), partial(begin_reading, kind), partial(prepare, kind))
        for kind in ("jsonl", "parquet")
    ),
]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
