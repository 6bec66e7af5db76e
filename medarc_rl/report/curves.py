"""Metrics of a report over steps, as charts and tables of final values, and signs of a reward that is exploited."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean, stdev

from medarc_rl.report.charts import (
    Band,
    Chart,
    Group,
    Line,
    Section,
    Series,
    Table,
    chart_of,
    short,
    without_start,
)
from prime_rl.history.metrics import MIN_VALUES, Z_LIMIT, Trend, finite, trend
from prime_rl.history.run import ORCHESTRATOR, RunHistory
from prime_rl.run.pictures import read_contact_sheet
from prime_rl.utils.errors import one_line
from prime_rl.utils.logger import count_of

TRAIN = "train"
"""Stands for the source of the loss: `trainer`, or `sft`."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric that every run of a kind may have."""

    metric: str
    source: str
    title: str
    unit: str = ""
    spread: tuple[str, str, str] | None = None
    """Title of a band, and the metrics of its ends. With an empty third name, the second is a standard deviation."""
    scale: float = 1.0
    median: str = ""
    """Metric of a second line."""
    per: str = ""
    """Metric to divide by."""
    also: str = ""
    """Metric of the same in runs that do not have the first: reward models have names of their own."""

    def read(self, run: RunHistory) -> Series:
        source = run.trainer if self.source == TRAIN else self.source
        series = run.metrics.series(self.metric, source) or run.metrics.series(self.also, source)
        if self.per:
            divisors = run.metrics.series(self.per, source)
            series = {step: value / divisors[step] for step, value in series.items() if divisors.get(step)}
        return _scaled(series, self.scale)

    def band(self, run: RunHistory) -> Band | None:
        if self.spread is None:
            return None
        title, first, second = self.spread
        source = run.trainer if self.source == TRAIN else self.source
        low = _scaled(run.metrics.series(first, source), self.scale)
        if second:
            high = _scaled(run.metrics.series(second, source), self.scale)
        else:
            mean = self.read(run)
            low, high = (
                {step: mean[step] + sign * value for step, value in low.items() if step in mean} for sign in (-1, 1)
            )
        return Band(title, low, high) if low and high else None


REWARD = Curve(
    "reward/mean",
    ORCHESTRATOR,
    "Reward",
    "of the batch",
    ("± 1 standard deviation", "reward/std", ""),
    median="reward/median",
)
LOSS = Curve("loss/mean", TRAIN, "Loss", "per token")
LENGTH = Curve(
    "decode_len/mean",
    ORCHESTRATOR,
    "Completion length",
    "tokens",
    ("shortest to longest", "decode_len/min", "decode_len/max"),
)
TRUNCATED = Curve("is_truncated/mean", ORCHESTRATOR, "Truncated rollouts", "%", scale=100)
ENTROPY = Curve("entropy/mean", TRAIN, "Entropy", "nats per token")
MISMATCH = Curve("mismatch_kl/mean", TRAIN, "Mismatch KL, trainer against engine", "nats per token")
RATE = Curve("optim/lr", TRAIN, "Learning rate")
GRADIENT = Curve("optim/grad_norm", TRAIN, "Gradient norm")
MEMORY = Curve("perf/peak_memory", TRAIN, "Peak memory of a trainer process", "GiB")
VALIDATION = Curve("val/loss", TRAIN, "Validation loss", "per token")
VALIDATION_REWARD = Curve("val_reward/mean", ORCHESTRATOR, "Validation reward")

