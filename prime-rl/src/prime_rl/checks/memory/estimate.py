"""Estimates the memory of each GPU of a run and its space on disk, and whether they suffice."""

from __future__ import annotations

import difflib
import math
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Literal

from prime_rl.checks.disk import DiskForecast, ModelSize, forecast_disk
from prime_rl.checks.engines import has_vllm
from prime_rl.checks.memory.shapes import ModelShape, count
from prime_rl.checks.memory.traffic import traffic_of_row
from prime_rl.checks.memory.training import (
    BYTES,
    Device,
    Parts,
    Training,
    copied_state,
    host_memory,
    loading_memory,
    memory_beside,
    peak_memory,
    resident_memory,
    tower_activations,
)
from prime_rl.checks.model_description import VISION_FAMILIES, ModelDescription
from prime_rl.configs.model import ModelConfig, cpu_row_tokens, product_of
from prime_rl.configs.optim import is_rounded
from prime_rl.configs.rollouts.judges import FrozenModel, frozen_judges
from prime_rl.utils.errors import UserError
from prime_rl.utils.limits import usable_memory_bytes

if TYPE_CHECKING:
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.rl.sections import DeploymentConfig
    from prime_rl.configs.sft import SFTConfig
    from prime_rl.configs.trainer import CheckpointConfig

# The GPU: the one that the user names, or the first that `nvidia-smi` finds.


_MIB = 2**20
_TIMEOUT_S = 1.5

MEMORY_GIB = {
    "B200": 178.3,
    "H200": 139.8,
    "H100": 79.1,
    "H100-NVL": 93.1,
    "H20": 95.0,
    "GH200": 94.5,
    "A100": 79.2,
    "A100-80": 79.2,
    "A100-40": 39.4,
    "L40S": 44.4,
    "L40": 44.4,
    "L4": 22.0,
    "A40": 44.4,
    "A10": 22.0,
    "A10G": 22.0,
    "RTX-A6000": 47.5,
    "RTX-6000-ADA": 47.4,
    "RTX-PRO-6000": 94.9,
    "RTX-5090": 31.3,
    "RTX-4090": 23.5,
    "RTX-3090": 23.6,
    "V100-32": 31.7,
    "V100-16": 15.8,
    "T4": 14.6,
}
"""Total that CUDA reports, in GiB, which is less than the name says."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, by its name and its memory."""

    name: str
    total_bytes: int
    is_here: bool = False
    """Found on this machine."""


def parse_gpu(text: str) -> Gpu:
    """A GPU from a name such as `H100` or `rtx 4090`, or from a number of GiB.

    Raises:
        UserError: the name is not in the table, or the number is not positive.
    """
    if number := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", text.strip(), re.IGNORECASE):
        gib = float(number[1])
        if not 0 < gib < 1e6 or not math.isfinite(gib):
            raise UserError(f"--gpu {text}: no GPU has {number[1]} GiB")
        return Gpu(f"a GPU of {gib:g} GiB", int(gib * _GIB))
    known = {_plain(name): name for name in MEMORY_GIB}
    plain = _plain(text)
    for candidate in (plain, f"RTX{plain}", plain.removesuffix("GB")):
        if candidate in known:
            name = known[candidate]
            return Gpu(name, int(MEMORY_GIB[name] * _GIB))
    near = difflib.get_close_matches(plain, known, 3, 0.4)
    listed = ", ".join(known[name] for name in near) or ", ".join(MEMORY_GIB)
    raise UserError(f"--gpu {text}: not in the table; nearest: {listed}; or give its memory in GiB, as in --gpu 80")


def find_gpu() -> Gpu | None:
    """The first GPU that `nvidia-smi` lists; None without one, or if it does not answer in time."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, mebibytes = answer.stdout.partition("\n")[0].rpartition(",")
    return Gpu(name.strip(), int(mebibytes) * _MIB, is_here=True) if mebibytes.strip().isdigit() else None


def _plain(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB`, `a100 80` and `A100-80` are written in many ways."""
    return re.sub(r"NVIDIA|GEFORCE|[^A-Z0-9]", "", name.upper())


