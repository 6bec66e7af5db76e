"""`--estimate` tells before a run starts whether it fits, and what would."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from medarc_rl import medarc_slurm, medarc_train
from prime_rl.checks.memory import ModelShape
from prime_rl.checks.memory.estimate import _own_tokens
from prime_rl.configs.model import ModelConfig

APPS = {"medarc_train": medarc_train.app, "medarc_slurm": medarc_slurm.app}

QWEN3_8B = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
QWEN3_32B = {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64}
ONE_ROW = ("--data.seq-len=8192", "--data.micro-batch-size=1", "--data.batch-size=1")
LONG = ("--model.ac.freq", "1", "--data.seq-len", "32768", "--data.micro-batch-size", "1", "--data.batch-size")
SFT = """
[model]
name = "{model}"

[data]
name = "data"
seq_len = 4096
batch_size = 32
micro_batch_size = 4
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN3_8B))
    return folder


@pytest.fixture
def sft_toml(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "sft.toml"
    path.write_text(SFT.format(model=model))
    return path


def run(command: str, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    done = CliRunner().invoke(APPS[command], list(map(str, words)), env=env)
    return subprocess.CompletedProcess(words, done.exit_code, done.stdout, done.stderr)


def answer(command: str, *words: str | Path) -> dict[str, Any]:
    done = run(command, *words, "--estimate", "--json")
    assert done.stderr == ""
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_a_run_that_does_not_fit_names_the_nearest_change_that_does(sft_toml: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("medarc_train", "sft", sft_toml, "--output-dir", out, "--estimate", "--gpu", "H100")
    assert done.returncode == 1
    assert "does not fit: " in done.stdout
    told = " ".join(done.stdout.split())
    assert "nearest change: model.ac.memory_gib = 5.0, data.micro_batch_size = 1, --gpus 2 (trainer " in told
    assert "model.ac.memory_gib = 5.0 # blocks beyond it run forward twice data.micro_batch_size = 1 #" in told
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert not out.exists()


def test_the_named_change_fits(sft_toml: Path) -> None:
    found = answer("medarc_slurm", "sft", sft_toml, "--gpu", "80", "--model.ac.freq", "1", "--gpus", "4")
    assert (found["verdict"], found["change"]) == ("fits", None)


def test_no_change_is_named_that_the_start_refuses(sft_toml: Path, rl_toml: Path, model: Path) -> None:
    small = ("--gpus", "1", "--data.batch-size", "1", "--data.micro-batch-size", "1", "--data.seq-len", "2048")
    words = ("sft", sft_toml, "--gpu", "80", "--model.ac.freq", "1", *small)
    found = [answer("medarc_train", *words, "--optim.type", optim)["change"] for optim in ("adamw", "adamw8bit")]
    # States of 8 bits stay on the GPU.
    assert [each["set"] for each in found] == ["model.optim_cpu_offload = true", "model.lora.rank = 16"]
    offloading = answer("medarc_train", *words, "--gpu", "40", "--model.optim-cpu-offload")["change"]
    assert offloading["set"] == "model.fsdp_cpu_offload = true, model.optim_cpu_offload = false"
    on_four = ("rl", rl_toml, "--model.name", model, "--gpu", "48", "--colocate", "4")
    shared, in_job = (
        answer(command, *on_four, "--inference.gpu-memory-utilization", "0.8")
        for command in ("medarc_train", "medarc_slurm")
    )
    assert shared["change"]["set"].endswith("--train-gpus 4 --infer-gpus 1 instead of --colocate 4")
    for each in (shared, in_job):
        del each["disk"]["free_bytes"]  # other programs write, too
    assert in_job == shared
    (model / "config.json").write_text(json.dumps(QWEN3_8B | {"num_hidden_layers": 6}))
    cheapest = ("--trainer.model.lora.rank", "16", "--trainer.model.fsdp-cpu-offload", "--trainer.model.ac.freq", "1")
    long = ("medarc_train", "rl", rl_toml, "--device", "cuda", "--model.name", model, "--gpu", "22", *cheapest)
    shorter = answer(*long, "--trainer.model.ac-offloading.pin-memory", "true", "--seq-len", "131072")["change"]
    lengths = "seq_len = 65536, inference.model.max_model_len = 65536"
    assert shorter == {"set": f"trainer.model.mlp_chunk_tokens = 2048, {lengths}", "verdict": "fits"}


@pytest.mark.parametrize(
    ("config", "words", "proposed"),
    [
        # With cp = 2 each process computes twice as many rows, and then FSDP would send more for experts than ep does.
        (QWEN3_30B_A3B, ("80", *LONG, "32"), "model.cp = 2, model.ep = 8"),
        (QWEN3_8B, ("32", *LONG, "32"), "model.cp = 2, model.tp = 2"),
        (QWEN3_8B | {"num_attention_heads": 12, "num_key_value_heads": 4}, ("32", *LONG, "32"), "model.cp = 2"),
        (QWEN3_8B, ("80", *LONG, "32", "--model.dp-replicate", "8"), "model.dp_replicate = 1"),
    ],
    ids=["experts", "dense", "few heads", "copies"],
)
def test_a_mesh_of_the_same_gpus_is_proposed_that_fits_and_is_accepted(
    sft_toml: Path, model: Path, config: dict[str, Any], words: tuple[str, ...], proposed: str
) -> None:
    (model / "config.json").write_text(json.dumps(config))
    words = ("medarc_train", "sft", sft_toml, "--gpus", "8", "--gpu", *words)
    found = answer(*words)
    assert found["change"] == {"set": proposed, "verdict": "fits"}
    keys = (part.split(" = ") for part in proposed.split(", "))
    applied = [f"--{key}={value}" for key, value in keys]
    after = answer(*words, *applied)
    assert (after["verdict"], after["change"]) == ("fits", None)


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        ("--gpu 80 --model.quantization.type nf4", "model.ac.memory_gib = 50.3"),
        ("--gpu 80", "model.ac_offloading.pin_memory = true"),
        ("--gpu 80 --optim.type sgd --data.seq-len 4096", "model.ac.memory_gib = 5.0"),
        # What a config has of the same table is named, too.
        ("--gpu 80 --model.quantization.type nf4 --model.ac.freq 4", "model.ac.memory_gib = 50.3, model.ac.freq = 1"),
        ("--gpu 80 --model.quantization.type nf4 --model.ac.memory-gib 90", "model.ac.memory_gib = 50.3"),
        ("--gpu 80 --model.ac.freq 2", "model.ac_offloading.pin_memory = true, model.ac.freq = 1"),
    ],
)
def test_the_cheapest_settings_for_the_same_gpu_are_accepted_and_fit(
    sft_toml: Path, model: Path, words: str, proposed: str
) -> None:
    """Qwen3-32B with adapters, 8k, on one GPU."""
    (model / "config.json").write_text(json.dumps(QWEN3_8B | QWEN3_32B))
    run_words = ["medarc_train", "sft", sft_toml, "--gpus=1", "--model.lora.rank=16", *ONE_ROW, *words.split()]
    found = answer(*run_words)
    assert (found["change_on_same_gpus"] or found["change"]) == {"set": proposed, "verdict": "fits"}
    keys = dict(part.split(" = ") for part in proposed.split(", "))
    after = answer(*run_words, *(f"--{key}={value}" for key, value in keys.items()))
    assert (after["verdict"], after["change"]) == ("fits", None)
    if budget := keys.pop("model.ac.memory_gib", None):  # more would not fit: as little is computed again as possible
        keys["model.ac.memory_gib"] = str(float(budget) + 2)
        assert answer(*run_words, *(f"--{key}={value}" for key, value in keys.items()))["verdict"] != "fits"


def test_nothing_moves_to_a_host_whose_memory_it_exceeds(sft_toml: Path, model: Path, stand_ins: Any) -> None:
    """1,000 layers of Qwen3-8B: weights, gradients and states of 2.8 TiB."""
    (stand_ins.directory / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA Large, 2000000\n")
    (stand_ins.directory / "nvidia-smi").chmod(0o755)
    (model / "config.json").write_text(json.dumps(QWEN3_8B | {"num_hidden_layers": 1000}))
    words = ("medarc_train", "sft", sft_toml, "--gpus=1", "--model.ac.freq=1", *ONE_ROW)
    here, elsewhere = answer(*words), answer(*words, "--gpu", "1953")
    assert here["gpu"]["bytes"] == pytest.approx(elsewhere["gpu"]["bytes"], rel=0.01)
    offloaded = "model.optim_cpu_offload = true"
    found = [(each["change_on_same_gpus"] or each["change"])["set"] for each in (here, elsewhere)]
    assert (offloaded in found[0], offloaded in found[1]) == (False, True)
    told = run(*words, "--model.fsdp-cpu-offload", "--estimate")
    assert told.returncode == 1
    assert re.search(r"host memory of the trainer: \d{3,}% of this machine's", told.stdout)


@pytest.mark.parametrize(("heads", "cp", "part"), [(16, 4, 4), (16, 3, 1), (6, 4, 1)])
def test_layers_with_a_state_divide_rows_as_far_as_their_heads_allow(heads: int, cp: int, part: int) -> None:
    hybrid = {"model_type": "qwen3_next", "num_attention_heads": 48, "linear_num_key_heads": heads}
    shape = ModelShape(QWEN3_8B | hybrid, {})
    assert _own_tokens(12000, ModelConfig(cp=cp), shape) == 12000 // part


def test_expert_parallelism_of_an_engine_divides_experts_among_its_copies(rl_toml: Path, model: Path) -> None:
    (model / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    words = ("medarc_train", "rl", rl_toml, "--model.name", model, "--gpu", "80", "--infer-gpus", "4")
    words += ("--inference.backend", "vllm", "--inference.parallel.dp", "4")
    whole, divided = (
        answer(*words, *more)["components"][1]["parts"]["weights"]
        for more in ((), ("--inference.enable-expert-parallel",))
    )
    experts = 2 * 48 * 128 * 3 * 2048 * 768
    assert whole - divided == experts - experts // 4


def test_answers_of_preferences_are_scored_as_in_rl(sft_toml: Path) -> None:
    words = (sft_toml, "--gpu=80", "--gpus=1", "--model.lora.rank=8", "--model.debug.num-layers=1", *ONE_ROW)
    (sft, dpo) = (answer("medarc_train", command, *words)["components"][0]["parts"] for command in ("sft", "dpo"))
    # Float32 slices of the vocabulary for all tokens, and for two answers.
    assert dpo["logits"] > 3 * 4 * 8192 * 2 * 8192 > sft["logits"]


def test_adapters_on_a_small_gpu_are_trained_on_weights_in_4_bits(sft_toml: Path) -> None:
    words = ("sft", sft_toml, "--gpu", "16", "--gpus", "1", "--model.lora.rank", "16", "--model.ac.freq", "1")
    small = ("--data.batch-size", "1", "--data.micro-batch-size", "1", "--data.seq-len", "2048")
    found = answer("medarc_train", *words, *small)
    assert found["change"] == {"set": 'model.quantization.type = "nf4"', "verdict": "fits"}
    quantized = answer("medarc_train", *words, *small, "--model.quantization.type", "nf4")
    held, packed = (each["components"][0]["parts"]["weights"] for each in (found, quantized))
    assert (quantized["verdict"], quantized["change"]) == ("fits", None)
    assert packed < 0.4 * held, "embeddings and head stay as they are"


def test_short_sequences_fill_rows_of_the_same_length_on_a_cpu(rl_toml: Path, model: Path) -> None:
    def activations(*words: str) -> int:
        found = answer("medarc_train", "rl", rl_toml, "--model.name", model, "--device", "cpu", *words)
        return found["components"][0]["parts"]["activations"]

    words = ("--seq-len", "128", "--orchestrator.sampling.max-tokens", "64", "--orchestrator.batch-size")
    assert activations(*words, "16") == pytest.approx(activations(*words, "64"), rel=0.01)
    assert activations(*words, "16") > 1.5 * activations(*words, "8")


def test_a_critic_is_counted_as_a_second_model_that_is_trained(rl_toml: Path, model: Path) -> None:
    def trainer(*words: str) -> dict[str, int]:
        found = answer("medarc_train", "rl", rl_toml, "--model.name", model, *words)
        parts: dict[str, int] = found["components"][0]["parts"]
        return parts

    on_cpu, on_gpu = (trainer("--algorithm", "ppo", *where) for where in (("--device", "cpu"), ("--gpu", "80")))
    state = on_cpu["weights"] + on_cpu["gradients"] + on_cpu["optimizer"]
    assert on_cpu["critic"] == state
    assert on_gpu["critic"] == on_gpu["weights"] + on_gpu["optimizer"], "its gradients follow those of the policy"
    assert trainer("--algorithm", "ppo", "--device", "cpu", "--trainer.critic.lora.rank", "8")["critic"] < state / 2
    assert trainer("--device", "cpu")["critic"] == 0


def test_a_checkpoint_in_the_background_takes_a_copy_of_weights_and_states(sft_toml: Path) -> None:
    words = ("medarc_train", "sft", sft_toml, "--ckpt.interval", "10")

    def needed(*more: str) -> dict[str, int]:
        (trainer,) = answer(*words, *more)["components"]
        return {"needed": trainer["needed_bytes"], **trainer["parts"]}

    at_once, copied = (needed("--device", "cpu", *more) for more in ((), ("--ckpt.async-save",)))
    assert copied["needed"] - at_once["needed"] == copied["copy"] == at_once["weights"] + at_once["optimizer"]
    # On a GPU the copy is in the host's memory.
    assert needed("--gpu", "80", "--ckpt.async-save") == needed("--gpu", "80")
    told = run(*words, "--gpu", "80", "--ckpt.async-save", "--estimate").stdout
    assert "host memory: 91.5 GiB" in told
    assert "host memory while loading: 0.59 GiB" in told


def test_both_on_one_gpu_share_its_memory(rl_toml: Path, model: Path) -> None:
    words = ("rl", rl_toml, "--model.name", model, "--gpu", "H200")
    alone = answer("medarc_train", *words)
    shared = answer("medarc_train", *words, "--single-gpu", "--inference.gpu-memory-utilization", "0.5")
    trainer, engine = shared["components"]
    assert trainer["needed_bytes"] == alone["components"][0]["needed_bytes"]
    assert trainer["room_bytes"] == alone["components"][0]["room_bytes"] - engine["needed_bytes"]


def test_a_trainer_and_an_engine_that_take_turns_both_have_the_whole_gpu(rl_toml: Path, model: Path) -> None:
    words = ("medarc_train", "rl", rl_toml, "--model.name", model, "--gpu", "H200", "--single-gpu")
    words += ("--max-async-level", "0")
    sleeps, leaves = "--inference.enable-sleep-mode", "--trainer.offload-while-sampling"

    def components(*more: str) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(run(*words, *more, "--estimate", "--json").stdout)["components"]
        return found

    for engine in ("vllm", "embedded"):
        backend = ("--inference.backend", engine)
        shared, asleep, apart = (components(*backend, *more) for more in ((), (sleeps,), (sleeps, leaves)))
        whole = shared[0]["room_bytes"] + shared[1]["needed_bytes"] - 768 * 2**20
        assert apart[0]["room_bytes"] == whole
        # Beside an awake engine are weights and states; gradients, activations and buffers beside one that sleeps.
        held = sum(asleep[0]["parts"][name] for name in ("weights", "optimizer")) + 768 * 2**20
        in_steps = asleep[0]["needed_bytes"] - held
        assert asleep[0]["room_bytes"] == min(whole, shared[0]["room_bytes"] + in_steps)
        assert shared[0]["room_bytes"] < asleep[0]["room_bytes"]
    assert apart[0]["parts"] == shared[0]["parts"]
    kept = sum(apart[0]["parts"][name] for name in ("weights", "optimizer"))
    told = run(*words, "--trainer.offload-while-sampling", "--estimate").stdout
    assert f"host memory: {kept / 2**30:.1f} GiB for each process of the trainer" in told


def test_an_fp8_cache_of_vllm_holds_more_tokens_and_what_is_not_counted_is_named(rl_toml: Path, model: Path) -> None:
    words = (
        "medarc_train",
        "rl",
        rl_toml,
        "--model.name",
        model,
        "--gpu",
        "80",
        "--estimate",
        "--inference.backend",
        "vllm",
    )
    told = [
        run(*words, "--inference.vllm", f"kv_cache_dtype={dtype},quantization=fp8").stdout for dtype in ("auto", "fp8")
    ]
    tokens = [int(re.search(r"key-value cache: ([\d,]+) tokens", each)[1].replace(",", "")) for each in told]
    assert tokens[1] == pytest.approx(2 * tokens[0], rel=1e-3)
    assert all("not counted: vllm.quantization" in each for each in told)


def test_nodes_of_their_own_share_nothing_and_a_trainer_that_needs_more_memory_gets_more_nodes(
    rl_toml: Path, model: Path
) -> None:
    words = ("rl", rl_toml, "--model.name", model, "--gpu", "80", "--trainer.model.ac.freq", "1", "--seq-len", "16384")
    alone = answer("medarc_slurm", *words)
    nodes = answer("medarc_slurm", *words, "--train-nodes", "2", "--infer-nodes", "3", "--train-gpus", "2")
    trainer, engine = nodes["components"]
    assert (trainer["processes"], engine["processes"]) == (4, 3 * 2)
    sharded = trainer["parts"]["weights"], trainer["parts"]["optimizer"]
    assert sharded == tuple(
        pytest.approx(alone["components"][0]["parts"][part] / 4, rel=0.01) for part in ("weights", "optimizer")
    )
    assert engine["room_bytes"] == alone["components"][1]["room_bytes"]
    small = answer("medarc_slurm", *words, "--train-nodes", "1", "--infer-nodes", "1", "--train-gpus", "1")
    assert small["verdict"] == "does not fit"
    assert small["change"] == {"set": "--train-nodes 4", "verdict": "fits"}


@pytest.mark.parametrize(
    ("gpu", "said"),
    [
        ("H10", "error: --gpu H10: not in the table; nearest: H100"),
        ("0", "error: --gpu 0: no GPU has 0 GiB"),
        ("nan", "error: --gpu nan: not in the table"),
    ],
)
def test_a_gpu_that_is_not_known_is_a_mistake(sft_toml: Path, gpu: str, said: str) -> None:
    done = run("medarc_train", "sft", sft_toml, "--estimate", "--gpu", gpu)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(said)


def test_without_a_gpu_a_job_is_estimated_without_a_verdict(sft_toml: Path) -> None:
    done = run("medarc_slurm", "sft", sft_toml, "--estimate", PATH="/nonexistent")
    assert (done.returncode, done.stderr) == (0, "")
    assert "No GPU is known here: name one" in done.stdout


def test_a_gpu_that_does_not_answer_is_not_waited_for(sft_toml: Path, stand_ins: Any) -> None:
    (stand_ins.directory / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 3600\n")
    (stand_ins.directory / "nvidia-smi").chmod(0o755)
    done = run("medarc_slurm", "sft", sft_toml, "--estimate")
    assert "No GPU is known here: name one" in done.stdout


def test_judges_that_a_run_starts_need_memory_and_gpus(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "rl.toml"
    remote = '[judge.remote]\nmodel = "other"\nbase_url = "https://example.org/v1"\n'
    ours = f'[judge.grader]\nmodel = "{model}"\ngpus = 2\nengine = {{ tp = 2, max_model_len = 8192 }}\n'
    config.write_text(
        f'max_steps = 4\n[model]\nname = "{model}"\n{ours}{remote}'
        '[[orchestrator.env]]\nid = "rubric"\njudge = "grader"\n[inference]\n'
    )
    words = ("medarc_train", "rl", config, "--output-dir", tmp_path / "out", "--gpu", "H100")
    judge = next(each for each in answer(*words)["components"] if each["name"] == "judge grader")
    assert (judge["processes"], judge["verdict"]) == (2, "fits")
    assert judge["parts"]["weights"] == pytest.approx(8.19e9 * 2 / 2, rel=0.01)
    assert judge["notes"][0] == f"judge grader: {model}, on 2 GPUs of its own"
    teacher = next(
        each
        for each in answer(*words, "--deployment.num-teacher-gpus", "1", "--trainer.loss.teacher-tau", "1")[
            "components"
        ]
        if each["name"] == "teacher"
    )
    assert (teacher["processes"], teacher["notes"][0]) == (1, f"teacher: {model}, on 1 GPU of its own")
    shown = run(*words, "--estimate").stdout
    assert "judge gr… x 2" in shown
    assert "remote" not in shown
