"""What a config, a model or a data set says never acts on the terminal of who reads it."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from rich.console import Console

from prime_rl.inference.protocol import RequestError
from prime_rl.launch.logs import reason_in
from prime_rl.utils.errors import one_line
from prime_rl.utils.terminal import TextOnly, cut_inside, plain
from prime_rl.watch.progress import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\r\n", "plain\ttext\r\n"),
        ("naïve 温度 \u00a0\u202f\u200d\u200c🙂", "naïve 温度 \u00a0\u202f\u200d\u200c🙂"),
        ("\x1b]52;c;aGk=\x07", "\\x1b]52;c;aGk=\\x07"),
        ("\x1b[2J\x1b[1A", "\\x1b[2J\\x1b[1A"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b[\x1b[31m2J", "\\x1b[2J"),
        ("\x9b31m\x7f\x00\x08", "\\x9b31m\\x7f\\x00\\x08"),
        ("\u202eevil\u2066\u200f", "\\u202eevil\\u2066\\u200f"),
        ("a\u2028b\u2029c\u0085d\ufeff", "a\\u2028b\\u2029c\\x85d\\ufeff"),
        ("\udcff\U000e0041", "\\udcff\\U000e0041"),
    ],
)
def test_characters_that_act_are_written_as_escapes(text: str, shown: str) -> None:
    assert plain(text) == shown


def test_a_stream_passes_text_on_and_rich_still_moves_the_cursor() -> None:
    behind = io.StringIO()
    stream = TextOnly(behind)
    print("bell \x07", file=stream)  # type: ignore[call-overload]
    stream.writelines(["\x1b[2J", "\n"])
    Console(file=stream, force_terminal=True, color_system="standard").print("[red]x")  # type: ignore[arg-type]
    assert behind.getvalue() == "bell \\x07\n\\x1b[2J\n\x1b[31mx\x1b[0m\n"


def test_a_program_of_ours_prints_text_in_any_encoding() -> None:
    code = (
        "from prime_rl.utils.signals import start_program; start_program(); start_program();"
        "import sys, logging; from prime_rl.utils.logger import setup_logger;"
        "print('…\\x1b[2J'); sys.stderr.write('温\\x07\\n'); setup_logger('info').warning('\\x1b]0;title\\x07…')"
    )
    argv = [sys.executable, "-X", "utf8=0", "-c", code]
    done = subprocess.run(argv, env={"PYTHONIOENCODING": "latin-1"}, capture_output=True, check=True)
    assert done.stdout.splitlines()[0] == rb"\u2026\x1b[2J"
    assert done.stdout.splitlines()[1].endswith(rb"WARNING \x1b]0;title\x07\u2026")
    assert done.stderr == rb"\u6e29\x07" + b"\n"


def test_a_cut_message_keeps_its_beginning_and_its_remedy() -> None:
    said = f"trainer.data: the file {'x' * 5000} cannot be read: give another one with --data.name"
    assert cut_inside(said, len(said)) == said
    cuts = {
        "a cut": cut_inside(said, 200),
        "an error": one_line(said, 200),
        "a line of a terminal": printable(said, 200),
        "the reason in a launch's last line": reason_in([f"12:00:00   ERROR {said}"]) or "",
        "an answer over HTTP": RequestError(said).body()["error"]["message"],
    }
    for what, cut in cuts.items():
        assert cut.startswith("trainer.data: the file xxx"), what
        assert cut.endswith("xxx cannot be read: give another one with --data.name"), what
        assert len(cut) <= 1000, what
    assert len(cuts["a cut"]) == 200
