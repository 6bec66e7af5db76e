"""The objectives of preference training: log-probabilities of the answers, and the loss of a pair or of an answer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from prime_rl.configs.data import SFTDataConfig
from prime_rl.configs.dpo import PreferenceLossConfig
from prime_rl.run.process import own_beats
from prime_rl.trainer.model.scoring import LogitsOf, score_tokens, target_logprobs
from prime_rl.trainer.preferences.losses import LOSSES, PairLogprobs, kto, rewards
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.rows import Sequences
from prime_rl.trainer.sft.data.packer import PackedRow, lay_out
from prime_rl.trainer.sft.data.pairs import Labelled
from prime_rl.trainer.sft.data.samples import Sample
from prime_rl.trainer.sft.step import Objective, RowSums, trained_of
from prime_rl.trainer.sft.validation import evaluating, packed
from prime_rl.transport.weights import to_device


class Preferences(Objective):
    """The mean of the loss over pairs, and with an SFT term the mean cross-entropy of the chosen answers' tokens."""

    def __init__(self, config: PreferenceLossConfig, reference: Tensor | None = None) -> None:
        self.config = config
        self.reference = reference
        """Log-probabilities [rows, 2] of chosen and rejected answer of each of the dataset's rows under the starting
        model, on the host. None for a loss that needs none."""

    @property
    def weights(self) -> Sequence[float]:
        return (1.0, self.config.sft_weight) if self.config.sft_weight else (1.0,)

    def sizes(self, row: PackedRow) -> Sequence[int]:
        chosen_tokens = sum(pair.chosen.targets for pair in row.pairs)
        return (len(row.pairs), chosen_tokens)[: len(self.weights)]

    def sums(self, model: PreTrainedModel, row: PackedRow, device: torch.device) -> RowSums:
        logprobs, counts = (each.view(-1, 2) for each in sequence_logprobs(model, row, device))
        margins = to_device(torch.tensor([pair.margin for pair in row.pairs]), device)
        references = self._references(row, device)
        pairs = replace(PairLogprobs(*logprobs.unbind(1), *counts.unbind(1), *references.unbind(1)), margins=margins)
        losses = [LOSSES[self.config.type](pairs, self.config).sum(), -pairs.chosen.sum()]
        chosen, rejected = rewards(pairs, self.config)
        metrics = {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/accuracies": (chosen > rejected).float(),
            "rewards/margins": chosen - rejected,
            "logps/chosen": pairs.chosen.detach(),
            "logps/rejected": pairs.rejected.detach(),
        }
        return RowSums(losses[: len(self.weights)], {name: values.sum() for name, values in metrics.items()})

    def _references(self, row: PackedRow, device: torch.device) -> Tensor:
        if not self.config.needs_reference:
            return torch.zeros(len(row.pairs), 2, device=device)
        assert self.reference is not None, "computed before the first step"
        return to_device(self.reference[[pair.key for pair in row.pairs]], device)