RL_CURVES = (
    REWARD,
    LOSS,
    ENTROPY,
    MISMATCH,
    LENGTH,
    TRUNCATED,
    Curve("error/mean", ORCHESTRATOR, "Rollouts with an error", "%", scale=100),
    Curve("failed_groups/share", ORCHESTRATOR, "Groups that the environment failed", "%", scale=100),
    Curve(
        "batch/effective_batch_size", ORCHESTRATOR, "Groups that are neither all solved nor all failed", "%", scale=100
    ),
    Curve("batch/lag/mean", ORCHESTRATOR, "Lag of the rollouts", "steps"),
    Curve("critic/explained_variance", TRAIN, "Variance of the returns that the critic explains", "%", scale=100),
    Curve("critic/loss/mean", TRAIN, "Loss of the critic", "per token"),
    RATE,
    GRADIENT,
)
_IN_ORDER = "Pairs whose chosen answer has the higher reward"
ACCURACY = Curve("rewards/accuracies", TRAIN, _IN_ORDER, "%", scale=100, also="accuracy")
MARGIN = Curve("rewards/margins", TRAIN, "Margin of the rewards, chosen minus rejected", also="margin")
VALIDATION_ACCURACY = Curve(
    "val/rewards/accuracies", TRAIN, f"Validation: {_IN_ORDER.lower()}", "%", scale=100, also="val/accuracy"
)
VALIDATION_MARGIN = Curve("val/rewards/margins", TRAIN, f"Validation: {MARGIN.title.lower()}", also="val/margin")
KL = Curve("kl", TRAIN, "KL from the reference, as KTO estimates it", "nats")
PREFERENCE_CURVES = (ACCURACY, MARGIN, VALIDATION_ACCURACY, VALIDATION_MARGIN, KL)
"""A run of SFT has none of these metrics, and so none of the charts."""
SFT_CURVES = (LOSS, VALIDATION, *PREFERENCE_CURVES, RATE, GRADIENT)
SPEED_CURVES = (
    Curve("perf/throughput", TRAIN, "Throughput of the trainer", "tokens/s"),
    # Not `perf/throughput`, which only counts the time that a step waits for its batch.
    Curve("progress/tokens", ORCHESTRATOR, "Tokens of the batch per second of the step", "tokens/s", per="time/step"),
    Curve("perf/mfu", TRAIN, "Model FLOPs utilisation", "%"),
)
EVAL_SCORES = ("avg@", "pass@")


def curves_of(kind: str) -> tuple[Curve, ...]:
    return {"rl": RL_CURVES, "sft": SFT_CURVES, "eval": ()}[kind]


def training_charts(groups: Sequence[Group], kind: str) -> list[Chart]:
    """Reward, loss and the rest over steps."""
    charts = [chart for curve in _with_units(curves_of(kind), groups) for chart in curve_chart(groups, curve)]
    if kind != "rl":
        return [*charts, *answer_charts(groups)]
    return [*charts[:1], *part_charts(groups), *charts[1:]]


def _with_units(curves: Sequence[Curve], groups: Sequence[Group]) -> list[Curve]:
    """Curves with the unit that a loss has in these runs. In preferences it is that of a pair or an answer."""
    is_compared = any(MARGIN.read(run) for group in groups for run in group.runs)
    return [replace(each, unit="") if is_compared and each.unit == LOSS.unit else each for each in curves]


def curve_chart(groups: Sequence[Group], curve: Curve) -> list[Chart]:
    """One line for each group; a single run also shows its spread."""
    key = f"{curve.source}-{curve.metric}"
    if len(groups) == 1 and len(groups[0].runs) == 1:
        run = groups[0].runs[0]
        has_median = curve.median in run.metrics.names(curve.source)
        lines = [Line("mean" if has_median else curve.title, curve.read(run), curve.band(run))]
        if has_median:
            lines.append(Line("median", run.metrics.series(curve.median, curve.source), color=7, is_dashed=True))
    else:
        lines = [group.line(curve.read) for group in groups]
    lines, remark = without_start(lines, curve.unit) if curve in SPEED_CURVES else (lines, "")
    charts = chart_of(key, curve.title, lines, unit=curve.unit, remark=remark)
    return [chart for chart in charts if not _is_all_zero(chart)]


def _is_all_zero(chart: Chart) -> bool:
    """A count of what never happened, such as truncation, is a sentence and no chart."""
    return chart.unit == "%" and all(value == 0 for line in chart.lines for value in line.values.values())


def never_happened(groups: Sequence[Group], kind: str) -> list[str]:
    """A sentence for each share that stayed at 0."""
    found = []
    for curve in (TRUNCATED, *(curve for curve in curves_of(kind) if curve.metric == "error/mean")):
        values = [value for group in groups for run in group.runs for value in curve.read(run).values()]
        if values and not any(values):
            found.append(f"{curve.title}: none in any step.")
    return found


