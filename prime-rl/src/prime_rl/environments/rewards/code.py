"""Rewards for code: MBPP, HumanEval, APPS. Programs run in the sandbox.

Tests run in another process of the sandbox, and call the functions of the program through a connection. So a program
never sees an expected value.
"""

from __future__ import annotations

import ast
import functools
import json
import keyword
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.rewards.text import THINKING_TAGS, without_thinking
from prime_rl.environments.sandbox.layers import ProgramLimits
from prime_rl.environments.sandbox.sandbox import Sandbox

_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
"""A fenced block. An unclosed one ends with the text."""
_PYTHON = ("python", "py", "python3")


def program_in(completion: str) -> str:
    """The program in a completion: all Python blocks, else all other blocks, else the whole text; up to `[DONE]`."""
    # `without_thinking` strips the text, and HumanEval's completion may be an indented body.
    text = without_thinking(completion) if any(f"{tag}>" in completion for tag in THINKING_TAGS) else completion
    blocks = [(name.lower(), body) for name, body in _FENCE.findall(text)]
    chosen = [body for name, body in blocks if name in _PYTHON] or [body for name, body in blocks if not name]
    source = "\n".join(chosen) if chosen else text if not blocks else "\n".join(body for _, body in blocks)
    return source.partition("[DONE]")[0].removeprefix("[BEGIN]").strip("\n")


def completed(prompt: str, completion: str, entry_point: str) -> str:
    """Complete a prompt that ends in a signature and docstring. The completion is the whole function or its body."""
    source = program_in(completion)
    if re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}\b", source, re.MULTILINE):
        return f"{prompt}\n\n{source}\n"
    return f"{prompt.rstrip()}\n{_body(source)}\n"


def _body(source: str) -> str:
    """The body of a function, indented, up to the next statement at the left margin."""
    lines = source.splitlines()
    if lines and lines[0].strip() and not lines[0][0].isspace():
        indented = all(not line.strip() or line[0].isspace() for line in lines[1:])
        lines = [f"    {lines[0]}", *lines[1:]] if indented and len(lines) > 1 else [f"    {line}" for line in lines]
    kept: list[str] = []
    for line in lines:
        if line.strip() and not line[0].isspace() and not line.startswith("#"):
            break
        kept.append(line)
    return "\n".join(kept)


def is_python(source: str) -> bool:
    """Whether it compiles."""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


APPS_TIME_S = 3.0
"""Time limit of one case of APPS."""
APPS_TOTAL_S = 60.0
"""Time after which no further case of APPS starts. The others count as failed: only programs that are mostly slow get
there, and a call must end before its own limit."""
_MATCHES = """
def _matches(found, wanted):
    if isinstance(found, tuple):
        found = list(found)
    if found == wanted or (isinstance(wanted, list) and len(wanted) == 1 and _matches(found, wanted[0])):
        return True
    if isinstance(found, (int, float)) and isinstance(wanted, (int, float)):
        return abs(found - wanted) <= 1e-6
    if isinstance(found, list) and isinstance(wanted, list) and len(found) == len(wanted):
        if all(_matches(one, other) for one, other in zip(found, wanted)):
            return True
        try:
            return sorted(found) == sorted(wanted)
        except TypeError:
            return False
    return False

def _target():
    try:
        return getattr(Solution(), _NAME)
    except Exception:
        return _FUNCTION
"""


@functools.cache
def _sandbox(layer: str, limits: ProgramLimits) -> Sandbox:
    """One sandbox per setting, kept for the life of this worker: a start takes longer than most programs run."""
    return Sandbox(layer, limits)  # type: ignore[arg-type]


def sandbox_of(settings: Mapping[str, Any] | None) -> Sandbox:
    """The sandbox of a reward's `sandbox` argument: `layer`, and the fields of `Limits`."""
    own = dict(settings or {})
    layer = str(own.pop("layer", "auto"))
    return _sandbox(layer, ProgramLimits(**own))


