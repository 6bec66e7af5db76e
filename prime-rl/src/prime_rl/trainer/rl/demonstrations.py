"""Demonstrations that the policy imitates beside its rollouts (`[trainer.demonstrations]`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prime_rl.configs.demonstrations import DemonstrationsConfig
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.sft.data.examination import check_first_rows
from prime_rl.trainer.sft.data.packer import PackedRows, micro_batches_per_data_rank, setup_rows
from prime_rl.trainer.sft.data.places import Place
from prime_rl.trainer.sft.resume import FINGERPRINT, IdentifiedData, identify_data, restore_position
from prime_rl.trainer.sft.step import CrossEntropy, forward_backward, sizes_of


class Demonstrations:
    """Rows of SFT, and the gradient that they add to an update: that of the mean cross-entropy over their trained
    tokens on all data ranks, times the step's weight."""

    def __init__(self, config: DemonstrationsConfig, identified: IdentifiedData, rows: PackedRows, mesh: Mesh) -> None:
        self.config = config
        self.identified = identified
        self.rows = rows
        self.mesh = mesh
        self.micro_batches = micro_batches_per_data_rank(config.data, mesh.data_axis)
        self._losses: list[float] = []
        self._trained_tokens = 0

    def accumulate(self, model: PreTrainedModel, step: int) -> None:
        """Add to the parameters' `grad`. A weight of 0 reads no rows. Collective."""
        weight = self.config.weight_at(step)
        if weight == 0:
            return
        objective = CrossEntropy(self.config.loss, weight)
        rows = list(islice(self.rows, self.micro_batches))
        device, axis = self.mesh.process.device, self.mesh.data_axis
        sizes = [int(size) for size in axis.sum(sizes_of(rows, objective), device)]
        own = forward_backward(model, rows, objective, sizes, self.mesh)
        (loss,) = axis.sum([own["loss"]], device)
        self._losses.append(loss / weight)
        self._trained_tokens += sizes[0]

    def metrics(self, step: int | None) -> dict[str, float]:
        """Metrics of the updates since the last call, those of `step`. None: the step does not train the policy."""
        found: dict[str, float] = {"demonstrations/weight": 0.0 if step is None else self.config.weight_at(step)}
        if self._losses:
            found["demonstrations/loss"] = sum(self._losses) / len(self._losses)
            found["demonstrations/tokens"] = self._trained_tokens
            found["demonstrations/epoch"] = self.rows.stream.epoch
        self._losses, self._trained_tokens = [], 0
        return found

    def place(self) -> dict[str, Any]:
        """The position in the data, for a checkpoint."""
        assert self.identified.fingerprint is not None, "there are checkpoints"
        return {**self.rows.state(), FINGERPRINT: self.identified.fingerprint.as_dict()}

    def restore(self, places: Sequence[Place]) -> dict[str, Any]:
        """Continue from the saved position, which a checkpoint of a run without demonstrations lacks. Returns facts for
        the receipt."""
        place = restore_position(self.rows, [each for each in places if FINGERPRINT in each])
        return {**self.rows.cursor(), "place": place, "verified": self.identified.verified}


def setup_demonstrations(
    config: DemonstrationsConfig,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    checkpoints: CheckpointManager | None,
    resume_step: int | None,
    embeddings: int,
) -> Demonstrations:
    """Open the rows and inspect the first ones.

    Raises:
        DataError: there is no such dataset, or it cannot be trained on.
        ResumeRefused: the checkpoint was trained on other rows.
    """
    identified = identify_data(config.data, tokenizer, checkpoints, resume_step)
    rows = setup_rows(identified.config, tokenizer, embeddings, mesh.data_axis)
    check_first_rows(rows, tokenizer, mesh.process, show=False)
    return Demonstrations(config, identified, rows, mesh)
