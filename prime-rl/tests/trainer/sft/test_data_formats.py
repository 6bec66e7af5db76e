"""The formats of rows and files, and what is said of those that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow
import pytest

from prime_rl.configs.data import RowFormatConfig, SFTDataConfig
from prime_rl.trainer.process.errors import DataError
from prime_rl.trainer.sft.data.messages import renamed
from prime_rl.trainer.sft.data.sources import load_rows, stream_rows
from prime_rl.utils.conversations import Conversation, PlainText, RowFault, read_row
from prime_rl.utils.images import ImageFault, ImageLimits, read_images

ASKED = {"role": "user", "content": "q"}
ANSWERED = {"role": "assistant", "content": "a"}
CHAT = [ASKED, ANSWERED]
CALL = {"name": "add", "arguments": {"x": 1}}


def messages_of(row: dict[str, Any]) -> list[dict[str, Any]]:
    content = read_row(row)
    assert isinstance(content, Conversation)
    return content.messages


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT},
        {"messages": json.dumps(CHAT)},
        {"conversations": CHAT},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": json.dumps([{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}])},
        {"instruction": "q", "output": "a", "text": "### Instruction"},
        {"instruction": "q", "input": "", "output": "a"},
        {"instruction": "q", "input": None, "output": "a", "messages": None},
        {"prompt": "q", "response": "a"},
        {"prompt": [ASKED], "response": "a"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"messages": [{"role": "human", "content": ["q"]}, {"role": "model", "content": [{"text": "a"}]}]},
    ],
)
def test_a_question_and_its_answer_in_every_format(row: dict[str, Any]) -> None:
    assert messages_of(row) == CHAT


@pytest.mark.parametrize("row", [{"conversations": CHAT}, {"instruction": "q", "output": "a"},
                                 {"prompt": "q", "response": "a"}, {"messages": json.dumps(CHAT)}])  # fmt: skip
def test_a_system_column_comes_first_and_tools_are_kept(row: dict[str, Any]) -> None:
    row |= {"system": "s", "tools": '[{"name": "add"}]'}
    assert messages_of(row) == [{"role": "system", "content": "s"}, *CHAT]
    assert read_row(row).template_kwargs == {"tools": [{"name": "add"}]}


def test_earlier_turns_come_from_history() -> None:
    row = {"instruction": "q", "output": "a", "history": [["q", "a"]]}
    assert messages_of(row) == [*CHAT, *CHAT]
    with pytest.raises(RowFault, match="`history` must be a list of pairs"):
        read_row({**row, "history": ["q"]})


@pytest.mark.parametrize("calls", [CALL, [CALL]])
def test_calls_of_sharegpt_become_tool_calls(calls: Any) -> None:
    turns = [{"from": "function_call", "value": json.dumps(calls)}, {"from": "observation", "value": "2"}]
    called, answer = messages_of({"conversations": turns})
    assert called["role"] == "assistant"
    assert called["tool_calls"] == [{"type": "function", "function": CALL}]
    assert answer == {"role": "tool", "content": "2"}


def test_texts_of_prompt_and_completion_stay_texts() -> None:
    assert read_row({"prompt": "q", "completion": "a", "id": 1}) == PlainText("q", "a")


def test_parts_of_text_are_joined_as_in_inference() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert messages_of({"messages": [{"role": "user", "content": parts}, ANSWERED]})[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": [{**ASKED, "content": [{"type": "image_url", "image_url": "x"}]}]}, "part of type 'image_url'"),
        ({"messages": [{"text": "q", "speaker": "x"}]}, "message 1: found the keys `text`, `speaker`; expected `role`"),
        ({"conversations": [{"from": "narrator", "value": "q"}]}, "role 'narrator': known are .* others in data.roles"),
        ({"conversations": "[{"}, "conversations: not valid JSON"),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "message 1: function_call: not valid JSON"),
        ({"messages": CHAT, "images": ["a.png"]}, "`images` has images: .*, name its column in data.columns"),
        ({"messages": CHAT, "image": {"path": "a.png"}}, "`image` has images: only parts of text can be trained on"),
        ({"question": "q"}, "found question; expected `messages`, `conversations`, `instruction` and `output`"),
    ],
)  # fmt: skip
def test_what_was_found_and_what_was_expected_is_said(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RowFault, match=said):
        read_row(row)


def test_demonstrations_are_not_told_to_set_what_does_not_help_them() -> None:
    with pytest.raises(
        RowFault, match=r"trainer.demonstrations.data is trained as text alone, also with .model.vision"
    ):
        read_row({"messages": CHAT, "image": "a.png"}, "trainer.demonstrations.data")


# --- images


IMAGE, OTHER = {"type": "image", "image": "a.png"}, {"type": "image", "image": "b.png"}
PLACE = {"type": "image"}


def text(said: str) -> dict[str, str]:
    return {"type": "text", "text": said}


@pytest.mark.parametrize(
    ("content", "columns", "expected"),
    [
        # OpenAI's chat and responses, Hugging Face's, Anthropic's.
        ([{"type": "image_url", "image_url": {"url": "a.png"}}, text("q")], {}, [IMAGE, text("q")]),
        ([text("q"), {"type": "input_image", "image_url": "a.png"}], {}, [text("q"), IMAGE]),
        ([IMAGE, text("q"), {"type": "image", "path": "b.png"}], {}, [IMAGE, text("q"), OTHER]),
        ([{"type": "image", "url": "a.png"}, "q"], {}, [IMAGE, text("q")]),
        ([{"type": "image", "base64": "aGk="}], {}, [{"type": "image", "image": "data:;base64,aGk="}]),
        ([{"type": "image", "source": {"type": "base64", "data": "aGk="}}], {},
         [{"type": "image", "image": "data:;base64,aGk="}]),
        ([{"type": "image", "image": {"bytes": b"x", "path": "c"}}], {},
         [{"type": "image", "image": {"bytes": b"x", "path": "c"}}]),
        # TRL's places, in order or by number; without places, before the text.
        ([PLACE, text("q"), PLACE], {"images": ["a.png", "b.png"]}, [IMAGE, text("q"), OTHER]),
        ([{**PLACE, "index": 1}, {**PLACE, "index": 0}], {"images": ["a.png", "b.png"]}, [OTHER, IMAGE]),
        ("q", {"images": ["a.png", "b.png"]}, [IMAGE, OTHER, text("q")]),
        ("q", {"image": "a.png", "images": []}, [IMAGE, text("q")]),
        # LLaVA's marks, also in a row of a CSV file.
        ("<image>\nq", {"image": "a.png"}, [IMAGE, text("\nq")]),
        ("is <image> as <image>?", {"images": '["a.png", "b.png"]'},
         [text("is "), IMAGE, text(" as "), OTHER, text("?")]),
        # No image: text as ever, and a mark without an image is text.
        ([text("q"), text("r")], {"images": [None]}, "q\nr"),
    ],
)  # fmt: skip
def test_images_of_every_format(content: Any, columns: dict[str, Any], expected: Any) -> None:
    read = read_row({"messages": [{"role": "user", "content": content}, ANSWERED], **columns}, with_images=True)
    assert isinstance(read, Conversation)
    assert read.messages == [{"role": "user", "content": expected}, ANSWERED]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": CHAT, "images": ["a", "b"]} | {"messages": [{**ASKED, "content": [PLACE]}, ANSWERED]},
         "the messages have places for 1 images, and the row has 2"),
        ({"messages": [{**ASKED, "content": [PLACE]}, ANSWERED]}, "places for 1 images, and the row has 0"),
        ({"messages": [{**ASKED, "content": "<image> q"}, ANSWERED]}, "places for 1 images, and the row has 0"),
        ({"messages": [{**ASKED, "content": [IMAGE]}, ANSWERED], "images": ["b"]}, "for 0 images, and the row has 1"),
        ({"messages": [ASKED, {"role": "assistant", "content": [IMAGE]}]}, "message 2: an answer .* has an image"),
        ({"messages": [{**ASKED, "content": [{"type": "audio"}]}]}, "message 1: a part of type 'audio'"),
        ({"text": "t", "image": "a"}, "`image` has images: write messages"),
        ({"prompt": "q", "completion": "a", "image": "a"}, "plain text, and the row has images: write messages"),
        ({"messages": CHAT, "images": "[1"}, "`images`: not valid JSON"),
        ({"messages": CHAT, "images": ["a", None, "b"]}, "`images` has 3 images, and number 2 is missing"),
    ],
)  # fmt: skip
def test_images_without_a_place_are_one_line(row: dict[str, Any], said: str) -> None:
    with pytest.raises(RowFault, match=said):
        read_row(row, with_images=True)


@pytest.mark.parametrize("streaming", [False, True])
def test_images_are_read_from_every_kind_of_file(tmp_path: Path, streaming: bool) -> None:
    import datasets
    from PIL import Image

    path, part = tmp_path / "scans" / "a.png", {"type": "image", "image": "scans/a.png"}
    path.parent.mkdir()
    Image.new("RGB", (3, 2), "red").save(path)
    rows = [{"messages": [{"role": "user", "content": [part, text("q")]}, ANSWERED]}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]) + "\n")
    features = {
        "images": datasets.List(datasets.Image()),
        "prompt": datasets.Value("string"),
        "response": datasets.Value("string"),
    }
    table = {"images": [[str(path)]], "prompt": ["q"], "response": ["a"]}
    held = datasets.Dataset.from_dict(table, datasets.Features(features))
    held.save_to_disk(str(tmp_path / "saved"))
    held.to_parquet(str(tmp_path / "rows.parquet"))
    for name in ("rows.jsonl", "saved", "rows.parquet"):
        config = config_of(tmp_path / name)
        row = next(stream_rows(config))() if streaming else load_rows(config)[0]
        content = read_row(row, with_images=True)
        assert isinstance(content, Conversation)
        images = read_images(content.messages, content.folder, ImageLimits())
        assert [(image.size, image.getpixel((0, 0))) for image in images] == [((3, 2), (255, 0, 0))], name
        with pytest.raises(ImageFault, match="the row has 1 images, and at most 0 are read"):
            read_images(content.messages, content.folder, ImageLimits(max_images=0))
    path.unlink()
    content = read_row(load_rows(config_of(tmp_path / "rows.jsonl"))[0], with_images=True)
    assert isinstance(content, Conversation)
    with pytest.raises(ImageFault, match=r"message 1: scans/a\.png: no such file in "):
        read_images(content.messages, content.folder, ImageLimits())


# --- names


def test_mapped_columns_are_the_only_ones() -> None:
    config = RowFormatConfig(columns={"prompt": "q", "response": "a"})
    row = {"q": "1", "a": "2", "messages": "ignored", "tools": [], "id": 3}
    assert renamed(row, config) == {"prompt": "1", "response": "2", "tools": []}


def test_keys_and_roles_of_messages_can_be_renamed() -> None:
    config = RowFormatConfig(columns={"role": "who", "content": "says"}, roles={"doctor": "assistant"})
    row = {"messages": [{"who": "user", "says": "q"}, {"who": "doctor", "says": "a"}], "id": 1}
    assert renamed(row, config) == {"messages": CHAT, "id": 1}
    assert renamed({**row, "messages": json.dumps(row["messages"])}, config)["messages"] == CHAT
    of_sharegpt = RowFormatConfig(roles={"narrator": "system"})
    assert messages_of(renamed({"conversations": [{"from": "narrator", "value": "s"}]}, of_sharegpt)) == [
        {"role": "system", "content": "s"}
    ]


# --- files


def config_of(path: Path, **fields: Any) -> SFTDataConfig:
    return SFTDataConfig(name=str(path), **fields)


def compressed(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content))
    else:
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(content)
    return path


ROWS = [{"prompt": f"q{index}\u2028", "response": 'a "quoted",\ttext\nof two lines'} for index in range(300)]


def table(delimiter: str) -> str:
    quoted = [[value.replace('"', '""') for value in row.values()] for row in ROWS]
    return "".join(f'"{first}"{delimiter}"{second}"\r\n' for first, second in [["prompt", "response"], *quoted])


@pytest.mark.parametrize("compression", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", [".jsonl", ".ndjson", ".json", ".csv", ".tsv"])
def test_every_kind_of_text_file_gives_the_same_rows_loaded_and_streamed(
    kind: str, compression: str, tmp_path: Path
) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    text = {".csv": "\ufeff" + table(","), ".tsv": table("\t"), ".json": json.dumps(ROWS)}.get(kind, lines)
    path = tmp_path / f"rows{kind}{compression}"
    if compression:
        compressed(path, text.encode())
    else:
        path.write_text(text, encoding="utf-8", newline="")
    assert list(load_rows(config_of(path))) == ROWS
    assert [reading() for reading in stream_rows(config_of(path))] == ROWS


def test_rows_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('text\n"a\nb"\n\nc\n')
    rows = load_rows(config_of(path))
    assert [rows.where(index) for index in range(2)] == [f"{path}:2", f"{path}:5"]
    packed = load_rows(config_of(compressed(tmp_path / "rows.jsonl.gz", b'\n{"text": "a"}\n')))
    assert packed.where(0).endswith("rows.jsonl.gz:2")


def test_long_fields_are_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"text\n{'x' * 300_000}\n")
    assert len(load_rows(config_of(path))[0]["text"]) == 300_000


def test_the_line_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_bytes(b"text\na\nb\xff\n")
    with pytest.raises(DataError, match=r"rows\.csv:3: not UTF-8 text \(byte 1\)"):
        load_rows(config_of(tmp_path / "rows.csv"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("rows.csv", b"prompt,response\na,b,c\n", r"rows\.csv:2: found 3 fields; the header has 2: prompt, response"),
        ("rows.csv", b"text,text\na,b\n", r"rows\.csv:1: the header names 'text' more than once"),
        ("rows.jsonl", '{"text": "a"}\n'.encode("utf-16"), r"rows\.jsonl:1: not UTF-8 text \(byte 0\)"),
        ("rows.csv", b'text\n"a" b\n', r"rows\.csv:2: not valid CSV"),
        ("rows.tsv", b"text\n\xff\n", "not UTF-8 text"),
        ("rows.csv", b"", "has no rows"),
        ("rows.csv", b"text\n", "has no rows"),
        ("rows.jsonl.gz", b"plain", "cannot be read"),
        ("rows.jsonl.zst", b"plain", "cannot be read"),
        ("rows.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 1000)[:-9], "cannot be read"),
        ("rows.csv.gz", gzip.compress(b"text\n\xff\n"), "not UTF-8 text"),
        ("rows.parquet.gz", b"", "unknown file type"),
    ],
)
@pytest.mark.parametrize("streaming", [False, True])
def test_a_broken_file_is_one_line(name: str, content: bytes, said: str, streaming: bool, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=said) as fault:
        list(stream_rows(config_of(tmp_path / name)) if streaming else load_rows(config_of(tmp_path / name)))
    assert "\n" not in str(fault.value)
