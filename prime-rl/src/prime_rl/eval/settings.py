"""What the results of a directory were made with: results of other settings must not be mixed with them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from prime_rl.eval.errors import OtherEvaluation
from prime_rl.run.paths import EvalPaths
from prime_rl.utils.files import replacing_file


def check_settings(paths: EvalPaths, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings to keep: these, and the `environments` of earlier starts. Changes nothing.

    Raises:
        OtherEvaluation: there are results that were made with other settings.
    """
    current = json.loads(json.dumps(settings, default=str))
    if not paths.settings.is_file():
        return current
    earlier = json.loads(paths.settings.read_text(encoding="utf-8"))
    environments = {**earlier["environments"], **current["environments"]}
    changed = [key for key in earlier if key != "environments" and earlier[key] != current[key]]
    changed += [f"environment {name!r}" for name, each in earlier["environments"].items() if environments[name] != each]
    if changed:
        raise OtherEvaluation(
            f"{paths.root} holds results that were made with another {' and another '.join(changed)}: "
            "choose another --output-dir"
        )
    return {**current, "environments": environments}


def save_settings(paths: EvalPaths, settings: Mapping[str, Any]) -> None:
    with replacing_file(paths.settings) as scratch:
        scratch.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