def part_charts(groups: Sequence[Group]) -> list[Chart]:
    """Charts of the reward functions: all in one for a single run, one each to compare runs."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in _names(run, "reward_parts/"))
    if len(names) < 2:
        return []
    if len(groups) == 1 and len(groups[0].runs) == 1:
        run = groups[0].runs[0]
        lines = [
            Line(name.removeprefix("reward_parts/"), run.metrics.series(name, ORCHESTRATOR), color=color)
            for color, name in enumerate(names)
        ]
        return chart_of("reward-parts", "Reward functions", lines, unit="mean, without weights")
    curves = [Curve(name, ORCHESTRATOR, f"Reward function {name.removeprefix('reward_parts/')}") for name in names]
    return [chart for curve in curves for chart in curve_chart(groups, curve)]


def answer_charts(groups: Sequence[Group]) -> list[Chart]:
    """Rewards and log-probabilities of the chosen and the rejected answers of preferences.

    A single run has both in one chart, because their distance is what is trained.
    """
    charts: list[Chart] = []
    for part, name, unit in (("rewards", "Reward", ""), ("logps", "Log-probability", "nats, summed over tokens")):
        for prefix, title in (("", name), ("val/", f"Validation: {name.lower()}")):
            curves = [
                Curve(f"{prefix}{part}/{side}", TRAIN, f"{title} of the {side} answers", unit)
                for side in ("chosen", "rejected")
            ]
            if len(groups) == 1 and len(groups[0].runs) == 1:
                run = groups[0].runs[0]
                lines = [
                    Line(side, curve.read(run), color=color)
                    for color, (side, curve) in enumerate(zip(("chosen", "rejected"), curves, strict=True))
                ]
                key, both = f"{prefix.replace('/', '-')}answers-{part}", "chosen and rejected answers"
                charts += chart_of(key, f"{title} of the {both}", lines, unit=unit)
            else:
                charts += [chart for curve in curves for chart in curve_chart(groups, curve)]
    return charts


def evaluation_charts(groups: Sequence[Group]) -> list[Chart]:
    """Scores of each evaluation set, then lengths and failures."""
    names = dict.fromkeys(name for group in groups for run in group.runs for name in evaluation_names(run))
    by_title: dict[str, list[str]] = {}
    for name in names:
        env, _, score = name.removeprefix("eval/").rpartition("/")
        by_title.setdefault(f"{env}: pass@k" if score.startswith("pass@") else f"{env}: {score}", []).append(name)
    charts = []
    for title, members in by_title.items():
        lines = []
        for color, name in enumerate(members):
            for group in groups:
                line = group.line(partial(evaluation_series, name=name))
                score = name.rpartition("/")[2]
                several = len(members) > 1
                shown = f"{score}, {line.title}" if several and len(groups) > 1 else score if several else line.title
                lines.append(Line(shown, line.values, line.band, color if several else group.color))
        # One value is in the table.
        if any(len(line.values) > 1 for line in lines):
            charts += chart_of(f"eval-{title}", title, lines, x_title="updates", unit="score")
    return [*charts, *curve_chart(groups, VALIDATION_REWARD)]


def evaluation_names(run: RunHistory) -> Iterator[str]:
    for source in run.metrics.sources:
        for name in run.metrics.names(source):
            if name.startswith("eval/") and name.rpartition("/")[2].startswith(EVAL_SCORES):
                yield name


def evaluation_series(run: RunHistory, name: str) -> Series:
    """A metric of evaluations, from the process that reports it."""
    return next((found for source in run.metrics.sources if (found := run.metrics.series(name, source))), {})


def held_out(run: RunHistory) -> dict[str, Series]:
    """Mean scores on rows that the run does not train on, by title."""
    shares = trained_shares(run)
    return {title: series for title, series in _scores_beside_training(run).items() if not shares[title]}


def on_training_rows(run: RunHistory) -> dict[str, tuple[Series, float]]:
    """Mean scores of evaluations whose prompts are trained on, by title, and the share of these prompts."""
    shares = trained_shares(run)
    return {title: (series, shares[title]) for title, series in _scores_beside_training(run).items() if shares[title]}


def trained_shares(run: RunHistory) -> dict[str, float]:
    """Share of the prompts of each evaluation that are trained on. 0 for runs of versions that did not count them."""
    names = {title: title.removeprefix("evaluation ").rpartition("/")[0] for title in _scores_beside_training(run)}
    counted = {
        title: f"eval/{env}/trained_prompts/mean" if env else "val_trained_prompts/mean" for title, env in names.items()
    }
    return {title: max(evaluation_series(run, name).values(), default=0.0) for title, name in counted.items()}


def _scores_beside_training(run: RunHistory) -> dict[str, Series]:
    scores = {name: evaluation_series(run, name) for name in evaluation_names(run) if "/avg@" in name}
    found = {f"evaluation {name.removeprefix('eval/')}": series for name, series in scores.items()}
    validation = VALIDATION_REWARD.read(run)
    return {**found, **({"validation reward": validation} if validation else {})}


def _names(run: RunHistory, prefix: str) -> list[str]:
    return [name for name in run.metrics.names(ORCHESTRATOR) if name.startswith(prefix)]


def reward_parts(run: RunHistory) -> dict[str, Series]:
    """The mean of each reward function, by name."""
    names = _names(run, "reward_parts/")
    return {name.removeprefix("reward_parts/"): run.metrics.series(name, ORCHESTRATOR) for name in names}


def _scaled(series: Series, scale: float) -> Series:
    return series if scale == 1 else {step: value * scale for step, value in series.items()}


# The same metrics as tables: final values of the runs, evaluations, rows of SFT data


_ROW_COUNTS = {
    "data/seen": "rows read",
    "data/truncated": "cut at the maximum length",
    "data/overlong": "dropped: too long",
    "data/untrainable": "dropped: no token to train on",
    "data/bad": "dropped: no conversation or answer",
    "data/unmaskable": "dropped: the template cannot be masked",
}


def finals_table(groups: Sequence[Group], kind: str) -> Table | None:
    """Means at the end of the runs with standard errors: over runs if a label has several, otherwise over steps."""
    rows = []
    of_kind = {"rl": (REWARD, ENTROPY, MISMATCH, LENGTH, TRUNCATED), "sft": (LOSS, VALIDATION, ACCURACY, MARGIN)}
    for curve in _with_units(of_kind.get(kind, ()), groups):
        title = f"{curve.title}, {curve.unit}" if curve.unit else curve.title
        rows.append((title, *(_final_cell(group, curve.read) for group in groups)))
    for name in dict.fromkeys(name for group in groups for run in group.runs for name in evaluation_names(run)):
        read = partial(evaluation_series, name=name)
        rows.append((name.removeprefix("eval/"), *(_last_cell(group, read) for group in groups)))
    rows = [row for row in rows if any(cell != "–" for cell in row[1:])]
    if not rows:
        return None
    caption = (
        "Final values: mean over the last tenth of the steps (at least 5) ± standard error, over the runs of a label "
        "if it has several, otherwise over these steps; evaluations: the last one"
    )
    return Table(("", *(group.label for group in groups)), rows, caption)


def _final_cell(group: Group, read: Callable[[RunHistory], Series]) -> str:
    found = group.final(lambda run: finite(read(run)))
    if found is None:
        return "–"
    mean, error, over = found
    runs = f" ({len(group.runs)} runs)" if over == "runs" else ""
    return f"{short(mean)}{f' ± {short(error, 2)}' if error is not None else ''}{runs}"


def _last_cell(group: Group, read: Callable[[RunHistory], Series]) -> str:
    last = [values[max(values)] for run in group.runs if (values := finite(read(run)))]
    if not last:
        return "–"
    if len(last) == 1:
        return short(last[0])
    return f"{short(fmean(last))} ± {short(stdev(last) / len(last) ** 0.5, 2)} ({len(last)} runs)"


def evaluation_table(run: RunHistory) -> Table | None:
    """All scores of a run's evaluations by the number of updates."""
    names = list(dict.fromkeys(evaluation_names(run)))
    series = {name: evaluation_series(run, name) for name in names}
    steps = sorted({step for values in series.values() for step in values})
    if not steps:
        return None
    rows = [(str(step), *(short(series[name].get(step)) for name in names)) for step in steps]
    return Table(("updates", *(name.removeprefix("eval/") for name in names)), rows, "Evaluations")


