"""All paths of a run. No other module joins run paths.

`OUT` is the run's directory; the orchestrator keeps its files in `OUT/run_default`, `RUN`. The directory of a step is
named `step_<n>`. A directory with the file `STABLE` is complete and flushed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prime_rl.utils.files import STABLE

STORE_VARIABLE = "PRIME_RL_STORE"
"""Environment variable of the trainer's ranks: the file through which they find each other."""

TRACE_VARIABLE = "TRACE_FILE"
"""Environment variable of a process whose trace is recorded: its file."""

_STEP_DIR = re.compile(r"step_(\d+)")
_SAMPLES = re.compile(r"(step|eval)_(\d+)(?:\.rank_(\d+))?\.jsonl(?:\.gz)?")


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The directory of one run, `OUT`."""

    root: Path

    @classmethod
    def from_orchestrator_dir(cls, output_dir: Path) -> RunPaths:
        """The run whose orchestrator writes to `output_dir` (`OUT/run_default` under the launchers)."""
        return cls(output_dir.parent if output_dir.name.startswith("run_") else output_dir)

    @property
    def orchestrator(self) -> OrchestratorPaths:
        return OrchestratorPaths(self.root / "run_default")

    @property
    def configs(self) -> Path:
        return self.root / "configs"

    def config(self, component: str) -> Path:
        """The resolved config of a component: `trainer`, `orchestrator`, `inference`, `rl` or `sft`."""
        return self.configs / f"{component}.toml"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    def log(self, component: str) -> Path:
        return self.logs / f"{component}.log"

    def completion(self, process: str) -> Path:
        """Marker: the process of this launch has done all of its work."""
        return self.root / "control" / f"{process}.complete"

    @property
    def traces(self) -> Path:
        """Timeline of a process, as Chrome trace events."""
        return self.root / "traces"

    def trace(self, process: str) -> Path:
        return self.traces / f"{process}.jsonl"

    def heartbeat(self, process: str) -> Path:
        """Activity of the process, overwritten with each progress."""
        return self.root / "control" / f"{process}.beat"

    def judge_cache(self, judge: str, directory: Path | None = None) -> Path:
        """Answers of a judge, in `directory` or in the run's."""
        return (directory or self.root / "judges") / f"{judge}.sqlite"

    @property
    def save_request(self) -> Path:
        """A user makes this file to have a checkpoint saved now. The launcher removes it."""
        return self.root / "save"

    @property
    def attempts(self) -> Path:
        """One receipt for each attempt."""
        return self.root / "attempts"

    def receipt(self, attempt: int) -> Path:
        """Receipt of an attempt, as JSON: its start, and what each part restored."""
        return self.attempts / f"{attempt:03}.json"

    @property
    def matrix_products(self) -> Path:
        """The library that the trainer chose for matrix products on a CPU, as JSON. A resumed run keeps it."""
        return self.attempts / "matrix_products.json"

    @property
    def contact_sheet(self) -> Path:
        """Small pictures of the first images of SFT's data, as JSON. The report shows them."""
        return self.attempts / "contact_sheet.json"

    @property
    def pictures(self) -> Path:
        """Small pictures of the images of kept rollouts, named by the SHA-256 of the image."""
        return self.root / "pictures"

    def reference(self, section: str) -> Path:
        """Log-probabilities of the rows of `data` or `val.data` under the model that a run of `dpo` started from."""
        return self.root / "reference" / f"{section}.safetensors"

    def restored(self, part: str) -> Path:
        """Report of a part about what it has restored, on its way to the receipt."""
        return self.root / "control" / f"{part}.restored.json"

    @property
    def control(self) -> Path:
        return self.root / "control"

    def sink_id(self, sink: str, component: str) -> Path:
        """Id that a sink of metrics gave the run of a component, which all attempts share."""
        return self.control / f"{sink}_{component}.id"

    def wandb_id(self, component: str) -> Path:
        return self.sink_id("wandb", component)

    def sink(self, sink: str) -> Path:
        """Directory of a sink of metrics, unless the config names another one."""
        return self.root / sink

    @property
    def mlflow(self) -> Path:
        """MLflow's database."""
        return self.root / "mlflow.db"

    @property
    def server_log(self) -> Path | None:
        """Log of the inference server that was started for the run; None if somebody else started it."""
        return self.started_log("inference")

    def started_log(self, server: str) -> Path | None:
        """Log of a server that was started for the run; None if somebody else started it."""
        return self.log(server) if self.config(server).is_file() else None

    def rank_log(self, rank: int) -> Path:
        return self.logs / "trainer" / f"rank_{rank}.log"

    @property
    def metrics(self) -> Path:
        """JSON lines, appended by every component."""
        return self.root / "metrics.jsonl"

    @property
    def relayed(self) -> Path:
        """Bytes of `metrics.jsonl` that were searched for evaluations that the trainer's sinks should have."""
        return self.control / "relayed_evaluations"

    @property
    def status(self) -> Path:
        """The state of the run as a page of Markdown, kept current by the launcher."""
        return self.root / "STATUS.md"

    @property
    def early_end(self) -> Path:
        """Step and reason of a run that a rule of `[early_stop]` has ended, as JSON."""
        return self.root / "early_end.json"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    def trainer_checkpoint(self, step: int) -> Path:
        return self.checkpoint(step) / "trainer"

    def saved_config(self, step: int, component: str) -> Path:
        """The config of a component that the checkpoint of a step was made with."""
        return self.checkpoint(step) / "configs" / f"{component}.toml"

    @property
    def best_checkpoint(self) -> Path:
        """The step with the lowest validation loss or, in RL, with the best evaluation, as JSON."""
        return self.checkpoints / "best.json"

    @property
    def weights(self) -> Path:
        """Exports that Transformers and vLLM load unchanged."""
        return self.root / "weights"

    def weight(self, step: int) -> Path:
        return self.weights / f"step_{step}"

    def only_for_evaluation(self, step: int) -> Path:
        """Marker in an export: the evaluator deletes it once it is evaluated."""
        return self.weight(step) / "ONLY_FOR_EVALUATION"

    @property
    def evaluation_lost(self) -> Path:
        """Marker: the evaluation next to this training has ended early, so that nobody waits for exports."""
        return self.control / "evaluation.lost"

    @property
    def rollouts(self) -> Path:
        """Packed micro-batches, from the packer to the trainer's ranks."""
        return self.root / "rollouts"

    def rank_batch(self, step: int, data_rank: int) -> Path:
        return self.rollouts / f"step_{step}" / f"rank_{data_rank}.bin"

    @property
    def upload_plan(self) -> Path:
        """Target of the upload to S3, and how many checkpoints may wait for it, as JSON."""
        return self.root / "storage" / "upload.json"

    def uploaded(self, step_directory: Path) -> Path:
        """Marker: a step's directory is on S3 whole."""
        return self.root / "storage" / "uploaded" / step_directory.relative_to(self.root)

    @property
    def slurm(self) -> Path:
        """Slurm's output of each job."""
        return self.root / "slurm"

    @property
    def ray(self) -> Path:
        """Output and exit code of each driver of a Ray job."""
        return self.root / "ray"

    def queued(self, number: int) -> RunPaths:
        """Config and script of a job that waits for another one of this run, whose own files stay as they are."""
        return RunPaths(self.slurm / f"queued_{number}")

    def batch_script(self, command: str) -> Path:
        """The batch script of `sft` or `rl`."""
        return self.root / f"{command}.sh"


