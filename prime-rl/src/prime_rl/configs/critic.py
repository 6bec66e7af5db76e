"""PPO's critic: `[trainer.critic]` of RL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from prime_rl.configs.algorithms import DefaultAdvantageConfig, NormalizedAdvantageConfig
from prime_rl.configs.model import LoRAConfig
from prime_rl.configs.optim import (
    AdamWConfig,
    ConstantSchedulerConfig,
    OptimizerConfig,
    SchedulerConfig,
    optimizer_faults,
    schedule_faults,
)
from prime_rl.configs.ranges import Fraction, WholeNumber
from prime_rl.utils.pydantic_config import BaseConfig, derive

if TYPE_CHECKING:
    from prime_rl.configs.algorithms import AdvantageConfig, Algorithm
    from prime_rl.configs.trainer import TrainerConfig


class CriticConfig(BaseConfig):
    """A second model that learns the return of each token, and turns rewards into advantages (PPO with GAE)."""

    name: str | None = None
    """Model that the critic starts from: a language model, which gets a new head `score`, or a reward model with the
    policy's tokenizer. None is `model.name`."""

    lora: LoRAConfig | None = None
    """Train adapters of the critic, and its head. None trains all of its weights, also beside a policy with LoRA."""

    optim: OptimizerConfig = AdamWConfig()
    """The critic's optimizer. Keys that are left out are those of `trainer.optim`, unless the types differ."""

    scheduler: SchedulerConfig = ConstantSchedulerConfig()
    """The critic's learning rate schedule. Keys that are left out are those of `trainer.scheduler`, unless the types
    differ."""

    gamma: Fraction = 1.0
    """Discount of the reward for each token, or for each turn: `gamma` in TRL, `discount` in AReaL."""

    gae_lambda: Fraction = 0.95
    """1: advantages are returns minus values, without bias. 0: they compare with the next value only, with the least
    variance. `lam` in TRL."""

    level: Literal["token", "turn"] = "token"
    """The unit of GAE's steps. `token`: each token has a value and an advantage. `turn`: each answer of the model has
    one value, at the token before it, and one advantage, which all its tokens get."""

    value_clip: float | None = Field(0.2, gt=0)
    """Largest change of a value within a step that lowers its loss: `cliprange_value` in TRL, the critic's `eps_clip`
    in AReaL. Values change within a step only with `trainer.minibatches` or `epochs_per_batch` above 1. None clips
    none."""

    whiten: bool = True
    """Normalise the advantages of the tokens of a batch by their mean and standard deviation."""

    warmup_steps: WholeNumber = 0
    """Number of first steps in which only the critic is trained: `critic_warmup` in verl. The policy's schedule starts
    after them."""


def follow_policy(critic: CriticConfig, trainer: TrainerConfig) -> None:
    """Fill in what the config leaves out of the critic's optimizer and schedule from those of the policy."""
    for name in ("optim", "scheduler"):
        own, policys = getattr(critic, name), getattr(trainer, name)
        if name not in critic.model_fields_set:
            derive(critic, f"that of trainer.{name}", **{name: policys})
        elif type(own) is type(policys):
            left_out = {key: value for key, value in policys if key not in own.model_fields_set}
            if left_out:
                derive(own, f"that of trainer.{name}", **left_out)


def critic_faults(trainer: TrainerConfig, critic: CriticConfig) -> Iterator[str]:
    """Settings of the trainer that a critic excludes."""
    is_quantized = trainer.model.quantization is not None
    if critic.lora is not None and (fault := critic.lora.start_fault(is_quantized)) is not None:
        yield f"critic.{fault}"
    loss = trainer.loss
    if loss.type != "custom" and loss.sft_coef > 0:
        yield "loss.sft_coef tells good rollouts by their advantage, and those of [critic] are of tokens: set it to 0"
    if loss.type == "default" and loss.adv_tau == 0:
        yield "loss.adv_tau = 0 leaves out the advantages of [critic]: set it above 0, or remove [critic]"
    faults = [
        *schedule_faults(critic.scheduler, trainer.max_steps),
        *optimizer_faults(critic.optim, critic.scheduler, trainer.model, critic.lora),
    ]
    if critic.lora is not None and critic.lora.use_dora and trainer.model.tp > 1:
        faults.append(f"lora.use_dora needs whole rows of each layer: remove model.tp = {trainer.model.tp}")
    yield from (f"[critic]: {fault}" for fault in faults)


def critic_warnings(trainer: TrainerConfig, critic: CriticConfig) -> Iterator[str]:
    """Settings that work, but are probably a mistake."""
    if trainer.max_steps is not None and critic.warmup_steps >= trainer.max_steps > 0:
        yield (
            f"critic.warmup_steps ({critic.warmup_steps}) leaves none of max_steps = {trainer.max_steps} to train the "
            "policy"
        )
    if critic.lora is not None and critic.lora.dropout > 0:
        yield f"critic.lora.dropout = {critic.lora.dropout} has no effect: RL trains without dropout"


def advantage_faults(
    critic: CriticConfig | None, advantage: AdvantageConfig | None, algorithm: Algorithm
) -> Iterator[str]:
    """Settings of the orchestrator that change rewards, which a critic needs unchanged."""
    if critic is None:
        if algorithm == "ppo":
            yield "algorithm = 'ppo' needs [trainer.critic]: without it the rewards themselves would be the advantages"
        return
    advice = "set algorithm = 'ppo', or baseline and scale to 'none'"
    if isinstance(advantage, DefaultAdvantageConfig):
        yield (
            "[trainer.critic] is the baseline, and orchestrator.advantage.type = 'default' subtracts the mean of the "
            f"group: {advice} of the type 'normalized'"
        )
    elif isinstance(advantage, NormalizedAdvantageConfig):
        wrong = [key for key in ("baseline", "scale") if getattr(advantage, key) != "none"]
        wrong += ["whiten"] if advantage.whiten else []
        if wrong:
            given = " and ".join(f"{key} = {getattr(advantage, key)!r}" for key in wrong)
            yield (
                f"[trainer.critic] needs the rewards as they are, and orchestrator.advantage has {given}: "
                f"{'set trainer.critic.whiten instead' if wrong == ['whiten'] else advice}"
            )
