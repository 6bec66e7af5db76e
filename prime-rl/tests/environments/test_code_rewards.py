"""MBPP, HumanEval and APPS: right programs pass in the sandbox, wrong and hostile ones do not."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from prime_rl.environments.rewards.building import build
from prime_rl.environments.rewards.code import apps, completed, humaneval, mbpp, program_in, sandbox_of
from prime_rl.environments.rewards.pool import RewardPool
from prime_rl.environments.rewards.registry import RewardFault
from prime_rl.environments.sandbox.layers import SandboxFault
from prime_rl.environments.sandbox.sandbox import Sandbox

BOX = {"time_s": 300}
PROMPT = '''from typing import List

def encode(text: str) -> str:
    return text[::-1]

def decode(text: str) -> str:
    """Undo encode.
    >>> decode("ab")
    """
'''
CHECK = "def check(candidate):\n    for word in ('abc', 'x', ''):\n        assert candidate(encode(word)) == word\n"


@pytest.fixture(scope="module", autouse=True)
def sandbox() -> Iterator[None]:
    try:
        sandbox_of(BOX)
    except SandboxFault as error:
        pytest.skip(str(error))
    yield
    sandbox_of(BOX).close()


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("```python\ndef double(x):\n    return 2 * x\n```", 1),
        ("def double(x):\n    return x * 2\n[DONE]\nIt doubles.", 1),
        ("Two parts:\n```python\nTWO = 2\n```\nand\n```py\ndef double(x):\n    return TWO * x\n```", 1),
        ("```python\ndef double(x):\n    return 2 * x", 1),
        ("<think>```python\ndef double(x): return 0\n```</think>```\ndef double(x): return 2 * x\n```", 1),
        ("```python\ndef double(x):\n    return x\n```", 0),
        ("```python\nimport sys\nsys.exit(0)\n```", 0),
        ("I cannot.", 0),
        ("", 0),
    ],
)
def test_mbpp_runs_all_asserts(completion: str, value: float) -> None:
    assert mbpp(completion, ["assert double(2) == 4", "assert double(-1) == -2"], sandbox=BOX) == value


def test_mbpp_setup_builds_on_the_programs_classes() -> None:
    program = (
        "class Node:\n    left = None\n\ndef depth(node):\n    return 0 if node is None else 1 + depth(node.left)\n"
    )
    setup = "root = Node()\nroot.left = Node()"
    assert mbpp(program, json.dumps(["assert depth(root) == 2"]), test_setup_code=setup, sandbox=BOX) == 1


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ("    return text[::-1]\n\nprint(decode('x'))\n", 1),
        ("return text[::-1]", 1),
        ("```python\ndef decode(text: str) -> str:\n    return encode(text)\n```", 1),
        ("```python\nclass A:\n    turn = staticmethod(encode)\n\ndef decode(text):\n    return A.turn(text)\n```", 1),
        ("    return text", 0),
        ("```python\ndef encode(text):\n    return text\ndef decode(text):\n    return text\n```", 0),
        ("    return text[::-1", 0),
    ],
)  # fmt: skip
def test_humaneval_checks_the_function_with_the_prompts_helpers(completion: str, value: float) -> None:
    assert humaneval(completion, CHECK, "decode", prompt_code=PROMPT, sandbox=BOX) == value
    assert humaneval(completion, CHECK, "decode", info={"prompt": PROMPT}, sandbox=BOX) == value


def test_apps_counts_cases_by_output() -> None:
    cases = json.dumps({"inputs": ["1 2\n", ["3", "4"], "5 5\n", "1 1"], "outputs": ["3\n", ["7"], "10 \n", "9"]})
    program = "```python\nimport sys\nprint(sum(map(int, sys.stdin.read().split())))\n```"
    assert apps(program, cases, sandbox=BOX) == 0.75
    assert apps(program, cases, max_cases=2, sandbox=BOX) == 1
    assert apps(program + "\n```python\nsys.exit(1)\n```", cases, sandbox=BOX) == 0
    assert apps("```python\nprint(3\n```", cases, sandbox=BOX) == 0


def test_apps_gives_a_share_in_any_order_of_the_cases() -> None:
    sums = [("1 2\n", "3\n"), ("3 4\n", "7\n"), ("5 5\n", "10\n"), ("0 0\n", "0\n"), ("0 0\n", "0\n"), ("0 0\n", "0\n")]
    for ordered in (sums, sums[::-1]):
        cases = {"inputs": [given for given, _ in ordered], "outputs": [wanted for _, wanted in ordered]}
        assert apps("print(0)", cases, sandbox=BOX) == 0.5
    assert apps("print(0)", cases, total_time_s=-1, sandbox=BOX) == 0  # no time for any


def test_apps_calls_functions_and_methods() -> None:
    cases = {"fn_name": "half", "inputs": [[1], [3], [[2, 1]]], "outputs": [0.5, [1.5], [[1, 2]]]}
    function = "```python\ndef half(x):\n    return x if isinstance(x, list) else x / 2\n```"
    method = (
        "class Solution:\n    def half(self, x):\n        return tuple(x) if isinstance(x, list) else x / 2 + 1e-9\n"
    )
    assert apps(function, cases, sandbox=BOX) == 1
    assert apps(method, cases, sandbox=BOX) == 1
    assert apps("```python\ndef half(x):\n    print('all passed')\n```", cases, sandbox=BOX) == 0


def test_the_sandbox_is_named_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    pool = RewardPool(1)
    try:
        chosen = {"fn": "mbpp", "args": {"sandbox": {"layer": "firejail"}}}
        with pytest.raises(RewardFault, match=r"reward 'mbpp': .*unknown layer 'firejail'"):
            build([chosen], pool=pool)
        with caplog.at_level("INFO"):
            build(["mbpp"], pool=pool)
            build(["apps"], pool=pool)
    finally:
        pool.close()
    assert [each for each in caplog.messages if "sandbox" in each] == [f"code runs in a sandbox: {described()}"]


def described() -> str:
    sandbox = Sandbox()
    try:
        return sandbox.describe()
    finally:
        sandbox.close()


def test_code_is_found_in_what_models_write() -> None:
    assert program_in("a\n```\nx = 1\n```\nb") == "x = 1"
    assert program_in("```bash\nls\n```\n```python\nx = 1\n```") == "x = 1"
    assert program_in("<think>```python\nx = 1\n```") == program_in("<reasoning>x = 1</reasoning>") == ""
    assert program_in("[BEGIN]\nx = 1\n[DONE]\nbla") == "x = 1"
    assert (
        completed("def f():\n    '''d'''\n", "x = 1\nreturn x", "f")
        == "def f():\n    '''d'''\n    x = 1\n    return x\n"
    )