@dataclass(frozen=True, slots=True)
class OrchestratorPaths:
    """The orchestrator's directory of one run, `RUN`."""

    root: Path

    @property
    def control(self) -> Path:
        return self.root / "control"

    @property
    def environments_checked(self) -> Path:
        """Marker: the environments have been loaded and can be used, so that the engine may load its model."""
        return self.control / "ENVIRONMENTS_CHECKED"

    @property
    def resolved_config(self) -> Path:
        return self.control / "orch.toml"

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    def batch(self, step: int) -> Path:
        """The training batch of one step, from the orchestrator to the packer."""
        return self.rollouts / f"step_{step}" / "rollouts.bin"

    @property
    def broadcasts(self) -> Path:
        return self.root / "broadcasts"

    def broadcast(self, version: int) -> Path:
        """Policy weights of one version, from the trainer to the inference engines."""
        return self.broadcasts / f"step_{version}"

    def broadcast_ready(self, version: int) -> Path:
        """Marker: the servers are about to receive this version from the trainer's memory."""
        return self.broadcast(version) / "NCCL_READY"

    @property
    def broadcasts_closed(self) -> Path:
        """Marker: the orchestrator has ended and needs no further version."""
        return self.broadcasts / "CLOSED"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}" / "orchestrator"

    def saved_progress(self, step: int) -> Path:
        """Counters at the start of a step, as JSON."""
        return self.checkpoint(step) / "progress.json"

    def saved_buffer(self, step: int) -> Path:
        """Examples in flight and difficulty pools at the start of a step, as JSON."""
        return self.checkpoint(step) / "buffer.json"

    @property
    def ledger(self) -> Path:
        """Fate of each example, as JSON lines, appended."""
        return self.root / "ledger.jsonl"

    @property
    def samples(self) -> Path:
        """Kept rollouts as compressed JSON lines."""
        return self.root / "samples"

    def step_samples(self, step: int) -> Path:
        return self.samples / f"step_{step}.jsonl.gz"

    def eval_samples(self, version: int) -> Path:
        return self.samples / f"eval_{version}.jsonl.gz"

    def trainer_samples(self, step: int, data_rank: int) -> Path:
        """The trainer's log-probabilities of a step's kept rollouts."""
        return self.samples / f"step_{step}.rank_{data_rank}.jsonl.gz"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def log(self) -> Path:
        return self.logs / "orchestrator.log"

    def env_log(self, purpose: str, env: str) -> Path:
        """Log of an environment server; `purpose` is `train` or `eval`."""
        return self.logs / purpose / f"{env.replace('/', '--')}.log"


