"""Runs the SFT trainer: builds its components, resumes, trains."""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from dataclasses import asdict

import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prime_rl.configs.data import DataConfig, SFTDataConfig
from prime_rl.configs.dpo import DPOConfig
from prime_rl.configs.rm import RewardModelConfig
from prime_rl.configs.sft import TRAINED_VALIDATION, SFTConfig
from prime_rl.configs.trainer import scheduled_steps
from prime_rl.monitors.trace import own_trace
from prime_rl.run.checkpoints import changes_since, configs_to_save
from prime_rl.run.directory import check_output_dir
from prime_rl.run.paths import RunPaths
from prime_rl.run.pictures import write_contact_sheet
from prime_rl.run.process import own_beats
from prime_rl.trainer.checkpoints.manager import CheckpointManager, EvaluationQueue
from prime_rl.trainer.checkpoints.state import TrainedModel, TrainState, check_changes, restored_state
from prime_rl.trainer.kernels.product_choice import choose_products
from prime_rl.trainer.model.balance import Balance
from prime_rl.trainer.model.build import build_model, compute_dtype, export_dtype, setup_frozen
from prime_rl.trainer.model.images import Images, setup_images
from prime_rl.trainer.model.tokenizer import check_embeddings, check_tokenizer, embeddings_held, setup_tokenizer
from prime_rl.trainer.optim.optimizer import setup_optimizer
from prime_rl.trainer.optim.scheduler import setup_scheduler
from prime_rl.trainer.perf import Performance, known_peak
from prime_rl.trainer.preferences.objective import Preferences, Unpaired
from prime_rl.trainer.preferences.reference import Reference
from prime_rl.trainer.preferences.reward_model import Ranking
from prime_rl.trainer.process.errors import CheckpointError, exit_on_error
from prime_rl.trainer.process.mesh import Mesh, setup_mesh
from prime_rl.trainer.process.signals import EXIT_STOPPED, listen_for_signals, stopped_line
from prime_rl.trainer.process.world import Process, joined_world
from prime_rl.trainer.sft.data.conversation import padding_id
from prime_rl.trainer.sft.data.examination import check_first_rows, image_worries
from prime_rl.trainer.sft.data.packer import micro_batches_per_data_rank, setup_rows
from prime_rl.trainer.sft.data.samples import DatasetStream
from prime_rl.trainer.sft.epochs import as_written, with_steps
from prime_rl.trainer.sft.loop import Components, SFTTrainer
from prime_rl.trainer.sft.reporting import StepReporter, Summary
from prime_rl.trainer.sft.resume import identify_data, leave_receipt, restore_position
from prime_rl.trainer.sft.step import CrossEntropy, Distilled, Objective
from prime_rl.trainer.sft.validation import Validation
from prime_rl.trainer.telemetry import Telemetry, open_telemetry
from prime_rl.utils.errors import RunDirError
from prime_rl.utils.logger import SUCCESS, get_logger, setup_logger
from prime_rl.watch.progress import progress_bar


def run(config: SFTConfig) -> int:
    """Train in this process, alone or as one rank of a run. Returns the exit code.

    Raises:
        SystemExit: with code 1, if the run failed. The log says why.
    """
    paths = RunPaths(config.output_dir)
    rank = int(os.environ.get("RANK", 0))
    log_file = paths.rank_log(rank) if config.log.file else None
    setup_logger(config.log.level if rank == 0 else "warning", log_file, config.log.json_logging)
    own_trace()
    with exit_on_error(), joined_world(config.device, config.dist_timeout_seconds) as process:
        prepare_output_dir(config, paths, process)
        with open_telemetry(config, paths, process) as telemetry:
            mesh = setup_mesh(config.model, process)
            config = with_steps(config, process)
            is_done = train(SFTTrainer(config, paths, mesh, setup_components(config, paths, mesh)), telemetry)
        return 0 if is_done else EXIT_STOPPED


def train(trainer: SFTTrainer, telemetry: Telemetry) -> bool:
    """Run the training loop with signals, reports and the progress bar. Returns False if a signal ended it."""
    config, process = trainer.config, trainer.process
    peak = known_peak(process, compute_dtype(config.model, process.device))
    performance = Performance(trainer.components.state.policy.model, config.data.seq_len, process, peak)
    with ExitStack() as stack:
        signals = stack.enter_context(listen_for_signals(process))
        bar = stack.enter_context(progress_bar("sft", config.max_steps, shown=process.is_main))
        reporter = StepReporter(trainer.paths, telemetry, performance, trainer.mesh.data_axis, bar)
        if trainer.components.checkpoints is not None:
            stack.callback(trainer.components.checkpoints.wait)
        stack.enter_context(telemetry.profile.recording())
        is_done = trainer.run(signals, reporter)
    if process.is_main:
        report_end(is_done, trainer, reporter.summary)
    return is_done


