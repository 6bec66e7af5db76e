"""The page gets the texts, rewards and tokens of kept rollouts, unchanged, whatever they contain."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from report_runs import a_rollout, add_rollouts, make_run, with_tokens

from medarc_rl.report import write
from medarc_rl.report.write import PackedRollouts, pack_rollouts
from prime_rl.history.rollouts import content_text
from prime_rl.history.run import RunHistory

EVIL = "</script>\u2028\u0000<!--"


def packed(directory: Path, **limits: int) -> PackedRollouts:
    return pack_rollouts([RunHistory.open(directory)], ["run"], **limits)


def unpacked(text: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(text)))


def details(found: PackedRollouts) -> list[dict[str, Any]]:
    return [each for block in found.blocks for each in unpacked(block)]


def test_a_run_without_rollouts_has_none(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert packed(tmp_path / "run").count == 0


def test_rows_and_details_say_what_the_file_says(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    add_rollouts(paths, 4, [with_tokens(a_rollout(EVIL, 0.25), ["a", EVIL])])
    found = packed(tmp_path / "run")
    index = unpacked(found.index)
    assert index["rows"][0][:9] == [0, 4, None, "letters", 0.25, 0.25, 0, 0, 3]
    (detail,) = details(found)
    assert detail["completion"] == [{"role": "assistant", "text": EVIL}]
    assert detail["metrics"] == {"right": 1.0}
    assert detail["lines"] == [
        {
            "prompt": 1,
            "texts": ["<|user|>", "a", EVIL],
            "engine": [None, 0, -1000],
            "trainer": [None] * 3,
            "entropy": [None] * 3,
        }
    ]


def test_nothing_of_a_rollout_stands_in_the_html(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    add_rollouts(paths, 0, [a_rollout(EVIL, env=EVIL, error=EVIL, metrics={EVIL: 1.0}, stop_condition=EVIL)])
    found = packed(tmp_path / "run")
    assert all(set("<>&\u2028") & set(text) == set() for text in (found.index, *found.blocks))


@pytest.mark.parametrize(("limit", "count"), [(1000, 300), (300, 300), (299, 150), (10, 10), (1, 1)])
def test_too_many_are_thinned_evenly(limit: int, count: int, tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    for step in range(3):
        add_rollouts(paths, step, [a_rollout(f"{step} {n}") for n in range(100)])
    found = packed(tmp_path / "run", limit=limit)
    assert (found.count, found.left_out) == (count, 300 - count)
    steps = [row[1] for row in unpacked(found.index)["rows"]]
    assert count < 10 or abs(steps.count(0) - steps.count(2)) <= 1


def test_long_texts_are_bounded_by_bytes(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    add_rollouts(paths, 0, [a_rollout("long " * 1000) for _ in range(64)])
    found = packed(tmp_path / "run", max_bytes=64 * 1024)
    assert 4 <= found.count <= 13
    assert sum(len(json.dumps(each)) for each in details(found)) <= 64 * 1024


def test_only_rollouts_kept_by_chance_count_as_answers(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    add_rollouts(paths, 2, [a_rollout("a", kept=["worst"]), a_rollout("b", kept=["random"], row=7)])
    assert packed(tmp_path / "run").answers == {0: {2: [(("letters", 7), "b")]}}


@pytest.mark.parametrize(
    "damage",
    [
        {"completion": "plain"},
        {"completion": [{"role": 3, "content": {"a": 1}}]},
        {"completion": [{"role": "assistant", "content": [{"type": "image"}, {"text": "t"}], "tool_calls": ["{", 3]}]},
        {"metrics": [1], "reward": "high", "advantage": None, "is_truncated": "yes"},
        {"sequences": [{"prompt_ids": "x", "completion_ids": [1], "sampled": [[0, 99]]}], "token_texts": {"1": 4}},
    ],
)
def test_values_of_other_types_do_no_harm(damage: dict[str, Any], tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    add_rollouts(paths, 0, [a_rollout("fine"), {**a_rollout("odd"), **damage}])
    assert packed(tmp_path / "run").count == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    add_rollouts(paths, 0, [a_rollout("fine")])
    with paths.orchestrator.samples.joinpath("step_0.jsonl").open("a") as file:
        file.write('{"env": \n')
    found = packed(tmp_path / "run")
    assert found.count == 1
    assert "1 damaged line" in found.notes[0]


def test_long_rollouts_show_their_first_tokens(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run")
    add_rollouts(paths, 0, [with_tokens(a_rollout("x"), ["a"] * (write.MAX_TOKENS + 3))])
    (detail,) = details(packed(tmp_path / "run"))
    assert detail["lines"][0]["texts"] == ["<|user|>", *["a"] * (write.MAX_TOKENS - 1)]


def test_contents_become_text() -> None:
    assert content_text([{"text": "a"}, "b", {"type": "image_url"}]) == "a\nb\n[image]"
    assert content_text({"a": "ä"}) == '{"a": "ä"}'
    assert content_text(None) == ""
