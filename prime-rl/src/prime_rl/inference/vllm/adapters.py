"""Loads LoRA adapters into vLLM in place and tracks the version of each one."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest
from vllm.v1.engine.async_llm import AsyncLLM

from prime_rl.inference.adapter_files import DEFAULT_MAX_RANK, check_name, read_adapter_spec
from prime_rl.inference.checkpoint_files import WeightError, checkpoint_shapes
from prime_rl.run.paths import step_of


@dataclass(slots=True)
class Adapters:
    """The server's adapters. Change them only while generation is paused."""

    engine: AsyncLLM
    models: OpenAIServingModels
    """vLLM's registry, which resolves a request's `model` to an adapter."""
    base_dir: Path
    versions: dict[str, int] = field(default_factory=dict)

    def check(self, name: str, directory: Path) -> None:
        """Check, from the adapter's config and headers, that it can be loaded.

        Raises:
            AdapterMissing: the directory or one of its files does not exist.
            WeightError: the adapter does not fit the model or exceeds the server's limits.
        """
        limits = self.engine.vllm_config.lora_config
        if limits is None:
            raise WeightError("this server was started without enable_lora")
        check_name(name, self.models.model_name(), self.versions, limits.max_cpu_loras or limits.max_loras)
        read_adapter_spec(directory, checkpoint_shapes(self.base_dir), limits.max_lora_rank or DEFAULT_MAX_RANK)

    async def load(self, name: str, directory: Path) -> int:
        """Load an adapter under `name`, or replace its current version in place. Returns the version.

        With `load_inplace` in a request, vLLM would read the adapter again in every step. So only this call sets it,
        and requests refer to the loaded adapter without it.

        Raises:
            WeightError: vLLM rejects the adapter. The old version then stays live.
        """
        known = self.models.lora_requests.get(name)
        number = known.lora_int_id if known is not None else self.models.lora_id_counter.inc(1)
        try:
            await self.engine.add_lora(LoRARequest(name, number, str(directory), load_inplace=True))
        except Exception as exc:  # workers' errors arrive as various types
            raise WeightError(f"vLLM cannot load the adapter {str(directory)!r}: {exc}") from exc
        self.models.lora_requests[name] = LoRARequest(name, number, str(directory))
        step = step_of(directory)
        self.versions[name] = self.versions.get(name, 0) + 1 if step is None else step
        return self.versions[name]

    async def unload_all(self) -> None:
        """Unload all adapters and abort the requests that use one, because their base weights are being replaced."""
        if not self.versions:
            return
        self.versions.clear()
        self.models.lora_requests.clear()
        states = self.engine.output_processor.request_states
        await self.engine.abort([name for name, state in states.items() if state.lora_name], internal=True)