def prepare_output_dir(config: SFTConfig, paths: RunPaths, process: Process) -> None:
    """Refuse a directory with another run's checkpoints, or delete those if `clean_output_dir` is set.

    The launchers have already checked the whole directory, which now holds this run's log and config.

    Raises:
        CheckpointError: the directory is in use.
    """
    resuming = config.ckpt is not None and config.ckpt.resume_step is not None
    if config.clean_output_dir and not resuming and not os.environ.get("NEVER_CLEAN_OUTPUT_DIR"):
        if process.is_main:
            shutil.rmtree(paths.checkpoints, ignore_errors=True)
            shutil.rmtree(paths.weights, ignore_errors=True)
        dist.barrier()
    try:
        check_output_dir(paths, resuming)
    except RunDirError as error:
        raise CheckpointError(str(error)) from error


def setup_components(config: SFTConfig, paths: RunPaths, mesh: Mesh) -> Components:
    """Build everything that the training loop needs, and resume.

    The data is checked before the model is loaded, which may take minutes.
    """
    own_beats().say("reading the data")
    process, data_axis = mesh.process, mesh.data_axis
    micro_batches_per_data_rank(config.data, data_axis)
    evaluations = None if config.eval is None else EvaluationQueue(paths, process, config.eval.interval)
    run_configs = configs_to_save(paths, config.component, as_written(config))
    checkpoints = (
        CheckpointManager(config.ckpt, paths, process, data_axis, run_configs, evaluations)
        if config.ckpt is not None
        else None
    )
    resume_step = checkpoints.resume_step() if checkpoints is not None else None
    tokenizer = setup_tokenizer(config.tokenizer, config.model)
    held = embeddings_held(config.model, config.tokenizer, tokenizer)
    images = setup_images(config.model, tokenizer)
    identified = identify_data(config.data, tokenizer, checkpoints, resume_step, images)
    data = identified.config
    if resume_step is not None:
        check_changes(changes_since(paths, resume_step, {config.component: as_written(config)}), process)
    objective = objective_of(config, data, images)
    of_validation = None if config.val is None else objective_of(config, config.val.data, images, is_validation=True)
    # Generated rows have tokens that the tokenizer has, too.
    known = held if isinstance(data, SFTDataConfig) else min(held, len(tokenizer))
    rows = setup_rows(data, tokenizer, known, data_axis, images)
    loss = config.loss if isinstance(config, DPOConfig) else None
    first = check_first_rows(rows, tokenizer, process, show=config.log.log_data, loss=loss)
    if images is not None and isinstance(data, SFTDataConfig) and process.is_main:
        for line in image_worries(first, data):
            get_logger().warning(f"First rows of the data: {line}")
        write_contact_sheet(paths.contact_sheet, images.small_pictures(first.first_images))
    validation = None
    if config.val is not None and of_validation is not None:
        if config.validates_on_training_rows and process.is_main:
            get_logger().warning(TRAINED_VALIDATION)
        today = data.template_date if isinstance(data, SFTDataConfig) else None
        of_val = config.val.data.model_copy(update={"template_date": today})
        validation = Validation(of_val, tokenizer, mesh, of_validation, images, held)
    reference = None
    of_val_rows = None if validation is None else DatasetStream(validation.config, tokenizer, data_axis, images, held)
    compared = [
        (each, stream)
        for each, stream in ((objective, rows.stream), (of_validation, of_val_rows))
        if isinstance(each, Preferences | Unpaired) and isinstance(stream, DatasetStream)
    ]
    if isinstance(config, DPOConfig) and config.loss.needs_reference:
        # Before a checkpoint is loaded, because the reference is the model that the run starts from; and another one is
        # freed before the trained model is loaded.
        kept_in = None if checkpoints is None else paths
        reference = Reference(config, compared, tokenizer, mesh, kept_in)
        reference.find(is_resumed=resume_step is not None)
    products = choose_products(paths, process, is_resumed=resume_step is not None)
    embeddings = held if config.tokenizer.add_tokens else 0
    is_scored = isinstance(objective, Ranking)
    if isinstance(objective, Distilled):
        teacher = objective.config.teacher
        check_tokenizer("distillation.teacher", teacher, config.model, tokenizer)
        if process.is_main:
            get_logger().info(f"Teacher: {teacher}, frozen, beside the trained model")
        objective.teacher = setup_frozen(config.model, mesh, products, name=teacher)
    built = build_model(
        config.model, mesh, has_dropout=True, products=products, is_scored=is_scored, embeddings=embeddings
    )
    # A reference that is not known yet is the model that the run started from.
    model = built.fill(is_restored=resume_step is not None and (reference is None or reference.is_known))
    check_embeddings(config.model, model, tokenizer)
    if config.tokenizer.add_tokens and process.is_main:
        warn_of_frozen_embeddings(model)
    if is_scored:
        pad_with(model, tokenizer)
    else:
        stop_at(model, first.end_ids, tokenizer)
    if reference is not None:
        reference.compute_rest(model)
    optimizer = setup_optimizer(config.optim, model, config.model.optim_cpu_offload)
    schedule_steps = scheduled_steps(config.max_steps, config.ckpt, resume_step)
    scheduler = setup_scheduler(config.scheduler, optimizer, schedule_steps)
    balance = Balance(model, config.model.router_bias_update_rate, process)
    trained = TrainedModel(model, optimizer, scheduler, balance, built.check)
    state = TrainState({"policy": trained}, tp=config.model.tp)
    if checkpoints is not None and resume_step is not None:
        positions = checkpoints.load(state, resume_step)
        facts = {**restored_state(state, paths, resume_step, process), "matrix_products": asdict(products)}
        place = restore_position(rows, positions)
        leave_receipt(config, checkpoints, facts, {**rows.cursor(), "place": place, "verified": identified.verified})
    dtype = export_dtype(config.model, config.ckpt.weights if config.ckpt else None, process.device)
    return Components(
        state, rows, objective, tokenizer, checkpoints, dtype, validation, identified.fingerprint, evaluations
    )


