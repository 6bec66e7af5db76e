from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from prime_rl.configs.sft import SFTConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.process.mesh import DataAxis, Mesh
from prime_rl.trainer.process.world import Process
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer
from prime_rl.trainer.sft.data.examination import check_first_rows
from prime_rl.trainer.sft.data.packer import setup_rows
from prime_rl.trainer.sft.preflight import preflight, rendered
from prime_rl.trainer.sft.step import CrossEntropy
from prime_rl.trainer.sft.validation import Validation
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.pydantic_config import dump_toml

Report = Callable[..., str]

GOOD = [{"prompt": f"{number}+1=", "completion": f"{number + 1}"} for number in range(20)]
LONG = {"prompt": "x", "completion": "y" * 100}
MASKED = {"prompt": "x" * 100, "completion": "y"}
CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}


def config_of(file: Path, tiny_model_dir: Path, tokenizer: dict[str, Any] | None = None, **data: Any) -> SFTConfig:
    return SFTConfig(
        model={"name": str(tiny_model_dir)},
        tokenizer=tokenizer or {},
        data={"name": str(file), "seq_len": 32, "batch_size": 4, **data},
    )


@pytest.fixture
def report(tmp_path: Path, tiny_model_dir: Path) -> Report:
    def report_on(rows: list[dict], exit_code: int = 0, **data: Any) -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        out = io.StringIO()
        console = Console(file=out, width=120, soft_wrap=True)
        assert preflight(config_of(file, tiny_model_dir, **data), console) == exit_code
        return out.getvalue()

    return report_on


def test_the_command_needs_no_torch_and_says_how_far_it_is(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Torch took two thirds of the time of a preflight of 300 rows."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in GOOD))
    dump_toml(config_of(tmp_path / "rows.jsonl", tiny_model_dir), tmp_path / "sft.toml")
    words = ["-X", "importtime", "-m", "prime_rl.trainer.sft.preflight", "@", str(tmp_path / "sft.toml")]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no problems found" in done.stdout
    lines = done.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "transformers" in imported
    assert not {"torch", "sklearn", "pandas"} & imported
    said = [line for line in lines if not line.startswith("import time:")]
    assert said == [
        f"SFT data: reading {tmp_path / 'rows.jsonl'}",
        f"SFT data: loading the tokenizer of {tiny_model_dir}",
    ]


def figure(text: str, name: str) -> str:
    """The report's value for `name`."""
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).strip()


def test_the_figures_of_an_epoch(report: Report) -> None:
    text = report([*GOOD, GOOD[0], LONG, MASKED])
    assert figure(text, "rows per epoch") == "23"
    assert figure(text, "rows inspected") == "all"
    assert figure(text, "samples per epoch") == "22"
    assert figure(text, "cut to data.seq_len") == "1 (4.3%)"
    assert figure(text, "skipped, no trained token") == "1 (4.3%)"
    assert figure(text, "duplicates") == "1 (4.3%)"
    # Each character is a token, the end token is only a target, and the long sample is cut to 32 tokens.
    assert figure(text, "tokens per epoch") == str(9 * 5 + 6 + 10 * 7 + 5 + 32)
    assert "warning: 1 of 23 rows have no trained token within data.seq_len = 32 and are skipped" in text


def test_a_batch_that_reads_the_data_more_than_once_is_warned_of(report: Report) -> None:
    # Three packed rows of 32 tokens hold the 20 samples.
    text = report(GOOD, batch_size=120)
    assert "warning: a batch of 120 rows reads the 20 rows of this data " in text
    assert " of this data " not in report(GOOD, batch_size=2)


def test_lengths_are_shown_with_the_limit(report: Report) -> None:
    text = report([*GOOD, LONG])
    bars = [line for line in text.splitlines() if re.match(r" \d+ to ", line)]
    assert len(bars) == 8
    assert sum("data.seq_len" in bar for bar in bars) == 1
    assert bars[-1].split("to")[1].split()[0] == "101"


@pytest.mark.parametrize(("packing", "fill", "cut"), [("cat", "100.00%", "20.00%"), ("best_fit", "93.75%", "0.00%")])
def test_packing_is_tried_out(packing: str, fill: str, cut: str, report: Report) -> None:
    text = report([{"text": "x" * 10} for _ in range(6)], pack_function=packing, seq_len=32)
    assert figure(text, f"rows filled by {packing}") == fill
    assert figure(text, "tokens cut off by packing") == cut


def test_samples_that_train_no_end_are_counted(report: Report) -> None:
    unfinished = {"messages": [*CHAT["messages"], {"role": "user", "content": "and?"}]}
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'user' %}<|im_end|>{% endif %}{% endfor %}"
    )
    text = report([CHAT, unfinished, unfinished], tokenizer={"chat_template": template})
    assert "2 of 3 rows have no end token that is trained on, so the model does not learn to stop" in text


