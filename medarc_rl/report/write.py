"""Puts a report together and writes its files: one HTML page that needs no network, and PNGs of its charts."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from medarc_rl.report.charts import Chart, Group, Section, Table, unique_names
from medarc_rl.report.curves import (
    curves_of,
    data_section,
    evaluation_charts,
    evaluation_table,
    finals_table,
    never_happened,
    signs_section,
    training_charts,
)
from medarc_rl.report.facts import (
    Spendings,
    Tile,
    attempts_section,
    costs_section,
    differing_keys,
    machine_tables,
    moment,
    runs_table,
    settings_section,
    tiles,
)
from prime_rl.history.rollouts import Conversation, KeptRollout, KeptRollouts, content_text, image_digests
from prime_rl.history.run import RunHistory, spending_of
from prime_rl.utils.files import replacing_file
from prime_rl.utils.logger import count_of

# Kept rollouts for the page: an index that it loads at once, and blocks of texts that it unpacks when needed.


MAX_ROLLOUTS = 10_000
"""Largest number of rollouts on a page. With more, every second one is left out until they fit."""
MAX_BYTES = 128 * 2**20
"""Largest size of the rollouts as JSON. gzip then compresses them to about a fifth."""
BLOCK_ROLLOUTS = 64
MAX_TOKENS = 4096
"""Tokens of a rollout whose log-probabilities are shown."""
MAX_TEXT_CHARS = 100_000
MAX_MESSAGE_PICTURES = 64
PREVIEW_CHARS = 120
MAX_PICTURES = 2000
"""Different images of rollouts that are shown: 30 MB of small pictures, in 10 seconds."""
_MILLI = 1000


@dataclass(slots=True)
class PackedRollouts:
    """Rollouts as the page embeds them: base64 of gzip of JSON, so that no character of a rollout reaches the HTML."""

    index: str = ""
    blocks: list[str] = field(default_factory=list)
    count: int = 0
    left_out: int = 0
    notes: list[str] = field(default_factory=list)
    pictures: str = ""
    """Small pictures of images by SHA-256."""
    answers: dict[int, dict[int, list[tuple[object, str]]]] = field(default_factory=dict)
    """By number of the run and step: problem and text of each completion that was kept by chance."""


@dataclass(slots=True)
class _Thinning:
    """Collects the rollouts of one run, and drops every second one whenever there are too many."""

    limit: int
    max_bytes: int
    kept: list[tuple[list[Any], str, list[str]]] = field(default_factory=list)
    """Rows of the list, details as JSON, which takes less memory than objects, and digests of images."""
    seen: int = 0
    _stride: int = 1
    _bytes: int = 0

    def add(self, run: int, rollout: KeptRollout, text: str) -> None:
        place, self.seen = self.seen, self.seen + 1
        if place % self._stride:
            return
        detail = _json(_detail(rollout))
        self.kept.append((_entry(run, rollout, text), detail, rollout.images))
        self._bytes += len(detail)
        while len(self.kept) > 1 and (len(self.kept) > self.limit or self._bytes > self.max_bytes):
            self.kept = self.kept[::2]
            self._stride *= 2
            self._bytes = sum(len(each) for _, each, _ in self.kept)


def pack_rollouts(
    runs: Sequence[RunHistory], names: Sequence[str], limit: int = MAX_ROLLOUTS, max_bytes: int = MAX_BYTES
) -> PackedRollouts:
    """Read the kept rollouts of some runs, and pack those that fit on the page."""
    packed = PackedRollouts()
    rows: list[tuple[list[Any], str, list[str]]] = []
    pictures: dict[str, str] = {}
    seen: set[str] = set()
    for number, run in enumerate(runs):
        kept = KeptRollouts(run.paths)
        thinning = _Thinning(max(1, limit // len(runs)), max_bytes // len(runs))
        answers = packed.answers.setdefault(number, {})
        for rollout in kept.all():
            text = final_text(rollout)
            if rollout.step is not None and rollout.is_unbiased:
                answers.setdefault(rollout.step, []).append(((rollout.env, rollout.row), text))
            thinning.add(number, rollout, text)
        rows += thinning.kept
        for digest in (each for *_, images in thinning.kept for each in images if each not in pictures):
            seen.add(digest)
            if len(pictures) < MAX_PICTURES and (picture := kept.picture(digest)) is not None:
                pictures[digest] = picture
        packed.left_out += thinning.seen - len(thinning.kept)
        packed.notes += kept.faults
    packed.count = len(rows)
    packed.pictures = _packed(_json(pictures)) if pictures else ""
    if len(seen) > len(pictures):
        packed.notes.append(f"Of {count_of('image', len(seen))}, {len(pictures):,} have a picture here.")
    packed.index = _packed(_json({"runs": list(names), "block": BLOCK_ROLLOUTS, "rows": [entry for entry, *_ in rows]}))
    for start in range(0, len(rows), BLOCK_ROLLOUTS):
        details = ",".join(detail for _, detail, _ in rows[start : start + BLOCK_ROLLOUTS])
        packed.blocks.append(_packed(f"[{details}]"))
    return packed


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _packed(text: str) -> str:
    """Base64 of gzip. An unpaired surrogate, which JSON can hold, becomes a question mark."""
    return base64.b64encode(gzip.compress(text.encode(errors="replace"), 6, mtime=0)).decode()


def _entry(run: int, rollout: KeptRollout, text: str) -> list[Any]:
    """A row of the list. `browser.js` names the columns in the same order."""
    preview = " ".join(text[: 4 * PREVIEW_CHARS].split())[:PREVIEW_CHARS]
    return [
        run,
        rollout.step,
        rollout.eval_version,
        rollout.env,
        _number(rollout.reward),
        _number(rollout.advantage),
        int(rollout.is_truncated),
        int(rollout.error is not None),
        rollout.completion_tokens,
        preview,
    ]


def _detail(rollout: KeptRollout) -> dict[str, Any]:
    facts = {
        "problem": rollout.row,
        "group": rollout.group,
        "rollout": rollout.rollout,
        "policy version": rollout.policy_version,
        "lag": rollout.lag,
        "stopped by": rollout.stop_condition,
        "masked by": rollout.masked_by,
        "kept as": ", ".join(rollout.kept),
        "characters cut": rollout.cut_chars or None,
        "tokens cut": rollout.cut_tokens or None,
    }
    return {
        "prompt": [_message(message) for message in rollout.prompt],
        "completion": [_message(message) for message in rollout.completion],
        "metrics": {name: _number(value) for name, value in rollout.metrics.items()},
        "weights": {name: _number(value) for name, value in rollout.weights.items()},
        "facts": {name: value for name, value in facts.items() if value is not None},
        "error": rollout.error,
        "lines": list(_lines(rollout.conversations)),
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Role, text and tool calls of a message."""
    found: dict[str, Any] = {"role": str(message.get("role", "?")), "text": _cut(content_text(message.get("content")))}
    if thoughts := message.get("reasoning_content"):
        found["thoughts"] = _cut(str(thoughts))
    if images := list(dict.fromkeys(image_digests(message))):
        found["images"] = images[:MAX_MESSAGE_PICTURES]
    if calls := [_call(each) for each in message.get("tool_calls") or () if each]:
        found["calls"] = calls
    return found


