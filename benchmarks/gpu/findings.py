"""What a part of the kit found: checks that pass or fail, and rows of figures. Also the part's command line."""

from __future__ import annotations

import argparse
import json
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Findings:
    """Filled by a part, and written after every entry: a part that is cut off keeps what it found."""

    file: Path
    device: str
    is_tiny: bool
    only: tuple[str, ...] = ()
    """Texts, one of which the name of a row must have. All rows without one."""
    checks: list[dict[str, Any]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, is_right: bool, detail: str) -> None:
        print(f"{'ok  ' if is_right else 'FAIL'} {name}: {detail}", flush=True)
        self.checks.append({"name": name, "ok": bool(is_right), "detail": detail})
        self._write()

    def attempt(self, name: str, test: Callable[[], tuple[bool, str]]) -> None:
        """Run a check. One that raises has failed, and the part goes on."""
        try:
            is_right, detail = test()
        except Exception as error:  # noqa: BLE001 - half an hour with a GPU must not end at the first mistake
            traceback.print_exc()
            is_right, detail = False, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        self.check(name, is_right, detail)

    def row(self, **figures: Any) -> None:
        print("  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        self.rows.append(figures)
        self._write()

    def fact(self, **facts: Any) -> None:
        print("  ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
        self.facts |= facts
        self._write()

    def _write(self) -> None:
        # The part may be killed at any moment, and half a file is none.
        scratch = self.file.with_name(f"{self.file.name}.new")
        scratch.write_text(json.dumps({"checks": self.checks, "rows": self.rows, "facts": self.facts}, indent=1))
        scratch.replace(self.file)


def findings_of_command_line(description: str | None) -> Findings:
    """The options that `kit.py` gives to every part. A part also runs by itself."""
    parser = argparse.ArgumentParser(description=(description or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, few steps: does everything run?")
    parser.add_argument("--only", nargs="+", default=(), help="rows whose name has one of these texts")
    parser.add_argument("--result", type=Path, default=Path("result.json"), help="where the findings go")
    args = parser.parse_args()
    return Findings(args.result, args.device, args.tiny, tuple(args.only))
