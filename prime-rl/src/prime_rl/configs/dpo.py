"""Preference training: root of `dpo`, and what it shares with reward models."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.utils.pydantic_config import BaseConfig, raise_faults

PreferenceLoss = Literal[
    "sigmoid",
    "hinge",
    "ipo",
    "robust",
    "simpo",
    "cpo",
    "orpo",
    "sigmoid_norm",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "nca_pair",
    "bco_pair",
    "exo_pair",
    "discopop",
    "kto",
    "apo_zero_unpaired",
]
UNPAIRED: tuple[PreferenceLoss, ...] = ("kto", "apo_zero_unpaired")
"""Losses of single answers, each with a label. Pairs are read as two answers."""
WITHOUT_REFERENCE: tuple[PreferenceLoss, ...] = ("simpo", "cpo", "orpo")
"""Losses that compare the two answers alone, not with the starting model."""
_SMOOTHED: tuple[PreferenceLoss, ...] = ("sigmoid", "robust", "simpo", "cpo", "exo_pair")


class PreferenceLossConfig(BaseConfig):
    """The loss of a pair, or of an answer with a label. Names are TRL's."""

    type: PreferenceLoss = "sigmoid"
    """`sigmoid` is DPO's own loss; `hinge` is SLiC's, `ipo` bounds the margin, `robust` expects flipped pairs. `simpo`,
    `cpo` and `orpo` need no reference. `kto` and `apo_zero_unpaired` train on answers that are good or bad by
    themselves (`label`), without pairs. docs/preferences.md has all formulas."""

    beta: float = Field(0.1, gt=0, le=1000)
    """Strength of the comparison: with a reference, a larger value keeps the model closer to it. SimPO's paper takes 2,
    IPO's tau is this too. In `orpo` it is the weight of the odds ratio."""

    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Share of pairs that are expected to be flipped, for `sigmoid`, `robust`, `simpo`, `cpo` and `exo_pair`, which
    needs one above 0."""

    simpo_gamma: float = Field(0.5, ge=0, le=1000)
    """gamma of `simpo`: the margin that the rewards of both answers should have."""

    score_margin: float = Field(0.0, ge=0, le=1000)
    """For `sigmoid`: the rewards of a pair should differ by this times score_chosen - score_rejected, as in
    UltraFeedback (ODPO's offset). 0 gives none."""

    rpo_alpha: float | None = Field(None, ge=0, le=1000)
    """Weight of an SFT term: the mean cross-entropy of the chosen answers' tokens. 0 has none. None takes 1 for `cpo`
    and `orpo`, which have the term in their papers, and 0 for the others."""

    desirable_weight: float = Field(1.0, ge=0, le=1000)
    """Weight of the good answers' losses, for `kto` and `apo_zero_unpaired`. KTO's authors advise weights with which
    the good answers of the data count 1 to 4/3 times as much as the bad ones; `--preflight` tells such weights."""

    undesirable_weight: float = Field(1.0, ge=0, le=1000)
    """Weight of the bad answers' losses, for `kto` and `apo_zero_unpaired`."""

    @property
    def is_unpaired(self) -> bool:
        return self.type in UNPAIRED

    @property
    def needs_reference(self) -> bool:
        return self.type not in WITHOUT_REFERENCE

    @property
    def sft_weight(self) -> float:
        """Weight of the SFT term; 0 without one."""
        if self.rpo_alpha is not None:
            return self.rpo_alpha
        return 1.0 if self.type in ("cpo", "orpo") else 0.0

    @model_validator(mode="after")
    def _check_keys(self) -> Self:
        raise_faults(list(self._faults()))
        return self

    def _faults(self) -> Iterator[str]:
        if self.label_smoothing and self.type not in _SMOOTHED:
            yield f"label_smoothing ({self.label_smoothing:g}) needs type {', '.join(_SMOOTHED)} (got {self.type!r})"
        if self.type == "exo_pair" and self.label_smoothing == 0:
            yield "type = 'exo_pair' needs a label_smoothing above 0, such as 0.001: its loss has the logarithm of it"
        if "simpo_gamma" in self.model_fields_set and self.type != "simpo" and self.simpo_gamma != 0.5:
            yield f"simpo_gamma ({self.simpo_gamma:g}) needs type = 'simpo' (got {self.type!r})"
        if self.score_margin and self.type != "sigmoid":
            yield f"score_margin ({self.score_margin:g}) needs type = 'sigmoid' (got {self.type!r})"
        if not self.is_unpaired:
            for key in ("desirable_weight", "undesirable_weight"):
                if (value := getattr(self, key)) != 1:
                    yield f"{key} ({value:g}) needs type {' or '.join(UNPAIRED)} (got {self.type!r})"
        elif self.rpo_alpha:
            yield f"rpo_alpha ({self.rpo_alpha:g}) needs pairs, and type = {self.type!r} has single answers"
        elif self.desirable_weight == self.undesirable_weight == 0:
            yield "desirable_weight and undesirable_weight are both 0: there is no loss"


class FrozenReferenceConfig(BaseConfig):
    """The reference of losses that compare with one."""

    name: str | None = None
    """Another model as the reference: a folder or a hub id with the same tokenizer. It is loaded before the trained
    model, computes its log-probabilities of all answers, and is freed. None takes the model that the run starts
    from."""


class PreferenceConfig(SFTConfig):
    """Training on answers of which some are better."""

    @model_validator(mode="after")
    def _check_preferences(self) -> Self:
        raise_faults(list(self._preference_faults()))
        for data in (self.data, *(() if self.val is None else (self.val.data,))):
            if isinstance(data, SFTDataConfig):
                self._hold(data)
        return self

    @abstractmethod
    def _hold(self, data: SFTDataConfig) -> None:
        """Tell `data` what its rows are."""

    def _preference_faults(self) -> Iterator[str]:
        data = self.data
        if self.distillation is not None:
            yield f"[distillation] is for `sft`, and `{self.component}` has a loss of its own: remove it"
        if not isinstance(data, SFTDataConfig):
            yield "preferences need a dataset (data.type = 'sft')"
            return
        if data.pack_function == "cat":
            yield "data.pack_function = 'cat' cuts samples, and an answer is compared as a whole: use best_fit or stack"
        for section in (data, *(() if self.val is None else (self.val.data,))):
            if section.overlong == "split":
                yield f"{section.section}.overlong = 'split' divides an answer: use truncate, drop or error"


class DPOConfig(PreferenceConfig):
    """Preference training. Read by `dpo`. It has every key of `SFTConfig`, with the same meaning, and those below. An
    answer, with its prompt, has at most `data.seq_len` tokens, and a packed row of pairs has room for two of that
    length."""

    component: ClassVar[str] = "dpo"

    loss: PreferenceLossConfig = PreferenceLossConfig()  # type: ignore[assignment]  # in place of SFT's
    """The loss of a pair, or of an answer with a label."""

    reference: FrozenReferenceConfig = FrozenReferenceConfig()
    """The reference. Its log-probabilities are computed once, before the first step."""

    def _hold(self, data: SFTDataConfig) -> None:
        if self.loss.is_unpaired:
            data.hold_labels(mismatched=self.loss.type == "kto")
        else:
            data.hold_pairs(score_margin=self.loss.score_margin)

    def _preference_faults(self) -> Iterator[str]:
        yield from super()._preference_faults()
        if self.reference.name is not None and not self.loss.needs_reference:
            yield f"reference.name is set, and loss.type = {self.loss.type!r} has no reference: remove it"
        data = self.data
        if isinstance(data, SFTDataConfig) and data.streaming and self.loss.needs_reference:
            without = ", ".join(WITHOUT_REFERENCE)
            yield (
                f"data.streaming = true does not tell all rows at the start, and loss.type = {self.loss.type!r} needs "
                f"the reference's log-probabilities of each: set it to false, or loss.type to {without}"
            )


__all__ = ["DPOConfig", "FrozenReferenceConfig", "PreferenceConfig", "PreferenceLossConfig"]