def note(args: Mapping[str, Any]) -> str:
    """Describe the layers of the sandbox. The pool logs it once."""
    return f"code runs in a sandbox: {sandbox_of(args.get('sandbox')).describe()}"


def mbpp(
    completion_text: str,
    test_list: Any,
    test_setup_code: str = "",
    test_imports: Sequence[str] = (),
    sandbox: Mapping[str, Any] | None = None,
) -> float:
    """1 if all of `test_list`'s asserts hold for the program in the completion, else 0."""
    tests = json.loads(test_list) if isinstance(test_list, str) else list(test_list)
    setup = "\n".join([*(test_imports or ()), test_setup_code or ""])
    return float(sandbox_of(sandbox).check(program_in(completion_text), tests, setup).all_passed)


def humaneval(
    completion_text: str,
    test: str,
    entry_point: str,
    prompt_code: str = "",
    info: Any = None,
    sandbox: Mapping[str, Any] | None = None,
) -> float:
    """1 if `check(entry_point)` of the column `test` passes, else 0.

    The completion is a body that follows `prompt_code` (unset: the row's own `prompt`), or the whole function.
    Other functions of the prompt that a test uses are the prompt's, not the completion's.
    """
    _refuse_no_name(entry_point)
    columns = json.loads(info) if isinstance(info, str) and info else info or {}
    prompt_code = prompt_code or str(columns.get("prompt") or "")
    source = completed(prompt_code, completion_text, entry_point)
    if not is_python(source):
        return 0.0
    tests = [test, "check(candidate)"]
    verdict = sandbox_of(sandbox).check(source, tests, prompt_code, [entry_point], {"candidate": entry_point})
    return float(verdict.all_passed)


def apps(
    completion_text: str,
    input_output: Any,
    fn_name: str | None = None,
    max_cases: int | None = None,
    total_time_s: float = APPS_TOTAL_S,
    sandbox: Mapping[str, Any] | None = None,
) -> float:
    """Share of the cases that the program in the completion passes, by its output or by a function's results.

    `input_output` has `inputs` and `outputs`, and `fn_name` for a function or a method of `Solution`. Outputs are
    compared word by word; results with a tolerance of 1e-6, or as sorted lists. Each case has 3 s, all together
    `total_time_s`; cases that it leaves no time for count as failed.
    """
    cases = json.loads(input_output) if isinstance(input_output, str) else dict(input_output)
    pairs = list(zip(cases["inputs"], cases["outputs"], strict=True))[:max_cases]
    name = fn_name or cases.get("fn_name")
    source, box = program_in(completion_text), sandbox_of(sandbox)
    if not pairs or not is_python(source):
        return 0.0
    passed, last_start_s = 0, time.monotonic() + total_time_s
    for given, wanted in pairs:
        if time.monotonic() > last_start_s:
            break
        passed += _called(box, source, name, given, wanted) if name else _printed(box, source, given, wanted)
    return passed / len(pairs)


def _printed(box: Sandbox, source: str, given: Any, wanted: Any) -> bool:
    ran = box.run(source, _text(given), time_s=APPS_TIME_S)
    return ran.ended == "exit" and ran.code == 0 and ran.output.split() == _text(wanted).split()


def _called(box: Sandbox, source: str, name: str, given: Any, wanted: Any) -> bool:
    _refuse_no_name(name)
    arguments = list(given) if isinstance(given, list | tuple) else [given]
    setup = f"{_MATCHES}\n_NAME = {name!r}\n"
    test = f"_FUNCTION = {name}\nassert _matches(_target()(*{arguments!r}), {wanted!r})"
    return box.check(source, [test], setup, ["Solution", name], time_s=APPS_TIME_S).all_passed


def _text(value: Any) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _refuse_no_name(name: str) -> None:
    if not name.isidentifier() or keyword.iskeyword(name):
        raise RewardFault(f"{name!r} is not the name of a function")
