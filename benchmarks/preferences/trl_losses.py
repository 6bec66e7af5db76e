"""Writes TRL's tokens, losses, gradients and metrics of pairs and answers with labels, for a test that compares ours.

    pip install trl==1.16.0 transformers==5.19.0        # into an environment of its own
    python benchmarks/preferences/trl_losses.py prime-rl/tests/trainer/preferences/trl_losses.json

The reference is an example's checkpoint; the policy is the same with every weight moved a little (`moved`). For
answers with labels, the policy is the checkpoint.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text" / "checkpoint"
ROWS = [
    {"prompt": "abc:", "chosen": "cba", "rejected": "abc"},
    {"prompt": "a longer prompt:", "chosen": "tpmorp regnol a", "rejected": "no"},
    {"prompt": "x:", "chosen": "x", "rejected": "a much longer answer that is worse"},
    {"prompt": "hello world:", "chosen": "dlrow olleh", "rejected": "dlrow"},
]
LABELLED = [
    {"prompt": "abc:", "completion": "cba", "label": True},
    {"prompt": "a longer prompt:", "completion": "no", "label": False},
    {"prompt": "x:", "completion": "a much longer answer that is worse", "label": False},
    {"prompt": "hello world:", "completion": "dlrow olleh", "label": True},
    {"prompt": "y:", "completion": "y", "label": True},
]
UNPAIRED: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "kto": ({"type": "kto", "beta": 0.3}, LABELLED),
    "kto, weighted": (
        {"type": "kto", "beta": 0.1, "desirable_weight": 0.9, "undesirable_weight": 1.7},
        LABELLED,
    ),
    "kto of pairs": ({"type": "kto", "beta": 0.3, "undesirable_weight": 1.2}, ROWS),
    "apo_zero_unpaired": ({"type": "apo_zero_unpaired", "beta": 0.3, "desirable_weight": 1.1}, LABELLED),
}
"""Keys of `[loss]`, and the rows, which are one batch: TRL takes its mismatched answers within a batch."""
VARIANTS: dict[str, dict[str, Any]] = {
    "sigmoid": {"type": "sigmoid", "beta": 0.3},
    "hinge": {"type": "hinge", "beta": 0.05},
    "ipo": {"type": "ipo", "beta": 0.2},
    "robust": {"type": "robust", "beta": 0.3, "label_smoothing": 0.2},
    "sigmoid_norm": {"type": "sigmoid_norm", "beta": 2.0},
    "apo_zero": {"type": "apo_zero", "beta": 0.1},
    "apo_down": {"type": "apo_down", "beta": 0.1},
    "sppo_hard": {"type": "sppo_hard", "beta": 0.05},
    "nca_pair": {"type": "nca_pair", "beta": 0.1},
    "bco_pair": {"type": "bco_pair", "beta": 0.1},
    "exo_pair": {"type": "exo_pair", "beta": 0.1, "label_smoothing": 0.01},
    "discopop": {"type": "discopop", "beta": 0.05},
    "sigmoid and an SFT term": {"type": "sigmoid", "beta": 0.3, "rpo_alpha": 0.5},
    "simpo": {"type": "simpo", "beta": 2.0, "simpo_gamma": 0.7},
    "cpo": {"type": "cpo", "beta": 0.2, "rpo_alpha": 0.4},
    "cpo, smoothed": {"type": "cpo", "beta": 0.2, "label_smoothing": 0.1},
    # TRL's SFT term of ORPO includes the prompt, unlike the paper's, so that only the odds ratio is compared.
    "orpo": {"type": "orpo", "beta": 0.25, "rpo_alpha": 0.0},
}
"""Keys of `[loss]`."""
METRICS = (
    *("rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"),
    *("logps/chosen", "logps/rejected"),
)


WEIGHTS = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
"""Weights whose gradients are compared."""


def moved(model: PreTrainedModel) -> PreTrainedModel:
    """The model with each weight moved by a fixed amount. The test does the same."""
    with torch.no_grad():
        for parameter in model.parameters():
            at = torch.arange(parameter.numel(), dtype=torch.float64)
            parameter += (0.02 * torch.sin(at)).to(parameter.dtype).view_as(parameter)
    return model


def loaded() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


def common(directory: str) -> dict[str, Any]:
    return {
        "output_dir": directory,
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": len(ROWS),
        "gradient_checkpointing": False,
        "report_to": [],
        "max_length": 256,
        "disable_dropout": True,
    }


def of_dpo(loss: dict[str, Any], tokenizer: Any, directory: str) -> dict[str, Any]:
    types, weights = [loss["type"]], [1.0]
    if "rpo_alpha" in loss:
        types, weights = [*types, "sft"], [*weights, loss["rpo_alpha"]]
    config = DPOConfig(
        **common(directory),
        beta=loss["beta"],
        label_smoothing=loss.get("label_smoothing", 0.0),
        loss_type=types,
        loss_weights=weights,
    )
    model = moved(loaded())
    trainer = DPOTrainer(model, loaded(), config, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(len(ROWS))])
    found = measured(model, lambda: trainer.compute_loss(model, batch))
    metrics = {name: trainer._metrics["eval"][name][-1] for name in METRICS}
    tokens = [
        {"ids": ids[mask.bool()].tolist(), "is_trained": trained[mask.bool()].bool().tolist()}
        for ids, mask, trained in zip(
            batch["input_ids"], batch["attention_mask"], batch["completion_mask"], strict=True
        )
    ]
    return {**found, "metrics": metrics, **({"tokens": tokens} if loss["type"] == "sigmoid" else {})}


def of_kto(loss: dict[str, Any], rows: list[dict[str, Any]], tokenizer: Any, directory: str) -> dict[str, Any]:
    keys = {key: value for key, value in loss.items() if key != "type"}
    count = len(rows) * (1 if "label" in rows[0] else 2)
    shared = {**common(directory), "per_device_train_batch_size": count}
    config = KTOConfig(**shared, loss_type=loss["type"], **keys)
    # The other way round, because the estimated KL of `moved` from the checkpoint is below 0 and counts as 0.
    model, reference = loaded(), moved(loaded())
    trainer = KTOTrainer(model, reference, config, train_dataset=Dataset.from_list(rows), processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(count)])
    found = measured(model, lambda: trainer.compute_loss(model, batch))
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "logps/chosen", "logps/rejected")
    names = (*names, *(("kl",) if loss["type"] == "kto" else ()))
    return {**found, "metrics": {name: trainer._metrics["eval"][name][-1] for name in names}}


def of_cpo(loss: dict[str, Any], tokenizer: Any, directory: str) -> dict[str, Any]:
    config = CPOConfig(
        **common(directory),
        beta=loss["beta"],
        label_smoothing=loss.get("label_smoothing", 0.0),
        loss_type="simpo" if loss["type"] == "simpo" else "sigmoid",
        cpo_alpha=0.0 if loss["type"] == "simpo" else loss.get("rpo_alpha", 1.0),
        simpo_gamma=loss.get("simpo_gamma", 0.5),
    )
    return of_old_trainer(CPOTrainer, config, tokenizer)


def of_orpo(loss: dict[str, Any], tokenizer: Any, directory: str) -> dict[str, Any]:
    return of_old_trainer(ORPOTrainer, ORPOConfig(**common(directory), beta=loss["beta"]), tokenizer)


def odds_ratio_term(trainer: Any, model: PreTrainedModel, batch: Any) -> torch.Tensor:
    chosen, rejected = trainer.concatenated_forward(model, batch)[:2]
    return -trainer.odds_ratio_loss(chosen, rejected)[0].mean()


def of_old_trainer(kind: Any, config: Any, tokenizer: Any) -> dict[str, Any]:
    model = moved(loaded())
    trainer = kind(model, config, train_dataset=Dataset.from_list(ROWS), processing_class=tokenizer)
    batch = trainer.data_collator([trainer.train_dataset[at] for at in range(len(ROWS))])
    kept: dict[str, Any] = {}

    def loss() -> torch.Tensor:
        value, metrics = trainer.get_batch_loss_metrics(model, batch, train_eval="train")
        # Here the log-probabilities of these metrics are means over tokens where the loss takes means.
        kept.update({name: float(metrics[name]) for name in METRICS if not name.startswith("logps")})
        return odds_ratio_term(trainer, model, batch) if kind is ORPOTrainer else value

    return {**measured(model, loss), "metrics": kept}


def measured(model: PreTrainedModel, loss: Callable[[], torch.Tensor]) -> dict[str, Any]:
    model.eval()
    model.zero_grad()
    value = loss()
    value.backward()
    gradients = {name: parameter.grad.double() for name, parameter in model.named_parameters()}
    return {"loss": float(value), "gradient_norms": {name: float(gradients[name].norm()) for name in WEIGHTS}}


def main() -> None:
    target = Path(sys.argv[1])
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    kinds = {"simpo": of_cpo, "cpo": of_cpo, "orpo": of_orpo}
    with tempfile.TemporaryDirectory() as directory:
        cases = {
            name: {"loss": loss, "trl": kinds.get(loss["type"], of_dpo)(loss, tokenizer, directory)}
            for name, loss in VARIANTS.items()
        }
        unpaired = {
            name: {"loss": loss, "rows": rows, "trl": of_kto(loss, rows, tokenizer, directory)}
            for name, (loss, rows) in UNPAIRED.items()
        }
    found = {"trl": importlib.metadata.version("trl"), "rows": ROWS, "cases": cases, "unpaired": unpaired}
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
