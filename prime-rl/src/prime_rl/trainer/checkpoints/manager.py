"""Saves and loads checkpoints: everything that a run needs to continue exactly where it stopped."""

from __future__ import annotations

import copy
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.trainer import CheckpointConfig
from prime_rl.run.checkpoints import DEFAULT_KEPT, SavedSteps, kept_steps
from prime_rl.run.early_stop import History
from prime_rl.run.evaluations import EvaluatedSteps
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.storage.uploader import Hold
from prime_rl.trainer.checkpoints.files import (
    BackgroundJobs,
    gathered_contents,
    random_state,
    rank_file,
    set_random_state,
    small_files_of_rank,
    together,
    write_object,
)
from prime_rl.trainer.checkpoints.state import Progress, TrainState, check_models, load_rank
from prime_rl.trainer.checkpoints.weights import gather_export, write_export
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.mesh import DataAxis
from prime_rl.trainer.process.world import Process
from prime_rl.utils.contents import find_damage, record_contents
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.files import begin_directory, complete_directory, remove_directory, replacing_file, scratch_of
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import BlockingAsyncStager

# Which checkpoints and exports stay on disk: by age, by validation loss, and until they are evaluated.


@dataclass(frozen=True, slots=True)
class Best:
    """The step with the lowest validation loss."""

    step: int
    val_loss: float

    @classmethod
    def read(cls, path: Path) -> Best | None:
        """Read the record at `path`. None if the file does not exist.

        Raises:
            CheckpointError: the record is damaged.
        """
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): delete it, and the run chooses the best step again from the next "
                "validation on"
            ) from error

    def write(self, path: Path) -> None:
        with replacing_file(path) as scratch:
            scratch.write_text(json.dumps(asdict(self)) + "\n")


class Retention:
    """Deletes `step_<n>` directories that neither `keep_last` nor `keep_interval` keeps.

    Without either, it keeps the newest `default_kept`; None keeps all.

    If a run resumes from an earlier step, later ones belong to an abandoned continuation and are left alone.
    With `hold`, steps that are not on S3 yet stay too.
    """

    def __init__(
        self, config: CheckpointConfig, parent: Path, default_kept: int | None, hold: Hold | None = None
    ) -> None:
        has_rule = config.keep_last is not None or config.keep_interval is not None
        self.keep_last = config.keep_last if has_rule else default_kept
        self.keep_interval = config.keep_interval
        self.parent = parent
        self.hold = hold
        self.protected: set[int] = set()
        """Steps that are kept regardless of the rules."""
        self.left_to_others: Callable[[int], bool] = lambda step: False
        """Whether somebody else deletes a step that the rules no longer keep."""
        resume_step = config.resume_step
        self.steps: set[int] = set()
        if resume_step is not None:
            self.steps = {step for step in stable_steps(parent) if resume_step < 0 or step <= resume_step}

    def keep(self, step: int) -> None:
        """Add `step`, and delete the steps that the rules no longer keep."""
        self.steps.add(step)
        self.prune()

    def prune(self) -> None:
        """Delete the steps that the rules no longer keep."""
        kept = kept_steps(self.steps, self.keep_last, self.keep_interval)
        old = {self.parent / f"step_{each}": each for each in sorted(self.steps - kept - self.protected)}
        for directory in list(old) if self.hold is None else self.hold.released(list(old)):
            try:
                if not self.left_to_others(old[directory]):
                    remove_directory(directory)
            except OSError as error:
                get_logger().warning(f"could not delete an old checkpoint: {error}")
            self.steps.discard(old[directory])


@dataclass(frozen=True, slots=True)
class EvaluationQueue:
    """The exports that wait for an evaluation."""

    paths: RunPaths
    process: Process
    interval: int

    def is_due(self, step: int) -> bool:
        """Whether somebody waits for the weights after `step` updates. The same on all processes. Collective."""
        if step % self.interval != 0:
            return False
        # Read once: an evaluation may end at any time.
        found = [self.process.is_main and not self.paths.evaluation_lost.is_file()]
        if self.process.world_size > 1:
            dist.broadcast_object_list(found, src=0)
        return found[0]

    def leave(self, step: int) -> bool:
        """Let the evaluator delete an export. False if it waits for none or has evaluated it: then delete it here."""
        is_waited_for = step % self.interval == 0 and not self.paths.evaluation_lost.is_file()
        return is_waited_for and EvaluatedSteps(self.paths).leave(step)


