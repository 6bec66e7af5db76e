"""The trained model and its tokenizer: `model` and `tokenizer` of the RL and the SFT trainer."""

import math
import re
import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from prime_rl.configs.ranges import LARGEST, Count, Fraction, LearningRate, Processes
from prime_rl.configs.shared import BaseModelConfig
from prime_rl.utils.images import MOST_PIXELS, ImageLimits
from prime_rl.utils.pydantic_config import BaseConfig, ConfigWarning, derive, raise_faults

DEFAULT_VOCAB_CHUNK = 8192
"""A fused output layer with smaller chunks is slow."""

CPU_ROW_TOKENS = 2048
"""Minimum capacity of RL's packed rows in tokens on a CPU, where forward passes of short and long rows take about as
long."""

SMALL_MODEL_ROW_TOKENS = 4096
"""Minimum row capacity on a CPU for small models. With 2.4 million parameters, a step takes 10% less time."""

SMALL_MODEL_WIDTH = 2048
"""Maximum hidden size times layers of a small model. Its activations for such a row take a few hundred MiB."""


def _short_kernel_name(name: Any) -> Any:
    return "fa4" if name == "flash_attention_4" else name


AttentionKernel = Annotated[
    Literal["sdpa", "flash_attention_2", "flash_attention_3", "fa4"], BeforeValidator(_short_kernel_name)
]


ALL_LINEAR = "all-linear"
"""Name in `target_modules` of every linear layer but the head."""
STACKED_EXPERTS = "experts"
"""Name in `target_modules` of the stacked experts of a mixture."""


def is_regex(pattern: str) -> bool:
    """Whether a pattern for module names is a regular expression; without these characters it is a plain name."""
    return not frozenset("\\^$*+?{}[]|()").isdisjoint(pattern)


def matches(pattern: str, path: str) -> bool:
    """Whether `pattern` matches the module at `path`.

    A plain name matches one or more consecutive components of the path ("self_attn.q_proj"). A regular expression may
    match anywhere in the path.
    """
    if is_regex(pattern):
        return re.search(pattern, path) is not None
    return f".{pattern}." in f".{path}."


class CompileConfig(BaseConfig):
    """Compiles the decoder blocks with `torch.compile`."""

    fullgraph: bool = False
    """Fail if a block does not compile as one graph."""


class ActivationCheckpointConfig(BaseConfig):
    """Recomputes activations in the backward pass instead of storing them."""

    freq: Count = 1
    """Recompute every n-th block."""

    memory_gib: float | None = Field(None, gt=0, lt=1e6)
    """Memory for the activations of all blocks, in GiB: each row recomputes only as many blocks as it takes, the first
    ones. None recomputes all that `freq` names."""


class ActivationOffloadingConfig(BaseConfig):
    """Stores activations in host memory."""

    pin_memory: bool = True
    """Use pinned host buffers."""

    max_inflight_activations: Count = 5
    """Number of activations that stay on the GPU while they are copied, and that are fetched ahead of their use."""


