"""Which files hold rows, by their names."""

from __future__ import annotations

from pathlib import Path

TEXT_KINDS = (".jsonl", ".ndjson", ".json", ".csv", ".tsv")
KINDS = (*TEXT_KINDS, ".parquet", ".arrow")
COMPRESSIONS = (".gz", ".zst")
KNOWN_KINDS = f"{', '.join(KINDS)}; the text files also with {' or '.join(COMPRESSIONS)}"


def kind_of(path: Path) -> str | None:
    """The kind of a data file, by its suffix: one of `KINDS`, or None. `rows.csv.gz` is a .csv."""
    if path.suffix in COMPRESSIONS:
        inner = Path(path.stem).suffix
        return inner if inner in TEXT_KINDS else None
    return path.suffix if path.suffix in KINDS else None


def files_of_split(directory: Path, split: str) -> tuple[Path, ...]:
    """The files of rows in a directory or its `data` whose names begin with the split; for `train`, or else all."""
    files = sorted(path for path in [*directory.glob("*"), *directory.glob("data/*")] if kind_of(path) is not None)
    named = [path for path in files if path.name.startswith((f"{split}-", f"{split}."))]
    return tuple(named or (files if split == "train" else []))


def is_saved(directory: Path) -> bool:
    """Whether `datasets` wrote the directory with `save_to_disk`."""
    return (directory / "dataset_dict.json").is_file() or (directory / "state.json").is_file()
