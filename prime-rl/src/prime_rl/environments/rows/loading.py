"""Loads the problems of a mixture: read, identify, filter, order, mix.

problems = load_problems(read_rows_config({"datasets": [{"path": "rows.jsonl"}]}))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from prime_rl.environments.rows.arguments import DatasetConfig, RowsConfig
from prime_rl.environments.rows.filters import CountTokens, filters_of, token_counter
from prime_rl.environments.rows.formats import MissingColumn, Row, find_format
from prime_rl.environments.rows.mixing import mixed, shuffled
from prime_rl.environments.rows.orders import read_order
from prime_rl.environments.rows.problems import Defaults, Problem, problem_of
from prime_rl.environments.rows.sources import RowsFault, read_rows
from prime_rl.utils.logger import count_of, get_logger

MADE_ROWS = 64
"""Rows of the format `dummy`, if `count` says nothing."""


@dataclass(slots=True)
class Account:
    """What became of the rows of a dataset."""

    title: str
    read: int = 0
    kept: int = 0
    repeated: int = 0
    """Rows that ask and expect the same as an earlier one."""
    filtered: dict[str, int] = field(default_factory=dict)
    """Rows left out, by filter."""
    order: str = ""

    def describe(self) -> str:
        left_out = [f"{number} by {name}" for name, number in self.filtered.items() if number]
        left_out += [f"{self.repeated} repeated"] if self.repeated else []
        parts = [f"{self.kept} of {count_of('row', self.read)}"]
        parts += [f"left out: {', '.join(left_out)}"] if left_out else []
        parts += [f"order: {self.order}"] if self.order else []
        return f"{self.title}: {'; '.join(parts)}"


def load_problems(config: RowsConfig, of_evaluation: bool = False) -> list[Problem]:
    """The problems of all datasets, in the order in which a curriculum trains on them. Logs what became of the rows.

    Raises:
        RowsFault: a dataset cannot be read, has rows without what its format needs, or has nothing left.
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
    rewards = None if config.rewards is None else tuple(config.rewards)
    problems = _unique(_problems(dataset, Defaults(config.system_prompt, config.template, rewards), account), account)
    for each in filters_of(dataset, count_tokens):
        kept = {id_: problem for id_, problem in problems.items() if each.keeps(problem)}
        account.filtered[each.name] = len(problems) - len(kept)
        problems = kept
    if not problems:
        raise RowsFault(f"no row is left of {account.describe()}")
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


def _problems(dataset: DatasetConfig, defaults: Defaults, account: Account) -> Iterator[Problem]:
    of = find_format(dataset.type, dataset.path)
    for number, row in enumerate(_rows(dataset)):
        account.read += 1
        try:
            yield problem_of(row, number, dataset, of, defaults)
        except (MissingColumn, AttributeError, TypeError, ValueError) as error:
            reason = str(error) if isinstance(error, MissingColumn) else f"{type(error).__name__}: {error}"
            raise RowsFault(
                f"{dataset.title}: row {number} (format {of.name}) {reason}; `type` names another format, `columns` "
                "other columns"
            ) from error


def _rows(dataset: DatasetConfig) -> Iterator[Row]:
    if dataset.path is None:
        yield from ({"row": number} for number in range(dataset.count or MADE_ROWS))
    else:
        yield from read_rows(dataset.path, dataset.subset, dataset.split)


def _unique(problems: Iterator[Problem], account: Account) -> dict[str, Problem]:
    """Problems by id, without those that repeat one. Raises RowsFault if different problems have the same id."""
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