def test_three_samples_are_shown_with_the_trained_part_marked(report: Report) -> None:
    text = report([CHAT, *GOOD], shuffle=False)
    assert text.count("Sample ") == 3
    assert "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n«yo<|im_end|>»\n" in text
    assert "0+1=«1<|im_end|>»" in text


def test_in_a_terminal_the_trained_part_is_coloured(tiny_model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    sample = ConversationTokenizer(tokenizer, config_of(Path("x"), tiny_model_dir).data.loss_mask)(CHAT)
    text = rendered(sample, tokenizer, in_colour=True)
    coloured = [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)]
    assert coloured == ["yo<|im_end|>"]
    assert "«" not in text.plain


def test_streamed_data_is_looked_at_too(report: Report) -> None:
    text = report(GOOD, streaming=True)
    assert figure(text, "rows per epoch") == "20"
    assert figure(text, "samples per epoch") == "20"


def test_data_that_would_stop_the_run_fails_the_preflight(report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    report([*GOOD[:2], *[MASKED] * 3], exit_code=1)
    assert capsys.readouterr().err.startswith("error: data.name = ")
    report([*GOOD[:2], *[MASKED] * 3], max_untrainable_share=0.7)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no rows"),
        (
            '{"prompt": "a", "completion": "b"}\n{"prompt":\n',
            "rows.jsonl:2: not valid JSON: Expecting value (column 11)",
        ),
        ('{"question": "a"}\n', "found the columns question; expected `messages`"),
        ('{"text": "a"}\n{"text": null}\n', "rows.jsonl:2: `text` is missing; mend"),
        ('{"messages": [{"role": "wizard", "content": "x"}]}\n', "rows.jsonl:1: message 1: unknown role 'wizard'"),
        ('["text"]\n', "rows.jsonl:1: not a JSON object"),
        ("\xff\n", "rows.jsonl:1: not UTF-8 text"),
    ],
)
def test_bad_data_is_one_line(
    content: str, said: str, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logger("warning")
    file = tmp_path / "rows.jsonl"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(SystemExit) as stopped:
        preflight(config_of(file, tiny_model_dir), Console(file=io.StringIO()))
    assert stopped.value.code == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert said in line


def test_one_start_tells_each_kind_of_fault_once_with_its_count(
    report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logger("warning")
    rows = [row for _ in range(23) for row in (GOOD[0], {"prompt": "q", "response": None})]
    rows[4] = {"prompt": "q", "response": " "}
    with pytest.raises(SystemExit) as stopped:
        report(rows)
    assert stopped.value.code == 1
    lines = sorted(line.partition("ERROR")[2].strip() for line in capsys.readouterr().out.splitlines())
    assert len(lines) == 2, lines
    missing = next(line for line in lines if "`response` is missing" in line)
    assert re.search(r"rows\.jsonl:\d+: `response` is missing; so it is in 23 of 46 rows: also ", missing)
    assert any("rows.jsonl:5: `response` is empty" in line for line in lines)
    assert lines[-1].endswith('data.on_bad_row = "skip"') or lines[0].endswith('data.on_bad_row = "skip"')


def test_bad_rows_are_skipped_and_counted_on_request(report: Report) -> None:
    rows = [*GOOD[:1] * 3, {"prompt": "q", "response": float("nan")}]
    text = report(rows, on_bad_row="skip")
    assert "skipped, no conversation or answer" in text
    assert "1 of 4 rows are skipped" in text
    assert "`response` is missing" in text


# --- the same checks at the start of a run


def check(rows: list[dict], tmp_path: Path, tiny_model_dir: Path, show: bool = False, **data: Any):
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(file, tiny_model_dir, **data)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    packed = setup_rows(config.data, tokenizer, 128, DataAxis(0, 1))
    check_first_rows(packed, tokenizer, Process(0, 1, 0, torch.device("cpu")), show)
    return packed


def test_a_run_warns_of_its_first_rows(
    tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logger("info")
    check([*GOOD, *[LONG] * 3], tmp_path, tiny_model_dir, show=True, shuffle=False)
    text = capsys.readouterr().out
    assert "3 of 23 rows are longer than data.seq_len = 32 and are cut; the longest has 101 tokens" in text
    assert "2 of 23 rows have the same tokens as an earlier row" in text
    assert "First sample: '0+1=1<|im_end|>'" in text
    assert "Trained in it: '1<|im_end|>'" in text


def test_a_run_without_enough_to_train_on_stops_before_it_starts(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(DataError, match=r"of 5 rows 3 cannot be trained on \(3 without a trained token") as stopped:
        check([*GOOD[:2], *[MASKED] * 3], tmp_path, tiny_model_dir)
    assert "max_untrainable_share allows 50%" in str(stopped.value)


@pytest.mark.parametrize("streaming", [False, True])
def test_examining_the_first_rows_does_not_advance_the_data(
    streaming: bool, tmp_path: Path, tiny_model_dir: Path
) -> None:
    looked_at = check(GOOD, tmp_path, tiny_model_dir, streaming=streaming, shuffle_buffer=7)
    config = config_of(tmp_path / "rows.jsonl", tiny_model_dir, streaming=streaming, shuffle_buffer=7)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    untouched = setup_rows(config.data, tokenizer, 128, DataAxis(0, 1))
    assert looked_at.stream.counts.seen == 0
    for _ in range(10):
        assert next(looked_at).input_ids.tolist() == next(untouched).input_ids.tolist()


# --- what the chat template leaves out

CALLS = [
    {"role": "user", "content": "2+3"},
    {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]},
    {"role": "tool", "content": "5", "tool_call_id": "1"},
    {"role": "assistant", "content": "5"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]


@pytest.mark.parametrize("streaming", [False, True])
def test_tools_that_the_template_leaves_out_stop_preflight_and_run(
    streaming: bool, report: Report, tmp_path: Path, tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logger("warning")
    rows = [CHAT, {"messages": CALLS, "tools": TOOLS}]
    told = f"the chat template of {tiny_model_dir} leaves out tool_calls of assistant messages, tools: set"
    with pytest.raises(SystemExit) as stopped:
        report(rows, shuffle=False, streaming=streaming)
    assert stopped.value.code == 1
    assert told in capsys.readouterr().out
    with pytest.raises(DataError, match=re.escape(told)):
        check(rows, tmp_path, tiny_model_dir, streaming=streaming)


def test_a_template_that_renders_tools_or_ignored_keys_pass(report: Report) -> None:
    rows = [{"messages": CALLS, "tools": json.dumps(TOOLS)}]
    shown = report(rows, tokenizer={"chat_template": "chatml"}, seq_len=1000)
    assert '«<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>»' in shown
    assert "SFT data: no problems found" in report(
        rows, ignored_keys=["tools", "tool_calls"], seq_len=1000, batch_size=1
    )


# --- validation data


def with_validation(rows: list[dict], tmp_path: Path, tiny_model_dir: Path, **data: Any) -> SFTConfig:
    for name, content in (("rows.jsonl", GOOD), ("val.jsonl", rows)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in content))
    config = config_of(tmp_path / "rows.jsonl", tiny_model_dir, **data)
    val = {"data": {**config.data.model_dump(), "name": str(tmp_path / "val.jsonl")}}
    return SFTConfig(model={"name": str(tiny_model_dir)}, data=config.data, val=val)


def test_validation_data_is_inspected_too(tmp_path: Path, tiny_model_dir: Path) -> None:
    out = io.StringIO()
    config = with_validation([*GOOD[:3], MASKED], tmp_path, tiny_model_dir)
    assert preflight(config, Console(file=out, width=120, soft_wrap=True)) == 0
    _, _, text = out.getvalue().partition("Validation data: ")
    assert figure(text, "rows per epoch") == "4"
    assert "rows filled by best_fit" in text
    assert "1 of 4 rows have no trained token" in text


def test_validation_data_that_would_stop_the_run_fails_the_preflight(
    tmp_path: Path, tiny_model_dir: Path, mesh: Mesh, capsys: pytest.CaptureFixture[str]
) -> None:
    config = with_validation([GOOD[0], MASKED, MASKED], tmp_path, tiny_model_dir)
    out = io.StringIO()
    assert preflight(config, Console(file=out)) == 1
    assert "Validation data: no problems found" not in out.getvalue()
    assert "val.jsonl: of 3 rows 2 cannot be trained on" in capsys.readouterr().err
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    assert config.val is not None
    with pytest.raises(DataError, match=r"^val\.data\.name = .*val\.jsonl: of .* rows .* cannot be trained on"):
        Validation(config.val.data, tokenizer, mesh, CrossEntropy())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (MASKED, "val.data.max_untrainable_share allows 50%"),
        ({"question": "a"}, "Name other columns in val.data.columns"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "map others in val.data.roles"),
        ({"messages": [{"speaker": "user", "content": "x"}]}, "Name others in val.data.columns"),
        ({**CHAT, "tools": [{"name": "f"}]}, "list keys that the model need not see in val.data.ignored_keys"),
    ],
)
def test_faults_of_validation_data_name_the_keys_of_validation_data(
    row: dict[str, Any], said: str, tmp_path: Path, tiny_model_dir: Path, mesh: Mesh
) -> None:
    config = with_validation([row], tmp_path, tiny_model_dir)
    assert config.val is not None
    with pytest.raises(DataError, match=re.escape(said)) as raised:
        Validation(config.val.data, AutoTokenizer.from_pretrained(tiny_model_dir), mesh, CrossEntropy())
    assert not re.search(r"(?<!val\.)\bdata\.", str(raised.value))
