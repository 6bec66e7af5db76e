"""The tasks of `chart.py`: a question about a bed, and the diagnosis that only the tool knows."""

from __future__ import annotations

import random
import string

DIAGNOSES = (
    "asthma",
    "anemia",
    "colic",
    "cough",
    "croup",
    "fever",
    "gout",
    "measles",
    "mumps",
    "rash",
    "sepsis",
    "ulcer",
)


def tasks() -> list[dict[str, str]]:
    """Each bed with each diagnosis, in a fixed order."""
    rows = [
        {"question": f"bed {bed}", "bed": bed, "diagnosis": diagnosis}
        for bed in string.ascii_lowercase
        for diagnosis in DIAGNOSES
    ]
    random.Random(7).shuffle(rows)
    return rows
