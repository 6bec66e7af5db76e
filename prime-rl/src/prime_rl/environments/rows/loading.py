"""Loads the problems of a mixture of datasets: reads rows, makes problems, filters, orders and mixes them.

problems = load_problems(read_rows_config({"datasets": [{"path": "rows.jsonl"}]}))
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from prime_rl.configs.storage import is_on_s3
from prime_rl.environments.rewards.registry import RewardSpec
from prime_rl.environments.rows.arguments import DatasetConfig, RowsConfig, Scalar
from prime_rl.environments.rows.curricula import PassRate, read_order, read_pass_rates
from prime_rl.environments.rows.formats import Format, MissingColumn, Row, column, find_format, own_id, words
from prime_rl.environments.rows.sources import RowsFault, read_rows
from prime_rl.storage.staging import folder_of
from prime_rl.utils.conversations import (
    IMAGE_MARK,
    RowFault,
    has_image,
    is_chat,
    is_missing,
    listed,
    prompt_messages,
    tools_of,
)
from prime_rl.utils.images import image_parts, is_data_url, located, with_urls
from prime_rl.utils.logger import count_of, get_logger
from prime_rl.utils.rows import kind_of

Messages = list[dict[str, Any]]
CountTokens = Callable[[str], int]
T = TypeVar("T")
DUMMY_ROWS = 64
"""Rows of the format `dummy` if `count` is unset."""
_HASH_LENGTH = 16
"""Hexadecimal digits. Of ten million rows, two share a hash with a probability of 3e-6."""
_IMAGES = ("images", "image")
_IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".dcm")


@dataclass(frozen=True, slots=True)
class Problem:
    """One prompt to roll out."""

    id: str
    dataset: str
    """Title of the dataset."""
    prompt: Messages
    answer: str
    rewards: tuple[RewardSpec, ...]
    """Reward functions that score its completions."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that reward functions need besides the answer."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Function schemas that the prompt shows. Nobody runs them: a call is the completion."""
    row: Row = field(default_factory=dict, repr=False)
    """The row of the source."""

    @property
    def text(self) -> str:
        """The texts of the prompt."""
        return "\n".join(_text_of(message["content"]) for message in self.prompt)


def load_problems(config: RowsConfig, of_evaluation: bool = False) -> list[Problem]:
    """Load the problems of all datasets, in training order. Logs how many rows each step left out.

    Raises:
        RowsFault: a dataset cannot be read, a row lacks what its format needs, or no row is left.
    """
    datasets = (of_evaluation and config.eval_datasets) or config.datasets
    count_tokens = None if config.tokenizer is None else token_counter(config.tokenizer)
    queues = [_queue(config, dataset, count_tokens) for dataset in datasets]
    _refuse_shared_ids(queues)
    if config.mode == "sequential":
        return [problem for queue in queues for problem in queue]
    return mixed(queues, [dataset.weight for dataset in datasets], config.seed)


def _queue(config: RowsConfig, dataset: DatasetConfig, count_tokens: CountTokens | None) -> list[Problem]:
    account = Account(dataset.title)
    problems = _unique(_problems(config, dataset, account), account)
    for each in _filters(dataset, count_tokens):
        kept = {id_: problem for id_, problem in problems.items() if each.keeps(problem)}
        account.filtered[each.name] = len(problems) - len(kept)
        problems = kept
    if not problems:
        raise RowsFault(f"no rows are left: {account.describe()}")
    if dataset.order is not None:
        order = read_order(dataset.order, problems)
        account.order = order.describe(dataset.order)
        queue = [problems[each] for each in order.ids]
    else:
        queue = list(problems.values())
        queue = shuffled(queue, config.seed, dataset.title) if dataset.shuffle else queue
    queue = queue[: dataset.count]
    account.kept = len(queue)
    get_logger().info(f"Dataset {account.describe()}")
    return queue


@dataclass(slots=True)
class Account:
    """Counts of the rows of a dataset, for the log."""

    title: str
    read: int = 0
    kept: int = 0
    repeated: int = 0
    """Rows with the same question and answer as an earlier one."""
    filtered: dict[str, int] = field(default_factory=dict)
    """Number of rows left out, by filter."""
    order: str = ""

    def describe(self) -> str:
        left_out = [f"{number} by {name}" for name, number in self.filtered.items() if number]
        left_out += [f"{self.repeated} repeated"] if self.repeated else []
        parts = [f"{self.kept} of {count_of('row', self.read)}"]
        parts += [f"left out: {', '.join(left_out)}"] if left_out else []
        parts += [f"order: {self.order}"] if self.order else []
        return f"{self.title}: {'; '.join(parts)}"


# Rows to problems.


def _problems(config: RowsConfig, dataset: DatasetConfig, account: Account) -> Iterator[Problem]:
    of = find_format(dataset.type, dataset.path)
    for number, row in enumerate(_rows(dataset)):
        account.read += 1
        try:
            yield _problem(row, number, config, dataset, of)
        except (MissingColumn, AttributeError, TypeError, ValueError) as error:
            is_worded = isinstance(error, (MissingColumn, RowFault))
            reason = str(error) if is_worded else f"{type(error).__name__}: {error}"
            raise RowsFault(
                f"{dataset.title}: row {number} (format {of.name}) {reason}; to read it differently, set `type` "
                "to its format or `columns` to its column names"
            ) from error


def _rows(dataset: DatasetConfig) -> Iterator[Row]:
    if dataset.path is None:
        yield from ({"row": number} for number in range(dataset.count or DUMMY_ROWS))
    else:
        yield from read_rows(dataset.path, dataset.subset, dataset.split)


def _problem(row: Row, number: int, config: RowsConfig, dataset: DatasetConfig, of: Format) -> Problem:
    """Make a problem of a row. `number` counts the rows of the source from 0, before any filter.

    Raises:
        MissingColumn: the row lacks a column, or a column holds something else.
    """
    question = listed((column(dataset.columns["prompt"]) if "prompt" in dataset.columns else of.question)(row))
    of_row, tools = _system_and_tools(row) if of.is_of_sft else ("", ())
    system = of_row or dataset.system_prompt or config.system_prompt
    prompt, said = _prompt(question, row, dataset.template or config.template or of.template, system)
    # Rows may ask the same of different images, which have no place in the question if they are in a column.
    shown = [part.source for part in image_parts(prompt)]
    prompt = _with_absolute_images(prompt, dataset.path)
    chosen = dataset.rewards if dataset.rewards is not None else config.rewards
    answer = _answer(row, dataset, of, said, is_needed=chosen is None)
    rewards = tuple(chosen or ()) or (RewardSpec(fn=of.reward_of(row) if of.reward_of else of.reward),)
    extra = dict(of.extra(row)) if of.extra else {}
    id_ = _id(row, number, dataset, of, content_id([question, *shown] if shown else question, answer))
    return Problem(id_, dataset.title, prompt, answer, rewards, extra, tools, row)


def _system_and_tools(row: Row) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """The system message and the tools beside a row's conversation. `system` does not belong to a `completion`."""
    if not is_missing(row.get("chat_template_kwargs")) and row["chat_template_kwargs"]:
        raise MissingColumn(
            "has chat_template_kwargs, which RL takes from the config: orchestrator.sampling.extra_body"
        )
    has_system = not is_missing(row.get("system")) and "completion" not in row
    return str(row["system"]) if has_system else "", tools_of(row)


