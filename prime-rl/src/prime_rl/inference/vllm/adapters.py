"""LoRA adapters in vLLM: loaded in place under their names, with versions of their own."""

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
    """The adapters of a server. Change them only while generation is paused."""

    engine: AsyncLLM
    models: OpenAIServingModels
    """Where vLLM looks up the adapter that a request names."""
    base_dir: Path
    versions: dict[str, int] = field(default_factory=dict)

    def check(self, name: str, directory: Path) -> None:
        """Read the headers of an adapter and see whether it can be loaded.

        Raises:
            AdapterMissing: a file is not there.
            WeightError: the adapter does not fit this model or this server.
        """
        limits = self.engine.vllm_config.lora_config
        if limits is None:
            raise WeightError("this server was started without enable_lora")
        check_name(name, self.models.model_name(), self.versions, limits.max_cpu_loras or limits.max_loras)
        read_adapter_spec(directory, checkpoint_shapes(self.base_dir), limits.max_lora_rank or DEFAULT_MAX_RANK)

    async def load(self, name: str, directory: Path) -> int:
        """Load an adapter, or a new version of it in place; its version.

        vLLM would read a request's adapter again in every step that is told to load in place. So the workers are told
        once, and requests, old and new, name what they then hold.

        Raises:
            WeightError: vLLM refuses it. The old version then stays.
        """
        known = self.models.lora_requests.get(name)
        number = known.lora_int_id if known is not None else self.models.lora_id_counter.inc(1)
        try:
            await self.engine.add_lora(LoRARequest(name, number, str(directory), load_inplace=True))
        except Exception as exc:  # whatever a worker raises arrives as one of several kinds
            raise WeightError(f"vLLM does not load the adapter {str(directory)!r}: {exc}") from exc
        self.models.lora_requests[name] = LoRARequest(name, number, str(directory))
        step = step_of(directory)
        self.versions[name] = self.versions.get(name, 0) + 1 if step is None else step
        return self.versions[name]

    async def unload_all(self) -> None:
        """Forget the adapters and end the requests that name one, because the weights under them are replaced."""
        if not self.versions:
            return
        self.versions.clear()
        self.models.lora_requests.clear()
        states = self.engine.output_processor.request_states
        await self.engine.abort([name for name, state in states.items() if state.lora_name], internal=True)