def data_section(groups: Sequence[Group]) -> Section:
    """Counts of SFT rows: read, cut, and dropped with the reason."""
    section = Section("data", "Data")
    runs = [run for group in groups for run in group.runs if run.kind == "sft"]
    _add_pictures(section, runs)
    counts = [{name: run.metrics.last(name, run.trainer) for name in _ROW_COUNTS} for run in runs]
    counts = [each for each in counts if each["data/seen"] is not None]
    if not counts:
        if runs:
            section.notes.append("No step has been finished, so no rows have been counted.")
        return section
    rows = []
    for name, title in _ROW_COUNTS.items():
        cells = []
        for each in counts:
            value, seen = each[name], each["data/seen"]
            share = f" ({value / seen:.1%})" if value is not None and seen and name != "data/seen" else ""
            cells.append(f"{short(value)}{share}")
        rows.append((title, *cells))
    headers = ("rows, over all processes", *([run.name for run in runs] if len(runs) > 1 else ["number"]))
    section.tables.append(Table(headers, rows, "What became of the rows"))
    return section


def _add_pictures(section: Section, runs: Sequence[RunHistory]) -> None:
    """Small pictures of the first images of the data."""
    for run in runs:
        try:
            pictures = read_contact_sheet(run.paths.contact_sheet)
        except (ValueError, OSError) as error:
            section.warnings.append(f"{run.name}: no pictures of the data's images: {one_line(error)}")
            continue
        name = f"{run.name}: " if len(runs) > 1 else ""
        for each in pictures:
            size = f"{each.width:,} x {each.height:,}, {count_of('token', each.tokens)}"
            section.pictures.append((each.picture, f"{name}{size}"))
    if section.pictures:
        section.notes.append("The first images of the data, as the model gets them before its processor, made smaller.")


