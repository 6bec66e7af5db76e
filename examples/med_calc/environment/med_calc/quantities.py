"""What is measured: names, units with their conversions, and realistic ranges."""

from __future__ import annotations

import random
from dataclasses import dataclass

from med_calc.formulas import round_half_up


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: how many of it make one conventional unit, and how values in it are written."""

    name: str
    per_conventional: float = 1.0
    decimals: int = 0
    step: float | None = None
    """Values are multiples of it, where readings are coarser than their last decimal."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """Something measured. Its range is in the first of its units, the conventional one."""

    name: str
    short: str
    """In the compact style; ASCII."""
    low: float
    high: float
    units: tuple[Unit, ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """A value as a question shows it."""

    quantity: Quantity
    unit: Unit
    shown: float

    @property
    def conventional(self) -> float:
        """The shown value in conventional units. Formulas get this one, so rounding for display costs nothing."""
        return self.shown / self.unit.per_conventional

    @property
    def digits(self) -> str:
        return f"{self.shown:.{self.unit.decimals}f}"

    def __str__(self) -> str:
        return self.digits + ("%" if self.unit.name == "%" else f" {self.unit.name}" if self.unit.name else "")


def measure(quantity: Quantity, unit: Unit, rng: random.Random) -> Measurement:
    """A random value, uniform over the quantity's range and rounded as the unit is written."""
    value = rng.uniform(quantity.low, quantity.high) * unit.per_conventional
    shown = unit.step * round(value / unit.step) if unit.step else round_half_up(value, unit.decimals)
    return Measurement(quantity, unit, shown)


MEQ_L = (Unit("mEq/L"), Unit("mmol/L"))
MMHG = (Unit("mmHg"), Unit("kPa", 0.133322, 1))
ALBUMIN_UNITS = (Unit("g/dL", 1, 1), Unit("g/L", 10))

AGE = Quantity("age", "age", 18, 90, (Unit("years"),))
WEIGHT = Quantity("weight", "wt", 45, 120, (Unit("kg"), Unit("lb", 2.20462)))
HEIGHT = Quantity("height", "ht", 150, 195, (Unit("cm"), Unit("m", 0.01, 2), Unit("in", 1 / 2.54)))
HEIGHT_IN = Quantity("height", "ht", 60, 76, (Unit("in"), Unit("cm", 2.54)))
SODIUM = Quantity("sodium", "Na", 124, 152, MEQ_L)
CHLORIDE = Quantity("chloride", "Cl", 92, 114, MEQ_L)
BICARBONATE = Quantity("bicarbonate", "HCO3", 10, 32, MEQ_L)
ALBUMIN = Quantity("albumin", "alb", 1.5, 4.5, ALBUMIN_UNITS)
CALCIUM = Quantity("total calcium", "Ca", 7.0, 13.0, (Unit("mg/dL", 1, 1), Unit("mmol/L", 0.2495, 2)))
CREATININE = Quantity("serum creatinine", "Cr", 0.5, 4.0, (Unit("mg/dL", 1, 1), Unit("µmol/L", 88.4)))
URINE_CREATININE = Quantity("urine creatinine", "UCr", 20, 200, (Unit("mg/dL"), Unit("mmol/L", 0.0884, 1)))
URINE_SODIUM = Quantity("urine sodium", "UNa", 5, 100, MEQ_L)
BILIRUBIN = Quantity("total bilirubin", "bili", 0.4, 20.0, (Unit("mg/dL", 1, 1), Unit("µmol/L", 17.1)))
INR = Quantity("INR", "INR", 0.9, 3.5, (Unit("", 1, 1),))
GLUCOSE = Quantity("glucose", "glu", 70, 400, (Unit("mg/dL"), Unit("mmol/L", 1 / 18.016, 1)))
HIGH_GLUCOSE = Quantity("glucose", "glu", 200, 900, GLUCOSE.units)
UREA_NITROGEN = Quantity("blood urea nitrogen", "BUN", 6, 90, (Unit("mg/dL"), Unit("mmol/L", 0.357, 1)))
# Guidelines have blood pressure by cuff read to the nearest 2 mmHg.
SYSTOLIC = Quantity("systolic pressure", "SBP", 90, 180, (Unit("mmHg", step=2),))
DIASTOLIC = Quantity("diastolic pressure", "DBP", 50, 110, (Unit("mmHg", step=2),))
QT = Quantity("QT interval", "QT", 320, 500, (Unit("ms"), Unit("s", 0.001, 3)))
HEART_RATE = Quantity("heart rate", "HR", 45, 130, (Unit("beats/min"),))
OXYGEN = Quantity("inspired oxygen fraction", "FiO2", 21, 60, (Unit("%"),))
PAO2 = Quantity("PaO2", "PaO2", 50, 110, MMHG)
PACO2 = Quantity("PaCO2", "PaCO2", 25, 60, MMHG)
CHOLESTEROL_UNITS = (Unit("mg/dL"), Unit("mmol/L", 1 / 38.67, 2))
TOTAL_CHOLESTEROL = Quantity("total cholesterol", "TC", 130, 320, CHOLESTEROL_UNITS)
HDL = Quantity("HDL cholesterol", "HDL", 25, 90, CHOLESTEROL_UNITS)
TRIGLYCERIDES = Quantity("triglycerides", "TG", 50, 390, (Unit("mg/dL"), Unit("mmol/L", 1 / 88.57, 2)))
DOSE = Quantity("dose", "dose", 1, 30, (Unit("mg/kg"),))
CONCENTRATION = Quantity("concentration", "conc", 5, 50, (Unit("mg/mL", step=5),))
INFUSED_DOSE = Quantity("dose", "dose", 1, 20, (Unit("µg/kg/min"),))
INFUSED_CONCENTRATION = Quantity("concentration", "conc", 0.4, 4.0, (Unit("mg/mL", 1, 1),))
BURNED = Quantity("burned body surface", "TBSA", 15, 80, (Unit("%"),))
