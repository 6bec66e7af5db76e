"""Runs for the tests of `medarc_train report`: directories with the files that a run leaves."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prime_rl.run.paths import RunPaths

START = 1_700_000_000.0
CONFIG = 'max_steps = 80\n[model]\nname = "m"\n[trainer]\n[orchestrator]\nrollouts_per_example = 8\n'
"""A config of RL in which little is set."""


def make_run(directory: Path, kind: str = "rl", steps: int = 12, config: str | None = None) -> RunPaths:
    paths = RunPaths(directory)
    paths.configs.mkdir(parents=True)
    paths.config(kind).write_text(config if config is not None else CONFIG if kind == "rl" else "max_steps = 80\n")
    records = {"rl": rl_records, "sft": sft_records, "eval": eval_records}[kind](steps)
    paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return paths


def rl_records(steps: int) -> list[dict[str, Any]]:
    found = []
    for step in range(steps):
        at = START + 10 + 2 * step
        reward = 0.2 + 0.04 * step
        found.append(
            {
                "time": at,
                "source": "orchestrator",
                "step": step,
                "reward/mean": reward,
                "reward/std": 0.1,
                "reward_parts/right": reward,
                "reward_parts/layout": 0.9 - 0.03 * step,
                "decode_len/mean": 100.0 + step,
                "decode_len/min": 10,
                "decode_len/max": 200,
                "is_truncated/mean": 0.0,
                "time/step": 2.0,
                "time/generate_completions": 1.5,
                "time/wait_for_ckpt": 0.1,
                "time/parallel_preprocess": 0.2,
                "progress/total_tokens": 1000 * (step + 1),
                "eval/held/avg@4": 0.5 - 0.02 * step,
                "eval/held/time": 1.0,
            }
        )
        found.append(
            {
                "time": at + 1,
                "source": "trainer",
                "step": step,
                "loss/mean": 1.0 - 0.01 * step,
                "entropy/mean": 0.5,
                "optim/lr": 1e-5,
                "time/step": 2.0,
                "time/wait_for_batch": 1.2,
                "time/forward_backward": 0.7,
                "perf/peak_memory": 3.5,
            }
        )
    return found


def sft_records(steps: int) -> list[dict[str, Any]]:
    return [
        {
            "time": START + step,
            "source": "sft",
            "step": step,
            "loss/mean": 4.0 / (step + 1),
            "time/step": 1.0,
            "time/forward_backward": 0.8,
            "progress/num_tokens": 500 * (step + 1),
            "data/seen": 10 * (step + 1),
            "data/truncated": step,
            "data/overlong": 0,
            **({"val/loss": 5.0 / (step + 1)} if step % 4 == 0 else {}),
        }
        for step in range(steps)
    ]


def eval_records(steps: int) -> list[dict[str, Any]]:
    scores = [{"eval/held/avg@4": 0.1 * step, "eval/held/pass@1": 0.1 * step} for step in range(steps)]
    return [{"time": START + step, "source": "eval", "step": step, **each} for step, each in enumerate(scores)]


def add_attempts(paths: RunPaths, *receipts: dict[str, Any]) -> None:
    paths.attempts.mkdir()
    for number, receipt in enumerate(receipts, 1):
        base = {"attempt": number, "started": "2023-11-14T22:13:20+00:00", "host": "node-1", "command": "rl"}
        paths.receipt(number).write_text(json.dumps({**base, "step": None, **receipt}))


def add_rollouts(paths: RunPaths, step: int, rollouts: Sequence[dict[str, Any]]) -> None:
    samples = paths.orchestrator.samples
    samples.mkdir(parents=True, exist_ok=True)
    (samples / f"step_{step}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rollouts))


def a_rollout(answer: str, reward: float | None = 0.5, **more: Any) -> dict[str, Any]:
    return {
        "env": "letters",
        "row": 3,
        "group": 0,
        "rollout": 0,
        "prompt": [{"role": "user", "content": "say it"}],
        "completion": [{"role": "assistant", "content": answer}],
        "reward": reward,
        "advantage": 0.25,
        "metrics": {"right": 1.0},
        "is_truncated": False,
        "completion_tokens": 3,
        **more,
    }


def with_tokens(
    rollout: dict[str, Any], texts: Sequence[str], logprobs: Sequence[float] | None = None
) -> dict[str, Any]:
    """A rollout whose completion has these tokens; by default, each is less likely than the one before."""
    ids = list(range(1, len(texts) + 1))
    return {
        **rollout,
        "sequences": [
            {
                "prompt_ids": [0],
                "completion_ids": ids,
                "sampled": [[0, len(ids)]],
                "engine_logprobs": list(logprobs or (-float(place) for place in range(len(ids)))),
            }
        ],
        "token_texts": {"0": "<|user|>", **{str(token): text for token, text in zip(ids, texts, strict=True)}},
    }
