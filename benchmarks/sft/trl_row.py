"""TRL's SFTTrainer on the benchmark's data, in TRL's own environment: `python trl_row.py JOB.json RESULT.json`.

Weights are float32 and the forward pass is under bfloat16 autocast (`bf16=True`), TRL's counterpart of float32 master
weights with bfloat16 compute. Anything not set here or by the job has TRL's default.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(job: dict[str, Any], result: Path) -> None:
    from datasets import load_dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    began_at: list[float] = []
    steps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            began_at.append(time.time())
            steps.append({"tokens": 0})

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps[-1]["ended_at"] = time.time()

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "loss" in logs:
                steps[-1]["loss"] = logs["loss"]

    class CountingTrainer(SFTTrainer):
        def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            steps[-1]["tokens"] += int(inputs["input_ids"].numel() if mask is None else mask.sum())
            return super().compute_loss(model, inputs, *args, **kwargs)

    config = SFTConfig(
        output_dir=str(result.parent / "trl"),
        model_init_kwargs={"dtype": "float32"},
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1,
        lr_scheduler_type="constant",
        **job["trl"],
    )
    trainer = CountingTrainer(
        model=job["model"],
        args=config,
        train_dataset=load_dataset("json", data_files=job["data"], split="train"),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    result.write_text(json.dumps({"first_step_began_at": began_at[0], "steps": steps}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
