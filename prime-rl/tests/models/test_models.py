"""Trainer and embedded engine have the numbers of eager Transformers, or refuse the model: `docs/models.md`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from model_cases import LEFT_OUT, Case, cases, families
from model_table import outcome_of, outcomes_on, page
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import destroy_world, setup_world

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
pytestmark = pytest.mark.skipif(not PAGE.is_file(), reason="docs/models.md is not part of an installed prime-rl")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    yield ParallelDims(dp_replicate=1, dp_shard=1).mesh(setup_world("cpu", timeout_s=3600, environ={}))
    destroy_world()


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_a_family_is_equal_or_refused_as_the_page_says(case: Case, mesh: Mesh) -> None:
    found = outcome_of(case, mesh)
    assert not [text for text in (found.trainer, found.flex, found.engine) if text.startswith("WRONG")], found
    assert found == outcomes_on(PAGE.read_text())[case.name]


def test_the_page_has_every_case_and_is_as_generated() -> None:
    text = PAGE.read_text()
    outcomes = outcomes_on(text)
    assert list(outcomes) == [case.name for case in cases()]
    assert text == page(outcomes), "run: python prime-rl/tests/models/model_table.py > docs/models.md"


def test_every_causal_family_of_transformers_is_in_the_table_or_left_out() -> None:
    left_out = {family for names in LEFT_OUT.values() for family in names}
    assert left_out | set(families()) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
