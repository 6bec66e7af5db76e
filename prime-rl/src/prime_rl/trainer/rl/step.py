"""Forward and backward over the rows of one step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from prime_rl.trainer.optim.accumulation import accumulated
from prime_rl.trainer.process.data_axis import DataAxis
from prime_rl.trainer.process.parallel_dims import Mesh
from prime_rl.trainer.rl.loss import Loss, LossInputs, LossOutputs, split_inputs
from prime_rl.trainer.rl.metrics import Samples
from prime_rl.trainer.rl.rows import Row, score_row


@dataclass(frozen=True, slots=True)
class StepSize:
    """What all data ranks train on in one step."""

    tokens: int
    trained_tokens: int
    sequences: int
    """Those with a masked-in token."""

    @classmethod
    def of_all_ranks(cls, rows: Sequence[Row], data_axis: DataAxis) -> StepSize:
        """Count the rows of every data rank, without the fillers that keep ranks in step. Collective."""
        real = [row for row in rows if row.trained_tokens]
        own = [
            sum(len(row.input_ids) for row in real),
            sum(row.trained_tokens for row in real),
            sum(sum(row.is_trained) for row in real),
        ]
        return cls(*data_axis.sum_counts(own))

    @classmethod
    def total(cls, parts: Sequence[StepSize]) -> StepSize:
        return cls(*(sum(getattr(part, field.name) for part in parts) for field in dataclasses.fields(cls)))

    def divisor(self, loss: Loss) -> int:
        """What the summed loss is divided by; the same on every rank, however the rows were dealt."""
        return max(1, self.trained_tokens if loss.per_token else self.sequences)


MAX_WHOLE_GRADIENT_BYTES = 2**30
"""Whole gradients up to this size are added up on each rank and reduced once a step. That saves a reduction for every
row but the last (a seventh of a step with two CPU processes and 12.6M parameters), and costs this much memory."""


class ForwardBackward:
    """Accumulates the gradient of a step's loss, and collects what its tokens and sequences showed."""

    def __init__(self, model: nn.Module, loss: Loss, vocab_chunk: int | None, mesh: Mesh) -> None:
        self.model = model
        self.loss = loss
        self.vocab_chunk = vocab_chunk
        self.process = mesh.process
        self.data_axis = mesh.data_axis
        gradient_bytes = 4 * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        self._reduces_once = mesh.process.world_size > 1 and gradient_bytes <= MAX_WHOLE_GRADIENT_BYTES

    def run(self, rows: Sequence[Row], size: StepSize) -> Samples:
        """Leave the gradient of the mean loss in the parameters. Collective."""
        samples = Samples()
        divisor = size.divisor(self.loss)
        for index, row in enumerate(accumulated(self.model, rows, self.process), start=1):
            if self._reduces_once:
                self.model.set_requires_gradient_sync(index == len(rows))
            logprobs, entropy = score_row(self.model, row, self._wanted(row), self.vocab_chunk)
            inputs = LossInputs(
                trainer_logprobs=logprobs,
                inference_logprobs=row.inference_logprobs,
                teacher_logprobs=row.teacher_logprobs,
                advantages=row.advantages,
                loss_mask=row.loss_mask,
                proximal_logprobs=row.proximal_logprobs,
            )
            outputs = self._losses(inputs, row)
            # A row without a trained sequence still takes part in the backward, for that is a collective.
            total = torch.stack([output.loss for output in outputs]).sum() if outputs else logprobs.sum() * 0.0
            # FSDP averages over all processes, and those that share rows have equal gradients.
            (total * (self.data_axis.data_size / divisor)).backward()
            self._collect(samples, inputs, entropy, outputs, size.sequences / divisor)
        return samples

    def with_proximal(self, rows: Sequence[Row]) -> list[Row]:
        """The rows, each with the log-probabilities that the policy gives it now, without dropout. Collective."""
        self.model.eval()
        with torch.no_grad():
            scored = [score_row(self.model, row, self._wanted(row), self.vocab_chunk)[0] for row in rows]
        self.model.train()
        return [dataclasses.replace(row, proximal_logprobs=own) for row, own in zip(rows, scored, strict=True)]

    def _wanted(self, row: Row) -> Tensor:
        return row.loss_mask if self.loss.masked_in_only else torch.ones_like(row.loss_mask)

    def _losses(self, inputs: LossInputs, row: Row) -> list[LossOutputs]:
        sequences = zip(split_inputs(inputs, row.lengths), row.is_trained, strict=True)
        return [self.loss.of_sequence(sequence) for sequence, is_trained in sequences if is_trained]

    def _collect(
        self, samples: Samples, inputs: LossInputs, entropy: Tensor, outputs: Sequence[LossOutputs], share: float
    ) -> None:
        mask = inputs.loss_mask
        samples.add(
            {
                "trainer_probs": inputs.trainer_logprobs.detach()[mask].exp(),
                "inference_probs": inputs.inference_logprobs[mask].exp(),
                "entropy": entropy[mask],
            }
        )
        for output in outputs:
            # Scaled so that the mean over all sequences is the loss of the step.
            samples.add({**output.metrics, "loss": output.loss * share})
