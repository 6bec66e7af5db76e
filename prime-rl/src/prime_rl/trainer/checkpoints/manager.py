"""Checkpoints: everything that a run needs to go on exactly where it was."""

from __future__ import annotations

import copy
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import PreTrainedTokenizerBase

from prime_rl.configs.trainer import CheckpointConfig
from prime_rl.run.paths import RunPaths, stable_steps
from prime_rl.trainer.checkpoints.files import (
    BackgroundJobs,
    load_object,
    random_state,
    rank_file,
    set_random_state,
    together,
    write_object,
)
from prime_rl.trainer.checkpoints.frozen import check_frozen, identity_of_frozen, without_frozen
from prime_rl.trainer.checkpoints.retention import Best, Retention
from prime_rl.trainer.checkpoints.weights import gather_export, write_export
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.world import World
from prime_rl.utils.files import begin_directory, complete_directory, scratch_of
from prime_rl.utils.logger import get_logger

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import BlockingAsyncStager


@dataclass(slots=True)
class Progress:
    """What a resumed trainer needs to know besides weights, optimizer, schedule and data position."""

    step: int = 0
    """Optimizer steps done; also the version of the policy."""
    tokens: int = 0
    samples: int = 0

    def advance(self, tokens: int, samples: int) -> None:
        """Count one optimizer step over the tokens and samples of all processes."""
        self.step += 1
        self.tokens += tokens
        self.samples += samples