class Unpaired(Objective):
    """KTO: the mean over single answers, good or bad, of a loss that compares each with the KL from the reference.

    The KL is estimated from prompts with answers of other rows, over all rows of a step, before the first of them is
    trained: so the loss does not depend on how rows are divided into micro-batches and among processes. TRL estimates
    it for each micro-batch, over the processes.
    """

    weights = (1.0,)

    def __init__(self, config: PreferenceLossConfig, data: SFTDataConfig, reference: Tensor | None = None) -> None:
        self.config = config
        self.data = data
        self.reference = reference
        """Log-probabilities [2 * rows, 2] of each answer, and of its prompt with the other row's answer, under the
        starting model, on the host."""
        self._kl = torch.zeros(())
        self._counts = (0.0, 0.0)
        """Good and bad answers of the step."""

    def sizes(self, row: PackedRow) -> Sequence[int]:
        return (len(row.labelled),)

    def prepare(self, model: PreTrainedModel, rows: Sequence[PackedRow], mesh: Mesh) -> None:
        answers = [each for row in rows for each in row.labelled]
        total = 0.0
        if self.data.holds == "mismatched labels":
            # Packed anew, and run without gradient: an answer of another row may be longer than the row's own.
            mismatched = [each.mismatched for each in answers if each.mismatched is not None]
            with evaluating(model):
                for _, logprobs in scored(model, mismatched, self.data, mesh, self.data.row_tokens):
                    total += float(logprobs.double().sum())
            total -= float(self._references(answers)[:, 1].double().sum())
        good = sum(each.is_desirable for each in answers)
        of_all = mesh.data_axis.sum([total, good, len(answers) - good], mesh.process.device)
        total, *counts = of_all
        self._counts = counts[0], counts[1]
        # Never below 0, as no KL is: the estimate may be.
        self._kl = torch.tensor(max(total / max(sum(counts), 1), 0.0), device=mesh.process.device)

    def sums(self, model: PreTrainedModel, row: PackedRow, device: torch.device) -> RowSums:
        logprobs, _ = sequence_logprobs(model, row, device)
        is_good = to_device(torch.tensor([each.is_desirable for each in row.labelled], dtype=torch.bool), device)
        ratios = logprobs - to_device(self._references(row.labelled)[:, 0], device)
        losses = kto(ratios, is_good, self._kl, self.config)
        # Means over the good and over the bad answers of the step. A step without either has no such mean.
        shares: dict[str, Tensor] = {}
        for values, name in ((self.config.beta * ratios.detach(), "rewards"), (logprobs.detach(), "logps")):
            for side, members, count in (("chosen", is_good, self._counts[0]), ("rejected", ~is_good, self._counts[1])):
                if count:
                    shares[f"{name}/{side}"] = (values * members).sum() / count
        if all(self._counts):
            shares["rewards/margins"] = shares["rewards/chosen"] - shares["rewards/rejected"]
        kl = {"kl": self._kl * len(row.labelled)} if self.config.type == "kto" else {}
        return RowSums([losses.sum()], kl, shares)

    def _references(self, answers: Sequence[Labelled]) -> Tensor:
        assert self.reference is not None, "computed before the first step"
        return self.reference[[each.key for each in answers]]


def sequence_logprobs(model: PreTrainedModel, row: PackedRow, device: torch.device) -> tuple[Tensor, Tensor]:
    """For each of a row's sequences: the sum of the trained tokens' log-probabilities, and their number. [S]"""
    lengths = [sequence.targets for sample in row.members for sequence in sample.sequences]
    sequences = Sequences.of_lengths(lengths, device)
    trained, targets, input_ids_T = trained_of(row, device)

    def score(hidden_MH: Tensor, logits_of: LogitsOf, targets_M: Tensor) -> Tensor:
        return target_logprobs(model, hidden_MH, targets_M, logits_of)

    positions_1T = torch.from_numpy(row.position_ids)[None]
    logprobs_M = score_tokens(model, input_ids_T[None], positions_1T, score, trained, [targets])
    # A row without pairs keeps its graph: its backward pass takes part in collectives.
    sums_S = sequences.sum(logprobs_M) if lengths else logprobs_M.sum()[None][:0]
    return sums_S, sequences.lengths_S


def scored(
    model: PreTrainedModel, samples: Sequence[Sample], data: SFTDataConfig, mesh: Mesh, row_tokens: int
) -> Iterator[tuple[PackedRow, Tensor]]:
    """Pack samples into rows, and give for each row the log-probabilities [S] of its sequences. A collective call: each
    data rank runs as many rows, because sharded weights are gathered together."""
    axis = mesh.data_axis
    rows = packed(samples, data, row_tokens)
    counts = axis.sum_counts([len(rows) if rank == axis.data_rank else 0 for rank in range(axis.data_size)])
    for row in (*rows, *[lay_out([], row_tokens, data.seq_len)] * (max(counts) - len(rows))):
        own_beats().tick()
        yield row, sequence_logprobs(model, row, mesh.process.device)[0]
