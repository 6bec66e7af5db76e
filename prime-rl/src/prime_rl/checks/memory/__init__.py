"""Estimates the memory and disk that a run needs, from the model's config alone, without torch.

A model on PyTorch's meta device (accelerate's and Transformers' builders make such models) would give names and shapes,
which `shapes.py` reads from a file, at the price of importing torch and Transformers: 10 to 20 s of CPU on the first
start, where an estimate takes less than one. It would say nothing about activations, kernels, sharding or the server.
"""

from prime_rl.checks.memory.estimate import Estimate, Gpu, estimate_rl, estimate_sft, find_gpu, parse_gpu
from prime_rl.checks.memory.shapes import ModelShape
from prime_rl.checks.memory.training import Device
from prime_rl.utils.errors import UserError

__all__ = [
    "Device",
    "Estimate",
    "Gpu",
    "ModelShape",
    "UserError",
    "estimate_rl",
    "estimate_sft",
    "find_gpu",
    "parse_gpu",
]