def _call(call: object) -> dict[str, str]:
    """A tool call is a dictionary in the format of OpenAI's API, or that dictionary as JSON text."""
    if isinstance(call, str):
        try:
            call = json.loads(call)
        except (ValueError, RecursionError):
            return {"name": "?", "arguments": _cut(str(call))}
    if not isinstance(call, dict):
        return {"name": "?", "arguments": _cut(str(call))}
    function = call.get("function")
    source = function if isinstance(function, dict) else call
    arguments = source.get("arguments", "")
    return {"name": str(source.get("name", "?")), "arguments": _cut(content_text(arguments))}


def final_text(rollout: KeptRollout) -> str:
    """The last message that the model wrote, or else the error."""
    own = [message for message in rollout.completion if message.get("role") in ("assistant", "text")]
    texts = [text for message in own if (text := content_text(message.get("content")))]
    return texts[-1] if texts else rollout.error or ""


def _lines(conversations: Sequence[Conversation]) -> Iterator[dict[str, Any]]:
    """Tokens of each line of conversation, log-probabilities in thousandths."""
    room = MAX_TOKENS
    for each in conversations:
        tokens = [*each.prompt, *each.completion][:room]
        room -= len(tokens)
        if tokens and any(token.text is not None for token in tokens):
            yield {
                "prompt": min(len(each.prompt), len(tokens)),
                "texts": [f"[{token.id}]" if token.text is None else token.text for token in tokens],
                "engine": [_thousandths(token.engine_logprob) for token in tokens],
                "trainer": [_thousandths(token.trainer_logprob) for token in tokens],
                "entropy": [_thousandths(token.entropy) for token in tokens],
            }


def _thousandths(value: float | None) -> int | None:
    return None if value is None else round(_MILLI * value)


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


def _cut(text: str) -> str:
    if len(text) <= MAX_TEXT_CHARS:
        return text
    return f"{text[:MAX_TEXT_CHARS]}\n[… {len(text) - MAX_TEXT_CHARS:,} characters are left out here]"


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
        page.sections.append(differing_keys(groups))
    page.sections.append(_training(groups, kind))
    if not is_single:
        page.sections.append(_finals(groups, kind))
    page.sections.append(_evaluation(groups, kind))
    if kind == "rl" and is_single:
        page.sections.append(signs_section(runs[0], packed.answers.get(0, {})))
    if kind != "sft":
        page.sections.append(_rollouts(packed, with_rollouts))
        page.browser = Browser(packed.index, packed.blocks, packed.pictures) if packed.count else None
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
        section.notes.append(
            "All kept rollouts. For large batches, a run keeps the best group, the worst group and a random sample."
        )
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


