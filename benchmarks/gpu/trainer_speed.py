"""Tokens per second, peak memory and utilization of trainer steps: SFT and RL, several shapes and lengths.

A row makes whole optimizer steps of one process on one row of random tokens. MFU counts `6 P + 12 L H Q T` FLOP per
token (4 P for frozen weights; `observe/perf.py`) and divides by the matrix products that this GPU made in this run.
`plain` is a loop with nothing but Transformers, autocast and fused AdamW; `trl` is the training step of TRL's
SFTTrainer, if the pack has TRL.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from datasets import Dataset
from findings import Findings, findings_of_command_line
from machine import speeds, synchronize
from profile_summary import bound_of, shares_of_step
from shapes import SHAPES, config_dir
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from prime_rl.configs.trainer import AdamWConfig, ModelConfig
from prime_rl.trainer.model.build import setup_model
from prime_rl.trainer.optim.optimizer import clip_gradients, setup_optimizer
from prime_rl.trainer.perf import flops_per_token
from prime_rl.trainer.process.mesh import Mesh, ParallelDims
from prime_rl.trainer.process.world import setup_world

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from trainer_step import rl_pass, sft_pass

Step = Callable[[], object]
LORA = {"lora": {"rank": 16}}
MEASURED_S = 6.0


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    kind: Literal["sft", "rl", "plain", "trl"]
    shape: str
    seq_len: int
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of `[model]`."""
    published: tuple[float, float] | None = None
    """Tokens/s and GiB to beat, of one H100."""

    @property
    def name(self) -> str:
        return " ".join([self.kind, self.shape, str(self.seq_len), *sorted(self.settings)])


def cases() -> list[Case]:
    """Most important first: those with published figures, then what explains them."""
    ac, half, compiled = {"ac": {}}, {"ac": {"freq": 2}}, {"compile": {}}
    return [
        Case("sft", "0.6B", 8192, published=(26_000, 31.7)),
        Case("rl", "0.6B", 16384, ac, published=(11_900, 12.5)),
        Case("rl", "0.6B", 65536, ac, published=(10_200, 19.6)),
        Case("rl", "4B", 65536, LORA | ac, published=(4_160, 42.0)),
        Case("plain", "0.6B", 8192),
        Case("trl", "0.6B", 8192),
        Case("sft", "0.6B", 8192, compiled),
        Case("rl", "0.6B", 16384, ac | compiled),
        Case("rl", "0.6B", 16384, half),
        Case("rl", "0.6B", 16384),
        Case("sft", "0.6B", 8192, ac),
        Case("sft", "1.7B", 8192, ac),
        Case("rl", "1.7B", 16384, ac),
        Case("sft", "4B", 8192, LORA | ac),
        Case("rl", "4B", 16384, LORA | ac),
        Case("sft", "0.6B", 65536, ac),
    ]


def tiny_cases() -> list[Case]:
    return [
        Case("sft", "tiny", 128),
        Case("rl", "tiny", 128, {"ac": {}}),
        Case("rl", "tiny", 128, LORA),
        Case("plain", "tiny", 128),
        Case("trl", "tiny", 128),
    ]


def main(findings: Findings) -> None:
    peak_flops = speeds(findings.device, findings.is_tiny)["matmul_tflop_per_s"] * 1e12
    findings.fact(matmul_tflop_per_s=float(f"{peak_flops / 1e12:.4g}"))
    mesh = ParallelDims(1, 1).mesh(setup_world(findings.device, timeout_s=600, environ={}))
    with tempfile.TemporaryDirectory() as scratch:
        for case in tiny_cases() if findings.is_tiny else cases():
            if not any(text in case.name for text in findings.only or [""]):
                continue
            findings.attempt(case.name, partial(measured, case, Path(scratch), mesh, peak_flops, findings))
            # A row that ran out of memory must not leave less of it to the next.
            gc.collect()
            torch.compiler.reset()
            if findings.device == "cuda":
                torch.cuda.empty_cache()


