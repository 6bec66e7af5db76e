"""RL on images: rows of rollouts have the log-probabilities of Transformers' own class, and the pixels that the policy
saw."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import transformers as tf
from safetensors.torch import load_file

from prime_rl.configs.rl import RLConfig
from prime_rl.configs.trainer import ModelConfig, TokenizerConfig
from prime_rl.run.paths import RunPaths
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.model.images import setup_images
from prime_rl.trainer.model.tokenizer import setup_tokenizer
from prime_rl.trainer.process.errors import DataError, TrainerError
from prime_rl.trainer.process.mesh import Mesh
from prime_rl.trainer.rl.batches import check_images, pack_batch
from prime_rl.trainer.rl.rows import Row, score_row
from prime_rl.transport.messages import ImageReference, MicroBatch, TrainingBatch, TrainingSample
from prime_rl.utils.images import ImageLimits, read_image, shown_image
from prime_rl.utils.pydantic_config import ConfigError, load_config

from ..vision_checkpoints import FAMILIES, SIZES, reference, save_checkpoint, save_rows

CPU = torch.device("cpu")
IMAGES_OF_ROWS = ([0], [], [1, 2, 3], [0], [3])
ANSWER_TOKENS = 3


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_rollouts_have_the_logprobs_of_transformers_and_the_pixels_of_the_policy(
    family: str, tiny_model_dir: Path, mesh: Mesh, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    save_checkpoint(family, start, tiny_model_dir)
    file = save_rows(tmp_path / "data")
    ids, _, loss_of = reference(family, start, file)
    config = ModelConfig(name=str(start), attn="sdpa", seq_len=256, vision={})
    images = setup_images(config, setup_tokenizer(TokenizerConfig(name=str(start)), config))
    assert images is not None

    shown = []
    for number in range(len(SIZES)):
        path = tmp_path / "data" / f"{number}.png"
        each = shown_image(str(path), Path(), ImageLimits())
        shown.append(ImageReference(each.digest, str(path), each.height, each.width))

    def sample(row: int) -> TrainingSample:
        """An answer of the policy that happens to have sampled the token that stands for images."""
        prompt, answer = ids[row][:-ANSWER_TOKENS], [*ids[row][-ANSWER_TOKENS:], images.reader.token_id]
        return TrainingSample(
            prompt, [False] * len(prompt), answer, [True] * ANSWER_TOKENS + [False], [-1.0] * len(answer),
            [1.0] * len(answer), advantage=1.0, images=[shown[at].digest for at in IMAGES_OF_ROWS[row]] or None,
        )  # fmt: skip

    rows = [0, 0, 4, 2, 1, 3]
    samples = [sample(row) for row in rows]
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode(TrainingBatch(samples, 0, images=shown)), type=TrainingBatch)
    check_images(batch, images)
    (packed,) = pack_batch(batch, 256, 1024, 1, group_tokens=512)
    model = setup_model(config, mesh)
    of_all = {}
    for message in msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=list[MicroBatch]):
        row = Row.from_message(message, CPU, images=images)
        targets = row.layout.trained_M
        with torch.no_grad():
            scored = score_row(model, row, targets, 8192)[0]
        at = 0
        for length, seen in zip(row.layout.lengths, message.images or [], strict=True):
            tokens, mask = row.input_ids[at : at + length], row.loss_mask[at : at + length]
            of_all[tuple(tokens.tolist()), tuple(each.digest for each in seen)] = (
                scored[at : at + length][mask].sum().item()
            )
            at += length
    for which, each in zip(rows, samples, strict=True):
        is_trained = np.zeros(len(ids[which]), bool)
        is_trained[-ANSWER_TOKENS:] = True
        with torch.no_grad():
            expected = -loss_of(which, is_trained).item()
        # Two of them have the same tokens, and different images.
        assert of_all[tuple(each.prompt_ids + each.completion_ids), tuple(each.images or ())] == pytest.approx(
            expected, abs=1e-4
        )
    # The rollouts of a prompt share its image, which is computed once.
    together = next(each for each in packed if each.position_ids.count(0) > 2)
    read = Row.from_message(together, CPU, images=images).images
    assert read is not None
    found = read()
    assert found is not None
    different = {each.digest: images.of_rollout(each).tokens for sequence in together.images or () for each in sequence}
    assert found.features == sum(different.values()) < int((found.feature_of_token_T > 0).sum())

    # What the policy has not seen is not trained on.
    file_of_first = Path(shown[0].source)
    file_of_first.write_bytes(Path(shown[1].source).read_bytes())
    with pytest.raises(DataError, match=r"0\.png: the file has another content"):
        read()
    wrong = msgspec.structs.replace
    for changed, fault in (
        (wrong(batch, images=shown[1:]), "names an image that the batch does not have"),
        (wrong(batch, examples=[wrong(samples[0], images=None)]), "a text holds .*, the token that stands for images"),
        (wrong(batch, examples=[wrong(samples[0], images=[shown[0].digest] * 2)]), "tokens for 2 images"),
    ):
        with pytest.raises(TrainerError, match=fault):
            check_images(changed, images)
    with pytest.raises(TrainerError, match=r"the trainer reads none: set \[model.vision\]"):
        check_images(batch, None)


VISION: dict[str, Any] = {"model": {"vision": {}}, "orchestrator": {"env": [{"id": "rows"}]}}


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"trainer": {"critic": {}}}, "[model.vision] with [trainer.critic], which reads text alone"),
        ({"inference": {"model": {"language_model_only": True}}}, "serves no vision tower"),
        ({"orchestrator": {"teacher_model": {}, **VISION["orchestrator"]}}, "with a teacher, which reads text alone"),
        ({"trainer": {"model": {"cp": 2}}}, "rows with images are not divided among processes"),
        ({"model": {"vision": {"tower_lr": 1e-5}}, "trainer": {"optim": {"type": "muon"}}}, "'muon'"),
    ],
)
def test_what_does_not_go_with_images_in_rl_is_one_line(settings: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(RLConfig, overrides={**VISION, **settings})
    assert fault in str(error.value)


def test_limits_of_images_reach_trainer_and_orchestrator() -> None:
    config = load_config(RLConfig, overrides={**VISION, "model": {"vision": {"max_images": 3}}})
    assert config.trainer.model.vision.limits == config.orchestrator.model.image_limits
    assert config.orchestrator.model.image_limits == ImageLimits(max_images=3)


RUN = """
device = "cpu"
max_steps = 3
max_async_level = 1
seq_len = 128
model.vision.tower_lr = 3e-3
trainer.model.attn = "sdpa"
trainer.optim.lr = 3e-3
ckpt.interval = 1
trainer.ckpt.weights.dtype = "float32"

