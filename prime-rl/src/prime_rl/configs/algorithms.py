"""The choices that make an RL algorithm: the presets behind `algorithm`, the advantages, and the losses.

A preset fills in keys of `trainer.loss`, `trainer.critic`, `orchestrator.advantage` and `orchestrator.buffer` that the
config leaves out, so the resolved config shows all of them and each can be overridden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.distillation import MAX_TOP_K
from prime_rl.configs.ranges import Count, Fraction
from prime_rl.configs.shared import ImportPath
from prime_rl.utils.pydantic_config import BaseConfig, derive, raise_faults

Algorithm = Literal[
    "default",
    "grpo",
    "dr_grpo",
    "dapo",
    "rloo",
    "reinforce_pp",
    "gspo",
    "cispo",
    "decoupled_ppo",
    "gdpo",
    "maxrl",
    "lite_ppo",
    "sapo",
    "m2po",
    "dppo_tv",
    "dppo_kl",
    "dppo_top_k_tv",
    "dppo_top_k_kl",
    "icepop",
    "aipo",
    "loglinear_ppo",
    "ppo",
]

LOSS, ADVANTAGE, BUFFER = "trainer.loss", "orchestrator.advantage", "orchestrator.buffer"
CRITIC = "trainer.critic"
GROUP_NORMALIZED = {"type": "normalized", "baseline": "group", "scale": "group"}

OVERLONG_SHARE = 5
"""DAPO's buffer is a fifth of the longest answer: 4,096 of 20,480 tokens."""

