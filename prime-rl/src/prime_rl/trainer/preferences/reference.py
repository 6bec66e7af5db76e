"""The reference of preferences: log-probabilities of every answer under the model that the run starts from, or another.

They are computed once, before the first step, and no second model is held while the run trains. A new adapter changes
nothing, so with a new LoRA adapter the starting model is the one without it.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from prime_rl.checks.adapters import adapter_folder
from prime_rl.checks.disk import default_hub_cache, snapshot_in_cache
from prime_rl.configs.dpo import DPOConfig
from prime_rl.configs.model import ModelConfig
from prime_rl.run.paths import RunPaths
from prime_rl.run.process import own_beats
from prime_rl.trainer.model.build import setup_frozen
from prime_rl.trainer.model.tokenizer import check_tokenizer
from prime_rl.trainer.preferences.objective import Preferences, Unpaired, scored
from prime_rl.trainer.process.errors import CheckpointError, ModelError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.sft.data.pairs import Labelled, Pair
from prime_rl.trainer.sft.data.samples import DatasetStream, Sample
from prime_rl.trainer.sft.resume import fingerprint_of
from prime_rl.trainer.sft.validation import evaluating
from prime_rl.utils.contents import sampled_digest
from prime_rl.utils.errors import StartFault, one_line
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import count_of, get_logger

_WINDOW = 1024
"""Rows of data that are tokenized and packed at once. More would fill rows better and hold more tokens in memory."""
_SAVE_EVERY_S = 30.0
"""A run that is stopped while it computes the reference loses at most as much, and a window."""


def reference_logprobs(model: PreTrainedModel, stream: DatasetStream, mesh: Mesh, parts: Parts | None = None) -> Tensor:
    """Log-probabilities of chosen and rejected answer [rows, 2] of each of the dataset's rows, or of each answer and
    its mismatched one [2 * rows, 2]; 0 for rows that are not trained on. A collective call.

    `parts` keeps what is computed, and knows what a run that was stopped has computed.
    """
    axis, device = mesh.data_axis, mesh.process.device
    found = torch.zeros(stream.row_count * (1 if stream.config.holds_pairs else 2), 2)
    done = 0
    if parts is not None:
        done, before = parts.read(found)
        # As far as every rank has come: windows are computed together.
        done = min(axis.sum_counts([done if rank == axis.data_rank else 0 for rank in range(axis.data_size)]))
        found = before if done else found
        if done and mesh.process.is_main:
            rows = min(done * _WINDOW * axis.data_size, stream.row_count)
            get_logger().info(f"Reference: continues after {rows:,} of {stream.row_count:,} rows")
    own = islice(stream.own_share(), done * _WINDOW, None)
    # Room for both sequences, which share the computation of their prompt.
    row_tokens = 2 * stream.config.seq_len * stream.config.micro_batch_size
    windows = len(range(0, -(-stream.row_count // axis.data_size), _WINDOW))
    with evaluating(model):
        # Every data rank takes as many windows, and as many rows of each: sharded weights are gathered together.
        for window in range(done, windows):
            samples = [sample for made in islice(own, _WINDOW) for sample in made.samples]
            compared = [_both_of(sample) for sample in samples]
            for row, logprobs in scored(model, compared, stream.config, mesh, row_tokens):
                found[[pair.key for pair in row.pairs]] = logprobs.float().cpu().view(-1, 2)
            if parts is not None and window + 1 < windows:
                parts.keep(found, window + 1)
    if axis.data_size > 1:
        on_device = found.to(device)
        dist.all_reduce(on_device, group=axis.group)
        found = on_device.cpu()
    return found


def _both_of(sample: Sample) -> Pair:
    """The two sequences of a sample whose log-probabilities are kept. Without a mismatched one, the same twice: shared
    prefixes are computed once."""
    if isinstance(sample, Labelled):
        return Pair(sample.sequence, sample.mismatched or sample.sequence, sample.key)
    assert isinstance(sample, Pair), "rows of preferences"
    return sample


class Reference:
    """The reference of a run, whose log-probabilities a run with checkpoints keeps in `OUT/reference/`."""

    def __init__(
        self,
        config: DPOConfig,
        compared: Sequence[tuple[Preferences | Unpaired, DatasetStream]],
        tokenizer: PreTrainedTokenizerBase,
        mesh: Mesh,
        paths: RunPaths | None,
    ) -> None:
        """`compared`: objectives that need log-probabilities, with their data. `paths`: None if the run keeps none."""
        self.config = config
        self.compared = compared
        self.tokenizer = tokenizer
        self.mesh = mesh
        self.paths = paths
        name = config.reference.name
        self._words = "under the starting model" if name is None else f"under reference.name = {name}"

    def find(self, *, is_resumed: bool) -> None:
        """Read what the run kept. Compute the rest, if the reference is another model. Collective.

        Raises:
            CheckpointError: a file is damaged or cannot be written.
            ModelError: `reference.name` cannot be loaded, or has another tokenizer.
        """
        for objective, stream in self.compared:
            objective.reference = self._kept(stream, is_resumed=is_resumed)
        name, model = self.config.reference.name, self.config.model
        if name is None or self.is_known:
            return
        check_tokenizer("reference.name", name, model, self.tokenizer)
        own_beats().say("loading the reference")
        self.compute_rest(setup_frozen(model, self.mesh, name=name))
        gc.collect()  # a sharded model refers to itself

    @property
    def is_known(self) -> bool:
        """Whether nothing is left to compute."""
        return all(objective.reference is not None for objective, _ in self.compared)

    def compute_rest(self, model: PreTrainedModel) -> None:
        """Compute what has not been found. A collective call, before a checkpoint is loaded into `model`."""
        for objective, stream in self.compared:
            if objective.reference is None:
                objective.reference = self._computed(stream, model)

    def _kept(self, stream: DatasetStream, *, is_resumed: bool) -> Tensor | None:
        """The log-probabilities that the run kept, if they are those of the same data and model.

        For a resumed run the starting model need not be the same: weights at `model.name` may have changed meanwhile.
        """
        file = None if self.paths is None else self.paths.reference(stream.config.section)
        if file is None or not file.is_file():
            return None
        try:
            with safe_open(file, "pt") as saved:
                found = saved.metadata() or {}
                ours = self._labels(stream, with_weights=not is_resumed)
                if any(found.get(key, "") != value for key, value in ours.items()):
                    return None
                logprobs: Tensor = saved.get_tensor("logprobs")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{file} is damaged ({one_line(error)}): restore it, or remove it and the run computes these "
                "log-probabilities again with the weights of the reference"
            ) from error
        if self.mesh.process.is_main:
            get_logger().info(f"Reference: log-probabilities of {self._rows(stream)} {self._words} are in {file}")
        return logprobs

    def _computed(self, stream: DatasetStream, model: PreTrainedModel) -> Tensor:
        """The log-probabilities under `model`, which are kept."""
        section, process = stream.config.section, self.mesh.process
        own_beats().say(f"log-probabilities of {section} {self._words}")
        if process.is_main:
            get_logger().info(f"Reference: computing log-probabilities of {self._rows(stream)} {self._words}")
        started_s = time.perf_counter()
        file = None if self.paths is None else self.paths.reference(section)
        labels = {} if file is None else self._labels(stream, with_weights=True)
        parts = None if file is None else Parts(file, labels, self.mesh)
        logprobs = reference_logprobs(model, stream, self.mesh, parts)
        if process.is_main:
            elapsed_s, size = time.perf_counter() - started_s, logprobs.nbytes / 2**20
            kept = "" if file is None else ", kept for a resume"
            get_logger().info(f"Reference: computed once in {elapsed_s:.1f}s; {size:.1f} MiB of host memory{kept}")
            if file is not None:
                write_tensor(file, logprobs, labels)
                # The sum over the data ranks came after their last parts. Starts with other process counts left more.
                for part in file.parent.glob(f"{file.stem}.part_*"):
                    part.unlink(missing_ok=True)
        return logprobs

    def _rows(self, stream: DatasetStream) -> str:
        what = "pair" if stream.config.holds_pairs else "row"
        return f"{count_of(what, stream.row_count)} of {stream.config.section}"

    def _labels(self, stream: DatasetStream, *, with_weights: bool) -> dict[str, str]:
        """What the log-probabilities are of."""
        config = self.config
        name = config.reference.name
        labels = {"fingerprint": str(fingerprint_of(stream.config, self.tokenizer).as_dict()), "reference": name or ""}
        if with_weights:
            # Settings of the model count too: its dtype, a random initialization, a longer context.
            # A fresh adapter changes nothing, unless it starts from what quantization lost.
            is_fresh = config.model.lora is None or config.model.lora.init == "default"
            settings = config.model.model_dump_json(exclude={"name", "adapter", *(("lora",) if is_fresh else ())})
            adapters = _digests_of_adapters(config.model) if name is None else []
            labels["weights"] = " ".join([_digest(name or config.model.name), *adapters, settings])
        return labels


class Parts:
    """What one data rank has computed of a reference."""

    def __init__(self, whole: Path, labels: Mapping[str, str], mesh: Mesh, save_every_s: float = _SAVE_EVERY_S) -> None:
        axis = mesh.data_axis
        self.file = whole.with_name(f"{whole.stem}.part_{axis.data_rank}_of_{axis.data_size}.safetensors")
        self.labels = labels
        self.is_writer = axis.is_writer
        self.save_every_s = save_every_s
        self._saved_s = time.perf_counter()

    def read(self, blank: Tensor) -> tuple[int, Tensor]:
        """How many windows are done, and their log-probabilities. A damaged file counts as none."""
        try:
            with safe_open(self.file, "pt") as saved:
                found = dict(saved.metadata() or {})
                done = int(found.pop("windows", "0"))
                logprobs: Tensor = saved.get_tensor("logprobs")
        except FileNotFoundError:
            return 0, blank
        except (OSError, SafetensorError, ValueError) as error:
            get_logger().warning(f"{self.file} is damaged and is not used: {one_line(error)}")
            return 0, blank
        is_same = found == dict(self.labels) and logprobs.shape == blank.shape
        return (done, logprobs) if is_same else (0, blank)

    def keep(self, logprobs: Tensor, windows: int) -> None:
        """Write what is done, if the last time is long ago."""
        if self.is_writer and time.perf_counter() - self._saved_s >= self.save_every_s:
            write_tensor(self.file, logprobs, {**self.labels, "windows": str(windows)})
            self._saved_s = time.perf_counter()


def write_tensor(file: Path, logprobs: Tensor, labels: Mapping[str, str]) -> None:
    """Raises CheckpointError if the file cannot be written."""
    try:
        with replacing_file(file) as scratch:
            save_file({"logprobs": logprobs}, scratch, dict(labels))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be written: {one_line(error)}") from error


def _digest(name: str) -> str:
    """What identifies the weights of a model: a digest of sampled blocks, or the commit in the local hub cache."""
    folder = Path(name)
    if not folder.is_dir():
        return f"{name} {snapshot_in_cache(name, default_hub_cache())}"
    files = sorted(each for each in folder.iterdir() if each.suffix in (".safetensors", ".bin", ".json"))
    return sampled_digest(files, 0)


def _digests_of_adapters(model: ModelConfig) -> list[str]:
    """What identifies the adapters that the starting model has: a merged one, and one that training continues.

    Raises:
        ModelError: there is none where the config says.
    """
    paths = {"model.adapter": model.adapter, "model.lora.path": None if model.lora is None else model.lora.path}
    found = []
    for key, path in paths.items():
        if path is not None:
            try:
                found.append(f"{key} {_digest(str(adapter_folder(Path(path))))}")
            except StartFault as fault:
                raise ModelError(f"{key} = {path}: {fault}") from fault
    return found


__all__ = ["Parts", "Reference", "reference_logprobs"]
