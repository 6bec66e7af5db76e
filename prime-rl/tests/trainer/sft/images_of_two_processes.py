"""Started by `test_images.py` under torchrun: the gradient of rows, of which one process has those with images."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.trainer import ModelConfig, TokenizerConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.images import setup_images
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.mesh import Mesh, setup_mesh
from prime_rl.trainer.process.world import destroy_world, setup_world
from prime_rl.trainer.sft.data.packer import lay_out
from prime_rl.trainer.sft.data.samples import SampleMaker
from prime_rl.trainer.sft.data.sources import setup_entries
from prime_rl.trainer.sft.step import CrossEntropy, forward_backward
from prime_rl.transport.loading import full_tensor

ROWS = ((0, 3), (1,), (2,), (1, 1))
"""The samples of each packed row. With two processes, the second has no images."""


def gradient_of(config: ModelConfig, file: Path, mesh: Mesh) -> dict[str, torch.Tensor]:
    """The gradient of `ROWS`, of which each process computes some."""
    tokenizer = setup_tokenizer(TokenizerConfig(name=config.name), config)
    images = setup_images(config, tokenizer)
    data = SFTDataConfig(name=str(file), shuffle=False, seq_len=256)
    make, entries = SampleMaker(data, tokenizer, images=images), setup_entries(data)
    samples = [make(entries.at(row)).sample for row in range(3 + 1)]
    rows = [lay_out([samples[at] for at in row], 256, 256) for row in ROWS]
    total = sum(int(row.is_trained.sum()) for row in rows)
    model = setup_model(config, mesh, has_dropout=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora.B" in name:  # otherwise A has no gradient
                parameter.fill_(0.01)
    own = rows[mesh.data_axis.data_rank :: mesh.data_axis.data_size]
    forward_backward(model, own, CrossEntropy(images=images), [total], mesh)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    return {name: full_tensor(each.grad).clone() for name, each in trained.items()}


def main() -> None:
    results, file, *settings = sys.argv[1:]
    process = setup_world("cpu", timeout_s=600)
    found = {}
    for each in settings:
        config = ModelConfig.model_validate_json(each)
        found[each] = gradient_of(config, Path(file), setup_mesh(config, process))
    if process.is_main:
        torch.save(found, results)
    destroy_world()


if __name__ == "__main__":
    with leaving_at_once():
        main()
