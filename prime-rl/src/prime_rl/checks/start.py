"""Finds everything that can stop a run at its start and needs neither a model nor a GPU: one line for each fault.

It looks at the keys that are not built yet, at models, data, templates, packages and programs, and at the directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.checks.chat_templates import template_faults
from prime_rl.checks.model_files import (
    adapter_faults,
    describe,
    lacks_fast_tokenizer,
    loaded_tokenizer,
    model_fault,
    other_model_fault,
    other_token,
    quantization_faults,
    rotary_choice,
    tokenizer_faults,
    trained_model_fault,
    vocab_size,
)
from prime_rl.checks.start_dir import StartDir, gpus_here
from prime_rl.configs.ranges import LATEST
from prime_rl.configs.surface.renamed import SFT_COMMANDS
from prime_rl.configs.surface.root import RootConfig
from prime_rl.configs.trainer import NO_MEMORY_PROFILE, CheckpointConfig, beyond_end
from prime_rl.run.checkpoints import SavedSteps, changes_since, compared_configs
from prime_rl.run.paths import RunPaths
from prime_rl.utils.errors import RunDirError, StartFault
from prime_rl.utils.files import unexpanded_advice
from prime_rl.utils.pydantic_config import BaseSettings
from prime_rl.utils.tables import dotted, leaves

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.configs.model import ModelConfig
    from prime_rl.configs.orchestrator import OrchestratorConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.rollouts.judges import JudgeConfig
    from prime_rl.configs.sft import SFTConfig
    from prime_rl.configs.shared import ClientConfig, Device
    from prime_rl.configs.trainer import TrainerConfig

# The run's directory: whether it can be written, and has a complete step to continue from.


def output_fault(output_dir: Path, start: StartDir) -> str | None:
    """Why nothing can be written to `output_dir`; None if it can, or if that does not show from here."""
    if advice := unexpanded_advice(str(output_dir)):
        return f"output_dir = {output_dir}{advice}"
    root = start.find(output_dir).absolute()
    # A symbolic link that leads nowhere, or to itself, exists without a target.
    existing = next((path for path in (root, *root.parents) if path.exists() or path.is_symlink()), root)
    if not existing.is_dir():
        return f"output_dir = {output_dir}: {existing} is not a directory"
    is_known = start.is_here or existing in (root, root.parent)
    if is_known and not os.access(existing, os.W_OK | os.X_OK):
        return f"output_dir = {output_dir}: {existing} is not writable"
    return None


def latest_step_faults(ckpt: CheckpointConfig | None, max_steps: int | None, paths: RunPaths) -> Iterator[str]:
    """Why the latest checkpoint is beyond the end of the run. A step that the config names is checked with it."""
    if ckpt is not None and ckpt.resume_step == LATEST and not ckpt.skip_progress:
        yield from beyond_end(_step_of(ckpt, paths), max_steps)


def counterpart_faults(ckpt: CheckpointConfig | None, paths: RunPaths) -> Iterator[str]:
    """Why the orchestrator cannot continue from the trainer's checkpoint. Only a step that the trainer has counts."""
    saved = SavedSteps.of(paths)
    step = _step_of(ckpt, paths)
    if step is not None and step in saved.complete and (fault := saved.missing_counterpart(step)):
        yield fault


def changed_key_faults(
    ckpt: CheckpointConfig | None, paths: RunPaths, configs: Mapping[str, BaseSettings]
) -> Iterator[str]:
    """Keys of `configs`, by component, with a value that the checkpoint to resume from rules out."""
    step = _step_of(ckpt, paths)
    if step is not None:
        yield from changes_since(paths, step, configs).faults()


def _step_of(ckpt: CheckpointConfig | None, paths: RunPaths) -> int | None:
    """The step to resume from. None without one: the check of the directory reports why."""
    if ckpt is None or ckpt.resume_step is None or ckpt.resume_step >= 0:
        return None if ckpt is None else ckpt.resume_step
    try:
        return SavedSteps.of(paths).choose(ckpt.resume_step).step
    except RunDirError:
        return None


