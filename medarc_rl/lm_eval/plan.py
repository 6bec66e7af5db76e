"""Plans an evaluation with lm-eval and runs it: which weights, which files, and the processes of each group."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TextIO

from medarc_rl.errors import MedarcError, UsageError
from medarc_rl.launchers.shared_node import shared_node
from prime_rl.checks import start_faults
from prime_rl.checks.adapters import ADAPTER_CONFIG, read_settings
from prime_rl.checks.chat_models import ChatModel, find_chat_models, model_of_run
from prime_rl.checks.model_files import model_fault
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.inference import InferenceConfig
from prime_rl.launch import LocalHost, ProcessSpec, Supervisor
from prime_rl.launch.logs import Follower, polled
from prime_rl.launch.placement import Placement, ResourceRequest, claimed_placement
from prime_rl.launch.plan import inference_url, plan_server
from prime_rl.launch.spec import Outcome
from prime_rl.run.directory import files_readable_by, write_configs
from prime_rl.run.evaluations import find_candidates
from prime_rl.run.lock import run_lock
from prime_rl.run.paths import RunPaths, stable_steps, step_of
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE
from prime_rl.utils.errors import CannotStart, DeviceError, RunDirError, StartFault
from prime_rl.utils.gpus import MASK_VARIABLE

Template = Literal["auto", "yes", "no"]


@dataclass(frozen=True, slots=True)
class Candidate:
    """Weights to evaluate."""

    name: str
    """Folder of its results: `base`, `step_<n>`, or the name of a model's folder."""
    tokenizer: str
    """Folder or hub id with its tokenizer and chat template."""
    weights: str | None = None
    """Folder with weights that replace those of the served model. None: the served model itself."""
    is_adapter: bool = False
    """`weights` is a LoRA adapter of the served model."""
    is_base: bool = False

    @property
    def title(self) -> str:
        return self.name.replace("step_", "step ") if self.name.startswith("step_") else self.name

    def fingerprint(self) -> str:
        """Changes when the files of the weights do: their names, sizes and times."""
        if self.weights is None and not Path(self.tokenizer).is_dir():
            return self.tokenizer
        folder = Path(self.weights or self.tokenizer)
        files = [(file.name, file.stat()) for file in sorted(folder.glob("*.safetensors"))]
        return " ".join(f"{name}:{found.st_size}:{found.st_mtime_ns}" for name, found in files)


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings that scores depend on, apart from the weights."""

    limit: int | None
    gen_kwargs: Mapping[str, Any]
    max_gen_toks: int | None
    apply_chat_template: Template
    allow_unsafe_code: bool
    include_path: str | None
    local_tasks: str
    """Fingerprint of the files in `include_path`."""
    lm_eval: str
    """Its version."""


@dataclass(frozen=True, slots=True)
class Job:
    """One task with a number of examples in the prompt."""

    task: str
    shots: int | None
    """None takes the task's own."""

    @property
    def stem(self) -> str:
        """Name of its results, without an ending."""
        kept = "".join(char if char.isalnum() or char in "._-" else "-" for char in self.task)
        return f"{kept}.{'own' if self.shots is None else self.shots}-shot"


@dataclass(frozen=True, slots=True)
class Sweep:
    """Checkpoints that a run is still writing."""

    run: str
    """The run's directory."""
    weights: str
    """Its folder of `step_<n>` directories."""


@dataclass(frozen=True, slots=True)
class LmEvalPlan:
    """Everything that the process needs. One server serves all of its candidates."""

    root: str
    """Directory of the evaluation."""
    served: str
    """Name of the served model."""
    tasks: tuple[str, ...]
    shots: tuple[int | None, ...]
    settings: Settings
    candidates: tuple[Candidate, ...]
    batch_size: int
    sweep: Sweep | None = None
    url: str = ""

    @property
    def paths(self) -> LmEvalPaths:
        return LmEvalPaths(Path(self.root))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> LmEvalPlan:
        values = json.loads(text)
        sweep = values.pop("sweep")
        return cls(
            **{
                **values,
                "tasks": tuple(values["tasks"]),
                "shots": tuple(values["shots"]),
                "settings": Settings(**values["settings"]),
                "candidates": tuple(Candidate(**each) for each in values["candidates"]),
                "sweep": None if sweep is None else Sweep(**sweep),
            }
        )


