"""Rewards for instructions: RLVR's ground truths, and those of the IF multi-constraints data."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.environments.rewards.ifeval.constraints import IFEVAL, Check
from prime_rl.environments.rewards.ifeval.more_constraints import MORE
from prime_rl.environments.rewards.text import without_thinking

CONSTRAINTS: dict[str, Check] = {**IFEVAL, **MORE}
"""All 54 instructions, by id."""
RLVR: dict[str, tuple[str, dict[str, str]]] = {
    "verify_keywords": ("keywords:existence", {"keyword_list": "keywords"}),
    "verify_keyword_frequency": ("keywords:frequency", {"word": "keyword", "N": "frequency"}),
    "validate_forbidden_words": ("keywords:forbidden_words", {}),
    "verify_letter_frequency": ("keywords:letter_frequency", {"N": "let_frequency"}),
    "validate_response_language": ("language:response_language", {}),
    "verify_paragraph_count": ("length_constraints:number_paragraphs", {"N": "num_paragraphs"}),
    "validate_word_constraint": ("length_constraints:number_words", {"N": "num_words", "quantifier": "relation"}),
    "verify_sentence_constraint": (
        "length_constraints:number_sentences",
        {"N": "num_sentences", "quantifier": "relation"},
    ),
    "validate_paragraphs": (
        "length_constraints:nth_paragraph_first_word",
        {"N": "num_paragraphs", "i": "nth_paragraph"},
    ),
    "verify_postscript": ("detectable_content:postscript", {}),
    "validate_placeholders": ("detectable_content:number_placeholders", {"N": "num_placeholders"}),
    "verify_bullet_points": ("detectable_format:number_bullet_lists", {"N": "num_bullets"}),
    "validate_title": ("detectable_format:title", {}),
    "validate_choice": ("detectable_format:constrained_response", {}),
    "validate_highlighted_sections": ("detectable_format:number_highlighted_sections", {"N": "num_highlights"}),
    "validate_sections": (
        "detectable_format:multiple_sections",
        {"N": "num_sections", "section_splitter": "section_spliter"},
    ),
    "validate_json_format": ("detectable_format:json_format", {}),
    "validate_repeat_prompt": ("combination:repeat_prompt", {"original_prompt": "prompt_to_repeat"}),
    "validate_two_responses": ("combination:two_responses", {}),
    "validate_uppercase": ("change_case:english_capital", {}),
    "validate_lowercase": ("change_case:english_lowercase", {}),
    "validate_frequency_capital_words": (
        "change_case:capital_word_frequency",
        {"N": "capital_frequency", "quantifier": "capital_relation"},
    ),
    "validate_end": ("startend:end_checker", {}),
    "validate_quotation": ("startend:quotation", {}),
    "validate_no_commas": ("punctuation:no_comma", {}),
}
"""RLVR-IFEval's names: the id of the same instruction, and its arguments' names here."""
EXACT = {"verify_keyword_frequency": "relation", "verify_letter_frequency": "let_relation"}
"""RLVR's counts without a quantifier are exact."""


def ifeval(
    completion_text: str,
    ground_truth: Any = None,
    instruction_id_list: Sequence[str] | None = None,
    kwargs: Any = None,
    answer: Any = None,
) -> float:
    """1 if every instruction is followed, else 0. One that is unknown, or cannot be checked, is not followed.

    Instructions are RLVR's `ground_truth` (`{"func_name": …}`), that of IF multi-constraints, or IFEval's columns
    `instruction_id_list` and `kwargs`. `answer` stands for a missing `ground_truth`.
    """
    results = _results(completion_text, answer if ground_truth is None else ground_truth, instruction_id_list, kwargs)
    return float(bool(results) and all(results))


def if_multi(
    completion_text: str,
    ground_truth: Any = None,
    instruction_id_list: Sequence[str] | None = None,
    kwargs: Any = None,
    answer: Any = None,
) -> float:
    """Share of the instructions that are followed. They are given as for `ifeval`."""
    results = _results(completion_text, answer if ground_truth is None else ground_truth, instruction_id_list, kwargs)
    return sum(results) / len(results) if results else 0.0


def follows(text: str, name: str, arguments: Mapping[str, Any]) -> bool:
    """Whether a text follows an instruction, by its id or RLVR's name."""
    given = {key: value for key, value in arguments.items() if value is not None}
    if name in RLVR:
        name_here, renamed = RLVR[name]
        given = {renamed.get(key, key): value for key, value in given.items()}
        if name in EXACT:
            given.setdefault(EXACT[name], "exactly")
    else:
        name_here = name
    check = CONSTRAINTS.get(name_here)
    if check is None or not text.strip():
        return False
    taken = inspect.signature(check).parameters
    try:
        return bool(check(text, **{key: value for key, value in given.items() if key in taken}))
    except (TypeError, ValueError, KeyError, AttributeError, IndexError):
        return False


def _results(completion: str, ground_truth: Any, ids: Sequence[str] | None, kwargs: Any) -> list[bool]:
    text = without_thinking(completion)
    return [follows(text, name, arguments) for name, arguments in _instructions(ground_truth, ids, kwargs)]


def _instructions(ground_truth: Any, ids: Sequence[str] | None, kwargs: Any) -> list[tuple[str, Mapping[str, Any]]]:
    if ids is None:
        truth = _data(ground_truth)
        if isinstance(truth, list):
            return [each for part in truth for each in _instructions(part, None, None)]
        if not isinstance(truth, Mapping):
            return []
        if "func_name" in truth:
            return [(str(truth["func_name"]), {key: value for key, value in truth.items() if key != "func_name"})]
        found = truth.get("instruction_id") or truth.get("instruction_id_list") or []
        ids, kwargs = [found] if isinstance(found, str) else found, truth.get("kwargs")
    given = _data(kwargs)
    given = [given] if isinstance(given, Mapping) else list(given or [])
    given += [None] * (len(ids) - len(given))
    return [(str(name), arguments or {}) for name, arguments in zip(ids, given, strict=False)]


def _data(value: Any) -> Any:
    """A value, or what its text says in JSON or as a Python literal."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return _literal(value)


def _literal(value: str) -> Any:
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return None
