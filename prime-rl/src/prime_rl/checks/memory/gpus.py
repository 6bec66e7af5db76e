"""Memory of GPUs: of the one that the user names, or of the first that `nvidia-smi` finds."""

from __future__ import annotations

import difflib
import math
import re
import subprocess
from dataclasses import dataclass

from prime_rl.utils.errors import UserError

_GIB = 2**30
_MIB = 2**20
_TIMEOUT_S = 1.5

MEMORY_GIB = {
    "B200": 178.3,
    "H200": 139.8,
    "H100": 79.1,
    "H100-NVL": 93.1,
    "H20": 95.0,
    "GH200": 94.5,
    "A100": 79.2,
    "A100-80": 79.2,
    "A100-40": 39.4,
    "L40S": 44.4,
    "L40": 44.4,
    "L4": 22.0,
    "A40": 44.4,
    "A10": 22.0,
    "A10G": 22.0,
    "RTX-A6000": 47.5,
    "RTX-6000-ADA": 47.4,
    "RTX-PRO-6000": 94.9,
    "RTX-5090": 31.3,
    "RTX-4090": 23.5,
    "RTX-3090": 23.6,
    "V100-32": 31.7,
    "V100-16": 15.8,
    "T4": 14.6,
}
"""Total that CUDA reports, in GiB, which is less than the name says."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU, by its name and its memory."""

    name: str
    total_bytes: int
    is_here: bool = False
    """Found on this machine."""


def parse_gpu(text: str) -> Gpu:
    """A GPU from a name such as `H100` or `rtx 4090`, or from a number of GiB.

    Raises:
        UserError: the name is not in the table, or the number is not positive.
    """
    if number := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:gi?b?)?", text.strip(), re.IGNORECASE):
        gib = float(number[1])
        if not 0 < gib < 1e6 or not math.isfinite(gib):
            raise UserError(f"--gpu {text}: no GPU has {number[1]} GiB")
        return Gpu(f"a GPU of {gib:g} GiB", int(gib * _GIB))
    known = {_plain(name): name for name in MEMORY_GIB}
    plain = _plain(text)
    for candidate in (plain, f"RTX{plain}", plain.removesuffix("GB")):
        if candidate in known:
            name = known[candidate]
            return Gpu(name, int(MEMORY_GIB[name] * _GIB))
    near = difflib.get_close_matches(plain, known, 3, 0.4)
    listed = ", ".join(known[name] for name in near) or ", ".join(MEMORY_GIB)
    raise UserError(f"--gpu {text}: not in the table; nearest: {listed}; or give its memory in GiB, as in --gpu 80")


def find_gpu() -> Gpu | None:
    """The first GPU that `nvidia-smi` lists; None without one, or if it does not answer in time."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    name, _, mebibytes = answer.stdout.partition("\n")[0].rpartition(",")
    return Gpu(name.strip(), int(mebibytes) * _MIB, is_here=True) if mebibytes.strip().isdigit() else None


def _plain(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB`, `a100 80` and `A100-80` are written in many ways."""
    return re.sub(r"NVIDIA|GEFORCE|[^A-Z0-9]", "", name.upper())
