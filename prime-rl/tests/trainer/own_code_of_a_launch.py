"""Started by `test_own_code.py` with two processes: builds a model that brings its own code, and prints its class.

Argument: the model's directory.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist

from prime_rl.configs.trainer import DebugModelConfig, ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.process.errors import leaving_at_once
from prime_rl.trainer.process.mesh import setup_mesh
from prime_rl.trainer.process.world import destroy_world, setup_world

with leaving_at_once():
    process = setup_world("cpu", timeout_s=3600)
    config = ModelConfig(
        name=sys.argv[1], trust_remote_code=True, attn="sdpa", debug=DebugModelConfig(random_init=True)
    )
    mesh = setup_mesh(config, process)
    dist.barrier()
    model = setup_model(config, mesh)
    os.write(sys.stdout.fileno(), f"{type(model).__name__.removeprefix('FSDP')}\n".encode())
    destroy_world()
