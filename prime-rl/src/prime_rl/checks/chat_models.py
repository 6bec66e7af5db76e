"""Finds the models of a chat: trained weights, wherever a run keeps them, and the model that they were trained from."""

from __future__ import annotations

import json
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prime_rl.checks.adapters import ADAPTER_CONFIG
from prime_rl.checks.disk import default_hub_cache, snapshot_in_cache
from prime_rl.checks.model_files import model_fault
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.surface.renamed import SFT_COMMANDS
from prime_rl.run.paths import RunPaths, stable_steps, step_of
from prime_rl.utils.errors import StartFault
from prime_rl.utils.files import STABLE, nearest_path


@dataclass(frozen=True, slots=True)
class ChatModel:
    """A model that answers."""

    title: str
    """Title above its answers."""
    name: str
    """The model to load: a folder, or a hub id."""
    weights: str | None = None
    """Folder with full weights that replace those of `name`."""
    adapter: str | None = None
    """Folder of a LoRA adapter of `name`."""
    chat_template: str | None = None
    """Replaces the model's own, as in a config."""
    is_optional: bool = False
    """The chat goes on without it if it cannot be loaded, as a hub id without a network."""


@dataclass(frozen=True, slots=True)
class ChatPlan:
    """Everything that the chat's process needs."""

    models: tuple[ChatModel, ...]
    """Every model answers every message, in this order."""
    sampling: dict[str, Any]
    """Arguments of `inference.protocol.ChatBody`."""
    prompts: tuple[str, ...] = ()
    """Messages to answer, one after the other. Empty reads them from stdin."""
    system: str | None = None
    device: str = "auto"
    no_base: str = ""
    """Why no base model answers, if the user has not asked for that. Told once the model is loaded."""
    images: tuple[str, ...] = ()
    """Files that the models see with the first message."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ChatPlan:
        values = json.loads(text)
        models = tuple(ChatModel(**each) for each in values.pop("models"))
        return cls(models=models, **{**values, "prompts": tuple(values["prompts"]), "images": tuple(values["images"])})


@dataclass(frozen=True, slots=True)
class FoundModels:
    """Models that the words of a command line stand for."""

    tuned: ChatModel
    base: ChatModel | None = None
    no_base: str = ""
    """Why there is no base model to compare with."""


def find_chat_models(weights: str, base: str | None = None) -> FoundModels:
    """Find the model in `weights` and its base.

    `weights` is a model's folder, a hub id, an adapter, a run's directory, its `weights`, or one `step_<n>` of its
    weights, checkpoints or broadcasts. Unless `base` names it, the base is the model that the run or the adapter was
    trained from.

    Raises:
        StartFault: there is no model, or `base` is none.
    """
    path = Path(weights)
    if not path.exists():
        if fault := model_fault(weights, StartDir()) or _mistyped(path):
            raise StartFault(f"{weights}: {fault}")
        return _with_base(ChatModel(weights, weights), None, base)
    if not path.is_dir():
        raise StartFault(f"{weights}: this is a file; give the folder of a model, an adapter or a run")
    return _in_folder(_newest(path), base)


def _mistyped(path: Path) -> str | None:
    """Why `outputs/nope` is no hub id where there is a folder `outputs`: the hub would be asked for half a minute."""
    if len(path.parts) < 2 or not Path(path.parts[0]).is_dir() or snapshot_in_cache(str(path), default_hub_cache()):
        return None
    near = nearest_path(path)
    return "no such directory" + (f"; did you mean {near}?" if near else "")


def _newest(folder: Path) -> Path:
    """The model's folder of the newest complete step, if `folder` is a run or holds steps."""
    if (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file() or step_of(folder) is not None:
        return folder
    run = RunPaths(folder)
    for parent in (run.weights, run.orchestrator.broadcasts, folder):
        if steps := stable_steps(parent):
            return parent / f"step_{steps[-1]}"
    if run.configs.is_dir():
        raise StartFault(f"{folder}: this run has no weights yet; they are written to {run.weights}")
    return folder


def _in_folder(folder: Path, base: str | None) -> FoundModels:
    run = next((RunPaths(each) for each in folder.absolute().parents if (each / "configs").is_dir()), None)
    folder = _exported(folder, run)
    of_run = None if run is None else model_of_run(run)
    if (folder / ADAPTER_CONFIG).is_file():
        origin = base or _adapted_model(folder, of_run)
        if origin is None:
            raise StartFault(f"{folder}: this is an adapter; give its base model with --base")
        if fault := model_fault(origin, StartDir()):
            raise StartFault(f"{folder} adapts {origin}: {fault}; give that model with --base")
        return FoundModels(ChatModel(str(folder), origin, adapter=str(folder)), ChatModel(origin, origin))
    origin = base or of_run
    if not (folder / "config.json").is_file() and (folder / "model.safetensors").is_file() and origin is not None:
        # A broadcast holds tensors only.
        if fault := model_fault(origin, StartDir()):
            raise StartFault(f"{folder} holds weights of {origin}: {fault}; give that model with --base")
        return _with_base(ChatModel(str(folder), origin, weights=str(folder)), origin, base)
    if fault := model_fault(str(folder), StartDir()):
        raise StartFault(f"{folder}: {fault}{_models_inside(folder)}")
    return _with_base(ChatModel(str(folder), str(folder)), origin, base)


def _exported(folder: Path, run: RunPaths | None) -> Path:
    """The folder with the model of a step, for a folder that holds the trainer's state at that step."""
    state = folder.parent if folder.name == "trainer" else folder
    step = step_of(state)
    if run is None or step is None or state.parent.absolute() != run.checkpoints:
        return folder
    places = (run.weight(step), run.orchestrator.broadcast(step))
    if found := next((place for place in places if (place / STABLE).is_file()), None):
        return found
    there = ", ".join(map(str, stable_steps(run.weights))) or "none"
    raise StartFault(
        f"{folder}: the trainer's state, to resume from; the model of step {step} was not exported to {run.weights}; "
        f"exported steps: {there}"
    )


def _with_base(tuned: ChatModel, origin: str | None, asked: str | None) -> FoundModels:
    name = asked or origin
    if name is None:
        return FoundModels(tuned, no_base="name one with --base")
    if name == tuned.name and tuned.weights is None:
        return FoundModels(tuned, no_base="it is the same model")
    if fault := model_fault(name, StartDir()):
        if asked:
            raise StartFault(f"--base {name}: {fault}")
        return FoundModels(tuned, no_base=f"{name}: {fault}")
    template = _template_for(name, tuned)
    return FoundModels(tuned, ChatModel(name, name, chat_template=template, is_optional=asked is None))


def _template_for(base: str, tuned: ChatModel) -> str | None:
    """The tuned model's chat template, for a base without one."""
    template = Path(tuned.name) / "chat_template.jinja"
    return str(template) if template.is_file() and Path(base).is_dir() and not _has_template(Path(base)) else None


def _has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    return bool(_json(folder / "tokenizer_config.json").get("chat_template"))


def model_of_run(run: RunPaths) -> str | None:
    """The model that a run started from."""
    for component in ("trainer", *SFT_COMMANDS):
        file = run.config(component)
        if file.is_file():
            name = tomllib.loads(file.read_text(encoding="utf-8")).get("model", {}).get("name")
            return name if isinstance(name, str) else None
    return None


def _adapted_model(adapter: Path, of_run: str | None) -> str | None:
    """The model that an adapter changes: the one it names, or `of_run` if only that can be loaded.

    Adapters name a folder's full path. A run's config may name it relative to the directory where the run was started.
    """
    own = _json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    named = [each for each in (own, of_run) if isinstance(each, str) and each]
    return next((each for each in named if model_fault(each, StartDir()) is None), named[0] if named else None)


def _models_inside(folder: Path) -> str:
    """Suggest a model in a subfolder, for a folder that is not a model."""
    inside = sorted({*folder.glob("*/config.json"), *folder.glob(f"*/{ADAPTER_CONFIG}"), *folder.glob("*/weights")})
    return f"; did you mean {inside[0].parent}?" if inside else ""


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
