"""Conversions that need code: keys that merge or depend on each other, and values that change their type."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from medarc_rl.migrate.draft import Draft, Finding
from medarc_rl.migrate.values import key_text, shown
from prime_rl.utils.tables import KeyPath

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


def tell_move(draft: Draft, origin: KeyPath, target: KeyPath, value: Any = None) -> None:
    shown_value = "" if value is None else f" = {shown(value)}"
    draft.findings.append(Finding("moved", f"{key_text(origin)} -> {key_text(target)}{shown_value}", origin))


def _move_as(draft: Draft, origin: KeyPath, target: KeyPath, value: Any) -> None:
    if draft.move(origin, {target: value}):
        tell_move(draft, origin, target, value)


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