_SHOWN_CHARS = 200


def start_faults(config: RootConfig, job_dir: Path | None = None) -> list[str]:
    """One line for each file, package or program that the config names and that is not there.

    `job_dir` is the project directory of a batch job that will run the config; None means that it runs here. Lines of
    type `NotInstalled` need not stop a dry run.
    """
    start = StartDir() if job_dir is None else StartDir.of_job(job_dir)
    # One fault may show in several sections.
    faults: dict[str, None] = {}
    try:
        faults |= dict.fromkeys(_FAULTS[config.component](config, start) if config.component in _FAULTS else ())
        faults |= dict.fromkeys(_cleaned_inputs(config, start))
    except OSError as error:  # a name that is too long, a directory that may not be searched
        faults[f"{_shown(str(error.filename))}: {error.strerror}"] = None
    return list(faults)


_NO_INPUTS = frozenset({"output_dir", "work_dir", "toml_files"})
"""Keys with paths that a run only writes, or has read before it cleans its directory."""


def _cleaned_inputs(config: RootConfig, start: StartDir) -> Iterator[str]:
    """Inputs that `clean_output_dir` would delete, such as the weights of the directory's earlier run."""
    ckpt = getattr(config, "ckpt", None)
    if not getattr(config, "clean_output_dir", False) or (ckpt is not None and ckpt.resume_step is not None):
        return  # a run that resumes cleans nothing
    from prime_rl.environments.rewards.registry import MODEL_PREFIX

    output_dir: Path = config.output_dir  # type: ignore[attr-defined]
    root = start.find(output_dir).resolve()
    values = ((key, each) for key, value in leaves(config.model_dump()) for each in _each(value))
    for key, value in values:
        if not isinstance(value, str | Path) or not str(value).strip("\0") or not _NO_INPUTS.isdisjoint(key):
            continue
        path = start.find(value.removeprefix(MODEL_PREFIX) if isinstance(value, str) else value)
        # In this order: `exists` raises for texts that are too long for a path, such as a template.
        if path.resolve().is_relative_to(root) and path.exists():
            fault = f"--clean-output-dir would delete it with {output_dir}: choose another output_dir"
            yield f"{dotted(key)} = {value}: {fault}"


def _each(value: Any) -> Iterable[Any]:
    """The items of a list of plain values, such as names of rewards; otherwise the value itself."""
    return value if isinstance(value, list) else (value,)


def _shown(name: str) -> str:
    return name if len(name) <= _SHOWN_CHARS else f"{name[:_SHOWN_CHARS]}..."


def refuse_unstartable(config: RootConfig) -> None:
    """Print those lines and exit with status 2, if there are any."""
    faults = start_faults(config)
    for fault in faults:
        sys.stderr.write(f"error: {fault}\n")
    if faults:
        raise SystemExit(2)


def _sft_faults(config: SFTConfig, start: StartDir) -> Iterator[str]:
    # `sft` loads none of RL's configs, nor `rl` those of SFT.
    from prime_rl.checks.data_files import data_faults
    from prime_rl.configs.data import length_fault

    yield from _run_faults(config.output_dir, config, start)
    yield from changed_key_faults(config.ckpt, RunPaths(start.find(config.output_dir)), compared_configs(config))
    adds_tokens = bool(config.tokenizer.add_tokens)
    untrained = list(_trained_faults("model.name", config.model, start, adds_tokens=adds_tokens))
    yield from untrained
    description = None if untrained else describe(config.model.name, start)
    if description is not None:
        unscored = description.scoring_fault() if config.component == "rm" else None
        for fault in filter(None, (unscored, description.dropout_fault(config.model))):
            yield f"model.name = {config.model.name}: {fault}"
    yield from tokenizer_faults(config.tokenizer, config.model, start)
    yield from filter(None, (length_fault(config.data),))
    yield from data_faults(config.datasets, start)
    yield from _second_model_faults(config, start)
    if config.eval is not None:
        yield from _evaluation_faults(config, start, judges_model=not untrained)


