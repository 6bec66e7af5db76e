"""Converts environments of other versions to `[[env]]` tables with `id` and `args`."""

from __future__ import annotations

from collections.abc import Iterator

from medarc_rl.migrate.draft import Draft, Finding
from medarc_rl.migrate.rewrites import tell_move
from medarc_rl.migrate.values import key_text
from prime_rl.utils.tables import KeyPath

ONE_FORM_ONLY = "[[env]] tables are also set"


def rewrite_environments(draft: Draft) -> None:
    """Decide on environments that are not written as `[[env]]` tables."""
    orchestrator = draft.located("orchestrator")
    if orchestrator is not None:
        for table in (orchestrator, (*orchestrator, "eval")):
            _from_one_table(draft, table)
            _from_ids(draft, table)
        _from_plain_list(draft, (*orchestrator, "train", "env"), orchestrator)
        training = (*orchestrator, "train", "source")
        count = _from_sources(draft, training, orchestrator)
        _carry_ratios(draft, training, orchestrator, count)
        _carry_group_size(draft, training, orchestrator, count)
        _from_sources(draft, (*orchestrator, "eval", "source"), (*orchestrator, "eval"))
    if draft.kind == "eval":
        _from_sources(draft, ("source",), ())


def missing_environments(draft: Draft) -> Iterator[Finding]:
    """A fault for each list of environments that was not carried. Its default is an example environment."""
    orchestrator = draft.located("orchestrator")
    if orchestrator is None:
        return
    forms = {
        orchestrator: (("environment",), ("environment_ids",), ("train", "source"), ("train", "env")),
        (*orchestrator, "eval"): (("environment",), ("environment_ids",), ("source",)),
    }
    for table, keys in forms.items():
        named = [path for path in draft.source for key in keys if path[len(table) :][: len(key)] == key]
        if any(path[: len(table)] == table for path in named) and not draft.holds((*table, "env")):
            env = key_text((*table, "env"))
            yield Finding("fault", f"{env}: no environment was carried, and the default is reverse-text: add [[{env}]]")


def _from_one_table(draft: Draft, table: KeyPath) -> None:
    """`[environment]` of older versions is a single environment."""
    given = draft.below((*table, "environment"))
    if (*table, "environment", "id") not in given:
        return
    for path in given:
        _place(draft, path, (*table, "env", 0, *path[len(table) + 1 :]))


def _from_ids(draft: Draft, table: KeyPath) -> None:
    """`environment_ids` lists ids, `environment_args` has arguments by id, and counts are lists in the same order."""
    origin = (*table, "environment_ids")
    ids = draft.left.get(origin)
    if not isinstance(ids, list) or not all(isinstance(each, str) for each in ids):
        return
    if draft.holds((*table, "env")):
        draft.refuse(origin, ONE_FORM_ONLY, "remove one")
        return
    if draft.move(origin, {(*table, "env", index, "id"): each for index, each in enumerate(ids)}):
        tell_move(draft, origin, (*table, "env"))
    for path in draft.below((*table, "environment_args")):
        owner = path[len(table) + 1 :][:1]
        if owner and owner[0] in ids and len(set(ids)) == len(ids):
            _place(draft, path, (*table, "env", ids.index(owner[0]), "args", *path[len(table) + 2 :]))
    for name in ("num_examples", "rollouts_per_example"):
        _spread_counts(draft, (*table, name), table, len(ids))


def _spread_counts(draft: Draft, origin: KeyPath, table: KeyPath, environments: int) -> None:
    counts = draft.left.get(origin)
    if not isinstance(counts, list):
        return
    if len(counts) == 1 and draft.move(origin, {origin: counts[0]}):
        tell_move(draft, origin, origin, counts[0])
    elif len(counts) == environments:
        if draft.move(origin, {(*table, "env", index, origin[-1]): each for index, each in enumerate(counts)}):
            tell_move(draft, origin, (*table, "env", 0, origin[-1]))
    elif counts:
        draft.refuse(origin, f"{len(counts)} numbers for {environments} environments", "give one per environment")
    else:
        draft.drop(origin, "an empty list is the default")


def _from_sources(draft: Draft, sources: KeyPath, table: KeyPath) -> int:
    """Convert `[[source]]` tables of newer versions. Returns how many were carried: all or none."""
    given = draft.below(sources)
    count = len({path[len(sources)] for path in given if len(path) > len(sources)})
    task_ids = [(*sources, index, "env", "taskset", "id") for index in range(count)]
    if not all(isinstance(given.get(path), str) for path in task_ids):
        return 0  # a source without an id, or no list
    if draft.holds((*table, "env")):
        for path in given:
            draft.refuse(path, ONE_FORM_ONLY, "remove one")
        return 0
    for index, path in enumerate(task_ids):
        _place(draft, path, (*table, "env", index, "id"))
        examples = (*sources, index, "num_examples")
        if examples in draft.left:
            _place(draft, examples, (*table, "env", index, "num_examples"))
    return count


def _carry_ratios(draft: Draft, sources: KeyPath, table: KeyPath, count: int) -> None:
    """Collect the ratios of all sources in `env_ratios`, if each source has one."""
    paths = [(*sources, index, "ratio") for index in range(count)]
    if not paths or not all(path in draft.left for path in paths):
        return
    ratios = [draft.left[path] for path in paths]
    if draft.move(paths[0], {(*table, "buffer", "env_ratios"): ratios}):
        tell_move(draft, paths[0], (*table, "buffer", "env_ratios"), ratios)
        for path in paths[1:]:
            draft.drop(path, "merged into buffer.env_ratios")


def _carry_group_size(draft: Draft, sources: KeyPath, table: KeyPath, count: int) -> None:
    """Carry the group size of the sources, if all have the same."""
    paths = [(*sources, index, "group_size") for index in range(count)]
    sizes = {draft.left.get(path) for path in paths}
    shared = draft.left.get((*table, "group_size"))
    if count == 0 or len(sizes) != 1 or None in sizes or shared not in (None, *sizes):
        return
    for path in paths:
        if path != paths[0] or shared is not None:
            draft.drop(path, "every environment has the same group size")
        else:
            _place(draft, path, (*table, "rollouts_per_example"))


def _from_plain_list(draft: Draft, environments: KeyPath, table: KeyPath) -> None:
    """Convert `[[train.env]]`, which has the keys of `[[env]]`."""
    known = ("id", "args", "name")
    for path in draft.below(environments):
        if len(path) > len(environments) + 1 and path[len(environments) + 1] in known:
            _place(draft, path, (*table, "env", *path[len(environments) :]))


def _place(draft: Draft, origin: KeyPath, target: KeyPath) -> None:
    if draft.move(origin, {target: draft.left[origin]}):
        tell_move(draft, origin, target)
