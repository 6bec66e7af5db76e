"""Resume: from nothing to the next row, after half of an epoch; `loaded` opens the file first, as a run does.

uv run benchmarks/growth/resume.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from measure import Action, Cost, measure_from_command_line, tens
from rows import WRITERS


def prepare(kind: str, size: int, folder: Path) -> None:
    WRITERS[kind](size, folder / f"rows.{kind}")


def begin(kind: str, streaming: bool, size: int, folder: Path) -> Action:
    import pyarrow.parquet  # noqa: F401 - so that its import is not measured

    from prime_rl.configs.data import SFTDataConfig
    from prime_rl.trainer.sft.data.sources import setup_entries

    config = SFTDataConfig(name=str(folder / f"rows.{kind}"), streaming=streaming, seq_len=128)
    position = size // 2
    block = position // config.shuffle_buffer * config.shuffle_buffer
    state = {"epoch": 0, "epoch_start": 0, "block_start": block} if streaming else {}

    def work() -> None:
        entries = setup_entries(config)
        entries.restore(state)
        entries.at(position).read()

    return work


def begin_rl(size: int, folder: Path) -> Action:
    from prime_rl.configs.orchestrator import BufferConfig
    from prime_rl.orchestrator.scheduling.buffer import Buffer

    buffer = Buffer({"env": size}, BufferConfig(), seed=1)
    for _ in range(16):
        buffer.sample()
    saved = buffer.state(())

    def work() -> None:
        resumed = Buffer({"env": size}, BufferConfig(), seed=1)
        resumed.restore(saved)
        assert resumed.sample() == buffer.sample()

    return work


COSTS = [
    Cost(
        f"resume-{'streamed' if streaming else 'loaded'}-{kind}",
        "rows",
        tens(3, 7),
        partial(begin, kind, streaming),
        partial(prepare, kind),
    )
    for kind in ("jsonl", "parquet")
    for streaming in (False, True)
] + [Cost("resume-rl", "rows", tens(3, 7), begin_rl)]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
