"""Started by `test_mixture_of_experts.py` with two processes: saves the weights of a model trained in bfloat16.

Arguments: the model's directory, and a file for the weights.
"""

from __future__ import annotations

import sys

import torch

from prime_rl.configs.trainer import ModelConfig
from prime_rl.trainer.checkpoints.weights import gather_weights
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.parallel_dims import setup_mesh
from prime_rl.trainer.process.world import destroy_world, setup_world

with leaving_at_once():
    process = setup_world("cpu", timeout_s=3600)
    config = ModelConfig(name=sys.argv[1], attn="sdpa", optimization_dtype="bfloat16")
    weights = gather_weights(setup_model(config, setup_mesh(config, process)), torch.bfloat16)
    if process.is_main:
        torch.save(weights, sys.argv[2])
    destroy_world()
