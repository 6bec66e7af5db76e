"""Make the demonstrations of `sft_cpu.toml`.

    uv run --extra environments python examples/reasoning_gym/make_inputs.py

They are deliberately poor: three in four repeat the word, one in four reverses it. Reversing is what RL teaches.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import reasoning_gym

NUM_DEMONSTRATIONS = 2000
SHARE_REVERSED = 0.25
SEED = 2_000_000_000
"""Far from the seeds of the environment, whose row i is made from its seed plus i."""


def demonstrations() -> list[dict[str, list[dict[str, str]]]]:
    """Rows of `prompt` and `completion` messages."""
    rng = random.Random(0)
    tasks = reasoning_gym.create_dataset("spell_backward", seed=SEED, size=NUM_DEMONSTRATIONS, max_word_len=7)
    rows = []
    for task in tasks:
        reply = task["answer"] if rng.random() < SHARE_REVERSED else task["answer"][::-1]
        prompt = [{"role": "user", "content": task["question"]}]
        rows.append({"prompt": prompt, "completion": [{"role": "assistant", "content": f"<answer>{reply}</answer>"}]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder to write to (default: here)")
    folder: Path = parser.parse_args().to
    lines = (json.dumps(row) for row in demonstrations())
    (folder / "demonstrations.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
