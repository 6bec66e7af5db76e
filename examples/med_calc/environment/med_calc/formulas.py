"""Clinical formulas, each as published. Arguments and results are in conventional (US) units, as named.

For teaching and measuring models. Not for the care of patients.
"""

from __future__ import annotations

import math
from typing import Literal

Sex = Literal["female", "male"]

WATER_VAPOUR_MMHG = 47.0
SEA_LEVEL_MMHG = 760.0
RESPIRATORY_QUOTIENT = 0.8


def body_mass_index(weight_kg: float, height_cm: float) -> float:
    """kg/m². Keys A et al. Indices of relative weight and obesity. J Chronic Dis 1972;25:329-343."""
    return weight_kg / (height_cm / 100) ** 2


def body_surface_area(weight_kg: float, height_cm: float) -> float:
    """m². Mosteller RD. Simplified calculation of body-surface area. N Engl J Med 1987;317:1098."""
    return math.sqrt(weight_kg * height_cm / 3600)


def ideal_body_weight(height_in: float, sex: Sex) -> float:
    """kg, for 60 inches or more. Devine BJ. Gentamicin therapy. Drug Intell Clin Pharm 1974;8:650-655."""
    return (50.0 if sex == "male" else 45.5) + 2.3 * (height_in - 60)


def creatinine_clearance(age_years: float, weight_kg: float, creatinine_mg_dl: float, sex: Sex) -> float:
    """mL/min. Cockcroft DW, Gault MH. Nephron 1976;16:31-41."""
    clearance = (140 - age_years) * weight_kg / (72 * creatinine_mg_dl)
    return clearance * 0.85 if sex == "female" else clearance


def estimated_gfr(age_years: float, creatinine_mg_dl: float, sex: Sex) -> float:
    """mL/min/1.73 m², CKD-EPI creatinine equation of 2021. Inker LA et al. N Engl J Med 2021;385:1737-1749."""
    kappa, alpha, factor = (0.7, -0.241, 1.012) if sex == "female" else (0.9, -0.302, 1.0)
    ratio = creatinine_mg_dl / kappa
    return 142 * min(ratio, 1) ** alpha * max(ratio, 1) ** -1.200 * 0.9938**age_years * factor


def mean_arterial_pressure(systolic_mmhg: float, diastolic_mmhg: float) -> float:
    """mmHg, a third of the pulse pressure above diastolic. Meaney E et al. Heart 2000;84:64 (standard formula)."""
    return (systolic_mmhg + 2 * diastolic_mmhg) / 3


def anion_gap(sodium_meq_l: float, chloride_meq_l: float, bicarbonate_meq_l: float) -> float:
    """mEq/L, without potassium. Emmett M, Narins RG. Clinical use of the anion gap. Medicine 1977;56:38-54."""
    return sodium_meq_l - chloride_meq_l - bicarbonate_meq_l


def corrected_anion_gap(
    sodium_meq_l: float, chloride_meq_l: float, bicarbonate_meq_l: float, albumin_g_dl: float
) -> float:
    """mEq/L, 2.5 for each g/dL of albumin below 4.0. Slope: Figge J et al. Crit Care Med 1998;26:1807-1810."""
    return anion_gap(sodium_meq_l, chloride_meq_l, bicarbonate_meq_l) + 2.5 * (4.0 - albumin_g_dl)


def corrected_calcium(calcium_mg_dl: float, albumin_g_dl: float) -> float:
    """mg/dL. Payne RB et al. BMJ 1973;4:643-646.

    In conventional units, as usually taught: 0.8 mg/dL for each g/dL of albumin below 4.0.
    """
    return calcium_mg_dl + 0.8 * (4.0 - albumin_g_dl)


def corrected_sodium(sodium_meq_l: float, glucose_mg_dl: float) -> float:
    """mEq/L, 1.6 for each 100 mg/dL of glucose above 100. Katz MA. N Engl J Med 1973;289:843-844."""
    return sodium_meq_l + 1.6 * (glucose_mg_dl - 100) / 100


def corrected_sodium_hillier(sodium_meq_l: float, glucose_mg_dl: float) -> float:
    """mEq/L, 2.4 for each 100 mg/dL of glucose above 100. Hillier TA et al. Am J Med 1999;106:399-403."""
    return sodium_meq_l + 2.4 * (glucose_mg_dl - 100) / 100