@dataclass(frozen=True, slots=True)
class LmEvalPaths:
    """Files of an evaluation with lm-eval, in addition to the `configs`, `logs` and `control` of every launch."""

    root: Path

    @property
    def plan(self) -> Path:
        return self.root / "configs" / "lm_eval.json"

    @property
    def log(self) -> Path:
        """Output of lm-eval and its libraries."""
        return self.root / "logs" / "lm_eval.log"

    @property
    def progress(self) -> Path:
        """Progress lines that the launcher shows."""
        return self.root / "logs" / "evaluation.log"

    @property
    def tasks_found(self) -> Path:
        """Marker: the tasks exist and can be used, so that the server may load its model."""
        return self.root / "control" / "TASKS_FOUND"

    @property
    def faults(self) -> Path:
        """Why the evaluation cannot start, one line each."""
        return self.root / "control" / "faults.json"

    @property
    def summary(self) -> Path:
        return self.root / "summary.json"

    def result(self, candidate: str, stem: str) -> Path:
        """lm-eval's results of one candidate in one task, and our facts about them, as JSON."""
        return self.root / candidate / f"{stem}.json"

    def samples(self, candidate: str, stem: str) -> Path:
        """Each question with the model's answers and their scores, as JSON lines."""
        return self.root / candidate / f"{stem}.samples.jsonl"

    def results(self) -> Iterator[Path]:
        return (file for file in sorted(self.root.glob("*/*-shot.json")) if file.is_file())


@dataclass(frozen=True, slots=True)
class Facts:
    """Our addition to lm-eval's results, under the key `medarc`."""

    model: str
    candidate: str
    is_base: bool
    fingerprint: str
    settings: Mapping[str, Any]
    task: str
    shots: int | None
    """As asked; `n-shot` in lm-eval's results is what was used."""
    chat_template: bool
    max_length: int
    seconds: float
    notes: tuple[str, ...] = ()
    """Reasons to doubt a score, such as truncated answers."""


# What to evaluate: the weights of a run, or one model, and the model that they were trained from


BASE = "base"


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates that one server serves, one after the other."""

    served: str
    candidates: tuple[Candidate, ...]
    sweep: Sweep | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Weights to evaluate, found from the words of the command line."""

    groups: tuple[Group, ...]
    default_dir: Path
    """Directory of the results if `--output-dir` does not name one."""
    warnings: tuple[str, ...] = field(default=())


def find_weights(weights: str, base: str | None, no_base: bool, steps: Sequence[int] | None, watch: bool) -> Found:
    """Find the candidates in `weights`: all weights of a run's directory, or one model.

    Raises:
        UsageError: there is nothing to evaluate, or a named directory does not hold a model.
    """
    if base is not None and no_base:
        raise UsageError("--base and --no-base exclude each other: give one")
    run = RunPaths(Path(weights))
    if (run.configs / "lm_eval.json").is_file():
        raise UsageError(f"{weights}: the directory of an evaluation; name the run or the model that it evaluated")
    try:
        if run.configs.is_dir() and not (run.root / "config.json").is_file():
            return _of_run(run, base, no_base, steps, watch)
        if steps is not None or watch:
            raise UsageError(f"{weights}: --steps and --watch are for a run's directory, which has a folder configs")
        return _of_model(weights, base, no_base)
    except (StartFault, RunDirError) as fault:
        raise UsageError(str(fault)) from fault