class LoRAConfig(BaseConfig):
    """Trains low-rank adapters instead of all weights."""

    rank: Count = 16
    """Rank of each adapter."""

    alpha: float = Field(32.0, ge=0)
    """The adapter's output is scaled by alpha / rank."""

    init: Literal["default", "pissa", "loftq"] = "default"
    """Start of a new adapter. `default`: A is random and B zero. `pissa`: the product that is nearest to the weight, in
    whose place it is trained. `loftq`: the product that is nearest to what `model.quantization` takes from the
    weight."""

    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead (rsLoRA), so that a higher rank does not learn more slowly."""

    use_dora: bool = False
    """Also train the length of each row of the adapted weights (DoRA). RL sends merged weights to the engines."""

    rank_pattern: dict[str, Count] = Field({})
    """Ranks of some of the modules, by name or regular expression as in `target_modules`. The first match counts."""

    alpha_pattern: dict[str, Annotated[float, Field(ge=0)]] = Field({})
    """Alphas of some of the modules, likewise."""

    loraplus_lr_ratio: float = Field(1.0, ge=1, le=1000)
    """Learning rate of B, and of all vectors, as a multiple of `optim.lr` (LoRA+)."""

    dropout: Fraction = 0.0
    """Dropout of the adapter's input in SFT. RL trains without dropout."""

    target_modules: list[str] = Field(
        [
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "gate_proj",
            "up_proj",
            "down_proj",
            "experts",
        ]
    )
    """Modules that get an adapter: names, or regular expressions. `all-linear` is every linear layer but the head."""

    modules_to_save: list[str] = Field([])
    """Modules that are trained in full: names, or regular expressions."""

    path: str | None = None
    """Adapter to continue training: a folder in PEFT's format, or the output directory of a run that kept its adapter.
    Ranks, scales and `use_dora` must be those of the adapter. None starts a new one."""

    def rank_of(self, path: str) -> int:
        """Rank of the adapter of the linear layer at `path`."""
        return next((rank for pattern, rank in self.rank_pattern.items() if matches(pattern, path)), self.rank)

    def alpha_of(self, path: str) -> float:
        return next((alpha for pattern, alpha in self.alpha_pattern.items() if matches(pattern, path)), self.alpha)

    def scale_of(self, path: str) -> float:
        """Factor of the product of its matrices."""
        rank = self.rank_of(path)
        return self.alpha_of(path) / (math.sqrt(rank) if self.use_rslora else rank)

    @property
    def ranks_per_export(self) -> int:
        """How many times its rank an exported adapter has: that of PiSSA subtracts its start."""
        return 2 if self.init == "pissa" else 1

    @property
    def largest_rank(self) -> int:
        """The largest rank in an exported adapter."""
        return max([self.rank, *self.rank_pattern.values()]) * self.ranks_per_export

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        return self

    def start_fault(self, is_quantized: bool) -> str | None:
        """Why the start does not go with weights that are quantized or not."""
        if self.init == "loftq" and not is_quantized:
            return "lora.init = 'loftq' makes up for quantization: set model.quantization = \"nf4\", or remove it"
        if self.init == "pissa" and is_quantized:
            return "lora.init = 'pissa' needs the weights as numbers: set lora.init = 'loftq', or remove quantization"
        return None

    def _faults(self) -> Iterator[str]:
        if self.init != "default" and self.path is not None:
            yield f"init = {self.init!r} starts a new adapter, and path continues one: remove one"
        if self.init != "default" and 0 in (self.alpha, *self.alpha_pattern.values()):
            yield f"init = {self.init!r} with an alpha of 0, which no product reaches: raise it"
        if self.init == "pissa" and self.use_dora:
            yield "init = 'pissa' with use_dora, whose lengths are those of the whole rows: remove one"
        if not self.target_modules:
            yield "target_modules is empty: name at least one module to adapt"
        for key in ("target_modules", "modules_to_save", "rank_pattern", "alpha_pattern"):
            for pattern in filter(is_regex, getattr(self, key)):
                try:
                    re.compile(pattern)
                except re.error as error:
                    yield f'{key}: "{pattern}" is not a regular expression: {error}'


class ImageLimitsConfig(BaseConfig):
    """Limits of images."""

    max_images: Count = 32
    """Largest number of images of a row of the data, or of a prompt."""

    max_pixels: int = Field(50_000_000, ge=1, le=MOST_PIXELS)
    """Largest number of pixels of an image as it is stored. The model's image processor makes it smaller."""

    @property
    def limits(self) -> ImageLimits:
        return ImageLimits(max_pixels=self.max_pixels, max_images=self.max_images)


class VisionConfig(ImageLimitsConfig):
    """Trains on images too, with the whole class of the checkpoint."""

    tower_lr: LearningRate | None = None
    """Learning rate of the vision tower and of what joins it to the language model, or with `lora` of their adapters.
    The schedule scales it as it does `optim.lr`. None leaves them as they are."""


