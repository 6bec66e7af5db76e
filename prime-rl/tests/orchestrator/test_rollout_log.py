"""Which rollouts a run keeps, and how much of them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import Tokenizer, decoders, models

from prime_rl.configs.orchestrator import KeepRolloutsConfig
from prime_rl.history.rollouts import KeptRollouts, token_texts
from prime_rl.orchestrator.batches.batch import build_batch
from prime_rl.orchestrator.reports.rollout_log import RolloutLog, choose_groups, densest, longest_text, thin_out
from prime_rl.orchestrator.rollouts.rollout import Group
from prime_rl.orchestrator.rollouts.token_texts import TokenTexts
from prime_rl.run.directory import prepare_run_dir
from prime_rl.run.paths import OrchestratorPaths, RunPaths
from prime_rl.run.pictures import PictureWriter
from prime_rl.transport.messages import ImageReference
from prime_rl.utils.images import ImageLimits, content_digest, decoded_image, of_base64, thumbnail


@pytest.fixture
def groups(rollout):
    """Makes groups of a size, whose mean rewards are their numbers."""
    return lambda count, size: [Group([rollout(reward=float(number)) for _ in range(size)]) for number in range(count)]


def test_a_sample_has_groups_at_random_the_worst_and_the_best(groups) -> None:
    chosen = choose_groups(groups(16, 8), max_rollouts=32, step=3)
    assert chosen == choose_groups(groups(16, 8), max_rollouts=32, step=3), "the same for the same step"
    assert sum("random" in reasons for reasons in chosen.values()) == 2
    assert "worst" in chosen[0]
    assert "best" in chosen[15]
    assert len(chosen) <= 4
    assert choose_groups(groups(2, 64), max_rollouts=32, step=0).popitem()[1] == ["random"], (
        "a whole group, though large"
    )
    assert [*choose_groups(groups(3, 1), max_rollouts=32, step=0)] == [0, 1, 2]
    assert choose_groups([], max_rollouts=32, step=0) == {}


def test_each_group_is_equally_likely_to_be_chosen_at_random(groups) -> None:
    made = groups(10, 4)
    chosen = Counter(
        index for step in range(4000) for index, reasons in choose_groups(made, 16, step).items() if "random" in reasons
    )
    # 2 of 10 groups in each of 4000 steps: 800 each, with a standard deviation of 25.
    assert all(abs(chosen[index] - 800) < 5 * 25 for index in range(10))


def test_long_texts_are_cut_in_the_middle_and_say_so(tmp_path: Path, rollout, turn) -> None:
    long, short = rollout(turn([1, 2], [7, 8])), rollout(turn([1, 2], [7, 8, 9, 10]))
    made = [Group([long, short])]
    long.prompt = [{"role": "user", "content": "short"}]
    long.completion = [
        {"role": "assistant", "content": "a" * 50_000 + "b" * 50_000},
        {"role": "tool", "content": "c" * 300},
    ]
    short.completion = "fine"
    log = RolloutLog(
        OrchestratorPaths(tmp_path / "run_default"), KeepRolloutsConfig(max_chars=1000, max_tokens=3), False, ""
    )
    batch = build_batch(made)
    log.write_batch(0, made, log.choose(batch, 0))
    log.close()
    first, second = KeptRollouts(RunPaths(tmp_path)).of_step(0)
    assert first.prompt == long.prompt
    text = first.completion[0]["content"]
    assert text.startswith("aaa")
    assert text.endswith("bbb")
    assert "\n[… 99,3" in text
    assert first.completion[1]["content"] == "c" * 300
    assert 99_300 < first.cut_chars < 99_400
    assert (second.completion, second.cut_chars) == ([{"role": "text", "content": "fine"}], 0)
    (line,) = first.conversations
    assert [token.id for token in (*line.prompt, *line.completion)] == [2, 7, 8], (
        "completion first, then the prompt's end"
    )
    assert first.cut_tokens == 1
    (short_line,) = second.conversations
    assert [token.id for token in short_line.completion] == [7, 8, 9], "and of a long completion, its beginning"
    assert (short_line.prompt, second.cut_tokens) == ([], 3)


def test_images_are_kept_as_small_pictures_by_their_hash(tmp_path: Path, rollout, turn) -> None:
    """A picture of what the policy saw, and of bytes; nothing of a file that a message only names, or that changed."""
    files = {name: tmp_path / f"{name}.png" for name in ("seen", "named", "changed")}
    for place, file in enumerate(files.values()):
        Image.new("RGB", (600, 300), (place, 0, 0)).save(file)
    held = thumbnail(Image.new("RGB", (40, 20), "red"))
    urls = [*map(str, files.values()), held, "https://example.org/x.png", "data:image/png;base64,AAAA"]
    asked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}} for url in urls]}]
    one = rollout(turn([1, 2], [7, 8]))
    one.prompt = asked
    shown = [ImageReference(content_digest(files[name].read_bytes()), str(files[name]), 300, 600) for name in files]
    one.trace.calls[0] = replace(one.trace.calls[0], images=(shown[0], shown[2]))
    files["changed"].write_bytes(files["named"].read_bytes())
    made = [Group([one])]
    paths = RunPaths(tmp_path / "run")
    with RolloutLog(paths.orchestrator, KeepRolloutsConfig(max_chars=1000), False, "") as log:
        log.write_batch(0, made, log.choose(build_batch(made), 0))
    (found,) = KeptRollouts(paths).of_step(0)
    seen, named, changed, content, web, broken = found.prompt[0]["content"]
    assert seen == {
        "type": "image",
        "image": str(files["seen"]),
        "sha256": shown[0].digest,
        "height": 300,
        "width": 600,
    }
    assert named == {"type": "image", "image": str(files["named"])}
    assert changed["fault"] == f"{files['changed']}: the file has another content"
    assert (content["height"], content["width"], "image" in content) == (20, 40, False)
    assert web == {"type": "image", "image": "https://example.org/x.png"}
    assert "it is not an image" in broken["fault"] or "begins with zeros" in broken["fault"]
    assert found.images == [shown[0].digest, content["sha256"]]
    assert {file.stem for file in paths.pictures.iterdir()} == set(found.images)
    picture = KeptRollouts(paths).picture(shown[0].digest)
    assert picture is not None
    assert decoded_image(of_base64(picture.partition(",")[2], ImageLimits()), ImageLimits()).size == (256, 128)
    assert one.prompt is asked, "the rollout itself keeps its images"
    many = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": held}}] * 10_000}]
    ((*first, last),) = (each["content"] for each in PictureWriter(paths.pictures).kept(many, {}))
    assert sum("sha256" in part for part in first) == 32
    assert last == {"type": "image"}, "thousands take no time"
    # Rollouts of one image end together.
    writer, url = PictureWriter(tmp_path / "together"), thumbnail(Image.effect_noise((1024, 1024), 90), 1024)
    asked = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    with ThreadPoolExecutor(8) as threads:
        kept = list(threads.map(lambda _: writer.kept(asked, {}), range(8)))
    assert kept == [kept[0]] * 8
    assert "sha256" in kept[0][0]["content"][0]


@pytest.mark.parametrize(
    ("lengths", "total", "longest"), [([5, 5], 10, 5), ([1, 100, 100], 21, 10), ([], 5, 0), ([9], 3, 3)]
)
def test_only_the_longest_texts_are_cut(lengths, total, longest) -> None:
    assert longest_text(lengths, total) == longest


def test_steps_are_thinned_out_evenly_and_never_the_first_and_the_newest(tmp_path: Path, caplog) -> None:
    paths = OrchestratorPaths(tmp_path)
    paths.samples.mkdir()
    for step in range(200):
        paths.step_samples(step).write_bytes(b"x" * 1000)
        paths.trainer_samples(step, 0).write_bytes(b"x" * 500)
        paths.eval_samples(step).write_bytes(b"x" * 10)
        with caplog.at_level("WARNING"):
            thin_out(paths.samples, max_bytes=30_000)
        assert sum(file.stat().st_size for file in paths.samples.iterdir()) <= 30_000
    kept = KeptRollouts(RunPaths(tmp_path))
    kept.samples = paths.samples
    steps = kept.steps()
    assert (steps[0], steps[-1]) == (0, 199)
    assert 12 <= len(steps) <= 20
    gaps = [right - left for left, right in pairwise(steps)]
    assert max(gaps) <= 3 * 200 / len(steps)
    assert len(kept.evaluations()) == 200, "evaluations stay while deleting steps is enough"
    assert {path.name.split(".")[0] for path in paths.samples.glob("*rank*")} == {f"step_{step}" for step in steps}
    assert 0 < len(caplog.records) < 80, "not at every step"
    assert "deleted those of" in caplog.text


def test_evaluations_are_thinned_out_when_steps_are_not_enough(tmp_path: Path) -> None:
    assert densest({0: 5, 1: 5, 2: 5, 9: 5}, excess=5) == [1]
    assert densest({0: 5, 9: 5}, excess=100) == []
    paths = OrchestratorPaths(tmp_path)
    paths.samples.mkdir()
    for version in range(10):
        paths.eval_samples(version).write_bytes(b"x" * 1000)
    paths.step_samples(3).write_bytes(b"x" * 1000)
    assert thin_out(paths.samples, max_bytes=5000) == 4000
    assert paths.step_samples(3).exists()
    assert paths.eval_samples(0).exists()
    assert paths.eval_samples(9).exists()


def test_a_resume_removes_the_steps_that_it_repeats_and_a_new_run_sets_all_aside(tmp_path: Path) -> None:
    run = RunPaths(tmp_path).orchestrator
    run.samples.mkdir(parents=True)
    for number in range(4):
        for path in (run.step_samples(number), run.eval_samples(number), run.trainer_samples(number, 1)):
            path.write_bytes(b"")
    (run.samples / "step_3.jsonl").write_text("")
    prepare_run_dir(RunPaths(tmp_path), resume_step=2)
    left = {path.name for path in run.samples.iterdir()}
    assert left == {
        f"{name}.jsonl.gz"
        for name in ("step_0", "step_1", "step_0.rank_1", "step_1.rank_1", "eval_0", "eval_1", "eval_2")
    }
    prepare_run_dir(RunPaths(tmp_path), resume_step=None)
    assert not run.samples.exists()
    assert len([*run.samples.with_name("samples.1").iterdir()]) == 7


def test_token_texts_of_byte_level_and_sentencepiece_vocabularies() -> None:
    pieces = {"a": 0, "Ġb": 1, "â": 2, "Ĥ¬": 3, "Ċ": 4}
    byte_level = Tokenizer(models.WordLevel(pieces, unk_token="a"))
    byte_level.decoder = decoders.ByteLevel()
    table = json.loads(json.dumps(TokenTexts(byte_level).of([0, 1, 2, 3, 4])))
    assert table == {"0": "a", "1": " b", "2": [0xE2], "3": [0x82, 0xAC], "4": "\n"}
    assert token_texts([0, 1, 2, 3, 4], table) == ["a", " b", "€", "", "\n"]
    pieces = {"a": 0, "▁b": 1, "<0xE2>": 2, "<0x82>": 3, "<0xAC>": 4}
    spaced = Tokenizer(models.WordLevel(pieces, unk_token="a"))
    spaced.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    assert token_texts([0, 1, 2, 3, 4], TokenTexts(spaced).of(range(5))) == ["a", " b", "€", "", ""]


def test_files_are_gzip_that_any_program_reads(tmp_path: Path, groups) -> None:
    paths = OrchestratorPaths(tmp_path)
    log = RolloutLog(paths, KeepRolloutsConfig(), keep_all=False, model="none")
    made = groups(2, 2)
    log.write_batch(0, made, log.choose(build_batch(made), 0))
    log.close()
    lines = gzip.decompress(paths.step_samples(0).read_bytes()).splitlines()
    assert [json.loads(line)["group"] for line in lines] == [0, 0, 1, 1]


def test_a_disk_that_fails_is_a_warning(tmp_path: Path, groups, caplog) -> None:
    (tmp_path / "samples").write_text("a file, where a directory should be")
    log = RolloutLog(OrchestratorPaths(tmp_path), KeepRolloutsConfig(), keep_all=False, model="none")
    made = groups(1, 2)
    with caplog.at_level("WARNING"):
        log.write_batch(0, made, log.choose(build_batch(made), 0))
        log.close()
    assert "step_0.jsonl.gz were not kept: FileExistsError" in caplog.text