def _second_model_faults(config: SFTConfig, start: StartDir) -> Iterator[str]:
    """Faults of a frozen model beside the trained one: another reference of preferences, or a teacher."""
    from prime_rl.configs.dpo import DPOConfig

    names = {} if config.distillation is None else {"distillation.teacher": config.distillation.teacher}
    if isinstance(config, DPOConfig) and config.reference.name is not None:
        names["reference.name"] = config.reference.name
    for key, name in names.items():
        ours = config.tokenizer.name or config.model.name
        yield from _same_tokenizer_faults(key, name, ours, start, other_model_fault(name, config.model, start))


def _same_tokenizer_faults(key: str, name: str, ours: str, start: StartDir, fault: str | None) -> Iterator[str]:
    """Faults of the model `name`, such as `fault`, that reads the tokens of `ours`."""
    if fault is not None:
        yield type(fault)(f"{key} = {name}: {fault}")
    elif token := other_token(ours, name, start):
        yield f"{key} = {name}: its tokenizer differs from that of {ours}, first in token {token}"


def _critic_faults(trainer: TrainerConfig, start: StartDir) -> Iterator[str]:
    """Faults of the model that the critic starts from."""
    assert trainer.critic is not None
    if (name := trainer.critic.name) is not None:
        ours = trainer.tokenizer.name or trainer.model.name
        # Weights that are all trained are not stored in 4 bits.
        quantization = None if trainer.critic.lora is None else trainer.model.quantization
        model = trainer.model.model_copy(update={"quantization": quantization, "lora": trainer.critic.lora})
        fault = other_model_fault(name, model, start, is_scored=True)
        yield from _same_tokenizer_faults("trainer.critic.name", name, ours, start, fault)
        return
    description = describe(trainer.model.name, start)
    valued = trainer.model.model_copy(update={"lora": trainer.critic.lora, "quantization": None})
    if description is not None and (fault := description.scoring_fault() or description.storing_fault(valued)):
        yield f"trainer.critic.name: {fault}: {trainer.model.name}, so name another model"


def _evaluation_faults(config: SFTConfig, start: StartDir, *, judges_model: bool) -> Iterator[str]:
    """Faults of the evaluation next to SFT."""
    from prime_rl.checks.packages import environment_faults

    assert config.eval is not None
    yield from environment_faults("eval.env", config.eval.env, start)
    if config.inference is not None:
        given = config.inference.model.chat_template
        if given != config.tokenizer.chat_template:  # which is checked already
            yield from template_faults("inference.model.chat_template", given, start)
        yield from _server_faults(config.inference, start, judges_model=judges_model)
    yield from _judge_faults("eval.judge", config.eval.judge, config.device, start)


def _rl_faults(config: RLConfig, start: StartDir) -> Iterator[str]:
    from prime_rl.checks.data_files import data_faults
    from prime_rl.checks.engines import engine_faults

    trainer, server = config.trainer, config.inference
    yield from _run_faults(config.output_dir, trainer, start, "trainer.")
    run = RunPaths(start.find(config.output_dir))
    yield from counterpart_faults(trainer.ckpt, run)
    yield from changed_key_faults(trainer.ckpt, run, compared_configs(config))
    is_shared = server is not None and server.model.name == trainer.model.name
    key = "model.name" if is_shared else "trainer.model.name"
    untrained = list(_trained_faults(key, trainer.model, start))
    yield from untrained
    if trainer.enable_router_replay and not untrained:
        yield from _replay_faults(trainer.model.name, start)
    reads_rows = trainer.demonstrations is not None
    yield from tokenizer_faults(trainer.tokenizer, trainer.model, start, reads_rows=reads_rows)
    if trainer.critic is not None:
        yield from _critic_faults(trainer, start)
    yield from data_faults(trainer.datasets, start)
    if trainer.loss.type == "custom":
        yield from _function_faults("trainer.loss.import_path", trainer.loss.import_path, start)
    yield from _orchestrator_faults(config.orchestrator, start)
    yield from _judge_faults("judge", config.orchestrator.judge, config.device, start)
    if config.teacher_inference is not None:
        yield from _named_faults("teacher_inference.model.name", config.teacher_inference.model.name, start)
        for fault in engine_faults(config.teacher_inference, start):
            yield type(fault)(f"teacher_inference: {fault}")
    for key, teacher in config.orchestrator.all_teachers.items():
        if teacher.is_policy:
            continue
        yield from _header_faults(f"orchestrator.{key}.client", teacher.client, start)
        named = f"orchestrator.{key}.tokenizer"
        if teacher.tokenizer is not None:
            yield from _alignment_faults(named, teacher.tokenizer, trainer.model.name, start)
        elif (token := other_token(trainer.model.name, teacher.model.name, start)) is not None:
            yield (
                f"the teacher {teacher.model.name} has a different tokenizer from {trainer.model.name}: token {token}; "
                f"to compare their texts, set {named} = {teacher.model.name!r}"
            )
    if server is not None:
        key = "model.name" if is_shared else "inference.model.name"
        yield from _named_faults(key, server.model.name, start)
        yield from _server_faults(server, start, judges_model=not (untrained and is_shared))
        yield from _rotary_faults(trainer, server, start)


