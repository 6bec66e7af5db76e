"""Reads and writes the results of an evaluation, and finds those that are missing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medarc_rl.lm_eval.plan import Candidate, Facts, Job, LmEvalPaths, Settings
from prime_rl.utils.files import replacing_file

FACTS = "medarc"
_OURS_ALONE = ("allow_unsafe_code", "include_path")
"""Settings that do not change a score."""


class OtherSettings(Exception):
    """Results of other settings are there, which must not be mixed with new ones. The message is one line."""


@dataclass(frozen=True, slots=True)
class Result:
    """The scores of one candidate in one task."""

    path: Path
    content: Mapping[str, Any]
    """lm-eval's results, without samples."""

    @property
    def facts(self) -> Mapping[str, Any]:
        facts = self.content[FACTS]
        assert isinstance(facts, dict)
        return facts

    def samples(self) -> list[dict[str, Any]]:
        file = self.path.with_name(self.path.name.removesuffix(".json") + ".samples.jsonl")
        if not file.is_file():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def read_result(path: Path) -> Result | None:
    """The result in a file; None if there is no such file, or none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    known = isinstance(content, dict) and isinstance(content.get("results"), dict)
    return Result(path, content) if known and isinstance(content.get(FACTS), dict) else None


def read_results(paths: LmEvalPaths) -> list[Result]:
    return [result for path in paths.results() if (result := read_result(path)) is not None]


def is_done(paths: LmEvalPaths, candidate: Candidate, job: Job) -> bool:
    """Whether the candidate was evaluated with the weights that it has now."""
    result = read_result(paths.result(candidate.name, job.stem))
    return result is not None and result.facts.get("fingerprint") == candidate.fingerprint()


def check_settings(paths: LmEvalPaths, jobs: Sequence[Job], settings: Settings) -> None:
    """Raise OtherSettings if a result of these jobs was made with others."""
    stems, now = {job.stem for job in jobs}, compared(settings)
    for result in read_results(paths):
        if result.path.name.removesuffix(".json") not in stems:
            continue
        made_with = result.facts.get("settings", {})
        if changed := [key for key, value in now.items() if made_with.get(key) != value]:
            listed = ", ".join(f"{key} = {made_with.get(key)!r}, now {now[key]!r}" for key in changed)
            raise OtherSettings(f"{result.path} was made with {listed}: choose another --output-dir, or delete it")


def compared(settings: Settings) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(json.dumps(asdict(settings)))
    return {key: value for key, value in values.items() if key not in _OURS_ALONE}


def write_result(paths: LmEvalPaths, job: Job, found: Mapping[str, Any], facts: Facts) -> None:
    """Write the samples, then the results: a result that is there is complete."""
    samples = [{"task": task, **sample} for task, every in (found.get("samples") or {}).items() for sample in every]
    lines = (json.dumps(sample, ensure_ascii=False, default=str) for sample in samples)
    write_private(paths.samples(facts.candidate, job.stem), "".join(f"{line}\n" for line in lines))
    kept = {key: value for key, value in found.items() if key not in ("samples", "pretty_env_info")}
    content = {**kept, FACTS: asdict(facts)}
    text = json.dumps(content, indent=2, ensure_ascii=False, default=str)
    write_private(paths.result(facts.candidate, job.stem), f"{text}\n")


def write_private(path: Path, text: str) -> None:
    """Replace a file by one that only its owner can read."""
    with replacing_file(path) as scratch:
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
