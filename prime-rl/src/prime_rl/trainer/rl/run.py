"""One run of the RL trainer: build its parts, resume, train."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from torch import nn
from transformers import PretrainedConfig

from prime_rl.configs.trainer import ParityConfig, TrainerConfig, beyond_end
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
from prime_rl.trainer.model.build import compute_dtype, setup_model, setup_tokenizer
from prime_rl.trainer.observe.perf import Performance, known_peak_flops, peak_flops
from prime_rl.trainer.observe.telemetry import Telemetry, open_telemetry
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.process.errors import CheckpointError
from prime_rl.trainer.process.parallel_dims import Mesh, setup_mesh
from prime_rl.trainer.process.signals import EXIT_STOPPED, SignalBox, listen_for_signals
from prime_rl.trainer.process.world import Process, destroy_world, setup_world
from prime_rl.trainer.rl.batches import BatchSource, FakeBatches, PackedBatches, row_tokens
from prime_rl.trainer.rl.broadcast import Broadcast, FileSystemBroadcast
from prime_rl.trainer.rl.group_broadcast import GroupBroadcast
from prime_rl.trainer.rl.loop import Parts, RLTrainer, Stopped
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.parity import ParityGate
from prime_rl.trainer.rl.report import Reporter
from prime_rl.trainer.rl.rows import vocab_chunk_of
from prime_rl.trainer.rl.step import ForwardBackward
from prime_rl.utils.logger import SUCCESS, get_logger


def train(config: TrainerConfig, paths: RunPaths) -> None:
    """Run the trainer of `config` in this process and its peers.

    Raises:
        SystemExit: with 143, when SIGTERM ended the run.
        TrainerError: a fault that a person can mend.
    """
    process = setup_world(config.device, config.dist_timeout_seconds)
    try:
        with open_telemetry(config, paths, process) as telemetry, listen_for_signals(process) as signals:
            mesh = setup_mesh(config.model, process)
            parts = setup_parts(config, paths, mesh, telemetry, signals)
            with closing(parts.batches), written(parts.checkpoints), telemetry.profile.recording():
                RLTrainer(config, paths, process, parts, signals).run()
    except Stopped:
        if process.is_main:
            get_logger().warning("Stopped by SIGTERM")
        raise SystemExit(EXIT_STOPPED) from None
    finally:
        destroy_world()
    if process.is_main:
        get_logger().log(SUCCESS, "RL trainer finished!")


@contextmanager
def written(checkpoints: CheckpointManager | None) -> Iterator[None]:
    """Leave the block only when what is written in the background is on the disk."""
    try:
        yield
    finally:
        if checkpoints is not None:
            checkpoints.wait()


def setup_parts(config: TrainerConfig, paths: RunPaths, mesh: Mesh, telemetry: Telemetry, signals: SignalBox) -> Parts:
    """Build everything the loop works with, from the checkpoint when the run resumes."""
    process = mesh.process
    loss = setup_loss(config.loss)
    checkpoints = CheckpointManager(config.ckpt, paths, process, mesh.data_axis) if config.ckpt is not None else None
    resume_step = checkpoints.resume_step() if checkpoints is not None else None
    broadcast = setup_broadcast(config, paths, process, signals)
    # Before the model is loaded: by then others may look for versions already.
    broadcast.start(resume_step or 0)
    tokenizer = setup_tokenizer(config.tokenizer, config.model)
    model = setup_model(config.model, mesh)
    optimizer = setup_optimizer(config.optim, model, config.model.optim_cpu_offload)
    scheduler = setup_scheduler(config.scheduler, optimizer, config.max_steps)
    state = TrainState({"policy": TrainedModel(model, optimizer, scheduler)})
    if checkpoints is not None and resume_step is not None:
        resume(state, checkpoints, resume_step, config.max_steps)
    return Parts(
        state=state,
        tokenizer=tokenizer,
        batches=setup_batches(config, paths, mesh, model.config),
        data_axis=mesh.data_axis,
        forward_backward=ForwardBackward(model, loss, vocab_chunk_of(config.model), mesh),
        parity=setup_parity(config, mesh),
        broadcast=broadcast,
        checkpoints=checkpoints,
        reporter=Reporter(telemetry, state.progress, setup_performance(config, model, process)),
        export_dtype=compute_dtype(config.model, process.device),
    )


def setup_broadcast(config: TrainerConfig, paths: RunPaths, process: Process, signals: SignalBox) -> Broadcast:
    run = paths.orchestrator
    if config.weight_broadcast.type == "nccl":
        return GroupBroadcast(config.weight_broadcast, run, process, lambda: signals.stop_asked)
    keep_interval = config.ckpt.interval if config.ckpt is not None else None
    return FileSystemBroadcast(config.weight_broadcast, run, process, config.max_async_level, keep_interval)


def setup_performance(config: TrainerConfig, model: nn.Module, process: Process) -> Performance:
    """On a CPU the share of its peak is told of benchmarks alone: else the inference server computes on it as well."""
    is_measured = config.bench is not None
    dtype = compute_dtype(config.model, process.device)
    peak = known_peak_flops(process, dtype) if is_measured else peak_flops(process.device)
    return Performance(model, row_tokens(config.model.seq_len, model.config, process.device), process, peak)


def setup_parity(config: TrainerConfig, mesh: Mesh) -> ParityGate:
    """The configured check; random batches come from no policy."""
    is_fake = config.data.fake is not None
    parity = ParityConfig(on_mismatch="off") if is_fake else config.parity
    return ParityGate(parity, mesh, compute_dtype(config.model, mesh.process.device))


def setup_batches(config: TrainerConfig, paths: RunPaths, mesh: Mesh, model_config: PretrainedConfig) -> BatchSource:
    if config.data.fake is not None:
        return FakeBatches(config.data.fake, config.model.seq_len, mesh.data_axis)
    limit = row_tokens(config.model.seq_len, model_config, mesh.process.device)
    return PackedBatches(config, paths, mesh, limit)


def resume(state: TrainState, checkpoints: CheckpointManager, step: int, max_steps: int | None) -> None:
    """Continue from the checkpoint of `step`, and leave a receipt.

    Raises:
        CheckpointError: it is incomplete, of another model, or beyond the end of this run.
    """
    for fault in beyond_end(step, max_steps):
        raise CheckpointError(fault)
    checkpoints.load(state, step)
    if checkpoints.process.is_main:
        progress = state.progress
        get_logger().info(
            f"Resumed from {checkpoints.paths.trainer_checkpoint(step)}: step {progress.step}, "
            f"{progress.tokens} tokens, {progress.samples} samples"
        )