@dataclass(slots=True)
class TrainState:
    """What a checkpoint holds for the run as a whole. Each process adds its own data position and random state."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler
    progress: Progress


class CheckpointManager:
    """Saves, finds, loads and thins out the checkpoints and weight exports of one run.

    Every method is a collective call. A checkpoint is `OUT/checkpoints/step_<n>/trainer`; the step's directory
    appears whole, marked `STABLE`, or not at all. With `ckpt.async_save` a save copies the state and returns; a
    thread writes it. The next save waits for that, and whoever ends the run calls `wait`.
    """

    def __init__(self, config: CheckpointConfig, paths: RunPaths, world: World) -> None:
        self.config = config
        self.paths = paths
        self.world = world
        self._jobs = BackgroundJobs() if config.async_save else None
        self._stager: BlockingAsyncStager | None = None
        # The thread's collectives must not mix with those of training.
        self._group = dist.new_group(backend="gloo") if config.async_save else None
        self._saved = Retention(config, paths.checkpoints)
        self._exported = Retention(config, paths.weights)
        self._best = self._saved_best() if config.keep_best and config.resume_step is not None else None
        self._protect_best()

    def resume_step(self) -> int | None:
        """The step to resume from, or None to start afresh.

        Raises:
            CheckpointError: the step that the config names has no complete checkpoint.
        """
        wanted = self.config.resume_step
        if wanted is None:
            return None
        steps = stable_steps(self.paths.checkpoints)
        if wanted == -1:
            if not steps and self.world.is_main:
                get_logger().warning(f"no complete checkpoint in {self.paths.checkpoints}: starting from step 0")
            return steps[-1] if steps else None
        if wanted not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"ckpt.resume_step = {wanted}: no complete checkpoint in {self.paths.checkpoint(wanted)} "
                f"(complete steps: {known})"
            )
        return wanted

    def is_due(self, step: int) -> bool:
        """True when `ckpt.interval` asks for a checkpoint after `step` optimizer steps."""
        return self.config.interval is not None and step > 0 and step % self.config.interval == 0

    def save(self, state: TrainState, data_position: dict[str, Any]) -> None:
        """Write the checkpoint of `state.progress.step`; `data_position` is this process's own.

        Raises:
            CheckpointError: it could not be written, or the one before could not in the background.
        """
        from torch.distributed.checkpoint.state_dict import get_state_dict

        self.wait()
        step = state.progress.step
        model_state, optimizer_state = get_state_dict(state.model, state.optimizer)
        shared = {"model": without_frozen(model_state, state.model), "optimizer": optimizer_state}
        own = {
            "progress": asdict(state.progress),
            "scheduler": state.scheduler.state_dict(),
            "data": data_position,
            "random": random_state(self.world.device),
            "world_size": self.world.world_size,
            "frozen": identity_of_frozen(state.model),
        }
        if self._jobs is not None:
            shared, own = self._staged(shared), copy.deepcopy(own)
        self._do(lambda: self._write(step, shared, own))

    def wait(self) -> None:
        """Return when everything is on the disk.

        Raises:
            CheckpointError: something could not be written.
        """
        if self._jobs is not None:
            self._jobs.wait()

    def load(self, state: TrainState, step: int) -> list[dict[str, Any]]:
        """Fill `state` from the checkpoint of `step` and return the data position: this process's own, alone.

        When another number of processes saved it, weights and optimizer are resharded, and the positions are those of
        all of them, in order of rank. With `ckpt.skip_dataloader` there is none.

        Raises:
            CheckpointError: a file of the checkpoint is missing.
        """
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

        directory = self.paths.trainer_checkpoint(step)
        own = self._load_own(directory)
        check_frozen(own["frozen"], state.model, directory)
        if not self.config.skip_scheduler:
            state.scheduler.load_state_dict(own["scheduler"])
        model_state, optimizer_state = get_state_dict(state.model, state.optimizer)
        saved = {"model": without_frozen(model_state, state.model), "optimizer": optimizer_state}
        try:
            dcp.load(saved, checkpoint_id=directory)
        except dcp.api.CheckpointException as error:
            reasons = [str(failure[0]).splitlines()[0] for failure in error.failures.values()]
            raise CheckpointError(f"{directory} does not fit this model and optimizer: {reasons[0]}") from error
        rates = [group["lr"] for group in state.optimizer.param_groups]
        set_state_dict(
            state.model,
            state.optimizer,
            model_state_dict=saved["model"],
            optim_state_dict=saved["optimizer"],
            options=StateDictOptions(strict=False),  # `dcp.load` has seen to what has to be there
        )
        if self.config.skip_scheduler:
            for group, rate in zip(state.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        if not self.config.skip_progress:
            state.progress = Progress(**own["progress"])
        set_random_state(own["random"], self.world.device)
        return [] if self.config.skip_dataloader else self._positions(directory, own)

    def is_best(self, val_loss: float) -> bool:
        """True when `ckpt.keep_best` asks for a checkpoint of a step with this validation loss."""
        return self.config.keep_best and (self._best is None or val_loss < self._best.val_loss)

    def mark_best(self, step: int, val_loss: float) -> None:
        """Note that `step`, which has been saved, is the best, and keep it until there is a better one."""
        best = self._best = Best(step, val_loss)

        def note() -> None:
            self._protect_best()
            with together(self.world, self._group):
                if self.world.is_main:
                    best.write(self.paths.best_checkpoint)

        self._do(note)

    def saved_data(self, step: int) -> dict[str, Any]:
        """What a process that saved the checkpoint noted of its data, whatever `ckpt` says of that.

        Raises:
            CheckpointError: a file of the checkpoint is missing.
        """
        return self._load_own(self.paths.trainer_checkpoint(step))["data"]

    def export(self, state: TrainState, tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype) -> None:
        """Write `OUT/weights/step_<n>`, unless `ckpt.weights` is off."""
        if self.config.weights is None:
            return
        step = state.progress.step
        export = gather_export(state.model, self.config.weights, dtype)

        def write() -> None:
            if self.world.is_main:
                write_export(export, state.model, tokenizer, self.paths.weight(step), self.config.weights)
                self._exported.keep(step)

        self._do(write)

    def _do(self, job: Callable[[], None]) -> None:
        if self._jobs is not None:
            self._jobs.submit(job)
        else:
            job()

    def _staged(self, shared: dict[str, Any]) -> dict[str, Any]:
        """A copy in host memory, the same memory each time: to get new pages takes longer than to fill them."""
        from torch.distributed.checkpoint.staging import BlockingAsyncStager

        if self._stager is None:
            # Kept by itself only where memory can be pinned.
            self._stager = BlockingAsyncStager(cache_staged_state_dict=self.world.device.type == "cuda")
        staged = self._stager.stage(shared)
        self._stager.cache_staged_state_dict, self._stager.state_dict_cache = True, staged
        return staged

    def _write(self, step: int, shared: dict[str, Any], own: dict[str, Any]) -> None:
        import torch.distributed.checkpoint as dcp

        started_s = time.perf_counter()
        target = self.paths.checkpoint(step)
        scratch = scratch_of(target)
        directory = scratch / self.paths.trainer_checkpoint(step).name
        try:
            with together(self.world, self._group):
                if self.world.is_main:
                    begin_directory(target)
            with together(self.world, self._group):
                dcp.save(shared, checkpoint_id=directory, process_group=self._group)
                write_object(own, rank_file(directory, self.world.rank))
            with together(self.world, self._group):
                if self.world.is_main:
                    complete_directory(target)
        except CheckpointError:
            if self.world.is_main:
                shutil.rmtree(scratch, ignore_errors=True)
            raise
        if self.world.is_main:
            self._saved.keep(step)
            if self._jobs is not None:
                get_logger().info(f"Wrote {target} in the background in {time.perf_counter() - started_s:.1f}s")

    def _load_own(self, directory: Path) -> dict[str, Any]:
        """What this process saved; of more processes than saved, some get what another one did."""
        first = load_object(rank_file(directory, 0))
        rank = self.world.rank % first["world_size"]
        return first if rank == 0 else load_object(rank_file(directory, rank))

    def _positions(self, directory: Path, own: dict[str, Any]) -> list[dict[str, Any]]:
        saved_by = own["world_size"]
        if saved_by == self.world.world_size:
            return [own["data"]]
        return [load_object(rank_file(directory, rank))["data"] for rank in range(saved_by)]

    def _saved_best(self) -> Best | None:
        """The best step of the run that is resumed, unless that came after the step to resume from."""
        best = Best.read(self.paths.best_checkpoint)
        return best if best is not None and best.step in self._saved.steps else None

    def _protect_best(self) -> None:
        for retention in (self._saved, self._exported):
            retention.protected_step = None if self._best is None else self._best.step
