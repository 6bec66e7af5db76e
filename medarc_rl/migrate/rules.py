"""Rewrites a config of another version: decides what becomes of each setting, and reports it.

Every step takes settings out of `draft.left` and places, drops or refuses them. `migrate` calls the steps in this
order: environments, keys that need code, the engine's tables, and last a check by this version's config classes.
"""

from __future__ import annotations

import tomllib
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w
from pydantic import ValidationError
from pydantic_core import ErrorDetails, InitErrorDetails

from medarc_rl.errors import UsageError
from medarc_rl.migrate.draft import Draft, Finding, Placed, Verdict, key_text, kind_of, names, shown, versions_of
from medarc_rl.migrate.text import Document, split_statements, write_layout
from prime_rl.configs.surface.meanings import DEFAULTS, DIFFERENT, SAME_HERE, Version
from prime_rl.configs.surface.not_built import NOT_BUILT, NotBuilt, unbuilt_faults
from prime_rl.configs.surface.renamed import OLDER, SECTIONS_OF_RL, Renamed, find_renamed, is_current, split_component
from prime_rl.configs.surface.root import ROOTS
from prime_rl.utils.pydantic_config import BaseSettings, ConfigError, ConfigWarning
from prime_rl.utils.pydantic_config.base import with_nulls
from prime_rl.utils.pydantic_config.faults import advice_for_key, faults_of, locate
from prime_rl.utils.pydantic_config.layers import Layer, merge_layers, with_underscores
from prime_rl.utils.pydantic_config.schema import find_key, has_key, is_nullable, walk_fields
from prime_rl.utils.pydantic_config.toml_files import BASES_KEY, parse_toml, read_files
from prime_rl.utils.tables import KeyPath, leaves

# Environments, which other versions write in four other forms


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
        _report_move(draft, origin, (*table, "env"))
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
        _report_move(draft, origin, origin, counts[0])
    elif len(counts) == environments:
        if draft.move(origin, {(*table, "env", index, origin[-1]): each for index, each in enumerate(counts)}):
            _report_move(draft, origin, (*table, "env", 0, origin[-1]))
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
        _report_move(draft, paths[0], (*table, "buffer", "env_ratios"), ratios)
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


# Keys that merge or depend on each other, and values that change their type


DEFAULT_ROOT = "outputs"
"""Default of `output_dir` in every version."""


def rewrite_by_hand(draft: Draft) -> None:
    """Decide on the settings that the tables cannot carry."""
    for rewrite in (
        _name_run_directory,
        _clean_directory,
        _join_output_dirs,
        _resume,
        _list_base_url,
        _fix_concurrency,
        _keep_custom_loss,
        _disable_fused_head,
        _list_eval_counts,
    ):
        rewrite(draft)


def _name_run_directory(draft: Draft) -> None:
    """Newer versions write to `run.dir`, or else to `output_dir`/`run.name`."""
    root, directory, name = ("output_dir",), ("run", "dir"), ("run", "name")
    if isinstance(draft.left.get(directory), str):
        if root in draft.left:
            draft.drop(root, "run.dir overrides it")
        if name in draft.left:
            draft.drop(name, "run.dir overrides it")
        _move_as(draft, directory, root, draft.left[directory])
    elif isinstance(draft.left.get(name), str) and isinstance(draft.left.get(root, DEFAULT_ROOT), str):
        joined = str(PurePosixPath(draft.left.get(root, DEFAULT_ROOT)) / draft.left[name])
        if root in draft.left:
            draft.drop(root, "merged with run.name")
        _move_as(draft, name, root, joined)


def _clean_directory(draft: Draft) -> None:
    """In newer versions, `clean` deletes the whole directory; in older ones, only a part of it."""
    path = ("clean",)
    if draft.left.get(path) is not True:
        return
    if draft.versions == {"newer"}:
        _move_as(draft, path, ("clean_output_dir",), True)
        return
    draft.refuse(
        path,
        "older versions delete logs and rollouts, and checkpoints unless the run resumes; clean_output_dir deletes "
        "the whole directory",
        "set clean_output_dir = true if you want that",
    )


