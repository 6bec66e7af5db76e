"""Puts a report together, and writes its files."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from medarc_rl.report.browser import PackedRollouts, pack_rollouts
from medarc_rl.report.charts import Section
from medarc_rl.report.configs import differing_keys, settings_section
from medarc_rl.report.costs import Spendings, costs_section
from medarc_rl.report.curves import curves_of, evaluation_charts, never_happened, training_charts
from medarc_rl.report.groups import Group, unique_names
from medarc_rl.report.machines import attempts_section, machine_tables
from medarc_rl.report.overview import moment, tiles
from medarc_rl.report.page import Browser, Page
from medarc_rl.report.pictures import NoMatplotlib, draw_pictures
from medarc_rl.report.signs import signs_section
from medarc_rl.report.tables import data_section, evaluation_table, finals_table, runs_table
from prime_rl.history.run import RunHistory
from prime_rl.history.spending import spending_of
from prime_rl.utils.files import replacing_file

NAME = "report.html"
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700
KINDS = {"rl": "RL", "sft": "SFT", "eval": "evaluation"}


@dataclass(slots=True)
class Written:
    """The files of a report."""

    page: Path
    rollouts: int
    pictures: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def write_report(
    groups: Sequence[Group], directory: Path, price: float | None, with_rollouts: bool, with_pictures: bool
) -> Written:
    """Write `report.html` and the PNGs. Raises OSError."""
    runs = [run for group in groups for run in group.runs]
    packed = pack_rollouts(runs, unique_names(runs)) if with_rollouts else PackedRollouts()
    page = build_page(groups, price, packed, with_rollouts)
    directory.mkdir(parents=True, exist_ok=True, mode=DIRECTORY_MODE)
    target = directory / NAME
    with replacing_file(target) as scratch:
        scratch.touch(mode=FILE_MODE)
        scratch.write_text(page.render(), encoding="utf-8", errors="replace")
    written = Written(target, packed.count)
    if with_pictures:
        try:
            written.pictures = draw_pictures(page.charts, directory)
        except NoMatplotlib as missing:
            written.warnings.append(str(missing))
    return written


def build_page(groups: Sequence[Group], price: float | None, packed: PackedRollouts, with_rollouts: bool) -> Page:
    now_s = time.time()
    runs = [run for group in groups for run in group.runs]
    spendings: Spendings = {id(run): spending_of(run, now_s) for run in runs}
    kind = runs[0].kind
    is_single = len(runs) == 1
    titles = [group.label for group in groups]
    several = "" if is_single else f", {len(runs)} runs compared"
    page = Page(
        title=", ".join(titles) if len(titles) <= 4 else f"{len(titles)} runs compared",
        subtitle=f"{KINDS[kind]}{several} · {moment(now_s)} · {_places(runs)}",
        tiles=tiles(runs[0], spendings[id(runs[0])], price) if is_single else [],
        overview=None if is_single else runs_table(groups, dict(spendings)),
    )
    if not is_single:
        page.sections += [differing_keys(groups), _finals(groups, kind)]
    page.sections.append(_training(groups, kind))
    page.sections.append(_evaluation(groups, kind))
    if kind == "rl" and is_single:
        page.sections.append(signs_section(runs[0], packed.answers.get(0, {})))
    if kind != "sft":
        page.sections.append(_rollouts(packed, with_rollouts))
        page.browser = Browser(packed.index, packed.blocks) if packed.count else None
    page.sections += [data_section(groups), costs_section(groups, spendings, price)]
    page.sections += _what_ran(runs, spendings)
    return page


def _places(runs: Sequence[RunHistory]) -> str:
    return ", ".join(str(run.paths.root.resolve()) for run in runs[:3]) + (", …" if len(runs) > 3 else "")


def _training(groups: Sequence[Group], kind: str) -> Section:
    section = Section("training", "Training")
    if not curves_of(kind):
        return section
    section.charts += training_charts(groups, kind)
    if section.charts:
        section.notes += never_happened(groups, kind)
        if any(len(group.runs) > 1 for group in groups):
            section.notes.append(
                "Lines are means of the runs of a label that have the step; bands span from the lowest to the highest."
            )
    else:
        section.notes.append("No step has been finished, so there are no curves.")
    return section


def _evaluation(groups: Sequence[Group], kind: str) -> Section:
    section = Section("evaluation", "Evaluation")
    section.charts += evaluation_charts(groups)
    runs = [run for group in groups for run in group.runs]
    if len(runs) == 1 and (table := evaluation_table(runs[0])) is not None:
        section.tables.append(table)
    if section.is_empty and kind == "eval":
        section.notes.append("No set of weights has been evaluated.")
    return section


def _finals(groups: Sequence[Group], kind: str) -> Section:
    section = Section("finals", "Final values")
    if (table := finals_table(groups, kind)) is not None:
        section.tables.append(table)
    else:
        section.notes.append("No run has finished a step.")
    return section


def _rollouts(packed: PackedRollouts, with_rollouts: bool) -> Section:
    section = Section("rollouts", "Rollouts")
    section.warnings += packed.notes
    if not with_rollouts:
        section.notes.append("Left out by --no-rollouts.")
    elif not packed.count:
        section.notes.append("The run has kept no rollouts.")
    elif packed.left_out:
        section.notes.append(f"{packed.left_out:,} of {packed.left_out + packed.count:,} kept rollouts are left out.")
    else:
        section.notes.append("All kept rollouts. Of large batches a run keeps a sample, the best and the worst.")
    return section


def _what_ran(runs: Sequence[RunHistory], spendings: Spendings) -> list[Section]:
    if len(runs) == 1:
        settings = settings_section(runs[0])
        settings.tables += machine_tables(runs)
        return [settings, attempts_section(runs[0], spendings[id(runs[0])])]
    machines = Section("machines", "Machines and versions", tables=machine_tables(runs))
    attempts = Section("attempts", "Attempts and warnings")
    for run, name in zip(runs, unique_names(runs), strict=True):
        own = attempts_section(run, spendings[id(run)])
        attempts.notes += [f"{name}: {note}" for note in own.notes]
        attempts.warnings += [f"{name}: {warning}" for warning in own.warnings]
        attempts.tables += [replace(table, caption=f"{table.caption} of {name}") for table in own.tables]
        attempts.listings += [(f"{name}: {title}", text) for title, text in own.listings]
    return [machines, attempts]
