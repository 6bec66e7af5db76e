"""The training loop of SFT and of preferences."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.trainer import WeightCheckpointConfig
from prime_rl.run.early_stop import EarlyEnd
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.run.process import own_beats
from prime_rl.trainer.checkpoints.manager import CheckpointManager, EvaluationQueue
from prime_rl.trainer.checkpoints.state import TrainState
from prime_rl.trainer.checkpoints.weights import gather_export, write_export
from prime_rl.trainer.process.errors import DivergedError
from prime_rl.trainer.process.host_memory import return_freed_memory
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.process.signals import SignalBox
from prime_rl.trainer.sft.data.packer import PackedRows, micro_batches_per_data_rank
from prime_rl.trainer.sft.reporting import StepReporter, StepStats
from prime_rl.trainer.sft.resume import FINGERPRINT, DataFingerprint
from prime_rl.trainer.sft.step import Objective, has_finite_weights, train_step
from prime_rl.trainer.sft.validation import Validation
from prime_rl.utils.logger import count_of, get_logger

_NAMED_ROWS = 64


@dataclass(slots=True)
class Components:
    """Everything that the training loop needs."""

    state: TrainState
    rows: PackedRows
    objective: Objective
    tokenizer: PreTrainedTokenizerBase
    checkpoints: CheckpointManager | None
    export_dtype: torch.dtype
    validation: Validation | None
    fingerprint: DataFingerprint | None
    """Fingerprint of the data, for checkpoints; None if there are none."""
    evaluations: EvaluationQueue | None = None
    """Exports for the evaluation next to the training; None if there is none."""

    def place_in_data(self) -> dict[str, Any]:
        """The data state that this process saves in a checkpoint."""
        return {**self.rows.state(), FINGERPRINT: None if self.fingerprint is None else self.fingerprint.as_dict()}


class SFTTrainer:
    """Trains on the micro-batches of each step until `max_steps` or a stop signal."""

    def __init__(self, config: SFTConfig, paths: RunPaths, mesh: Mesh, components: Components) -> None:
        self.config = config
        self.paths = paths
        self.mesh = mesh
        self.beats = own_beats()
        self.process = mesh.process
        self.components = components
        self.micro_batches = micro_batches_per_data_rank(config.data, mesh.data_axis)
        # Read once at the start: later reads could differ between processes, because one of them writes.
        self.saved_step = components.state.progress.step
        self.exported_step = self.saved_step if self.saved_step in stable_steps(paths.weights) else None

    def run(self, signals: SignalBox, reporter: StepReporter) -> bool:
        """Train and save. Returns False if a signal stopped the run before its end."""
        state, checkpoints = self.components.state, self.components.checkpoints
        if self.config.val is not None and self.config.val.on_start and state.progress.step == 0:
            self.validate(reporter)
        if self.is_done and self.process.is_main:
            epochs = self.config.num_epochs
            why = "" if epochs is None else f", as num_epochs is {epochs:g}"
            if early := self.early_end:
                get_logger().warning(f"Nothing left to do: the run has ended early: {early}")
            else:
                get_logger().warning(f"Nothing left to do: the run ends after step {self.config.max_steps}{why}")
        requests = signals.take()
        while not (self.is_done or requests.stop):
            stats = self.train_step()
            reporter.record(state.progress, self.components.rows.stream, stats)
            return_freed_memory(state.progress.step)
            self.beats.started()
            if self.validation_is_due:
                self.validate(reporter)
            requests = signals.take()
            if requests.save or (checkpoints is not None and checkpoints.is_due(state.progress.step)):
                reporter.saved(self.save())
            if self.evaluation_is_due:
                reporter.saved(self.export_for_evaluation())
        self.save()
        if self.is_done:
            self.export()
            if self.process.is_main:
                self._record_end()
        return self.is_done

    def train_step(self) -> StepStats:
        """Update the model on the next rows.

        Raises:
            DivergedError: loss or gradient is not finite. The state before the step, which includes the position in the
                data, is saved if its weights are finite.
        """
        state, stream = self.components.state, self.components.rows.stream
        stream.drawn.clear()
        place = self.components.place_in_data()
        self.beats.say(f"step {state.progress.step}: reading rows")
        rows = list(islice(self.components.rows, self.micro_batches))
        self.beats.say(f"step {state.progress.step}: forward and backward")
        try:
            return train_step(state, rows, self.config.optim.max_norm, self.mesh, self.components.objective)
        except DivergedError as error:
            # A checkpoint of broken weights could cause a good one to be deleted.
            if has_finite_weights(state.policy.model, self.process):
                self.save(place)
            raise DivergedError(f"{error}. Rows of this step: {self._names_of_rows()}") from None

    def _names_of_rows(self) -> str:
        """Names of the rows that were read for this step: on data rank 0 those of all ranks. Collective."""
        own, packing = self.components.rows.stream.drawn, self.config.data.pack_function
        of_ranks = self.mesh.data_axis.gather(own)
        drawn = own if of_ranks is None else list(chain(*of_ranks))
        names = drawn[:_NAMED_ROWS]
        more = f" and {len(drawn) - _NAMED_ROWS} more" if len(drawn) > _NAMED_ROWS else ""
        earlier = (
            "" if packing == "cat" else f'{", " if names else ""}samples that waited in pack_function = "{packing}"'
        )
        return ", ".join(names) + more + earlier

    @property
    def is_done(self) -> bool:
        return self.is_at_max_steps or self.early_end is not None

    @property
    def is_at_max_steps(self) -> bool:
        return self.config.max_steps is not None and self.components.state.progress.step >= self.config.max_steps

    @property
    def early_end(self) -> str | None:
        """Why a rule of `[early_stop]` ends the run before `max_steps`. Processes agree, as on the validation loss."""
        return None if self.is_at_max_steps else self.components.state.history.why_to_end(self.config.early_stop)

    def _record_end(self) -> None:
        """Leave a record of an early end for the next launch, and for reports."""
        step, early_end = self.components.state.progress.step, self.early_end
        if early_end is None:
            self.paths.early_end.unlink(missing_ok=True)
            return
        EarlyEnd(step, early_end, self.components.state.history).write(self.paths.early_end)
        get_logger().info(f"The run ends early, after {count_of('step', step)}: {early_end}")

    @property
    def validation_is_due(self) -> bool:
        val = self.config.val
        return val is not None and (self.is_done or self.components.state.progress.step % val.interval == 0)

    @property
    def evaluation_is_due(self) -> bool:
        """Whether an evaluation waits for weights that no checkpoint exports. Collective."""
        step, evaluations = self.components.state.progress.step, self.components.evaluations
        return evaluations is not None and step != self.exported_step and not self.is_done and evaluations.is_due(step)

    def validate(self, reporter: StepReporter) -> None:
        """Compute the validation loss. Save the model if `ckpt.keep_best` is set and it is the best so far."""
        checkpoints, step = self.components.checkpoints, self.components.state.progress.step
        self.beats.say(f"validating after step {step}")
        assert self.components.validation is not None, "the config has [val]"
        stats = self.components.validation.run(self.components.state.policy.model)
        reporter.validated(step, stats)
        self.components.state.history.evaluated(step, stats.loss)
        if checkpoints is not None and step > 0 and checkpoints.is_best(stats.loss):
            reporter.saved(self.save())
            checkpoints.mark_best(step, stats.loss)

    def save(self, place: dict[str, Any] | None = None) -> float:
        """Write the checkpoint and weights of this step unless they exist. Returns the seconds it took.

        `place` is the position in the data, if it is not the current one.
        """
        checkpoints, step = self.components.checkpoints, self.components.state.progress.step
        if checkpoints is None or step == self.saved_step:
            return 0.0
        self.beats.say(f"saving the checkpoint of step {step}")
        started_s = time.perf_counter()
        checkpoints.save(self.components.state, self.components.place_in_data() if place is None else place)
        checkpoints.export(self.components.state, self.components.tokenizer, self.components.export_dtype)
        self.saved_step = self.exported_step = step
        elapsed_s = time.perf_counter() - started_s
        if self.process.is_main:
            done = "Copied the state for" if checkpoints.config.async_save else "Saved"
            get_logger().info(f"{done} {self.paths.checkpoint(step)} in {elapsed_s:.1f}s")
        return elapsed_s

    def export_for_evaluation(self) -> float:
        """Write weights that are deleted once they are evaluated. Returns the seconds it took."""
        started_s = time.perf_counter()
        self._export(is_kept=False)
        return time.perf_counter() - started_s

    def export(self) -> None:
        """Write the weights of a finished run unless `save` has. A benchmark writes none."""
        if self.config.bench is None and self.components.state.progress.step != self.exported_step:
            self._export(is_kept=True)

    def _export(self, is_kept: bool) -> None:
        options = WeightCheckpointConfig() if self.config.ckpt is None else self.config.ckpt.weights
        if options is None:
            return
        step = self.components.state.progress.step
        self.beats.say(f"exporting the weights of step {step}")
        model, tokenizer = self.components.state.policy.model, self.components.tokenizer
        export = gather_export(model, options, self.components.export_dtype)
        if self.process.is_main:
            marker = None if is_kept else self.paths.only_for_evaluation(step).name
            write_export(export, model, tokenizer, self.paths.weight(step), options, marker)