@dataclass(frozen=True, slots=True)
class EvalPaths:
    """Files of `eval`, in addition to the `configs`, `logs` and `metrics.jsonl` of every run."""

    root: Path

    @property
    def results(self) -> Path:
        """Finished rollouts as JSON lines."""
        return self.root / "eval" / "results.jsonl"

    @property
    def settings(self) -> Path:
        """The settings of the results, as JSON."""
        return self.root / "eval" / "settings.json"

    @property
    def evaluated(self) -> Path:
        """Steps whose weights were evaluated next to a training, as a JSON list."""
        return self.root / "eval" / "evaluated.json"

    @property
    def summary(self) -> Path:
        """The scores of every step and environment, as JSON."""
        return self.root / "eval" / "summary.json"


@dataclass(frozen=True, slots=True)
class SamplesFile:
    """A file of kept rollouts, by its name."""

    path: Path
    kind: str
    """`step` or `eval`."""
    number: int
    """The step, or the policy version of an evaluation."""
    data_rank: int | None
    """Set if it holds the trainer's log-probabilities."""

    @classmethod
    def of(cls, path: Path) -> SamplesFile | None:
        match = _SAMPLES.fullmatch(path.name)
        if match is None:
            return None
        rank = match.group(3)
        return cls(path, match.group(1), int(match.group(2)), None if rank is None else int(rank))

    @classmethod
    def all_in(cls, samples: Path) -> list[SamplesFile]:
        """Files of kept rollouts in a directory, by number."""
        paths = samples.iterdir() if samples.is_dir() else ()
        found = [file for path in paths if (file := cls.of(path)) is not None]
        return sorted(found, key=lambda file: (file.kind, file.number, file.data_rank or 0))


def step_of(directory: Path) -> int | None:
    """The step in a directory's name, or None."""
    match = _STEP_DIR.fullmatch(directory.name)
    return int(match.group(1)) if match else None


def stable_steps(parent: Path) -> list[int]:
    """Steps of the complete `step_<n>` directories in `parent`, ascending."""
    if not parent.is_dir():
        return []
    steps = (step_of(child) for child in parent.iterdir() if (child / STABLE).is_file())
    return sorted(step for step in steps if step is not None)
