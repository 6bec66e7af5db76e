"""How much memory the key-value cache may use, and whether that is enough to serve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from prime_rl.inference.embedded.engine.slots import KVSlots
from prime_rl.inference.embedded.errors import UnsupportedModel
from prime_rl.utils.limits import usable_memory_bytes

CPU_MEMORY_SHARE = 0.25
"""Fraction of the usable memory for the key-value cache on a CPU, which is shared with trainer and environments."""

ORDINARY_TOKENS = 4096
"""Length that the cache must have room for if `model.max_model_len` is not set: many models have a context that is far
longer than any of their sequences."""

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class CacheBudget:
    """Bytes for the key-value cache, where they come from, and how to get more."""

    num_bytes: int
    origin: str
    advice: str

    @classmethod
    def on_gpu(cls, free_bytes: int, total_bytes: int, gpu_memory_utilization: float) -> Self:
        """What is left of the engine's share of a GPU, after its weights and what other programs use."""
        used_bytes = total_bytes - free_bytes
        # Halved because the old and the new tensors are alive at the same time while the slots grow.
        num_bytes = max(0, int(gpu_memory_utilization * total_bytes) - used_bytes) // 2
        return cls(
            num_bytes,
            f"half of what gpu_memory_utilization = {gpu_memory_utilization:g} of the GPU's {_gib(total_bytes)} leaves "
            f"beyond the {_gib(used_bytes)} in use by this model and other programs",
            "raise gpu_memory_utilization, end what else uses the GPU",
        )

    @classmethod
    def on_cpu(cls, memory_bytes: int) -> Self:
        """A share of the memory of this machine or job."""
        return cls(
            int(CPU_MEMORY_SHARE * memory_bytes),
            f"{CPU_MEMORY_SHARE:g} of the {_gib(memory_bytes)} of memory that this process may use",
            "use a machine or a job with more memory",
        )

    @classmethod
    def of_this_machine(cls) -> Self:
        return cls.on_cpu(usable_memory_bytes())

    def shortage(self, slots: KVSlots, max_model_len: int | None, context: int) -> str | None:
        """A warning if long sequences run one at a time; None if there is room for several.

        `slots` have been used once, which shows the size of a token. `max_model_len` is the config's, and `context`
        the longest sequence that is served.

        Raises:
            UnsupportedModel: there is no room for one sequence.
        """
        length = max_model_len or min(context, ORDINARY_TOKENS)
        named = f"model.max_model_len = {length}" if max_model_len else f"{length} tokens"
        needed_bytes, room = length * slots.bytes_per_token, self.num_bytes // slots.bytes_per_token
        has = f"the key-value cache has room for {room} tokens ({_gib(self.num_bytes)}: {self.origin})"
        advice = f"{self.advice}, or {'lower' if max_model_len else 'set'} model.max_model_len"
        if room < length:
            raise UnsupportedModel(f"{has}, but one sequence of {named} needs {_gib(needed_bytes)}: {advice}")
        if slots.fits(2, length):
            return None
        return f"{has}, so long sequences run one at a time: {room / length:.1f} of {named} fit. To run more, {advice}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