# Facts from which a reader can see reward hacking. There is a warning only beyond a stated limit.


LENGTH_LIMIT = 1.5
"""Factor by which completions grew or shrank that is worth a warning."""
DISTINCT_LIMIT = 0.5
"""Fraction of the first steps' share of distinct completions below which there is a warning."""
MIN_REWARD_RISE = 0.02
MIN_PROBLEMS = 8
"""Different problems that a share of distinct completions is over: those of several steps, if one has fewer."""

Answers = Mapping[int, Sequence[tuple[object, str]]]
"""By step: problem and text of each completion that was kept by chance."""


def signs_section(run: RunHistory, answers: Answers) -> Section:
    """Trained against held-out reward, growth of the parts, lengths, repeated answers."""
    section = Section("signs", "Can the reward be trusted?")
    reward = trend(REWARD.read(run))
    if reward is None:
        section.notes.append("Fewer than two steps have a reward, so it is too early to tell.")
        return section
    section.notes.append(_sentence("The trained reward", reward))
    _held_out(section, run, reward)
    _parts(section, run, reward)
    _lengths(section, run)
    _answers(section, answers)
    section.notes.append(
        f"Rose and fell mean: the Mann-Kendall trend test over all steps is beyond ±{Z_LIMIT} "
        f"(1 in 100 series without a trend), which needs at least {MIN_VALUES} values."
    )
    return section


def _sentence(subject: str, found: Trend, unit: str = "") -> str:
    first, last = short(found.first.mean, 3), short(found.last.mean, 3)
    at = f"between steps {_steps(found.first.first_step, found.first.last_step)} and " + _steps(
        found.last.first_step, found.last.last_step
    )
    if found.count < MIN_VALUES:
        return f"{subject} was {first} and {last}{unit} {at}; {found.count} values are too few to test for a trend."
    if found.direction == "no trend":
        return f"{subject} shows no trend: {first}{unit} and {last}{unit} {at} (z = {found.z:.1f})."
    return f"{subject} {found.direction} from {first} to {last}{unit} {at} (z = {found.z:.1f})."


def _steps(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}–{last}"


