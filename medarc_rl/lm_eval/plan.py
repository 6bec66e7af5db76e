"""What one evaluation with lm-eval does, as a value that the command hands to its process."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

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
    """What scores depend on, apart from the weights."""

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
        """What lm-eval and the libraries below it print."""
        return self.root / "logs" / "lm_eval.log"

    @property
    def progress(self) -> Path:
        """What the user sees."""
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
    """What we add to lm-eval's results, under the key `medarc`."""

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
    """What makes a score doubtful, such as answers that were cut off."""
