"""TRL's GRPOTrainer on the benchmark's task, in TRL's own environment: `python trl_row.py JOB.json RESULT.json`.

Anything not set here or by the job has TRL's default.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from letters import prompts, reward


def rewards(completions: list[list[dict[str, Any]]], **kwargs: Any) -> list[float]:
    """TRL's form of the reward function."""
    return [reward(completion) for completion in completions]


def main(job: dict[str, Any], result: Path) -> None:
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    began_at: list[float] = []
    steps: list[dict[str, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            began_at.append(time.time())

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
            if "reward" in logs:
                tokens = logs["completions/mean_length"] * args.per_device_train_batch_size
                steps.append({"ended_at": time.time(), "reward": logs["reward"], "generated": tokens})

    config = GRPOConfig(
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
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=[rewards],
        args=config,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in prompts()]),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        callbacks=[Clock()],
    )
    trainer.train()
    result.write_text(json.dumps({"first_step_began_at": began_at[0], "steps": steps}))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
