"""Finds the files of an SFT dataset: a file, a directory of files, or a directory that `datasets` saved."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from prime_rl.checks.start_dir import StartDir, looks_like_path
from prime_rl.configs.data import HeldRows, RowFormatConfig, SFTDataConfig, SourceConfig
from prime_rl.configs.storage import is_on_s3
from prime_rl.utils.errors import StartFault
from prime_rl.utils.files import missing_advice
from prime_rl.utils.rows import KNOWN_KINDS, excel_advice, files_of_split, is_saved, kind_of


@dataclass(frozen=True, slots=True)
class Part:
    """One source, or one subset (None is the default one) and split of a dataset. Without files it is on the hub."""

    name: str
    subset: str | None
    split: str
    format: RowFormatConfig
    section: str = "data"
    """The config's section that names it."""
    files: tuple[Path, ...] = ()
    is_saved: bool = False
    """Written by `datasets` with `save_to_disk`; `files` is then everything that it wrote."""
    holds: HeldRows = "samples"
    """Kind of its rows: samples, pairs, or answers with labels."""

    @property
    def key(self) -> str:
        """The config key that names it."""
        return f"{self.section}.name"

    def __str__(self) -> str:
        chosen = " ".join(
            f"{word} {value}" for word, value in (("subset", self.subset), ("split", self.split)) if value
        )
        return f"{self.key} = {self.name} ({chosen})"


def find_parts(config: SFTDataConfig, start: StartDir | None = None) -> list[Part]:
    """Find the parts that `data` names, without reading any file.

    Raises:
        StartFault: there is nothing at the path, or it has no such split.
    """
    start = start or StartDir()
    if config.sources is not None:
        sources = [
            Part(each.name, each.subset, each.split, _format_of(each, config), f"{config.section}.sources[{at}]")
            for at, each in enumerate(config.sources)
        ]
        return [_found(replace(each, holds=config.holds), start) for each in sources]
    wanted: list[tuple[str | None, str]]
    if config.subsets is None:
        wanted = [(None, split) for split in config.splits or ["train"]]
    else:
        wanted = list(zip_longest(config.subsets, config.splits or [], fillvalue="train"))
    parts = [Part(config.name, subset, split, config, config.section, holds=config.holds) for subset, split in wanted]
    return [_found(each, start) for each in parts]


def data_faults(datasets: Iterable[SFTDataConfig], start: StartDir) -> Iterator[str]:
    """One line for each dataset of a run whose files cannot be trained on."""
    for data in datasets:
        try:
            _check_contents(find_parts(data, start), start)
        except StartFault as fault:
            yield str(fault)


def _format_of(source: SourceConfig, config: SFTDataConfig) -> RowFormatConfig:
    return source if source.model_fields_set & {"columns", "roles"} else config


def _check_contents(parts: list[Part], start: StartDir) -> None:
    for part in parts:
        # The processes of a run here are the same user's.
        if sealed := next((file for file in part.files if start.is_here and not os.access(file, os.R_OK)), None):
            raise StartFault(f"{part.key} = {part.name}: you do not have permission to read {sealed}")
        if start.has_our_packages and (advice := next(filter(None, map(excel_advice, part.files)), None)):
            raise StartFault(f"{part.key}: {advice}")
        if part.files and not any(file.stat().st_size for file in part.files):
            raise StartFault(f"{part} has no rows: {part.files[0]} is empty")


def _found(part: Part, start: StartDir) -> Part:
    """The part with its files."""
    if is_on_s3(part.name):
        return part  # not downloaded yet
    given = Path(part.name)
    path, place = start.find(given), f"{part.key} = {part.name}"
    if path.is_file():
        if part.subset is not None or part.split != "train":
            raise StartFault(f"{place} is a single file, so it has no subset or split {part.subset or part.split}")
        if kind_of(path) is None:
            raise StartFault(f"{place}: unknown file type; known are {KNOWN_KINDS}")
        return _with_files(part, (path,))
    if path.is_dir():
        if is_saved(path):
            saved = sorted(file for file in path.rglob("*") if file.suffix in (".arrow", ".json"))
            return _with_files(part, tuple(saved), is_saved=True)
        return _with_files(part, _files_of_split(path, part))
    if path.exists():
        raise StartFault(f"{place}: a pipe or a device; the rows are read more than once, so write them to a file")
    if (looks_like_path(part.name) or kind_of(path) is not None) and start.lacks(given):
        raise StartFault(f"{place}: no such file or directory{missing_advice(given, start.path)}")
    return part


def _with_files(part: Part, files: tuple[Path, ...], is_saved: bool = False) -> Part:
    return replace(part, files=files, is_saved=is_saved)


def _files_of_split(directory: Path, part: Part) -> tuple[Path, ...]:
    root = directory / part.subset if part.subset else directory
    chosen = files_of_split(root, part.split)
    if not chosen:
        where = f"{root} (split {part.split})" if files_of_split(root, "train") else f"{root}"
        raise StartFault(f"{part.key} = {part.name}: no data files in {where}; known types are {KNOWN_KINDS}")
    return chosen