def _held_out(section: Section, run: RunHistory, reward: Trend) -> None:
    scores, trained = held_out(run), on_training_rows(run)
    for title, (_, share) in trained.items():
        which = "its training rows" if share == 1 else f"prompts of which {share:.0%} are trained on"
        section.warnings.append(
            f"{title[0].upper()}{title[1:]} uses {which}, so it does not show whether the model learned the task or "
            "these rows: give the environment an eval_dataset."
        )
    if not scores:
        uses = (
            "its evaluations use training rows"
            if trained
            else ("it has no evaluation ([orchestrator.eval]) and no validation ([orchestrator.val])")
        )
        section.notes.append(
            f"The run has no reward on rows that it does not train on: {uses}, so learning the task and exploiting the "
            "reward look alike here."
        )
    lines = [Line("trained reward", REWARD.read(run))]
    named = {title: f"The held-out reward ({title})" for title in scores}
    named |= {title: f"The reward on training rows ({title})" for title in trained}
    series_of = scores | {title: series for title, (series, _) in trained.items()}
    for color, (title, subject) in enumerate(named.items(), 1):
        series = series_of[title]
        lines.append(Line(title if title in scores else f"{title}, training rows", series, color=color))
        found = trend(series)
        if found is None:
            section.notes.append(f"{title}: a single value, {short(next(iter(series.values())), 3)}.")
            continue
        section.notes.append(_sentence(subject, found))
        if title in scores and reward.direction == "rose" and found.direction == "fell":
            section.warnings.append(
                f"The trained reward rose (z = {reward.z:.1f}) while {title} fell (z = {found.z:.1f}); "
                f"the limit is ±{Z_LIMIT} for both."
            )
    if len(lines) > 1:
        chart = "Trained and held-out reward" if scores else "Trained reward, and evaluation on training rows"
        section.charts += chart_of("held-out", chart, lines, unit="mean reward")


def _parts(section: Section, run: RunHistory, reward: Trend) -> None:
    parts = reward_parts(run)
    if len(parts) < 2:
        if parts:
            section.notes.append(f"The reward has one function, {next(iter(parts))}.")
        return
    for name, series in parts.items():
        found = trend(series)
        if found is None:
            continue
        section.notes.append(_sentence(f"Reward function {name}", found))
        rises = reward.direction == "rose" and reward.change > MIN_REWARD_RISE
        if rises and found.direction == "fell":
            section.warnings.append(
                f"Reward function {name} fell (z = {found.z:.1f}) while the reward rose (z = {reward.z:.1f}); "
                f"the limit is ±{Z_LIMIT} for both."
            )


def _lengths(section: Section, run: RunHistory) -> None:
    found = trend(LENGTH.read(run))
    if found is None:
        return
    section.notes.append(_sentence("The mean completion length", found, " tokens"))
    factor = found.last.mean / found.first.mean if found.first.mean > 0 else 1.0
    if found.direction != "no trend" and not 1 / LENGTH_LIMIT <= factor <= LENGTH_LIMIT:
        section.warnings.append(
            f"Completions have {factor:.1f} times the length of the first steps' (the limit is a factor of "
            f"{LENGTH_LIMIT} either way): read some, to see whether the length earns reward."
        )


def _answers(section: Section, answers: Answers) -> None:
    """One completion of each problem counts: a policy that has learned a problem may well repeat its answer to it."""
    distinct, top = {}, {}
    of_problems: dict[object, str] = {}
    for step in sorted(answers):
        of_problems |= dict(reversed(answers[step]))
        if len(of_problems) >= MIN_PROBLEMS:
            texts = Counter(of_problems.values())
            distinct[step] = len(texts) / len(of_problems)
            top[step] = texts.most_common(1)[0][1] / len(of_problems)
            of_problems = {}
    found = trend(distinct)
    if found is None:
        section.notes.append("Too few rollouts were kept at random to count answers that repeat between problems.")
        return
    section.notes.append(_sentence("The share of distinct completions, one for each problem,", found))
    if found.direction == "fell" and found.last.mean < DISTINCT_LIMIT * found.first.mean:
        section.warnings.append(
            f"Different problems get the same completions more often: the share of distinct ones fell below "
            f"{DISTINCT_LIMIT:.0%} of what it was (z = {found.z:.1f})."
        )
    lines = [
        Line("distinct completions", _percent(distinct)),
        Line("most frequent completion", _percent(top), color=1),
    ]
    section.charts += chart_of(
        "distinct", "Answers that repeat between problems", lines, unit=f"% of at least {MIN_PROBLEMS} problems"
    )


def _percent(series: Series) -> Series:
    return {step: 100 * value for step, value in series.items()}