PRESETS: Mapping[Algorithm, Mapping[str, Mapping[str, Any]]] = {
    "default": {},
    # Shao et al. 2024, DeepSeekMath
    "grpo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "sequence"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # Liu et al. 2025, Understanding R1-Zero-Like Training: neither lengths nor standard deviations bias the sum.
    "dr_grpo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "constant"},
        ADVANTAGE: {"type": "normalized", "baseline": "group", "scale": "none"},
    },
    # Yu et al. 2025, DAPO: clip higher, token level, dynamic sampling; the overlong penalty follows `max_tokens`.
    "dapo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.28, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
        BUFFER: {"drop_equal_rewards": True},
    },
    # Ahmadian et al. 2024, Back to Basics: each sequence counts with its whole log-probability.
    "rloo": {
        LOSS: {"type": "truncated", "weight_low": 0.0, "weight_high": 2.0, "average": "constant", "constant_tokens": 1},
        ADVANTAGE: {"type": "normalized", "baseline": "leave_one_out", "scale": "none"},
    },
    # Hu et al. 2025, REINFORCE++
    "reinforce_pp": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "token"},
        ADVANTAGE: {"type": "normalized", "baseline": "batch", "scale": "batch"},
    },
    # Zheng et al. 2025, Group Sequence Policy Optimization
    "gspo": {
        LOSS: {"type": "gspo", "clip_low": 3e-4, "clip_high": 4e-4, "average": "sequence"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # MiniMax 2025, MiniMax-M1; the largest weight as in Khatri et al. 2025, The Art of Scaling RL Compute
    "cispo": {
        LOSS: {"type": "truncated", "weight_low": 0.0, "weight_high": 5.0, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # Hilton et al. 2022, Batch size-invariance for policy optimization; Fu et al. 2025, AReaL
    "decoupled_ppo": {
        LOSS: {
            "type": "decoupled",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "behaviour_weight_cap": 5.0,
            "average": "token",
        },
        ADVANTAGE: GROUP_NORMALIZED,
        "trainer": {"minibatches": 4},
    },
    # Liu et al. 2026, GDPO: each reward function is normalised in its group, and their sum in the batch.
    "gdpo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "sequence"},
        ADVANTAGE: {**GROUP_NORMALIZED, "rewards": "each", "whiten": True},
    },
    # Tajwar et al. 2026, Maximum Likelihood Reinforcement Learning: the weight of a prompt is 1 / its success rate.
    "maxrl": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "token"},
        ADVANTAGE: {"type": "normalized", "baseline": "group", "scale": "group_mean"},
    },
    # Liu et al. 2025, Tricks or Traps? (Lite PPO)
    "lite_ppo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "token"},
        ADVANTAGE: {"type": "normalized", "baseline": "group", "scale": "batch"},
    },
    # Gao et al. 2025, Soft Adaptive Policy Optimization
    "sapo": {
        LOSS: {"type": "soft", "tau_positive": 1.0, "tau_negative": 1.05, "average": "sequence"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # Zheng et al. 2025, Prosperity before Collapse
    "m2po": {
        LOSS: {"type": "masked", "measure": "second_moment", "limit": 0.04, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # Qi et al. 2026, Rethinking the Trust Region in LLM Reinforcement Learning: the binary approximations.
    "dppo_tv": {
        LOSS: {"type": "masked", "measure": "tv", "limit": 0.15, "ratio_cap": 20.0, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    "dppo_kl": {
        LOSS: {"type": "masked", "measure": "kl", "limit": 0.05, "ratio_cap": 20.0, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # The same by the k likeliest tokens of the sampling policy.
    "dppo_top_k_tv": {
        LOSS: {"type": "masked", "measure": "top_k_tv", "limit": 0.15, "ratio_cap": 20.0, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    "dppo_top_k_kl": {
        LOSS: {"type": "masked", "measure": "top_k_kl", "limit": 0.05, "ratio_cap": 20.0, "average": "token"},
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # Ling Team 2025, Every Step Evolves (Ring-1T): tokens on which trainer and engine differ are masked on both sides.
    "icepop": {
        LOSS: {
            "type": "decoupled",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "behaviour_weight_floor": 0.5,
            "behaviour_weight_cap": 5.0,
            "average": "sequence",
        },
        ADVANTAGE: GROUP_NORMALIZED,
    },
    # Wu et al. 2025, LlamaRL: one-sided truncated importance weights.
    "aipo": {
        LOSS: {"type": "truncated", "weight_low": 0.0, "weight_high": 4.0, "average": "token"},
        ADVANTAGE: {"type": "normalized", "baseline": "group", "scale": "none"},
    },
    # Fu et al. 2025, AReaL: decoupled PPO without the forward pass of the proximal policy.
    "loglinear_ppo": {
        LOSS: {
            "type": "decoupled",
            "proximal": "loglinear",
            "clip_low": 0.2,
            "clip_high": 0.2,
            "behaviour_weight_cap": 5.0,
            "average": "token",
        },
        ADVANTAGE: GROUP_NORMALIZED,
        "trainer": {"minibatches": 4},
    },
    # Schulman et al. 2017, Proximal Policy Optimization Algorithms; Ouyang et al. 2022, InstructGPT: the critic turns
    # rewards into advantages.
    "ppo": {
        LOSS: {"type": "clip", "clip_low": 0.2, "clip_high": 0.2, "average": "token"},
        CRITIC: {"gamma": 1.0, "gae_lambda": 0.95},
        ADVANTAGE: {"type": "normalized", "baseline": "none", "scale": "none"},
    },
}


def preset(algorithm: Algorithm, max_tokens: int | None, seq_len: int) -> dict[str, dict[str, Any]]:
    """Raw values of each section that the algorithm sets.

    `max_tokens` is the length limit of an answer, if it is known, and `seq_len` that of a sample.
    """
    sections = {section: dict(values) for section, values in PRESETS[algorithm].items()}
    if algorithm == "dr_grpo":
        sections[LOSS]["constant_tokens"] = max_tokens or seq_len
    if algorithm == "dapo" and max_tokens is not None:
        buffer_tokens = max(1, max_tokens // OVERLONG_SHARE)
        sections[ADVANTAGE]["overlong"] = {"max_tokens": max_tokens, "buffer_tokens": buffer_tokens, "penalty": 1.0}
    return sections


# How rewards become advantages: sections of `orchestrator.advantage`.


class DefaultAdvantageConfig(BaseConfig):
    """Reward minus the mean of its group."""

    type: Literal["default"] = "default"
    """The default function."""

    length_weighted_mean: bool = False
    """Weight the mean by the lengths of the answers."""


class CustomAdvantageConfig(BaseConfig):
    """An advantage function of your own."""

    type: Literal["custom"] = "custom"
    """Your own function."""

    import_path: ImportPath
    """The function, as `module:function`. The module is a file in the directory where the run starts, or installed."""

    kwargs: dict[str, Any] = Field({})
    """Keyword arguments of the function."""


class OverlongConfig(BaseConfig):
    """DAPO's overlong penalty: lowers the reward linearly over the last tokens before the length limit."""

    max_tokens: Count
    """Length at which an answer loses the whole `penalty`; usually `sampling.max_tokens`."""

    buffer_tokens: Count
    """Number of tokens before `max_tokens` over which the penalty grows from 0."""

    penalty: float = Field(1.0, ge=0)
    """Amount subtracted from the reward at `max_tokens`."""

    @model_validator(mode="after")
    def _check_rules(self) -> OverlongConfig:
        if self.buffer_tokens > self.max_tokens:
            raise_faults([f"buffer_tokens ({self.buffer_tokens}) is above max_tokens ({self.max_tokens})"])
        return self


class LengthPenaltyConfig(BaseConfig):
    """Adds a term for the length of the answer to the reward."""

    kind: Literal["group", "target"]
    """`group` (Kimi k1.5): `weight * (0.5 - (L - shortest) / (longest - shortest))` over the lengths L of the group; an
    answer below `correct_reward` never gains. `target` (L1): `-weight * |L - target_tokens|`."""

    weight: float = Field(ge=0)
    """Factor of the term."""

    target_tokens: Count | None = None
    """Length in tokens that `target` asks for."""

    correct_reward: float = 1.0
    """Least reward of a correct answer, for `group`."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if (self.kind == "target") != (self.target_tokens is not None):
            raise_faults([f"kind = {self.kind!r} {'needs' if self.kind == 'target' else 'takes no'} target_tokens"])
        return self


class NormalizedAdvantageConfig(BaseConfig):
    """Reward minus a baseline, divided by a scale."""

    type: Literal["normalized"] = "normalized"
    """Normalised."""

    baseline: Literal["group", "leave_one_out", "batch", "none"] = "group"
    """Baseline: the mean of the group, of the other rollouts in the group, of the whole batch, or none."""

    scale: Literal["group", "batch", "group_mean", "none"] = "group"
    """Scale: the standard deviation of the rewards in the group, in the whole batch, the mean reward of the group
    (MaxRL; groups without a positive mean teach nothing), or none."""

    rewards: Literal["sum", "each"] = "sum"
    """`sum`: the one reward of the environment, a weighted sum over its reward functions. `each` (GDPO): every reward
    function is centred and scaled by itself, and the sum with the same weights is the advantage."""

    whiten: bool = False
    """Finally normalise the advantages of the whole batch by their mean and standard deviation."""

    overlong: OverlongConfig | None = None
    """Penalty for answers near the length limit. None disables it."""

    length: LengthPenaltyConfig | None = None
    """Term for the length of the answer. None adds none."""

    reward_bias: float = Field(0.0, ge=-1e6, le=1e6)
    """Added to the reward, after the terms for length."""

    reward_scaling: float = Field(1.0, gt=0, le=1e6)
    """Factor of the sum of reward and `reward_bias`."""

    reward_clip: float | None = Field(None, gt=0, le=1e9)
    """Bound of the magnitude of the result. None sets none."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        if self.rewards == "each":
            parts = ("overlong", "length", "reward_bias", "reward_scaling", "reward_clip")
            shaping = [name for name in parts if getattr(self, name) != type(self).model_fields[name].default]
            if shaping:
                yield f"rewards = 'each' has no sum that {' and '.join(shaping)} could change: set rewards = 'sum'"
            if "batch" in (self.baseline, self.scale):
                yield "rewards = 'each' compares in groups: set baseline and scale to 'group', and whiten the batch"
        if self.scale == "group_mean" and self.baseline != "group":
            yield f"scale = 'group_mean' needs baseline = 'group' (got {self.baseline!r})"


AdvantageConfig = Annotated[
    DefaultAdvantageConfig | CustomAdvantageConfig | NormalizedAdvantageConfig, Field(discriminator="type")
]

# The losses of the RL trainer: sections of `trainer.loss`. What they compute is in `prime_rl.trainer.rl`.


class PenaltiesConfig(BaseConfig):
    """A penalty on the KL divergence from the reference model, which `trainer.reference` chooses, a bonus for
    entropy, and an SFT loss on good rollouts."""

    kl_coef: float = Field(0.0, ge=0)
    """Weight of the penalty: `beta` in TRL, `kl_loss_coef` in verl. 0 needs no reference model."""

    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators of a token's divergence. `k1` lowers its advantage; `k2` and `k3` are added to its loss."""

    kl_importance: bool = False
    """Weight the penalty in the loss by the token's importance ratio, so that stale samples do not bias it."""

    kl_in: Literal["loss", "token_reward", "sequence_reward"] = "loss"
    """Where to apply the penalty. `loss`: to the loss, as `kl_estimator` says. `token_reward`: to the advantage of each
    token, by the estimates of this token and those after it. `sequence_reward`: to the advantages of a sequence, by all
    of its estimates. The last two are centred over the batch, unless there is a critic, and use the policy that sampled
    the tokens."""

    kl_target: float | None = Field(None, gt=0)
    """Divergence to hold, in nats per token as in `reference_kl/mean`. After each step, the weight of the penalty grows
    or falls by the factor 1 + `kl_gain` * clip(divergence / `kl_target` - 1, -0.2, 0.2) (Ziegler et al. 2019). None
    keeps `kl_coef`, which otherwise is the first weight."""

    kl_gain: float = Field(0.1, gt=0, le=2)
    """Speed at which `kl_target` changes the weight: 0.1 changes it by at most 2% a step."""

    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the bonus for the policy's entropy. 0 adds none."""

    entropy_estimator: Literal["exact", "sampled"] = "exact"
    """`exact`: the loss of a token falls by its distribution's entropy, computed over the vocabulary in the same slices
    as its log-probability. `sampled`: its advantage rises by -log(probability), which needs no more computation."""

    sft_coef: float = Field(0.0, ge=0)
    """Weight of an SFT loss on the good rollouts: -log(probability) of the tokens whose advantage is above 0. 0 adds
    none."""

    observation_coef: float = Field(0.0, ge=0)
    """Weight of the mean cross-entropy of the tokens that the environment writes in later turns, such as results of
    tools: the policy also learns to predict them (ECHO). 0 adds none."""

    @model_validator(mode="after")
    def _check_reference_kl(self) -> Self:
        if self.kl_importance and self.kl_coef == 0:
            raise_faults(["kl_importance has no effect with kl_coef = 0: set it above 0"])
        if self.kl_importance and self.kl_estimator == "k1":
            raise_faults(["kl_importance has no effect with kl_estimator = 'k1', whose advantages the loss weights"])
        if self.kl_importance and self.kl_in != "loss":
            raise_faults(
                [f"kl_importance has no effect with kl_in = {self.kl_in!r}, whose advantages the loss weights"]
            )
        if self.kl_in != "loss" and self.kl_coef == 0:
            raise_faults([f"kl_in = {self.kl_in!r} has no effect with kl_coef = 0: set it above 0"])
        if self.kl_in != "loss" and self.sft_coef > 0:
            raise_faults(
                [
                    f"kl_in = {self.kl_in!r} lowers the advantages by which sft_coef tells good rollouts: set kl_in to "
                    "'loss', or sft_coef to 0"
                ]
            )
        if self.kl_target is not None and self.kl_coef == 0:
            raise_faults(["kl_target adapts kl_coef, which is 0: set it to the first weight, such as 0.01"])
        return self


class DefaultLossConfig(PenaltiesConfig):
    """A clipped and masked policy gradient on importance ratios."""

    type: Literal["default"] = "default"
    """The default loss."""

    ratio_type: Literal["token", "sequence"] = "token"
    """Importance ratio of each token, or of its whole sequence."""

    token_mask_high: float = Field(8.0, ge=0)
    """Exclude tokens whose ratio is above this."""

    token_mask_low: float = Field(0.125, ge=0)
    """Exclude tokens whose ratio is below this."""

    sequence_clip_high: float = Field(10.0, ge=0)
    """Maximum ratio of a sequence. Larger ones are clipped to it."""

    geo_mask_high: float = Field(10.0, ge=0)
    """Exclude sequences whose geometric mean ratio is above this."""

    geo_mask_low: float = Field(0.1, ge=0)
    """Exclude sequences whose geometric mean ratio is below this."""

    sequence_mask_low: float = Field(0.0, ge=0)
    """Exclude sequences in which any token's ratio is below this."""

    sequence_mask_high: float = Field(100.0, ge=0)
    """Exclude sequences in which any token's ratio is above this."""

    adv_tau: float = Field(1.0, ge=0)
    """Weight of the advantage."""

    teacher_tau: float = Field(0.0, ge=0)
    """Weight of the teacher's log-probabilities."""

    kl_tau: float = Field(0.0, ge=0)
    """Weight of the KL term."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        for mask in ("token_mask", "geo_mask", "sequence_mask"):
            low, high = getattr(self, f"{mask}_low"), getattr(self, f"{mask}_high")
            if low >= high:
                yield f"{mask}_low ({low}) must be below {mask}_high ({high})"
        if self.kl_in != "loss" and self.adv_tau != 1:
            yield (
                f"adv_tau ({self.adv_tau:g}) would scale the KL penalty, which kl_in = {self.kl_in!r} adds to the "
                "advantages: set it to 1, or kl_in to 'loss'"
            )


class CustomLossConfig(BaseConfig):
    """Your own loss function."""

    type: Literal["custom"] = "custom"
    """Your own function."""

    import_path: ImportPath
    """The function, as `module:function`. The module is a file in the directory where the run starts, or installed."""

    kwargs: dict[str, Any] = Field({})
    """Keyword arguments of the function."""


class BaseSurrogateLossConfig(PenaltiesConfig):
    """Keys that the published losses share."""

    average: Literal["token", "sequence", "constant"] = "token"
    """`token`: mean over all tokens of the step. `sequence`: mean over each sequence's tokens, then over sequences.
    `constant`: each sequence's sum divided by `constant_tokens`, then the mean over sequences."""

    constant_tokens: Count = 1
    """Divisor of each sequence's sum with `average = "constant"`."""


class RatioLossConfig(BaseSurrogateLossConfig):
    """Keys of losses whose ratio may be that of several tokens."""

    level: Literal["token", "turn", "sequence"] = "token"
    """Importance ratio of each token, or the geometric mean over those of its turn (one answer of the model), or of its
    sequence."""


class ClipLossConfig(RatioLossConfig):
    """PPO's clipped surrogate on the ratio to the sampling policy: GRPO, Dr. GRPO, DAPO, REINFORCE++."""

    type: Literal["clip"] = "clip"
    """Clipped surrogate."""

    clip_low: Fraction = 0.2
    """Ratios are clipped below 1 minus this."""

    clip_high: float = Field(0.2, ge=0)
    """Ratios are clipped above 1 plus this."""

    dual_clip: float | None = Field(None, gt=1)
    """Maximum ratio for tokens with a negative advantage. None sets no maximum."""


class GSPOLossConfig(RatioLossConfig):
    """GSPO: the clipped surrogate on each sequence's geometric mean ratio."""

    type: Literal["gspo"] = "gspo"
    """Group sequence policy optimization."""

    level: Literal["token", "turn", "sequence"] = "sequence"
    """As in the other losses. `sequence` is GSPO's own."""

    average: Literal["token", "sequence", "constant"] = "sequence"
    """As in the other losses. `sequence` is GSPO's own."""

    clip_low: Fraction = 3e-4
    """Sequence ratios are clipped below 1 minus this."""

    clip_high: float = Field(4e-4, ge=0)
    """Sequence ratios are clipped above 1 plus this."""

    dual_clip: float | None = Field(None, gt=1)
    """Maximum ratio for sequences with a negative advantage. None sets no maximum."""


class SoftLossConfig(RatioLossConfig):
    """SAPO: a sigmoid of the ratio in place of the clip, so that gradients fade instead of ending."""

    type: Literal["soft"] = "soft"
    """Soft gate."""

    tau_positive: float = Field(1.0, gt=0, le=1e6)
    """Steepness of the gate for tokens with a positive advantage."""

    tau_negative: float = Field(1.05, gt=0, le=1e6)
    """Steepness of the gate for the other tokens. A steeper gate closes earlier."""


class MaskedLossConfig(BaseSurrogateLossConfig):
    """The ratio without a clip, and no loss for tokens outside of a trust region: DPPO, M2PO."""

    type: Literal["masked"] = "masked"
    """Masked ratio."""

    measure: Literal["tv", "kl", "top_k_tv", "top_k_kl", "second_moment"] = "tv"
    """`tv` and `kl` (DPPO): total variation or KL divergence between sampling and trained policy, over two events, the
    token and all others; a token beyond `limit` is masked if its loss would move it further away. `top_k_tv` and
    `top_k_kl`: over the `top_k` likeliest tokens of the sampling policy, the token, and all others. `second_moment`
    (M2PO): the tokens with the largest squared log-ratios of the update are masked, until the mean of the others is
    below `limit`."""

    limit: float = Field(0.15, gt=0)
    """Size of the trust region."""

    top_k: int = Field(20, ge=1, lt=MAX_TOP_K)
    """Number of likeliest tokens for `top_k_tv` and `top_k_kl`. The engine reports them with every token."""

    ratio_cap: float | None = Field(None, gt=1)
    """Maximum ratio; tokens above it have no gradient. None sets no maximum."""


TopMeasure = Literal["top_k_tv", "top_k_kl"]


def top_measure_of(config: LossConfig) -> TopMeasure | None:
    """The divergence that a loss computes over the likeliest tokens of the sampling policy; None for other losses."""
    if not isinstance(config, MaskedLossConfig) or config.measure not in ("top_k_tv", "top_k_kl"):
        return None
    return config.measure


class TruncatedLossConfig(RatioLossConfig):
    """REINFORCE with truncated importance weights, so that every token keeps a gradient: CISPO, RLOO, AIPO."""

    type: Literal["truncated"] = "truncated"
    """Truncated importance weights."""

    weight_low: float = Field(0.0, ge=0)
    """Minimum weight. Smaller ones are raised to it."""

    weight_high: float = Field(5.0, gt=0)
    """Maximum weight. Larger ones are truncated to it."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        if self.weight_low >= self.weight_high:
            raise_faults([f"weight_low ({self.weight_low}) must be below weight_high ({self.weight_high})"])
        return self


class RejectionConfig(BaseConfig):
    """Bounds of the weight of stale tokens or sequences: policy at the start of the step / policy that sampled."""

    level: Literal["token", "turn", "sequence"] = "token"
    """Weigh and reject each token, turn, or sequence."""

    action: Literal["mask", "clamp"] = "mask"
    """`mask`: outside of the bounds, leave it out of the loss; it still counts in the average. `clamp`: limit its
    weight to the bounds."""

    measure: Literal["ratio", "k1", "k2", "k3"] = "ratio"
    """What the bounds apply to: the weight itself, or an estimate of the KL divergence from its logarithm x: -x,
    x² / 2, or exp(x) - x - 1."""

    aggregate: Literal["mean", "sum", "max"] = "mean"
    """How a turn or sequence has one value: over its tokens' logarithms for `ratio`, over the estimates otherwise."""

    low: float | None = None
    """Lower bound. None sets none, or 0 for `clamp`."""

    high: float | None = None
    """Upper bound. None sets none."""

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        raise_faults(self._faults())
        return self

    def _faults(self) -> Iterator[str]:
        if self.low is None and self.high is None:
            yield "sets neither low nor high"
        if self.low is not None and self.high is not None and self.low >= self.high:
            yield f"low ({self.low}) must be below high ({self.high})"
        if self.action == "clamp" and self.measure != "ratio":
            yield f"action = 'clamp' limits weights and needs measure = 'ratio' (got {self.measure!r})"
        high, low = 2.0 if self.high is None else self.high, self.low or 0.0
        if self.measure == "ratio" and not (high > 1 > low >= 0):
            yield "measure = 'ratio' needs high above 1, and low from 0 to below 1: an unchanged policy has ratio 1"
        if self.measure in ("k2", "k3") and high <= 0:
            yield f"measure = {self.measure!r} needs high above 0 (got {high:g}): an unchanged policy has 0"


class DecoupledLossConfig(RatioLossConfig):
    """Decoupled PPO: clips around the policy at the start of the step, and reweights to the policy that sampled."""

    type: Literal["decoupled"] = "decoupled"
    """Decoupled PPO."""

    proximal: Literal["recomputed", "loglinear"] = "recomputed"
    """The policy at the start of the step. `recomputed`: by a forward pass, if there are several minibatches.
    `loglinear` (AReaL): its log-probabilities lie between those of the sampling and the trained policy, by the sample's
    age; needs no forward pass."""

    clip_low: Fraction = 0.2
    """Ratios to the policy at the start of the step are clipped below 1 minus this."""

    clip_high: float = Field(0.2, ge=0)
    """Ratios to the policy at the start of the step are clipped above 1 plus this."""

    dual_clip: float | None = Field(None, gt=1)
    """Maximum ratio for tokens with a negative advantage. None sets no maximum."""

    behaviour_weight_cap: float | None = Field(5.0, gt=0)
    """Exclude tokens whose weight (policy at the start of the step / policy that sampled) is above this. None keeps
    all."""

    behaviour_weight_floor: float = Field(0.0, ge=0, le=1)
    """Exclude tokens whose weight is below this."""

    rejection: RejectionConfig | None = None
    """Bounds of weights of turns and sequences, or by a KL divergence. They replace cap and floor."""

    @model_validator(mode="after")
    def _replace_cap_and_floor(self) -> Self:
        if self.rejection is not None:
            derive(self, "rejection replaces it", behaviour_weight_cap=None, behaviour_weight_floor=0.0)
        return self


SurrogateLossConfig = (
    ClipLossConfig | GSPOLossConfig | SoftLossConfig | MaskedLossConfig | TruncatedLossConfig | DecoupledLossConfig
)
LossConfig = Annotated[DefaultLossConfig | CustomLossConfig | SurrogateLossConfig, Field(discriminator="type")]


class ReferenceConfig(BaseConfig):
    """The reference model of `trainer.loss.kl_coef` and of your own loss: the model that the run starts from."""

    source: Literal["auto", "adapter", "copy"] = "auto"
    """The model that computes its log-probabilities. `adapter`: the trained one without its LoRA adapters, which needs
    no memory; also without those that it started with (`lora.path`, `lora.init`). `copy`: a second, frozen model in the
    trainer. `auto`: `adapter` if adapters start without effect, otherwise `copy`."""

    reset_every: Count | None = None
    """Steps after which the reference becomes the policy of that moment. Needs a copy, which checkpoints then hold.
    None keeps the model that the run starts from."""
