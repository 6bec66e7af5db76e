"""Finds what to evaluate: the weights of a run, or one model, and the model that they were trained from."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medarc_rl.errors import UsageError
from medarc_rl.lm_eval.plan import Candidate, Sweep
from prime_rl.checks.chat_models import ADAPTER_CONFIG, ChatModel, find_chat_models, model_of_run
from prime_rl.checks.model_files import model_fault
from prime_rl.checks.start_dir import StartDir
from prime_rl.run.evaluations import find_candidates
from prime_rl.run.paths import RunPaths, stable_steps, step_of
from prime_rl.utils.errors import RunDirError, StartFault

BASE = "base"


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates that one server serves, one after the other."""

    served: str
    candidates: tuple[Candidate, ...]
    sweep: Sweep | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What the words of a command line stand for."""

    groups: tuple[Group, ...]
    default_dir: Path
    """Where results go unless the user says so."""
    warnings: tuple[str, ...] = field(default=())


def find_weights(weights: str, base: str | None, no_base: bool, steps: Sequence[int] | None, watch: bool) -> Found:
    """Find the candidates in `weights`: all weights of a run's directory, or one model.

    Raises:
        UsageError: there is nothing to evaluate, or a model that is named is none.
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
    """The candidate in a folder of a run. A broadcast has no tokenizer of its own."""
    has_tokenizer = (folder / "tokenizer_config.json").is_file() or (folder / "tokenizer.json").is_file()
    is_adapter = (folder / ADAPTER_CONFIG).is_file()
    return Candidate(folder.name, str(folder) if has_tokenizer else served, str(folder.resolve()), is_adapter)


def adapter_rank(group: Group) -> int | None:
    """The largest rank of a group's adapters; None without adapters."""
    ranks = []
    for candidate in group.candidates:
        if candidate.is_adapter and candidate.weights is not None:
            content = json.loads((Path(candidate.weights) / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            ranks.append(content.get("r") if isinstance(content.get("r"), int) else 0)
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
