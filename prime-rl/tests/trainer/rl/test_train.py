"""The RL trainer as a real process: consumes batches, writes broadcasts, metrics, checkpoints and weights."""

from __future__ import annotations

import gzip
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from prime_rl.configs.shared import FileSystemTransportConfig, ZMQTransportConfig
from prime_rl.configs.trainer import LoRAConfig, ModelConfig, TrainerConfig
from prime_rl.run.paths import RunPaths, SamplesFile, stable_steps
from prime_rl.trainer.process.errors import ResumeRefused, TrainerError
from prime_rl.trainer.rl.run import train
from prime_rl.transport import setup_batch_sender
from prime_rl.transport.messages import TrainingBatch, TrainingSample

MODULE = "prime_rl.trainer.rl.train"
UNEVEN_LENGTHS = 2 * (400, 31, 250, 390, 380, 120, 395, 300, 60, 370, 385, 45)
"""6,252 tokens: four rows of 2,048, of which the last is almost empty. With two processes, each accumulates two."""


def batch(step: int) -> TrainingBatch:
    generator = torch.Generator().manual_seed(step)

    def sample(number: int, length: int) -> TrainingSample:
        prompt, completion = length // 3, length - length // 3
        tokens = torch.randint(4, 100, (length,), generator=generator).tolist()
        return TrainingSample(
            prompt_ids=tokens[:prompt],
            prompt_mask=[False] * prompt,
            completion_ids=tokens[prompt:],
            completion_mask=[True] * completion,
            inference_logprobs=[-4.8] * completion,
            completion_temperatures=[1.0] * completion,
            advantage=torch.randn((), generator=generator).item(),
            kept_as=[0, number, 0] if number % 4 == 0 else None,
        )

    return TrainingBatch([sample(number, length) for number, length in enumerate(UNEVEN_LENGTHS)], step)


def send(out: Path, *steps: int, early_end: int | None = None) -> None:
    """Write batches as an orchestrator would, which may end the run before a step."""
    sender = setup_batch_sender(FileSystemTransportConfig(), RunPaths(out).orchestrator)
    for step in steps:
        sender.send(batch(step))
    if early_end is not None:
        sender.send(TrainingBatch([], early_end, early_end="the score is good enough"))


def command(out: Path, model: Path, *options: str, processes: int = 1) -> list[str]:
    start = ["-m", MODULE]
    if processes > 1:
        start = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *start]
    fixed = ["--device", "cpu", "--model.attn", "sdpa", "--optim.lr", "1e-3", "--model.seq_len", "512"]
    fixed += ["--parity.on-mismatch", "off"]  # no policy sampled these batches
    return [sys.executable, *start, "--output-dir", str(out), "--model.name", str(model), *fixed, *options]