# The inference server: weights, key-value cache, reserve.


Engine = Literal["vllm", "embedded"]

_GIB = 2**30
_VLLM_TOKENS = 8192
"""Tokens of vLLM's largest step on GPUs of the data center."""
_EMBEDDED_TOKENS = 4096
_EMBEDDED_ROWS = 128
_ROW_STEP = 16
_FIRST_LENGTH = 128
_CUDA_GRAPHS_BYTES = _GIB
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class Serving:
    """Memory of one GPU of an engine, by kind."""

    shape: ModelShape
    engine: Engine
    weight_bytes: int
    """Size of one parameter."""
    max_len: int
    """Longest sequence, in tokens."""
    in_flight: int
    """Sequences that the run keeps in flight, of all copies of the model."""
    tp: int
    dp: int
    has_graphs: bool

    ep: int = 1
    """GPUs that divide the experts of each layer; 1: those of `tp`."""
    is_packed: bool = False
    """The embedded engine keeps a second copy of the blocks' matrices, as its kernels for CPUs read them."""
    cache_bytes: int = 0
    """Size of one value in the key-value cache. 0 is `weight_bytes`."""

    @property
    def weights(self) -> int:
        packed = sum(map(count, self.shape.blocks)) if self.is_packed else 0
        experts = sum(prod(size) for block in self.shape.blocks for size in block.values() if len(size) == 3)
        others = self.shape.parameters + packed - experts
        return self.weight_bytes * (others // self.tp + experts // max(self.ep, self.tp))

    @property
    def token_bytes(self) -> int:
        """Keys and values of one token, in all layers."""
        shape, value_bytes = self.shape, self.cache_bytes or self.weight_bytes
        if rank := shape.config.get("kv_lora_rank") if self.engine == "vllm" else None:
            return int(shape.layers * (rank + shape.config.get("qk_rope_head_dim", 0)) * value_bytes)
        heads = -(-shape.kv_heads // self.tp)
        return shape.layers * heads * (shape.key_dim + shape.value_dim) * value_bytes

    @property
    def sequences(self) -> int:
        """Sequences in flight on one copy of the model."""
        return max(1, -(-self.in_flight // self.dp))

    @property
    def one_sequence(self) -> int:
        return self.max_len * self.token_bytes

    @property
    def working(self) -> int:
        """Activations and logits of the largest step, and CUDA graphs."""
        shape = self.shape
        tokens = _VLLM_TOKENS if self.engine == "vllm" else _EMBEDDED_TOKENS
        inner = int(shape.config.get("intermediate_size") or 4 * shape.hidden)
        step = tokens * (4 * shape.hidden + 3 * inner // self.tp) * self.weight_bytes
        rows = 256 if self.engine == "vllm" else min(self.sequences, _EMBEDDED_ROWS)
        logits = 3 * _FLOAT32 * rows * shape.vocab
        return step + logits + (_CUDA_GRAPHS_BYTES if self.has_graphs else 0)

    def cache(self, budget_bytes: int | None) -> int:
        """The key-value cache of an engine with `budget_bytes` for it; None if that is not known."""
        wanted = self.sequences * self.one_sequence
        if budget_bytes is None:
            return wanted
        if self.engine == "vllm":
            return max(0, budget_bytes)
        rows = -(-min(self.sequences, _EMBEDDED_ROWS) // _ROW_STEP) * _ROW_STEP
        length = max(_FIRST_LENGTH, 1 << (self.max_len - 1).bit_length())
        return max(0, min(budget_bytes, rows * length * self.token_bytes))


Verdict = Literal["fits", "tight", "does not fit"]
CRITIC = "critic"
OtherShapes = Mapping[str, ModelShape]
"""Models of the judges and of the teacher that a run starts, by the names of their processes, and that of a critic."""

TIGHT_SHARE = 0.9
"""Above this share of what is available, allocators fragment and an estimate of 10% may be wrong."""
CUDA_BYTES = 768 * 2**20
"""CUDA context and cuBLAS workspaces of a trainer process."""
NCCL_BYTES = 222 * 2**20
"""Buffers of one of NCCL's communicators, from its defaults: 4 MiB and those of two other protocols, 9.25 MiB together,
for each of about 24 channels. Not measured: a process has one for each group of the mesh that it is in."""
PROCESS_BYTES = 600 * 2**20
"""A Python process with torch and Transformers, on a CPU."""
PACKED_SHARE = 0.1
"""Largest share of the machine's memory of a model whose weights are packed."""
JUDGE_TOKENS = 4096
"""Assumed length of a judge's requests, if its model reads more."""
CPU_SHARE = 0.25
"""Share of the machine's memory that the embedded engine takes for its key-value cache on a CPU."""


@dataclass(frozen=True, slots=True)
class Component:
    """Memory that one part of a run needs on each of its GPUs, or of the machine on a CPU."""

    name: str
    processes: int
    parts: Mapping[str, int]
    """Bytes by purpose, of one process."""
    room_bytes: int | None
    """Memory that it may use; None if the GPU is not known."""
    elastic_bytes: int = 0
    """The share of the parts that shrinks to the room there is: of the key-value cache, all but one sequence."""
    notes: Sequence[str] = ()
    sent_bytes: int = 0
    """What a process of the trainer sends to the others, for the tokens of one row."""
    host_bytes: int = 0
    """Memory of the host that a process of the trainer on a GPU keeps."""

    @property
    def needed_bytes(self) -> int:
        return sum(self.parts.values())

    @property
    def share(self) -> float | None:
        least = self.needed_bytes - self.elastic_bytes
        return None if self.room_bytes is None else least / max(1, self.room_bytes)

    @property
    def verdict(self) -> Verdict | None:
        return None if self.share is None else verdict_of(self.share)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory of a run's components, and what it writes to disk."""

    components: Sequence[Component]
    gpu: Gpu | None
    device: Device
    disk: DiskForecast | None
    nodes: int = 1
    """Nodes of the trainer."""

    @property
    def share(self) -> float:
        """The largest share of what a component may use, on its GPU or of a host that is this machine."""
        shares = [component.share or 0.0 for component in self.components]
        return max([*shares, self.host_share or 0.0])

    @property
    def host_share(self) -> float | None:
        """Share of this machine's memory that the trainer keeps for its GPUs; None on the CPU, or for another one."""
        if self.gpu is None or not self.gpu.is_here or self.device == "cpu":
            return None
        of_node = sum(part.host_bytes * part.processes // self.nodes for part in self.components)
        return of_node / usable_memory_bytes()

    @property
    def verdict(self) -> Verdict | None:
        known = any(component.share is not None for component in self.components)
        return verdict_of(self.share) if known else None


def verdict_of(share: float) -> Verdict:
    if share > 1:
        return "does not fit"
    return "tight" if share >= TIGHT_SHARE else "fits"


def estimate_sft(
    config: SFTConfig, shape: ModelShape, processes: int, gpu: Gpu | None, device: Device, frozen: OtherShapes
) -> Estimate:
    """Estimate a run of SFT of a model of `shape` with `processes` trainer processes. `frozen`: see `estimate_rl`."""
    data = config.data
    row_tokens = _own_tokens(data.row_tokens, config.model, shape)
    sharing, _ = product_of(config.model, "cp", "tp")
    rows = max(1, data.batch_size // (data.micro_batch_size * max(1, processes // sharing)))
    training = Training(
        shape, config.model, config.optim.type, row_tokens, data.seq_len, processes, rows, device, is_rl=False
    )
    training = replace(training, is_rounded=is_rounded(config.optim))
    if _scores_answers(config):
        fused = config.model.model_copy(update={"fused_lm_head_chunk_size": "auto"})
        training = replace(training, model=fused, scores_answers=True)
    nodes = config.deployment.num_nodes if config.deployment.type == "multi_node" else 1
    room, engines = _room(gpu, device, processes // nodes), []
    if config.eval is not None and config.inference is not None:
        longest = config.inference.model.max_model_len or shape.context or data.seq_len
        in_flight = config.eval.max_concurrent or config.eval.rollouts_per_example
        limits = Limits(longest, math.ceil(in_flight / nodes), servers=nodes)
        engines = [_engine(config.inference, shape, gpu, device, limits)]
        engines += _frozen(frozen_judges(config.eval.judge, config.device), frozen, gpu, device)
        if device == "cpu" and room is not None:
            room -= sum(each.needed_bytes for each in engines) // (processes // nodes)
    beside = {}
    if config.distillation is not None:  # frozen, in the compute dtype
        size = frozen[config.distillation.teacher].parameters
        beside = {"teacher": size * training.compute_bytes // training.shards}
    beside |= _tower(training)
    trainer = _trainer([training], room, config.ckpt, beside)
    trainer = replace(trainer, notes=[*trainer.notes, *_reference_notes(config), *_vision_notes(config.model)])
    disk = forecast_disk(config, config.output_dir, _size(shape))
    return Estimate([trainer, *engines], gpu, device, disk, nodes)


def _scores_answers(config: SFTConfig) -> bool:
    from prime_rl.configs.dpo import DPOConfig

    return isinstance(config, DPOConfig)


def _own_tokens(row_tokens: int, model: ModelConfig, shape: ModelShape) -> int:
    """Tokens of a row that a process computes. If only some layers compute all of them, they are counted in all."""
    computes_all = ModelDescription(shape.config).computes_whole_rows(model.cp)
    return row_tokens if computes_all else -(-row_tokens // model.cp)


def _tower(training: Training) -> Parts:
    """The weights of the vision tower, and what it computes of a row of image tokens alone."""
    vision = training.model.vision
    if vision is None or training.shape.whole.get("model_type") not in VISION_FAMILIES:
        return {}  # a start check refuses others
    is_trained = vision.tower_lr is not None
    whole = training.model.model_copy(update={"quantization": None})
    own, size = replace(training, shape=training.shape.of_tower, model=whole), training.compute_bytes
    # All of it is gathered in each process while a row is computed.
    gathered = own.shape.parameters * size
    if is_trained:
        weights = own.weights + own.gradients + own.states + gathered
    else:
        frozen = own.master_bytes if own.model.lora is None else min(own.master_bytes, size)
        weights = own.shape.parameters * frozen // own.shards + gathered
    images = tower_activations(training.shape.whole, training.row_tokens, size, is_trained=is_trained)
    if not is_trained:  # it has ended when the language model begins, whose parts are larger or smaller
        peak = peak_memory(training)
        images = max(0, images - peak["activations"] - peak["logits"])
    return {"tower": weights, "images": images}


def _vision_notes(model: ModelConfig) -> list[str]:
    if model.vision is None:
        return []
    return ["images: as if all tokens of a row were those of images; with text among them, the tower needs less"]


def _reference_notes(config: SFTConfig) -> list[str]:
    """The cost of the reference of preferences. The starting model needs less memory for it than for training; another
    model may need more."""
    from prime_rl.configs.dpo import DPOConfig

    if not isinstance(config, DPOConfig) or not config.loss.needs_reference:
        return []
    other = config.reference.name
    model, loaded = ("the starting model", "")
    if other is not None:
        model, loaded = other, "; it is loaded before the trained model and freed, and its memory is not counted here"
    # Forward and backward take three times as long as forward alone.
    size = "16 bytes per row" if config.loss.is_unpaired else "8 bytes per pair"
    return [
        f"reference: one forward pass of {model} over the data before the first step, about a third of the time of an "
        f"epoch; then {size} in host memory and no second model{loaded}"
    ]


def estimate_rl(
    config: RLConfig,
    shapes: tuple[ModelShape, ModelShape],
    gpus: tuple[int, int],
    gpu: Gpu | None,
    device: Device,
    others: OtherShapes,
) -> Estimate:
    """Estimate a run of RL. `shapes` and `gpus` are those of trainer and engine; 0 shares the trainer's GPU. `others`
    are the models of the judges and of the teacher that the run starts, and of the critic.

    On several nodes these are the GPUs of the trainer on all nodes, and those of one server.
    """
    processes, infer = gpus
    train_nodes, servers = _nodes(config.deployment)
    trainer = config.trainer
    seq_len = trainer.model.seq_len
    of_rollouts = _row_tokens(config, shapes[0], device)
    longest_row = max([of_rollouts, *(data.row_tokens for data in trainer.datasets)])
    row_tokens = _own_tokens(longest_row, trainer.model, shapes[0])
    training = Training(
        shapes[0], trainer.model, trainer.optim.type, row_tokens, seq_len, processes, None, device, is_rl=True
    )
    is_beside_sampler = config.orchestrator.sampling.reported > 0
    training = replace(training, is_rounded=is_rounded(trainer.optim), is_beside_sampler=is_beside_sampler)
    trained = [training]
    if trainer.critic is not None:
        quantization = None if trainer.critic.lora is None else trainer.model.quantization
        model = trainer.model.model_copy(update={"lora": trainer.critic.lora, "quantization": quantization})
        shape, optim = others[CRITIC], trainer.critic.optim
        critic = replace(training, shape=shape, model=model, optimizer=optim.type, is_rounded=is_rounded(optim))
        trained.append(critic)
    room = _room(gpu, device, processes // train_nodes)
    of_frozen = list(_frozen(config.frozen_models, others, gpu, device))
    if device == "cpu" and room is not None:
        room -= sum(each.needed_bytes for each in of_frozen) // processes
    # The copy of the starting model for `loss.kl_coef`, in the compute dtype.
    copied = trainer.reference_source == "copy"
    of_copy = training.stored(shapes[0].parameters, shapes[0].blocks, training.compute_bytes) // training.shards
    reference = {"reference": of_copy} if copied else {}
    leaves_gpu = trainer.offload_while_sampling
    component = _trainer(trained, room, trainer.ckpt, reference | _tower(training), leaves_gpu=leaves_gpu)
    component = replace(component, notes=[*component.notes, *_vision_notes(trainer.model)])
    components = [component]
    if config.inference is not None:
        rollouts = config.orchestrator
        in_flight = rollouts.max_inflight_rollouts or rollouts.batch_size or 1
        if infer == 0:
            servers = processes  # one beside each
        limits = Limits(rollouts.seq_len, math.ceil(in_flight / max(1, servers)), max(1, servers))
        engine = _engine(config.inference, shapes[1], gpu, device, limits)
        is_shared = infer == 0 or (device == "cpu" and not servers)
        sharing = processes if device == "cpu" and infer else 1
        left = room - engine.needed_bytes // sharing if is_shared and room is not None else room
        if left is not None and room is not None and infer == 0 and device == "cuda" and rollouts.servers_sleep:
            kept = 0 if leaves_gpu else sum(map(resident_memory, trained)) + sum(reference.values())
            # Beside an awake engine is what the trainer keeps while it samples; its step is beside a sleeping one.
            left = min(room, left + component.needed_bytes - kept) - CUDA_BYTES
        components = [replace(component, room_bytes=left), engine]
    disk = forecast_disk(trainer, config.output_dir, _size(shapes[0]))
    return Estimate([*components, *of_frozen], gpu, device, disk, train_nodes)


def _row_tokens(config: RLConfig, shape: ModelShape, device: Device) -> int:
    """Tokens of a packed row. On a CPU rows hold more than one sequence, but not more than the batch."""
    seq_len, rollouts = config.trainer.model.seq_len, config.orchestrator.batch_size
    if device != "cpu":
        return seq_len
    capacity = cpu_row_tokens(seq_len, shape.hidden, shape.layers)
    return capacity if rollouts is None else min(capacity, rollouts * seq_len)


def _nodes(deployment: DeploymentConfig) -> tuple[int, int]:
    """Nodes of the trainer, and those of inference alone, with one server each. 0: both are on one node."""
    return (1, 0) if deployment.type == "single_node" else (deployment.num_train_nodes, deployment.num_infer_nodes)


def _trainer(
    trained: Sequence[Training],
    room: int | None,
    ckpt: CheckpointConfig | None,
    more: Mapping[str, int] | None = None,
    *,
    leaves_gpu: bool = False,
) -> Component:
    """The trainer of a model, and of its critic if there are two. It may leave the GPU while an engine samples."""
    training, *critic = trained
    on_cpu = training.device == "cpu"
    copied = sum(map(copied_state, trained)) if ckpt is not None and ckpt.async_save else 0
    groups = sum(getattr(training.model, axis) > 1 for axis in ("dp_replicate", "cp", "tp", "ep"))
    buffers = NCCL_BYTES * (1 + groups) if training.processes > 1 else 0
    own = {"copy": copied if on_cpu else 0, "reserve": PROCESS_BYTES if on_cpu else CUDA_BYTES + buffers}
    own[CRITIC] = sum(memory_beside(training, each) for each in critic)
    moved = 0 if on_cpu else sum(map(host_memory, trained)) + copied
    if leaves_gpu and not on_cpu:
        # The reference's copy, and the tower.
        moved += sum(size for name, size in (more or {}).items() if name != "images")
        moved += sum(each.weights + each.states - host_memory(each) for each in trained)
    notes = [f"host memory: {moved / 2**30:.1f} GiB for each process of the trainer"] if moved else []
    without = "" if on_cpu else ", without CUDA's own"
    loading = max(map(loading_memory, trained)) / 2**30
    notes.append(f"host memory while loading: {loading:.2f} GiB for each process of the trainer{without}")
    parts = {**peak_memory(training), **own, **(more or {})}
    sharing, _ = product_of(training.model, "cp", "tp")
    traffic = {axis: sharing * size for axis, size in traffic_of_row(training).items()}
    sent = sum(traffic.values())
    if sent:
        of_axes = ", ".join(f"{axis} {size / 2**30:.2f}" for axis, size in traffic.items())
        notes.append(f"sent by each process, for the tokens of one row: {sent / 2**30:.2f} GiB ({of_axes})")
    return Component("trainer", training.processes, parts, room, notes=notes, sent_bytes=sent, host_bytes=moved)


@dataclass(frozen=True, slots=True)
class Limits:
    """Sequences that a run sends to its engine."""

    seq_len: int
    """Longest sequence, in tokens."""
    in_flight: int
    """Sequences in flight, of all copies of the model in one server."""
    servers: int = 1
    """Number of servers, one for each node."""


def _engine(
    inference: InferenceConfig, shape: ModelShape, gpu: Gpu | None, device: Device, limits: Limits
) -> Component:
    is_vllm = inference.backend == "vllm" or (inference.backend == "auto" and device == "cuda" and _has_vllm(gpu))
    longest = inference.model.max_model_len or shape.context or limits.seq_len
    serving = Serving(
        shape,
        "vllm" if is_vllm else "embedded",
        _served_bytes(shape, inference, is_vllm, device),
        longest if is_vllm else min(longest, limits.seq_len),
        limits.in_flight,
        inference.parallel.tp,
        inference.parallel.dp,
        has_graphs=is_vllm and device == "cuda" and not inference.model.enforce_eager,
        ep=inference.parallel.tp * inference.parallel.dp if is_vllm and inference.enable_expert_parallel else 1,
        is_packed=device == "cpu" and not is_vllm and _is_packed(shape),
        cache_bytes=1 if str(inference.vllm.get("kv_cache_dtype")).startswith("fp8") else 0,
    )
    reserve = CUDA_BYTES if device == "cuda" else PROCESS_BYTES
    fixed = {"weights": serving.weights, "working": serving.working, "reserve": reserve}
    room = _room(gpu, device, 1)
    share = CPU_SHARE if device == "cpu" else inference.gpu_memory_utilization
    allowed = None if room is None else int(share * room)
    budget = None if allowed is None else allowed - (sum(fixed.values()) if device == "cuda" else 0)
    if budget is not None and device == "cuda" and not is_vllm:
        # It keeps room for old and new slots while they grow.
        budget //= 2
    cache = max(serving.one_sequence, serving.cache(budget))
    return Component(
        "engine",
        inference.parallel.tp * inference.parallel.dp * limits.servers,
        {**fixed, "cache": cache},
        allowed,
        cache - serving.one_sequence,
        [*_cache_notes(serving, cache), *_uncounted(inference)],
    )


def _uncounted(inference: InferenceConfig) -> Iterator[str]:
    """Options of vLLM that change its memory in ways that are not known here."""
    named = ("quantization", "speculative_config", "cpu_offload_gb", "kv_cache_memory_bytes", "max_num_batched_tokens")
    if found := [f"vllm.{name}" for name in named if name in inference.vllm]:
        yield f"not counted: {', '.join(found)}"


def _frozen(models: Sequence[FrozenModel], shapes: OtherShapes, gpu: Gpu | None, device: Device) -> Iterator[Component]:
    """The servers of judges and of the teacher. One that is placed on the CPU of a run on GPUs is only noted."""
    for model in models:
        shape, server = shapes[model.process], model.server
        where: Device = "cpu" if server.device == "cpu" else device
        context = server.model.max_model_len or shape.context or JUDGE_TOKENS
        longest = min(context, model.longest_tokens or JUDGE_TOKENS)
        engine = _engine(server, shape, gpu, where, Limits(longest, model.at_once))
        place = f"{model.gpus} GPU{'s' if model.gpus > 1 else ''} of its own"
        if where == "cpu":
            place = "the CPU"
            if device != "cpu":
                place += f", {engine.needed_bytes / 2**30:.1f} GiB of host memory"
                engine = replace(engine, parts={}, room_bytes=None, elastic_bytes=0)
        elif not model.gpus:
            place = "the inference server's GPUs"
        note = f"{model.title}: {server.model.name}, on {place}"
        yield replace(engine, name=model.title, notes=[note, *engine.notes])


def _has_vllm(gpu: Gpu | None) -> bool:
    """A machine elsewhere is assumed to have vLLM."""
    return gpu is None or not gpu.is_here or has_vllm()


def _is_packed(shape: ModelShape) -> bool:
    """By the rules of `inference/embedded/cpu`: of a fused family, and small for this machine."""
    is_fused = shape.config.get("model_type") in ("llama", "mistral", "qwen2", "qwen3")
    return is_fused and 4 * shape.parameters <= PACKED_SHARE * usable_memory_bytes()


def _cache_notes(serving: Serving, cache: int) -> list[str]:
    tokens = cache // max(1, serving.token_bytes)
    return [
        f"key-value cache: {tokens:,} tokens = {tokens // serving.max_len} x {serving.max_len:,}; "
        f"sequences in flight: {serving.sequences}"
    ]


def _served_bytes(shape: ModelShape, inference: InferenceConfig, is_vllm: bool, device: Device) -> int:
    if inference.model.dtype != "auto":
        return BYTES[inference.model.dtype]
    if device == "cpu":
        return 4
    own = str(shape.config.get("dtype") or shape.config.get("torch_dtype"))
    return BYTES.get(own, 2) if is_vllm else 2


def _room(gpu: Gpu | None, device: Device, processes: int) -> int | None:
    """Memory that one process may use. On a CPU all share the memory of the machine or the job."""
    if device == "cpu":
        return usable_memory_bytes() // processes
    return None if gpu is None else gpu.total_bytes


def _size(shape: ModelShape) -> ModelSize:
    own = str(shape.config.get("dtype") or shape.config.get("torch_dtype"))
    return ModelSize(shape.parameters, 4 if own == "float32" else 2)
