"""Every calculator: its formula, inputs, wording, unit, rounding rule and tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from med_calc import formulas
from med_calc import quantities as q
from med_calc.quantities import Quantity


@dataclass(frozen=True, slots=True)
class Calculator:
    """One clinical calculation."""

    title: str
    short: str
    """In the compact style; ASCII."""
    formula: Callable[..., float]
    inputs: Mapping[str, Quantity]
    """By argument of the formula, in the order of the text. An argument `sex` is drawn in addition."""
    templates: tuple[str, ...]
    """What is known, with a field for each input (and `{sex}`). The first is used where difficulty is easy."""
    unit: str
    decimals: int
    """Number of decimals that questions ask for and answers show."""
    relative_tolerance: float = 0.0
    plausible: tuple[float, float] = (float("-inf"), float("inf"))
    """Cases with a result outside are not asked."""
    consistent: Callable[..., bool] = lambda **values: True
    """Whether such values occur together, of the formula's arguments."""
    needs_sex: bool = False

    def tolerance(self, expected: float) -> float:
        """How far an answer may be off: half of the last asked decimal, or the relative tolerance if that is more."""
        return max(0.5 * 10**-self.decimals, self.relative_tolerance * abs(expected)) + 1e-9

    def accepts(self, values: Mapping[str, Any]) -> bool:
        """Whether values make a case worth asking."""
        low, high = self.plausible
        return self.consistent(**values) and low <= self.formula(**values) <= high


def _pulse_pressure_is_plausible(systolic_mmhg: float, diastolic_mmhg: float) -> bool:
    return 20 <= systolic_mmhg - diastolic_mmhg <= 90


