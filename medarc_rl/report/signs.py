"""Facts from which a reader can see reward hacking. There is a warning only beyond a stated limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from medarc_rl.report.charts import Line, Section, Series, chart_of, short
from medarc_rl.report.curves import LENGTH, REWARD, held_out, on_training_rows, reward_parts
from prime_rl.history.metrics import MIN_VALUES, Z_LIMIT, Trend, trend
from prime_rl.history.run import RunHistory

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
        section.notes.append("Fewer than two steps have a reward, so nothing can be said yet.")
        return section
    section.notes.append(_sentence("The trained reward", reward))
    _held_out(section, run, reward)
    _parts(section, run, reward)
    _lengths(section, run)
    _answers(section, answers)
    section.notes.append(
        f"Rose and fell mean: the Mann-Kendall trend test over all steps is beyond ±{Z_LIMIT} "
        f"(1 in 100 series without a trend), which takes at least {MIN_VALUES} values."
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
        section.notes.append("Too few rollouts were kept by chance to count answers that repeat between problems.")
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
