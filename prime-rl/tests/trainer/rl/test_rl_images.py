"""RL on images: rows of rollouts have the log-probabilities of Transformers' own class, and the pixels that the policy
saw."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import peft
import pytest
import tomli_w
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


def run_command(*words: object) -> str:
    """Run `medarc_train` with the environments in the folder of its TOML file. Gives back what it printed."""
    command = [Path(sys.executable).with_name("medarc_train"), *map(str, words)]
    environ = {**os.environ, "PYTHONPATH": str(Path(str(words[1])).parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def parity(printed: str) -> float:
    (line,) = (line for line in printed.splitlines() if "Parity" in line)
    differing = re.search(r"differ by (\S+)", line)
    assert differing is not None, line
    return float(differing[1])


def batch_of(paths: RunPaths, step: int, image_id: int) -> TrainingBatch:
    """A batch without the samples in which the policy itself wrote the token of images, which Transformers refuses."""
    batch = msgspec.msgpack.decode(paths.orchestrator.batch(step).read_bytes(), type=TrainingBatch)

    def has_written_it(sample: TrainingSample) -> bool:
        sampled = np.array(sample.inference_logprobs) != 0  # an environment's tokens have none
        return image_id in np.array(sample.completion_ids)[sampled]

    kept = [sample for sample in batch.examples if not has_written_it(sample)]
    assert kept
    return msgspec.structs.replace(batch, examples=kept)


def difference(directory: Path, batch: TrainingBatch, sample: TrainingSample, adapter: Path | None = None) -> float:
    """The largest difference of a sample's log-probabilities from those of Transformers' class with these weights."""
    shown = {each.digest: read_image(each.source, Path(), ImageLimits(), None, each.digest) for each in batch.images}
    processor = tf.AutoImageProcessor.from_pretrained(directory, backend="pil")
    model = tf.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    is_image = ids == model.config.image_token_id
    made = processor([shown[each] for each in sample.images or ()])
    images = {name: torch.tensor(np.asarray(made[name])) for name in ("pixel_values", "image_grid_thw")}
    logits = model(input_ids=ids, mm_token_type_ids=is_image.int(), **images).logits[0, len(sample.prompt_ids) - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(sample.completion_ids)[:, None])[:, 0]
    differing = (logprobs - torch.tensor(sample.inference_logprobs)).abs()
    return float(differing[torch.tensor(sample.completion_mask)].max())


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
    printed = run_command("rl", tmp_path / "rl.toml", "--model.name", start, "--output-dir", paths.root)
    assert parity(printed) < 1e-4
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    rewards = [record["reward/mean"] for record in records if record["source"] == "orchestrator"]
    assert len(rewards) == 3
    assert all(0 < each < 1 for each in rewards)

    # The answers of the last step are those of Transformers' own class, with the weights and the tower of a version.
    batch = batch_of(paths, 2, json.loads((start / "config.json").read_text())["image_token_id"])
    for sample in batch.examples:
        assert sample.version in (1, 2)
        assert difference(paths.weight(sample.version), batch, sample) < 1e-4
    assert max(difference(start, batch, sample) for sample in batch.examples) > 1e-3
    before, after = (load_file(each / "model.safetensors") for each in (start, paths.weight(2)))
    moved = {name for name, each in before.items() if ".visual." in name and not torch.equal(each, after[name])}
    assert len(moved) > 20, "the tower has been trained"


SLIDES = """
import verifiers as vf
from datasets import Dataset


def asked(path):
    image = {"type": "image_url", "image_url": {"url": path}}
    return [{"role": "user", "content": [image, {"type": "text", "text": "?"}]}]


def different_letters(completion):
    said = "".join(message["content"] for message in completion if message["role"] == "assistant")
    return len(set(said)) / 10


class Slides(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return asked(state["info"]["next"])


def load_environment(folder):
    files = [f"{folder}/{number % 4}.png" for number in range(9)]
    rows = [{"prompt": asked(first), "info": {"next": then}} for first, then in zip(files, files[1:])]
    return Slides(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[different_letters]), max_turns=2)
"""


@pytest.mark.slow
@torch.no_grad()
def test_rl_continues_the_adapter_of_sft_on_images_that_come_in_turns(tiny_model_dir: Path, tmp_path: Path) -> None:
    start, data, sft, paths = (tmp_path / each for each in ("start", "data", "sft", "run"))
    save_checkpoint("qwen3_vl", start, tiny_model_dir)
    lora: dict[str, Any] = {"rank": 4, "alpha": 8.0}
    weights = {"save_adapter_separately": True, "dtype": "float32"}
    of_sft: dict[str, Any] = {
        "device": "cpu",
        "max_steps": 2,
        "model": {"name": str(start), "attn": "sdpa", "vision": {}, "lora": lora},
        "data": {"name": str(save_rows(data)), "seq_len": 160, "batch_size": 2},
        "optim": {"lr": 1e-2},
        "ckpt": {"weights": weights},
    }
    (tmp_path / "sft.toml").write_text(tomli_w.dumps(of_sft))
    run_command("sft", tmp_path / "sft.toml", "--output-dir", sft)

    (tmp_path / "slides.py").write_text(SLIDES)
    of_rl = tomllib.loads(RUN)
    of_rl |= {"model": {"name": str(start), "vision": {}}, "max_steps": 2, "max_async_level": 0}
    of_rl["orchestrator"]["env"] = [{"id": "slides", "args": {"folder": str(data)}}]
    of_rl["trainer"]["model"]["lora"] = {**lora, "path": str(sft)}
    of_rl["trainer"]["ckpt"]["weights"] = weights
    (tmp_path / "rl.toml").write_text(tomli_w.dumps(of_rl))
    assert parity(run_command("rl", tmp_path / "rl.toml", "--output-dir", paths)) < 1e-4

    # Each turn shows another image, and PEFT has the log-probabilities of both, with the adapter that SFT began.
    run, image_id = RunPaths(paths), json.loads((start / "config.json").read_text())["image_token_id"]
    adapter, sft_adapter = (each.weight(at) / "lora_adapters" for each, at in ((run, 1), (RunPaths(sft), 2)))
    batch = batch_of(run, 1, image_id)
    of_two = [sample for sample in batch.examples if len(sample.images or ()) == 2]
    assert of_two
    for sample in of_two:
        assert difference(start, batch, sample, adapter) < 1e-4
        assert difference(start, batch, sample) > 1e-3
    learned, begun = (load_file(each / "adapter_model.safetensors") for each in (adapter, sft_adapter))
    moved = [(each - learned[name]).abs().max() for name, each in begun.items() if "lora_B" in name]
    assert 0 < max(moved) < 0.005 < max(each.abs().max() for name, each in begun.items() if "lora_B" in name)
    before, after = (load_file(each / "model.safetensors") for each in (start, run.weight(2)))
    assert all(torch.equal(each, after[name]) for name, each in before.items() if ".visual." in name)
