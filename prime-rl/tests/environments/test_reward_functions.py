"""Each shipped reward agrees with cases worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from prime_rl.environments.rewards import registry
from prime_rl.environments.rewards.registry import RewardFault, RewardSpec
from prime_rl.environments.rewards.worker import load

MATRIX = r"\begin{pmatrix}1 & 2\\3 & 4\end{pmatrix}"
SCHEMA = {"type": "object", "required": ["dose"], "properties": {"dose": {"type": "number", "minimum": 0}}}
NESTED = {"type": "array", "items": {"$ref": "#"}}
OPTIONS = ["aspirin", "ibuprofen", "no drug"]
CASES: list[tuple[str, str, dict[str, Any], float]] = [
    ("math", "0.0666668", {"answer": "0.066666793"}, 1),
    ("math", "0.067", {"answer": "0.066793"}, 0),
    ("math", "2.232", {"answer": "2.23"}, 0),
    ("math", "2.23", {"answer": "2.232"}, 0),
    ("math", "4", {"answer": "12/3"}, 1),
    ("math", "4", {"answer": "3/12"}, 0),
    ("math", "x = 4", {"answer": "4"}, 1),
    ("math", "4", {"answer": "None"}, 0),
    ("math", "", {"answer": "4"}, 0),
    ("math", r"first \boxed{3}, then \boxed{\frac{1}{2}}", {"answer": "0.5"}, 1),
    ("math", r"<think>\boxed{4}</think> it is \boxed{5}", {"answer": "4"}, 0),
    ("math", r"\boxed{(1, 2]}", {"answer": "(1, 2]"}, 1),
    ("math", r"\boxed{(1, 2]}", {"answer": "[1, 2)"}, 0),
    ("math", rf"\boxed{{{MATRIX}}}", {"answer": MATRIX}, 1),
    ("math", rf"\boxed{{{MATRIX}}}", {"answer": MATRIX.replace("4", "5")}, 0),
    ("math", r"\boxed{(x+1)^2}", {"answer": "x^2 + 2x + 1"}, 1),
    ("math", r"The answer is \boxed{b}", {"answer": "B"}, 1),
    ("math", r"\boxed{50}", {"answer": "0.5"}, 0),
    ("math", r"\boxed{50\%}".replace("\\%", "%"), {"answer": "0.5", "strict": False}, 1),
    ("hendrycks_math", r"so the answer is 3/4.", {"answer": r"\frac{3}{4}"}, 1),
    ("hendrycks_math", "three quarters", {"answer": "3/4"}, 0),
    ("minerva_math", "Final Answer: The final answer is $7$. I hope it is correct.", {"answer": "$7$"}, 1),
    ("minerva_math", "so $x = 3$, which gives $12$", {"answer": "12"}, 1),
    ("minerva_math", "so $12$, or rather $13$", {"answer": "12"}, 0),
    ("gsm8k", "The answer is 1,200.", {"answer": "so much\n#### 1200"}, 1),
    ("gsm8k", "#### 5", {"answer": "5"}, 1),
    ("gsm8k", "3 + 2 = $5.", {"answer": "5", "mode": "flexible"}, 1),
    ("gsm8k", "3 + 2 = 5", {"answer": "5", "mode": "strict"}, 0),
    ("gsm8k", "The answer is 6.", {"answer": "5", "mode": "strict", "format_weight": 0.1}, 0.1),
    ("gsm8k", "no number", {"answer": "5"}, 0),
    ("gsm8k", "It lost -$5.", {"answer": "-5"}, 1),
    ("allenai_gsm8k", "from 7 to 8", {"answer": 8}, 1),
    ("multiple_choice", "B", {"answer": "B"}, 1),
    ("multiple_choice", "A is wrong. The answer is (C).", {"answer": "C"}, 1),
    ("multiple_choice", "**Answer: B**", {"answer": 1}, 1),
    ("multiple_choice", r"\boxed{\text{D}}", {"answer": "(D)"}, 1),
    ("multiple_choice", "<answer>a) aspirin</answer>", {"answer": "A"}, 1),
    ("multiple_choice", "I would give ibuprofen.", {"answer": "B", "choices": OPTIONS}, 1),
    ("multiple_choice", "aspirin or ibuprofen", {"answer": "A", "choices": OPTIONS}, 0),
    ("multiple_choice", "Answer: I think it is (B)", {"answer": "B", "choices": OPTIONS}, 1),
    ("multiple_choice", "B", {"answer": "ibuprofen", "choices": {"A": "aspirin", "B": "ibuprofen"}}, 1),
    ("multiple_choice", "A drug is needed", {"answer": "A"}, 0),
    ("multiple_choice", "", {"answer": "A"}, 0),
    ("numeric", "It is 5.5 mmol/L", {"answer": "99 mg/dL", "substance": "glucose"}, 1),
    ("numeric", "It is 5.5 mmol/L", {"answer": "99 mg/dL"}, 0),
    ("numeric", "0.25 mg", {"answer": 250, "unit": "mcg"}, 1),
    ("numeric", "250 µg", {"answer": "0.25 mg"}, 1),
    ("numeric", "250 mg", {"answer": "250 mcg"}, 0),
    ("numeric", r"\boxed{1.5 \times 10^{3} \text{ mL}}", {"answer": "1.5 L"}, 1),
    ("numeric", "101.3 °F", {"answer": "38.5 °C", "rel_tol": 0.001}, 1),
    ("numeric", "120 mmHg", {"answer": "16 kPa"}, 1),
    ("numeric", "4 mEq/L", {"answer": "0.004 Eq/L"}, 1),
    ("numeric", "take 500 mg daily", {"answer": "0.5 g"}, 1),
    ("numeric", "eGFR: 59.8 mL/min/1.73 m²", {"answer": "60 mL/min/1.73m^2"}, 1),
    ("numeric", "42", {"answer": "42 mL/min"}, 1),
    ("numeric", "42", {"answer": "42 mL/min", "unit_required": True}, 0),
    ("numeric", "42.4", {"answer": "42", "rel_tol": 0, "abs_tol": 0.5}, 1),
    ("numeric", "about -3", {"answer": "3"}, 0),
    ("numeric", "none", {"answer": "3"}, 0),
    ("exact_match", "The Aspirin.", {"answer": "aspirin"}, 1),
    ("exact_match", "The Aspirin.", {"answer": "aspirin", "normalize": False}, 0),
    ("exact_match", "<answer>Paracetamol</answer>", {"answer": ["acetaminophen", "paracetamol"]}, 1),
    ("exact_match", "a", {"answer": "A"}, 1),
    ("exact_match", "", {"answer": "A"}, 0),
    ("exact_match", "-", {"answer": "+"}, 0),
    ("fuzzy_match", "", {"answer": "A"}, 0),
    ("fuzzy_match", "aspirin", {"answer": "aspirin"}, 1),
    ("fuzzy_match", "asprin", {"answer": "aspirin", "threshold": 0.9}, 1),
    ("fuzzy_match", "abcd", {"answer": "abxy"}, 0.5),
    ("json_schema", "[" * 900 + "]" * 900, {"schema": NESTED}, 0),
    ("json_schema", '{"dose": 3}', {"schema": SCHEMA}, 1),
    ("json_schema", 'Here:\n```json\n{"dose": 3}\n```\n', {"schema": '{"required": ["dose"]}'}, 1),
    ("json_schema", '{"dose": -3}', {"schema": SCHEMA, "partial": 0.2}, 0.2),
    ("json_schema", '{"dose": NaN}', {"schema": SCHEMA}, 0),
    ("json_schema", "[" * 100_000, {"schema": SCHEMA}, 0),
    ("geometry3k", "[3] or [12]", {"answer": "12"}, 1),
    ("geometry3k", r"it is [2\sqrt{2}]", {"answer": r"\sqrt{8}"}, 1),
    ("geometry3k", "the area is 24", {"answer": "[24.0]"}, 1),
    ("clevr_count", "<think>perhaps [3]</think> I cannot tell", {"answer": "3"}, 0),
    ("countdown", "<think>try <answer>1+2</answer>", {"nums": [1, 2], "target": 3}, 0),
    ("clevr_count", "[3], no: [4]", {"answer": "4"}, 1),
    ("clevr_count", "4", {"answer": "4"}, 0),
    ("countdown", "so\n<answer>(3 + 5) * 2</answer>", {"target": 16, "nums": [2, 3, 5]}, 1),
    ("countdown", "<answer>6/4*2</answer>", {"target": 3, "numbers": [6, 4, 2]}, 1),
    ("countdown", "<answer>8 * 2</answer>", {"target": 16, "nums": [2, 3, 5]}, 0.1),
    ("countdown", "<answer>__import__('os')</answer>", {"target": 16, "nums": [2]}, 0.1),
    ("countdown", "<answer>2</answer>\nthat was it", {"target": 2, "nums": [2]}, 0),
]


@pytest.mark.parametrize(("name", "text", "row", "value"), CASES)
def test_a_reward_agrees_with_its_table(name: str, text: str, row: dict[str, Any], value: float) -> None:
    path, _ = registry.resolve(RewardSpec(fn=name))
    assert load(path)(text, **row) == value


def test_every_name_and_alias_leads_to_a_function() -> None:
    for name in [*registry.REWARDS, *registry.ALIASES]:
        path, timeout_s = registry.resolve(RewardSpec(fn=name))
        assert callable(load(path))
        assert timeout_s >= 15
    tested = {name for name, *_ in CASES}
    assert set(registry.REWARDS) - tested == {"ifeval", "if_multi", "mbpp", "humaneval", "apps"}


def test_areal_names_rewards_by_dataset() -> None:
    assert registry.for_dataset("BUAADreamer/clevr_count_70k") == "clevr_count"
    with pytest.raises(RewardFault, match="geometry3k"):
        registry.for_dataset("other/data")


@pytest.mark.parametrize(
    ("name", "row", "text"),
    [
        ("gsm8k", {"answer": "1", "mode": "loose"}, "gsm8k: mode = 'loose' does not exist"),
        ("numeric", {"answer": "1", "substance": "kryptonite"}, "no molar mass of 'kryptonite'"),
        ("json_schema", {"schema": '{"type": 3}'}, "not a JSON schema"),
        ("humaneval", {"test": "", "entry_point": "f(); g"}, "is not the name of a function"),
    ],
)
def test_a_wrong_argument_is_named(name: str, row: dict[str, Any], text: str) -> None:
    with pytest.raises(RewardFault, match=text):
        load(registry.resolve(RewardSpec(fn=name))[0])("1", **row)
