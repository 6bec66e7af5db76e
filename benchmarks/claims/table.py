"""Writes the table of what the benchmark pages claim, and on which machine each claim holds.

    uv run benchmarks/claims/table.py            # writes it into benchmarks/claims/README.md
    uv run benchmarks/claims/table.py --check    # exit code 1 if the page is not what the results say

The results: `benchmarks/claims/PAGE.json`, and `benchmarks/growth/results`. In the first, `source` is "page" if the raw
results are not in the repository, `quote` is what the page says, and `runs` is null where nobody noted it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
BENCHMARKS = HERE.parent
PAGE = HERE / "README.md"
GROWTH = BENCHMARKS / "growth" / "results"
BUSY_LOAD = 1.0
BEGIN, END = "<!-- claims: written by table.py -->", "<!-- end of claims -->"


class ClaimError(Exception):
    """A claim that its page does not make, or whose machine is not known. The message is one line."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    page: str
    """Folder in `benchmarks`."""
    claim: str
    value: float | None
    unit: str
    machine: str
    """Name in `machines.json`, or of the machine that a result carries."""
    versions: dict[str, str]
    date: str
    command: str
    source: str
    """File of the raw results; "page", or an issue, if they are not in the repository."""
    runs: int | None = None
    """None if nobody noted it. The value is their median."""
    low: float | None = None
    high: float | None = None
    ratio: float | None = None
    to: str | None = None
    """What the ratio is to."""
    quote: str | None = None
    """What the page says, letter by letter."""


def read_claims(folder: Path = HERE, growth: Path = GROWTH) -> tuple[list[Claim], dict[str, str]]:
    """All claims, and the machines by name, in words. Raises ClaimError."""
    machines = {name: in_words(facts) for name, facts in json.loads((folder / "machines.json").read_text()).items()}
    claims: list[Claim] = []
    for file in sorted(folder.glob("*.json")):
        if file.name != "machines.json":
            claims += (_claim(file, each) for each in json.loads(file.read_text()))
    for file in sorted(growth.glob("*.json")):
        claims.append(_claim_of_growth(json.loads(file.read_text()), machines))
    for each in claims:
        if each.machine not in machines:
            raise ClaimError(f"{each.page}: {each.claim!r} names no machine of machines.json: {each.machine!r}")
        page = (BENCHMARKS / each.page / "README.md").read_text()
        if each.quote is not None and each.quote not in page:
            correct = f"correct benchmarks/claims/{each.page}.json"
            raise ClaimError(f"benchmarks/{each.page}/README.md no longer says {each.quote!r}: {correct}")
    return claims, machines


def in_words(facts: dict[str, Any]) -> str:
    features, memory_gib = facts["features"], facts["memory_gib"]
    special = [name.upper().replace("_", " ") for name in features or () if name.startswith(("avx512", "amx"))]
    words = [facts["cpu"], f"{facts['cores']} cores"]
    words.append("instruction sets not recorded" if features is None else ", ".join(special) or "no AVX-512 or AMX")
    words.append("memory not recorded" if memory_gib is None else f"{memory_gib} GiB")
    return "; ".join(words)


def rendered(claims: Sequence[Claim], machines: dict[str, str]) -> str:
    used = [name for name in machines if any(each.machine == name for each in claims)]
    letters = {name: chr(ord("A") + number) for number, name in enumerate(used)}
    lines = [
        "| machine | is |",
        "|---|---|",
        *(f"| {letters[name]} | {machines[name]} |" for name in used),
        "",
        "| page | claim | value | against | machine | versions | runs | date | results |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for each in sorted(claims, key=lambda claim: claim.page):
        against = "" if each.to is None else each.to if each.ratio is None else f"{_number(each.ratio)} x {each.to}"
        cells = [
            f"[{each.page}](../{each.page}/README.md)",
            each.claim,
            _value(each),
            against,
            letters[each.machine],
            ", ".join(f"{name} {version}" for name, version in each.versions.items() if name != "python"),
            {None: "not recorded", 1: "**once**"}.get(each.runs, str(each.runs)),
            each.date,
            {"page": "page only"}.get(each.source, each.source),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def with_table(page: str, table: str) -> str:
    """The page's text with the table between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _claim(file: Path, facts: dict[str, Any]) -> Claim:
    missing = {"claim", "unit", "machine", "versions", "date", "command", "source", "runs"} - set(facts)
    unknown = set(facts) - {field.name for field in fields(Claim)}
    if missing or unknown:
        raise ClaimError(f"{file.name}: {facts.get('claim')!r}: missing {sorted(missing)}, unknown {sorted(unknown)}")
    return Claim(page=file.stem, **facts)


def _claim_of_growth(result: dict[str, Any], machines: dict[str, str]) -> Claim:
    words = in_words(result["machine"]) + ("; with other work" if result["load"] > BUSY_LOAD else "")
    machines.setdefault(words, words)
    last = result["points"][-1]
    return Claim(
        page="growth",
        claim=f"{result['cost']}: growth of CPU time up to {last['size']:,} {result['of']}",
        value=result["slope"],
        unit="exponent",
        runs=last["runs"],
        machine=words,
        versions=result["versions"],
        date=result["date"],
        command=result["command"],
        source=f"growth/results/{result['cost']}.json",
        to="1 is linear",
    )


def _value(claim: Claim) -> str:
    if claim.value is None:
        return ""
    span = [f"{_number(end)}" for end in (claim.low, claim.high) if end is not None]
    text = f"{_number(claim.value)} {claim.unit}"
    if len(span) == 2:
        return f"{text} ({' to '.join(span)})"
    return text if not span else f"{text} ({'at least' if claim.low is not None else 'at most'} {span[0]})"


def _number(value: float) -> str:
    return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def problems() -> Iterator[str]:
    """What is wrong with the page: one line each."""
    try:
        if with_table(PAGE.read_text(), rendered(*read_claims())) != PAGE.read_text():
            yield f"{PAGE.relative_to(BENCHMARKS.parent)} is not what the results say: run benchmarks/claims/table.py"
    except ClaimError as error:
        yield str(error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    args = parser.parse_args()
    if not args.check:
        try:
            PAGE.write_text(with_table(PAGE.read_text(), rendered(*read_claims())))
        except ClaimError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    found = list(problems())
    for line in found:
        print(f"error: {line}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
