"""Optimizers and learning rate schedules of the RL and the SFT trainer."""

import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from prime_rl.configs.model import LoRAConfig, ModelConfig
from prime_rl.configs.ranges import Decay, Fraction, LearningRate, WholeNumber
from prime_rl.utils.pydantic_config import BaseConfig, ConfigWarning, derive

DEFAULT_WARMUP_STEPS = 10


class ConstantSchedulerConfig(BaseConfig):
    """A constant learning rate."""

    type: Literal["constant"] = "constant"
    """Constant."""


class BaseWarmupConfig(BaseConfig):
    """Schedules that begin with a linear warm-up."""

    warmup_steps: WholeNumber | None = None
    """Number of warm-up steps. None is 10, unless `warmup_ratio` is set."""

    warmup_ratio: Fraction | None = None
    """Warm-up as a share of all steps, rounded up, instead of `warmup_steps`."""

    @model_validator(mode="after")
    def _choose_warmup(self) -> Self:
        if self.warmup_ratio is not None and self.warmup_steps is not None:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) and warmup_ratio ({self.warmup_ratio}) are both set: give one"
            )
        if self.warmup_ratio is None and self.warmup_steps is None:
            derive(self, "neither warmup_steps nor warmup_ratio is set", warmup_steps=DEFAULT_WARMUP_STEPS)
        return self


def warmup_of(config: BaseWarmupConfig, steps: int | None) -> int:
    """Number of warm-up steps in a schedule of `steps`, which `warmup_ratio` needs to know."""
    if config.warmup_ratio is not None and steps is not None:
        # 0.07 * 100 is a little above 7.
        return math.ceil(config.warmup_ratio * steps - 1e-9)
    return config.warmup_steps or 0


class LinearSchedulerConfig(BaseWarmupConfig):
    """Linear warm-up, constant rate, linear decay."""

    type: Literal["linear"] = "linear"
    """Linear."""

    decay_steps: WholeNumber = 10
    """Number of decay steps at the end."""

    min_lr: LearningRate = 0.0
    """Learning rate at the end."""