class QuantizationConfig(BaseConfig):
    """Stores the frozen linear layers of the decoder blocks in 4 or 8 bits (QLoRA)."""

    type: Literal["nf4", "int8"]
    """How bitsandbytes stores a value: as one of the 16 levels of NF4, for normally distributed weights, or as an
    integer of 8 bits."""

    double: bool = True
    """NF4: also quantize the scale of each block of 64 values: 4.13 bits per weight instead of 4.5."""


def _quantization_table(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


class DebugModelConfig(BaseConfig):
    """Switches for debugging the model."""

    num_layers: Count | None = None
    """Number of layers to keep, from the first. None keeps all."""

    random_init: bool = False
    """Start from random weights."""


class ModelConfig(BaseModelConfig):
    """The trained model: its code, memory and parallelism."""

    seq_len: Count = 2048
    """Length of the longest training sequence, in tokens. SFT: the value of `data.seq_len`, which may be set here
    instead."""

    attn: AttentionKernel = "flash_attention_2"
    """Attention kernel. If it is not available: PyTorch's varlen kernel or flex attention on a GPU, SDPA on a CPU. The
    log names the choice. `flash_attention_4` is another name for `fa4`."""

    compile: CompileConfig | None = None
    """Compile the decoder blocks. None disables compilation."""

    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing. None stores all activations."""

    ac_offloading: ActivationOffloadingConfig | None = None
    """Activations in host memory; turns `ac` on. None keeps them on the GPU. No effect on a CPU."""

    mlp_chunk_tokens: Count | None = None
    """Compute the dense MLP of each decoder block for so many tokens at a time, and again in the backward pass, so that
    only one chunk's intermediate activations exist. 1,024 or more cost little beside that. None computes a whole row at
    once."""

    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and update them on the CPU."""

    optim_cpu_offload: bool = False
    """Keep only the optimizer state in host memory. The GPU updates one part of the weights at a time."""

    reshard_after_forward: bool = True
    """Free a block's gathered parameters after its forward pass."""

    dp_replicate: Processes = 1
    """Number of copies of the sharded model (HSDP)."""

    ep: Processes = 1
    """Expert-parallel size: number of processes that divide the experts of each layer. They may train on different
    rows. With `tp`, a multiple of it; 1 divides experts by `tp`."""

    tp: Processes = 1
    """Tensor-parallel size: number of processes that divide the layers of each decoder block."""

    cp: Processes = 1
    """Context-parallel size: number of processes that divide the tokens of a packed row (Ulysses)."""

    impl: Literal["hf", "custom", "auto"] = "auto"
    """Model code: all three mean Transformers'. `custom` warns: no family needs code of our own."""

    optimization_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype of the master weights."""

    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Dtype in which gradients are summed over ranks."""

    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Dtype of the forward and backward pass. `auto` is bfloat16 on a GPU and float32 on a CPU."""

    moe_use_grouped_mm: bool = True
    """Use grouped matrix products for the experts of an MoE model. False runs one expert after another."""

    freeze_moe_router: bool = False
    """Do not train the router of an MoE model."""

    router_bias_update_rate: float = Field(0.0, ge=0, le=1)
    """Balance the experts of an MoE model without a loss: after each optimizer step, the bias that its routers add to
    the scores for the choice moves by this much towards an equal load. DeepSeek-V3 used 0.001. 0 keeps the bias."""

    router_aux_loss_coef: float = Field(0.0, ge=0, le=10)
    """Weight of the load-balancing loss of an MoE model (Switch Transformers, as in Transformers), of each packed row.
    The checkpoint's own value is often 0.001; it is not used by itself, as in Transformers. 0 computes none."""

    adapter: str | None = None
    """Adapter to merge into the model before training: a folder in PEFT's format, or the output directory of a run that
    kept its adapter. With `lora`, a new adapter is trained on the merged weights."""

    lora: LoRAConfig | None = None
    """Train adapters. None trains all weights."""

    quantization: Annotated[QuantizationConfig | None, BeforeValidator(_quantization_table)] = None
    """Store the frozen weights in 4 or 8 bits; a table, or `"nf4"` or `"int8"`. Needs `lora`. None stores them in the
    compute dtype."""

    language_model_only: bool = False
    """Export only the language model of a checkpoint with a vision tower, as its causal class. False exports the whole
    checkpoint. Only the language model is trained either way."""

    vision: VisionConfig | None = None
    """SFT and RL: train on images, with the vision tower of the checkpoint. None reads text alone, without loading a
    tower."""

    debug: DebugModelConfig = DebugModelConfig()
    """Switches for debugging."""

    fused_lm_head_chunk_size: Annotated[int, Field(ge=512, le=LARGEST)] | Literal["auto", "disabled"] = "auto"
    """Vocabulary entries per chunk of the fused output layer. `auto` is 8192 in RL and `disabled` in SFT."""

    @property
    def sends_adapter(self) -> bool:
        """Whether RL sends the engines the adapter alone."""
        return self.lora is not None and self.merging_key is None

    @property
    def merging_key(self) -> str | None:
        """The key because of which RL merges the adapter into whole weights for the engines; None if there is none.

        Engines apply plain adapters of linear layers to `name`.
        """
        if self.lora is not None and self.lora.modules_to_save:
            return "lora.modules_to_save"
        if self.lora is not None and self.lora.use_dora:
            return "lora.use_dora"
        if self.lora is not None and self.vision is not None and self.vision.tower_lr is not None:
            return "vision.tower_lr"
        if self.quantization is not None:
            return "quantization"
        return None if self.adapter is None else "adapter"

    @property
    def starts_changed(self) -> bool:
        """Whether RL starts from other weights than those of `name`, which the engines have loaded."""
        continues = self.lora is not None and self.lora.path is not None
        return self.adapter is not None or self.quantization is not None or continues

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self.faults())
        if self.ac_offloading is not None and self.ac is None:
            derive(self, "ac_offloading needs checkpointing", ac=ActivationCheckpointConfig())
        chunk = self.fused_lm_head_chunk_size
        if isinstance(chunk, int) and chunk < DEFAULT_VOCAB_CHUNK:
            text = f"model.fused_lm_head_chunk_size = {chunk} is slow; {DEFAULT_VOCAB_CHUNK} or more is not"
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return self

    def faults(self) -> Iterator[str]:
        """Which of the keys do not go together."""
        if self.trust_remote_code and self.impl == "custom":
            yield "trust_remote_code runs the model's own code, and impl = 'custom' ours: remove one"
        for name, size in (("cp", self.cp), ("tp", self.tp), ("ep", self.ep)):
            if size > 1 and self.compile is not None:
                yield f"{name} ({size}) with [compile]: collectives of a compiled block are not supported: remove one"
            if name != "cp" and size > 1 and self.ac_offloading is not None:
                yield f"{name} ({size}) with [ac_offloading]: activations of divided layers cannot be moved: remove one"
        if self.mlp_chunk_tokens is not None and self.compile is not None:
            yield f"mlp_chunk_tokens ({self.mlp_chunk_tokens}) with [compile], which unrolls the chunks: remove one"
        if self.ac is not None and self.ac.memory_gib is not None:
            yield from self._budget_faults(self.ac)
        if self.fsdp_cpu_offload and self.optim_cpu_offload:
            yield "fsdp_cpu_offload holds the optimizer state too: remove optim_cpu_offload"
        if self.attn == "fa4" and self.impl != "custom":
            yield f"attn = 'fa4' needs impl = 'custom' (got {self.impl!r})"
        for key in ("router_bias_update_rate", "router_aux_loss_coef") if self.compile is not None else ():
            if getattr(self, key) > 0:
                yield f"{key} does not work with [compile], which hides the choice of experts: remove one"
        if self.router_bias_update_rate > 0 and self.lora is not None:
            yield "router_bias_update_rate with [lora]: an adapter cannot hold the bias: remove one"
        if self.tp > 1 and self.lora is not None and self.lora.use_dora:
            yield f"tp ({self.tp}) with lora.use_dora, which needs whole rows of each layer: remove one"
        if self.vision is not None:
            yield from (f"[vision] {fault}" for fault in self._vision_faults())
        if self.lora is not None and (fault := self.lora.start_fault(self.quantization is not None)) is not None:
            yield fault
        if self.quantization is not None:
            yield from (f"quantization {fault}, or remove quantization" for fault in self.quantization_faults())
        if self.ep > 1 and self.ep % self.tp:
            yield f"ep ({self.ep}) is not a multiple of tp ({self.tp}), whose processes hold the same tokens"

    def _budget_faults(self, ac: ActivationCheckpointConfig) -> Iterator[str]:
        if ac.freq > 1:
            yield f"ac.freq ({ac.freq}) with ac.memory_gib, which chooses the blocks: remove one"
        if self.ac_offloading is not None:
            yield "ac_offloading moves what ac.memory_gib keeps: remove one"
        if self.ep > 1:
            yield f"ep ({self.ep}) with ac.memory_gib: all must recompute the same blocks to share experts: remove one"

    def _vision_faults(self) -> Iterator[str]:
        for name in ("cp", "tp", "ep"):
            if (size := getattr(self, name)) > 1:
                yield f"with {name} = {size}: rows with images are not divided among processes: remove one"
        trains_tower = self.vision is not None and self.vision.tower_lr is not None
        if trains_tower and self.lora is not None and self.lora.loraplus_lr_ratio != 1:
            yield "tower_lr with lora.loraplus_lr_ratio: adapters of the tower have one learning rate: remove one"
        if self.language_model_only:
            yield "trains the whole checkpoint, and language_model_only exports a part of it: remove one"
        if self.trust_remote_code:
            yield "with trust_remote_code: images are trained with Transformers' own classes: remove one"

    def quantization_faults(self) -> Iterator[str]:
        """Which of the keys do not go with quantized weights, and what to do."""
        if self.lora is None:
            yield "stores weights that are not trained: set [model.lora]"
        elif self.lora.use_dora:
            yield "does not go with lora.use_dora, which needs the lengths of the rows: remove use_dora"
        if self.compile is not None:
            yield "does not work with [compile]: remove [compile]"
        for name in ("tp", "ep"):
            if (size := getattr(self, name)) > 1:
                yield f"does not go with {name} ({size}), which would divide packed weights: use FSDP alone"


