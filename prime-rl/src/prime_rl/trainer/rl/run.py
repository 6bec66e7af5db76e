"""Runs the RL trainer: builds its components, resumes from a checkpoint, and trains step by step."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from prime_rl.configs.trainer import ParityConfig, TrainerConfig, WeightCheckpointConfig, beyond_end
from prime_rl.run.attempts import report_restored
from prime_rl.run.checkpoints import changes_since, configs_to_save
from prime_rl.run.early_stop import recorded_best
from prime_rl.run.paths import RunPaths
from prime_rl.run.process import own_beats
from prime_rl.trainer.checkpoints.manager import CheckpointManager
from prime_rl.trainer.checkpoints.state import (
    Role,
    TrainedModel,
    TrainState,
    check_changes,
    restored_state,
    summary_of,
)
from prime_rl.trainer.checkpoints.weights import export_model
from prime_rl.trainer.kernels.product_choice import ProductChoice, choose_products
from prime_rl.trainer.model.balance import Balance
from prime_rl.trainer.model.build import (
    build_model,
    check_routers,
    compute_dtype,
    export_dtype,
    is_classifier,
    setup_frozen,
)
from prime_rl.trainer.model.images import Images, setup_images
from prime_rl.trainer.model.tokenizer import check_embeddings, check_tokenizer, embeddings_held, setup_tokenizer
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.perf import Performance, known_peak, published_peak, speed_fields
from prime_rl.trainer.process.errors import DivergedError, ModelError, ResumeRefused, TrainerError
from prime_rl.trainer.process.host_memory import return_freed_memory
from prime_rl.trainer.process.mesh import DataAxis, Mesh, setup_mesh
from prime_rl.trainer.process.signals import EXIT_STOPPED, SignalBox, listen_for_signals, stopped_line
from prime_rl.trainer.process.world import Process, joined_world
from prime_rl.trainer.rl.batches import BatchSource, FakeBatches, PackedBatches, row_tokens
from prime_rl.trainer.rl.broadcast import Broadcast, FileSystemBroadcast, GroupBroadcast
from prime_rl.trainer.rl.critic import Critic, explained_variance, start_at_zero
from prime_rl.trainer.rl.demonstrations import Demonstrations, setup_demonstrations
from prime_rl.trainer.rl.kept_logprobs import KeptLogprobs
from prime_rl.trainer.rl.loss import setup_loss
from prime_rl.trainer.rl.loss_trial import try_loss
from prime_rl.trainer.rl.metrics import NAN, MetricValues, Stopwatch, training_metrics
from prime_rl.trainer.rl.rows import Row, check_routes, vocab_chunk_of
from prime_rl.trainer.rl.step import ForwardBackward, ParityGate, Reference, StepSize
from prime_rl.trainer.sft.data.conversation import padding_id
from prime_rl.trainer.telemetry import Telemetry, open_telemetry
from prime_rl.transport.residence import Residence
from prime_rl.utils.logger import SUCCESS, count_of, get_logger
from prime_rl.utils.waiting import Wait, advice_on

POLL_S = 0.02
"""Interval in seconds between polls for a batch. A small model's step takes a few tenths of a second."""

_PREFIXES: Mapping[Role, str] = {"policy": "optim", "critic": "critic"}
"""Where the metrics of a trained model's optimizer begin."""

QUIET_S = 60.0
"""A batch may take a while: a wait for it is logged after this time."""


class _BatchStatus(IntEnum):
    """State of the next batch, as the main process sees it."""

    WAIT = 0
    READY = 1
    LATE = 2
    ENDED = 3


class Stopped(Exception):
    """A signal stopped the trainer after `step` steps. The checkpoint, if configured, has been written."""

    def __init__(self, step: int) -> None:
        super().__init__(step)
        self.step = step


