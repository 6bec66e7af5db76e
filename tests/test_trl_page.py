"""docs/migrate.md: keys for users of TRL and axolotl exist, and the error for a foreign key names the same one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.sft import SFTConfig
from prime_rl.configs.surface.renamed import find_renamed
from prime_rl.utils.pydantic_config.schema import has_key

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "migrate.md").read_text(encoding="utf-8")
SFT, RL = PAGE.partition("### SFT keys")[2].partition("## AReaL")[0].split("### RL keys")
RENAMED_ELSEWHERE = {"optim", "chat_template", "datasets", "micro_batch_size"}
"""Names that mean something else here, so the error for them is another one."""


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize(("text", "root"), [(SFT, SFTConfig), (RL, RLConfig)])
def test_every_key_of_the_page_exists(text: str, root: type) -> None:
    keys = [row[-2] for row in rows(text)]
    assert len(keys) >= 10
    assert [key for key in keys if not has_key(root, key.split("."))] == []


def test_the_error_for_a_key_of_another_trainer_names_the_same_key() -> None:
    differences = []
    for component, text in (("sft", SFT), ("rl", RL)):
        for *names, key, _ in rows(text):
            for name in {*names} - RENAMED_ELSEWHERE - {key}:
                found = find_renamed(component, name)
                if found is not None and not any(named_by(new, key) for new in found[0].new or (key,)):
                    differences.append(f"{component}: {name} is {found[0].new}, not {key}")
    assert differences == []


def named_by(new: str, key: str) -> bool:
    """Whether a renamed key, which starts with its component, is this key or the table around it."""
    rest = re.sub(r"^(sft|rl)\.", "", new)
    return key == rest or key.startswith(f"{rest}.")
