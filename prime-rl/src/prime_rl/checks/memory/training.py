"""Memory of one trainer process at the peak of a step: weights, gradients, optimizer, activations, loss, buffers.

Follows what the trainer does (`trainer/model`, `trainer/optim`, `trainer/kernels`): FSDP2 with the decoder blocks and
the root module as units, master weights in `optimization_dtype`, products in `compute_dtype`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Literal

from prime_rl.checks.disk import PackedShape
from prime_rl.checks.memory.shapes import ModelShape, Tensors, count
from prime_rl.checks.model_description import ModelDescription
from prime_rl.configs.model import (
    ALL_LINEAR,
    DEFAULT_VOCAB_CHUNK,
    ActivationCheckpointConfig,
    LoRAConfig,
    ModelConfig,
    QuantizationConfig,
    matches,
)
from prime_rl.configs.optim import LOW_BITS, PIECE_VALUES

# Activations: what a decoder block's forward pass keeps for its backward pass, per token. Counted from the operations
# that autograd records: Transformers' modules on a GPU, our own kernels on a CPU (`trainer/kernels`), which keep less.


_MLP_GRADIENTS, _LEAN_MLP_GRADIENTS = 2, 4
"""Gradients of the inner width that exist at the same time as what they are computed from."""


@dataclass(frozen=True, slots=True)
class Precision:
    """Settings that decide the size of saved tensors, besides the model."""

    compute_bytes: int
    is_lean: bool
    """Our kernels for CPUs replace norms and, if layers are whole, SwiGLU layers."""
    tp: int = 1
    """Number of processes that divide heads and inner features."""
    is_chunked: bool = False
    """MLPs are computed in chunks of a row, and again in the backward pass."""


@dataclass(frozen=True, slots=True)
class BlockActivations:
    """Bytes per token of one decoder block."""

    saved: int
    """Kept from the forward pass to the backward pass."""
    input: int
    """Kept if the block is recomputed."""
    temporary: int
    """Gradients inside the block, at the peak of its backward pass."""
    of_chunk: int = 0
    """The same per token of a chunk of the MLP, with what the chunk has computed again."""


def block_activations(
    shape: ModelShape, block: Tensors, precision: Precision, lora: LoRAConfig | None = None, place: str = ""
) -> BlockActivations:
    """Memory of one block per token of a row. `place` is the path of the block, which patterns of adapters match."""
    size, hidden = precision.compute_bytes, shape.hidden
    inner = _inner_width(shape, block) // precision.tp
    saved = _norms(shape, block, precision, lora) + _attention(shape, size) // precision.tp
    of_mlp = _mlp(shape, block, precision, lora)
    if lora is not None:
        for path in (path for path in linear_paths(block) if is_target(lora, place + path)):
            # DoRA keeps the output before it is stretched.
            of_layer = size * (lora.rank_of(place + path) + (block[f"{path}.weight"][0] if lora.use_dora else 0))
            of_mlp, saved = (of_mlp + of_layer, saved) if _is_of_mlp(path) else (of_mlp, saved + of_layer)
    gradients = _LEAN_MLP_GRADIENTS if _has_lean_mlp(shape, block, precision, lora) else _MLP_GRADIENTS
    if precision.is_chunked:
        # The gradients of the MLP's output, and of the chunks of its input.
        return BlockActivations(saved, size * hidden, 2 * size * hidden, of_mlp + size * gradients * inner)
    return BlockActivations(saved + of_mlp, size * hidden, size * (gradients * inner + hidden))


def _is_of_mlp(name: str) -> bool:
    return name.startswith(("mlp.", "feed_forward."))


_EMBEDDING = re.compile(r"embed|wte|wpe")


def linear_paths(block: Tensors) -> list[str]:
    """Paths of the linear layers of a block, without experts, and of those that are in none."""
    names = [name for name, shape in block.items() if len(shape) == 2 and not _EMBEDDING.search(name)]
    return [name.removesuffix(".weight") for name in names]


def is_target(lora: LoRAConfig, path: str) -> bool:
    """Whether a module gets an adapter, by the rules of `trainer/model/lora.py`."""

    def is_named(pattern: str) -> bool:
        if pattern == ALL_LINEAR:
            return not path.endswith("experts") and path != "lm_head"
        return matches(pattern, path)

    return any(map(is_named, lora.target_modules)) and not any(map(is_named, lora.modules_to_save))


def _norms(shape: ModelShape, block: Tensors, precision: Precision, lora: LoRAConfig | None) -> int:
    """RMSNorm keeps a float32 copy, the normalized values, and its output where a matrix product reads it."""
    size = precision.compute_bytes
    inside = size if has_lean_norms(shape, precision) else _FLOAT32 + (size if lora is None else 0)
    if str(shape.config.get("model_type")).startswith("gemma"):
        inside = 2 * _FLOAT32  # its norms round after they are weighted
    widths = [width for _, width in _norm_widths(shape, block, precision.tp)]
    # Two feed attention and the dense layer; those after them, which some families have too, feed a sum.
    feeding = min(2, widths.count(shape.hidden))
    return sum(widths) * inside + feeding * shape.hidden * size


def has_lean_norms(shape: ModelShape, precision: Precision) -> bool:
    """Whether `use_lean_norms` replaces the norms: Gemma adds 1 to their weights, the others have no RMSNorm."""
    kind = str(shape.config.get("model_type"))
    return precision.is_lean and not kind.startswith("gemma") and kind not in ("olmo", "starcoder2")


def _has_lean_mlp(shape: ModelShape, block: Tensors, precision: Precision, lora: LoRAConfig | None) -> bool:
    """Whether `use_lean_mlps` replaces the dense layer: SwiGLU without adapters and dropout."""
    kind = str(shape.config.get("model_type"))
    activation = shape.config.get("hidden_activation") or shape.config.get("hidden_act") or "silu"
    is_swiglu = activation == "silu" and not kind.startswith("gemma") and kind != "seed_oss"
    return precision.is_lean and precision.tp == 1 and lora is None and is_swiglu and "mlp.gate_proj.weight" in block


def _norm_widths(shape: ModelShape, block: Tensors, tp: int) -> list[tuple[str, int]]:
    widths = []
    for name, size in block.items():
        if len(size) == 1 and "norm" in name and name.endswith("weight"):
            is_head = "q_norm" in name or "k_norm" in name
            heads = (shape.heads if "q_norm" in name else shape.kv_heads) // tp
            widths.append((name, size[0] * heads if is_head and size[0] == shape.key_dim else size[0]))
    return widths


def _attention(shape: ModelShape, size: int) -> int:
    """Rotated queries and keys, values, the output, and a float32 log-sum-exp for each head."""
    queries, keys = shape.heads * shape.key_dim, shape.kv_heads * shape.key_dim
    values, output = shape.kv_heads * shape.value_dim, shape.heads * shape.value_dim
    return size * (queries + keys + values + output) + _FLOAT32 * shape.heads


def _mlp(shape: ModelShape, block: Tensors, precision: Precision, lora: LoRAConfig | None) -> int:
    """Gate, its activation, up, and their product; lean layers recompute two of the four."""
    kept_of_gated = 2 if _has_lean_mlp(shape, block, precision, lora) else 4
    kept = sum(width * (kept_of_gated if is_gated else 2) for width, is_gated in _mlps(shape, block))
    # A token visits its experts as copies, whose outputs are kept for the gradient of the router.
    is_sparse = any(len(size) == 3 for size in block.values())
    copies = 2 * shape.hidden * experts_per_token(shape) if is_sparse else 0
    return precision.compute_bytes * (kept + copies) // precision.tp


_ATTENTION = re.compile(r"attn|attention")


def _mlps(shape: ModelShape, block: Tensors) -> Iterator[tuple[int, bool]]:
    """Width that a token passes inside of each MLP, stacked experts as one, and whether it has a gate.

    Families name them differently. All have matrices of one width into them, one or with a gate two, which may be
    stored as one, and one out of them. Fused queries, keys and values may look alike.
    """
    layers: dict[tuple[str, int], list[int]] = {}
    for name, size in block.items():
        layer = name.removesuffix(".weight").rpartition(".")[0]
        if len(size) in (2, 3) and shape.hidden in size[-2:] and not _ATTENTION.search(layer):
            # GPT-2 and some experts store their matrices transposed.
            other = size[-1] if size[-2] == shape.hidden else size[-2]
            layers.setdefault((layer, len(size)), []).append(other)
    for (_, axes), widths in layers.items():
        matrices = sum(widths) / min(widths)
        if len(widths) > 1 and matrices in (2, 3):
            yield min(widths) * (experts_per_token(shape) if axes == 3 else 1), matrices == 3


def _inner_width(shape: ModelShape, block: Tensors) -> int:
    return sum(width for width, _ in _mlps(shape, block))


def experts_per_token(shape: ModelShape) -> int:
    return ModelDescription(shape.config).experts_per_token


# Head and loss: logits, a few at a time, and what their gradients need.


_LOGITS = 2**25
"""`ChunkSizes.logits` of `trainer/kernels/heads.py`, and `MAX_LOGITS` of `trainer/model/scoring.py`."""
_VOCAB_PART = 2048
"""`ChunkSizes.vocab_chunk`."""
_FLOAT_LOGITS = 2**22
_CACHED_FLOAT_LOGITS = 2**20
_PLAIN_FLOATS = 3
"""Float32 tensors of the model's own head that exist at the same time: log-softmax, its exponentials, a product."""
_FLOATS_BESIDE_SAMPLER = 5
"""The same beside a sampler: logits, log-probabilities, and three of the entropy."""
_FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class LossMemory:
    """Bytes for one row."""

    forward: int
    """At the peak of the loss's forward pass."""
    kept: int
    """From there through the backward pass of the last block: gradients of the head, and hidden states beside them."""