def warn_of_frozen_embeddings(model: PreTrainedModel) -> None:
    """Warn if added tokens keep the embeddings that they start with."""
    ends = {"embeddings": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    paths = {module: path for path, module in model.named_modules()}
    frozen = [paths[end] for end in ends.values() if end is not None and not end.weight.requires_grad]
    if frozen:
        names = ", ".join(f'"{path.rpartition(".")[2]}"' for path in frozen)
        get_logger().warning(
            f"tokenizer.add_tokens: {' and '.join(frozen)} are frozen, so that the model cannot learn the tokens: set "
            f"model.lora.modules_to_save = [{names}]"
        )


def objective_of(
    config: SFTConfig, data: DataConfig, images: Images | None = None, *, is_validation: bool = False
) -> Objective:
    """What the command of a config minimises, or validates, on some data."""
    if isinstance(config, RewardModelConfig):
        return Ranking(config.loss)
    if not isinstance(config, DPOConfig):
        if config.distillation is not None and not is_validation:
            return Distilled(config.distillation, config.loss)
        # Validation stays comparable with runs of the other losses.
        return CrossEntropy("cross_entropy" if is_validation else config.loss, images=images)
    assert isinstance(data, SFTDataConfig), "checked by the config"
    return Unpaired(config.loss, data) if config.loss.is_unpaired else Preferences(config.loss)


def pad_with(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Make exports name the padding token, so that Transformers scores the tokens that were trained."""
    padding = padding_id(tokenizer)
    model.config.get_text_config().pad_token_id = padding
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(padding)


def stop_at(model: PreTrainedModel, end_ids: set[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Add the tokens with which answers end to those at which exported weights stop.

    A base model stops at the end of a text, and its chat template ends a message with another token.
    """
    listed = model.generation_config.eos_token_id
    listed = [tokenizer.eos_token_id] if listed is None else listed
    known: list[int] = listed if isinstance(listed, list) else [listed]
    if added := sorted(end_ids.difference(known)):
        model.generation_config.eos_token_id = [each for each in known if each is not None] + added
        words = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(added)))
        get_logger().info(f"Exported weights also stop at {words}, with which the data ends (generation_config.json)")


def report_end(is_done: bool, trainer: SFTTrainer, summary: Summary) -> None:
    step = trainer.components.state.progress.step
    for line in summary.lines():
        get_logger().info(line)
    if not is_done:
        get_logger().warning(stopped_line(step, trainer.paths.checkpoint(step)))
        return
    weights = trainer.paths.weight(step)
    where = f"; weights in {weights}" if weights.is_dir() else ""
    get_logger().log(SUCCESS, f"{trainer.config.component.upper()} trainer finished! {step} steps{where}")