def _of_run(run: RunPaths, base: str | None, no_base: bool, steps: Sequence[int] | None, watch: bool) -> Found:
    parent = run.weights if watch or stable_steps(run.weights) else run.orchestrator.broadcasts
    if not watch and not stable_steps(parent):
        raise UsageError(f"{run.root}: this run has no weights yet; they are written to {run.weights}")
    origin = base or model_of_run(run)
    found = [] if watch and steps is None else find_candidates(False, parent, steps)
    folders = [each.weights for each in found if each.weights is not None]
    warnings = []
    served = origin
    if origin is None or (fault := model_fault(origin, StartDir())):
        if base is not None or not folders or not (folders[0] / "config.json").is_file():
            reason = fault if origin else "the run does not say which; name it with --base"
            raise UsageError(f"{run.root}: its weights need the model that they were trained from: {origin}: {reason}")
        warnings.append(f"no base model is evaluated: {origin}: {fault}" if origin else "no base model is known")
        served, no_base = str(folders[0]), True
    assert served is not None
    own = () if no_base else (Candidate(BASE, served, is_base=True),)
    tuned = tuple(candidate_of(folder, served) for folder in folders)
    sweep = Sweep(str(run.root), str(parent)) if watch and steps is None else None
    return Found((Group(served, (*own, *tuned), sweep),), run.root / "lm_eval", tuple(warnings))


def _of_model(weights: str, base: str | None, no_base: bool) -> Found:
    found = find_chat_models(weights, base)
    tuned, name = found.tuned, _name_of(weights, found.tuned)
    place = next((each for each in Path(weights).absolute().parents if (each / "configs").is_dir()), None)
    default_dir = Path("lm_eval") / name if place is None else place / "lm_eval"
    if found.base is None or no_base:
        warnings = () if no_base else (f"no base model is evaluated: {found.no_base}",)
        return Found((Group(tuned.name, (_tuned(tuned, name),)),), default_dir, warnings)
    own = Candidate(BASE, found.base.name, is_base=True)
    if tuned.name == found.base.name:
        return Found((Group(tuned.name, (own, _tuned(tuned, name))),), default_dir)
    if _same_shape(Path(tuned.name), Path(found.base.name)):
        return Found((Group(found.base.name, (own, Candidate(name, tuned.name, tuned.name))),), default_dir)
    return Found((Group(found.base.name, (own,)), Group(tuned.name, (_tuned(tuned, name),))), default_dir)