def _id(row: Row, number: int, dataset: DatasetConfig, of: Format, content: str) -> str:
    if dataset.id == "row" or (dataset.id is None and of.id_column == "row"):
        return f"{of.id_prefix}{number}"
    if dataset.id not in (None, "content"):
        given = own_id(row, dataset.id)
        if given is None:
            raise MissingColumn(f"has no id in the column {dataset.id}")
        return given
    given = None if dataset.id == "content" else own_id(row, of.id_column)
    if given is None:
        return f"{of.id_prefix}{content}"
    return given if given.startswith(of.id_prefix) else f"{of.id_prefix}{given}"


def content_id(question: Any, answer: str) -> str:
    """A hash of question and answer. Without template and system message, so a change of these keeps the ids."""
    text = json.dumps([question, answer], sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_HASH_LENGTH]


def _answer(row: Row, dataset: DatasetConfig, of: Format, said: str | None, is_needed: bool) -> str:
    """The reference answer. `said` is the text of the answer that ends the row's messages."""
    try:
        value = column(dataset.columns["answer"])(row) if "answer" in dataset.columns else of.answer(row)
    except MissingColumn:
        if "answer" in dataset.columns or (said is None and is_needed):
            raise
        return said or ""
    if is_chat(chat := listed(value)):
        return str(prompt_messages(chat)[-1]["content"])  # TRL's `completion` is a list of messages
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _prompt(question: Any, row: Row, template: str | None, system: str | None) -> tuple[Messages, str | None]:
    """The prompt, and the text of the answer with which the row's messages end."""
    said = None
    if isinstance(question, list):
        # Messages with images are kept as they are: the engine reads their parts.
        messages = list(map(dict, question)) if has_image(question) else prompt_messages(question)
        if not messages:
            raise MissingColumn("has an empty list of messages as its prompt")
    else:
        text = str(question)
        if template is not None:
            text = _filled(template, row, text)
        if not text.strip():
            raise MissingColumn("has an empty prompt")
        messages = [dict[str, Any](role="user", content=text)]
    if messages[-1]["role"] == "assistant":
        said = _text_of(messages[-1]["content"])
        messages = messages[:-1]
        if not messages:
            raise MissingColumn("has an answer without a question")
    images = [part for name in _IMAGES for part in _image_parts(row.get(name))]
    if images:
        last = messages[-1]
        messages[-1] = {**last, "content": _placed(images, _text_of(last["content"]))}
    if system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return messages, said