def cpu_row_tokens(seq_len: int, hidden_size: int, layers: int) -> int:
    """Capacity of RL's packed rows in tokens on a CPU."""
    is_small = hidden_size * layers <= SMALL_MODEL_WIDTH
    return max(seq_len, SMALL_MODEL_ROW_TOKENS if is_small else CPU_ROW_TOKENS)


def division_fault(model: ModelConfig, processes: int) -> str | None:
    """Why `processes` trainer processes cannot be divided as the model's config says."""
    for axes in (("dp_replicate", "cp", "tp"), ("dp_replicate", "ep")):
        product, text = product_of(model, *axes)
        if processes % product:
            return f"{text} does not divide the {processes} trainer processes"
    return None


def product_of(model: ModelConfig, *axes: str) -> tuple[int, str]:
    """The product of the sizes of some axes of the mesh, and how a message writes it."""
    sizes = {f"model.{axis} = {size}": size for axis in axes if (size := getattr(model, axis)) > 1}
    return math.prod(sizes.values()), " x ".join(sizes)


class TokenizerConfig(BaseConfig):
    """The tokenizer."""

    name: str | None = None
    """Tokenizer id or directory. None takes `model.name`."""

    trust_remote_code: bool | None = None
    """Run code that comes with the tokenizer. None takes `model.trust_remote_code`."""

    add_tokens: list[str] = Field([])
    """SFT: tokens to add, such as `<think>`. If the model has too few embeddings, it gets more; the new ones start as
    the mean of the others."""

    chat_template: str | None = None
    """Chat template that replaces the tokenizer's own: Jinja text, the path of a file, or `chatml`."""

    @model_validator(mode="after")
    def _check_tokens(self) -> Self:
        if empty := [token for token in self.add_tokens if not token.strip()]:
            raise ValueError(f"add_tokens has the token {empty[0]!r}: a token needs letters or signs")
        return self