def trained(out: Path, model: Path, *options: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(out, model, *options, processes=processes), env=environment, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory, tiny_model_dir) -> Path:
    """Directory of a run over two batches."""
    out = tmp_path_factory.mktemp("whole")
    send(out, 0, 1)
    result = trained(out, tiny_model_dir, "--max-steps", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    return out


def final_weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(RunPaths(out).weight(2) / "model.safetensors")


def kept_logprobs(out: Path) -> dict[tuple[int, int], list[float]]:
    """The log-probabilities that all ranks wrote, by step and sample."""
    files = [file for file in SamplesFile.all_in(RunPaths(out).orchestrator.samples) if file.data_rank is not None]
    lines = ((file, line) for file in files for line in gzip.decompress(file.path.read_bytes()).splitlines())
    records = [(file.number, json.loads(line)) for file, line in lines]
    assert len({(step, *record["kept_as"]) for step, record in records}) == len(records)
    return {(step, record["kept_as"][1]): record["logprobs"] for step, record in records}


def test_every_version_is_broadcast_and_the_last_one_exported(whole_run, tiny_model_dir) -> None:
    paths = RunPaths(whole_run)
    assert stable_steps(paths.orchestrator.broadcasts) == [1, 2]
    last = load_file(paths.orchestrator.broadcast(2) / "model.safetensors")
    exported = final_weights(whole_run)
    start = load_file(tiny_model_dir / "model.safetensors")
    assert last.keys() == exported.keys() == start.keys()
    assert all(torch.equal(last[name], exported[name]) for name in last)
    assert not torch.equal(last["model.norm.weight"], start["model.norm.weight"])
    assert last["model.norm.weight"].dtype == torch.float32


def test_the_exported_weights_load_as_a_model_with_its_tokenizer(whole_run) -> None:
    directory = RunPaths(whole_run).weight(2)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    assert model.config.vocab_size == 128
    assert tokenizer.chat_template


def test_each_step_logs_metrics_and_a_line(whole_run) -> None:
    records = [json.loads(line) for line in RunPaths(whole_run).metrics.read_text().splitlines()]
    assert [(record["source"], record["step"]) for record in records] == [("trainer", 0), ("trainer", 1)]
    wanted = ["loss", "entropy", "mismatch_kl", "is_masked", "geo_seq_ratio", "trainer_probs", "inference_probs"]
    names = [f"{name}/{statistic}" for name in wanted for statistic in ("mean", "median", "std", "min", "max")]
    names += ["optim/lr", "optim/grad_norm", "perf/throughput", "time/step", "time/wait_for_batch", "progress/tokens"]
    assert set(names) <= records[1].keys()
    assert records[1]["optim/lr"] == pytest.approx(1e-3)
    assert records[1]["progress/tokens"] == 2 * sum(UNEVEN_LENGTHS)
    assert records[1]["progress/samples"] == 2 * len(UNEVEN_LENGTHS)
    log = RunPaths(whole_run).rank_log(0).read_text()
    assert "Step 1 | Time: " in log
    assert "| Mismatch KL: " in log
    assert log.rstrip().endswith("RL trainer finished!")


def test_two_processes_train_the_same_weights_as_one_and_end_early_together(
    whole_run, tmp_path, tiny_model_dir
) -> None:
    send(tmp_path, 0, 1, early_end=2)
    result = trained(tmp_path, tiny_model_dir, "--max-steps", "9", processes=2)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "The run ends early, after 2 steps: the score is good enough" in RunPaths(tmp_path).rank_log(0).read_text()
    alone, together = final_weights(whole_run), final_weights(tmp_path)
    assert all(torch.allclose(alone[name], together[name], atol=2e-5) for name in alone)
    one, two = (kept_logprobs(out) for out in (whole_run, tmp_path))
    assert one.keys() == two.keys() == {(step, number) for step in (0, 1) for number in range(0, 24, 4)}
    assert all(two[place] == pytest.approx(one[place], abs=1e-4) for place in one)
    metrics = [RunPaths(out).metrics.read_text().splitlines() for out in (whole_run, tmp_path)]
    assert [len(lines) for lines in metrics] == [2, 2], "rank 0 alone writes them"
    one, two = (json.loads(lines[0]) for lines in metrics)
    same = ("loss/mean", "entropy/mean", "mismatch_kl/mean", "optim/grad_norm", "progress/tokens")
    assert {name: two[name] for name in same} == pytest.approx({name: one[name] for name in same}, rel=1e-4)


def config_of(out: Path, model_dir: Path, **settings) -> TrainerConfig:
    fixed = {"device": "cpu", "max_steps": 1, "parity": {"on_mismatch": "off"}, "optim": {"lr": 1e-3}}
    fixed["model"] = ModelConfig(name=str(model_dir), attn="sdpa", seq_len=512)
    return TrainerConfig(output_dir=out, **fixed | settings)


def test_several_updates_per_batch_are_one_version_and_equal_for_two_processes(
    tmp_path, tiny_model_dir, zmq_port
) -> None:
    """With one process, the batch is sent as a file; with two, batch and rows are sent through sockets. Each update
    also imitates two demonstrations, whose rows are full, so that both read the same."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{number} measles " * 8}) + "\n" for number in range(7)))
    of_data = {"name": str(texts), "batch_size": 2, "seq_len": 32, "pack_function": "cat"}
    demonstrations = {"data": of_data, "weight": 0.7, "combine": "share"}
    options = ["--max-steps", "1", "--minibatches", "3", "--loss.type", "decoupled"]
    options += ["--critic.gae-lambda", "0.9", "--critic.optim.lr", "1e-2"]
    options += ["--demonstrations", json.dumps(demonstrations)]
    options += ["--rollout-transport.type", "zmq", "--rollout-transport.port", str(zmq_port)]
    sender = setup_batch_sender(ZMQTransportConfig(port=zmq_port), RunPaths(together).orchestrator)
    sender.send(batch(0))
    result = trained(together, tiny_model_dir, *options, processes=2)
    sender.close()
    assert result.returncode == 0, result.stdout + result.stderr
    send(alone, 0)
    settings = {"minibatches": 3, "loss": {"type": "decoupled"}, "demonstrations": demonstrations}
    settings["critic"] = {"gae_lambda": 0.9, "optim": {"lr": 1e-2}}
    train(config_of(alone, tiny_model_dir, **settings), RunPaths(alone))
    assert stable_steps(RunPaths(alone).orchestrator.broadcasts) == [1]
    for model, moved in (("", 2e-5), ("critic", 2e-4)):
        one, two = (load_file(RunPaths(out).weight(1) / model / "model.safetensors") for out in (alone, together))
        assert all(torch.allclose(one[name], two[name], atol=moved) for name in one)
    record, other = (json.loads(RunPaths(out).metrics.read_text()) for out in (alone, together))
    same = [name for name in record if name.startswith("critic/") and not name.endswith(("median", "min", "max"))]
    assert {name: other[name] for name in same} == pytest.approx({name: record[name] for name in same}, rel=1e-3)
    assert record["progress/samples"] == len(UNEVEN_LENGTHS)
    assert record["importance_ratio/std"] > 0, "later updates leave the policy that the step began with"
    assert record["demonstrations/tokens"] == other["demonstrations/tokens"] == 3 * 2 * 32
    assert record["demonstrations/loss"] == pytest.approx(other["demonstrations/loss"], rel=1e-4)


def test_a_batch_is_trained_on_twice_with_the_first_policys_log_probabilities(tmp_path, tiny_model_dir) -> None:
    """Against decoupled PPO in float64: two minibatches, twice. prox and behave are fixed before the first update."""
    send(tmp_path, 0)
    settings = {
        "minibatches": 2,
        "epochs_per_batch": 2,
        "optim": {"type": "sgd", "lr": 0.3, "momentum": 0.0, "nesterov": False},
    }
    settings["optim"] |= {"weight_decay": 0.0, "max_norm": 1e9}
    settings["loss"] = {"type": "decoupled", "clip_low": 0.02, "clip_high": 0.02, "behaviour_weight_cap": 1.2}
    train(config_of(tmp_path, tiny_model_dir, **settings), RunPaths(tmp_path))

    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64).train()
    samples = sorted(batch(0).examples, key=lambda each: -len(each.prompt_ids + each.completion_ids))

    def logprobs_of(sample: TrainingSample) -> torch.Tensor:
        tokens = torch.tensor(sample.prompt_ids + sample.completion_ids)
        logprobs = model(tokens[None]).logits[0, :-1].log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        return logprobs[len(sample.prompt_ids) - 1 :]

    with torch.no_grad():
        proximal = [logprobs_of(sample) for sample in samples]
    clipped, losses = [], []
    for minibatch in 2 * [range(0, len(samples), 2), range(1, len(samples), 2)]:
        tokens = sum(len(samples[number].completion_ids) for number in minibatch)
        model.zero_grad()
        for number in minibatch:
            sample, prox = samples[number], proximal[number]
            behave, advantage = torch.tensor(sample.inference_logprobs, dtype=torch.float64), sample.advantage
            weight = (prox - behave).exp()
            weight = torch.where(weight <= 1.2, weight, 0.0)
            rho = (logprobs_of(sample) - prox).exp()
            bounded = rho.clamp(0.98, 1.02)
            clipped.append((rho * advantage > bounded * advantage).double().mean().item())
            loss = -(weight * torch.minimum(rho * advantage, bounded * advantage)).sum() / tokens
            loss.backward()
            losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad
    assert max(clipped[: len(clipped) // 4]) == 0 < max(clipped[-len(clipped) // 4 :])
    found, start = (
        load_file(path)
        for path in (RunPaths(tmp_path).weight(1) / "model.safetensors", tiny_model_dir / "model.safetensors")
    )
    expected = dict(model.named_parameters())
    for name, value in found.items():
        moved = (value - start[name]).abs().max()
        assert (value - expected[name]).abs().max() < 1e-3 * moved + 1e-7, name
    (record,) = records_of(tmp_path)
    assert record["loss/mean"] == pytest.approx(sum(losses) / 4, abs=1e-5)
    assert record["progress/samples"] == len(UNEVEN_LENGTHS)
    assert record["progress/tokens"] == sum(UNEVEN_LENGTHS)
    assert len(kept_logprobs(tmp_path)) == 6, "only of the first time"


def test_the_reference_is_the_starting_model_as_a_copy_or_without_adapters(tmp_path, tiny_model_dir) -> None:
    lora = {"rank": 4, "target_modules": ["q_proj", "down_proj"]}
    runs = {}
    for source in ("adapter", "copy"):
        out = tmp_path / source
        send(out, 0, 1)
        model = ModelConfig(name=str(tiny_model_dir), attn="sdpa", seq_len=512, lora=LoRAConfig(**lora))
        settings = {"max_steps": 2, "optim": {"lr": 1e-2}, "loss": {"type": "clip", "kl_coef": 0.5}}
        config = config_of(out, tiny_model_dir, model=model, reference={"source": source}, **settings)
        train(config, RunPaths(out))
        runs[source] = [json.loads(line) for line in RunPaths(out).metrics.read_text().splitlines()]
    for one, other in zip(*runs.values(), strict=True):
        assert one["reference_kl/mean"] == pytest.approx(other["reference_kl/mean"], abs=1e-6)
        assert one["optim/grad_norm"] == pytest.approx(other["optim/grad_norm"], rel=1e-4)
    first, second = (record["reference_kl/mean"] for record in runs["copy"])
    assert (first, second > 1e-4) == (pytest.approx(0, abs=1e-6), True)


def test_a_reference_that_is_reset_and_a_weight_that_adapts_survive_a_resume(tmp_path, tiny_model_dir) -> None:
    """The checkpoint of step 3 holds the reference of step 2 and the weight after three updates."""
    loss = {"type": "clip", "kl_coef": 0.2, "kl_target": 0.01, "kl_gain": 1.0, "kl_in": "token_reward"}
    settings = {"loss": loss, "reference": {"reset_every": 2}, "optim": {"lr": 1e-2}, "ckpt": {"interval": 3}}
    records = {}
    for name, ends in (("whole", [4]), ("resumed", [3, 4])):
        out = tmp_path / name
        send(out, 0, 1, 2, 3)
        for end in ends:
            ckpt = settings["ckpt"] | ({"resume_step": 3} if end != ends[0] else {})
            train(config_of(out, tiny_model_dir, **settings | {"max_steps": end, "ckpt": ckpt}), RunPaths(out))
        records[name] = [json.loads(line) for line in RunPaths(out).metrics.read_text().splitlines()]
    keys = ("reference_kl/mean", "reference_kl_coef", "loss/mean", "optim/grad_norm")
    whole, resumed = ([[record[key] for key in keys] for record in each] for each in records.values())
    assert whole == resumed
    kls = [kl for kl, *_ in whole]
    assert (kls[0], kls[2]) == (pytest.approx(0, abs=1e-6), pytest.approx(0, abs=1e-6)), "the policy is the reference"
    assert min(kls[1], kls[3]) > 1e-4
    # Ziegler's controller, from the divergences that were reported.
    coefs = [0.2]
    for kl in kls[:3]:
        coefs.append(coefs[-1] * (1 + min(0.2, max(-0.2, kl / 0.01 - 1))))
    assert [coef for _, coef, *_ in whole] == pytest.approx(coefs)


def records_of(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in RunPaths(out).metrics.read_text().splitlines()]


@pytest.mark.slow
def test_a_run_with_a_critic_and_its_exact_resume(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Three steps of a policy with adapters and a critic with all weights; the first trains the critic alone. The KL
    divergence is in the rewards. Demonstrations begin with the second."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Is it measles?", "completion": "No."}\n' * 8)
    model = ModelConfig(name=str(tiny_model_dir), attn="sdpa", seq_len=512, lora=LoRAConfig(rank=4))
    settings = {
        "model": model,
        "loss": {"type": "clip", "kl_coef": 0.1, "kl_in": "token_reward", "kl_target": 0.01},
        "critic": {"warmup_steps": 1, "optim": {"lr": 3e-3}, "value_clip": 0.001},
        "minibatches": 2,
        "epochs_per_batch": 2,
        "optim": {"lr": 1e-2, "weight_decay": 0.5},
        "demonstrations": {
            "data": {"name": str(rows), "batch_size": 1},
            "weight": 0.1,
            "final_weight": 0.02,
            "anneal_steps": 2,
        },
    }
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    for out, ends in ((whole, [3]), (resumed, [2, 3])):
        send(out, 0, 1, 2)
        for end in ends:
            ckpt = {"interval": 2} | ({"resume_step": 2} if end != ends[0] else {})
            train(config_of(out, tiny_model_dir, **settings, max_steps=end, ckpt=ckpt), RunPaths(out))
    records = records_of(whole)
    timeless = [
        [{k: v for k, v in each.items() if not k.startswith(("time", "perf", "system"))} for each in records_of(out)]
        for out in (whole, resumed)
    ]
    assert json.dumps(timeless[0]) == json.dumps(timeless[1])

    first, second, *_ = records
    assert first["critic/values/mean"] == first["critic/values/std"] == 0, "the new head is 0"
    assert first["critic/lr"] == 3e-3
    assert first["critic/explained_variance"] == 0
    assert second["critic/values/std"] > 0
    assert max(each["critic/is_clipped/mean"] for each in records) > 0, "the second minibatch meets other values"
    assert "optim/grad_norm" not in first, "the warm-up computes no gradient of the policy"
    assert [each["demonstrations/weight"] for each in records] == pytest.approx([0, 0.1, 0.06]), "0 in the warm-up"
    kls = [each["reference_kl/mean"] for each in records]
    assert kls[0] == pytest.approx(0, abs=1e-6), "the policy did not move between the minibatches of the first step"
    assert min(kls[1:]) > 1e-4
    coefs = [each["reference_kl_coef"] for each in records]
    assert coefs[0] == coefs[1] == 0.1 != coefs[2], "a divergence of 0 in the warm-up does not lower the weight"

    export = RunPaths(whole).weight(3) / "critic"
    loaded, info = AutoModelForSequenceClassification.from_pretrained(export, output_loading_info=True)
    assert (loaded.config.num_labels, info["missing_keys"]) == (1, set())
    assert loaded.score.weight.any()
    one, two = (load_file(RunPaths(out).weight(3) / "critic" / "model.safetensors") for out in (whole, resumed))
    assert all(torch.equal(one[name], two[name]) for name in one)

    settings.pop("critic")
    with pytest.raises(ResumeRefused, match="holds critic and policy, and this config trains policy"):
        train(config_of(whole, tiny_model_dir, **settings, max_steps=4, ckpt={"resume_step": 3}), RunPaths(whole))


def test_an_engine_of_another_policy_ends_the_run_before_it_trains(tmp_path, tiny_model_dir) -> None:
    send(tmp_path, 0)
    with pytest.raises(TrainerError, match="version 0: log-probabilities of trainer and inference differ by "):
        train(config_of(tmp_path, tiny_model_dir, parity={"on_mismatch": "stop"}), RunPaths(tmp_path))
    assert not RunPaths(tmp_path).orchestrator.broadcasts.exists()


@pytest.fixture(scope="module", params=[(), ("--ckpt.async-save",)], ids=["between_steps", "in_the_background"])
def stopped_run(request, tmp_path_factory, tiny_model_dir) -> Path:
    """A run that saved version 1 on SIGUSR1 and version 2 on the final SIGTERM, both while waiting for a batch."""
    out = tmp_path_factory.mktemp("stopped")
    send(out, 0)
    start = command(out, tiny_model_dir, "--max-steps", "3", "--ckpt.interval", "50", *request.param)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(start, env=environment, stdout=subprocess.PIPE, text=True) as process:

        def read_until(words: str) -> None:
            assert any(words in line for line in process.stdout), f"the trainer ended before {words!r}"

        read_until("Step 0 |")
        process.send_signal(signal.SIGUSR1)
        read_until(" checkpoint ")
        send(out, 1)
        read_until("Step 1 |")
        process.send_signal(signal.SIGTERM)
        process.communicate()
    assert process.returncode == 143
    return out


def test_signals_save_checkpoints(stopped_run) -> None:
    assert stable_steps(RunPaths(stopped_run).checkpoints) == [1, 2]
    assert not RunPaths(stopped_run).weights.exists(), "an unfinished run exports nothing"


def test_a_resumed_run_ends_bit_equal(whole_run, stopped_run, tiny_model_dir) -> None:
    paths = RunPaths(stopped_run)
    send(stopped_run, 1)
    stale = paths.orchestrator.broadcast(9)
    stale.mkdir()
    options = ("--max-steps", "2", "--ckpt.resume-step", "1")
    result = trained(stopped_run, tiny_model_dir, *options)
    assert result.returncode == 0, result.stdout + result.stderr
    seen = f"{sum(UNEVEN_LENGTHS)} tokens, {len(UNEVEN_LENGTHS)} samples"
    receipt = f"Resumed from {paths.trainer_checkpoint(1)}: step 1, {seen}"
    assert receipt in result.stdout
    assert stable_steps(paths.orchestrator.broadcasts) == [1, 2]
    assert not stale.exists()
    uninterrupted, resumed = final_weights(whole_run), final_weights(stopped_run)
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


def test_a_run_that_ends_early_is_saved_and_exported_and_continues_later(tmp_path, tiny_model_dir) -> None:
    paths = RunPaths(tmp_path)
    send(tmp_path, 0, 1, early_end=2)
    train(config_of(tmp_path, tiny_model_dir, max_steps=9, ckpt={"interval": 9}), paths)
    assert (stable_steps(paths.checkpoints), stable_steps(paths.weights)) == ([2], [2])
    send(tmp_path, 2, early_end=3)
    train(config_of(tmp_path, tiny_model_dir, max_steps=9, ckpt={"interval": 1, "resume_step": 2}), paths)
    assert (stable_steps(paths.checkpoints), stable_steps(paths.weights)) == ([2, 3], [2, 3])


def test_a_batch_that_cannot_be_trained_on_ends_the_run(tmp_path, tiny_model_dir) -> None:
    path = RunPaths(tmp_path).orchestrator.batch(0)
    path.parent.mkdir(parents=True)
    path.write_bytes(msgspec.msgpack.encode(TrainingBatch([], step=0)))
    with pytest.raises(TrainerError, match="the training batch of step 0 is empty"):
        train(config_of(tmp_path, tiny_model_dir), RunPaths(tmp_path))


def test_a_batch_that_never_comes_ends_the_run_and_keeps_its_state(tmp_path, tiny_model_dir) -> None:
    send(tmp_path, 0)
    options = ("--max-steps", "2", "--ckpt.interval", "9", "--batch-timeout", "1")
    result = trained(tmp_path, tiny_model_dir, *options, processes=2)
    assert result.returncode == 1, result.stdout
    run = RunPaths(tmp_path).orchestrator
    faults = [line for line in result.stdout.splitlines() if "ERROR" in line]
    assert len(faults) == 2, "one of each process"
    for fault in faults:
        assert "waited for the orchestrator's batch of step 1 since " in fault
        assert "(limit: batch_timeout = 1 s)" in fault
        assert f"start it with `orchestrator --output-dir {run.root}`" in fault
    assert "Traceback" not in result.stdout
    assert stable_steps(RunPaths(tmp_path).checkpoints) == [1]


def test_another_runs_checkpoints_are_not_overwritten(tmp_path, tiny_model_dir) -> None:
    (tmp_path / "checkpoints" / "step_5").mkdir(parents=True)
    result = trained(tmp_path, tiny_model_dir, "--max-steps", "2")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert "holds the checkpoints of another run" in result.stderr
    assert not (tmp_path / "logs").exists()


def test_a_resumed_run_uses_the_new_rate_and_schedule_from_its_first_step_on(tmp_path, tiny_model_dir) -> None:
    send(tmp_path, 0, 1, 2, 3)
    saving = ("--ckpt.interval", "1", "--no-ckpt.weights")
    first = trained(tmp_path, tiny_model_dir, "--optim.lr", "2e-5", "--max-steps", "2", *saving)
    changed = ("--optim.lr", "1e-5", "--scheduler.type", "cosine", "--scheduler.warmup-steps", "0", "--max-steps", "4")
    second = trained(tmp_path, tiny_model_dir, *changed, *saving, "--ckpt.resume-step", "2")
    assert (first.returncode, second.returncode) == (0, 0), first.stdout + second.stdout + second.stderr
    assert "applied from step 2: optim.lr 2e-05 -> 1e-05, scheduler.type constant -> cosine" in second.stdout
    records = [json.loads(line) for line in RunPaths(tmp_path).metrics.read_text().splitlines()]
    rates = [record["optim/lr"] for record in records if "optim/lr" in record]
    # Half of the cosine's 4 updates are done, then three quarters.
    halfway, later = (1e-5 / 2 * (1 + math.cos(math.pi * x)) for x in (0.5, 0.75))
    assert rates == pytest.approx([2e-5, 2e-5, halfway, later], rel=1e-9)