@dataclass(frozen=True, slots=True)
class Components:
    """Everything that the training loop needs."""

    state: TrainState
    tokenizer: PreTrainedTokenizerBase
    batches: BatchSource
    images: Images | None
    data_axis: DataAxis
    forward_backward: ForwardBackward
    demonstrations: Demonstrations | None
    kept: KeptLogprobs
    critic: Critic | None
    parity: ParityGate
    broadcast: Broadcast
    residence: Residence | None
    checkpoints: CheckpointManager | None
    telemetry: Telemetry
    performance: Performance
    published_dtype: torch.dtype
    """Dtype of the weights for the inference servers."""
    export_dtype: torch.dtype
    """Dtype of the weights in `OUT/weights`."""


class RLTrainer:
    """Trains on one batch per step and publishes the new policy, until `max_steps`.

    Step s turns policy version s into version s + 1; `progress.step` is the current version.
    """

    def __init__(
        self, config: TrainerConfig, paths: RunPaths, process: Process, components: Components, signals: SignalBox
    ) -> None:
        self.config = config
        self.paths = paths
        self.process = process
        self.components = components
        self.signals = signals
        self.progress = components.state.progress
        self.times = Stopwatch()
        self.beats = own_beats()
        self._saved_version = self.progress.step
        self._exported_version: int | None = None

    def run(self) -> None:
        """Train until `max_steps`, or until the orchestrator ends the run early.

        Raises:
            Stopped: a signal arrived before that.
        """
        if self.progress.step == self.config.max_steps and self.process.is_main:
            get_logger().warning(f"Nothing left to do: max_steps is {self.config.max_steps}")
        if self.progress.step > 0 or self.config.model.starts_changed:
            self._publish()  # the orchestrator waits for a version that is not the engines' own
        else:
            self._leave_gpu()
        while self.config.max_steps is None or self.progress.step < self.config.max_steps:
            rows = self._receive()
            if rows is None:
                break
            tokens, metrics = self._train_step(rows)
            self._publish()
            self._save_if_due()
            return_freed_memory(self.progress.step)
            self._report(tokens, metrics | self.times.lap())
            self.beats.started()
        self._finish()

    def _receive(self) -> list[Row] | None:
        """Wait for this data rank's rows, and handle signals while waiting. None: the run ends early. Collective.

        Raises:
            Stopped: a signal arrived.
            TrainerError: the orchestrator sends no batch in time. The state is saved.
        """
        run, step = self.paths.orchestrator, self.progress.step
        advice = advice_on("orchestrator", run.root, run.log)
        wait = Wait(
            f"the orchestrator's batch of step {step}", advice, self.config.batch_timeout, "batch_timeout", QUIET_S
        )
        self.beats.say(f"step {step}: waiting for a batch", waits_for="orchestrator")
        with self.times("wait_for_batch"):
            while True:
                requests = self.signals.take()
                if requests.save or requests.stop:
                    self._save()
                if requests.stop:
                    raise Stopped(step)
                status = self._batch_status(wait)
                if status is _BatchStatus.READY:
                    break
                if status is _BatchStatus.ENDED:
                    if self.process.is_main:
                        done = count_of("step", step)
                        get_logger().info(f"The run ends early, after {done}: {self.components.batches.early_end}")
                    return None
                if status is _BatchStatus.LATE:
                    self._save()
                    raise TrainerError(wait.fault)
                time.sleep(POLL_S)
        self.beats.say(f"step {step}: reading the batch")
        with self.times("load_data"):
            if self.components.residence is not None:
                self.components.residence.come_back()
            rows = [
                Row.from_message(message, self.process.device, self.progress.step, self.components.images)
                for message in self.components.batches.take(self.progress.step)
            ]
        if not self.config.enable_router_replay:
            return [dataclasses.replace(row, routed_experts=None) for row in rows]
        if self.config.data.fake is None:
            check_routes(rows, self.components.state.policy.model)
        return rows

    def _batch_status(self, wait: Wait) -> _BatchStatus:
        """Check for a batch on rank 0 and share the result, so that all ranks stay in step. Collective."""
        status = torch.tensor(self._look_for_batch(wait) if self.process.is_main else 0)
        dist.broadcast(status, src=0)
        return _BatchStatus(int(status))

    def _look_for_batch(self, wait: Wait) -> _BatchStatus:
        if self.components.batches.is_ready(self.progress.step):
            return _BatchStatus.READY if self.components.batches.early_end is None else _BatchStatus.ENDED
        return _BatchStatus.LATE if wait.is_over() else _BatchStatus.WAIT

    def _train_step(self, rows: list[Row]) -> tuple[int, dict[str, float]]:
        """Update the weights with a batch. Returns its number of tokens and, on rank 0, the metrics. Collective."""
        step, rates = self.progress.step, self._learning_rates()
        self.beats.say(f"step {step}: comparing log-probabilities with the engine's")
        self.components.parity.check(rows, self.components.forward_backward, version=step)
        values, sizes, grad_norms = MetricValues(), list[StepSize](), defaultdict[str, list[float]](list)
        critic, demonstrations = self.components.critic, self.components.demonstrations
        if self.components.forward_backward.reference is not None:
            with self.times("reference_logprobs"):
                rows = self.components.forward_backward.with_reference(rows, has_critic=critic is not None)
        if critic is not None:
            with self.times("critic_values"):
                rows, of_critic = critic.with_advantages(rows)
            values.extend(of_critic)
        warmup = 0 if critic is None else critic.config.warmup_steps
        # Schedules of the policy begin with the first step that trains it.
        is_policy_trained, policy_step = step >= warmup, step - warmup
        of_experts: dict[str, float] = {}
        with self.times("forward_backward"):
            for minibatch in self._updates(rows):
                self.beats.say(f"step {step}: forward and backward, minibatch {minibatch[0].minibatch}")
                sizes.append(StepSize.from_rows(minibatch, self.components.data_axis))
                limit = self.components.forward_backward.loss.max_second_moment
                if limit is not None:
                    minibatch = self.components.forward_backward.with_second_moment(minibatch, limit)
                weight = None
                if is_policy_trained:
                    weight = 1.0 if demonstrations is None else demonstrations.config.rl_weight_at(policy_step)
                values.extend(self.components.forward_backward.run(minibatch, sizes[-1], weight))
                if demonstrations is not None and is_policy_trained:
                    self.beats.say(f"step {step}: forward and backward, demonstrations")
                    demonstrations.accumulate(self.components.state.policy.model, policy_step)
                if is_policy_trained:
                    grad_norms["optim"].append(self._update_weights("policy"))
                    of_experts = self.components.state.policy.balanced()
                if critic is not None:
                    values.extend(critic.run(minibatch))
                    grad_norms["critic"].append(self._update_weights("critic"))
            for role, trained in self.components.state.trained.items():
                if role != "policy" or is_policy_trained:
                    trained.scheduler.step()
        with self.times("keep_logprobs"):
            self.components.kept.write(step)
        size = StepSize.total(sizes)
        epochs = self.config.epochs_per_batch
        self.progress.advance(size.tokens // epochs, size.sequences // epochs)
        axis, stats = self.components.data_axis, self.components.forward_backward.loss.stats
        of_reference = self._after_step(values, is_policy_trained)
        recorded = {} if stats is None else stats.export(axis.collective_group)
        gathered = values.gather(axis)
        return size.tokens, {
            **training_metrics(gathered),
            **explained_variance(gathered),
            **{f"{name}/lr": rate for name, rate in rates.items()},
            # Before clipping, averaged over the step's optimizer updates.
            **{f"{name}/grad_norm": sum(norms) / len(norms) for name, norms in grad_norms.items()},
            **of_reference,
            **({} if demonstrations is None else demonstrations.metrics(policy_step if is_policy_trained else None)),
            **of_experts,
            **{f"stats/{name}": value for name, value in recorded.items()},
        }

    def _after_step(self, values: MetricValues, is_policy_trained: bool) -> dict[str, float]:
        """Adapt the weight of the KL penalty, and reset the reference if that is due. Collective."""
        forward_backward, state = self.components.forward_backward, self.components.state
        reference, kl = forward_backward.reference, forward_backward.loss.kl
        if reference is None:
            return {}
        if reference.reset_if_due(state.policy.model, self.progress.step) and self.process.is_main:
            get_logger().info(f"Reference model: reset to version {self.progress.step}")
        if kl is None or kl.target is None:
            return {}
        used = kl.coef
        # While only the critic is trained, the policy stays where it is: its divergence says nothing about the weight.
        if is_policy_trained:
            kl.adapt(values.mean("reference_kl", self.components.data_axis, self.process.device))
        state.adapted["kl_coef"] = kl.coef
        return {"reference_kl_coef": used}

    def _updates(self, rows: list[Row]) -> list[list[Row]]:
        """The rows of each optimizer update, in order: all minibatches, as often as the batch is trained on."""
        count, epochs = 1 + max(row.minibatch for row in rows), self.config.epochs_per_batch
        if count * epochs > 1 and self.components.forward_backward.loss.needs_proximal:
            rows = self.components.forward_backward.with_proximal(rows)
        first = [[row for row in rows if row.minibatch == index] for index in range(count)]
        # Kept log-probabilities are those of the first time.
        again = [[dataclasses.replace(row, kept_as=None) for row in minibatch] for minibatch in first]
        return first + again * (epochs - 1)

    def _learning_rates(self) -> dict[str, float]:
        """The learning rate of each trained model, by the prefix of its metrics."""
        trained = self.components.state.trained.items()
        return {_PREFIXES[role]: float(each.scheduler.get_last_lr()[0]) for role, each in trained}

    def _update_weights(self, role: Role) -> float:
        """Clip the gradient and apply it. Returns its norm before clipping."""
        trained, critic = self.components.state.trained[role], self.config.critic
        optim, key, whose = self.config.optim, "optim", ""
        if role == "critic" and critic is not None:
            optim, key, whose = critic.optim, "critic.optim", "critic's "
        grad_norm = clip_gradients(trained.model, optim.max_norm)
        if not math.isfinite(grad_norm):
            raise DivergedError(
                f"the {whose}gradient of step {self.progress.step} is not finite: lower {key}.lr or check the rewards"
            )
        trained.optimizer.step()
        trained.optimizer.zero_grad()
        return grad_norm

    def _report(self, tokens: int, metrics: dict[str, float]) -> None:
        """Log a line for people, and the metrics for monitors, of the step that has ended. Only rank 0 does."""
        step = self.progress.step - 1
        self.components.telemetry.profile.step(step)
        if not self.process.is_main:
            return
        metrics |= self.components.performance.step(tokens)
        if (residence := self.components.residence) is not None:
            metrics |= {"perf/memory_while_sampling": residence.left_on_gpu() / 2**30}
        metrics |= {"progress/tokens": self.progress.tokens, "progress/samples": self.progress.samples}
        self.components.telemetry.monitor.log(metrics, step)
        fields = [
            f"Step {step}",
            f"Time: {metrics['time/step']:.2f}s",
            f"Loss: {metrics.get('loss/mean', NAN):.4f}",
            f"Entropy: {metrics.get('entropy/mean', NAN):.4f}",
            *(f"Demonstrations: {loss:.4f}" for loss in [metrics.get("demonstrations/loss")] if loss is not None),
            f"Mismatch KL: {metrics.get('mismatch_kl/mean', NAN):.4f}",
            f"Grad. Norm: {metrics.get('optim/grad_norm', NAN):.4f}",
            f"LR: {metrics['optim/lr']:.2e}",
            *speed_fields(metrics),
            f"Peak Mem.: {metrics['perf/peak_memory']:.1f} GiB",
        ]
        get_logger().log(SUCCESS, " | ".join(fields))

    def _publish(self) -> None:
        self.beats.say(f"publishing version {self.progress.step}")
        with self.times("broadcast_weights"):
            if self.config.max_async_level == 0:
                # The trainer computes nothing until these weights have made a batch. An engine that shares its GPU, and
                # wakes up with them, needs the memory.
                torch.cuda.empty_cache()
            self.components.broadcast.publish(
                self.components.state.policy.model,
                self.progress.step,
                self.components.published_dtype,
                self._leave_gpu,
            )

    def _leave_gpu(self) -> None:
        """Make room for an engine that shares the GPU. It samples as soon as a new version is announced."""
        if self.components.residence is not None:
            self.components.residence.leave()
            if self.process.world_size > 1:
                dist.barrier()  # announced once all GPUs are free

    def _save_if_due(self) -> None:
        checkpoints, step = self.components.checkpoints, self.progress.step
        if checkpoints is None or not checkpoints.is_due(step) or step == self.config.max_steps:
            return
        self._save()
        self._export()

    def _save(self) -> None:
        """Save a checkpoint, unless this version is already saved or is the version that the run started with."""
        if self.components.checkpoints is None or self.progress.step == self._saved_version:
            return
        self.beats.say(f"saving the checkpoint of step {self.progress.step}")
        with self.times("save_ckpt"):
            demonstrations = self.components.demonstrations
            place = {} if demonstrations is None else demonstrations.place()
            self.components.checkpoints.save(self.components.state, data_position=place)
        self._saved_version = self.progress.step
        if self.process.is_main:
            done = "Copied the state for" if self.components.checkpoints.config.async_save else "Saved"
            get_logger().info(f"{done} checkpoint {self.paths.checkpoint(self.progress.step)}")

    def _export(self) -> None:
        """Export the weights, unless those of this version are."""
        if self.progress.step == self._exported_version:
            return
        self._exported_version = self.progress.step
        self.beats.say(f"exporting the weights of step {self.progress.step}")
        components = self.components
        if components.checkpoints is not None:
            components.checkpoints.export(components.state, components.tokenizer, components.export_dtype)
            return
        target = self.paths.weight(self.progress.step)
        export_model(
            components.state.policy.model,
            components.tokenizer,
            target,
            WeightCheckpointConfig(),
            components.export_dtype,
            components.state.models.get("critic"),
        )

    def _finish(self) -> None:
        """Export the final weights and, if `[ckpt]` is set, save a final checkpoint to resume from."""
        self._save()
        if self.config.bench is None:
            self._export()


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
    if config.loss.type == "custom":
        try_loss(config.loss, process.device, config.reference is not None)
    loss = setup_loss(config.loss)
    checkpoints = (
        CheckpointManager(
            config.ckpt,
            paths,
            process,
            mesh.data_axis,
            configs_to_save(paths, "trainer", config),
            best_elsewhere=lambda: recorded_best(paths.best_checkpoint),
        )
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
    # Before the model is loaded, because faults of the data are found faster.
    demonstrations = (
        None
        if config.demonstrations is None
        else setup_demonstrations(
            config.demonstrations,
            tokenizer,
            mesh,
            checkpoints,
            resume_step,
            embeddings_held(config.model, config.tokenizer, tokenizer),
        )
    )
    images = setup_images(config.model, tokenizer)
    products = choose_products(paths, process, is_resumed=resume_step is not None)
    built = build_model(config.model, mesh, products=products)
    model = built.fill(is_restored=resume_step is not None)
    if demonstrations is not None:
        check_embeddings(config.model, model, tokenizer)
    if config.enable_router_replay:
        check_routers(model)
    reference = setup_reference(config, model, mesh, products)
    optimizer = setup_optimizer(config.optim, model, config.model.optim_cpu_offload)
    scheduler = setup_scheduler(config.scheduler, optimizer, config.policy_steps)
    kept = KeptLogprobs(paths.orchestrator, mesh.data_axis)
    balance = Balance(model, config.model.router_bias_update_rate, process)
    critic = setup_critic(config, tokenizer, mesh, products, is_restored=resume_step is not None)
    trained: dict[Role, TrainedModel] = {"policy": TrainedModel(model, optimizer, scheduler, balance, built.check)}
    state = TrainState(trained if critic is None else {**trained, "critic": critic.trained}, tp=config.model.tp)
    if reference is not None and reference.reset_every is not None:
        state.copies["reference"] = reference.model
    if checkpoints is not None and resume_step is not None:
        resume(state, checkpoints, resume_step, config.max_steps, products, demonstrations)
        if loss.kl is not None and loss.kl.target is not None:
            loss.kl.coef = state.adapted.get("kl_coef", loss.kl.coef)
    return Components(
        state=state,
        tokenizer=tokenizer,
        batches=setup_batches(config, paths, mesh, model.config, images),
        images=images,
        data_axis=mesh.data_axis,
        forward_backward=ForwardBackward(
            model, loss, vocab_chunk_of(config.model), mesh, kept, reference, config.distillation
        ),
        demonstrations=demonstrations,
        kept=kept,
        critic=critic,
        parity=setup_parity(config, mesh, paths),
        broadcast=broadcast,
        residence=setup_residence(config, state, reference, process),
        checkpoints=checkpoints,
        telemetry=telemetry,
        performance=setup_performance(config, model, process),
        published_dtype=compute_dtype(config.model, process.device),
        export_dtype=export_dtype(config.model, config.ckpt.weights if config.ckpt else None, process.device),
    )


def setup_reference(
    config: TrainerConfig, model: PreTrainedModel, mesh: Mesh, products: ProductChoice
) -> Reference | None:
    """The model that the run starts from; None if nothing in the trainer needs it. Collective.

    A resumed run reads it from `model.name` again, so checkpoints do not hold it, unless it is reset during the run.
    """
    source = config.reference_source
    if source is None:
        return None
    if source == "adapter":
        get_logger().info("Reference model: the trained one without its adapters")
        return Reference(model, is_trained=True)
    get_logger().info(f"Reference model: a frozen copy of {config.model.name}")
    reset_every = None if config.reference is None else config.reference.reset_every
    # New adapters change nothing, but a reset copies them with the other weights, and only what is not trained is
    # quantized.
    lora = config.model.lora
    if lora is not None and lora.path is None and reset_every is None and config.model.quantization is None:
        lora = None
    copied = setup_frozen(config.model.model_copy(update={"lora": lora}), mesh, products)
    return Reference(copied, is_trained=False, reset_every=reset_every)


def setup_critic(
    config: TrainerConfig,
    tokenizer: PreTrainedTokenizerBase,
    mesh: Mesh,
    products: ProductChoice,
    *,
    is_restored: bool = False,
) -> Critic | None:
    """The critic with its optimizer and schedule; None if the config has none. Collective.

    It is laid out like the policy: sharded over the same processes, in the same dtypes.

    Raises:
        ModelError: its model cannot be a critic, or has another tokenizer.
    """
    critic = config.critic
    if critic is None:
        return None
    own: dict[str, Any] = {"lora": critic.lora, "language_model_only": False}
    if critic.lora is None:
        own["quantization"] = None
    if critic.name is not None:
        # The check before the start reads only what is on this machine.
        check_tokenizer("trainer.critic.name", critic.name, config.model, tokenizer)
        own |= {"name": critic.name, "adapter": None, "freeze_moe_router": False, "router_aux_loss_coef": 0.0}
    valued = config.model.model_copy(update=own)
    try:
        built = build_model(valued, mesh, products=products, is_scored=True)
        model = built.fill(is_restored=is_restored)
    except ModelError as error:
        raise ModelError(f"[trainer.critic]: {error}") from error
    is_new = config.model.debug.random_init or not is_classifier(model.config)
    if is_new and not is_restored:
        start_at_zero(model)
    if mesh.process.is_main:
        head = "a new head" if is_new else "its own head"
        get_logger().info(f"Critic: {valued.name} with {head}, {'LoRA' if critic.lora else 'all weights'} trained")
    # So that Transformers finds the last token of its exports.
    model.config.get_text_config().pad_token_id = padding_id(tokenizer)
    optimizer = setup_optimizer(critic.optim, model, config.model.optim_cpu_offload)
    scheduler = setup_scheduler(critic.scheduler, optimizer, config.max_steps)
    return Critic(TrainedModel(model, optimizer, scheduler, check=built.check), critic, mesh)


def setup_residence(
    config: TrainerConfig, state: TrainState, reference: Reference | None, process: Process
) -> Residence | None:
    if not config.offload_while_sampling:
        return None
    if process.device.type == "cpu":
        get_logger().info("offload_while_sampling has no effect on a CPU: weights are in host memory already")
        return None
    models = [*state.models.values(), *(() if reference is None or reference.is_trained else [reference.model])]
    return Residence(models, [trained.optimizer for trained in state.trained.values()], process.device)


def setup_broadcast(config: TrainerConfig, paths: RunPaths, process: Process, signals: SignalBox) -> Broadcast:
    if config.weight_broadcast.type == "nccl":
        return GroupBroadcast(config.weight_broadcast, paths.orchestrator, process, lambda: signals.stop_asked)
    return FileSystemBroadcast(
        config.weight_broadcast,
        paths,
        process,
        config.max_async_level,
        sends_adapter=config.model.sends_adapter,
    )


def setup_performance(config: TrainerConfig, model: PreTrainedModel, process: Process) -> Performance:
    """Create the throughput meter. On a CPU, MFU is reported only in benchmarks, because otherwise the inference server
    uses the same CPU."""
    is_measured = config.bench is not None
    dtype = compute_dtype(config.model, process.device)
    peak = known_peak(process, dtype) if is_measured else published_peak(process.device)
    return Performance(model, row_tokens(config.model.seq_len, model.config, process.device), process, peak)


def setup_parity(config: TrainerConfig, mesh: Mesh, paths: RunPaths) -> ParityGate:
    """Create the configured parity check. It is off for random batches, which no policy sampled."""
    is_fake = config.data.fake is not None
    parity = ParityConfig(on_mismatch="off") if is_fake else config.parity
    files = paths.config("orchestrator"), paths.config("inference")
    return ParityGate(parity, mesh, compute_dtype(config.model, mesh.process.device), *files)


def setup_batches(
    config: TrainerConfig, paths: RunPaths, mesh: Mesh, model_config: PretrainedConfig, images: Images | None
) -> BatchSource:
    if config.data.fake is not None:
        return FakeBatches(config.data.fake, config.model.seq_len, mesh.data_axis)
    limit = row_tokens(config.model.seq_len, model_config, mesh.process.device)
    vocab_size = getattr(model_config.get_text_config(), "vocab_size", None)
    return PackedBatches(config, paths, mesh, limit, vocab_size, images)


def resume(
    state: TrainState,
    checkpoints: CheckpointManager,
    step: int,
    max_steps: int | None,
    products: ProductChoice,
    demonstrations: Demonstrations | None,
) -> None:
    """Restore the checkpoint of `step`, and log what was restored.

    Raises:
        CheckpointError: the checkpoint is incomplete.
        ResumeRefused: it belongs to another model, or is beyond the end of this run.
    """
    for fault in beyond_end(step, max_steps):
        raise ResumeRefused(fault)
    places = checkpoints.load(state, step)
    of_data = None if demonstrations is None else demonstrations.restore(places)
    if checkpoints.process.is_main:
        restored = restored_state(state, checkpoints.paths, step, checkpoints.process)
        facts = {**restored, "matrix_products": asdict(products)}
        summary = summary_of(facts)
        if of_data is not None:
            facts["demonstrations"] = of_data
            summary += f"; demonstrations continue {of_data['place']}"
        get_logger().info(f"Resumed from {checkpoints.paths.trainer_checkpoint(step)}: {summary}")
        report_restored(summary, facts)
