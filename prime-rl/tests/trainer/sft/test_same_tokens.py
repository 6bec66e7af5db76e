"""One row means the same tokens: from every file, in SFT and on the server; and what of it is trained."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from prime_rl.checks.chat_templates import CHATML
from prime_rl.configs.data import LossMaskConfig, SFTDataConfig
from prime_rl.inference.embedded.engine.text import Text
from prime_rl.trainer.sft.data.conversation import ConversationTokenizer, special_ids
from prime_rl.trainer.sft.data.sources import load_rows, stream_rows
from prime_rl.trainer.sft.resume import date_of_templates, fingerprint_of
from prime_rl.utils.rows import read_file

USER = {"role": "user", "content": "q"}
CALL = {"name": "order", "arguments": {"drugs": [{"name": "x", "mg": 100}, {"name": "y", "unit": "ml"}]}}
TOOL = {"type": "function", "function": {"name": "order", "parameters": {"type": "object", "properties": {
    "drugs": {"type": "array", "items": {"type": "object"}}, "urgent": {"type": "boolean"}}}}}  # fmt: skip
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "blanks": [{"role": "user", "content": " q \n"}, {"role": "assistant", "content": "\n\n yes "}],
    "developer": [{"role": "developer", "content": "be brief"}, USER, {"role": "assistant", "content": "yes"}],
    "call": [USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": CALL}]},
             {"role": "tool", "content": "done"}, {"role": "assistant", "content": "yes"}],
    "no arguments": [USER, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
              {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}],
    "line separators": [USER, {"role": "assistant", "content": "a\u2028b\u0085c"}],
}  # fmt: skip
NULL_CALL = {"function": {"name": "find", "arguments": {"start": "a", "end": None}}}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE, whose tokens keep the blank before a word, with an end token that tokenizer.json alone knows."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.post_processor = processors.ByteLevel(trim_offsets=False)
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
    bpe.train_from_iterator(["The answer is yes. The dose is high. Answer: yes no"] * 50, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|endoftext|>")
    fast.chat_template = CHATML
    return fast


def sample_of(tokenizer: PreTrainedTokenizerBase, row: Any) -> Any:
    return ConversationTokenizer(tokenizer, LossMaskConfig(), ignored_keys=["type"])(row)


def trained(tokenizer: PreTrainedTokenizerBase, row: Any) -> str:
    sample = sample_of(tokenizer, row)
    return tokenizer.decode(sample.token_ids[sample.is_trained])


def _csv(path: Path, row: dict[str, Any]) -> None:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerows([row, [json.dumps(value) for value in row.values()]])


def _arrow(path: Path, row: dict[str, Any]) -> None:
    table = pyarrow.Table.from_pylist([row])
    with pyarrow.ipc.new_stream(path, table.schema) as file:
        file.write_table(table)


WRITERS: dict[str, Callable[[Path, dict[str, Any]], Any]] = {
    ".jsonl": lambda path, row: path.write_text(json.dumps(row) + "\n", encoding="utf-8"),
    ".json": lambda path, row: path.write_text(json.dumps({"data": [row]}, indent=1), encoding="utf-8"),
    ".csv": _csv,
    ".parquet": lambda path, row: pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path),
    ".arrow": _arrow,
}


def test_a_conversation_has_the_same_tokens_from_every_file_and_on_the_server(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    server, seen = Text(tokenizer, frozenset()), {}
    for name, messages in CONVERSATIONS.items():
        row = {"messages": messages, "tools": [TOOL]}
        asked = server.render_chat(messages, [TOOL], {})
        seen[name] = {"server": server.encode(asked, add_special_tokens=False)}
        for kind, write in WRITERS.items():
            path = tmp_path / f"{name.replace(' ', '_')}{kind}"
            write(path, row)
            seen[name][kind] = sample_of(tokenizer, read_file(path)[0]).token_ids.tolist()
        # A folder of `save_to_disk`, and one as hub datasets have it, loaded and streamed.
        place = tmp_path / name.replace(" ", "_")
        datasets.Dataset.from_list([row]).save_to_disk(str(place / "saved"))
        (place / "hub" / "data").mkdir(parents=True)
        (place / "hub" / "README.md").write_text("# A card")
        WRITERS[".parquet"](place / "hub" / "data" / "train-00000-of-00001.parquet", row)
        for kind in ("saved", "hub"):
            config = SFTDataConfig(name=str(place / kind))
            for how, read in (("loaded", load_rows(config)[0]), ("streamed", next(stream_rows(config))())):
                seen[name][f"{kind}, {how}"] = sample_of(tokenizer, read).token_ids.tolist()
    differing = {name: sorted(of) for name, of in seen.items() if len({tuple(ids) for ids in of.values()}) > 1}
    # On the server, the answer is sampled after its header; here a run of line feeds crosses that place.
    assert set(differing) <= {"blanks"}
    files = {tuple(ids) for kind, ids in seen["blanks"].items() if kind != "server"}
    assert len(files) == 1
    (ids,) = files
    assert tokenizer.decode(list(ids)) == server.render_chat(CONVERSATIONS["blanks"], [TOOL], {})
    prompt = server.render_chat(CONVERSATIONS["blanks"][:1], [TOOL], {"add_generation_prompt": True})
    prompt_ids = server.encode(prompt, add_special_tokens=False)
    assert list(ids)[: len(prompt_ids)] == prompt_ids, "the server's prompt is the beginning of the sample"


def test_nulls_that_were_meant_stay_and_map_columns_are_objects(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    row = {"messages": [USER, {"role": "assistant", "tool_calls": [NULL_CALL]}],
           "tools": [{"type": "function", "function": {"name": "find", "parameters": {"default": None}}}]}  # fmt: skip
    path = tmp_path / "nulls.jsonl"
    path.write_text(json.dumps(row) + "\n")
    text = tokenizer.decode(sample_of(tokenizer, read_file(path)[0]).token_ids)
    assert '"end": null' in text
    assert '"default": null' in text
    table = pyarrow.table({"info": pyarrow.array([[("k", 1.0), ("n", float("nan"))]],
                                                 pyarrow.map_(pyarrow.string(), pyarrow.float64()))})  # fmt: skip
    pyarrow.parquet.write_table(table, tmp_path / "map.parquet")
    assert read_file(tmp_path / "map.parquet")[0] == {"info": {"k": 1.0}}


EARLIER = [USER, {"role": "assistant", "content": "EARLIER"}, USER]
TRAINED = [
    ({"prompt": EARLIER, "completion": [{"role": "assistant", "content": "yes"}]}, "yes<|im_end|>"),
    ({"prompt": EARLIER, "response": "yes"}, "yes<|im_end|>"),
    ({"messages": [*EARLIER, {"role": "assistant", "content": "yes"}]}, "EARLIER<|im_end|>yes<|im_end|>"),
    ({"messages": [USER, {"role": "assistant", "content": "bad", "weight": 0}, USER,
                   {"role": "assistant", "content": "yes", "weight": 1}]}, "yes<|im_end|>"),
    ({"messages": [USER, {"role": "assistant", "content": "bad", "train": False}, USER,
                   {"role": "assistant", "content": "yes"}]}, "yes<|im_end|>"),
    ({"prompt": "Answer: ", "completion": "yes"}, "yes<|endoftext|>"),
    ({"prompt": "Answer:", "completion": " yes"}, " yes<|endoftext|>"),
    ({"prompt": "hi", "completion": "gher"}, "gher<|endoftext|>"),
    ({"prompt": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", "completion": "yes<|im_end|>\n"},
     "yes<|im_end|>"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "said"), TRAINED, ids=range(len(TRAINED)))
def test_what_is_trained(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any], said: str) -> None:
    assert trained(tokenizer, row) == said


def test_a_rendered_text_is_the_conversation_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [USER, {"role": "assistant", "content": "yes"}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False)
    whole = sample_of(tokenizer, {"messages": messages}).token_ids.tolist()
    assert sample_of(tokenizer, {"text": rendered}).token_ids.tolist() == whole
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in special_ids(tokenizer)


MARKED = (
    "{{ strftime_now('%Y-%m-%d') }}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


@pytest.fixture
def marking(tokenizer: PreTrainedTokenizerBase) -> Iterator[PreTrainedTokenizerBase]:
    """The tokenizer with a template that marks what is generated, without calls, and writes the date."""
    own, tokenizer.chat_template = tokenizer.chat_template, MARKED
    yield tokenizer
    tokenizer.chat_template = own


def test_calls_outside_of_the_marks_of_a_template_are_noticed(marking: PreTrainedTokenizerBase) -> None:
    tokenize = ConversationTokenizer(marking, LossMaskConfig(), ignored_keys=["type"])
    assert tokenize({"messages": CONVERSATIONS["call"]}).unmarked_calls
    assert not tokenize({"messages": CONVERSATIONS["parts"]}).unmarked_calls
    silent = [{**message, "weight": 0} if "tool_calls" in message else message for message in CONVERSATIONS["call"]]
    sample = tokenize({"messages": silent})
    assert not sample.unmarked_calls
    assert marking.decode(sample.token_ids[sample.is_trained]) == "yes<|im_end|>"


def test_a_resumed_run_writes_the_date_of_its_first_day(marking: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": CONVERSATIONS["parts"]}))
    config = SFTDataConfig(name=str(tmp_path / "rows.jsonl"))
    assert date_of_templates(config, marking, None) == date.today()
    first = config.model_copy(update={"template_date": date(2020, 1, 2)})
    saved = fingerprint_of(first, marking).as_dict()
    assert date_of_templates(config, marking, saved) == date(2020, 1, 2)
    tokenize = ConversationTokenizer(marking, LossMaskConfig(), today=date(2020, 1, 2))
    sample = tokenize({"messages": CONVERSATIONS["parts"]})
    assert marking.decode(sample.token_ids).startswith("2020-01-02<|im_start|>user")
    marking.chat_template = CHATML
    assert date_of_templates(config, marking, None) is None
