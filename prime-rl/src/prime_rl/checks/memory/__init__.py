"""Estimates the memory and disk that a run needs, from the model's config alone, without torch."""

from prime_rl.checks.memory.estimate import Estimate, estimate_rl, estimate_sft
from prime_rl.checks.memory.gpus import Gpu, find_gpu, parse_gpu
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
