"""Whatever a data file holds: samples, or one line that names file and row.

`pytest prime-rl/tests -k test_any_ --hypothesis-profile campaign --timeout 0` tries 10,000 cases of each test.
"""

from __future__ import annotations

import datetime
import gzip
import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from prime_rl.configs.data import SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.examination import examine, made_rows, untrainable_fault, worries
from prime_rl.trainer.sft.data.samples import SampleMaker
from prime_rl.trainer.sft.data.sources import setup_entries

LimitedTime = Callable[[], AbstractContextManager[None]]
TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        [
            "",
            "\0",
            "\ud800",
            "\x1b[31m",
            "$(id)",
            "{{ 7 * 7 }}",
            "{% for x in y %}",
            "<|im_end|>",
            "<|im_start|>",
            "a" * 3000,
        ]
    ),
)
JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from([2**63, 10**400]), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=8,
)
ROLES = st.one_of(
    st.sampled_from(["system", "user", "assistant", "tool", "human", "gpt", "function_call", "developer"]), TEXTS, JSON
)
PARTS = st.lists(st.one_of(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), JSON), max_size=3)
CONTENTS = st.one_of(TEXTS, TEXTS, PARTS, JSON)
FUNCTIONS = st.fixed_dictionaries({"name": TEXTS}, optional={"arguments": st.one_of(JSON, JSON.map(json.dumps), TEXTS)})
CALLS = st.one_of(st.lists(st.fixed_dictionaries({"function": FUNCTIONS}), max_size=2), JSON)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": ROLES,
        "content": CONTENTS,
        "from": ROLES,
        "value": CONTENTS,
        "tool_calls": st.one_of(CALLS, CALLS.map(json.dumps)),
        "reasoning_content": JSON,
        "name": JSON,
    },
)
GOOD = st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": TEXTS})
MESSAGES = st.one_of(st.lists(st.one_of(GOOD, GOOD, MESSAGE), max_size=4), st.lists(GOOD, min_size=1, max_size=3), JSON)
SCHEMAS = st.fixed_dictionaries({"name": TEXTS}, optional={"description": TEXTS, "parameters": JSON})
TOOLS = st.one_of(st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": SCHEMAS}), max_size=2), JSON)
KWARGS = st.one_of(
    st.dictionaries(
        st.one_of(
            TEXTS,
            st.sampled_from(
                ["chat_template", "tokenize", "conversation", "documents", "return_dict", "padding", "self", "messages"]
            ),
        ),
        JSON,
        max_size=2,
    ),
    JSON,
)
COLUMNS: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.one_of(MESSAGES, MESSAGES.map(json.dumps)),
    "conversations": MESSAGES,
    "prompt": st.one_of(TEXTS, MESSAGES),
    "completion": st.one_of(TEXTS, MESSAGES),
    "response": CONTENTS,
    "instruction": JSON,
    "input": JSON,
    "output": JSON,
    "history": JSON,
    "system": JSON,
    "text": st.one_of(TEXTS, JSON),
    "tools": st.one_of(TOOLS, TOOLS.map(json.dumps)),
    "chat_template_kwargs": KWARGS,
}
ROWS = st.one_of(
    st.fixed_dictionaries({"messages": MESSAGES}, optional={"tools": COLUMNS["tools"], "chat_template_kwargs": KWARGS}),
    st.fixed_dictionaries({"prompt": TEXTS, "completion": TEXTS}),
    st.fixed_dictionaries({}, optional=COLUMNS),
    st.dictionaries(TEXTS, JSON, max_size=3),
)
CELLS = st.one_of(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=10),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.binary(max_size=5),
    st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-1000, max_value=1000),
    st.datetimes(min_value=datetime.datetime(1970, 1, 2), max_value=datetime.datetime(2200, 1, 1)),
    st.dates(),
    st.lists(st.integers(0, 9), max_size=2),
    st.none(),
)
FORMATS = [
    {"columns": {"messages": "conversations", "role": "from", "content": "value"}, "roles": {"human": "user"}},
    {"columns": {"prompt": "text", "response": "output"}},
    {"roles": {"human": "user", "x": "tool"}},
]


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model_dir)


def check_data(tokenizer: PreTrainedTokenizerBase, **settings: Any) -> None:
    """Read everything that `data` names, as the preflight and the trainer do. Any fault is one short line."""
    config = SFTDataConfig(seq_len=16, batch_size=1, **settings)
    fault = ""
    try:
        entries = setup_entries(config)
        found = examine(made_rows(entries, SampleMaker(config, tokenizer), 100, 10_000), entries.row_count, config)
        for sample in found.shown:
            assert sample.token_ids.max() < 128
            assert len(sample.token_ids) <= 17
        assert all("\n" not in line for line in [*worries(found, config), untrainable_fault(found, config) or ""])
    except DataError as error:
        fault = str(error) or "no message"
    assert fault.isprintable()
    assert len(fault) < 2200


@pytest.mark.parametrize("settings", [{}, {"streaming": True}, *FORMATS], ids=range(5))
def test_any_json_lines(
    settings: dict[str, Any], tmp_path: Path, tokenizer: PreTrainedTokenizerBase, limited_time: LimitedTime
) -> None:
    path = tmp_path / "rows.jsonl"

    @given(st.lists(ROWS, min_size=1, max_size=3))
    def reads(rows: list[dict[str, Any]]) -> None:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with limited_time():
            check_data(tokenizer, name=str(path), **settings)

    reads()


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_any_table(suffix: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, limited_time: LimitedTime) -> None:
    path = tmp_path / f"rows{suffix}"
    names = st.one_of(st.sampled_from(sorted(COLUMNS)), st.text(alphabet="ab", max_size=3))

    @given(st.dictionaries(names, CELLS, min_size=1, max_size=4))
    def reads(row: dict[str, Any]) -> None:
        table = pyarrow.Table.from_pylist([row, row])
        if suffix == ".parquet":
            pyarrow.parquet.write_table(table, path)
        else:
            with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
        with limited_time():
            check_data(tokenizer, name=str(path))

    reads()


@pytest.mark.parametrize("streaming", [False, True])
def test_any_bytes_in_a_file_of_any_kind(
    streaming: bool, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, limited_time: LimitedTime
) -> None:
    suffixes = [".jsonl", ".json", ".csv", ".tsv", ".parquet", ".arrow", ".jsonl.gz", ".csv.gz", ".jsonl.zst"]
    good = json.dumps({"prompt": "a", "completion": "b"}).encode()
    contents = st.one_of(
        st.binary(max_size=60),
        st.text(max_size=60).map(lambda text: text.encode(errors="surrogatepass")),
        st.sampled_from(
            [b"[" * 5000, b'{"a":' * 5000, b"[" + b"9" * 5000 + b"]", good, b"[" + good + b"]", b"PAR1PAR1"]
        ),
        st.tuples(st.just(good), st.binary(max_size=5)).map(b"".join),
        st.lists(st.text(max_size=5), min_size=1, max_size=5).map(
            lambda cells: ("prompt,completion\n" + ",".join(cells)).encode(errors="replace")
        ),
        st.just(gzip.compress(good)[:-4]),
    )

    @given(st.sampled_from(suffixes), contents)
    def reads(suffix: str, content: bytes) -> None:
        path = tmp_path / f"rows{suffix}"
        path.write_bytes(content)
        with limited_time():
            check_data(tokenizer, name=str(path), streaming=streaming)

    reads()