def _join_output_dirs(draft: Draft) -> None:
    """In older versions, trainer and orchestrator share one directory, and each sets it."""
    trainer, orchestrator, root = ("trainer", "output_dir"), ("orchestrator", "output_dir"), ("output_dir",)
    named = draft.left.get(trainer)
    if draft.kind == "rl" and "older" in draft.versions and named and named == draft.left.get(orchestrator):
        _move_as(draft, trainer, root, named)
        draft.drop(orchestrator, "output_dir sets it")


def _resume(draft: Draft) -> None:
    """`[resume]` without a step resumes from the latest checkpoint."""
    for path, value in list(draft.left.items()):
        if path[-1] == "resume" and value == "None":
            draft.drop(path, "off by default")
        is_latest = (path[-1] == "resume" and value == {}) or (path[-2:] == ("resume", "step") and value == "None")
        table = path[: path.index("resume")] if is_latest else ()
        if is_latest and (*table, "resume", "dir") not in draft.left:
            _move_as(draft, path, (*table, "ckpt", "resume_step"), -1)


def _list_base_url(draft: Draft) -> None:
    for path in [path for path in draft.left if path[-3:] == ("model", "client", "base_url")]:
        if isinstance(draft.left[path], str):
            _move_as(draft, path, (*path[:-3], "client", "base_url"), [draft.left[path]])


def _fix_concurrency(draft: Draft) -> None:
    """Newer versions adapt the number of rollouts in flight between two bounds. Equal bounds make it constant."""
    table = draft.located("orchestrator.concurrency")
    if table is None:
        return
    given = draft.below(table)
    bounds = {given.get((*table, f"{bound}_inflight")) for bound in ("initial", "min", "max")}
    if len(given) == 3 and len(bounds) == 1 and None not in bounds:
        first, *others = given
        _move_as(draft, first, (*table[:-1], "max_inflight_rollouts"), given[first])
        for path in others:
            draft.drop(path, "merged into max_inflight_rollouts")


def _keep_custom_loss(draft: Draft) -> None:
    table = draft.located("trainer.loss")
    if table is None or draft.left.get((*table, "type")) != "custom":
        return
    for path in draft.below(table):
        draft.keep(path)
    if "newer" in draft.versions:
        draft.note(f"{key_text(table)}: check the signature of your function against prime_rl.trainer.rl.loss")


def _disable_fused_head(draft: Draft) -> None:
    old = "fused_lm_head_token_chunk_size"
    for path in [path for path in draft.left if path[-1] == old and draft.left[path] == "disabled"]:
        _move_as(draft, path, (*path[:-1], "fused_lm_head_chunk_size"), "disabled")


def _list_eval_counts(draft: Draft) -> None:
    """`eval` takes a list: one number per environment, or a single one for all."""
    if draft.kind != "eval":
        return
    targets = {name: name for name in ("num_examples", "rollouts_per_example")} | {"group_size": "rollouts_per_example"}
    for name, target in targets.items():
        value = draft.left.get((name,))
        if isinstance(value, int) and not isinstance(value, bool):
            _move_as(draft, (name,), (target,), [value])


def _move_as(draft: Draft, origin: KeyPath, target: KeyPath, value: Any) -> None:
    if draft.move(origin, {target: value}):
        _report_move(draft, origin, target, value)


def _place(draft: Draft, origin: KeyPath, target: KeyPath) -> None:
    if draft.move(origin, {target: draft.left[origin]}):
        _report_move(draft, origin, target)


def _report_move(draft: Draft, origin: KeyPath, target: KeyPath, value: Any = None) -> None:
    shown_value = "" if value is None else f" = {shown(value)}"
    draft.findings.append(Finding("moved", f"{key_text(origin)} -> {key_text(target)}{shown_value}", origin))


# Everything else, by the tables of renamed, removed and different keys


def carry_by_tables(draft: Draft) -> None:
    """Decide on every setting that is left."""
    root = ROOTS[draft.kind]
    for path, value in list(draft.left.items()):
        key = draft.qualified(path)
        same = next((each for each in SAME_HERE if each.applies(key, value, draft.versions)), None)
        different = next((each for each in DIFFERENT if each.applies(key, value, draft.versions)), None)
        if same is not None:
            draft.drop(path, same.why)
        elif different is not None:
            draft.refuse(path, different.why, different.instead)
        elif is_current(root, draft.kind, names(path)):
            draft.keep(path)
        else:
            _carry_renamed(draft, path, value)


