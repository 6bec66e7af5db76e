"""The data of an SFT run: rows of a dataset, made samples, packed into micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_rl.configs.sft import FakeDataConfig, SFTDataConfig
from prime_rl.trainer.sft.packing import PackedRow, PackedRows
from prime_rl.trainer.sft.samples import DatasetStream, FakeStream, SampleStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prime_rl.trainer.world import World

__all__ = ["PackedRow", "PackedRows", "setup_rows"]


def setup_rows(
    config: SFTDataConfig | FakeDataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int, world: World
) -> PackedRows:
    """This process's rows of `seq_len * micro_batch_size` tokens.

    Raises:
        DataError: the dataset is missing or has no conversations.
    """
    stream: SampleStream
    if isinstance(config, FakeDataConfig):
        stream = FakeStream(config, vocab_size, world)
    else:
        stream = DatasetStream(config, tokenizer, world)
    return PackedRows(stream, config, world)
