"""The process of an evaluation with lm-eval: `python -m medarc_rl.lm_eval.worker PLAN.json`.

Exit status: 0 if every candidate was evaluated in every task; 1 if something failed, after all the rest was done; 2 if
the tasks cannot be used (`control/faults.json` says why).
"""

from __future__ import annotations

import difflib
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from medarc_rl.lm_eval.plan import Candidate, Facts, Job, LmEvalPlan, candidate_of
from medarc_rl.lm_eval.scores import compared, is_done, metrics_of, write_result
from prime_rl.run.evaluations import Following
from prime_rl.run.process import end_with_launch, report_completion
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE
from prime_rl.utils.errors import one_line
from prime_rl.utils.signals import start_program

if TYPE_CHECKING:
    from medarc_rl.lm_eval.served import ServedModel

# Tasks by name, before a model is loaded. They are looked up in this process because importing lm-eval takes seconds.


_NEAREST = 3


class TaskFaults(Exception):
    """Tasks that do not exist or cannot be used."""

    def __init__(self, faults: Sequence[str]) -> None:
        super().__init__("\n".join(faults))
        self.faults = [one_line(fault) for fault in faults]


@dataclass(frozen=True, slots=True)
class Tasks:
    """The tasks of an evaluation."""

    manager: Any
    """lm-eval's `TaskManager`."""
    names: tuple[str, ...]
    """Tasks, groups and tags, with patterns replaced by the names that they match."""


def find_tasks(asked: Sequence[str], include_path: str | None, allow_unsafe_code: bool) -> Tasks:
    """Find tasks in `include_path` and among those of lm-eval.

    Raises:
        TaskFaults: a name is unknown, or a task runs code that a model wrote and may not.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=include_path, include_defaults=False) if include_path is not None else None
    if manager is None or not all(name in manager.task_index for name in asked):
        # Reading lm-eval's own 10,000 files takes many seconds.
        manager = TaskManager(include_path=include_path)
    names: list[str] = []
    faults: list[str] = []
    for name in asked:
        matches = manager.match_tasks([name])
        names += matches
        if not matches:
            near = difflib.get_close_matches(name, manager.task_index, n=_NEAREST, cutoff=0.6)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists all"
            faults.append(f"--tasks {name}: lm-eval has no such task{_searched(include_path)}; {hint}")
    if not allow_unsafe_code:
        unsafe = [name for name in names if _runs_code(manager, name, set())]
        faults += [
            f"--tasks {name}: runs code that the model wrote, on this machine and as you; to allow it, add "
            "--allow-unsafe-code"
            for name in unsafe
        ]
    if faults:
        raise TaskFaults(faults)
    return Tasks(manager, tuple(dict.fromkeys(names)))


def _searched(include_path: str | None) -> str:
    return "" if include_path is None else f", and {Path(include_path)} has none"


def _runs_code(manager: Any, name: str, seen: set[str]) -> bool:
    """Whether a task, or one of a group's or a tag's, is marked as unsafe."""
    if name in seen or name not in manager.task_index:
        return False
    seen.add(name)
    entry = manager.task_index[name]
    config = entry.cfg or {}
    members = [*_members(config.get("task")), *(entry.tags if _is_tag(entry) else ())]
    return bool(config.get("unsafe_code")) or any(_runs_code(manager, member, seen) for member in members)


def _members(listed: object) -> Iterator[str]:
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from (str(each[key]) for key in ("task", "group") if isinstance(each.get(key), str))


def _is_tag(entry: Any) -> bool:
    return str(getattr(entry.kind, "name", "")) == "TAG"


ADAPTER = "tuned"
"""Name under which the server holds an adapter."""
LOOK_EVERY_S = 10.0
_START_LOOK_S = 0.5


class Screen:
    """Lines for the user, who does not see the rest of this process's output."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def say(self, line: str) -> None:
        self._file.write(f"{one_line(line)}\n")


