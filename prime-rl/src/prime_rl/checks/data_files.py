"""Finds the files of an SFT dataset: a file, a directory of files, or a directory that `datasets` saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from prime_rl.checks.start_dir import StartDir, StartFault, looks_like_path
from prime_rl.configs.sft import SFTConfig, SFTDataConfig

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True)
class Part:
    """One subset (None is the default one) and split of a dataset. Without files it is on the hub."""

    name: str
    subset: str | None
    split: str
    files: tuple[Path, ...] = ()
    is_saved: bool = False
    """Written by `datasets` with `save_to_disk`; `files` is then everything that it wrote."""

    def __str__(self) -> str:
        chosen = " ".join(
            f"{word} {value}" for word, value in (("subset", self.subset), ("split", self.split)) if value
        )
        return f"data.name = {self.name} ({chosen})"


def find_parts(config: SFTDataConfig, start: StartDir | None = None) -> list[Part]:
    """Find the parts that `data.subsets` and `data.splits` choose, without reading any file.

    Raises:
        StartFault: there is nothing at the path, or it has no such split.
    """
    wanted: list[tuple[str | None, str]]
    if config.subsets is None:
        wanted = [(None, split) for split in config.splits or ["train"]]
    else:
        wanted = list(zip_longest(config.subsets, config.splits or [], fillvalue="train"))
    return [_find_part(config.name, subset, split, start or StartDir()) for subset, split in wanted]


def data_faults(config: SFTConfig, start: StartDir) -> Iterator[str]:
    """One line for each dataset of the run whose files cannot be trained on."""
    datasets = {"data": config.data} | ({} if config.val is None else {"val.data": config.val.data})
    for key, data in datasets.items():
        if isinstance(data, SFTDataConfig):
            try:
                _check_not_empty(find_parts(data, start))
            except StartFault as fault:
                yield str(fault).replace("data.name", f"{key}.name", 1)


def _check_not_empty(parts: list[Part]) -> None:
    for part in parts:
        if part.files and not any(file.stat().st_size for file in part.files):
            raise StartFault(f"{part} has no rows: {part.files[0]} is empty")


def _find_part(name: str, subset: str | None, split: str, start: StartDir) -> Part:
    given = Path(name).expanduser()
    path = start.find(given)
    if path.is_file():
        if subset is not None or split != "train":
            raise StartFault(f"data.name = {name} is a file, which has no subset or split {subset or split}")
        if path.suffix not in SUFFIXES:
            raise StartFault(f"data.name = {name}: unknown file type; known are {', '.join(SUFFIXES)}")
        return Part(name, subset, split, (path,))
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = sorted(file for file in path.rglob("*") if file.suffix in (".arrow", ".json"))
            return Part(name, subset, split, tuple(saved), is_saved=True)
        return Part(name, subset, split, _files_of_split(path, name, subset, split))
    if (looks_like_path(name) or path.suffix in SUFFIXES) and start.lacks(given):
        raise StartFault(f"data.name = {name}: no such file or directory")
    return Part(name, subset, split)


def _files_of_split(directory: Path, name: str, subset: str | None, split: str) -> tuple[Path, ...]:
    root = directory / subset if subset else directory
    files = sorted(path for path in [*root.glob("*"), *root.glob("data/*")] if path.suffix in SUFFIXES)
    named = [path for path in files if path.stem == split or path.name.startswith((f"{split}-", f"{split}."))]
    chosen = named or (files if split == "train" else [])
    if not chosen:
        where = f"{root} (split {split})" if files else f"{root}"
        raise StartFault(f"data.name = {name}: no {', '.join(SUFFIXES)} files in {where}")
    return tuple(chosen)
