"""The tables of the benchmark pages are what their results say, and each claim names its machine."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def claims() -> dict[str, Any]:
    return runpy.run_path(str(BENCHMARKS / "claims" / "table.py"))


def test_the_page_of_claims_is_what_the_command_makes() -> None:
    command = [sys.executable, str(BENCHMARKS / "claims" / "table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_claim_names_its_machine_and_how_often_it_was_measured(claims: dict[str, Any]) -> None:
    found, machines = claims["read_claims"]()
    assert {each.page for each in found} == {
        "chaos",
        "environments",
        "growth",
        "launch",
        "memory",
        "rl",
        "sft",
        "slurm",
    }
    for each in found:
        assert "cores" in machines[each.machine]
        assert each.date >= "2026-11"
        assert each.command.startswith("uv run ")
        # Raw results are in the repository, or the source says that they are not.
        assert each.source in ("page", "issue 13") or (BENCHMARKS / each.source).is_file()
        assert each.quote is not None or each.source != "page"


def test_a_claim_measured_once_says_so(claims: dict[str, Any]) -> None:
    found, machines = claims["read_claims"]()
    table = claims["rendered"](found, machines)
    assert table.count("| **once** |") == sum(each.runs == 1 for each in found) > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": "a fast one"}, "names no machine of machines.json: 'a fast one'"),
        ({"quote": "| ours | 1000 x |"}, "benchmarks/rl/README.md no longer says '| ours | 1000 x |'"),
        ({"machines": "amd-avx512"}, "unknown ['machines']"),
    ],
)
def test_a_claim_without_a_machine_or_not_on_its_page_is_refused(
    claims: dict[str, Any], tmp_path: Path, change: dict[str, str], message: str
) -> None:
    (tmp_path / "machines.json").write_text((BENCHMARKS / "claims" / "machines.json").read_text())
    first = json.loads((BENCHMARKS / "claims" / "rl.json").read_text())[0]
    (tmp_path / "rl.json").write_text(json.dumps([first | change]))
    with pytest.raises(claims["ClaimError"]) as refused:
        claims["read_claims"](tmp_path, tmp_path / "growth")
    assert message in str(refused.value)


def test_slopes_are_those_of_the_last_two_decades() -> None:
    measure = runpy.run_path(str(BENCHMARKS / "growth" / "measure.py"))
    points = [(10, 7.0), *((size, 1e-6 * size**1.5) for size in (1_000, 10_000, 100_000))]
    assert measure["slope"](points) == 1.5
    assert measure["slope"](points[:1]) is None


def test_the_page_of_growth_has_the_table_of_its_results() -> None:
    plot = runpy.run_path(str(BENCHMARKS / "growth" / "plot.py"))
    results, page = plot["read_results"](), (BENCHMARKS / "growth" / "README.md").read_text()
    assert plot["with_table"](page, plot["BEGIN"], plot["table"](results)) == page
    long_runs = plot["read_long_runs"]()
    assert plot["with_table"](page, plot["BEGIN_LONG_RUNS"], plot["long_runs_table"](long_runs)) == page
    for result in results:
        # Linear or better: what grows faster is to be mended, or explained on the page.
        assert (result["slope"] or 0) <= 1.1 or f"`{result['cost']}`" in page