def candidate_of(folder: Path, served: str) -> Candidate:
    """The candidate in a folder of a run. Broadcasts lack a tokenizer: the served model's is used."""
    has_tokenizer = (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file()
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    return Candidate(folder.name, str(folder) if has_tokenizer else served, str(folder.resolve()), is_adapter)


def adapter_rank(group: Group) -> int | None:
    """The largest rank of a group's adapters; None without adapters."""
    ranks = []
    for candidate in group.candidates:
        if candidate.is_adapter and candidate.weights is not None:
            ranks.append(read_settings(Path(candidate.weights)).largest_rank)
    return max(ranks, default=None)


def _tuned(model: ChatModel, name: str) -> Candidate:
    folder = model.adapter or model.weights
    if folder is None:
        return Candidate(name, model.name)
    return Candidate(name, candidate_of(Path(folder), model.name).tokenizer, folder, model.adapter is not None)


def _name_of(weights: str, model: ChatModel) -> str:
    folder = Path(model.adapter or model.weights or model.name)
    name = folder.absolute().name if Path(weights).exists() else weights.replace("/", "--")
    return name if step_of(folder) is not None or name != BASE else f"{name}-tuned"


def _same_shape(one: Path, other: Path) -> bool:
    """Whether a server of one model can take the weights of the other."""
    keys = ("architectures", "model_type", "hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings")
    shapes = []
    for folder in (one, other):
        try:
            content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        shapes.append([content.get(key) for key in keys])
    return shapes[0] == shapes[1]


# Running one group of candidates: an inference server, and the process that asks it


EVALUATOR = "lm_eval"
WORKER = "medarc_rl.lm_eval.worker"


@dataclass(frozen=True, slots=True)
class Engine:
    """How a group's model is served."""

    device: Literal["auto", "cuda", "cpu"]
    backend: Literal["auto", "vllm", "embedded"]
    max_model_len: int | None
    adapter_rank: int | None
    """None serves no adapters."""

    def config(self, model: str) -> InferenceConfig:
        return InferenceConfig.model_validate(
            {
                "model": {"name": model, "max_model_len": self.max_model_len},
                "device": self.device,
                "backend": self.backend,
                "enable_lora": self.adapter_rank is not None,
                "max_lora_rank": self.adapter_rank,
            }
        )


def run_group(plan: LmEvalPlan, engine: Engine, screen: TextIO) -> int:
    """Evaluate a group and return the exit code; progress goes to `screen`.

    Raises:
        UsageError: the evaluation cannot start.
        MedarcError: the server failed.
    """
    config, paths = engine.config(plan.served), plan.paths
    if faults := start_faults(config):
        raise UsageError(*faults)
    try:
        with (
            files_readable_by("owner"),
            run_lock(paths.root) as lock,
            LocalHost(held_by_guard=(lock,)) as host,
            claimed_placement(
                ResourceRequest(config.device, infer=1), shared_node(os.environ), os.environ, host.directory
            ) as site,
        ):
            _prepare(plan, config, site)
            with _shown(paths.progress, screen):
                processes = _processes(plan, config, site)
                stopping = "stopping; results of finished tasks are kept"
                outcome = Supervisor(processes, host, partial(_say, screen), stopping=stopping).run()
    except (DeviceError, RunDirError) as error:
        raise UsageError(str(error)) from error
    except CannotStart as error:
        raise MedarcError(str(error)) from error
    return _exit_code(outcome, paths)


def _prepare(plan: LmEvalPlan, config: InferenceConfig, site: Placement) -> None:
    paths = plan.paths
    for file in (paths.faults, paths.tasks_found):
        file.unlink(missing_ok=True)
    for folder in (paths.faults.parent, paths.progress.parent):
        folder.mkdir(parents=True, exist_ok=True)
    write_configs(RunPaths(paths.root), {"inference": config})
    paths.plan.write_text(replace(plan, url=inference_url(site)).to_json(), encoding="utf-8")


def _processes(plan: LmEvalPlan, config: InferenceConfig, site: Placement) -> tuple[ProcessSpec, ...]:
    paths, run = plan.paths, RunPaths(plan.paths.root)
    server = plan_server("medarc_train lm-eval", config, run, site, waits_for=paths.tasks_found)
    # lm-eval itself needs no GPU, because the server runs the model. datasets and tokenizers would print progress bars.
    env = {**site.bytecode, MASK_VARIABLE: "", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    evaluator = ProcessSpec(
        EVALUATOR,
        (site.programs.python, "-m", WORKER, str(paths.plan)),
        paths.log,
        {"PYTHONUNBUFFERED": "1", **env},
        secrets={ENGINE_KEY_VARIABLE: site.engine_key},
        completes_run=True,
        completion=run.completion(EVALUATOR),
    )
    return server, evaluator


def _exit_code(outcome: Outcome, paths: LmEvalPaths) -> int:
    """0 or 1 if the evaluation came to its end, 128 + n after signal n.

    Raises:
        UsageError: the tasks cannot be used.
        MedarcError: a process failed.
    """
    if paths.faults.is_file():
        raise UsageError(*json.loads(paths.faults.read_text(encoding="utf-8")))
    if outcome.succeeded or outcome.was_stopped:
        return outcome.exit_code
    if RunPaths(paths.root).completion(EVALUATOR).exists():
        return 1
    raise MedarcError(*outcome.report().splitlines())


@contextlib.contextmanager
def _shown(log: Path, screen: TextIO) -> Iterator[None]:
    follower = Follower.at_end(log)

    def look() -> None:
        for line in follower.lines():
            _say(screen, line)

    with polled(look, name="evaluation"):
        yield


def _say(screen: TextIO, line: str) -> None:
    screen.write(f"{line}\n")
    screen.flush()


def screen_for(as_json: bool) -> TextIO:
    """Stream for progress: stderr with `--json`, so that stdout holds one JSON document."""
    return sys.stderr if as_json else sys.stdout
