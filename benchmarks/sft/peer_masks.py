"""Writes what TRL, axolotl and LLaMA-Factory train of awkward conversations, for tests that compare our masks with it.

    pip install trl axolotl llamafactory        # into an environment of their own
    python benchmarks/sft/peer_masks.py prime-rl/tests/trainer/sft/peer_masks.json

Each peer's own code tokenizes and masks rows of the formats that it reads, with one tokenizer and one template.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

MODEL = Path(__file__).parents[2] / "examples" / "reverse_text" / "model"
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

Row = dict[str, Any]


def turns(*contents: str, system: str | None = None) -> list[Row]:
    """A conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


CONVERSATIONS = {
    "one turn": turns("dose?", "500 mg"),
    "system and three turns": turns("a", "b", "c d", "e f", "g", "h", system="be brief"),
    "blanks around contents": turns(" a ", " b \n", "\nc", "d  "),
    "letters of several bytes": turns("grüße 你好", "ähm 👍🏽 e\u0301"),
    "an answer that repeats the question": turns("same", "same", "same", "same"),
    "an answer that looks like a header": turns("a", "assistant\nuser\nb", "c", "d"),
    "an empty question": turns("", "b"),
    "lines": turns("a\n\n\nb", "c\n\nd\n"),
}
PAIRS = {
    "text": {"prompt": "2 + 2 =", "completion": " 4"},
    "a prompt that ends in a blank": {"prompt": "answer: ", "completion": "yes"},
    "a prompt that ends in a line": {"prompt": "answer:\n", "completion": "\nyes\n"},
    "a word that the cut divides": {"prompt": "un", "completion": "likely"},
    "an empty prompt": {"prompt": "", "completion": "yes"},
    "letters of several bytes": {"prompt": "grüße ", "completion": "你好"},
    "messages": {"prompt": turns("a", system="s"), "completion": turns("", "b")[1:]},
    "messages with earlier answers": {"prompt": turns("a", "b", "c"), "completion": turns("", "d")[1:]},
}
TRAINED = {
    "turns that say so": [
        {**message, "training": flag}
        for message, flag in zip(
            turns("a", "b", "c", "d", "e", "f"), (False, True, False, False, True, True), strict=True
        )
    ]
}
ALPACA = {
    "with an input": {"instruction": "translate", "input": "fever", "output": "fieber"},
    "without an input": {"instruction": "translate", "input": "", "output": "fieber"},
    "with history and system": {
        "instruction": "and now?", "input": "", "output": "c", "system": "s", "history": [["a", "b"], ["d", "e"]],
    },
}  # fmt: skip


def tokenizer_of_the_comparison() -> PreTrainedTokenizerBase:
    """The tokenizer of an example, with the tokens of the template."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "eos_token": "<|im_end|>"}
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def case(peer: str, name: str, row: Row, ids: list[int], labels: list[int]) -> Row:
    return {"peer": peer, "case": name, "row": row, "ids": ids, "trained": [int(label != -100) for label in labels]}


def of_trl(tokenizer: PreTrainedTokenizerBase) -> Iterator[Row]:
    """TRL: `assistant_only_loss` for conversations, and its default for pairs, the completion."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    size = len(tokenizer)
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    small = LlamaConfig(vocab_size=size, **shape, **ends)
    texts = {"text": {"text": "one two"}, "text of lines": {"text": "a\n\nb\n"}}
    named = {name: {"messages": messages} for name, messages in CONVERSATIONS.items()}
    for name, row in {**named, **{f"pair: {name}": row for name, row in PAIRS.items()}, **texts}.items():
        with tempfile.TemporaryDirectory() as out:
            trainer = SFTTrainer(
                AutoModelForCausalLM.from_config(small),
                SFTConfig(
                    out, max_length=None, report_to=[], use_cpu=True, bf16=False, assistant_only_loss="messages" in row
                ),
                train_dataset=Dataset.from_list([row]),
                processing_class=tokenizer,
            )
            batch = trainer.data_collator([trainer.train_dataset[0]])
            yield case("trl", name, row, batch["input_ids"][0].tolist(), batch["labels"][0].tolist())


def of_axolotl(tokenizer: PreTrainedTokenizerBase) -> Iterator[Row]:
    """axolotl: its `chat_template` strategy with the defaults of a config, `train_on_eos: turn`."""
    from axolotl.prompt_strategies.chat_template import ChatTemplatePrompter, ChatTemplateStrategy

    template = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    prompter = ChatTemplatePrompter(tokenizer, template, max_length=4097, message_field_training="training")
    strategy = ChatTemplateStrategy(prompter, tokenizer, False, 4096, ["assistant"], "turn")
    for name, messages in {**CONVERSATIONS, **TRAINED}.items():
        found = strategy.tokenize_prompt({"messages": messages})
        yield case("axolotl", name, {"messages": messages}, found["input_ids"], found["labels"])


def of_llamafactory(tokenizer: PreTrainedTokenizerBase) -> Iterator[Row]:
    """LLaMA-Factory: `stage: sft` with `template: chatml`."""
    from llamafactory.data.converter import AlpacaDatasetConverter, SharegptDatasetConverter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    arguments = DataArguments(template="chatml", cutoff_len=4096)
    processor = SupervisedDatasetProcessor(
        get_template_and_fix_tokenizer(tokenizer, arguments), tokenizer, None, arguments
    )
    alpaca = AlpacaDatasetConverter(DatasetAttr("file", "a", "alpaca", system="system", history="history"), arguments)
    shared = SharegptDatasetConverter(DatasetAttr("file", "s", "sharegpt"), arguments)
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    rows: list[tuple[str, Row, Any]] = [
        (f"alpaca: {name}", row, alpaca({"system": "", "history": [], **row})) for name, row in ALPACA.items()
    ]
    for name, messages in CONVERSATIONS.items():
        row = {"conversations": [{"from": names[each["role"]], "value": each["content"]} for each in messages]}
        rows.append((f"sharegpt: {name}", row, shared(row)))
    for name, row, converted in rows:
        found = processor.preprocess_dataset({key: [value] for key, value in converted.items()})
        yield case("llamafactory", name, row, found["input_ids"][0], found["labels"][0])


def main() -> None:
    cases: list[Row] = []
    for name, cases_of in (("axolotl", of_axolotl), ("llamafactory", of_llamafactory), ("trl", of_trl)):
        # LLaMA-Factory changes the tokenizer that it is given.
        cases += cases_of(tokenizer_of_the_comparison())
        print(name, importlib.metadata.version(name))
    lines = ",\n".join(json.dumps(each, ensure_ascii=True) for each in cases)
    Path(sys.argv[1]).write_text(f"[\n{lines}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