class CheckpointManager:
    """Saves, finds, loads and deletes the checkpoints and weight exports of one run.

    All methods are collective. A checkpoint is `OUT/checkpoints/step_<n>/trainer`, and next to it `configs` with
    `run_configs`, TOML texts by component. The step's directory appears whole and marked `STABLE`, or not at all.

    With `ckpt.async_save` a save copies the state and returns, and a thread writes the copy. The next save waits for
    that thread. Call `wait` before the run ends.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        paths: RunPaths,
        process: Process,
        data_axis: DataAxis,
        run_configs: Mapping[str, str] | None = None,
        evaluations: EvaluationQueue | None = None,
        best_elsewhere: Callable[[], int | None] | None = None,
    ) -> None:
        """`best_elsewhere` reads the best step, if another process chooses it."""
        self.config = config
        self._run_configs = run_configs or {}
        self.paths = paths
        self.process = process
        self.data_axis = data_axis
        self._jobs = BackgroundJobs() if config.async_save else None
        self._stager: BlockingAsyncStager | None = None
        # The thread's collectives must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if config.async_save else None
        hold = Hold(paths)
        self._saved = Retention(config, paths.checkpoints, DEFAULT_KEPT, hold)
        self._exported = Retention(config, paths.weights, None, hold)
        if evaluations is not None:
            self._exported.left_to_others = evaluations.leave
            self._exported.steps -= {step for step in self._exported.steps if paths.only_for_evaluation(step).is_file()}
        self._best_elsewhere = best_elsewhere
        is_chosen_here = config.keep_best and best_elsewhere is None
        self._best = self._saved_best() if is_chosen_here and config.resume_step is not None else None
        self._protect_best()

    def resume_step(self) -> int | None:
        """The step to resume from, or None to start from step 0.

        Raises:
            CheckpointError: there is nothing to resume, or the step that the config names is not there or damaged.
        """
        try:
            return SavedSteps.of(self.paths).choose(self.config.resume_step).step
        except RunDirError as error:
            raise CheckpointError(str(error)) from error

    def is_due(self, step: int) -> bool:
        """Whether `ckpt.interval` asks for a checkpoint after `step` optimizer steps."""
        return self.config.interval is not None and step > 0 and step % self.config.interval == 0

    def save(self, state: TrainState, data_position: dict[str, Any]) -> None:
        """Write the checkpoint of `state.progress.step`; `data_position` is that of its data rank.

        Raises:
            CheckpointError: it could not be written, or the one before it could not be written in the background.
        """
        self.wait()
        step = state.progress.step
        shared = state.tensors(state.copies)
        own = {
            **state.own_part(),
            "data": data_position,
            "data_rank": self.data_axis.data_rank,
            "data_size": self.data_axis.data_size,
            "random": random_state(self.process.device),
            "world_size": self.process.world_size,
        }
        if self._jobs is not None:
            shared, own = self._staged(shared), copy.deepcopy(own)
        self._do(lambda: self._write(step, shared, own))

    def wait(self) -> None:
        """Return when everything is on disk.

        Raises:
            CheckpointError: something could not be written.
        """
        if self._jobs is not None:
            self._jobs.wait()

    def load(self, state: TrainState, step: int) -> list[dict[str, Any]]:
        """Fill `state` from the checkpoint of `step`, and return the data position of this process's data rank.

        If the checkpoint was saved with another number of processes, weights and optimizers are resharded, and
        processes that were not there before keep their random state. If it was saved with another number of data ranks,
        all their positions are returned, in order. With `ckpt.skip_dataloader` none is.

        Raises:
            CheckpointError: the checkpoint lacks a file, or holds other models than `state`.
        """
        # Imports torch's checkpoint reader, which only a resumed run needs.
        from prime_rl.trainer.checkpoints.sharded import read_sharded

        directory = self.paths.trainer_checkpoint(step)
        self._check_contents(step)
        own = self._load_own(directory)
        check_models(own, state, directory)
        # A copy that the checkpoint lacks has not been made yet. The others are read in place.
        saved = state.tensors(role for role in state.copies if role in own.get("copies", ()))
        read_sharded(saved["policy"] if own["is_policy_alone"] else saved, directory)
        for role, trained in state.trained.items():
            schedule = None if self.config.skip_scheduler else own["schedulers"][role]
            trained.restore(saved[role], schedule)
        state.adapted = dict(own.get("adapted", {}))
        if not self.config.skip_progress:
            state.progress = Progress(**own["progress"])
            state.history = History.of(own.get("history", {}))
        rank = self.process.rank // state.tp * own.get("tp", 1)
        if rank < own["world_size"]:
            # Others keep their own. With another process's, both would drop the same activations from here on.
            drawing = own if rank == self.process.rank else load_rank(directory, rank)
            set_random_state(drawing["random"], self.process.device)
        return [] if self.config.skip_dataloader else self._positions(directory, own)

    def is_best(self, val_loss: float) -> bool:
        """Whether `ckpt.keep_best` asks for a checkpoint of a step with this validation loss. A NaN is never best."""
        return self.config.keep_best and val_loss < (math.inf if self._best is None else self._best.val_loss)

    def mark_best(self, step: int, val_loss: float) -> None:
        """Record that the saved `step` is the best, and keep its checkpoint until another is better."""
        best = self._best = Best(step, val_loss)

        def note() -> None:
            self._protect_best()
            with together(self.process, self._group, self.paths.root):
                if self.process.is_main:
                    best.write(self.paths.best_checkpoint)
            if self.process.is_main:
                # The step that was the best until now: no later save may come.
                self._saved.prune()
                self._exported.prune()

        self._do(note)

    def saved_data(self, step: int) -> dict[str, Any]:
        """The data position that a process saved, whatever `ckpt` says about using it.

        Raises:
            CheckpointError: a file of the checkpoint is missing.
        """
        return self._load_own(self.paths.trainer_checkpoint(step))["data"]

    def export(self, state: TrainState, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
        """Write the policy, with its critic, to `OUT/weights/step_<n>`, unless `ckpt.weights` is off."""
        options, step = self.config.weights, state.progress.step
        if options is None:
            return
        export = gather_export(state.policy.model, options, dtype, state.models.get("critic"))

        def write() -> None:
            if self.process.is_main:
                write_export(export, state.policy.model, tokenizer, self.paths.weight(step), options)
                self._keep(self._exported, step)

        self._do(write)

    def _keep(self, retention: Retention, step: int) -> None:
        if self._best_elsewhere is not None and self.config.keep_best:
            # The newest step is evaluated after this, and before the next one is saved.
            best = self._best_elsewhere()
            retention.protected = {step} if best is None else {step, best}
        retention.keep(step)

    def _do(self, job: Callable[[], None]) -> None:
        if self._jobs is not None:
            self._jobs.submit(job)
        else:
            job()

    def _staged(self, shared: dict[str, Any]) -> dict[str, Any]:
        """A copy in host memory that is reused for each save: allocating pages takes longer than filling them."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if self._stager is None:
            # By itself the stager reuses memory only if it can be pinned.
            self._stager = BlockingAsyncStager(cache_staged_state_dict=self.process.device.type == "cuda")
        staged = self._stager.stage(shared)
        self._stager.cache_staged_state_dict, self._stager.state_dict_cache = True, staged
        return staged

    def _write(self, step: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
        # Imports torch's checkpoint writer, which takes a while and only a save needs.
        from prime_rl.trainer.checkpoints.sharded import save_sharded

        started_s = time.perf_counter()
        target = self.paths.checkpoint(step)
        scratch = scratch_of(target)
        directory = scratch / self.paths.trainer_checkpoint(step).name
        try:
            with together(self.process, self._group, self.paths.root):
                if self.process.is_main:
                    begin_directory(target)
            with together(self.process, self._group, self.paths.root):
                shards = save_sharded(shared, directory, self._group)
                write_object(own, rank_file(directory, self.process.rank))
                if self.process.is_main:
                    self._write_run_configs(step, scratch)
                contents = record_contents(scratch, small_files_of_rank(scratch, directory, self.process.rank))
                contents |= {path.relative_to(scratch).as_posix(): record for path, record in shards.items()}
            contents = gathered_contents(contents, self.process, self._group)
            with together(self.process, self._group, self.paths.root):
                if self.process.is_main:
                    complete_directory(target, contents)
        except CheckpointError:
            if self.process.is_main:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        if self.process.is_main:
            self._keep(self._saved, step)
            if self._jobs is not None:
                get_logger().info(f"Wrote {target} in the background in {time.perf_counter() - started_s:.1f}s")

    def _write_run_configs(self, step: int, scratch: Path) -> None:
        for component, text in self._run_configs.items():
            file = scratch / self.paths.saved_config(step, component).relative_to(self.paths.checkpoint(step))
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")

    def _check_contents(self, step: int) -> None:
        """Compare the files of a checkpoint with the hashes in its marker. The processes divide the files."""
        with together(self.process, self._group, self.paths.root):
            share = slice(self.process.rank, None, self.process.world_size)
            if fault := find_damage(self.paths.checkpoint(step), share):
                raise CheckpointError(f"{fault}; {SavedSteps.of(self.paths).advice_for_damage(step)}")

    def _load_own(self, directory: Path) -> dict[str, Any]:
        """The file that this process saved. With more processes than then, some read the file of another."""
        first = load_rank(directory, 0)
        rank = self.process.rank % first["world_size"]
        return first if rank == 0 else load_rank(directory, rank)

    def _positions(self, directory: Path, own: dict[str, Any]) -> list[dict[str, Any]]:
        axis = self.data_axis
        if (own["data_rank"], own["data_size"]) == (axis.data_rank, axis.data_size):
            return [own["data"]]
        saved = [load_rank(directory, rank) for rank in range(own["world_size"])]
        by_data_rank = {each["data_rank"]: each["data"] for each in saved}
        wanted = [axis.data_rank] if own["data_size"] == axis.data_size else range(own["data_size"])
        return [by_data_rank[data_rank] for data_rank in wanted]

    def _saved_best(self) -> Best | None:
        """The best step of the resumed run, unless it comes after the step to resume from."""
        best = Best.read(self.paths.best_checkpoint)
        return best if best is not None and best.step in self._saved.steps else None

    def _protect_best(self) -> None:
        for retention in (self._saved, self._exported):
            retention.protected = set() if self._best is None else {self._best.step}