@dataclass(slots=True)
class Evaluation:
    """All candidates in all tasks. A failure is reported, and the rest goes on."""

    plan: LmEvalPlan
    tasks: Tasks
    client: httpx.Client
    screen: Screen
    failures: list[str] = field(default_factory=list)
    _loaded: Candidate | None = None

    @property
    def jobs(self) -> list[Job]:
        return [Job(task, shots) for task in self.tasks.names for shots in self.plan.shots]

    def run(self) -> None:
        for candidate in self.plan.candidates:
            self.evaluate(candidate)
        if (sweep := self.plan.sweep) is None:
            return
        for step in new_steps(Path(sweep.weights), self.screen.say):
            self.evaluate(candidate_of(Path(sweep.weights) / f"step_{step}", self.plan.served))

    def evaluate(self, candidate: Candidate) -> None:
        """Evaluate one candidate in the tasks that it has no results of."""
        paths = self.plan.paths
        missing = [job for job in self.jobs if not is_done(paths, candidate, job)]
        for job in self.jobs:
            if job not in missing:
                self.screen.say(
                    f"{candidate.title} | {job.task}: done before, in {paths.result(candidate.name, job.stem)}"
                )
        if not missing:
            return
        try:
            model = self._model(candidate)
        except Exception as error:  # noqa: BLE001 - reported; other candidates may work
            self._fail(candidate, "", error)
            return
        for job in missing:
            try:
                self._evaluate(candidate, model, job)
            except Exception as error:
                logging.getLogger(__name__).exception("%s, %s", candidate.title, job.task)
                self._fail(candidate, job.task, error)

    def _evaluate(self, candidate: Candidate, model: ServedModel, job: Job) -> None:
        from lm_eval import simple_evaluate

        settings, started_s = self.plan.settings, time.monotonic()
        fingerprint = candidate.fingerprint()
        is_chat = uses_template(candidate, model.tokenizer, settings.apply_chat_template)
        model.begin_task(is_chat)
        limits = {} if settings.max_gen_toks is None else {"max_gen_toks": settings.max_gen_toks}
        self.screen.say(f"{candidate.title} | {job.task}{_shots(job.shots)}{' | chat template' if is_chat else ''}")
        found: dict[str, Any] = simple_evaluate(
            model=model,
            tasks=[job.task],
            task_manager=self.tasks.manager,
            num_fewshot=job.shots,
            limit=settings.limit,
            gen_kwargs={**settings.gen_kwargs, **limits} or None,
            apply_chat_template=is_chat,
            log_samples=True,
            confirm_run_unsafe_code=settings.allow_unsafe_code,
        )
        notes = [*model.asked.counts.notes(model.asked.max_gen_toks), *_doubts(found, job)]
        facts = Facts(
            model=candidate.weights or candidate.tokenizer,
            candidate=candidate.name,
            is_base=candidate.is_base,
            fingerprint=fingerprint,
            settings={**compared(settings), "used_max_gen_toks": model.asked.max_gen_toks},
            task=job.task,
            shots=job.shots,
            chat_template=is_chat,
            max_length=model.max_length,
            seconds=round(time.monotonic() - started_s, 3),
            notes=tuple(notes),
        )
        write_result(self.plan.paths, job, found, facts)
        scores = ", ".join(f"{each.metric} {each.value:.4f}" for each in metrics_of(found, job.task)[:4])
        self.screen.say(f"{candidate.title} | {job.task} | {scores} | {facts.seconds:.1f} s")
        for note in notes:
            self.screen.say(f"warning: {candidate.title} | {job.task}: {note}")

    def _model(self, candidate: Candidate) -> ServedModel:
        """Load the candidate's weights into the server."""
        from medarc_rl.lm_eval.served import Endpoint, ServedModel

        name = self.plan.served
        if candidate.is_adapter:
            self._post("/load_lora_adapter", {"lora_name": ADAPTER, "lora_path": candidate.weights})
            name = ADAPTER
        elif candidate.weights is not None or self._loaded is not None:
            self._post("/update_weights", {"weight_dir": candidate.weights})
        self._loaded = candidate
        (served,) = [entry for entry in self._get("/v1/models")["data"] if entry["id"] == self.plan.served]
        return ServedModel(candidate, Endpoint(self.plan.url, name, served["max_model_len"], self.plan.batch_size))

    def _post(self, route: str, body: dict[str, Any]) -> None:
        answer = self.client.post(route, json=body)
        if answer.status_code != httpx.codes.OK:
            raise RuntimeError(f"the server refused: {_message(answer)}")

    def _get(self, route: str) -> dict[str, Any]:
        content = self.client.get(route).raise_for_status().json()
        assert isinstance(content, dict)
        return content

    def _fail(self, candidate: Candidate, task: str, error: Exception) -> None:
        line = f"{candidate.title}{f' | {task}' if task else ''}: {error or type(error).__name__}"
        self.screen.say(f"failed: {line}")
        self.failures.append(line)