CALCULATORS: Mapping[str, Calculator] = {
    "bmi": Calculator(
        "body mass index", "BMI", formulas.body_mass_index,
        {"weight_kg": q.WEIGHT, "height_cm": q.HEIGHT},
        ("A patient weighs {weight_kg} and is {height_cm} tall.",
         "Clinic intake records a height of {height_cm} and a weight of {weight_kg}."),
        "kg/m²", 1, 0.005, (15, 50),
    ),
    "bsa": Calculator(
        "body surface area (Mosteller)", "BSA", formulas.body_surface_area,
        {"weight_kg": q.WEIGHT, "height_cm": q.HEIGHT},
        ("A patient weighs {weight_kg} and is {height_cm} tall.",
         "Before chemotherapy, a patient's height is {height_cm} and weight {weight_kg}."),
        "m²", 2, 0.01,
    ),
    "ideal_body_weight": Calculator(
        "ideal body weight (Devine)", "IBW", formulas.ideal_body_weight,
        {"height_in": q.HEIGHT_IN},
        ("A {sex} patient is {height_in} tall.",
         "Ventilator settings are chosen for a {sex} patient with a height of {height_in}."),
        "kg", 1, 0.01, needs_sex=True,
    ),
    "creatinine_clearance": Calculator(
        "creatinine clearance (Cockcroft-Gault)", "CrCl", formulas.creatinine_clearance,
        {"age_years": q.AGE, "weight_kg": q.WEIGHT, "creatinine_mg_dl": q.CREATININE},
        ("A {sex} patient, age {age_years}, weighs {weight_kg} and has a serum creatinine of {creatinine_mg_dl}.",
         "Serum creatinine is {creatinine_mg_dl} in a {sex} patient (age {age_years}, weight {weight_kg})."),
        "mL/min", 1, 0.02, (8, 200), needs_sex=True,
    ),
    "egfr": Calculator(
        "estimated GFR (CKD-EPI creatinine equation of 2021)", "eGFR", formulas.estimated_gfr,
        {"age_years": q.AGE, "creatinine_mg_dl": q.CREATININE},
        ("A {sex} patient, age {age_years}, has a serum creatinine of {creatinine_mg_dl}.",
         "Serum creatinine is {creatinine_mg_dl} in a {sex} patient (age {age_years})."),
        "mL/min/1.73 m²", 0, 0.02, needs_sex=True,
    ),
    "map": Calculator(
        "mean arterial pressure", "MAP", formulas.mean_arterial_pressure,
        {"systolic_mmhg": q.SYSTOLIC, "diastolic_mmhg": q.DIASTOLIC},
        ("Systolic pressure is {systolic_mmhg} and diastolic pressure is {diastolic_mmhg}.",
         "The cuff reads a systolic pressure of {systolic_mmhg} over a diastolic of {diastolic_mmhg}."),
        "mmHg", 0, consistent=_pulse_pressure_is_plausible,
    ),
    "anion_gap": Calculator(
        "anion gap (without potassium)", "AG", formulas.anion_gap,
        {"sodium_meq_l": q.SODIUM, "chloride_meq_l": q.CHLORIDE, "bicarbonate_meq_l": q.BICARBONATE},
        ("Sodium is {sodium_meq_l}, chloride {chloride_meq_l} and bicarbonate {bicarbonate_meq_l}.",
         "A basic metabolic panel shows bicarbonate {bicarbonate_meq_l}, sodium {sodium_meq_l} and "
         "chloride {chloride_meq_l}."),
        "mEq/L", 0, plausible=(3, 35),
    ),
    "corrected_anion_gap": Calculator(
        "albumin-corrected anion gap (normal albumin 4.0 g/dL, factor 2.5)", "AGc", formulas.corrected_anion_gap,
        {"sodium_meq_l": q.SODIUM, "chloride_meq_l": q.CHLORIDE, "bicarbonate_meq_l": q.BICARBONATE,
         "albumin_g_dl": q.ALBUMIN},
        ("Sodium is {sodium_meq_l}, chloride {chloride_meq_l}, bicarbonate {bicarbonate_meq_l} and "
         "albumin {albumin_g_dl}.",),
        "mEq/L", 1, plausible=(3, 40),
    ),
    "corrected_calcium": Calculator(
        "calcium corrected for albumin (normal albumin 4.0 g/dL, factor 0.8)", "Cac", formulas.corrected_calcium,
        {"calcium_mg_dl": q.CALCIUM, "albumin_g_dl": q.ALBUMIN},
        ("Total calcium is {calcium_mg_dl} and albumin {albumin_g_dl}.",
         "With an albumin of {albumin_g_dl}, the laboratory reports a total calcium of {calcium_mg_dl}."),
        "mg/dL", 1, 0.005, (7.0, 15.0),
    ),
    "corrected_sodium": Calculator(
        "sodium corrected for hyperglycemia (Katz, factor 1.6)", "Nac", formulas.corrected_sodium,
        {"sodium_meq_l": q.SODIUM, "glucose_mg_dl": q.HIGH_GLUCOSE},
        ("Sodium is {sodium_meq_l} and glucose {glucose_mg_dl}.",
         "A patient with hyperglycemia has a glucose of {glucose_mg_dl} and a sodium of {sodium_meq_l}."),
        "mEq/L", 1, 0.002, (118, 165),
    ),
    "corrected_sodium_hillier": Calculator(
        "sodium corrected for hyperglycemia (Hillier, factor 2.4)", "NacH", formulas.corrected_sodium_hillier,
        {"sodium_meq_l": q.SODIUM, "glucose_mg_dl": q.HIGH_GLUCOSE},
        ("Sodium is {sodium_meq_l} and glucose {glucose_mg_dl}.",),
        "mEq/L", 1, 0.002, (118, 165),
    ),
    "osmolality": Calculator(
        "serum osmolality (from sodium, glucose and urea nitrogen)", "Osm", formulas.serum_osmolality,
        {"sodium_meq_l": q.SODIUM, "glucose_mg_dl": q.GLUCOSE, "urea_nitrogen_mg_dl": q.UREA_NITROGEN},
        ("Sodium is {sodium_meq_l}, glucose {glucose_mg_dl} and blood urea nitrogen {urea_nitrogen_mg_dl}.",),
        "mOsm/kg", 0, 0.005,
    ),
    "fena": Calculator(
        "fractional excretion of sodium", "FENa", formulas.fractional_excretion_of_sodium,
        {"urine_sodium_meq_l": q.URINE_SODIUM, "sodium_meq_l": q.SODIUM,
         "urine_creatinine_mg_dl": q.URINE_CREATININE, "creatinine_mg_dl": q.CREATININE},
        ("Urine sodium is {urine_sodium_meq_l}, serum sodium {sodium_meq_l}, urine creatinine "
         "{urine_creatinine_mg_dl} and serum creatinine {creatinine_mg_dl}.",),
        "%", 2, 0.02, (0.05, 10),
    ),
    "qtc_bazett": Calculator(
        "corrected QT interval (Bazett)", "QTcB", formulas.qtc_bazett,
        {"qt_ms": q.QT, "heart_rate_bpm": q.HEART_RATE},
        ("The QT interval is {qt_ms} at a heart rate of {heart_rate_bpm}.",),
        "ms", 0, 0.005, (330, 600),
    ),
    "qtc_fridericia": Calculator(
        "corrected QT interval (Fridericia)", "QTcF", formulas.qtc_fridericia,
        {"qt_ms": q.QT, "heart_rate_bpm": q.HEART_RATE},
        ("The QT interval is {qt_ms} at a heart rate of {heart_rate_bpm}.",),
        "ms", 0, 0.005, (330, 600),
    ),
    "meld_na": Calculator(
        "MELD-Na score (OPTN, 2016)", "MELDNa", formulas.meld_na,
        {"creatinine_mg_dl": q.CREATININE, "bilirubin_mg_dl": q.BILIRUBIN, "inr": q.INR, "sodium_meq_l": q.SODIUM},
        ("A patient with cirrhosis, not on dialysis, has creatinine {creatinine_mg_dl}, total bilirubin "
         "{bilirubin_mg_dl}, an INR of {inr} and sodium {sodium_meq_l}.",),
        "points", 0,
    ),
    "aa_gradient": Calculator(
        "alveolar-arterial oxygen gradient at sea level (respiratory quotient 0.8)", "Aa",
        formulas.alveolar_arterial_gradient,
        {"oxygen_percent": q.OXYGEN, "pao2_mmhg": q.PAO2, "paco2_mmhg": q.PACO2},
        ("Breathing {oxygen_percent} oxygen, a patient has a PaO2 of {pao2_mmhg} and a PaCO2 of {paco2_mmhg}.",),
        "mmHg", 0, 0.01, (3, 350),
    ),
    "ldl": Calculator(
        "LDL cholesterol (Friedewald)", "LDL", formulas.ldl_cholesterol,
        {"total_mg_dl": q.TOTAL_CHOLESTEROL, "hdl_mg_dl": q.HDL, "triglycerides_mg_dl": q.TRIGLYCERIDES},
        ("Total cholesterol is {total_mg_dl}, HDL {hdl_mg_dl} and triglycerides {triglycerides_mg_dl}.",),
        "mg/dL", 0, 0.01, (30, 250),
    ),
    "dose_volume": Calculator(
        "volume of one dose", "Vol", formulas.dose_volume,
        {"weight_kg": q.WEIGHT, "dose_mg_kg": q.DOSE, "concentration_mg_ml": q.CONCENTRATION},
        ("A patient of {weight_kg} receives {dose_mg_kg} of a drug that comes as {concentration_mg_ml}.",),
        "mL", 1, 0.01, (0.5, 400),
    ),
    "infusion_rate": Calculator(
        "infusion rate", "Rate", formulas.infusion_rate,
        {"weight_kg": q.WEIGHT, "dose_ug_kg_min": q.INFUSED_DOSE, "concentration_mg_ml": q.INFUSED_CONCENTRATION},
        ("A patient of {weight_kg} receives {dose_ug_kg_min} of a vasopressor from a bag of {concentration_mg_ml}.",),
        "mL/h", 1, 0.01, (0.5, 300),
    ),
    "parkland": Calculator(
        "crystalloid volume of the first 24 hours (Parkland)", "Parkland", formulas.parkland_volume,
        {"weight_kg": q.WEIGHT, "burned_percent": q.BURNED},
        ("A patient of {weight_kg} has partial- and full-thickness burns of {burned_percent} of the body surface.",),
        "mL", 0, 0.005,
    ),
}  # fmt: skip
