"""Measures how far a judge agrees with a person's verdicts.

`python -m prime_rl.environments.judging.agreement CASES --model MODEL --base-url URL [--api-key-var NAME]`
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from prime_rl.environments.judging.rubric import MAX_TOKENS, Case, RubricFault, RubricJudge, read_cases, score
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE, client_key, is_loopback
from prime_rl.utils.errors import one_line
from prime_rl.utils.signals import start_program

_FAIR = 0.4
"""Below this value of Cohen's kappa, Landis and Koch (1977) call an agreement fair or slight."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Verdicts of a judge and of a person on the same criteria."""

    pairs: tuple[tuple[bool, bool | None], ...]
    """Verdicts of person and judge. None: the judge said neither yes nor no, which counts as no."""
    score_errors: tuple[float, ...]
    """Difference of the two scores of each answer."""

    @property
    def accuracy(self) -> float:
        return sum(person == bool(judge) for person, judge in self.pairs) / len(self.pairs)

    @property
    def baseline(self) -> float:
        """Accuracy of a judge that always gives the person's most common verdict."""
        share = sum(person for person, _ in self.pairs) / len(self.pairs)
        return max(share, 1 - share)

    @property
    def kappa(self) -> float:
        """Cohen (1960): (observed - expected) / (1 - expected) agreement. 0 is chance; 0 too where neither varies."""
        count = len(self.pairs)
        person = sum(each for each, _ in self.pairs) / count
        judge = sum(bool(each) for _, each in self.pairs) / count
        expected = person * judge + (1 - person) * (1 - judge)
        return 0.0 if expected == 1 else (self.accuracy - expected) / (1 - expected)

    @property
    def unclear(self) -> float:
        return sum(judge is None for _, judge in self.pairs) / len(self.pairs)

    @property
    def mean_score_error(self) -> float:
        return sum(self.score_errors) / len(self.score_errors)

    def count(self, person: bool, judge: bool) -> int:
        return sum(each == (person, judge) for each in ((one, bool(other)) for one, other in self.pairs))

    def lines(self) -> list[str]:
        return [
            f"{len(self.pairs)} verdicts on {len(self.score_errors)} answers",
            f"accuracy {self.accuracy:.2f} (always the same verdict: {self.baseline:.2f})",
            f"Cohen's kappa {self.kappa:.2f}" + ("" if self.kappa >= _FAIR else ": too little to train on"),
            f"no clear verdict {self.unclear:.2f}",
            f"mean error of the score {self.mean_score_error:.2f}",
            "person \\ judge    yes    no",
            f"yes            {self.count(True, True):6} {self.count(True, False):5}",
            f"no             {self.count(False, True):6} {self.count(False, False):5}",
        ]


async def measure(judge: RubricJudge, cases: Sequence[Case]) -> Agreement:
    """Ask the judge about every graded answer. Raises RubricFault if there is none."""
    graded = [(case, answer) for case in cases for answer in case.graded]
    if not graded:
        raise RubricFault("no case has graded answers: add the key graded, a list of {answer, met}, to the cases")
    verdicts = await asyncio.gather(*(judge.met(case.prompt, answer.text, case.rubric) for case, answer in graded))
    pairs: list[tuple[bool, bool | None]] = []
    errors: list[float] = []
    for (case, answer), said in zip(graded, verdicts, strict=True):
        pairs += zip(answer.met, said, strict=True)
        errors.append(abs(score(case.rubric, answer.met) - score(case.rubric, said)))
    return Agreement(tuple(pairs), tuple(errors))


async def _measured(options: argparse.Namespace) -> Agreement:
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    key = client_key(options.base_url, options.api_key_var) or "EMPTY"
    # A proxy, which the environment may name, cannot reach a judge on this machine.
    http = DefaultAsyncHttpxClient(trust_env=not is_loopback(urlsplit(options.base_url).hostname or ""))
    async with AsyncOpenAI(base_url=options.base_url, api_key=key, http_client=http) as client:
        judge = RubricJudge(client, options.model, {"temperature": 0.0}, options.max_tokens, options.max_concurrent)
        return await measure(judge, read_cases(options.cases))


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{one_line(text)!r} is not a whole number from 1 on")
    return int(text)


def main() -> None:
    """Print the agreement. Exit codes: 0 measured, 1 the judge does not answer, 2 bad file."""
    start_program()
    parser = argparse.ArgumentParser(prog="agreement", description=__doc__)
    parser.add_argument("cases", type=Path, help="JSON lines in HealthBench's format, with graded answers")
    parser.add_argument("--model", required=True, help="the judge, under the name that its server knows")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="an OpenAI-compatible server")
    parser.add_argument("--api-key-var", default=ENGINE_KEY_VARIABLE, help="environment variable with its key")
    parser.add_argument(
        "--max-tokens", type=_positive, default=MAX_TOKENS, help="most tokens of a verdict (default: 8)"
    )
    parser.add_argument("--max-concurrent", type=_positive, default=32, help="requests at once (default: 32)")
    parser.add_argument("--json", action="store_true", help="print numbers as JSON")
    options = parser.parse_args()
    from openai import OpenAIError

    try:
        found = asyncio.run(_measured(options))
    except RubricFault as fault:
        sys.stderr.write(f"error: {one_line(str(fault))}\n")
        raise SystemExit(2) from fault
    except OpenAIError as error:
        sys.stderr.write(f"error: {one_line(f'{options.base_url}: {error}')}\n")
        raise SystemExit(1) from error
    names = ("accuracy", "baseline", "kappa", "unclear", "mean_score_error")
    text = json.dumps({name: getattr(found, name) for name in names}) if options.json else "\n".join(found.lines())
    sys.stdout.write(f"{text}{os.linesep}")


if __name__ == "__main__":
    main()
