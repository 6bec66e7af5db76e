"""Shared by both commands: load and write a run's config, check its directory, find the hub's token."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from medarc_rl.backends.slurm.queue import refuse_if_queued
from medarc_rl.cli import say, warn
from medarc_rl.errors import MedarcError, NothingToDo, UsageError
from medarc_rl.explain.origins import OURS, Explained, explained_config
from medarc_rl.explain.screen import table
from medarc_rl.explain.sources import record_origins
from medarc_rl.migrate.draft import suggested_migrations
from prime_rl.checks import NotDownloaded, NotInstalled, start_faults
from prime_rl.configs.areal import Launcher
from prime_rl.configs.storage import BadS3Name, S3Name, is_on_s3, work_dir_of
from prime_rl.configs.surface.not_built import unbuilt_faults
from prime_rl.configs.surface.root import RootConfig
from prime_rl.launch.restarting import launcher_fault
from prime_rl.run.checkpoints import end_of
from prime_rl.run.directory import (
    RunFinished,
    check_run_dir,
    files_readable_by,
    prepare_run_dir,
    write_configs,
)
from prime_rl.run.lock import refuse_if_locked
from prime_rl.run.paths import RunPaths
from prime_rl.storage.staging import has_s3_names, inputs_of
from prime_rl.utils.errors import RunDirError, StagingRefused
from prime_rl.utils.pydantic_config import BaseSettings, ConfigError, ConfigWarning, showing_warnings
from prime_rl.utils.pydantic_config.arguments import is_boolean_flag, parse_arguments
from prime_rl.utils.pydantic_config.layers import Layer, set_at, value_at
from prime_rl.utils.pydantic_config.load import ConfigSources
from prime_rl.utils.pydantic_config.toml_files import section_of, split_files

if TYPE_CHECKING:
    from prime_rl.configs.eval import OfflineEvalConfig
    from prime_rl.configs.rl import RLConfig
    from prime_rl.configs.sft import SFTConfig

ConfigT = TypeVar("ConfigT", bound="SFTConfig | RLConfig | OfflineEvalConfig")

OwnedKeys = Mapping[str, Any]
"""Values of dotted config keys that the command itself sets, over files and options."""


@dataclass(frozen=True, slots=True)
class Run(Generic[ConfigT]):
    """A requested run: its config, its directory, and the name of its config file."""

    config: ConfigT
    paths: RunPaths
    stem: str
    values: Sequence[Explained]
    """Every value of the config, and where it was set."""
    files: Sequence[Path] = ()
    """The config files, as typed."""

    @property
    def checkpoints(self) -> list[Any]:
        """The checkpoint sections that are set, the shared one first."""
        sections = [self.config, getattr(self.config, "trainer", None), getattr(self.config, "orchestrator", None)]
        return [ckpt for section in sections if (ckpt := getattr(section, "ckpt", None)) is not None]

    @property
    def resume_step(self) -> int | None:
        """The step to continue from, -1 (`latest`) or -2 (`auto`). None starts a new run."""
        return next((ckpt.resume_step for ckpt in self.checkpoints if ckpt.resume_step is not None), None)


@dataclass(frozen=True, slots=True)
class GivenConfig(Generic[ConfigT]):
    """A config as a command line names it: the words, and what was read from them, once."""

    words: Sequence[str]
    """Files and overrides, as typed."""
    files: Sequence[Path]
    """Config files, weakest first."""
    sources: ConfigSources[ConfigT]
    faults: tuple[str, ...] = ()
    """One line for each option that cannot be read. `load_run` raises them, after those of a back-end."""

    @classmethod
    def read(cls, root: type[ConfigT], words: Sequence[str]) -> GivenConfig[ConfigT]:
        """Read the files and options of a command line, and the environment. Warnings are printed to stderr.

        Raises:
            UsageError: no file is named, and this is not an evaluation, whose settings are few; or one line for each
                file or variable that cannot be read.
        """
        try:
            with showing_warnings():
                files, overrides = split_files(words, partial(is_boolean_flag, root))
                parsed = parse_arguments(root, overrides)
                # With an `@ file`, a word that is not a TOML file is more likely the value of a mistyped option.
                tomls = [word for word in parsed.plain if word.endswith(".toml")]
                if candidates := tomls or (parsed.plain if not files else []):
                    files.insert(0, Path(parsed.take(candidates[0])))
                if not files and root.component != "eval":
                    raise UsageError("no config: name a TOML file, as in `config.toml` or `@ config.toml`")
                faults = tuple(fault for fault in parsed.faults if fault)
                return cls(words, files, ConfigSources.read(root, files, parsed.layer()), faults)
        except ConfigError as error:
            raise UsageError(*error.faults) from error

    @property
    def stem(self) -> str:
        """Name of the config file. A file for the whole config comes before one of a section."""
        whole = [*(file for file in self.files if not section_of(file)), *self.files]
        return whole[0].stem if whole else ""

    def table(self) -> dict[str, Any]:
        """What the sources give, before it is validated. Raises ConfigError."""
        with warnings.catch_warnings():
            # Building the config warns of the same.
            warnings.simplefilter("ignore", ConfigWarning)
            return self.sources.table()


def load_run(
    given: GivenConfig[ConfigT], kind: str, output_dir: Path | None, owned: OwnedKeys, submits: bool = False
) -> Run[ConfigT]:
    """Validate a config, with `owned` as its strongest layer. Warnings, and values without effect, go to stderr.

    The run's directory is `output_dir`, or the config's own, or `outputs/<config stem>-<kind>`, without a file
    `outputs/<kind>`. Commands that submit nothing drop `[slurm]`.

    Raises:
        UsageError: one line for each fault.
    """
    if given.faults:
        raise UsageError(*given.faults)
    root, sources = given.sources.root, given.sources
    try:
        with showing_warnings():
            table = given.table()
            place = output_dir or table.get(
                "output_dir", f"outputs/{given.stem}-{kind}" if given.stem else f"outputs/{kind}"
            )
            if isinstance(place, str | Path):
                owned = {**_placed(place, table), **_slurm_keys(root, table, owned, submits), **owned}
            for line in _dropped(sources.layers, owned):
                warn(line)
            config, values = explained_config(sources.over(_layer_of(owned)))
    except ConfigError as error:
        for line in suggested_migrations(root.component, sources.layers):
            warn(line)
        raise UsageError(*error.faults) from error
    return Run(config, RunPaths(Path(config.output_dir)), given.stem, values, tuple(given.files))


def _layer_of(owned: OwnedKeys) -> Layer:
    """The keys that the command itself sets."""
    data: dict[str, Any] = {}
    for key, value in owned.items():
        set_at(data, tuple(key.split(".")), value)
    return Layer(OURS, data)


def _slurm_keys(config_cls: type[ConfigT], table: Mapping[str, Any], owned: OwnedKeys, submits: bool) -> OwnedKeys:
    """`[slurm]` concerns only a submission, but a config for several nodes is valid only with that section."""
    if "slurm" not in config_cls.model_fields:
        return {}
    if owned.get("deployment.type") != "multi_node":
        return {} if submits else {"slurm": None}
    return {} if table.get("slurm") is not None else {"slurm.project_dir": "."}


def refuse_other_launcher(config: SFTConfig | RLConfig, here: Launcher, words: Sequence[str]) -> None:
    """Raises UsageError if the config is meant for another launcher."""
    if fault := launcher_fault(config, here, words):
        raise UsageError(fault)


def _placed(root: str | Path, given: Mapping[str, Any]) -> OwnedKeys:
    """The keys that place a run: its directory, and where on S3 it is copied if `root` is there."""
    try:
        name = S3Name.of(root)
    except BadS3Name as error:
        raise UsageError(f"output directory {error}") from error
    if name is None:
        return {"output_dir": _utf8(str(Path(root).absolute()))}
    work_dir = work_dir_of(name, value_at(given, ("storage", "work_dir")))
    return {"output_dir": _utf8(str(work_dir.absolute())), "storage.upload_to": str(name)}


def _utf8(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UsageError(f"output directory {text!r}: TOML, and so the run's config, holds UTF-8 only") from None
    return text


_OPTIONS = {"deployment.num_train_gpus": "--train-gpus", "deployment.num_infer_gpus": "--infer-gpus"}


def _dropped(layers: Sequence[Layer], owned: OwnedKeys) -> list[str]:
    """One line for each value that the wrapper overrides."""
    lines = []
    arguments = layers[-1]
    for layer in layers:
        for key, value in owned.items():
            path = tuple(key.split("."))
            # An output directory in a file is only a default, and GpuSplit's `allocation_mode` means what was given.
            is_same = key == "allocation_mode" or (key == "output_dir" and layer is not arguments)
            if not layer.holds(path) or is_same:
                continue
            lost = value_at(layer.data, path)
            if key == "output_dir" and is_on_s3(lost):
                continue  # its local directory takes its place
            # Values of arguments are still text here.
            if str(lost) != str(value):
                option = _OPTIONS.get(key, "")
                more = f" ({option} N gives another)" if option else ""
                lines.append(
                    f"{layer.origin(path)}: {key} = {lost!r} is not used; this command sets {key} = {value!r}{more}"
                )
    return lines


def check_startable(run: Run[Any], dry_run: bool, job_dir: Path | None = None, waits: bool = False) -> None:
    """Refuse a run that cannot work, or that would damage another one.

    A dry run prints keys that are not built and packages that are not installed as warnings, and goes on. `job_dir` is
    the project directory of a batch job; None means that the run starts here. A job that `waits` for another one may
    find a directory that is in use now, and continue from a step that does not exist yet.

    Raises:
        UsageError: a key is not built, a file or package of the config is missing, or the directory holds another run,
            or not the step to continue from, or belongs to a job in Slurm's queue.
        NothingToDo: `--resume auto` finds nothing left to do.
    """
    unbuilt, unstartable = unbuilt_faults(run.config), start_faults(run.config, job_dir)
    tolerated = [*unbuilt, *(fault for fault in unstartable if isinstance(fault, NotInstalled))] if dry_run else []
    if faults := [fault for fault in (*unbuilt, *unstartable) if fault not in tolerated]:
        raise UsageError(*faults)
    # A launch here warns of them itself.
    for fault in tolerated if job_dir is not None else ():
        warn(fault)
    _check_inputs(run.config, is_here=job_dir is None)
    with reporting_directory_errors():
        if not waits:
            refuse_if_locked(run.paths.root)
            refuse_if_queued(run.paths, submits=job_dir is not None)
        if run.resume_step is not None and (waits or run.config.storage.upload_to is not None):
            return  # what it continues from may still be written, or on S3
        check_run_dir(run.paths, run.resume_step, run.config.clean_output_dir, end_of(run.config))


def refuse_unstartable(config: RootConfig, job_dir: Path | None = None, *, is_estimate: bool = False) -> None:
    """Refuse what the run would refuse at its start, in a command that starts nothing.

    An estimate does not need weights, nor packages that another machine may have.

    Raises:
        UsageError: one line for each fault.
    """
    tolerated = (NotDownloaded, NotInstalled) if is_estimate else ()
    if faults := [fault for fault in start_faults(config, job_dir) if not isinstance(fault, tolerated)]:
        raise UsageError(*faults)


def _check_inputs(config: BaseSettings, is_here: bool) -> None:
    """Refuse inputs on S3 that are not there. A batch job may have other rights than this machine: that is a warning.

    Raises:
        UsageError: something is missing.
    """
    try:
        if has_s3_names(config):
            inputs_of(config)
    except StagingRefused as error:
        if is_here or error.known_here:
            raise UsageError(*error.faults) from error
        for fault in error.faults:
            warn(f"not checked before the job starts: {fault}")


def prepare_directory(run: Run[Any]) -> None:
    """Clean the run's directory if the config says so, and remove stale files. Raises MedarcError."""
    with reporting_directory_errors():
        resume_step = check_run_dir(run.paths, run.resume_step, run.config.clean_output_dir, end_of(run.config))
        prepare_run_dir(run.paths, resume_step, run.config.clean_output_dir)