def new_steps(
    weights: Path, say: Callable[[str], object], sleep: Callable[[float], object] = time.sleep
) -> Iterator[int]:
    """Yield each complete checkpoint of a run once, as it appears, until the run has ended."""
    following, is_waiting = Following(weights), False
    while not following.has_ended:
        new = following.look()
        yield from new
        if following.has_ended:
            return
        if new or not is_waiting:
            say(f"waiting for the next checkpoint in {weights}; the evaluation ends with the run")
        is_waiting = True
        sleep(LOOK_EVERY_S)


def uses_template(candidate: Candidate, tokenizer: Any, asked: str) -> bool:
    """Whether questions are asked as a chat. `auto`: a model with a template, unless it is named as a base model."""
    if asked == "auto":
        words = Path(candidate.tokenizer).name.lower().replace("_", "-").split("-")
        return bool(tokenizer.chat_template) and not {"base", "pt"} & set(words)
    if asked == "yes" and not tokenizer.chat_template:
        raise RuntimeError("--apply-chat-template yes: the model has no chat template")
    return asked == "yes"


def _shots(shots: int | None) -> str:
    return "" if shots is None else f", {shots}-shot"


def _doubts(found: dict[str, Any], job: Job) -> list[str]:
    """Reasons to doubt the scores that lm-eval's results show: other shots than requested, unparsed answers."""
    lines = []
    used = sorted(set(found.get("n-shot", {}).values()))
    if job.shots is not None and used not in ([job.shots], []):
        lines.append(f"asked for {job.shots} examples in the prompt; the task uses {', '.join(map(str, used))}")
    for task, samples in (found.get("samples") or {}).items():
        for name in dict.fromkeys(sample["filter"] for sample in samples):
            own = [sample for sample in samples if sample["filter"] == name]
            none = sum(str(sample["filtered_resps"][0]) == "[invalid]" for sample in own if sample["filtered_resps"])
            if none:
                lines.append(f"{none} of {len(own)} answers of {task} hold no answer that {name} recognises")
    return lines


def _message(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {answer.status_code}"


def _await_server(client: httpx.Client) -> None:
    """Return once the server answers. The launcher ends this process if the server ends."""
    while True:
        try:
            if client.get("/health").status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            logging.getLogger(__name__).debug("the server is not ready yet")
        time.sleep(_START_LOOK_S)


def main() -> None:
    end_with_launch()
    start_program()
    signal.signal(signal.SIGTERM, lambda received, frame: sys.exit(128 + received))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    (file,) = sys.argv[1:]
    plan = LmEvalPlan.from_json(Path(file).read_text(encoding="utf-8"))
    if plan.settings.allow_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    try:
        tasks = find_tasks(plan.tasks, plan.settings.include_path, plan.settings.allow_unsafe_code)
    except TaskFaults as faults:
        plan.paths.faults.write_text(json.dumps(faults.faults), encoding="utf-8")
        raise SystemExit(2) from faults
    plan.paths.tasks_found.touch()
    headers = {"Authorization": f"Bearer {os.environ[ENGINE_KEY_VARIABLE]}"}
    # A new connection for each call: vLLM closes an idle one after 5 s, just when a task may have ended. The server is
    # on this machine, where no proxy of the environment reaches it.
    once = httpx.Limits(max_keepalive_connections=0)
    with httpx.Client(base_url=plan.url, headers=headers, timeout=600, trust_env=False, limits=once) as client:
        _await_server(client)
        evaluation = Evaluation(plan, tasks, client, Screen(plan.paths.progress))
        evaluation.run()
    report_completion()
    raise SystemExit(1 if evaluation.failures else 0)


if __name__ == "__main__":
    main()