def sft_loss(
    shape: ModelShape, model: ModelConfig, tokens: int, size: int, on_cpu: bool, trains_head: bool
) -> LossMemory:
    """Cross-entropy with `linear_cross_entropy_sum`, which computes gradients together with the loss."""
    vocab, hidden = shape.vocab, shape.hidden
    if not _has_plain_head(shape, model):
        return _plain_head(vocab, hidden, tokens, size)
    rows = max(1, _LOGITS // vocab, hidden if trains_head else 0)
    chunk = min(rows, tokens) * vocab * size
    most_floats = _CACHED_FLOAT_LOGITS if on_cpu else _FLOAT_LOGITS
    part = max(1, most_floats // vocab)
    # The next part is computed before the last one is freed. Float32 logits need no copy.
    copied = min(part, rows, tokens) + min(part, max(0, min(rows, tokens) - part)) if size < _FLOAT32 else 0
    floats = _FLOAT32 * vocab * copied
    states = tokens * hidden * size
    head = vocab * hidden
    if not trains_head:
        return LossMemory(3 * states + chunk + floats, 0)
    if tokens > rows:
        # Parts of the weight's gradient are added to a float32 sum; those of float32 are computed into it.
        of_part = min(_VOCAB_PART, vocab) * hidden * size if size < _FLOAT32 else 0
        return LossMemory(3 * states + _FLOAT32 * head + chunk + max(floats, of_part), states + size * head)
    if on_cpu and model.optimization_dtype == "float32":
        return LossMemory(3 * states + chunk + floats, 2 * states)
    return LossMemory(3 * states + chunk + max(floats, size * head), states + size * head)


def rl_loss(
    shape: ModelShape, model: ModelConfig, tokens: int, size: int, trains_head: bool, is_beside_sampler: bool
) -> LossMemory:
    """Log-probabilities with `fused_logprobs`, or with the model's own head, as always beside a sampler."""
    chunk = model.fused_lm_head_chunk_size
    if is_beside_sampler:
        return _plain_head(shape.vocab, shape.hidden, tokens, size, _FLOATS_BESIDE_SAMPLER)
    if chunk == "disabled" or not _has_plain_head(shape, model):
        return _plain_head(shape.vocab, shape.hidden, tokens, size)
    width = min(shape.vocab, DEFAULT_VOCAB_CHUNK if chunk == "auto" else chunk)
    next_width = min(width, shape.vocab - width)
    rounded = size if size < _FLOAT32 else 0
    # Both passes keep tensors of the last slice until those of the next one replace them.
    forward = _FLOAT32 * tokens * max(3 * width, 2 * width + 2 * next_width)
    one, following = 3 * _FLOAT32 + rounded, (_FLOAT32 + rounded) * width + 2 * _FLOAT32 * next_width
    of_weight = size * shape.vocab * shape.hidden if trains_head else 0
    backward = of_weight + _FLOAT32 * tokens * shape.hidden + tokens * max(one * width, following)
    states = tokens * shape.hidden * size
    return LossMemory(states + max(forward, backward), states + of_weight)


def _plain_head(vocab: int, hidden: int, tokens: int, size: int, floats: int = _PLAIN_FLOATS) -> LossMemory:
    chunk = min(tokens, max(1, _LOGITS // vocab)) * vocab
    states = tokens * hidden * size
    return LossMemory(2 * states + chunk * floats * _FLOAT32, states + size * vocab * hidden)


def _has_plain_head(shape: ModelShape, model: ModelConfig) -> bool:
    """Whether logits are hidden states times the head's weight, without bias, scale, cap or adapter."""
    if model.lora is not None and is_target(model.lora, "lm_head"):
        return False
    changes = ("final_logit_softcapping", "logit_scale", "logits_scaling")
    has_bias = any(name.endswith("lm_head.bias") for name in shape.root)
    return not has_bias and not any(shape.config.get(key) not in (None, 1, 1.0) for key in changes)


Device = Literal["cuda", "cpu"]
Parts = dict[str, int]
"""Bytes by purpose."""

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = {"adamw": 2, "adamw8bit": 2, "adamw4bit": 2, "adafactor": 0, "muon": 2, "sgd": 1}
"""Values that an optimizer keeps for each parameter, at most."""
_OFFLOAD_SLICE_BYTES = 2**30
_LIBRARIES_BYTES = 510 * 2**20
"""Host memory of a process with torch and Transformers before it loads a model."""
_PIECE_BYTES = 64 * 2**20
_KEPT_WHOLE_BYTES = 2**30
"""RL accumulates unsharded gradients up to this size."""
BLOCK_QUERIES, BLOCK_SCORES = 128, 2**24
"""Limits of a block of one sequence, as in `trainer/model/layouts.py`."""
_BLOCK_RESULTS = 3
"""Probabilities, their gradients and those of the scores."""
_INFLIGHT_BLOCKS = 2
"""Gathered blocks: the one that runs, and the next one. A single shard is copied when its block runs."""


@dataclass(frozen=True)
class Training:
    """Share of the work of one process of a trainer."""

    shape: ModelShape
    model: ModelConfig
    optimizer: str
    row_tokens: int
    """Tokens of a packed row, which is one micro-batch, that this process computes."""
    seq_len: int
    processes: int
    rows: int | None
    """Micro-batches that a process accumulates in a step; None if that depends on the data."""
    device: Device
    is_rl: bool
    scores_answers: bool = False
    """The loss is of log-probabilities of answers, as in RL."""
    is_rounded: bool = False
    """The optimizer updates weights in bfloat16 by `stochastic_rounding`."""
    is_beside_sampler: bool = False
    """The engine reports its likeliest tokens, as with `sampling.top_k`: the head computes whole logits for them."""

    @property
    def shards(self) -> int:
        return max(1, self.processes // self.model.dp_replicate)

    @property
    def compute_bytes(self) -> int:
        return self.precision.compute_bytes

    @property
    def master_bytes(self) -> int:
        return BYTES[self.model.optimization_dtype]

    @property
    def reduce_bytes(self) -> int:
        return BYTES[self.model.reduce_dtype]

    @property
    def keeps_gathered(self) -> bool:
        """A single process on a CPU gathers once per step, and adds gradients in place."""
        return self.device == "cpu" and self.processes == 1

    @cached_property
    def trained(self) -> int:
        """Parameters with a gradient."""
        lora = self.model.lora
        if lora is None:
            return self.shape.parameters
        return self.saved + sum(self.adapter_parameters)

    @cached_property
    def saved(self) -> int:
        """Parameters that are trained in full beside adapters."""
        lora, named = self.model.lora, self.shape.tensors.items()
        return 0 if lora is None else sum(prod(shape) for name, shape in named if _is_saved(lora, name))

    @property
    def adapter_parameters(self) -> list[int]:
        """Parameters of the adapters of each block, and last, of the layers that are in none."""
        lora, shape = self.model.lora, self.shape
        placed = zip([*shape.blocks, shape.root], [*shape.places, ""], strict=True)
        return [] if lora is None else [adapter_parameters(block, lora, place) for block, place in placed]

    @property
    def weights(self) -> int:
        """This process's shard of the weights, in bytes. Frozen weights are stored in the compute dtype."""
        if self.model.lora is None:
            return self.shape.parameters * self.master_bytes // self.shards
        size = min(self.master_bytes, self.compute_bytes)
        frozen = self.stored(self.shape.parameters - self.saved, self.shape.blocks, size)
        # PiSSA also keeps where its adapters started.
        frozen += (self.model.lora.ranks_per_export - 1) * sum(self.adapter_parameters) * size
        return (frozen + self.trained * self.master_bytes) // self.shards

    def stored(self, parameters: int, blocks: Iterable[Tensors], size: int) -> int:
        """Bytes of `parameters` of `size` each, of which those of the linear layers of `blocks` may be quantized."""
        blocks = list(blocks)
        packed = sum(self._quantized(block) for block in blocks)
        if self.quantization is None or not packed:
            return parameters * size
        if self.quantization.type == "int8":
            rows = sum(block[name][0] for block in blocks for name in self.quantized_names(block))
            return (parameters - packed) * size + packed + _FLOAT32 * rows
        # Four bits for each value, and for each 64 values a scale of one byte or of four.
        return (parameters - packed) * size + packed // 2 + packed // 64 * (1 if self.quantization.double else 4)

    @property
    def quantization(self) -> QuantizationConfig | None:
        """How weights are stored in 4 bits: as they come, or as the config says."""
        return self.shape.packed or self.model.quantization

    def _quantized(self, block: Tensors) -> int:
        return sum(prod(block[name]) for name in self.quantized_names(block))

    def quantized_names(self, block: Tensors) -> list[str]:
        """Names of the weights of a block that are stored in 4 bits, by the rules of `trainer/model/quantized.py`."""
        lora = self.model.lora
        if self.quantization is None or any(len(shape) == 3 for shape in block.values()):
            return []  # mixtures of experts are refused
        names = [name for name in block if name.endswith(".weight") and len(block[name]) == 2]
        if self.shape.tells_packed:
            names = [name for name in names if isinstance(block[name], PackedShape)]
        return [name for name in names if block[name][1] % 64 == 0 and (lora is None or not _is_saved(lora, name))]

    @property
    def gradients(self) -> int:
        return self.trained * self.master_bytes // self.shards

    @property
    def states(self) -> int:
        if self.optimizer in LOW_BITS:
            # Of adapters, at most as much as with 32 bits.
            shapes = self.shape.tensors.values() if self.model.lora is None else [(self.trained,)]
            return sum(quantized_bytes(self.optimizer, shape) for shape in shapes) // self.shards
        if self.optimizer == "adafactor":
            return _FLOAT32 * self._rows_and_columns // self.shards
        each = _FLOAT32 if self.is_rounded else self.master_bytes
        return self.trained * each * STATES[self.optimizer] // self.shards

    @property
    def _rows_and_columns(self) -> int:
        """Means that Adafactor keeps: one for each row and each column of a matrix, all values of a vector."""
        if self.model.lora is not None:
            # A has one for each input, and B one for each output.
            adapters = sum(self.adapter_parameters)
            return adapters // self.model.lora.rank + self.trained - adapters
        shapes = self.shape.tensors.values()
        return sum(prod(of[:-2]) * sum(of[-2:]) if len(of) > 1 else prod(of) for of in shapes)

    @cached_property
    def loss(self) -> LossMemory:
        lora = self.model.lora
        # With a tied head, its weight is the embedding's.
        trains_head = lora is None or any(_is_saved(lora, name) for name in self.shape.root if "norm" not in name)
        tokens = -(-self.row_tokens // self.model.tp)
        if self.is_rl or self.scores_answers:
            return rl_loss(self.shape, self.model, tokens, self.compute_bytes, trains_head, self.is_beside_sampler)
        return sft_loss(self.shape, self.model, tokens, self.compute_bytes, self.device == "cpu", trains_head)

    @property
    def precision(self) -> Precision:
        return precision_of(self.model, self.device)

    @cached_property
    def blocks(self) -> list[BlockActivations]:
        return activations_of(self.shape, self.model, self.device)


def precision_of(model: ModelConfig, device: Device) -> Precision:
    dtype = model.compute_dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return Precision(
        BYTES[dtype], device == "cpu" and model.compile is None, model.tp, model.mlp_chunk_tokens is not None
    )


def activations_of(shape: ModelShape, model: ModelConfig, device: Device) -> list[BlockActivations]:
    """What each decoder block keeps."""
    placed, precision = zip(shape.blocks, shape.places, strict=True), precision_of(model, device)
    return [block_activations(shape, block, precision, model.lora, place) for block, place in placed]


def recomputed_blocks(blocks: Sequence[BlockActivations], ac: ActivationCheckpointConfig | None, tokens: int) -> range:
    """The blocks that a row of `tokens` recomputes.

    Of a budget, the first ones: the backward pass has freed what the others keep before it recomputes one.
    """
    if ac is None or ac.memory_gib is None:
        return range(0) if ac is None else range(0, len(blocks), ac.freq)
    room, first = ac.memory_gib * 2**30, 0
    kept = sum(block.saved for block in blocks) * tokens
    while kept > room and first < len(blocks):
        kept -= (blocks[first].saved - blocks[first].input) * tokens
        first += 1
    return range(first)


def peak_memory(training: Training) -> Parts:
    """The parts of a process's memory at the moment of the step when their sum is largest."""
    phases = (_at_loss(training), _in_backward(training), _at_end(training), _in_update(training))
    return max(phases, key=lambda parts: sum(parts.values()))


def memory_beside(training: Training, other: Training) -> int:
    """The bytes that `other` adds to the peak of `training`. One process trains the two models in turn, so these are
    the parts that `other` keeps all the time, and those by which its step is larger."""
    kept = {"weights", "optimizer"} | ({"gradients"} if training.keeps_gathered else set())
    ours, theirs = peak_memory(training), peak_memory(other)
    own, needed = (sum(size for key, size in parts.items() if key not in kept) for parts in (ours, theirs))
    return sum(theirs[key] for key in kept) + max(0, needed - own)


def resident_memory(training: Training) -> int:
    """What a process keeps on its GPU between two steps."""
    parts = _persistent(training)
    return parts["weights"] + parts["optimizer"]


def host_memory(training: Training) -> int:
    """Host memory of a process on a GPU."""
    if training.device != "cuda":
        return 0
    if training.model.fsdp_cpu_offload:
        return training.weights + training.gradients + training.states
    return training.states if training.model.optim_cpu_offload else 0


def loading_memory(training: Training) -> int:
    """Peak of a process's host memory while it loads the model: libraries, its shards if they are on the host, and the
    largest piece of a file, as read and in float32 (`transport/loading.py`). CUDA's own memory is not included.

    Of a random model, rank 0 draws the largest block instead.
    """
    on_host = training.device == "cpu" or training.model.fsdp_cpu_offload
    shards = training.weights if on_host else 0
    if training.model.debug.random_init:
        drawn = max(map(count, [training.shape.root, *training.shape.blocks])) if training.device == "cpu" else 0
        return _LIBRARIES_BYTES + shards + drawn * training.master_bytes
    largest = _FLOAT32 * max(map(prod, training.shape.tensors.values())) // training.shards
    return _LIBRARIES_BYTES + shards + 3 * min(largest, _PIECE_BYTES) // 2


def copied_state(training: Training) -> int:
    """Host memory for the copy of `ckpt.async_save`, which is kept for the next copy."""
    # Trained weights, which are as large as their gradients, and optimizer states.
    return training.gradients + training.states


def _persistent(training: Training) -> Parts:
    on_gpu = training.device == "cuda"
    if training.model.fsdp_cpu_offload and on_gpu:
        return {"weights": 0, "gradients": 0, "optimizer": 0}
    states = 0 if training.model.optim_cpu_offload and on_gpu else training.states
    # On a CPU, a single process allocates its gradients once.
    is_accumulating = training.keeps_gathered or training.rows is None or training.rows > 1
    gradients = training.gradients if is_accumulating else 0
    whole = training.trained * training.reduce_bytes
    if training.is_rl and training.processes > 1 and is_accumulating and whole <= _KEPT_WHOLE_BYTES:
        gradients += whole
    return {"weights": training.weights, "gradients": gradients, "optimizer": states}


def _gathered(training: Training) -> int:
    """Gathered weights that exist during all of forward and backward."""
    kept = training.shape.parameters if training.keeps_gathered else count(training.shape.root)
    blocks = training.shape.blocks if training.keeps_gathered else []
    if not (training.keeps_gathered or training.model.reshard_after_forward):
        blocks = training.shape.blocks
        kept += sum(_of_one_process(block, training.model) for block in blocks)
    return training.stored(kept, blocks, training.compute_bytes)


def _activations(training: Training) -> tuple[int, int]:
    """Bytes kept at the end of the forward pass, and the most that recomputing a block adds to them."""
    ac, tokens = training.model.ac, training.row_tokens
    kept, recomputed, inputs = 0, 0, 0
    again = recomputed_blocks(training.blocks, ac, tokens)
    for index, block in enumerate(training.blocks):
        if index in again:
            inputs += block.input * tokens
            recomputed = max(recomputed, block.saved * tokens)
        else:
            kept += block.saved * tokens
    if training.model.ac_offloading is not None and training.device == "cuda":
        largest = max(block.input for block in training.blocks) * tokens
        inputs = min(inputs, training.model.ac_offloading.max_inflight_activations * largest)
        kept = min(kept, training.model.ac_offloading.max_inflight_activations * largest)
    if again and training.shape.layers - 1 not in again:
        recomputed = max(0, recomputed - training.blocks[-1].saved * tokens)  # freed by then, at least
    return kept + inputs + _final_norm(training) * tokens + _rotary(training) * tokens, recomputed


def _final_norm(training: Training) -> int:
    is_lean = has_lean_norms(training.shape, training.precision)
    inside = training.compute_bytes if is_lean else 4 + training.compute_bytes
    return training.shape.hidden * (inside + (training.compute_bytes if is_lean else 0))


def _rotary(training: Training) -> int:
    """Cosines and sines, and the ids and positions."""
    return 2 * training.compute_bytes * training.shape.key_dim + 2 * 8


def _at_loss(training: Training) -> Parts:
    activations, _ = _activations(training)
    return {
        **_persistent(training),
        "activations": activations,
        "logits": training.loss.forward,
        "buffers": _gathered(training),
    }


def _in_backward(training: Training) -> Parts:
    """In the last block, where the backward pass begins, or later, while that block's gradients are summed.

    By then its activations are freed.
    """
    activations, recomputed = _activations(training)
    activations -= _final_norm(training) * training.row_tokens  # whose backward pass is over
    chunk = min(training.row_tokens, training.model.mlp_chunk_tokens or 0)
    temporary = max(block.temporary * training.row_tokens + block.of_chunk * chunk for block in training.blocks)
    temporary += _summed_over_chunks(training)
    temporary += max(0, _dequantized(training) - _inner_gradient(training))
    temporary = max(temporary, _attention_temporaries(training)) + recomputed
    gathered = later = 0
    if not training.keeps_gathered:
        largest = max(training.shape.blocks, key=count)
        lora, size = training.model.lora, training.compute_bytes
        own = _of_one_process(largest, training.model)
        trained = own if lora is None else max(training.adapter_parameters[:-1])
        # While a block computes, one of its matrices has a gradient that is not freed yet; at its end, all have.
        matrix = max(_of_one_process({name: of}, training.model) for name, of in largest.items())
        computing = temporary + size * (matrix if lora is None else 0)
        again = recomputed_blocks(training.blocks, training.model.ac, training.row_tokens)
        freed = 0 if len(training.blocks) - 1 in again else training.blocks[-1].saved * training.row_tokens
        summed = training.reduce_bytes * trained
        later = max(size * trained, computing if training.shape.layers > 1 else 0) + summed - freed
        inflight = _INFLIGHT_BLOCKS if training.shards > 1 else 1
        temporary, gathered = computing, training.stored(own, [largest], size) * inflight
    return {
        **_persistent(training),
        "activations": activations + max(temporary, later),
        "logits": training.loss.kept,
        "buffers": _gathered(training) + gathered,
    }


def _summed_over_chunks(training: Training) -> int:
    """The gradients of an MLP's matrices, which are summed before they leave autograd, and those of the next chunk."""
    chunk, kept, lora = training.model.mlp_chunk_tokens, training.precision, training.model.lora
    if chunk is None or lora is not None or training.row_tokens <= chunk:
        return 0
    of_blocks = [{name: of for name, of in block.items() if _is_of_mlp(name)} for block in training.shape.blocks]
    mlp, block = max(zip(of_blocks, training.shape.blocks, strict=True), key=lambda pair: count(pair[0]))
    own = _of_one_process(mlp, training.model)
    # A lean MLP computes all of a chunk's together; of others, one is counted where matrices are.
    new = own if _has_lean_mlp(training.shape, block, kept, lora) else 0
    return training.compute_bytes * (own + new)


def _inner_gradient(training: Training) -> int:
    """One of the two gradients inside of an MLP, which comes after its last matrix has been dequantized."""
    tokens = min(training.row_tokens, training.model.mlp_chunk_tokens or training.row_tokens)
    inner = max(_inner_width(training.shape, block) for block in training.shape.blocks)
    return training.compute_bytes * inner // training.model.tp * tokens


def _dequantized(training: Training) -> int:
    """The largest quantized matrix, in the compute dtype while a product is computed with it."""
    named = ((block, name) for block in training.shape.blocks for name in training.quantized_names(block))
    return training.compute_bytes * max((prod(block[name]) for block, name in named), default=0)


def _of_one_process(block: Tensors, model: ModelConfig) -> int:
    """Parameters of a gathered block in one of the processes that divide its matrices and its stack of experts."""
    sizes = {2: model.tp, 3: max(model.tp, model.ep)}
    return sum(prod(shape) // sizes.get(len(shape), 1) for shape in block.values())


def _attention_temporaries(training: Training) -> int:
    """A float32 gradient; on a CPU the gradients of queries, keys and values, and what a block of queries computes.

    See `trainer/model/layouts.py`. The estimate is of a row that is one sequence: shorter ones need less.
    """
    shape, size, tp = training.shape, training.compute_bytes, training.model.tp
    # Of a model with fewer heads than processes, which is refused once its config is here.
    heads, kv_heads, length = max(1, shape.heads // tp), max(1, shape.kv_heads // tp), training.seq_len
    if training.device == "cuda":
        return heads * training.row_tokens * (4 * shape.key_dim + 4)
    queries = min(length, BLOCK_QUERIES, max(1, BLOCK_SCORES // (heads * length)))
    scores = heads * queries * length * size // training.model.cp
    outputs = heads * training.row_tokens * size * (shape.value_dim + shape.key_dim)
    keys_and_values = kv_heads * training.row_tokens * 4 * (shape.key_dim + shape.value_dim)
    return _BLOCK_RESULTS * scores + outputs + keys_and_values


def _at_end(training: Training) -> Parts:
    """When the root's gradients are summed: those of embedding and head, which are whole until then."""
    parts = _persistent(training)
    if training.keeps_gathered:
        return {**parts, "activations": 0, "logits": 0, "buffers": _gathered(training)}
    root = count(training.shape.root) if training.model.lora is None else 0
    reduced = root * training.reduce_bytes
    accumulated = reduced // training.shards if parts["gradients"] else 0
    if not training.model.fsdp_cpu_offload or training.device == "cpu":
        parts["gradients"] = max(parts["gradients"], training.gradients)
    summing = reduced + max(accumulated, root * training.compute_bytes)
    return {**parts, "activations": 0, "logits": 0, "buffers": max(summing, 2 * root * training.compute_bytes)}


def _in_update(training: Training) -> Parts:
    """When gradients are clipped and applied."""
    parts = _persistent(training)
    if training.model.fsdp_cpu_offload and training.device == "cuda":
        return {**parts, "activations": 0, "logits": 0, "buffers": 0}
    parts["gradients"] = max(parts["gradients"], training.gradients)
    buffers = training.gradients if training.optimizer == "sgd" else 0
    if training.optimizer == "muon":
        buffers += 5 * 2 * max(prod(shape) for block in training.shape.blocks for shape in block.values())
    if training.model.lora is None:
        # Parameters are updated one by one: with rounding, value and gradient are in float32, then value and noise.
        update = _FLOAT32 if training.optimizer == "adafactor" else 0
        inside = 2 * _FLOAT32 + max(update, 2) if training.is_rounded else update
        largest = max(map(prod, training.shape.tensors.values())) // training.shards
        buffers += inside * largest
        if training.optimizer == "adamw4bit":
            buffers += _UNPACKED_BYTES * min(largest, PIECE_VALUES)
    if training.model.optim_cpu_offload and training.device == "cuda":
        largest = max(map(prod, training.shape.tensors.values())) * training.master_bytes // training.shards
        piece = min(max(_OFFLOAD_SLICE_BYTES, largest), training.gradients)
        parts["optimizer"] = piece * STATES[training.optimizer]
    return {**parts, "activations": 0, "logits": 0, "buffers": buffers}


_UNPACKED_BYTES = 28
"""Temporaries of 4-bit AdamW for each value that it unpacks."""


def quantized_bytes(optimizer: str, shape: Sequence[int]) -> int:
    """Bytes of both moments of a parameter in AdamW of 8 or 4 bits, and of their scales."""
    low = LOW_BITS[optimizer]
    columns = low.columns(shape)
    if columns is None:
        return 2 * _FLOAT32 * prod(shape)
    return int(prod(shape[:-1]) * columns * low.state_bytes)


def adapter_parameters(block: Tensors, lora: LoRAConfig, place: str) -> int:
    """Parameters of the adapters of the block at `place`."""
    total = 0
    for path in (path for path in linear_paths(block) if is_target(lora, place + path)):
        shape = block[f"{path}.weight"]
        total += lora.rank_of(place + path) * sum(shape) + (shape[0] if lora.use_dora else 0)
    for name, shape in block.items():
        path, _, last = name.partition(".experts.")
        if len(shape) != 3 or not is_target(lora, f"{place}{path}.experts"):
            continue
        copies, out, width = shape
        # Gate and up have an adapter each, also where their weights are stacked.
        total += copies * lora.rank * (out + width * (2 if "gate_up" in last else 1))
    return total


def _is_saved(lora: LoRAConfig, name: str) -> bool:
    only_saved = LoRAConfig.model_construct(target_modules=lora.modules_to_save, modules_to_save=[])
    return is_target(only_saved, name.rpartition(".")[0])


# The vision tower, for a row of image tokens alone: rows with text need less.


@dataclass(frozen=True, slots=True)
class _Tower:
    """Memory of a family's tower, in values of the compute dtype: of each patch, `hidden` and `inner` times its
    widths. Fitted to what PyTorch's allocator gives out (`tests/trainer/test_memory_estimate.py`)."""

    layer: tuple[float, float]
    """Kept of each layer for its gradient, besides a value for each head."""
    joined: float
    """Kept of what joins the tower to the language model, in hidden widths."""
    attention: float
    """At the peak of a frozen tower, in hidden widths, while a layer attends."""
    mlp: tuple[float, float]
    """The same, in its dense layer."""
    defaults: Mapping[str, int]
    """What Transformers takes for keys that a checkpoint leaves out."""


_SIGLIP = {"num_hidden_layers": 12, "intermediate_size": 3072, "image_size": 224}
_TILES = _Tower((8, 2), 4, 8, (4, 2), {**_SIGLIP, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32})
_TOWERS: Mapping[str, _Tower] = {
    "gemma3": _Tower(
        (8, 2), 6.5, 8, (4, 2), {**_SIGLIP, "hidden_size": 768, "num_attention_heads": 12, "patch_size": 16}
    ),
    "idefics3": _TILES,
    "smolvlm": _TILES,
    "qwen2_5_vl": _Tower(
        (13, 4), 6, 10.5, (3.5, 3), {"depth": 32, "hidden_size": 3584, "intermediate_size": 3420, "num_heads": 16}
    ),
    "qwen3_vl": _Tower(
        (11, 2), 11.5, 12, (5.5, 2), {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
    ),
}


def tower_activations(config: Mapping[str, Any], image_tokens: int, size: int, *, is_trained: bool) -> int:
    """Bytes of the activations of a checkpoint's vision tower for images of so many tokens, in values of `size` bytes.

    Those of a trained tower are kept until its gradient. A frozen one frees each layer's, before the language model
    runs.
    """
    family = _TOWERS[config["model_type"]]
    vision = {**family.defaults, **(config.get("vision_config") or {})}
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    layers = vision.get("depth") or vision["num_hidden_layers"]
    heads = vision.get("num_heads") or vision["num_attention_heads"]
    beside = 0
    if "depth" in vision:
        patches = image_tokens * vision.get("spatial_merge_size", 2) ** 2
    elif config["model_type"] == "gemma3":
        of_image = (vision["image_size"] // vision["patch_size"]) ** 2
        patches = -(-image_tokens // config.get("mm_tokens_per_image", 256)) * of_image
    else:
        patches = image_tokens * config.get("scale_factor", 2) ** 2
        # Tiles that are padding are left out of a copy of the pixels, by a mask in whole numbers.
        beside = 3 * vision["patch_size"] ** 2 * size + 8 * vision["patch_size"] ** 2
    of_layer = family.layer[0] * hidden + family.layer[1] * inner + heads
    if is_trained:
        return int(patches * (size * (layers * of_layer + family.joined * hidden) + beside))
    of_mlp = family.mlp[0] * hidden + family.mlp[1] * inner
    return int(patches * (size * max(family.attention * hidden, of_mlp) + beside))
