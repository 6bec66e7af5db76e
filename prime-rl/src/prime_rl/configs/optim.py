"""Optimizers and learning rate schedules of the RL and the SFT trainer."""

from typing import Annotated, Literal

from pydantic import Field

from prime_rl.utils.pydantic_config import BaseConfig


class ConstantSchedulerConfig(BaseConfig):
    """A constant learning rate."""

    type: Literal["constant"] = "constant"
    """Constant."""


class LinearSchedulerConfig(BaseConfig):
    """Linear warm-up, constant, linear decay."""

    type: Literal["linear"] = "linear"
    """Linear."""

    warmup_steps: int = Field(10, ge=0)
    """Steps of the warm-up."""

    decay_steps: int = Field(10, ge=0)
    """Steps of the decay at the end."""

    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end."""


class CosineSchedulerConfig(BaseConfig):
    """Linear warm-up, then a cosine down to the end."""

    type: Literal["cosine"] = "cosine"
    """Cosine."""

    warmup_steps: int = Field(10, ge=0)
    """Steps of the warm-up."""

    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end."""


SchedulerConfig = Annotated[
    ConstantSchedulerConfig | LinearSchedulerConfig | CosineSchedulerConfig, Field(discriminator="type")
]


class BaseOptimizerConfig(BaseConfig):
    """What every optimizer has."""

    lr: float = Field(1e-6, ge=0)
    """Learning rate."""

    weight_decay: float = Field(0.01, ge=0)
    """Weight decay."""

    max_norm: float = Field(1.0, ge=0)
    """Largest norm of the gradient; a larger one is scaled down."""


class SGDConfig(BaseOptimizerConfig):
    """Stochastic gradient descent."""

    type: Literal["sgd"] = "sgd"
    """SGD."""

    nesterov: bool = True
    """Nesterov momentum."""

    momentum: float = 0.9
    """Momentum."""


class AdamWConfig(BaseOptimizerConfig):
    """AdamW."""

    type: Literal["adamw"] = "adamw"
    """AdamW."""

    betas1: float = Field(0.9, ge=0)
    """Decay of the first moment."""

    betas2: float = Field(0.999, ge=0)
    """Decay of the second moment."""


class MuonConfig(BaseOptimizerConfig):
    """Muon for matrices, AdamW for embeddings, head and vectors. A matrix moves about as far as AdamW would move it."""

    type: Literal["muon"] = "muon"
    """Muon."""

    mu: float = Field(0.95, ge=0)
    """Momentum of Muon."""

    betas1: float = Field(0.9, ge=0)
    """AdamW's decay of the first moment."""

    betas2: float = Field(0.95, ge=0)
    """AdamW's decay of the second moment."""


OptimizerConfig = Annotated[SGDConfig | AdamWConfig | MuonConfig, Field(discriminator="type")]