def measured(case: Case, scratch: Path, mesh: Mesh, peak_flops: float, findings: Findings) -> tuple[bool, str]:
    device = findings.device
    if case.kind == "trl" and find_spec("trl") is None:
        return True, "skipped: this machine and the pack have no TRL"
    config = ModelConfig.model_validate(
        {
            "name": str(config_dir(case.shape, scratch)),
            "seq_len": case.seq_len,
            "compute_dtype": "bfloat16",
            "debug": {"random_init": True},
            **({"attn": "sdpa"} if device == "cpu" else {}),
            **case.settings,
        }
    )
    started_s = time.perf_counter()
    model, step = STEPS[case.kind](case, config, mesh)
    for _ in range(1 if findings.is_tiny else 2):
        step()
    synchronize(device)
    start_s = time.perf_counter() - started_s
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    tokens_per_s = case.seq_len / median_step_s(step, device, 0.0 if findings.is_tiny else MEASURED_S)
    peak_gib = round(torch.cuda.max_memory_allocated() / 2**30, 2) if device == "cuda" else None
    mfu = tokens_per_s * flops_per_token(model, case.seq_len) / peak_flops
    shares = shares_of_step(step, device)
    figures: dict[str, Any] = {
        "case": case.name,
        "tokens_per_s": round(tokens_per_s, 1),
        "peak_gib": peak_gib,
        "mfu": round(mfu, 4),
        "tokens_per_s_per_tflop": round(tokens_per_s / (peak_flops / 1e12), 2),
        "bound": bound_of(shares, mfu),
        "start_s": round(start_s, 1),
        "shares": shares,
    }
    text = f"{tokens_per_s:.0f} tokens/s, {peak_gib} GiB, MFU {mfu:.3f}, bound by {figures['bound']}"
    if case.published is not None:
        figures["ratio_to_published"] = round(tokens_per_s / case.published[0], 2)
        text += f"; {figures['ratio_to_published']} x the published {case.published[0]:.0f} in {case.published[1]} GiB"
    findings.row(**figures)
    return True, text


def median_step_s(step: Step, device: str, at_least_s: float) -> float:
    """Median seconds of at least three steps."""
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < at_least_s:
        started_s = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds)


def _ours(case: Case, config: ModelConfig, mesh: Mesh) -> tuple[nn.Module, Step]:
    model = setup_model(config, mesh, has_dropout=case.kind == "sft")
    optimizer = setup_optimizer(AdamWConfig(), model, config.optim_cpu_offload)
    run = _pass(case, config, model, mesh)

    def step() -> None:
        run()
        clip_gradients(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _pass(case: Case, config: ModelConfig, model: nn.Module, mesh: Mesh) -> Step:
    vocabulary = SHAPES[case.shape]["vocab_size"]
    if case.kind == "sft":
        return sft_pass(model, vocabulary, [case.seq_len], 1, mesh)
    return rl_pass(model, vocabulary, [case.seq_len], config, mesh)


def _plain(case: Case, config: ModelConfig, mesh: Mesh) -> tuple[nn.Module, Step]:
    device = mesh.process.device
    model = _float32_model(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    ids = torch.randint(SHAPES[case.shape]["vocab_size"], (1, case.seq_len), device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _float32_model(config: ModelConfig, device: torch.device) -> nn.Module:
    """Drawn on the device: a host takes half a minute for the weights of the largest."""
    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(config.name), dtype=torch.float32)


def _trl(case: Case, config: ModelConfig, mesh: Mesh) -> tuple[nn.Module, Step]:
    from trl import SFTConfig, SFTTrainer

    device = mesh.process.device
    model = _float32_model(config, device)
    arguments = SFTConfig(
        output_dir=config.name,
        use_cpu=device.type == "cpu",
        bf16=True,
        per_device_train_batch_size=1,
        max_length=None,
        gradient_checkpointing=False,
        report_to="none",
    )
    ids = np.random.default_rng(0).integers(1, SHAPES[case.shape]["vocab_size"], case.seq_len).tolist()
    rows = Dataset.from_list([{"input_ids": ids}])
    trainer = SFTTrainer(model=model, args=arguments, train_dataset=rows, processing_class=_two_words())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    # Set by `train`, of which this is one step.
    trainer.current_gradient_accumulation_steps = 1
    batch = next(iter(trainer.get_train_dataloader()))

    def step() -> None:
        trainer.training_step(model, dict(batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _two_words() -> PreTrainedTokenizerFast:
    """A tokenizer that TRL asks for and, as the rows are tokens already, does not use."""
    words = Tokenizer(WordLevel({"<end>": 0, "<unknown>": 1}, "<unknown>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<end>")


STEPS: dict[str, Callable[[Case, ModelConfig, Mesh], tuple[nn.Module, Step]]] = {
    "sft": _ours,
    "rl": _ours,
    "plain": _plain,
    "trl": _trl,
}

if __name__ == "__main__":
    main(findings_of_command_line(__doc__))