def write_components(run: Run[Any], components: Mapping[str, BaseSettings], dry_run: bool) -> None:
    """Write resolved configs to `OUT/configs`, each under its component's name, and where their values were set.

    A dry run first prints the values that are not defaults.

    Raises:
        MedarcError: they cannot be written.
    """
    if dry_run:
        for line in table([each for each in run.values if each.is_of_interest]):
            say(line)
    with reporting_directory_errors(), files_readable_by(run.config.file_access):
        write_configs(run.paths, components)
        record_origins(run.paths, run.values)


@contextmanager
def reporting_directory_errors() -> Iterator[None]:
    """Turn faults of a run's directory and of the file system into one line."""
    try:
        yield
    except RunFinished as finished:
        raise NothingToDo(str(finished)) from finished
    except RunDirError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise MedarcError(f"{error.filename}: {error.strerror}") from error


def maybe_autoset_auth_env(env: MutableMapping[str, str], enabled: bool) -> list[str]:
    """Copy the token of the local Hugging Face login to `env["HF_TOKEN"]`, unless it is set.

    Returns lines for the user; none if disabled, already set, or not logged in.
    """
    if not enabled or env.get("HF_TOKEN"):
        return []
    from huggingface_hub.utils import get_token

    token = get_token()
    if not token:
        return []
    env["HF_TOKEN"] = token
    return ["HF_TOKEN is set from the local Hugging Face login"]
