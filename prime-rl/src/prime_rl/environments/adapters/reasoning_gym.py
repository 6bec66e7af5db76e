"""The environment `reasoning-gym`: tasks of the package of this name, scored by the package.

[[orchestrator.env]]
id = "reasoning-gym"
args = { task = "chain_sum", size = 2000 }
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import verifiers as vf
from datasets import Dataset

from prime_rl.environments.adapters.options import read_reasoning_gym_config
from prime_rl.environments.builtin import missing_package
from prime_rl.environments.rewards.building import build
from prime_rl.environments.rows.loading import content_id
from prime_rl.utils.errors import UserError

_WORKER = "prime_rl.environments.adapters.procedural"
_MAX_ERROR_CHARACTERS = 500


def load_environment(**args: Any) -> vf.Environment:
    """Load the environment. `args` are those of `ReasoningGymConfig`.

    Raises:
        ConfigError: the arguments have faults.
        UserError: the package is missing, or cannot make the rows.
    """
    config = read_reasoning_gym_config(args)
    if (fault := missing_package(__name__)) is not None:
        raise UserError(fault)
    made = _made(config.model_dump(mode="json"))
    system = made["system_prompt"] if config.system_prompt is None else config.system_prompt
    return vf.SingleTurnEnv(
        dataset=_table(made["train"], system),
        eval_dataset=_table(made["eval"], system) if made["eval"] else None,
        rubric=build([{"fn": f"{_WORKER}:reasoning_gym_score", "name": "score"}]).rubric(),
    )


def _made(config: Mapping[str, Any]) -> dict[str, Any]:
    """Make rows in another process with hash seed 0, because some tasks iterate over sets."""
    done = subprocess.run(
        [sys.executable, "-m", _WORKER],
        input=json.dumps(config),
        env={**os.environ, "PYTHONHASHSEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"it ended with exit code {done.returncode}"])[-1]
        raise UserError(f"reasoning-gym makes no rows: {last[:_MAX_ERROR_CHARACTERS]}")
    made: dict[str, Any] = json.loads(done.stdout)
    return made


def _table(rows: Sequence[Mapping[str, str]], system: str) -> Dataset:
    first = [{"role": "system", "content": system}] if system else []
    return Dataset.from_dict(
        {
            "prompt": [[*first, {"role": "user", "content": row["question"]}] for row in rows],
            "answer": [row["answer"] for row in rows],
            "prompt_id": [f"{row['gym_task']}-{content_id(row['question'], row['answer'])}" for row in rows],
            "info": [json.dumps({"dataset": row["gym_task"], **row}, ensure_ascii=False) for row in rows],
        }
    )
