"""Near misses: the opposite answer, another unit, sign, power or fraction earns nothing, in every reward that compares.

Rows of (answer, reply, score), by reward. `exact_match` and `multiple_choice` read them through the environment `rows`,
too, from the formats in which people have them.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf

from prime_rl.environments.rewards.registry import RewardSpec, resolve
from prime_rl.environments.rewards.worker import load
from prime_rl.environments.rows.single_turn import load_environment

Row = tuple[Any, str, float]

NUMERIC: list[Row] = [
    ("120/80 mmHg", "140/80 mmHg", 0), ("120/80 mmHg", "120/80 mmHg", 1), ("120/80 mmHg", "120/80", 1),
    ("120/80", "The BP is 120 over 80", 1), ("120/80 mmHg", "120", 0), ("120/80 mmHg", "80", 0),
    ("120/80", "60/40", 0), ("120/80 mmHg", "120/90 mmHg", 0), ("120/80 mmHg", "120/80 mm Hg", 1),
    ("120/80 mmHg", "16.0/10.67 kPa", 1), ("5", "10^5", 0), ("100000", "10^5", 1),
    ("100000 CFU/mL", "10^5 CFU/mL", 1), ("100000 CFU/mL", "10⁵ CFU/mL", 1), ("10^5", "1e5", 1),
    ("100000", "1E5", 1), ("10^5", "105", 0), ("105", "10^5", 0), ("10^5", "10^-5", 0), ("0.00001", "10⁻⁵", 1),
    ("100000", "$10^{5}$", 1), ("150000/µL", "150 x 10^9/L", 1), ("150 K/uL", "150 ×10⁹/L", 1),
    ("150e9/L", "150 x10(9)/L", 1), ("4.5 x 10^12/L", "4.5 M/µL", 1), ("150 ×10^9/L", "15 ×10^9/L", 0),
    ("0.5", "50%", 1), ("0.5", "50 %", 1), ("50%", "0.5", 1), ("50%", "50", 1), ("50", "50%", 1),
    ("0.5", "0.5%", 0), ("0.5", "5%", 0), ("50%", "50%", 1), ("0.5", r"50\%", 1), ("37 °C", "98.6 F", 1),
    ("37 C", "98.6 °F", 1), ("37°C", "98.6 degrees Fahrenheit", 1), ("98.6 F", "37 C", 1), ("37 C", "37 F", 0),
    ("37 °C", "37°C", 1), ("37 °C", "37℃", 1), ("12 hours", "12 H", 1), ("720 min", "12 h", 1),
    ("99 mg/dL", "5.5 mmol/L", 0), ("72/min", "72 bpm", 1), ("72 bpm", "72 beats/min", 1),
    ("72 bpm", "72 beats per minute", 1), ("72 bpm", "72 mmHg", 0), ("18 /min", "18 breaths/min", 1),
    ("1200", "1,200", 1), ("1200.5", "1.200,5", 1), ("1200.5", "1,200.5", 1), ("5.5", "5,5", 1),
    ("5.5 mmol/L", "5,5 mmol/L", 1), ("55", "5,5", 0), ("0.125 mg", "0,125 mg", 1), ("125 mg", "0,125 mg", 0),
    ("1200", "1 200", 1), ("1200", "1'200", 1), ("1000000", "1.000.000", 1), ("12345678", "12,345,678", 1),
    ("15", "1,5", 0), ("100000 CFU/mL", "100 000 CFU/mL", 1), ("0.75", "3/4", 1), ("3/4", "0.75", 1),
    ("0.5", "½", 1), ("2.5", "2½ tablets", 1), ("2.5", "2 1/2", 1), ("0.5", r"\frac{1}{2}", 1), ("0.75", "4/3", 0),
    ("3/4", "6/8", 1), ("1:128", "1:128", 1), ("1:128", "1:64", 0), ("1:128", "128", 0),
    ("3-5 days", "3-5 days", 1), ("3-5 days", "3 to 5 days", 1), ("3-5", "3–5 days", 1), ("3-5 days", "5 days", 0),
    ("5 days", "3-5 days", 0), ("3", "3-5", 0), ("3-5 days", "3-6 days", 0), ("3-5", "4", 0),
    ("3-5 mg", "3 mg to 5 mg", 1), ("<0.05", "<0.05", 1), ("p<0.05", "p < 0.05", 1), ("p<0.05", "p > 0.05", 0),
    ("<0.05", "0.05", 0), ("5", "<5", 0), ("<0.05", "less than 0.05", 1), (">=5", "≤5", 0), ("<=5", "≤ 5", 1),
    ("<5", "≤5", 0), ("≥5", "at least 5", 1), ("5", "-5", 0), ("-5", "−5", 1), ("-5", "5", 0), ("-5", "- 5", 1),
    ("3", "about -3", 0), ("-5", "x = - 5", 1), ("19", "COVID-19", 1), ("7", "10 - 3 = 7", 1), ("5", "+5", 1),
    ("5 mg", "- 5 mg once\n- done", 1), ("5", "5 ± 0.2", 1), ("5 ± 0.2", "5.1", 1), ("5 ± 0.2", "5.6", 0),
    ("0.5 g", "500 MG", 1), ("500 mcg", "500 mg", 0), ("5 mL", "5 ML", 1), ("0.25 mg", "250 µg", 1),
    ("0.25 mg", "250 μg", 1), ("5 U", "5 units", 1), ("40 U/L", "40 IU/L", 1), ("5 mg/kg/d", "5 mg/kg/day", 1),
    ("5 mg/kg/day", "5 mg/kg", 0), ("290 mosm/kg", "290 mOsm/kg", 1), ("25 kg/m²", "25 kg/m2", 1),
    ("10^5 CFU/L", "10^5 CFU/mL", 0), ("100 mg", "2 x 100 mg", 1), ("5", "take 5 a day", 1),
    ("5", "5 in the morning", 1), ("12.7 cm", "5 in", 1), ("2.5 mg", "2.5 mg/dose", 1), ("5 mol/L", "5 mmol/L", 0),
    ("5 meq/L", "5 mEq/L", 1), ("3", "none", 0), ("3", "", 0), ("42", "**42**", 1), ("1200", "$1,200", 1),
    ("5", "<b>5</b>", 1), ("5", "It is 5.", 1), ("5", "(5)", 1), ("5", "T4 is 5", 1),
    ("300 pg/mL", "B12 300 pg/mL", 1), ("5 mg", "5 mg.", 1), ("5 mg", "= 5 mg", 1),
    ("60 mL/min/1.73m^2", "eGFR: 59.8 mL/min/1.73 m²", 1), ("60 mL/min/1.73m^2", "59.8 mL/min per 1.73 m2", 1),
    ("2", "1/2", 0), ("5 mg", "5 g", 0), ("5 mg/L", "5 mg/dL", 0), ("5", "0.5", 0), ("0.5", ".5", 1),
    ("5", ".5", 0), ("5", "5.0", 1), ("10 µg", "10 mcg", 1), ("72 h", "3 days", 1), ("14 days", "2 weeks", 1),
    ("1500", "1.5e3", 1),
]  # fmt: skip
EXACT: list[Row] = [
    ("aspirin", "The Aspirin.", 1), ("A", "a", 1), ("5", "5.", 1), ("1000", "1,000", 1), ("-5", "−5", 1),
    ("p<0.05", "p < 0.05", 1), ("p<0.05", "p<0.05.", 1), ("HER2+", "HER2 (+)", 1), ("HER2+", "HER2 +", 1),
    ("HER2+", "her2+", 1), ("10^5", "10⁵", 1), ("<=5", "≤5", 1), ("≤5", "≤ 5", 1), ("1/2", "½", 1),
    ("50%", "50 %", 1), ("37°C", "37 °C", 1), ("37 °C", "37℃", 1), ("well known", "well-known", 1),
    ("Crohn's disease", "Crohn’s disease", 1), ("US", "U.S.", 1), ("Paris", "**Paris**", 1),
    ("Paris", "“Paris”", 1), ("Paris", "Paris!", 1), ("St John", "St. John", 1), ("5", "+5", 1), ("0.5", ".5", 1),
    ("lung", "the lung", 1), ("5 mg", "5 mg", 1), ("5 mg", "5\u00a0mg", 1), ("3-5", "3–5", 1),
    ("COVID 19", "COVID-19", 1), ("yes", "Yes.", 1), ("vitamin a", "Vitamin A", 1), ("1, 2", "(1, 2)", 1),
    ("A and B", "A & B", 1), ("120 / 80", "120/80", 1), ("O−", "O-", 1), ("-5", "- 5", 1), ("apple", "an apple", 1),
    ("μg", "µg", 1), ("Ca2+", "Ca²⁺", 1), ("c++", "C++", 1), ("x + y", "x+y", 1), ("-5", "5", 0), ("5", "-5", 0),
    ("HER2+", "HER2-", 0), ("HER2-", "HER2+", 0), ("O-", "O+", 0), ("O+", "O-", 0), ("O", "O-", 0),
    ("p<0.05", "p>0.05", 0), ("5", ".5", 0), (".5", "5", 0), ("55", "5.5", 0), ("15", "1.5", 0), ("50%", "50", 0),
    ("12080", "120/80", 0), ("120/80", "140/80", 0), ("10^5", "105", 0), ("10^5", "5", 0), ("10^5", "10^-5", 0),
    ("105", "10⁵", 0), ("5 mg", "5 g", 0), (">5", "<5", 0), ("≥5", "≤5", 0), ("<5", "≤5", 0), ("5", "<5", 0),
    ("C++", "C", 0), ("C#", "C", 0), ("vitamin A", "vitamin", 0), ("hepatitis A", "hepatitis", 0),
    ("blood type A", "blood type", 0), ("A-", "A+", 0), ("A+", "A", 0), ("-", "+", 0), ("A", "", 0),
    ("2 1/2", "21/2", 0), ("21/2", "2½", 0), ("[1,2)", "(1,2]", 0), ("(1, 2)", "[1, 2]", 0), ("yes", "not yes", 0),
    ("1.5", "1 5", 0), ("55", "5,5", 0), ("x+1", "x-1", 0), ("x≠5", "x=5", 0), ("A", "A. hypertension", 0),
    ("52", "5^2", 0), ("0.5", "-0.5", 0), ("12", "1:2", 0), ("2", "1/2", 0), ("5 mg/L", "5 mg/dL", 0),
    ("1e-5", "1e5", 0), ("Rh+", "Rh-", 0), ("35", "3-5", 0), ("A B", "B", 0), ("Na", "Na+", 0),
    ("HER2+ / ER-", "HER2- / ER+", 0), ("HER2+/ER-", "HER2-/ER+", 0), ("$5", "€5", 0), ("37 °F", "37 °C", 0),
    (['Paris', 'City of Paris'], "paris", 1), ('["Paris", "City of Paris"]', "City of Paris", 1),
    ("['Paris', 'x']", "x", 1), ('["Paris"]', "Rome", 0), ("[1, 2]", "1", 0), ([5, 6], "6", 1),
]  # fmt: skip
MATH: list[Row] = [
    ("5", "-5", 0), ("-5", "5", 0), ("5", r"\boxed{-5}", 0), ("-5", "−5", 1), ("x<5", r"\boxed{x>5}", 0),
    (r"x\le 5", r"\boxed{x\ge 5}", 0), ("[1,2]", r"\boxed{(1,2)}", 0), ("5", "10^5", 0), ("100000", "10^5", 1),
    ("0.5", "50%", 1), ("2", r"\frac{1}{2}", 0), ("0.5", "1/2", 1), ("21/2", r"\boxed{2 1/2}", 0),
    ("120/80", "140/80", 0), ("HER2+", "HER2-", 0), ("p>0.05", "p<0.05", 0), ("O+", "O-", 0),
    ('["1", "2"]', "2", 1), ('["1", "2"]', "3", 0), ("5", r"\boxed{.5}", 0), ("HER2+", r"\boxed{HER2-}", 0),
    ("p>0.05", r"\boxed{p<0.05}", 0), ("B", r"\boxed{A}", 0), ("15", r"\boxed{1.5}", 0), ("<5", r"\boxed{5}", 0),
    ("140/80", r"\boxed{120/80}", 0), (">5", r"\boxed{<5}", 0), ("O+", r"\boxed{O-}", 0), ("x", r"\boxed{-x}", 0),
]  # fmt: skip
GSM8K: list[Row] = [
    ("5", "-5", 0), ("-5", "−5", 1), ("5", "10^5", 0), ("4", "3/4", 0), ("0.75", "3/4", 1), ("55", "5,5", 0),
    ("123", "1,2,3", 0), ("7", "10-3 = 7", 1), ("-5", "range 3-5", 0), ("5", "-$5", 0), ("-5", "-$5", 1),
    ("-19", "COVID-19", 0), ("3", "The answer is 3/4.", 0), ("1200", "The answer is 1,200.", 1),
    ("5", "The answer is -5.", 0), ("5", "#### -5", 0), ("1200", "$1,200", 1), ("5", "5.", 1), ("5", "0.5", 0),
    (['5', '6'], "5", 1), ("100000", "10^5", 1), ("4", "x^2 = 4", 1), ("5", "10⁵", 0), ("105", "10⁵", 0),
]  # fmt: skip
OPTIONS = ["aspirin", "ibuprofen", "no drug", "warfarin"]
DISEASES = ["hypertension", "pulmonary hypertension", "HER2+", "HER2-"]
NUMBERS = ["-5", "5", "0.5", "<5"]
CHOICES: list[tuple[dict[str, Any], str, float]] = [
    ({"answer": "B"}, "B", 1),
    ({"answer": "B"}, "b", 1),
    ({"answer": "B"}, "(b)", 1),
    ({"answer": "B"}, "b)", 1),
    ({"answer": "B"}, "B.", 1),
    ({"answer": "B"}, "[B]", 1),
    ({"answer": "A"}, "the answer is option a", 1),
    ({"answer": "B"}, "The answer is (b)", 1),
    ({"answer": "B"}, "The answer is b.", 1),
    ({"answer": "C"}, "**Answer: C**", 1),
    ({"answer": "C"}, "**Answer:** C", 1),
    ({"answer": "D"}, r"\boxed{D}", 1),
    ({"answer": "D"}, r"$\boxed{\text{d}}$", 1),
    ({"answer": "A"}, "A. hypertension", 1),
    ({"answer": "A"}, "A) hypertension", 1),
    ({"answer": "A"}, "(A) hypertension", 1),
    ({"answer": "A"}, "A: hypertension", 1),
    ({"answer": "A"}, "A - hypertension", 1),
    ({"answer": "A"}, "A patient has it", 0),
    ({"answer": "A"}, "A drug is needed", 0),
    ({"answer": "I"}, "I think so", 0),
    ({"answer": "E"}, "E. coli is the cause", 0),
    ({"answer": "C"}, "C. difficile", 0),
    ({"answer": "C"}, "A is wrong. The answer is (C).", 1),
    ({"answer": "A"}, "A is wrong. The answer is (C).", 0),
    ({"answer": "A"}, "The answer is not A.", 0),
    ({"answer": "A"}, "The answer is not A, it is B.", 0),
    ({"answer": "A"}, "Option A is wrong.", 0),
    ({"answer": "B"}, "Option A is incorrect; option B is correct.", 1),
    ({"answer": "A"}, "Option A is incorrect; option B is correct.", 0),
    ({"answer": "C"}, "(A) is wrong, (B) is wrong, so it must be (C).", 1),
    ({"answer": "C"}, "(C) is right because (A) and (B) are wrong.", 1),
    ({"answer": "B"}, "(C) is right because (A) and (B) are wrong.", 0),
    ({"answer": "B"}, "(A) aspirin and (B) ibuprofen were discussed.", 0),
    ({"answer": "A"}, "A. aspirin\nB. ibuprofen\nC. none", 0),
    ({"answer": "A"}, "The answer is A or B.", 0),
    ({"answer": "B"}, "The answer is A or B.", 0),
    ({"answer": "A, C"}, "The answer is A and C.", 1),
    ({"answer": "AC"}, "A and C", 1),
    ({"answer": "A, C"}, "A", 0),
    ({"answer": "A"}, "A, C", 0),
    ({"answer": "A, C"}, "C, A", 1),
    ({"answer": "A, C"}, "A, B, C", 0),
    ({"answer": "A"}, "The incorrect answer is A.", 0),
    ({"answer": "B"}, "I would choose B because A is risky.", 1),
    ({"answer": "B"}, "I choose option b", 1),
    ({"answer": "A"}, "Answer: A because it works", 1),
    ({"answer": "A"}, "Answer: a drug that works", 0),
    ({"answer": "A"}, "Answer: A drug that works", 0),
    ({"answer": "B", "choices": OPTIONS}, "Answer: I think it is (B)", 1),
    ({"answer": "C"}, "The correct option is C", 1),
    ({"answer": "C"}, "Correct answer: c", 1),
    ({"answer": "B"}, "My final answer is: **B**", 1),
    ({"answer": "D"}, "Final Answer: (D) no drug", 1),
    ({"answer": "B"}, "Reasoning here.\n\nB", 1),
    ({"answer": "B"}, "Reasoning here.\n\n**B**", 1),
    ({"answer": "B"}, "Therefore, B.", 1),
    ({"answer": "B"}, "so the best choice is B", 1),
    ({"answer": "B"}, "B is correct.", 1),
    ({"answer": "B"}, "B is not correct.", 0),
    ({"answer": "B"}, "Not B.", 0),
    ({"answer": "B"}, "not (B)", 0),
    ({"answer": "B", "choices": OPTIONS}, "I would give ibuprofen.", 1),
    ({"answer": "B", "choices": OPTIONS}, "I would not give ibuprofen.", 0),
    ({"answer": "B", "choices": OPTIONS}, "It is not aspirin but ibuprofen.", 1),
    ({"answer": "A", "choices": OPTIONS}, "It is not aspirin but ibuprofen.", 0),
    ({"answer": "A", "choices": OPTIONS}, "aspirin or ibuprofen", 0),
    ({"answer": "B", "choices": DISEASES}, "pulmonary hypertension", 1),
    ({"answer": "B", "choices": DISEASES}, "It is pulmonary hypertension.", 1),
    ({"answer": "A", "choices": DISEASES}, "It is pulmonary hypertension.", 0),
    ({"answer": "D", "choices": DISEASES}, "HER2-", 1),
    ({"answer": "C", "choices": DISEASES}, "HER2-", 0),
    ({"answer": "D", "choices": DISEASES}, "The tumour is HER2-.", 1),
    ({"answer": "C", "choices": DISEASES}, "HER2+ disease", 1),
    ({"answer": "ibuprofen", "choices": {"A": "aspirin", "B": "ibuprofen"}}, "B", 1),
    ({"answer": 1}, "B", 1),
    ({"answer": "1"}, "B", 1),
    ({"answer": 0}, "A", 1),
    ({"answer": ["A", "B"]}, "B", 1),
    ({"answer": ["A", "B"]}, "C", 0),
    ({"answer": '["A","B"]'}, "B", 1),
    ({"answer": "A"}, "<answer>a) aspirin</answer>", 1),
    ({"answer": "A"}, "<answer>A drug</answer>", 0),
    ({"answer": "B"}, "<think>B</think> C", 0),
    ({"answer": "A"}, "", 0),
    ({"answer": "A"}, "Vitamin A is needed.", 0),
    ({"answer": "B"}, "Hepatitis B", 0),
    ({"answer": "A"}, "blood type A", 0),
    ({"answer": "A"}, "Answer: A+", 0),
    ({"answer": "A"}, "The answer is A-positive blood", 0),
    ({"answer": "A"}, "It's a trap", 0),
    ({"answer": "B", "choices": NUMBERS}, "5", 1),
    ({"answer": "B", "choices": NUMBERS}, "-5", 0),
    ({"answer": "A", "choices": NUMBERS}, "The value is -5", 1),
    ({"answer": "B", "choices": NUMBERS}, "The value is 0.5", 0),
    ({"answer": "D", "choices": NUMBERS}, "<5", 1),
    ({"answer": "A"}, "Option A: bad. Option B: good. Option B", 0),
    ({"answer": "(B)"}, "B", 1),
    ({"answer": "b. ibuprofen"}, "B", 1),
    ({"answer": "B", "choices": OPTIONS}, "b. ibuprofen", 1),
    ({"answer": "B"}, "Answer is B", 1),
    ({"answer": "B"}, "answer B", 1),
    ({"answer": "B"}, "Answer = B", 1),
    ({"answer": "B"}, "ANSWER: B", 1),
    ({"answer": "B"}, "The answer is: \n\nB", 1),
    ({"answer": "B"}, r"The answer is \(B\).", 1),
    ({"answer": "B"}, "The answer is $B$.", 1),
    ({"answer": "B"}, "The answer is 'B'.", 1),
    ({"answer": "C"}, "The answer would be (c).", 1),
    ({"answer": "B"}, "Choice (b) is right.", 1),
    ({"answer": "D"}, "The most likely answer is D.", 1),
    ({"answer": "C"}, "I'd go with C.", 1),
    ({"answer": "C"}, "C, because the others are wrong.", 1),
    ({"answer": "A"}, "A: The patient has asthma.", 1),
    ({"answer": "B"}, "The answer is A. Wait, no: the answer is B.", 1),
    ({"answer": "A"}, "The answer is A. Wait, no: the answer is B.", 0),
    ({"answer": "D"}, "We can rule out A, B and D.", 0),
    ({"answer": "B"}, "Neither A nor B.", 0),
    ({"answer": "C"}, "We rule out (A), (B) and (D), leaving C.", 1),
]  # fmt: skip

FUZZY: list[Row] = [
    ("HER2+", "HER2-", 0), ("5 mg daily", "50 mg daily", 0), ("p<0.05", "p>0.05", 0), ("-5", "5", 0), ("O+", "O-", 0),
    ("HER2 positive", "HER2 negative", 0), ("yes", "not yes", 0), ("5 mg daily", "5 mg, daily.", 1),
]  # fmt: skip
OTHERS: list[tuple[str, dict[str, Any], str, float]] = [
    ("minerva_math", {"answer": "5"}, "$-5$", 0),
    ("minerva_math", {"answer": ["5", "-5"]}, "$-5$", 1),
    ("minerva_math", {"answer": "2 1/2"}, "$21/2$", 0),
    ("geometry3k", {"answer": "5"}, "it is -5", 0),
    ("geometry3k", {"answer": "3/4"}, "it is 3/4", 1),
    ("geometry3k", {"answer": "4"}, "it is 3/4", 0),
    ("clevr_count", {"answer": "5"}, "[-5]", 0),
    ("countdown", {"target": 5, "nums": [3, 8]}, "<answer>3 - 8</answer>", 0.1),
    ("math", {"answer": "0.5", "strict": False}, r"\boxed{50}", 0),
    ("numeric", {"answer": 250, "unit": "mcg"}, "0.25 mg", 1),
    ("numeric", {"answer": ["5.5", "6"]}, "6", 1),
    ("numeric", {"answer": '["5.5", "6"]'}, "7", 0),
]


def _score(name: str, reply: str, row: dict[str, Any]) -> float:
    return float(load(resolve(RewardSpec(fn=name))[0])(reply, **row))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("numeric", NUMERIC),
        ("exact_match", EXACT),
        ("math", MATH),
        ("gsm8k", GSM8K),
        ("allenai_gsm8k", GSM8K),
        ("fuzzy_match", FUZZY),
    ],
)
def test_near_misses(name: str, rows: list[Row]) -> None:
    scored = [(answer, reply, score, _score(name, reply, {"answer": answer})) for answer, reply, score in rows]
    assert [each for each in scored if each[2] != each[3]] == []


def test_near_misses_of_choices_and_other_rewards() -> None:
    rows = [("multiple_choice", row, reply, score) for row, reply, score in CHOICES] + OTHERS
    scored = [(name, row, reply, score, _score(name, reply, row)) for name, row, reply, score in rows]
    assert [each for each in scored if each[3] != each[4]] == []


async def test_rows_of_files_mean_the_same(tmp_path: Path) -> None:
    """JSON Lines keeps a list, a CSV cell holds its JSON, and a verdict depends on neither."""
    rows = [
        {"question": "q0", "answer": ["Paris", "City of Paris"]},
        {"question": "q1", "answer": "-5"},
        {"question": "q2", "answer": "HER2+"},
        {"question": "q3", "answer": "p<0.05"},
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        table = csv.DictWriter(file, ["question", "answer"])
        table.writeheader()
        table.writerows({**row, "answer": _cell(row["answer"])} for row in rows)
    right, wrong = ["City of Paris", "−5", "HER2 (+)", "p < 0.05"], ["Rome", "5", "HER2-", "p>0.05"]
    for file_name in ("rows.jsonl", "rows.csv"):
        environment = load_environment(datasets=[{"path": str(tmp_path / file_name), "shuffle": False}])
        try:
            assert [await _reward(environment, number, reply) for number, reply in enumerate(right)] == [1] * 4
            assert [await _reward(environment, number, reply) for number, reply in enumerate(wrong)] == [0] * 4
        finally:
            await environment._teardown()


def _cell(answer: Any) -> str:
    return answer if isinstance(answer, str) else json.dumps(answer)


async def _reward(environment: Any, number: int, reply: str) -> float:
    row = environment.dataset[number]
    info = json.loads(row["info"]) if isinstance(row["info"], str) else row["info"]
    state = vf.State(
        prompt=row["prompt"],
        completion=[{"role": "assistant", "content": reply}],
        answer=row["answer"],
        info=info,
        trajectory=[],
        task="default",
        metrics={},
        timing={},
    )
    await environment.rubric.score_rollout(state)
    return float(state["reward"])