class CosineSchedulerConfig(BaseWarmupConfig):
    """Linear warm-up, then cosine decay to the end."""

    type: Literal["cosine"] = "cosine"
    """Cosine."""

    min_lr: LearningRate = 0.0
    """Learning rate at the end."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


def schedule_faults(scheduler: SchedulerConfig, steps: int | None) -> Iterator[str]:
    """Why a schedule does not fit into `steps` optimizer steps; None means that training never ends."""
    if isinstance(scheduler, ConstantSchedulerConfig):
        return
    if scheduler.warmup_ratio is not None and steps is None:
        yield f"scheduler.warmup_ratio = {scheduler.warmup_ratio} is a share of max_steps, which is not set"
        return
    warmup = warmup_of(scheduler, steps)
    if isinstance(scheduler, CosineSchedulerConfig):
        if steps is None or warmup >= steps:
            yield (
                f"the cosine schedule needs max_steps above scheduler.warmup_steps = {warmup} (got max_steps = {steps})"
            )
        return
    decay = scheduler.decay_steps
    if warmup == decay == 0:
        yield "the linear schedule needs scheduler.warmup_steps or scheduler.decay_steps above 0"
    if decay and steps is None:
        yield f"scheduler.decay_steps = {decay} needs max_steps, to know when the decay starts"
    if steps is not None and warmup + decay > steps:
        yield (
            f"scheduler.warmup_steps = {warmup} and scheduler.decay_steps = {decay} do not fit into max_steps = {steps}"
        )


class BaseOptimizerConfig(BaseConfig):
    """Keys of every optimizer."""

    lr: LearningRate = 1e-6
    """Learning rate."""

    weight_decay: float = Field(0.01, ge=0, le=100)
    """Weight decay."""

    max_norm: float = Field(1.0, ge=0)
    """Maximum gradient norm. Larger gradients are scaled down to it; 1e9 leaves them as they are."""

    @model_validator(mode="after")
    def _check_max_norm(self) -> Self:
        if self.max_norm == 0:
            text = "optim.max_norm = 0 makes every gradient 0, so nothing would be trained; 1e9 turns clipping off"
            warnings.warn(text, ConfigWarning, stacklevel=2)
        return self


class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = "sgd"
    """SGD."""

    nesterov: bool = True
    """Nesterov momentum."""

    momentum: Decay = 0.9
    """Momentum."""

    @model_validator(mode="after")
    def _check_momentum(self) -> Self:
        if self.nesterov and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0: set nesterov = false")
        return self


class RoundingOptimizerConfig(BaseOptimizerConfig):
    """Optimizers that can update weights in bfloat16."""

    stochastic_rounding: bool = False
    """With `model.optimization_dtype = "bfloat16"`: update in float32, and round each weight up or down at random, so
    that the mean is the update. Otherwise small updates are lost."""


class _AnyAdamWConfig(RoundingOptimizerConfig):
    """Keys of AdamW, whatever its moments are stored as."""

    betas1: Decay = 0.9
    """Decay of the first moment."""

    betas2: Decay = 0.999
    """Decay of the second moment."""


class AdamWConfig(_AnyAdamWConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    """AdamW."""


class AdafactorConfig(RoundingOptimizerConfig):
    """Adafactor. An update is at most `lr` times as large as its parameter, so `lr` is about 1e-3."""

    type: Literal["adafactor"] = "adafactor"
    """Adafactor."""


class AdamW8bitConfig(_AnyAdamWConfig):
    """AdamW with moments of 8 bits for large matrices (bitsandbytes), and of 32 bits for the rest."""

    type: Literal["adamw8bit"] = "adamw8bit"
    """AdamW with moments of 8 bits."""


class AdamW4bitConfig(_AnyAdamWConfig):
    """AdamW with moments of 4 bits for large matrices (equal to torchao's), and of 32 bits for the rest."""

    type: Literal["adamw4bit"] = "adamw4bit"
    """AdamW with moments of 4 bits."""


class MuonConfig(BaseOptimizerConfig):
    """Muon for matrices; AdamW for embeddings, head and vectors. Muon's updates are about as large as AdamW's."""

    type: Literal["muon"] = "muon"
    """Muon."""

    mu: Decay = 0.95
    """Muon's momentum."""

    betas1: Decay = 0.9
    """AdamW's decay of the first moment."""

    betas2: Decay = 0.95
    """AdamW's decay of the second moment."""


OptimizerConfig = Annotated[
    SGDConfig | AdamWConfig | AdamW8bitConfig | AdamW4bitConfig | AdafactorConfig | MuonConfig,
    Field(discriminator="type"),
]


class LowBits(NamedTuple):
    """How an optimizer stores the moments of large matrices."""

    bits: int
    """Bits of each stored value."""
    block: int
    """Neighbouring values of a row that share a scale."""

    @property
    def state_bytes(self) -> float:
        """Bytes for each parameter: both moments and their scales."""
        return 2 * (self.bits / 8 + 4 / self.block)

    def columns(self, shape: Sequence[int]) -> int | None:
        """Columns of the moments of a parameter, filled up to whole blocks; None if its moments have 32 bits.

        Blocks lie within rows, so that every division of the rows among processes has the same ones. Small tensors, as
        in bitsandbytes and torchao, and those with short rows, such as B of an adapter, have 32 bits.
        """
        if len(shape) < 2 or shape[-1] < self.block or math.prod(shape) < _SMALLEST_QUANTIZED:
            return None
        return -(-shape[-1] // self.block) * self.block


LOW_BITS = {"adamw8bit": LowBits(8, 256), "adamw4bit": LowBits(4, 128)}
"""As bitsandbytes has them, and torchao."""
_SMALLEST_QUANTIZED = 4096
PIECE_VALUES = 2**20
"""Values that 4-bit AdamW unpacks and updates at a time, to bound its temporaries."""


def is_rounded(optim: OptimizerConfig) -> bool:
    """Whether updated weights are rounded stochastically."""
    return isinstance(optim, RoundingOptimizerConfig) and optim.stochastic_rounding


def optimizer_faults(
    optim: OptimizerConfig, scheduler: SchedulerConfig, model: ModelConfig, lora: LoRAConfig | None
) -> Iterator[str]:
    """Why an optimizer does not fit its schedule, or the model with the adapters `lora`."""
    lr_ratio = 1.0 if lora is None else lora.loraplus_lr_ratio
    rate, min_rate = optim.lr, getattr(scheduler, "min_lr", 0.0)
    if min_rate > rate > 0:
        yield f"scheduler.min_lr = {min_rate:g} is above optim.lr = {rate:g}: the rate would rise instead of decay"
    if optim.type in LOW_BITS:
        for key in ("optim_cpu_offload", "fsdp_cpu_offload"):
            if getattr(model, key):
                yield f"optim.type = {optim.type!r} keeps its small states on the GPU: remove model.{key}"
        if model.tp > 1:
            yield f"optim.type = {optim.type!r} needs whole rows of each weight: remove model.tp ({model.tp})"
    if is_rounded(optim) and model.optimization_dtype != "bfloat16":
        yield "optim.stochastic_rounding is for weights in bfloat16: set model.optimization_dtype = 'bfloat16'"
    if optim.type == "adafactor" and model.optim_cpu_offload:
        yield "optim.type = 'adafactor' keeps its small states on the GPU: remove model.optim_cpu_offload"
    if optim.type == "muon" and model.fsdp_cpu_offload:
        yield "optim.type = 'muon' does not work with model.fsdp_cpu_offload"
    if optim.type == "muon" and lr_ratio != 1:
        yield f"optim.type = 'muon' makes all updates equally large: remove lora.loraplus_lr_ratio ({lr_ratio:g})"