def _carry_renamed(draft: Draft, path: KeyPath, value: Any) -> None:
    found = find_renamed(*split_component(draft.kind, ".".join(names(path))))
    if found is None:
        draft.refuse(path, "no known version has this key", advice_for_key(ROOTS[draft.kind], key_text(path)) or "")
        return
    entry, below = found
    if not entry.new:
        why = "it was removed" if entry in OLDER else "it is not supported"
        draft.refuse(path, why, "" if entry.note == "remove it" else entry.note)
    elif entry.value == "rewrite":
        draft.refuse(path, f"it became {_replacement(draft, path, entry)}, which works differently", entry.note)
    else:
        _move(draft, path, entry, len(below.split(".")) if below else 0)


def _move(draft: Draft, path: KeyPath, entry: Renamed, depth: int) -> None:
    """Move a setting that is `depth` names below the table that was renamed."""
    value = draft.left[path]
    if entry.value == "inverted" and not isinstance(value, bool):
        draft.refuse(path, "its value is not a boolean", "")
        return
    tail = path[_start_of_tail(path, depth) :]
    targets = {}
    for new in _replacements(draft, path, entry):
        table = draft.located(new)
        if table is None or not has_key(ROOTS[draft.kind], names((*table, *tail))):
            missing = f"{key_text((*table, *tail))} here" if table is not None else f"{new} in this config"
            draft.refuse(path, f"there is no {missing}", entry.note)
            return
        targets[_with_indices(path, table) + tail] = not value if entry.value == "inverted" else value
    if draft.move(path, targets):
        old = key_text(path[: len(path) - len(tail)])
        shown = " and ".join(key_text(target[: len(target) - len(tail)]) for target in targets)
        note = f" ({entry.note})" if entry.note else ""
        draft.findings.append(Finding("moved", f"{old} -> {shown}{note}", path))


def _start_of_tail(path: KeyPath, depth: int) -> int:
    start = len(path)
    while depth:
        start -= 1
        depth -= isinstance(path[start], str)
    return start


def _replacements(draft: Draft, path: KeyPath, entry: Renamed) -> list[str]:
    component = draft.qualified(path).partition(".")[0]
    return [new.replace("*", component, 1) for new in entry.new]


def _replacement(draft: Draft, path: KeyPath, entry: Renamed) -> str:
    paths = [draft.located(new) for new in _replacements(draft, path, entry)]
    return ", ".join(
        key_text(located) if located is not None else new
        for located, new in zip(paths, _replacements(draft, path, entry), strict=True)
    )


def _with_indices(path: KeyPath, table: KeyPath) -> KeyPath:
    """`table` with the indices that `path` has behind the same names."""
    indices = {names(path[:at]): path[at] for at in range(len(path)) if isinstance(path[at], int)}
    result: KeyPath = ()
    for name in table:
        result = (*result, name)
        if names(result) in indices:
            result = (*result, indices[names(result)])
    return result


def keep_sections(draft: Draft) -> None:
    """Keep a table whose presence has a meaning, even if nothing in it was carried: `[ckpt]` enables checkpoints."""
    tables = dict.fromkeys(path[:length] for path in draft.source for length in range(1, len(path)))
    for table in tables:
        found = find_renamed(*split_component(draft.kind, ".".join(names(table))))
        here = [table]
        if found is not None and found[0].value == "same" and not found[1]:
            here = [located for new in _replacements(draft, table, found[0]) if (located := draft.located(new))]
        for target in here:
            if _counts_if_empty(draft, target) and not draft.holds(target):
                draft.placed[target] = Placed({}, table)


def _counts_if_empty(draft: Draft, table: KeyPath) -> bool:
    """Whether this version has an optional section, or a component's, at `table`."""
    if any(isinstance(part, int) for part in table) or any(
        each.key == draft.qualified(table) and not each.values for each in DIFFERENT
    ):
        return False
    site = find_key(ROOTS[draft.kind], key_text(table))
    is_component = len(table) == 1 and table[0] in SECTIONS_OF_RL
    return site is not None and site.is_section and (is_nullable(site.kinds) or is_component)


# What this version's config classes say about the result


WHY_NOT_BUILT = "not supported yet"


def check(draft: Draft, file: Path) -> None:
    """Refuse what this version cannot use. Faults that remain become findings.

    `toml_files` are read from the directory of `file`.
    """
    for target, entry in list(_not_built(draft)):
        if target in draft.placed:
            draft.refuse(draft.take_back(target), WHY_NOT_BUILT, entry.why)
    try:
        _take_out_misfits(draft, file, _bases(draft, file))
    except ConfigError as error:
        draft.findings += [Finding("fault", fault) for fault in error.faults]


