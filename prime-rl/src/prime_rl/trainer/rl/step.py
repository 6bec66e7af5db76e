"""Forward and backward passes over the rows of one optimizer update, and the parity check with the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from prime_rl.configs.distillation import DistillationConfig
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.configs.rollouts.sampling import training_warnings
from prime_rl.configs.trainer import ParityConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.model.blocks import accumulated
from prime_rl.trainer.model.lora import without_adapters
from prime_rl.trainer.process.errors import TrainerError
from prime_rl.trainer.process.mesh import DataAxis, Mesh
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.rl.kept_logprobs import KeptLogprobs
from prime_rl.trainer.rl.loss import Loss, LossInputs, kl_in_rewards, largest_kept_square, top_divergence
from prime_rl.trainer.rl.metrics import MetricValues
from prime_rl.trainer.rl.rows import Row, Scored, score_row, score_whole
from prime_rl.utils.logger import get_logger
from prime_rl.utils.pydantic_config import load_config


@dataclass(frozen=True, slots=True)
class StepSize:
    """Amount of data that all data ranks train on in one update or step."""

    tokens: int
    trained_tokens: int
    sequences: int
    """Number of sequences with at least one masked-in token."""
    observed_tokens: int = 0
    """Number of tokens that environments wrote after the first masked-in token."""

    @classmethod
    def from_rows(cls, rows: Sequence[Row], data_axis: DataAxis) -> StepSize:
        """Count over the rows of all data ranks, excluding filler rows with an empty mask. Collective."""
        real = [row for row in rows if row.trained_tokens]
        own = [
            sum(len(row.input_ids) for row in real),
            sum(row.trained_tokens for row in real),
            sum(len(row.layout.sequences) for row in real),
            sum(len(row.layout.observed_O) for row in real),
        ]
        return cls(*data_axis.sum_counts(own))

    @classmethod
    def total(cls, sizes: Sequence[StepSize]) -> StepSize:
        return cls(*(sum(getattr(size, field.name) for size in sizes) for field in dataclasses.fields(cls)))

    def divisor(self, loss: Loss) -> int:
        """Divisor of the summed loss. The same on every rank, regardless of how rows are distributed."""
        return max(1, self.trained_tokens if loss.per_token else self.sequences)


@dataclass(frozen=True, slots=True)
class Reference:
    """The model that the run starts from, which scores rows for the loss."""

    model: PreTrainedModel
    """A frozen copy, or the trained model, which then computes without its adapters."""
    is_trained: bool

    reset_every: int | None = None
    """Steps after which the copy takes the weights of the trained model. None never does."""

    @torch.no_grad()
    def reset_if_due(self, trained: PreTrainedModel, step: int) -> bool:
        """Take the weights of the trained model after every `reset_every` steps, and return whether this is one."""
        if self.reset_every is None or step % self.reset_every:
            return False
        # Buffers, too: `router_bias_update_rate` moves the biases of routers.
        weights = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            own, new = (each.to_local() if isinstance(each, DTensor) else each for each in (tensor, weights[name]))
            own.copy_(new)  # shard by shard: both models lie on the same mesh, perhaps on other devices
        return True

    @torch.no_grad()
    def logprobs(self, row: Row, targets: Tensor, vocab_chunk: int | None) -> Tensor:
        """Log-probabilities of a row's tokens, float32 [T]. Its routers choose by themselves. Collective."""
        row = dataclasses.replace(row, routed_experts=None)
        with without_adapters(self.model) if self.is_trained else nullcontext():
            return score_row(self.model, row, targets, vocab_chunk)[0]


MAX_WHOLE_GRADIENT_BYTES = 2**30
"""Unsharded gradients up to this size are accumulated on each rank and reduced once per update, which saves a reduction
for every row but the last (a seventh of a step with two CPU processes and 12.6M parameters) but costs memory."""


def trained_rows(model: PreTrainedModel, rows: Sequence[Row], process: Process) -> Iterator[Row]:
    """The rows of an update. Run forward and backward on each before taking the next; the last one's backward pass
    reduces the gradients. Collective."""
    gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    reduces_once = process.world_size > 1 and gradient_bytes <= MAX_WHOLE_GRADIENT_BYTES
    for index, row in enumerate(accumulated(model, rows, process), start=1):
        own_beats().tick()
        if reduces_once:
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(index == len(rows))
        yield row


