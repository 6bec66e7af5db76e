"""Writes what TRL's RewardTrainer computes for pairs, for a test that compares ours.

    pip install trl==1.16.0        # into an environment of its own
    python benchmarks/preferences/trl_rewards.py prime-rl/tests/trainer/preferences/trl_rewards.json

The model is an example's checkpoint with every weight moved a little, and a head of fixed values (`moved`).
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel
from trl import RewardConfig, RewardTrainer

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text" / "checkpoint"
ROWS = [
    {"prompt": "abc:", "chosen": "cba", "rejected": "abc", "margin": 0.5},
    {"prompt": "a longer prompt:", "chosen": "tpmorp regnol a", "rejected": "no", "margin": 0.0},
    {"prompt": "x:", "chosen": "x", "rejected": "a much longer answer that is worse", "margin": 2.0},
    {"prompt": "hello world:", "chosen": "dlrow olleh", "rejected": "dlrow", "margin": -0.25},
]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "margin": {"has_margin": True},
    "centred": {"center_rewards_coefficient": 0.3},
    "margin and centred": {"has_margin": True, "center_rewards_coefficient": 0.05},
}
METRICS = ("accuracy", "margin", "mean_reward")
WEIGHTS = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "score.weight")
"""Weights whose gradients are compared."""


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """The model with fixed weights. The test makes the same."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            at = torch.arange(parameter.numel(), dtype=torch.float64)
            if name == "score.weight":
                parameter.zero_()
            change = 0.5 * torch.cos(at) if name == "score.weight" else 0.02 * torch.sin(at)
            parameter += change.to(parameter.dtype).view_as(parameter)
    return model


def found(variant: dict[str, Any], tokenizer: Any, directory: str) -> dict[str, Any]:
    config = RewardConfig(
        output_dir=directory,
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=len(ROWS),
        gradient_checkpointing=False,
        report_to=[],
        max_length=256,
        disable_dropout=True,
        center_rewards_coefficient=variant.get("center_rewards_coefficient"),
    )
    model = moved(AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=1, dtype=torch.float32))
    rows = [{key: row[key] for key in row if key != "margin" or variant.get("has_margin")} for row in ROWS]
    trainer = RewardTrainer(model, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(len(ROWS))])
    model.eval()
    loss = trainer.compute_loss(model, dict(batch))
    loss.backward()
    norms = {name: float(model.get_parameter(name).grad.double().norm()) for name in WEIGHTS}
    tokens = [ids[mask.bool()].tolist() for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    with torch.no_grad():
        rewards = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits.squeeze(-1).tolist()
    metrics = {name: trainer._metrics["eval"][name][-1] for name in METRICS}
    return {"loss": float(loss), "metrics": metrics, "gradient_norms": norms, "tokens": tokens, "rewards": rewards}


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    with tempfile.TemporaryDirectory() as directory:
        cases = {
            name: {"variant": variant, "trl": found(variant, tokenizer, directory)}
            for name, variant in VARIANTS.items()
        }
    content = {"trl": importlib.metadata.version("trl"), "rows": ROWS, "cases": cases}
    Path(sys.argv[1]).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
