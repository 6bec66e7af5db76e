"""The floor: a plain PyTorch loop over full rows of the benchmark's data: `python plain_row.py JOB.json RESULT.json`.

Only Transformers, autocast and AdamW. Rows are concatenated texts, cut every `seq_len` tokens. Positions restart with
each text, so the model keeps the texts separate.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(job: dict[str, Any], result: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=job["lr"], weight_decay=0.0, fused=True)
    batches = rows(job)
    steps = []
    first_step_began_at = time.time()
    for _ in range(job["steps"]):
        drawn = [next(batches) for _ in range(job["batch"])]
        input_ids, position_ids, labels = (torch.stack(part) for part in zip(*drawn, strict=True))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=input_ids, position_ids=position_ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        steps.append({"ended_at": time.time(), "tokens": input_ids.numel(), "loss": loss.item()})
    result.write_text(json.dumps({"first_step_began_at": first_step_began_at, "steps": steps}))


def rows(job: dict[str, Any]) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Tokens, positions and labels, row by row. The first token of a text is not a label."""
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    tokens: list[int] = []
    positions: list[int] = []
    length = job["seq_len"]
    for line in Path(job["data"]).read_text().splitlines():
        ids = tokenizer(json.loads(line)["text"])["input_ids"]
        tokens += ids
        positions += range(len(ids))
        while len(tokens) >= length:
            row = torch.tensor(tokens[:length])
            places = torch.tensor(positions[:length])
            yield row, places, row.where(places > 0, -100)
            tokens, positions = tokens[length:], positions[length:]


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