def _take_out_misfits(draft: Draft, file: Path, bases: list[Layer]) -> None:
    """Validate and refuse what does not fit, until the rest loads.

    One pass is not enough: validators run only once the types fit, and taking out a key can uncover another fault.
    """
    root = ROOTS[draft.kind]
    while True:
        own = Layer(str(file), {key: value for key, value in draft.data.items() if key != BASES_KEY})
        layers = [with_underscores(root, layer) for layer in (*bases, own)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConfigWarning)
                config = root.model_validate(merge_layers(root, layers))
            # Unimplemented settings that come from `toml_files` or are derived from others.
            draft.findings += [Finding("fault", fault) for fault in unbuilt_faults(config)]
            return
        except ValidationError as error:
            misfits = list(_misfits(draft, error))
            if not misfits:
                raise ConfigError(faults_of(root, error, layers)) from None
        for target, fault in misfits:
            if target in draft.placed:
                draft.refuse(draft.take_back(target), fault, "")


def _bases(draft: Draft, file: Path) -> list[Layer]:
    named = draft.placed.get((BASES_KEY,))
    if named is None or not isinstance(named.value, list):
        return []
    draft.note(f"{BASES_KEY}: migrate these files too; in this version, a file's own keys override theirs")
    return read_files(file.parent / str(name) for name in named.value).layers


def _misfits(draft: Draft, error: ValidationError) -> Iterator[tuple[KeyPath, str]]:
    """Settings that the classes do not know, and moved settings whose value does not fit; with the reason."""
    root = ROOTS[draft.kind]
    for detail in error.errors(include_url=False):
        path = locate(root, detail["loc"]).path
        moved = path in draft.placed and draft.placed[path].origin != path
        targets = [target for target in draft.placed if target[: len(path)] == path]
        if moved or detail["type"] == "extra_forbidden":
            fault = _fault(root, detail, draft.data)
            yield from ((target, fault) for target in targets)


def _fault(root: type[BaseSettings], detail: ErrorDetails, data: dict[str, Any]) -> str:
    """One validation error in words, without the file's name."""
    single = InitErrorDetails(type=detail["type"], loc=detail["loc"], input=detail["input"])
    if "ctx" in detail:
        single["ctx"] = detail["ctx"]
    error = ValidationError.from_exception_data(root.__name__, [single])
    return faults_of(root, error, [Layer("", data)])[0].removeprefix(": ")


def _not_built(draft: Draft) -> Iterator[tuple[KeyPath, NotBuilt]]:
    """Settings that load but are not implemented."""
    defaults: dict[str, list[Any]] = {}
    for path, _, field in walk_fields(ROOTS[draft.kind]):
        if not field.is_required():
            defaults.setdefault(draft.qualified(path), []).append(field.get_default(call_default_factory=True))
    for entry in NOT_BUILT:
        for target, placed in draft.placed.items():
            key = draft.qualified(target)
            value = with_nulls(placed.value)
            is_default = key == entry.key and value in defaults.get(key, ())
            if (key == entry.key or key.startswith(f"{entry.key}.")) and (
                value in entry.values if entry.values else not is_default
            ):
                # The other keys of a variant have no meaning without its `type`.
                table = target[:-1] if target[-1] == "type" else target
                yield from ((each, entry) for each in draft.placed if each[: len(table)] == table)


def note_defaults(draft: Draft) -> None:
    """Note the defaults that differ, for keys that the new file leaves out."""
    for version in sorted(draft.versions):
        for default in DEFAULTS[version]:
            component, *key = default.key.split(".")
            path = draft.located(default.key)
            needs = draft.located(default.needs or component)
            if path is None or needs is None or not (needs == () or draft.holds(needs)):
                continue
            if not any(_has_run(names(each), key) for each in draft.placed):
                draft.note(f"default of {key_text(path)}: it was {default.theirs}; here it is {default.ours}")