def _alignment_faults(key: str, theirs: str, ours: str, start: StartDir) -> Iterator[str]:
    """The orchestrator needs the texts of the tokens of both."""
    for name in (theirs, ours):
        if lacks_fast_tokenizer(name, start):
            yield f"{key}: {name} has no tokenizer.json, and the texts of both tokenizers are compared: save it there"
        elif (file := start.find(name) / "tokenizer.json").is_file():
            try:
                loaded_tokenizer(file)
            except StartFault as fault:
                yield f"{key}: {fault}"


def _replay_faults(model: str, start: StartDir) -> Iterator[str]:
    description = describe(model, start)
    if description is not None and not description.has_experts:
        yield f"trainer.enable_router_replay: {description.class_name} is no mixture of experts: remove it"


def _rotary_faults(trainer: TrainerConfig, server: InferenceConfig, start: StartDir) -> Iterator[str]:
    """Trainer and engine fix length-dependent rotary frequencies by their own longest sequence."""
    longest, served = trainer.model.seq_len, server.model.max_model_len
    ours = rotary_choice(start.find(trainer.model.name), longest)
    theirs = rotary_choice(start.find(server.model.name), served)
    if ours != theirs:
        yield (
            f"trainer.model.seq_len = {longest} makes the trainer use {ours}, and inference.model.max_model_len = "
            f"{served} makes the engine use {theirs}: set both to the length of the longest sample"
        )


def _orchestrator_faults(config: OrchestratorConfig, start: StartDir) -> Iterator[str]:
    from prime_rl.checks.packages import environment_faults, monitor_faults

    yield from monitor_faults(config.monitor, start)
    yield from environment_faults("orchestrator.env", config.env, start)
    yield from _header_faults("orchestrator.client", config.client, start)
    yield from environment_faults("orchestrator.eval.env", config.eval.env if config.eval else (), start)
    advantage = config.advantage
    if advantage is not None and advantage.type == "custom":
        key = "orchestrator.advantage.import_path"
        yield from _function_faults(key, advantage.import_path, start)
    is_readable = model_fault(config.model.name, start, needs_weights=False) is None
    if any(each.type == "gibberish" for each in config.filters) and is_readable:
        yield from _vocab_faults(config.model.name, start)


def _vocab_faults(model: str, start: StartDir) -> Iterator[str]:
    folder = start.find(model)
    try:
        if folder.is_dir():
            vocab_size(folder)
    except StartFault as fault:
        yield f"orchestrator.model.name = {model}: {fault}"


def _eval_faults(config: OfflineEvalConfig, start: StartDir) -> Iterator[str]:
    from prime_rl.checks.packages import environment_faults, monitor_faults

    yield from monitor_faults(config.monitor, start)
    yield from _output_faults(config.output_dir, start)
    yield from environment_faults("env", config.environments, start)
    yield from _header_faults("client", config.client, start)
    if config.inference is not None:
        yield from _named_faults("model.name", config.inference.model.name, start)
        yield from template_faults("inference.model.chat_template", config.inference.model.chat_template, start)
        yield from _server_faults(config.inference, start)
    yield from _judge_faults("judge", config.judge, config.device, start)