def _filled(template: str, row: Row, question: str) -> str:
    try:
        return template.format_map({**{str(name): value for name, value in row.items()}, "question": question})
    except KeyError as error:
        raise MissingColumn(f"has no column {error} for the template; it has {', '.join(map(str, row))}") from error


def _with_absolute_images(prompt: Messages, path: str | None) -> Messages:
    """A prompt whose images have absolute paths. In a file of rows, they are relative to its folder."""
    sources = [part.source for part in image_parts(prompt)]
    if path is None or not sources or not all(isinstance(source, str) for source in sources):
        return prompt
    file = Path(path).expanduser()
    if is_on_s3(path):
        folder = file if kind_of(file) is None else file.parent
    elif file.exists():
        folder = file if file.is_dir() else folder_of(file)
    else:
        return prompt
    return with_urls(prompt, [str(located(source, folder)) for source in sources])


def _placed(images: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Images where a text says `<image>`, as in rows of SFT; without such places, before it."""
    first, *others = text.split(IMAGE_MARK)
    if not others:
        return [*images, {"type": "text", "text": text}]
    if len(others) != len(images):
        given = count_of("image", len(images))
        raise MissingColumn(f"has {given}, and its prompt says {IMAGE_MARK} {len(others)} times")
    behind = [[image, {"type": "text", "text": each}] for image, each in zip(images, others, strict=True)]
    parts = [{"type": "text", "text": first}, *(part for pair in behind for part in pair)]
    return [part for part in parts if part.get("text") != ""]


def _image_parts(value: Any) -> list[dict[str, Any]]:
    """Images of a column as parts of a message."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    parts = []
    for each in values:
        content, path = (each.get("bytes"), each.get("path")) if isinstance(each, Mapping) else (None, each)
        if isinstance(each, bytes):  # a column of bytes, in Parquet
            content = each
        if content:
            data = base64.b64encode(bytes(content)).decode()
            parts.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
        elif isinstance(path, str) and (is_data_url(path) or path.lower().endswith(_IMAGE_SUFFIXES)):
            # Others are no images: the `image` of a task for agents is that of a container.
            parts.append({"type": "image_url", "image_url": {"url": path}})
    return parts


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))


def _unique(problems: Iterator[Problem], account: Account) -> dict[str, Problem]:
    """Problems by id, without repeated ones. Raises RowsFault if different problems have the same id."""
    found: dict[str, Problem] = {}
    for each in problems:
        earlier = found.setdefault(each.id, each)
        if earlier is each:
            continue
        if (earlier.prompt, earlier.answer) != (each.prompt, each.answer):
            raise RowsFault(f'{each.dataset}: two different prompts have the id {each.id!r}: set id = "content"')
        account.repeated += 1
    return found


def _refuse_shared_ids(queues: Sequence[Sequence[Problem]]) -> None:
    owners: dict[str, str] = {}
    for queue in queues:
        for each in queue:
            if (owner := owners.setdefault(each.id, each.dataset)) != each.dataset:
                raise RowsFault(
                    f"{owner} and {each.dataset} both have the prompt id {each.id!r}: they have rows in common, or ids "
                    'that repeat; then set id = "content" in one of them'
                )


