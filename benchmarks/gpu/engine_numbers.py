"""The embedded engine against Transformers; decoding by CUDA graphs against decoding without; weights replaced in
place, from a file and through a process group."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import torch
from findings import Findings, findings_of_command_line
from safetensors.torch import load_file, save_file
from shapes import model_dir
from torch import Tensor
from transformers import AutoModelForCausalLM

from prime_rl.inference.embedded.engine.decode_graphs import Compute, DecodeGraphs
from prime_rl.inference.embedded.engine.engine import Engine
from prime_rl.inference.embedded.engine.generation import Completion, GenerationRequest, SamplingParams
from prime_rl.inference.embedded.engine.model import ModelRunner, load_model
from prime_rl.transport.weights import SENDER, WeightGroup, bundles_of

PROMPTS = [tuple((5 + 7 * index + place) % 512 for place in range(2 + 13 * index)) for index in range(8)]
NEW_TOKENS = 48
LIMITS = {"float32": 1e-3, "bfloat16": 0.25}
"""Largest difference of a log-probability. In bfloat16 two kernels round differently."""


def main(findings: Findings) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for dtype in ("float32", "bfloat16"):
            directory = model_dir("tiny", Path(scratch), findings.device, dtype)
            findings.attempt(f"{dtype}: logprobs", lambda d=directory, t=dtype: against_transformers(d, t, findings))
        directory = model_dir("tiny", Path(scratch), findings.device, "float32")
        findings.attempt("graphs draw the tokens of eager decoding", lambda: as_eager(directory, findings))
        findings.attempt("a weight update is a fresh engine", lambda: updated_in_place(directory, findings.device))
        findings.attempt("a process group of one sends its weights", lambda: sent(directory, findings.device))


class Recomputing:
    """Stands for CUDA graphs on a CPU: a replay computes the step of fixed shape again."""

    def record(self, compute: Compute) -> Compute:
        return compute

    def has_room(self) -> bool:
        return True

    def forget(self) -> None:
        pass


def runner_of(directory: Path, dtype: str, device: str, enforce_eager: bool = False) -> ModelRunner:
    model, source = load_model(str(directory), dtype, torch.device(device))
    runner = ModelRunner(model, 1 << 30, source, enforce_eager=enforce_eager)
    if device == "cpu" and not enforce_eager:
        runner.replay_with(Recomputing())
    return runner


def completions(engine: Engine) -> list[Completion]:
    """Greedy completions of prompts of several lengths that run together."""
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=0)
    futures = [engine.submit(GenerationRequest(prompt=prompt, params=params, seed=0)) for prompt in PROMPTS]
    return [future.result().completions[0] for future in futures]


def against_transformers(directory: Path, dtype: str, findings: Findings) -> tuple[bool, str]:
    runner = runner_of(directory, dtype, findings.device)
    with Engine(runner).in_thread() as engine:
        found = completions(engine)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).to(findings.device).eval()
    worst = 0.0
    for prompt, completion in zip(PROMPTS, found, strict=True):
        tokens = torch.tensor([*prompt, *completion.token_ids], device=findings.device)
        with torch.no_grad():
            logprobs = model(input_ids=tokens[None], use_cache=False).logits[0, :-1].float().log_softmax(-1)
        expected = logprobs.gather(1, tokens[1:, None])[len(prompt) - 1 :, 0]
        given = torch.tensor(completion.logprobs, device=expected.device)
        worst = max(worst, float((given - expected).abs().max()))
    count = sum(len(completion.token_ids) for completion in found)
    is_replayed, replays = replays_of(runner.graphs)
    detail = f"{count} tokens, worst difference {worst:.1e} (limit {LIMITS[dtype]:g}), {replays}"
    return worst < LIMITS[dtype] and is_replayed, detail


def replays_of(graphs: DecodeGraphs | None) -> tuple[bool, str]:
    """Whether most steps were replayed, and how many."""
    if graphs is None or graphs.is_off:
        return False, "no graphs"
    is_right = graphs.num_replayed > NEW_TOKENS // 2
    return is_right, f"{graphs.num_replayed} steps replayed from {graphs.num_recorded} graphs"


def as_eager(directory: Path, findings: Findings) -> tuple[bool, str]:
    """In float32, where two kernels hardly ever round to different tokens."""
    runner = runner_of(directory, "float32", findings.device)
    with Engine(runner).in_thread() as engine:
        found = completions(engine)
    with Engine(runner_of(directory, "float32", findings.device, enforce_eager=True)).in_thread() as engine:
        expected = completions(engine)
    is_same = [one.token_ids for one in found] == [one.token_ids for one in expected]
    pairs = zip(found, expected, strict=True)
    worst = max(float((torch.tensor(a.logprobs) - torch.tensor(b.logprobs)).abs().max()) for a, b in pairs)
    is_replayed, replays = replays_of(runner.graphs)
    detail = f"same tokens: {is_same}, worst difference {worst:.1e} (limit {LIMITS['float32']:g}), {replays}"
    return is_same and worst < LIMITS["float32"] and is_replayed, detail


def updated_in_place(directory: Path, device: str) -> tuple[bool, str]:
    changed = directory.parent / "step_7"
    changed.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: tensor + 0.02 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in load_file(directory / "model.safetensors").items()
    }
    save_file(tensors, changed / "model.safetensors", metadata={"format": "pt"})
    (changed / "config.json").write_text((directory / "config.json").read_text())
    (changed / "STABLE").touch()
    with Engine(runner_of(directory, "float32", device)).in_thread() as engine:
        before = completions(engine)
        version = engine.update_weights(changed).result()
        after = completions(engine)
    with Engine(runner_of(changed, "float32", device)).in_thread() as engine:
        fresh = completions(engine)
    same = [one.token_ids for one in after] == [one.token_ids for one in fresh]
    differs = [one.token_ids for one in after] != [one.token_ids for one in before]
    return same and differs and version == 7, f"version {version}; equal to a fresh engine: {same}; changed: {differs}"


def sent(directory: Path, device: str) -> tuple[bool, str]:
    """NCCL (gloo on a CPU) with one process: the library loads, opens the group and moves every bundle."""
    weights: dict[str, Tensor] = {
        name: tensor.to(device) for name, tensor in load_file(directory / "model.safetensors").items()
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    group = WeightGroup(("127.0.0.1", port), SENDER, 1, torch.device(device), 60)
    group.send([{name: weights[name] for name in names} for names in bundles_of(weights)], 1)
    if device == "cuda":
        torch.cuda.synchronize()
    return True, f"{len(weights)} tensors, {sum(tensor.nbytes for tensor in weights.values()) / 1e6:.1f} MB"


if __name__ == "__main__":
    main(findings_of_command_line(__doc__))
