"""Runs the RL trainer: builds its components, resumes from a checkpoint, and trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict

from transformers import PretrainedConfig, PreTrainedModel

from prime_rl.configs.trainer import ParityConfig, TrainerConfig, beyond_end
from prime_rl.run.attempts import report_restored
from prime_rl.run.paths import RunPaths
from prime_rl.run.resuming import changes_since, configs_to_save
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.resuming import check_changes, restored_state, summary_of
from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState
from prime_rl.trainer.kernels.product_choice import ProductChoice, choose_products
from prime_rl.trainer.model.build import compute_dtype, export_dtype, setup_model, setup_tokenizer
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.perf import Performance, known_peak, published_peak
from prime_rl.trainer.process.errors import ResumeRefused
from prime_rl.trainer.process.mesh import Mesh, setup_mesh
from prime_rl.trainer.process.signals import EXIT_STOPPED, SignalBox, listen_for_signals, stopped_line
from prime_rl.trainer.process.world import Process, joined_world
from prime_rl.trainer.rl.batches import BatchSource, FakeBatches, PackedBatches, row_tokens
from prime_rl.trainer.rl.broadcast import Broadcast, FileSystemBroadcast, GroupBroadcast
from prime_rl.trainer.rl.kept_logprobs import KeptLogprobs
from prime_rl.trainer.rl.loop import Components, RLTrainer, Stopped
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.parity import ParityGate
from prime_rl.trainer.rl.report import Reporter
from prime_rl.trainer.rl.rows import vocab_chunk_of
from prime_rl.trainer.rl.step import ForwardBackward
from prime_rl.trainer.telemetry import Telemetry, open_telemetry
from prime_rl.utils.logger import SUCCESS, get_logger


def train(config: TrainerConfig, paths: RunPaths) -> None:
    """Run the trainer. Call in every process of the launch.

    Raises:
        SystemExit: with status 143, if a signal stopped it.
        TrainerError: a fault that the user can fix; the message is one line.
    """
    with joined_world(config.device, config.dist_timeout_seconds) as process:
        # Inside the block, because all ranks stop together: each then leaves the group.
        is_done = run(config, paths, process)
    if not is_done:
        raise SystemExit(EXIT_STOPPED)
    if process.is_main:
        get_logger().log(SUCCESS, "RL trainer finished!")


def run(config: TrainerConfig, paths: RunPaths, process: Process) -> bool:
    """Build the trainer and run it. Returns False if a signal stopped it."""
    try:
        with open_telemetry(config, paths, process) as telemetry, listen_for_signals(process) as signals:
            mesh = setup_mesh(config.model, process)
            components = setup_components(config, paths, mesh, telemetry, signals)
            with (
                closing(components.batches),
                closing(components.kept),
                flushing(components.checkpoints),
                telemetry.profile.recording(),
            ):
                RLTrainer(config, paths, process, components, signals).run()
    except Stopped as stopped:
        if process.is_main:
            get_logger().warning(stopped_line(stopped.step, paths.checkpoint(stopped.step)))
        return False
    return True


@contextmanager
def flushing(checkpoints: CheckpointManager | None) -> Iterator[None]:
    """Wait at the end of the block until checkpoints written in the background are on disk."""
    try:
        yield
    finally:
        if checkpoints is not None:
            checkpoints.wait()


def setup_components(
    config: TrainerConfig, paths: RunPaths, mesh: Mesh, telemetry: Telemetry, signals: SignalBox
) -> Components:
    """Build everything that the training loop needs, and restore the checkpoint if the run resumes."""
    process = mesh.process
    loss = setup_loss(config.loss)
    checkpoints = (
        CheckpointManager(config.ckpt, paths, process, mesh.data_axis, configs_to_save(paths, "trainer", config))
        if config.ckpt is not None
        else None
    )
    resume_step = checkpoints.resume_step() if checkpoints is not None else None
    if resume_step is not None:
        check_changes(changes_since(paths, resume_step, {"trainer": config}), process)
    broadcast = setup_broadcast(config, paths, process, signals)
    # Before loading the model, because other processes may look for versions while it loads.
    broadcast.start(resume_step or 0)
    tokenizer = setup_tokenizer(config.tokenizer, config.model)
    products = choose_products(paths, process, is_resumed=resume_step is not None)
    model = setup_model(config.model, mesh, products=products)
    optimizer = setup_optimizer(config.optim, model, config.model.optim_cpu_offload)
    scheduler = setup_scheduler(config.scheduler, optimizer, config.max_steps)
    kept = KeptLogprobs(paths.orchestrator, mesh.data_axis)
    state = TrainState({"policy": TrainedModel(model, optimizer, scheduler)})
    if checkpoints is not None and resume_step is not None:
        resume(state, checkpoints, resume_step, config.max_steps, products)
    return Components(
        state=state,
        tokenizer=tokenizer,
        batches=setup_batches(config, paths, mesh, model.config),
        data_axis=mesh.data_axis,
        forward_backward=ForwardBackward(model, loss, vocab_chunk_of(config.model), mesh, kept),
        kept=kept,
        parity=setup_parity(config, mesh),
        broadcast=broadcast,
        checkpoints=checkpoints,
        reporter=Reporter(telemetry, state.progress, setup_performance(config, model, process)),
        published_dtype=compute_dtype(config.model, process.device),
        export_dtype=export_dtype(config.model, config.ckpt.weights if config.ckpt else None, process.device),
    )


def setup_broadcast(config: TrainerConfig, paths: RunPaths, process: Process, signals: SignalBox) -> Broadcast:
    if config.weight_broadcast.type == "nccl":
        return GroupBroadcast(config.weight_broadcast, paths.orchestrator, process, lambda: signals.stop_asked)
    return FileSystemBroadcast(config.weight_broadcast, paths, process, config.max_async_level)


def setup_performance(config: TrainerConfig, model: PreTrainedModel, process: Process) -> Performance:
    """Create the throughput meter. On a CPU, MFU is reported only in benchmarks, because otherwise the inference server
    uses the same CPU."""
    is_measured = config.bench is not None
    dtype = compute_dtype(config.model, process.device)
    peak = known_peak(process, dtype) if is_measured else published_peak(process.device)
    return Performance(model, row_tokens(config.model.seq_len, model.config, process.device), process, peak)


def setup_parity(config: TrainerConfig, mesh: Mesh) -> ParityGate:
    """Create the configured parity check. It is off for random batches, which no policy sampled."""
    is_fake = config.data.fake is not None
    parity = ParityConfig(on_mismatch="off") if is_fake else config.parity
    return ParityGate(parity, mesh, compute_dtype(config.model, mesh.process.device))


def setup_batches(config: TrainerConfig, paths: RunPaths, mesh: Mesh, model_config: PretrainedConfig) -> BatchSource:
    if config.data.fake is not None:
        return FakeBatches(config.data.fake, config.model.seq_len, mesh.data_axis)
    limit = row_tokens(config.model.seq_len, model_config, mesh.process.device)
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    return PackedBatches(config, paths, mesh, limit, vocab_size)


def resume(
    state: TrainState, checkpoints: CheckpointManager, step: int, max_steps: int | None, products: ProductChoice
) -> None:
    """Restore the checkpoint of `step`, and log what was restored.

    Raises:
        CheckpointError: the checkpoint is incomplete.
        ResumeRefused: it belongs to another model, or is beyond the end of this run.
    """
    for fault in beyond_end(step, max_steps):
        raise ResumeRefused(fault)
    checkpoints.load(state, step)
    if checkpoints.process.is_main:
        restored = restored_state(state, checkpoints.paths, step, checkpoints.process)
        facts = {**restored, "matrix_products": asdict(products)}
        summary = summary_of(facts)
        get_logger().info(f"Resumed from {checkpoints.paths.trainer_checkpoint(step)}: {summary}")
        report_restored(summary, facts)
