"""What `data.name` stands for: files, a saved dataset, or one of the hub; a part for each subset and split."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from prime_rl.configs.sft import SFTDataConfig
from prime_rl.trainer.errors import DataError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")


@dataclass(frozen=True, slots=True)
class Part:
    """One subset (None is the default one) and split of a dataset. Without files it is one of the hub."""

    name: str
    subset: str | None
    split: str
    files: tuple[Path, ...] = ()
    is_saved: bool = False
    """Whether `datasets` wrote it with `save_to_disk`; `files` is then all that it wrote."""

    def __str__(self) -> str:
        chosen = " ".join(
            f"{word} {value}" for word, value in (("subset", self.subset), ("split", self.split)) if value
        )
        return f"data.name = {self.name} ({chosen})"


def find_parts(config: SFTDataConfig) -> list[Part]:
    """The parts that `data.subsets` and `data.splits` choose; nothing is read.

    Raises:
        DataError: a path without anything, or without the split.
    """
    if config.subsets is None:
        wanted = [(None, split) for split in config.splits or ["train"]]
    else:
        wanted = list(zip_longest(config.subsets, config.splits or [], fillvalue="train"))
    return [_find_part(config.name, subset, split) for subset, split in wanted]


def _find_part(name: str, subset: str | None, split: str) -> Part:
    path = Path(name).expanduser()
    if path.is_file():
        if subset is not None or split != "train":
            raise DataError(f"data.name = {name} is a file, which has no subset or split {subset or split}")
        if path.suffix not in SUFFIXES:
            raise DataError(f"data.name = {path}: unknown file type; known are {', '.join(SUFFIXES)}")
        return Part(name, subset, split, (path,))
    if path.is_dir():
        if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
            saved = sorted(file for file in path.rglob("*") if file.suffix in (".arrow", ".json"))
            return Part(name, subset, split, tuple(saved), is_saved=True)
        return Part(name, subset, split, _files_of_split(path, subset, split))
    if name.startswith((".", "/", "~")) or path.suffix in SUFFIXES or name.count("/") > 1:
        raise DataError(f"data.name = {name}: no such file or directory")
    return Part(name, subset, split)


def _files_of_split(directory: Path, subset: str | None, split: str) -> tuple[Path, ...]:
    root = directory / subset if subset else directory
    files = sorted(path for path in [*root.glob("*"), *root.glob("data/*")] if path.suffix in SUFFIXES)
    named = [path for path in files if path.stem == split or path.name.startswith((f"{split}-", f"{split}."))]
    chosen = named or (files if split == "train" else [])
    if not chosen:
        where = f"{root} (split {split})" if files else f"{root}"
        raise DataError(f"data.name = {directory}: no {', '.join(SUFFIXES)} files in {where}")
    return tuple(chosen)
