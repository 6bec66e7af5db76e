"""The trained model and its tokenizer: `model` and `tokenizer` of the RL and the SFT trainer."""

import warnings
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from prime_rl.configs.shared import BaseModelConfig
from prime_rl.utils.pydantic_config import BaseConfig, ConfigWarning, derive, raise_faults

DEFAULT_VOCAB_CHUNK = 8192
"""A fused output layer with smaller chunks is slow."""


def _short_kernel_name(name: Any) -> Any:
    return "fa4" if name == "flash_attention_4" else name


AttentionKernel = Annotated[
    Literal["sdpa", "flash_attention_2", "flash_attention_3", "fa4"], BeforeValidator(_short_kernel_name)
]


class CompileConfig(BaseConfig):
    """`torch.compile` of the transformer blocks."""

    fullgraph: bool = False
    """Fail where a block does not compile as a whole."""


class ActivationCheckpointConfig(BaseConfig):
    """Activations computed again in the backward pass."""

    freq: int = Field(1, ge=1)
    """Every n-th layer."""


class ActivationOffloadingConfig(BaseConfig):
    """Activations kept in host memory."""

    pin_memory: bool = True
    """Use pinned host buffers."""

    max_inflight_activations: int = Field(5, ge=1)
    """Activations kept on the GPU while they are copied, and fetched ahead of their use."""


class LoRAConfig(BaseConfig):
    """Low-rank adapters instead of full training."""

    rank: int = Field(16, ge=1)
    """Rank of an adapter."""

    alpha: float = Field(32.0, ge=0)
    """Scale of an adapter (times alpha / rank)."""

    dropout: float = Field(0.0, ge=0, le=1)
    """Dropout before an adapter."""

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
    """Modules that get an adapter: names or regular expressions."""

    modules_to_save: list[str] = Field([])
    """Modules trained in full: names or regular expressions."""


class DebugModelConfig(BaseConfig):
    """Switches for debugging the model."""

    num_layers: int | None = None
    """Keep the first n layers only; None keeps all."""

    random_init: bool = False
    """Start from random weights."""


class ModelConfig(BaseModelConfig):
    """The trained model: its code, memory and parallelism."""

    seq_len: int = Field(2048, ge=1)
    """Length of the longest training sequence, in tokens. SFT: the value of `data.seq_len`, which may be set here
    instead."""

    attn: AttentionKernel = "flash_attention_2"
    """Attention kernel. Where it cannot run, PyTorch's varlen kernel or flex attention does on a GPU, SDPA on a CPU;
    the log names the choice. `flash_attention_4` is another name of `fa4`."""

    compile: CompileConfig | None = None
    """Compile the decoder blocks; None does not."""

    ac: ActivationCheckpointConfig | None = None
    """Activation checkpointing; None keeps all activations."""

    ac_offloading: ActivationOffloadingConfig | None = None
    """Activations in host memory; switches `ac` on. None keeps them where they are computed, as a CPU does anyway."""

    fsdp_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and update them on the CPU."""

    optim_cpu_offload: bool = False
    """Keep the optimizer state alone in host memory; the GPU updates a part of the weights at a time."""

    reshard_after_forward: bool = True
    """Free gathered parameters after the forward pass."""

    dp_replicate: int = Field(1, ge=1)
    """Copies of the sharded model (HSDP)."""

    ep: int = Field(1, ge=1)
    """Expert parallel size."""

    tp: int = Field(1, ge=1)
    """Tensor parallel size."""

    cp: int = Field(1, ge=1)
    """Context parallel size."""

    impl: Literal["hf", "custom", "auto"] = "auto"
    """Whose model code: Transformers' or our own; `auto` prefers our own."""

    optimization_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type of the master weights."""

    reduce_dtype: Literal["bfloat16", "float32"] = "float32"
    """Type in which gradients are summed over ranks."""

    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the forward and backward pass: `auto` is bfloat16 on CUDA, float32 on a CPU."""

    moe_use_grouped_mm: bool = True
    """Grouped matrix products for the experts of an MoE model; without, one expert runs after the other."""

    freeze_moe_router: bool = False
    """Do not train the router of an MoE model."""

    lora: LoRAConfig | None = None
    """Train adapters; None trains all weights."""

    debug: DebugModelConfig = DebugModelConfig()
    """Switches for debugging."""

    fused_lm_head_chunk_size: Annotated[int, Field(ge=512)] | Literal["auto", "disabled"] = "auto"
    """Vocabulary entries in one chunk of the fused output layer; RL's `auto` is 8192, SFT's `disabled`."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        if self.ac_offloading is not None and self.ac is None:
            derive(self, ac=ActivationCheckpointConfig())
        chunk = self.fused_lm_head_chunk_size
        if isinstance(chunk, int) and chunk < DEFAULT_VOCAB_CHUNK:
            text = f"model.fused_lm_head_chunk_size = {chunk} is slow; {DEFAULT_VOCAB_CHUNK} or more is not"
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return self

    def _faults(self) -> Iterator[str]:
        flash_attention = ("flash_attention_2", "flash_attention_3")
        if self.trust_remote_code and self.impl == "custom":
            yield "trust_remote_code runs the model's own code, and impl = 'custom' ours: remove one"
        if self.cp > 1 and self.attn not in flash_attention:
            yield f"cp ({self.cp}) needs attn = {' or '.join(flash_attention)} (got {self.attn!r})"
        if self.cp > 1 and self.attn == "flash_attention_3" and self.impl != "custom":
            yield f"cp ({self.cp}) with flash_attention_3 needs impl = 'custom' (got {self.impl!r})"
        if self.fsdp_cpu_offload and self.optim_cpu_offload:
            yield "fsdp_cpu_offload holds the optimizer state too: remove optim_cpu_offload"
        if self.attn == "fa4" and self.impl != "custom":
            yield f"attn = 'fa4' needs impl = 'custom' (got {self.impl!r})"
        if self.ep > 1 and self.impl == "hf":
            yield f"ep ({self.ep}) needs our own model code: impl = 'custom' or 'auto'"


class TokenizerConfig(BaseConfig):
    """The tokenizer."""

    name: str | None = None
    """Tokenizer id or directory; None is the model's name."""

    trust_remote_code: bool | None = None
    """Run code that comes with the tokenizer; None is the model's choice."""

    chat_template: str | None = None
    """Chat template in place of the tokenizer's own."""