# Filters: they choose problems and never change an id.


@dataclass(frozen=True, slots=True)
class Filter:
    """One criterion that a problem must meet."""

    name: str
    """Name for the log: the column or the range."""
    keeps: Callable[[Problem], bool]


def _filters(dataset: DatasetConfig, count_tokens: CountTokens | None) -> Iterator[Filter]:
    """The filters of a dataset, in order of application. Raises RowsFault."""
    columns: dict[str, Sequence[Scalar]] = dict(dataset.where)
    if dataset.level is not None:
        columns["level"] = dataset.level
    if dataset.difficulty is not None:
        columns["difficulty"] = dataset.difficulty
    for name, values in columns.items():
        yield _by_column(dataset, name, values)
    if dataset.min_chars or dataset.max_chars:
        yield _by_length("chars", len, dataset.min_chars, dataset.max_chars)
    if (dataset.min_tokens or dataset.max_tokens) and count_tokens is not None:
        yield _by_length("tokens", count_tokens, dataset.min_tokens, dataset.max_tokens)
    if dataset.pass_rates is not None:
        yield _by_pass_rate(dataset, read_pass_rates(dataset.pass_rates))


def _by_column(dataset: DatasetConfig, name: str, values: Sequence[Scalar]) -> Filter:
    wanted = {words(str(value)) for value in values}
    # hendrycks_math writes `Level 5` for level 5.
    wanted |= {f"{words(name)}_{value}" for value in wanted}

    def keeps(problem: Problem) -> bool:
        if name not in problem.row:
            raise RowsFault(
                f"{dataset.title}: a row has no column {name!r} to filter by; it has {', '.join(problem.row)}"
            )
        value = problem.row[name]
        return value in values or (isinstance(value, str) and words(value) in wanted)

    return Filter(f"{name} in {', '.join(map(str, values))}", keeps)


def _by_length(unit: str, length: CountTokens, least: int, most: int | None) -> Filter:
    name = f"{least or ''}..{most or ''} {unit}"
    return Filter(name, lambda problem: least <= length(problem.text) <= (most or float("inf")))


def _by_pass_rate(dataset: DatasetConfig, rates: Mapping[str, PassRate]) -> Filter:
    low, high = dataset.min_pass_rate, dataset.max_pass_rate
    least, most = (0.0 if low is None else low), (1.0 if high is None else high)

    def keeps(problem: Problem) -> bool:
        rate = rates.get(problem.id)
        return rate is not None and least <= rate.rate <= most

    return Filter(f"pass rate {least:g}..{most:g}", keeps)


def token_counter(tokenizer: str) -> CountTokens:
    """A function that counts the tokens of a text. Raises RowsFault if there is no such tokenizer."""
    from tokenizers import Tokenizer

    file = Path(tokenizer) / "tokenizer.json" if Path(tokenizer).is_dir() else Path(tokenizer)
    try:
        loaded: Any = Tokenizer.from_file(str(file)) if file.is_file() else Tokenizer.from_pretrained(tokenizer)
    except Exception as error:
        raise RowsFault(f"tokenizer = {tokenizer}: there is no tokenizer.json: {error}") from error
    return lambda text: len(loaded.encode(text, add_special_tokens=False).ids)


# Order.


def shuffled(items: Sequence[T], seed: int, name: str) -> list[T]:
    """A copy in random order, which depends only on `seed`, `name` and the number of items."""
    copy = list(items)
    random.Random(f"{seed}:{name}").shuffle(copy)
    return copy


def mixed(queues: Sequence[Sequence[T]], weights: Sequence[float], seed: int) -> list[T]:
    """Interleave queues: every item once, each queue in its own order.

    The next queue is drawn by weight among the queues that are not empty. So weights decide which items come first,
    not how many there are.
    """
    draw = random.Random(f"{seed}:mix")
    taken = [0] * len(queues)
    left = [index for index, queue in enumerate(queues) if queue]
    order = []
    while left:
        (index,) = draw.choices(left, [weights[each] for each in left])
        order.append(queues[index][taken[index]])
        taken[index] += 1
        if taken[index] == len(queues[index]):
            left.remove(index)
    return order
