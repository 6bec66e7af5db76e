"""Every recipe of docs/data.md reads its rows and trains on the text that the page shows."""

from __future__ import annotations

import gzip
import io
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import pytest
from rich.console import Console

from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.sft.preflight import preflight

PAGE = Path(__file__).parents[4] / "docs" / "data.md"
FILE = re.compile(r"^`([\w.]+)`:\n\n```(?:jsonl|csv|tsv|markdown)\n(.*?)^```", re.MULTILINE | re.DOTALL)
CONFIG = re.compile(r"^```toml\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)

pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs/data.md is not part of an installed prime-rl")


@dataclass(frozen=True)
class Recipe:
    files: dict[str, str]
    config: str
    shown: str | None
    """None if the page shows no text."""

    def __str__(self) -> str:
        return ", ".join(self.files)


def recipes() -> list[Recipe]:
    """The files on the page since the last config belong to the next one."""
    found, start = [], 0
    page = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    for config in CONFIG.finditer(page):
        files = dict(FILE.findall(page[start : config.start()]))
        found.append(Recipe(files, config[1], config[2]))
        start = config.end()
    return found


def write(path: Path, text: str) -> None:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zst":
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(text.encode())
    else:
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("recipe", recipes(), ids=str)
def test_a_recipe_trains_on_what_the_page_shows(
    recipe: Recipe, streaming: bool, tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in recipe.files.items():
        write(tmp_path / name, text)
    table = tomllib.loads(recipe.config)
    data = {"seq_len": 1000, "batch_size": 1, "streaming": streaming, **table["data"]}
    config = SFTConfig(model={"name": str(tiny_model_dir)}, tokenizer={"chat_template": "chatml"}, data=data)
    out = io.StringIO()
    assert preflight(config, Console(file=out, width=500, soft_wrap=True)) == 0
    _, _, sample = out.getvalue().partition("trained\n")
    assert recipe.files
    if recipe.shown is not None:
        assert sample.startswith(recipe.shown)


def test_the_page_has_a_recipe_for_every_kind_of_source() -> None:
    written = " ".join(str(recipe) + recipe.config for recipe in recipes())
    for part in (
        ".jsonl",
        ".json",
        ".csv",
        ".tsv",
        ".gz",
        ".zst",
        ".md",
        "[data.columns]",
        "[data.roles]",
        "[[data.sources]]",
    ):
        assert part in written
