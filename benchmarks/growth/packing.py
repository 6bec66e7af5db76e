"""Packing: rows of 4,096 tokens from samples of 16 to 2,048 tokens, laid out as the trainer takes them.

uv run benchmarks/growth/packing.py
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from measure import Action, Cost, measure_from_command_line, tens

ROW_TOKENS = 4096
KINDS = 4096
"""Different samples, which are made before and drawn again and again."""


class Samples:
    """A stream that ends after `count` samples of one epoch each."""

    def __init__(self, count: int) -> None:
        from prime_rl.trainer.sft.data.conversation import TokenizedSample

        generator = np.random.default_rng(0)
        lengths = np.clip(generator.lognormal(5, 1, KINDS), 16, 2048).astype(int)
        self.samples = [
            TokenizedSample(generator.integers(0, 1000, length).astype(np.int32), np.ones(length, bool))
            for length in lengths
        ]
        self.count = count
        self.position = 0

    @property
    def epoch(self) -> int:
        return self.position // self.count

    def __next__(self):
        self.position += 1
        return self.samples[self.position % KINDS]


def begin(function: str, size: int, folder: Path) -> Action:
    from prime_rl.configs.data import SFTDataConfig
    from prime_rl.trainer.sft.data.packer import lay_out, setup_packer

    samples = Samples(size)
    pack = setup_packer(SFTDataConfig(name="x", seq_len=ROW_TOKENS, micro_batch_size=1, pack_function=function))

    def work() -> None:
        while samples.position < size:
            lay_out(pack(samples), ROW_TOKENS, ROW_TOKENS)

    return work


COSTS = [
    Cost(f"packing-{function}", "samples", tens(3, 7), partial(begin, function))
    for function in ("best_fit", "cat", "stack")
]

if __name__ == "__main__":
    measure_from_command_line(__doc__, COSTS)