def serum_osmolality(sodium_meq_l: float, glucose_mg_dl: float, urea_nitrogen_mg_dl: float) -> float:
    """mOsm/kg, calculated. Smithline N, Gardner KD. Gaps: anionic and osmolal. JAMA 1976;236:1594-1597."""
    return 2 * sodium_meq_l + glucose_mg_dl / 18 + urea_nitrogen_mg_dl / 2.8


def fractional_excretion_of_sodium(
    urine_sodium_meq_l: float, sodium_meq_l: float, urine_creatinine_mg_dl: float, creatinine_mg_dl: float
) -> float:
    """Percent. Espinel CH. The FENa test. JAMA 1976;236:579-581."""
    return 100 * urine_sodium_meq_l * creatinine_mg_dl / (sodium_meq_l * urine_creatinine_mg_dl)


def qtc_bazett(qt_ms: float, heart_rate_bpm: float) -> float:
    """ms, QT / √RR with RR in seconds. Bazett HC. Heart 1920;7:353-370."""
    return qt_ms / math.sqrt(60 / heart_rate_bpm)


def qtc_fridericia(qt_ms: float, heart_rate_bpm: float) -> float:
    """ms, QT / ∛RR with RR in seconds. Fridericia LS. Acta Med Scand 1920;53:469-486."""
    return qt_ms / math.cbrt(60 / heart_rate_bpm)


def meld_na(creatinine_mg_dl: float, bilirubin_mg_dl: float, inr: float, sodium_meq_l: float) -> float:
    """Points, 6 to 40. OPTN policy 9.1 as of 2016, after Kim WR et al. N Engl J Med 2008;359:1018-1026.

    Values below 1 count as 1, creatinine above 4 as 4, sodium as 125 to 137. The part without sodium is rounded to a
    whole number first (the policy's tenth of the logarithmic score, times ten); sodium counts above 11 points.
    """
    creatinine, bilirubin, ratio = (max(value, 1.0) for value in (creatinine_mg_dl, bilirubin_mg_dl, inr))
    score = 0.957 * math.log(min(creatinine, 4.0)) + 0.378 * math.log(bilirubin) + 1.120 * math.log(ratio) + 0.643
    meld = 10 * round_half_up(score, 1)
    if meld > 11:
        deficit = 137 - min(max(sodium_meq_l, 125), 137)
        meld += 1.32 * deficit - 0.033 * meld * deficit
    return min(round_half_up(meld, 0), 40.0)


def alveolar_arterial_gradient(oxygen_percent: float, pao2_mmhg: float, paco2_mmhg: float) -> float:
    """mmHg at sea level, respiratory quotient 0.8. Fenn WO et al. Am J Physiol 1946;146:637-653."""
    inspired = oxygen_percent / 100 * (SEA_LEVEL_MMHG - WATER_VAPOUR_MMHG)
    return inspired - paco2_mmhg / RESPIRATORY_QUOTIENT - pao2_mmhg


def ldl_cholesterol(total_mg_dl: float, hdl_mg_dl: float, triglycerides_mg_dl: float) -> float:
    """mg/dL, for triglycerides below 400. Friedewald WT et al. Clin Chem 1972;18:499-502."""
    return total_mg_dl - hdl_mg_dl - triglycerides_mg_dl / 5


def dose_volume(weight_kg: float, dose_mg_kg: float, concentration_mg_ml: float) -> float:
    """mL of one dose. Dimensional analysis, as in Ogden SJ, Fluharty LK. Calculation of Drug Dosages. Elsevier."""
    return weight_kg * dose_mg_kg / concentration_mg_ml


def infusion_rate(weight_kg: float, dose_ug_kg_min: float, concentration_mg_ml: float) -> float:
    """mL/h. Dimensional analysis, as in Ogden SJ, Fluharty LK. Calculation of Drug Dosages. Elsevier."""
    return dose_ug_kg_min * weight_kg * 60 / (1000 * concentration_mg_ml)


def parkland_volume(weight_kg: float, burned_percent: float) -> float:
    """mL in 24 hours, half of it in the first 8. Baxter CR, Shires T. Ann N Y Acad Sci 1968;150:874-894."""
    return 4 * weight_kg * burned_percent


def round_half_up(value: float, decimals: int) -> float:
    """Rounded as people do it: a tie goes away from zero, also where binary puts the value just below it."""
    scaled = abs(value) * 10**decimals
    return math.copysign(math.floor(scaled + 0.5 + 1e-9) / 10**decimals, value)
