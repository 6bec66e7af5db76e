"""The med_calc example: formulas against worked examples, questions, grading, and its CPU files."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf

from med_calc.answers import closeness, parse_number
from med_calc.calculators import CALCULATORS
from med_calc.formulas import round_half_up
from med_calc.quantities import measure
from med_calc.questions import make_questions

ROOT = Path(__file__).resolve().parents[1]
MED_CALC = ROOT / "examples" / "med_calc"
DIFFICULTIES = ("easy", "medium", "hard")

# Worked by hand; where a publication works an example, it is that one.
WORKED: list[tuple[str, dict[str, Any], float]] = [
    ("bmi", {"weight_kg": 68, "height_cm": 165}, 24.98),  # the CDC's example
    ("bsa", {"weight_kg": 70, "height_cm": 170}, 1.818),
    ("ideal_body_weight", {"height_in": 70, "sex": "male"}, 73.0),
    ("ideal_body_weight", {"height_in": 65, "sex": "female"}, 57.0),
    ("creatinine_clearance", {"age_years": 60, "weight_kg": 72, "creatinine_mg_dl": 1.0, "sex": "male"}, 80.0),
    ("creatinine_clearance", {"age_years": 60, "weight_kg": 72, "creatinine_mg_dl": 1.0, "sex": "female"}, 68.0),
    ("egfr", {"age_years": 50, "creatinine_mg_dl": 1.0, "sex": "male"}, 91.69),
    ("egfr", {"age_years": 50, "creatinine_mg_dl": 1.0, "sex": "female"}, 68.63),
    ("egfr", {"age_years": 50, "creatinine_mg_dl": 0.7, "sex": "female"}, 105.30),  # kappa: 142 x 0.73274 x 1.012
    ("map", {"systolic_mmhg": 120, "diastolic_mmhg": 80}, 93.33),
    ("anion_gap", {"sodium_meq_l": 140, "chloride_meq_l": 104, "bicarbonate_meq_l": 24}, 12.0),
    (
        "corrected_anion_gap",
        {"sodium_meq_l": 140, "chloride_meq_l": 104, "bicarbonate_meq_l": 24, "albumin_g_dl": 2.0},
        17.0,
    ),
    ("corrected_calcium", {"calcium_mg_dl": 8.0, "albumin_g_dl": 2.0}, 9.6),
    ("corrected_sodium", {"sodium_meq_l": 130, "glucose_mg_dl": 600}, 138.0),
    ("corrected_sodium_hillier", {"sodium_meq_l": 130, "glucose_mg_dl": 600}, 142.0),
    ("osmolality", {"sodium_meq_l": 140, "glucose_mg_dl": 90, "urea_nitrogen_mg_dl": 14}, 290.0),
    (
        "fena",
        {"urine_sodium_meq_l": 20, "sodium_meq_l": 140, "urine_creatinine_mg_dl": 100, "creatinine_mg_dl": 2.0},
        0.2857,
    ),
    ("qtc_bazett", {"qt_ms": 360, "heart_rate_bpm": 90}, 440.91),
    ("qtc_bazett", {"qt_ms": 400, "heart_rate_bpm": 60}, 400.0),
    ("qtc_fridericia", {"qt_ms": 360, "heart_rate_bpm": 90}, 412.10),
    # Kamath et al. 2001 work these three to 20.39 points; a sodium of 137 adds nothing.
    ("meld_na", {"creatinine_mg_dl": 1.9, "bilirubin_mg_dl": 4.2, "inr": 1.226, "sodium_meq_l": 137}, 20.0),
    ("meld_na", {"creatinine_mg_dl": 1.9, "bilirubin_mg_dl": 4.2, "inr": 1.226, "sodium_meq_l": 130}, 25.0),
    ("meld_na", {"creatinine_mg_dl": 0.6, "bilirubin_mg_dl": 0.5, "inr": 0.9, "sodium_meq_l": 120}, 6.0),
    ("meld_na", {"creatinine_mg_dl": 9.0, "bilirubin_mg_dl": 30.0, "inr": 5.0, "sodium_meq_l": 120}, 40.0),
    ("aa_gradient", {"oxygen_percent": 21, "pao2_mmhg": 90, "paco2_mmhg": 40}, 9.73),
    ("ldl", {"total_mg_dl": 200, "hdl_mg_dl": 50, "triglycerides_mg_dl": 150}, 120.0),
    ("dose_volume", {"weight_kg": 70, "dose_mg_kg": 15, "concentration_mg_ml": 5}, 210.0),
    ("infusion_rate", {"weight_kg": 70, "dose_ug_kg_min": 5, "concentration_mg_ml": 1.6}, 13.125),
    ("parkland", {"weight_kg": 70, "burned_percent": 40}, 11200.0),
]


@pytest.mark.parametrize(("name", "values", "expected"), WORKED, ids=[f"{row[0]}-{row[2]:g}" for row in WORKED])
def test_a_formula_gives_what_the_worked_example_gives(name: str, values: dict[str, Any], expected: float) -> None:
    assert CALCULATORS[name].formula(**values) == pytest.approx(expected, rel=2e-4)


def test_every_calculator_has_a_worked_example_and_a_source() -> None:
    assert {name for name, _, _ in WORKED} == set(CALCULATORS)
    for calculator in CALCULATORS.values():
        assert calculator.formula.__doc__
        assert any(mark in calculator.formula.__doc__ for mark in (";", "policy", "Ogden")), calculator.title


@pytest.mark.parametrize(
    ("calculator", "argument", "conventional", "other"),
    [
        ("creatinine_clearance", "creatinine_mg_dl", "1.0 mg/dL", 88.4),
        ("meld_na", "bilirubin_mg_dl", "1.0 mg/dL", 17.1),
        ("osmolality", "glucose_mg_dl", "90 mg/dL", 5.0),
        ("osmolality", "urea_nitrogen_mg_dl", "28 mg/dL", 10.0),
        ("corrected_calcium", "calcium_mg_dl", "10 mg/dL", 2.495),
        ("corrected_calcium", "albumin_g_dl", "4.0 g/dL", 40.0),
        ("ldl", "total_mg_dl", "193 mg/dL", 4.99),
        ("ldl", "triglycerides_mg_dl", "177 mg/dL", 2.0),
        ("aa_gradient", "pao2_mmhg", "100 mmHg", 13.33),
        ("bmi", "weight_kg", "70 kg", 154.3),
    ],
)
def test_other_units_are_converted_as_published(
    calculator: str, argument: str, conventional: str, other: float
) -> None:
    usual, second = CALCULATORS[calculator].inputs[argument].units[:2]
    value, _, name = conventional.partition(" ")
    assert usual.name == name
    assert float(value) * second.per_conventional == pytest.approx(other, rel=2e-3)


def test_what_a_question_shows_is_what_it_is_computed_from() -> None:
    rng = random.Random(0)
    for calculator in CALCULATORS.values():
        for quantity in calculator.inputs.values():
            for unit in quantity.units:
                measurement = measure(quantity, unit, rng)
                assert float(measurement.digits) == pytest.approx(measurement.shown)
                assert measurement.conventional * unit.per_conventional == pytest.approx(measurement.shown)


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
@pytest.mark.parametrize("style", ["text", "compact"])
def test_every_answer_is_right_by_its_own_question(difficulty: str, style: str) -> None:
    for question in make_questions(list(CALCULATORS), 1000, 0, difficulty, style):
        calculator = CALCULATORS[question.calculator]
        assert closeness(float(question.answer), question.expected, question.tolerance) == 1.0, question
        assert calculator.plausible[0] <= question.expected <= calculator.plausible[1]
        for measurement in question.measurements.values():
            assert measurement.digits in question.text
        if style == "compact":
            assert question.text.isascii()


def test_a_neighbouring_answer_is_wrong() -> None:
    for question in make_questions(["anion_gap", "map", "meld_na"], 300, 0, "easy"):
        assert closeness(float(question.answer) + 1, question.expected, question.tolerance) < 1.0


def test_questions_are_the_same_for_the_same_seed_only() -> None:
    first, again, other = (make_questions(list(CALCULATORS), 50, seed) for seed in (1, 1, 2))
    assert [each.text for each in first] == [each.text for each in again]
    assert [each.text for each in first] != [each.text for each in other]


def test_easy_questions_have_conventional_units_only_and_hard_ones_more_than_is_needed() -> None:
    for question in make_questions(list(CALCULATORS), 200, 0, "easy"):
        assert all(each.unit is each.quantity.units[0] for each in question.measurements.values())
    assert all("Other findings: " in question.text for question in make_questions(["bmi"], 20, 0, "hard"))
    units = {each.measurements["weight_kg"].unit.name for each in make_questions(["bmi"], 50, 0, "medium")}
    assert units == {"kg", "lb"}


@pytest.mark.parametrize(
    ("text", "tag", "value"),
    [
        ("<answer>12.5</answer>", "answer", 12.5),
        ("First <answer>3</answer>, no: <ANSWER> 12.5 mL/min/1.73 m² </ANSWER>.", "answer", 12.5),
        ("<answer>140 - 104 - 24 = 12 mEq/L</answer>", "answer", 12),
        ("The gap is 12 mEq/L.", "answer", 12),
        ("140-104=36 36-24=12", None, 12),
        ("so it is 24.2 kg/m2", None, 24.2),
        ("eGFR = 68 mL/min/1.73 m²", None, 68),
        ("eGFR is 68 mL/min/1.73m^2", None, 68),
        ("about 11,200 mL", None, 11200),
        ("etwa 24,2 kg", None, 24.2),
        ("= −3.5", None, -3.5),
        ("=-3", None, -3),
        (".5", None, 0.5),
        ("1.2e3 mL", None, 1200),
        (r"\boxed{93.3}", None, 93.3),
        ("Na is low", None, None),
        ("<answer></answer>", "answer", None),
        ("", None, None),
    ],
)
def test_a_number_is_read_out_of_an_answer(text: str, tag: str | None, value: float | None) -> None:
    assert parse_number(text, tag) == value


def test_ties_are_rounded_away_from_zero() -> None:
    assert [round_half_up(value, 1) for value in (0.25, 0.35, -0.25, 1.005)] == [0.3, 0.4, -0.3, 1.0]
    assert math.copysign(1, round_half_up(-0.01, 1)) == -1


def scores(environment: vf.Environment, text: str, row: int = 0) -> dict[str, float]:
    info = environment.get_dataset()[row]["info"]
    info = json.loads(info) if isinstance(info, str) else info
    completion = [{"role": "assistant", "content": text}]
    # verifiers adds rubrics of its own, which watch.
    functions = {function.__name__: function for rubric in environment.rubric.rubrics for function in rubric.funcs}
    return {
        "score": functions["score"](completion=completion, info=info),
        "correct": functions["correct"](completion=completion, info=info),
        "readable": functions["readable"](completion=completion),
    }


def test_the_environment_rewards_what_is_right() -> None:
    environment = vf.load_environment("med-calc", num_examples=30)
    row = environment.get_dataset()[0]
    assert "<answer>" in row["prompt"][0]["content"]
    assert (len(environment.get_dataset()), len(environment.get_eval_dataset())) == (30, len(CALCULATORS))
    right = scores(environment, f"… <answer>{row['answer']}</answer>")
    assert right == {"score": 1.0, "correct": 1.0, "readable": 1.0}
    assert scores(environment, "<answer>99999</answer>") == {"score": 0.0, "correct": 0.0, "readable": 1.0}
    assert scores(environment, "I cannot say.") == {"score": 0.0, "correct": 0.0, "readable": 0.0}


def test_a_near_miss_has_part_of_the_credit_where_that_is_asked_for() -> None:
    environment = vf.load_environment("med-calc", calculators=["map"], num_examples=10, partial_credit=0.5)
    expected = float(environment.get_dataset()[0]["answer"])
    near, far = (scores(environment, f"<answer>{expected * factor}</answer>")["score"] for factor in (1.1, 1.5))
    assert 0.5 > near > far > 0
    assert scores(environment, f"<answer>{expected}</answer>")["score"] == 1.0


@pytest.mark.parametrize(
    "arguments",
    [{"calculators": ["bmi", "horoscope"]}, {"calculators": []}, {"difficulty": "mild"}, {"partial_credit": 1.0}],
)
def test_arguments_that_cannot_be_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises((ValueError, RuntimeError)):
        vf.load_environment("med-calc", **arguments)


def test_the_shipped_demonstrations_are_what_their_script_makes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, MED_CALC / "make_inputs.py", "--to", tmp_path], check=True)
    for name in ("demonstrations.jsonl", "right_answers.jsonl"):
        assert (tmp_path / name).read_bytes() == (MED_CALC / name).read_bytes()


def test_one_demonstration_in_four_is_right() -> None:
    right = []
    for line in (MED_CALC / "demonstrations.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        name, *words = row["prompt"][0]["content"].split()
        values = [float(word) for word in words[1::2]]
        calculator = CALCULATORS[{"AG": "anion_gap", "MAP": "map"}[name]]
        expected = calculator.formula(*values)
        value = parse_number(row["completion"][0]["content"])
        right.append(closeness(value, expected, calculator.tolerance(expected)))
    share = statistics.fmean(score == 1.0 for score in right)
    assert 0.24 < share < 0.29


def train(kind: str, output_dir: Path, *options: str) -> list[dict[str, Any]]:
    """Run the example's CPU file as its README says; the records of the run's metrics."""
    command, *_ = kind.split("_")
    words = ["@"] if command == "sft" else []
    program = Path(sys.executable).with_name("medarc_train")
    argv = [program, command, *words, MED_CALC / f"{kind}_cpu.toml", "--output-dir", output_dir, *options]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return list(map(json.loads, (output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()))


def values(records: list[dict[str, Any]], name: str) -> list[float]:
    return [record[name] for record in records if name in record]


@pytest.mark.slow
def test_the_sft_file_trains_what_the_shipped_checkpoint_is_made_of(tmp_path: Path) -> None:
    short = ("--scheduler.warmup-steps", "1", "--scheduler.decay-steps", "1")
    losses = values(train("sft", tmp_path, "--max-steps", "4", *short), "loss/mean")
    assert losses[-1] < losses[0]
    shipped = {path.name for path in (MED_CALC / "checkpoint").iterdir()}
    assert shipped <= {path.name for path in (tmp_path / "weights" / "step_4").iterdir()}


@pytest.mark.slow
def test_the_rl_file_starts_from_the_shipped_checkpoint_and_learns(tmp_path: Path) -> None:
    rewards = values(train("rl", tmp_path, "--max-steps", "30"), "reward/mean")
    assert len(rewards) == 30
    # The demonstrations are right one time in four, and so is a model that has learned from them alone.
    assert all(0.05 < reward < 0.5 for reward in rewards[:2])
    assert statistics.fmean(rewards[-5:]) > statistics.fmean(rewards[:5]) + 0.15
    assert (tmp_path / "weights" / "step_30" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_file_with_evaluations_shows_what_right_answers_teach(tmp_path: Path) -> None:
    records = train("sft_eval", tmp_path, "--max-steps", "20", "--eval.num-examples", "20")
    base, trained = values(records, "eval/map/avg@1")
    assert base < 0.3
    assert trained > 0.5