def _judge_faults(key: str, judges: Mapping[str, JudgeConfig], device: Device, start: StartDir) -> Iterator[str]:
    """Faults of the judges that a run starts."""
    from prime_rl.checks.engines import engine_faults

    for name, judge in judges.items():
        if judge.is_ours:
            server, own = judge.server(device), f"{key}.{name}"
            yield from _named_faults(f"{own}.model", judge.model, start)
            yield from template_faults(f"{own}.engine.chat_template", server.model.chat_template, start)
            for fault in engine_faults(server, start):
                yield type(fault)(f"{own}: {fault}")


def _header_faults(key: str, client: ClientConfig, start: StartDir) -> Iterator[str]:
    """Variables with secret headers that are not set. A batch job may have others."""
    for name, variable in client.headers_from_env.items():
        if start.is_here and not os.environ.get(variable):
            yield f"{key}.headers_from_env.{name}: the environment variable {variable} is not set: export it"


def _server_faults(config: InferenceConfig, start: StartDir, *, judges_model: bool = True) -> Iterator[str]:
    """Faults of a server that belongs to a run."""
    from prime_rl.checks.engines import engine_faults

    for fault in engine_faults(config, start, judges_model=judges_model):
        yield type(fault)(f"inference: {fault}")


def _inference_faults(config: InferenceConfig, start: StartDir) -> Iterator[str]:
    from prime_rl.checks.engines import engine_faults

    yield from _named_faults("model.name", config.model.name, start)
    yield from template_faults("model.chat_template", config.model.chat_template, start)
    yield from engine_faults(config, start)


_FAULTS: Mapping[str, Callable[[Any, StartDir], Iterator[str]]] = {
    **dict.fromkeys(SFT_COMMANDS, _sft_faults),
    "rl": _rl_faults,
    "eval": _eval_faults,
    "inference": _inference_faults,
}
"""By `component`, which also names the class of the config."""


def _run_faults(
    output_dir: Path, trainer: SFTConfig | TrainerConfig, start: StartDir, place: str = ""
) -> Iterator[str]:
    """Faults of the run's directory and the machine that stop either trainer. Its keys are at `place`."""
    from prime_rl.checks.packages import monitor_faults, optimizer_fault

    yield from monitor_faults(trainer.monitor, start)
    for name, section in (("optim", trainer), ("critic.optim", getattr(trainer, "critic", None))):
        if section is not None and (fault := optimizer_fault(f"{place}{name}", section.optim, start)):
            yield fault
    yield from _output_faults(output_dir, start)
    yield from latest_step_faults(trainer.ckpt, trainer.max_steps, RunPaths(start.find(output_dir)))
    if trainer.memory_profiler_path is not None and start.is_here and not gpus_here():
        yield NO_MEMORY_PROFILE


def _output_faults(output_dir: Path, start: StartDir) -> Iterator[str]:
    if fault := output_fault(output_dir, start):
        yield fault


def _trained_faults(key: str, model: ModelConfig, start: StartDir, *, adds_tokens: bool = False) -> Iterator[str]:
    if fault := trained_model_fault(model, start):
        yield type(fault)(f"{key} = {model.name}: {fault}")
    yield from adapter_faults(key.removesuffix(".name"), model, start, adds_tokens=adds_tokens)
    yield from quantization_faults(key.removesuffix(".name"), model, start)


def _named_faults(key: str, model: str, start: StartDir) -> Iterator[str]:
    if fault := model_fault(model, start):
        yield type(fault)(f"{key} = {model}: {fault}")


def _function_faults(key: str, import_path: str, start: StartDir) -> Iterator[str]:
    from prime_rl.checks.packages import function_fault

    if fault := function_fault(key, import_path, start):
        yield fault
