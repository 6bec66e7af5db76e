"""Asks a Ray cluster whether it could hold a run: `python -m … ADDRESS '[4, 4]' cpu|cuda|auto`.

Exit code 1: it could not. A process of its own, because connecting starts threads and loads Ray.
"""

from __future__ import annotations

import json
import sys

from medarc_rl.backends.ray.agents import bundles_for, shortage
from medarc_rl.backends.ray.connecting import connected
from medarc_rl.errors import MedarcError


def main() -> int:
    address, gpus, device = sys.argv[1:]
    try:
        with connected(address):
            import ray

            fault = shortage(bundles_for(json.loads(gpus), device), ray.nodes())
    except MedarcError as error:
        fault = str(error)
    if fault is not None:
        sys.stderr.write(f"error: {fault}\n")
    return 0 if fault is None else 1


if __name__ == "__main__":
    raise SystemExit(main())