[orchestrator]
batch_size = 8
rollouts_per_example = 4
bound_lag = true
sampling.max_tokens = 8

[[orchestrator.env]]
id = "rows"
args = { datasets = [{ path = "DATA" }], rewards = [{ fn = "fuzzy_match" }] }

[inference]
backend = "embedded"
model.max_model_len = 128
"""


@pytest.mark.slow
@torch.no_grad()
def test_a_run_trains_the_tower_and_its_engine_samples_from_each_version(tiny_model_dir: Path, tmp_path: Path) -> None:
    start, data = tmp_path / "start", tmp_path / "data"
    save_checkpoint("qwen3_vl", start, tiny_model_dir)
    save_rows(data)
    rows = [{"question": f"<image>{n}?", "answer": "abcdefghijklm", "image": f"{n % len(SIZES)}.png"} for n in range(8)]
    (data / "rl.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rl.toml").write_text(RUN.replace("DATA", str(data / "rl.jsonl")))
    paths = RunPaths(tmp_path / "run")
    command = [Path(sys.executable).with_name("medarc_train"), "rl", tmp_path / "rl.toml", "--model.name", start]
    done = subprocess.run([*command, "--output-dir", paths.root], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (parity,) = (line for line in done.stdout.splitlines() if "Parity" in line)
    differing = re.search(r"differ by (\S+)", parity)
    assert differing is not None, parity
    assert float(differing[1]) < 1e-4
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    rewards = [record["reward/mean"] for record in records if record["source"] == "orchestrator"]
    assert len(rewards) == 3
    assert all(0 < each < 1 for each in rewards)

    # The answers of the last step are those of Transformers' own class, with the weights and the tower of a version.
    batch = msgspec.msgpack.decode(paths.orchestrator.batch(2).read_bytes(), type=TrainingBatch)
    shown = {each.digest: read_image(each.source, Path(), ImageLimits(), None, each.digest) for each in batch.images}
    processor = tf.AutoImageProcessor.from_pretrained(start, backend="pil")

    def difference(directory: Path, sample: TrainingSample) -> float:
        model = tf.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        ids = torch.tensor([sample.prompt_ids])
        is_image = ids == model.config.image_token_id
        made = processor([shown[each] for each in sample.images or ()])
        images = {name: torch.tensor(np.asarray(made[name])) for name in ("pixel_values", "image_grid_thw")}
        logits = model(input_ids=ids, mm_token_type_ids=is_image.int(), **images).logits
        logprob = logits[0, -1].log_softmax(-1)[sample.completion_ids[0]]
        return abs(logprob.item() - sample.inference_logprobs[0])

    for sample in batch.examples:
        assert sample.version in (1, 2)
        assert difference(paths.weight(sample.version), sample) < 1e-4
    assert max(difference(start, sample) for sample in batch.examples) > 1e-3
    before, after = (load_file(each / "model.safetensors") for each in (start, paths.weight(2)))
    moved = {name for name, each in before.items() if ".visual." in name and not torch.equal(each, after[name])}
    assert len(moved) > 20, "the tower has been trained"