class ForwardBackward:
    """Accumulates the gradient of an update's loss, and collects metrics per token and per sequence."""

    def __init__(
        self,
        model: PreTrainedModel,
        loss: Loss,
        vocab_chunk: int | None,
        mesh: Mesh,
        kept: KeptLogprobs | None = None,
        reference: Reference | None = None,
        distillation: DistillationConfig | None = None,
    ) -> None:
        self.model = model
        self.reference = reference
        self.distillation = distillation
        self.kept = kept
        self.loss = loss
        self.vocab_chunk = vocab_chunk
        self.process = mesh.process
        self.data_axis = mesh.data_axis

    def run(self, rows: Sequence[Row], size: StepSize, weight: float | None = 1.0) -> MetricValues:
        """Accumulate the gradient of `weight` x the mean loss in the parameters' `grad`, and return the metrics. None
        computes no gradient. Collective."""
        with torch.set_grad_enabled(weight is not None):
            values = self._run(rows, size, weight)
        if weight is None:
            # Without a backward pass, the root's weights stay gathered.
            assert isinstance(self.model, FSDPModule)
            self.model.reshard()
        return values

    def _run(self, rows: Sequence[Row], size: StepSize, weight: float | None) -> MetricValues:
        values = MetricValues()
        divisor = size.divisor(self.loss)
        observation_coef = 0.0 if self.loss.penalties is None else self.loss.penalties.observation_coef
        for row in rows if weight is None else trained_rows(self.model, rows, self.process):
            targets, observed_O = self._targets(row), row.layout.observed_O
            if observation_coef > 0:
                # Nobody sampled these tokens, so they have no temperature. Each is predicted at the one before.
                at_one = row.temperatures.index_fill(0, observed_O - 1, 1.0)
                row, targets = dataclasses.replace(row, temperatures=at_one), torch.cat((targets, observed_O))
            scored = score_whole(self.model, row, targets, self.vocab_chunk, self.loss.trains_entropy, self._beta(row))
            logprobs, entropy = scored.logprobs, scored.entropy
            inputs = LossInputs(
                trainer_logprobs=logprobs,
                inference_logprobs=row.inference_logprobs,
                teacher_logprobs=row.teacher_logprobs,
                advantages=row.advantages,
                loss_mask=row.loss_mask,
                proximal_logprobs=row.proximal_logprobs,
                reference_logprobs=row.reference_logprobs,
                age=row.age,
                entropy=entropy,
                is_dropped=row.is_dropped,
                divergence=self._divergence(row, scored),
            )
            losses = self.loss.row_losses(inputs, row.layout) if row.trained_tokens else None
            # The backward pass is a collective, so rows without a trained sequence take part in it too.
            total = losses.losses_S.sum() if losses is not None else logprobs.sum() * 0.0
            if self.distillation is not None and losses is not None:
                # Its mean is over trained tokens, whatever the loss divides by.
                share = self.distillation.weight * divisor / max(1, size.trained_tokens)
                sums_S = row.layout.sequences.sum(scored.divergence_M)
                total = total + share * sums_S.sum()
                losses = dataclasses.replace(losses, losses_S=losses.losses_S + share * sums_S)
                values.add({"teacher_divergence": sums_S / row.layout.sequences.lengths_S})
            if observation_coef > 0 and losses is not None:
                # Its mean is over the observed tokens, whatever the loss divides by.
                observation_O = -logprobs.index_select(0, observed_O)
                total = total + observation_coef * divisor / max(1, size.observed_tokens) * observation_O.sum()
                values.add({"observation_loss": observation_O})
            if weight is None:
                own_beats().tick()
            else:
                # FSDP averages over all processes, and those that share rows have equal gradients.
                (total * (weight * self.data_axis.data_size / divisor)).backward()
            if losses is not None:
                # Scaled so that the mean over all sequences is the loss of the update.
                values.add({**losses.metrics, "loss": losses.losses_S * (size.sequences / divisor)})
            values.add(_of_trained_tokens(inputs, entropy, row))
            if row.kept_as is not None and self.kept is not None:
                values_3T = torch.stack([row.loss_mask.float(), logprobs.detach().float(), entropy.detach().float()])
                self.kept.add(row.kept_as, row.minibatch, row.layout.lengths, values_3T)
        return values

    def with_proximal(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows with `proximal_logprobs` under the current policy. Collective."""
        with torch.no_grad():
            scored = [self._own_logprobs(row) for row in rows]
        return [dataclasses.replace(row, proximal_logprobs=own) for row, own in zip(rows, scored, strict=True)]

    def with_second_moment(self, rows: Sequence[Row], limit: float) -> list[Row]:
        """Return the rows of an update with `is_dropped`, for a mean squared log-ratio below `limit`. Collective.

        The mean is that of all ranks, so that it does not depend on how samples are packed.
        """
        with torch.no_grad():
            squares = [(self._own_logprobs(row) - row.inference_logprobs).square() for row in rows]
        own = [values[row.layout.trained_M] for values, row in zip(squares, rows, strict=True)]
        gathered = self.data_axis.gather(torch.cat(own).cpu())
        # The others get the cutoff as their share of a sum.
        every = torch.cat(gathered) if gathered is not None else torch.zeros(0)
        cutoff = largest_kept_square(every, limit) if every.numel() else 0.0
        (cutoff,) = self.data_axis.sum([cutoff], self.process.device)
        dropped = [values > cutoff for values in squares]
        return [dataclasses.replace(row, is_dropped=own) for row, own in zip(rows, dropped, strict=True)]

    def with_reference(self, rows: Sequence[Row], *, has_critic: bool = False) -> list[Row]:
        """Return the rows with `reference_logprobs`, and the divergence in their advantages if `kl_in` says so.

        With a critic, these are still what tokens are worth. Collective.
        """
        assert self.reference is not None
        scored = []
        for row in rows:
            own_beats().tick()
            scored.append(self.reference.logprobs(row, self._targets(row), self.vocab_chunk))
        if not self.reference.is_trained:
            # Without a backward pass, the root's weights stay gathered.
            assert isinstance(self.reference.model, FSDPModule)
            self.reference.model.reshard()
        rows = [dataclasses.replace(row, reference_logprobs=own) for row, own in zip(rows, scored, strict=True)]
        is_paid = self.loss.penalties is not None and self.loss.penalties.kl_in != "loss"
        return self._with_kl_in_rewards(rows, is_centred=not has_critic) if is_paid else rows

    def _with_kl_in_rewards(self, rows: Sequence[Row], *, is_centred: bool) -> list[Row]:
        """Lower the advantages by the divergence from the reference, less its mean over the tokens of the batch, which
        is a baseline as the group's mean is for the other rewards. A critic learns its own. Collective."""
        assert self.loss.penalties is not None
        assert self.loss.kl is not None
        paid = []
        for row in rows:
            assert row.reference_logprobs is not None
            paid.append(kl_in_rewards(row.inference_logprobs, row.reference_logprobs, row.layout, self.loss.penalties))
        own = [sum(values.double().sum().item() for values in paid), sum(values.numel() for values in paid)]
        total, tokens = self.data_axis.sum(own, self.process.device)
        baseline, coef = total / max(tokens, 1) if is_centred else 0.0, self.loss.kl.coef
        return [
            dataclasses.replace(
                row, advantages=row.advantages.index_add(0, row.layout.trained_M, values - baseline, alpha=-coef)
            )
            for row, values in zip(rows, paid, strict=True)
        ]

    def _own_logprobs(self, row: Row) -> Tensor:
        own_beats().tick()
        return score_row(self.model, row, self._targets(row), self.vocab_chunk)[0]

    def _beta(self, row: Row) -> float | None:
        """Raises TrainerError: the rows have no likeliest tokens of a teacher."""
        if self.distillation is None:
            return None
        if row.teacher_top is None:
            raise TrainerError(
                "trainer.distillation: the batch has no likeliest tokens of a teacher; the orchestrator sends them "
                "with teacher_model.top_k"
            )
        return self.distillation.beta

    def _divergence(self, row: Row, scored: Scored) -> Tensor | None:
        """Of the policy that sampled from the trained one, over the sampler's likeliest tokens, [T].

        Raises:
            TrainerError: the rows do not have them.
        """
        if self.loss.top_measure is None:
            return None
        count = 0 if row.sampler_top is None else row.sampler_top.ids_MK.shape[1] - 1
        if row.sampler_top is None or scored.of_sampler_PK is None or count < self.loss.top_k:
            raise TrainerError(
                f"trainer.loss.measure = {self.loss.top_measure!r}: the batch has the {count} likeliest tokens of the "
                f"engine at each place, not {self.loss.top_k}: set orchestrator.sampling.top_logprobs"
            )
        trained_M = row.layout.trained_M  # the first targets
        divergence_M = top_divergence(
            row.sampler_top.logprobs_MK, scored.of_sampler_PK[: len(trained_M)], self.loss.top_measure, self.loss.top_k
        )
        return row.inference_logprobs.new_zeros(len(row.input_ids)).index_copy(0, trained_M, divergence_M)

    def _targets(self, row: Row) -> Tensor:
        """Indices of the tokens whose log-probabilities the loss uses."""
        if self.loss.masked_in_only:
            return row.layout.trained_M
        return torch.arange(1, len(row.input_ids), device=row.input_ids.device)


def _of_trained_tokens(inputs: LossInputs, entropy: Tensor, row: Row) -> dict[str, Tensor]:
    trained_M = row.layout.trained_M
    return {
        "trainer_probs": inputs.trainer_logprobs.detach()[trained_M].exp(),
        "inference_probs": inputs.inference_logprobs[trained_M].exp(),
        "entropy": entropy.detach()[trained_M],
    }


# Parity check: compares log-probabilities of trainer and inference engine on the first batch after each start.


LIKELY_CAUSES = (
    "sampling settings of the server that are not in orchestrator.sampling (temperature, penalties); "
    "weights of another version, or a tied head left stale by an update; "
    "another model, tokenizer or chat template on the server; "
    "a coarser dtype or quantization on the server"
)

BOUND, BFLOAT16_BOUND = 0.05, 0.1
"""Default bounds in nats per token. In bfloat16, two implementations that round differently are 0.05 apart: each one
differs from float32 by 0.04, of which 0.02 are due to rounding of the logits alone."""


class ParityGate:
    """Compares log-probabilities of trainer and engine for tokens sampled from the trainer's current version.

    They must be equal up to rounding. Otherwise, importance ratios are wrong from the first step on, and the run would
    learn little or nothing.
    """

    def __init__(
        self,
        config: ParityConfig,
        mesh: Mesh,
        compute_dtype: torch.dtype = torch.float32,
        orchestrator_config: Path | None = None,
        inference_config: Path | None = None,
    ) -> None:
        self.config = config
        self._orchestrator_config = orchestrator_config
        """The file that says how tokens are sampled. None, or no file, if another launch runs the orchestrator."""
        self._inference_config = inference_config
        """The same for the server."""
        self.process = mesh.process
        self.data_axis = mesh.data_axis
        default = BFLOAT16_BOUND if compute_dtype == torch.bfloat16 else BOUND
        self.bound = default if config.max_mean_abs_diff is None else config.max_mean_abs_diff
        self._is_due = config.on_mismatch != "off"

    def check(self, rows: Sequence[Row], forward_backward: ForwardBackward, version: int) -> None:
        """Compare one row per data rank, on the first call only. Collective.

        Raises:
            TrainerError: the mean absolute difference exceeds the bound. Raised on all ranks.
        """
        if not self._is_due:
            return
        self._is_due = False
        row = max(rows, key=lambda row: int(row.on_policy_mask(version).sum()))
        (scored,) = forward_backward.with_proximal([row])
        assert scored.proximal_logprobs is not None
        difference = (scored.proximal_logprobs - row.inference_logprobs)[row.on_policy_mask(version)].abs()
        own = [difference.double().sum().item(), difference.numel()]
        total, tokens = self.data_axis.sum(own, self.process.device)
        if tokens == 0:
            self._log(f"Parity: not checked, because no token of this batch was sampled from version {version}")
            return
        mean = total / tokens
        finding = f"log-probabilities of trainer and inference differ by {mean:.2g} on average over {tokens:.0f} tokens"
        options = self._vllm_options()
        if mean <= self.bound:  # False if the mean is NaN
            self._log(f"Parity: {finding} of version {version}{options}")
            return
        fault = f"version {version}: {finding}{options}, more than parity.max_mean_abs_diff = {self.bound:g}. "
        fault += self._causes()
        if self.config.on_mismatch == "stop":
            raise TrainerError(f'{fault}. To continue anyway, set trainer.parity.on_mismatch = "warn"')
        if self.process.is_main:
            get_logger().warning(fault)

    def _vllm_options(self) -> str:
        """Engine arguments of the run, such as a quantized cache: the difference is what they cost."""
        file = self._inference_config
        options = load_config(InferenceConfig, [file]).vllm if file is not None and file.is_file() else {}
        return f", with inference.vllm = {options}" if options else ""

    def _causes(self) -> str:
        """The settings of the config that explain a difference, or else what may have caused it."""
        file = self._orchestrator_config
        if file is not None and file.is_file():
            sampling = load_config(OrchestratorConfig, [file]).sampling
            if known := list(training_warnings(sampling)):
                return "; ".join(known)
        return f"Likely causes: {LIKELY_CAUSES}"

    def _log(self, line: str) -> None:
        if self.process.is_main:
            get_logger().info(line)
