"""Turns `num_epochs` into a number of steps, once the data is known."""

from __future__ import annotations

import torch.distributed as dist

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.model.images import setup_images
from prime_rl.trainer.model.tokenizer import embeddings_held, setup_tokenizer
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.sft.data.examination import examine, made_rows, steps_of, steps_per_epoch
from prime_rl.trainer.sft.data.samples import SampleMaker
from prime_rl.trainer.sft.data.sources import setup_entries
from prime_rl.utils.logger import get_logger

_MAX_ROWS = 50_000
_MAX_TOKENS = 50_000_000
"""A tokenizer takes about a minute for as many tokens."""


def with_steps(config: SFTConfig, process: Process) -> SFTConfig:
    """The config with the `max_steps` that its `num_epochs` take; the same config without `num_epochs`. Collective.

    Raises:
        DataError: no row can be trained on.
    """
    if config.num_epochs is None:
        return config
    steps = [_count(config) if process.is_main else 0]
    dist.broadcast_object_list(steps, src=0)
    return config.model_copy(update={"max_steps": steps[0]})


def as_written(config: SFTConfig) -> SFTConfig:
    """The config before `with_steps`, which is the one to save and compare."""
    return config if config.num_epochs is None else config.model_copy(update={"max_steps": None})


def _count(config: SFTConfig) -> int:
    assert config.num_epochs is not None
    assert isinstance(config.data, SFTDataConfig), "num_epochs is refused for other data"
    entries = setup_entries(config.data)
    tokenizer = setup_tokenizer(config.tokenizer, config.model)
    held = embeddings_held(config.model, config.tokenizer, tokenizer)
    make = SampleMaker(config.data, tokenizer, images=setup_images(config.model, tokenizer), embeddings=held)
    found = examine(made_rows(entries, make, _MAX_ROWS, _MAX_TOKENS), entries.row_count, config.data)
    if found.packed_rows == 0:
        raise DataError("num_epochs: the data has no row that can be trained on")
    each = steps_per_epoch(found, config.data)
    steps = steps_of(config.num_epochs, each)
    about = "" if found.is_complete else "about "
    get_logger().info(f"num_epochs = {config.num_epochs:g}: {steps} steps, {about}{each:.1f} per epoch")
    return steps
