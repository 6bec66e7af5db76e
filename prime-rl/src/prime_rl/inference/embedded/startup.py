"""Builds the embedded engine's service from an inference config: loads the model and sizes the key-value cache."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import Self

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from prime_rl.checks.chat_templates import tool_call_parser
from prime_rl.checks.engines import context_fault
from prime_rl.checks.model_description import VISION_FAMILIES
from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.engine.cache import KVSlots
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.lora import AdapterLimits
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model, model_config, tower_of
from prime_rl.inference.embedded.engine.scheduler import EngineLimits
from prime_rl.inference.embedded.engine.text import TOOL_PARSERS, Text, generation_defaults, load_text
from prime_rl.inference.embedded.engine.vision import ImageStore
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.inference.embedded.http.service import ServedImages, ServedModel, Service
from prime_rl.inference.model_files import DEFAULT_MAX_RANK
from prime_rl.run.process import wait_for_clearance
from prime_rl.transport.language_part import part_of
from prime_rl.utils.errors import StartFault
from prime_rl.utils.limits import usable_cpus, usable_memory_bytes
from prime_rl.utils.logger import get_logger

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
        """The engine's share of a GPU, less its weights and the memory of other programs."""
        used_bytes = total_bytes - free_bytes
        # Halved because the old and the new tensors are alive at the same time while the slots grow.
        num_bytes = max(0, int(gpu_memory_utilization * total_bytes) - used_bytes) // 2
        return cls(
            num_bytes,
            f"half of what gpu_memory_utilization = {gpu_memory_utilization:g} of the GPU's {_gib(total_bytes)} leaves "
            f"beyond the {_gib(used_bytes)} in use by this model and other programs",
            "raise gpu_memory_utilization, stop other programs that use the GPU",
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
            EngineError: there is no room for one sequence.
        """
        length = max_model_len or min(context, ORDINARY_TOKENS)
        named = f"model.max_model_len = {length}" if max_model_len else f"{length} tokens"
        needed_bytes = length * slots.bytes_per_token + slots.bytes_per_state
        # A model of states alone needs the same for any length: what it counts is sequences.
        room = max(0, self.num_bytes - slots.bytes_per_state) // max(1, slots.bytes_per_token)
        has = f"the key-value cache has room for {room} tokens ({_gib(self.num_bytes)}: {self.origin})"
        advice = f"{self.advice}, or {'lower' if max_model_len else 'set'} model.max_model_len"
        if room < length:
            raise EngineError(f"{has}, but one sequence of {named} needs {_gib(needed_bytes)}: {advice}")
        if slots.fits(2, length):
            return None
        return f"{has}, so long sequences run one at a time: {room / length:.1f} of {named} fit. To run more, {advice}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"


CPU_SEQUENCES, GPU_SEQUENCES = 128, 256
"""Number of sequences that grow at once, if the key-value cache has room. A GPU reads its weights once for all."""

STEPS_WITHOUT_PROMPTS = 8
"""With CUDA graphs. If a step with prompts takes as long as three that are replayed, prompts take at most a quarter of
the time, however many arrive. They wait for 8 replayed steps, some hundredths of a second."""

PREFIX_SHARE = 0.125
"""Size of the prefix cache as a fraction of the key-value memory of running sequences, in addition to it."""


def start_service(config: InferenceConfig) -> Service:
    """Load the model and its tokenizer, and run a warm-up step. The caller then runs `engine.run()` in its thread.

    Raises:
        EngineError: the message is one line for the user.
    """
    wait_for_clearance(os.environ, get_logger().info)
    disable_progress_bar()
    set_verbosity_error()
    name, trust = config.model.name, config.model.trust_remote_code
    max_model_len = _max_model_len(model_config(name, trust), config.model.max_model_len)
    device = _device(config.device)
    if device.type == "cpu":
        _use_cores_of(config.parallel.tp * config.parallel.dp)
    model, directory = load_model(name, config.model.dtype, device, trust, max_model_len)
    budget = _cache_budget(device, config.gpu_memory_utilization)
    defaults = generation_defaults(directory)
    text = load_text(name, trust, defaults, config.model.chat_template)
    text.refuse_endless_template()
    images = _images(config, model, text)
    runner = ModelRunner(
        model,
        budget.num_bytes,
        directory,
        enforce_eager=config.model.enforce_eager,
        keeps_routes=config.enable_return_routed_experts,
        tower=None if images.store is None else tower_of(model, images.store.reader.family),
    )
    if shortage := budget.shortage(runner.slots, config.model.max_model_len, max_model_len):
        get_logger().warning(shortage)
    served = ServedModel(name, max_model_len, runner.vocab_size, defaults)
    if texts := served.default_texts():
        get_logger().info(f"Defaults of requests, from the model's generation_config.json: {', '.join(texts)}")
    parser = TOOL_PARSERS.get(tool_call_parser(config.model, text.template) or "")
    engine = _engine(config, runner)
    engine.weight_source.from_trainer = config.weight_broadcast.type == "nccl"
    return Service(engine, text, served, random.Random(config.seed), parser, config.enable_sleep_mode, images)


def _images(config: InferenceConfig, model: PreTrainedModel, text: Text) -> ServedImages:
    """What reads the images of requests. If a model with a vision tower gets text alone, a warning says why."""
    name, folder = config.model.name, config.model.allowed_local_media_path
    if part_of(model) is None:
        return ServedImages()
    if config.model.language_model_only:
        return ServedImages(fault="language_model_only = true")
    try:
        family = model_config(name).model_type
        if family not in VISION_FAMILIES:
            raise StartFault(
                f"the embedded engine reads those of {', '.join(sorted(VISION_FAMILIES))}, not of {family}"
            )
        return ServedImages(ImageStore(text.image_reader(name)), folder=folder)
    except StartFault as fault:
        get_logger().warning(f"Requests with images are refused: {fault}")
        return ServedImages(fault=str(fault))


def _engine(config: InferenceConfig, runner: ModelRunner) -> Engine:
    keeps_prefixes = config.enable_prefix_caching is not False and not runner.state_layers
    if runner.state_layers:
        get_logger().info(
            f"{len(runner.state_layers.found)} layers keep a state ({runner.slots.bytes_per_state / 2**20:.1f} MiB per "
            "sequence): prompts are computed from their first token, no prefix is reused"
        )
    prefix_bytes = int(PREFIX_SHARE * runner.slots.budget_bytes) if keeps_prefixes else 0
    limits = EngineLimits(
        max_running=GPU_SEQUENCES if runner.device.type == "cuda" else CPU_SEQUENCES,
        max_adapters=config.max_loras,
        max_prefix_bytes=prefix_bytes,
        steps_without_prompts=0 if runner.graphs is None else STEPS_WITHOUT_PROMPTS,
    )
    if not config.enable_lora:
        return Engine(runner, limits)
    for_adapters = AdapterLimits(config.max_cpu_loras, config.max_lora_rank or DEFAULT_MAX_RANK)
    return Engine(runner, limits, runner.adapter_store(config.model.name, for_adapters))


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError('device = "cuda", but no CUDA device is visible')
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _use_cores_of(processes: int) -> None:
    """Use the cores of `processes` processes: the launcher assigns cores per process, and one engine replaces all."""
    torch.set_num_threads(min(usable_cpus(), processes * torch.get_num_threads()))


def _max_model_len(model: PreTrainedConfig, wanted: int | None) -> int:
    longest: int | None = getattr(model.get_text_config(), "max_position_embeddings", None)
    if not wanted:
        if longest is None:
            raise EngineError("the model's config has no context length: set inference.model.max_model_len")
        return longest
    if fault := context_fault(wanted, longest):
        raise EngineError(fault)
    return wanted


def _cache_budget(device: torch.device, gpu_memory_utilization: float) -> CacheBudget:
    if device.type == "cpu":
        return CacheBudget.of_this_machine()
    return CacheBudget.on_gpu(*torch.cuda.mem_get_info(device), gpu_memory_utilization)
