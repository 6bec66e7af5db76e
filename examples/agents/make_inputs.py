"""Make the demonstrations of `sft_tool_cpu.toml`: `uv run python examples/agents/make_inputs.py`.

There are three demonstrations for each of the 312 tasks. One looks the bed up and repeats the diagnosis. One looks it
up and writes the diagnosis backwards. One guesses without looking. A model that imitates them is right about one time
in three.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.agents.beds import DIAGNOSES, tasks


def demonstrations() -> Iterator[dict[str, Any]]:
    rng = random.Random(11)
    for task in tasks():
        call = json.dumps({"name": "chart", "arguments": {"bed": task["bed"]}})
        asks = [{"role": "user", "content": task["question"]}]
        looks = [
            {"role": "assistant", "content": f"<tool_call>{call}</tool_call>"},
            {"role": "tool", "content": task["diagnosis"]},
        ]
        said = task["diagnosis"]
        for known, answer in ((looks, said), (looks, said[::-1]), ([], rng.choice(DIAGNOSES))):
            yield {"messages": [*asks, *known, {"role": "assistant", "content": answer}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=Path(__file__).parent, help="folder to write to (default: here)")
    folder: Path = parser.parse_args().to
    rows = list(demonstrations())
    random.Random(12).shuffle(rows)
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (folder / "demonstrations.jsonl").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