def _has_run(names: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether `names` contains `wanted` in one piece. A shared key counts for its components, and the reverse."""
    return any(list(names[at : at + len(wanted)]) == list(wanted) for at in range(len(names)))


# The file as a whole: read, rewritten by the rules above, and reported.


MAX_BYTES = 64 * 1024
MAX_VALUES = 1000
MAX_DEPTH = 50
"""Limits well above any real config. A larger file could take minutes."""

ORDER: Mapping[Verdict, int] = {"moved": 0, "dropped": 1, "note": 2, "not carried": 3, "fault": 4}
"""Order of the report: the most important lines come last."""
VERSIONS: Mapping[Version, str] = {"older": "an older version", "newer": "a newer version"}


@dataclass(frozen=True, slots=True)
class Migration:
    """The new file and its report, line by line."""

    text: str
    report: tuple[str, ...]
    complete: bool
    """Whether everything was carried and the new file loads."""


def migrate(file: Path, kind: str | None = None) -> Migration:
    """Rewrite the config in `file` for the command `kind`. None finds the command from the keys.

    Raises:
        UsageError: the file is not a config, or its command is ambiguous.
    """
    text = _read(file)
    data = _parse(file, text)
    settings = dict(leaves(data))
    try:
        kind = kind or kind_of(settings)
    except UsageError as error:
        raise UsageError(f"{file}: {error}") from None
    draft = Draft(kind, versions_of(kind, settings), settings)
    rewrite_environments(draft)
    rewrite_by_hand(draft)
    carry_by_tables(draft)
    keep_sections(draft)
    check(draft, file)
    draft.findings += missing_environments(draft)
    note_defaults(draft)
    document = split_statements(text)
    complete = not any(each.verdict in ("not carried", "fault") for each in draft.findings)
    return Migration(_written(document, draft, data), tuple(_report(file, document, draft)), complete)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise UsageError(f"{file}: no such file") from None
    except IsADirectoryError:
        raise UsageError(f"{file}: a directory, not a TOML file") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror})") from None
    if len(content) > MAX_BYTES:
        raise UsageError(f"{file}: more than {MAX_BYTES // 1024} KiB: not a config")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: not UTF-8 text (byte {error.start})") from None


def _parse(file: Path, text: str) -> dict[str, Any]:
    try:
        data = parse_toml(file, text)
    except ConfigError as error:
        raise UsageError(*error.faults) from None
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH):
        level = [item for value in level for item in _items(value)]
        if len(level) > MAX_VALUES:
            raise UsageError(f"{file}: more than {MAX_VALUES} values: not a config")
    if level:
        raise UsageError(f"{file}: tables or lists are nested too deeply")
    return data


def _items(value: Any) -> Collection[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _written(document: Document, draft: Draft, old: dict[str, Any]) -> str:
    """The new settings in the old layout, or the old text if nothing changed."""
    new = draft.data
    if new == old:
        return document.text
    text = write_layout(document, draft)
    if not _reads_as(text, new):
        draft.note("the comments and the order of the file could not be kept")
        return tomli_w.dumps(new)
    return text


def _reads_as(text: str, data: dict[str, Any]) -> bool:
    try:
        return tomllib.loads(text) == data
    except tomllib.TOMLDecodeError:
        return False


def _report(file: Path, document: Document, draft: Draft) -> Iterator[str]:
    """One line per finding, then a summary."""
    lines = {statement.path: statement.line for statement in document.statements}
    in_order = sorted(draft.findings, key=lambda each: (ORDER[each.verdict], _line(each, lines)))
    # Settings of a table that moved have equal texts. Keep the first.
    findings = list({(each.verdict, each.text): each for each in reversed(in_order)}.values())[::-1]
    for finding in findings:
        line = _line(finding, lines)
        place = f"{file}:{line}" if line else str(file)
        is_fault = finding.verdict == "fault"
        yield f"fault: {finding.text}" if is_fault else f"{place}: {finding.verdict}: {finding.text}"
    counts = Counter(each.verdict for each in findings)
    decided: tuple[Verdict, ...] = ("moved", "dropped", "not carried")
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in decided if counts[verdict])
    versions = " and ".join(VERSIONS[version] for version in sorted(draft.versions)) or "this version"
    yield f"{file}: {draft.kind} config of {versions}: {told or 'nothing to change'}"


def _line(finding: Finding, lines: Mapping[KeyPath, int]) -> int:
    """Line number of a finding; 0 for the whole file."""
    origin = finding.origin or ()
    return next((lines[origin[:length]] for length in range(len(origin), 0, -1) if origin[:length] in lines), 0)