# The page

_ASSETS = files("medarc_rl.report") / "page"
LIBRARY = "vendor/echarts.common.min.js"
SCRIPTS = ("theme.js", "charts.js", "browser.js")


@dataclass(frozen=True, slots=True)
class Browser:
    """The rollouts of the page. Texts are base64, so that nothing in a rollout can end a script."""

    index: str
    blocks: Sequence[str]
    pictures: str


@dataclass(slots=True)
class Page:
    """Everything that a report shows."""

    title: str
    subtitle: str
    tiles: Sequence[Tile]
    sections: list[Section] = field(default_factory=list)
    overview: Table | None = None
    browser: Browser | None = None

    @property
    def charts(self) -> list[Chart]:
        return [chart for section in self.sections for chart in section.charts]

    def render(self) -> str:
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(str(_ASSETS)),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        library, own = _script(LIBRARY), "\n".join(_script(name) for name in SCRIPTS)
        return environment.get_template("report.html.j2").render(
            page=self,
            style=asset("report.css"),
            library=library,
            script=own,
            policy=_policy(library, own),
            charts=island({f"{section.key}-{chart.key}": chart.as_json() for section, chart in self._placed()}),
        )

    def _placed(self) -> list[tuple[Section, Chart]]:
        return [(section, chart) for section in self.sections for chart in section.charts]


def asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8")


def _script(name: str) -> str:
    """A script as it stands between its tags. The page's hash must be that of exactly this text."""
    text = asset(name)
    if "</script" in text.lower():
        raise ValueError(f"{name} would end its own script tag")
    return text.strip()


def _policy(*scripts: str) -> str:
    """Content security policy: exactly our scripts run, and nothing is fetched from anywhere."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def island(value: Any) -> str:
    """JSON that can stand in a script tag: no text in it can end the tag or start a comment."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"), allow_nan=False)
    for character, escape in _UNSAFE.items():
        text = text.replace(character, escape)
    return text


# Pictures, drawn with matplotlib, which needs no browser

COLORS = ("#2563c9", "#c2570c", "#16803f", "#8b3fc4", "#b4235f", "#0e7f8c", "#7a6a00", "#59636f")
"""The palette of the page's light theme."""
HINT = "no PNGs: matplotlib is not installed; `uv sync --inexact --extra report` installs it"


class NoMatplotlib(Exception):
    """matplotlib is not installed. The message is one line."""


def draw_pictures(charts: Sequence[Chart], directory: Path) -> list[Path]:
    """Write a PNG for each chart. Raises NoMatplotlib, or OSError."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib(HINT) from error
    written = []
    for chart in charts:
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        FigureCanvasAgg(figure)
        _draw(chart, figure.subplots())
        target = directory / f"{_file_name(chart.key)}.png"
        with replacing_file(target) as scratch:
            scratch.touch(mode=0o600)
            figure.savefig(scratch, format="png", dpi=120)
        written.append(target)
    return written


def _draw(chart: Chart, axes) -> None:  # type: ignore[no-untyped-def]
    # Titles are data: a dollar sign must not start a formula.
    shown = chart.as_json()
    if chart.is_stacked:
        steps = sorted({step for line in shown["lines"] for step, _ in line["points"]})
        rows = [[dict(line["points"]).get(step) or 0.0 for step in steps] for line in shown["lines"]]
        colors = [COLORS[line["color"] % len(COLORS)] for line in shown["lines"]]
        axes.stackplot(steps, rows, labels=[_plain(line["title"]) for line in shown["lines"]], colors=colors, alpha=0.8)
    else:
        for line in shown["lines"]:
            color = COLORS[line["color"] % len(COLORS)]
            values = [float("nan") if value is None else value for _, value in line["points"]]
            marker = "o" if len(values) <= 25 else None
            axes.plot(
                [step for step, _ in line["points"]],
                values,
                color=color,
                label=_plain(line["title"]),
                marker=marker,
                markersize=3,
                linewidth=1.5,
                linestyle="--" if line["dashed"] else "-",
            )
            if band := line.get("band"):
                rows = [row for row in band["rows"] if None not in row]
                axes.fill_between(*zip(*rows, strict=True), color=color, alpha=0.18, linewidth=0) if rows else None
    axes.set_title(_plain(f"{chart.title} ({chart.unit})" if chart.unit else chart.title), loc="left", fontsize=10)
    axes.set_xlabel(chart.x_title, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if len(shown["lines"]) > 1:
        axes.legend(fontsize=7, frameon=False)


def _plain(text: str) -> str:
    return text.replace("\\", "/").replace("$", "\\$")


def _file_name(key: str) -> str:
    return re.sub(r"[^\w.-]+", "-", key).strip("-.") or "chart"
