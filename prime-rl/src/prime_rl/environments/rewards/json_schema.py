"""The reward `json_schema`: is the completion JSON that a schema allows?"""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import jsonschema.validators
import referencing

from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.text import without_thinking

_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def json_schema(completion_text: str, schema: Any, partial: float = 0.0) -> float:
    """1 if the completion is JSON that `schema` allows, `partial` for other JSON, else 0.

    The JSON is the last fenced block, else the whole text without thinking. References to remote schemas are not
    fetched.
    """
    schema = _schema(schema)
    try:
        document = parsed(completion_text)
    except ValueError:
        return 0.0
    validator = jsonschema.validators.validator_for(schema)(schema, registry=referencing.Registry())
    try:
        return 1.0 if validator.is_valid(document) else partial
    except RecursionError:  # a schema that refers to itself, and a document nested too deep
        return 0.0


def parsed(completion: str) -> Any:
    """Parse the JSON of a completion. Raises ValueError."""
    text = without_thinking(completion)
    fenced = _FENCE.findall(text)
    try:
        return json.loads(fenced[-1] if fenced else text, parse_constant=_refused)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def _refused(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _schema(schema: Any) -> dict[str, Any]:
    try:
        schema = json.loads(schema) if isinstance(schema, str) else schema
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except (ValueError, TypeError, AttributeError, jsonschema.SchemaError) as error:
        raise RewardFault(f"not a JSON schema: {str(error).splitlines()[0]}") from error
    return dict(schema)
