"""`medarc_train report` tells what a run's files say, for every kind of run and also for damaged ones."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import stat
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image
from report_runs import START, add_attempts, make_run
from typer.testing import CliRunner, Result

from medarc_rl import medarc_train
from medarc_rl.report import write
from medarc_rl.report.charts import Chart, Line, group_runs, open_runs, short, thinned
from medarc_rl.report.curves import finals_table
from medarc_rl.report.facts import tiles
from medarc_rl.report.write import LIBRARY, asset, island
from prime_rl.run.pictures import SmallPicture, write_contact_sheet
from prime_rl.utils.images import thumbnail


def report(*words: object, pictures: bool = False) -> Result:
    options = [] if pictures else ["--no-pictures"]
    return CliRunner().invoke(medarc_train.app, ["report", *map(str, words), *options])


def page_of(directory: Path) -> str:
    return (directory / "report" / "report.html").read_text()


class Reader(HTMLParser):
    """Texts of a page by section, the chart specs, and every address that a tag names."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.addresses: list[str] = []
        self._section, self._script = "top", None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [str(values[name]) for name in ("src", "href", "action", "data") if values.get(name)]
        if tag == "section":
            self._section = str(values["id"])
        self._script = values if tag == "script" else None

    def handle_endtag(self, tag: str) -> None:
        self._script = None

    def handle_data(self, data: str) -> None:
        if self._script is not None:
            self.scripts.append((self._script, data))
        else:
            self.sections[self._section] = f"{self.sections.get(self._section, '')} {data}"

    @property
    def charts(self) -> dict[str, dict]:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "charts"))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    paths = make_run(tmp_path / "run")
    add_attempts(
        paths,
        {"ended": "2023-11-14T22:43:20+00:00", "outcome": "a node failed", "result": "failed",
         "gpus": {"trainer": ["0", "1"]}},
        {"started": "2023-11-14T23:13:20+00:00", "ended": "2023-11-15T00:13:20+00:00", "outcome": "complete",
         "result": "complete", "gpus": {"trainer": ["0", "1"], "inference": ["2"]}, "step": 6},
    )  # fmt: skip
    return tmp_path / "run"


def test_the_page_shows_state_steps_reward_and_cost(run: Path) -> None:
    result = report(run, "--price", "2.5")
    assert result.exit_code == 0, result.output
    top = Reader(page_of(run)).sections["top"]
    for words in ("complete", "12 of 80", "0.28 → 0.56", "1 h 30 min", "12k", "GPU-hours", "4.00", "10.00 USD"):
        assert words in top, words


def test_its_charts_hold_the_metrics_of_the_file(run: Path) -> None:
    report(run)
    charts = {chart["title"]: chart for chart in Reader(page_of(run)).charts.values()}
    assert charts["Reward"]["lines"][0]["points"][:2] == [[0, 0.2], [1, 0.24]]
    assert charts["Reward"]["lines"][0]["band"]["rows"][0] == [0, 0.1, 0.3]
    assert {"Loss", "Entropy", "Learning rate", "Reward functions", "Completion length"} <= set(charts)
    stacked = charts["Where the orchestrator's time goes"]
    at_5 = {line["title"]: dict(map(tuple, line["points"]))[5] for line in stacked["lines"]}
    parts = {"generate and score": 1.4, "wait for weights": 0.1, "prepare the batch": 0.2, "other": 0.3}
    assert at_5 == {**parts, "evaluate": 1.0}


def test_a_judge_has_its_sums_and_its_charts(run: Path) -> None:
    asked = {"calls": 60, "cache_hit_rate": 0.25, "latency_s": 2.0, "failed_calls": 1, "retries": 2}
    spent = {"prompt_tokens": 9000, "completion_tokens": 300, "cost": 0.125}
    metrics = {f"judge/grader/{name}": value for name, value in {**asked, **spent}.items()}
    with (run / "metrics.jsonl").open("a") as file:
        for step in range(4):
            file.write(json.dumps({"time": 1e9, "source": "orchestrator", "step": step, **metrics}) + "\n")
    assert report(run).exit_code == 0
    page = Reader(page_of(run))
    costs = " ".join(page.sections["costs"].split())
    assert "grader 240 25.0% 4 8 36,000 1,200 0.5 6 min 00 s" in costs, costs
    charts = {chart["title"]: chart for chart in page.charts.values()}
    assert charts["Judge grader: a call to its server"]["lines"][0]["points"][0] == [0, 2.0]


def test_warnings_come_only_with_a_trend_and_state_their_limit(run: Path) -> None:
    report(run)
    signs = Reader(page_of(run)).sections["signs"]
    assert "The trained reward rose (z = 4.5) while evaluation held/avg@4 fell (z = -4.5)" in signs
    assert "Reward function layout fell" in signs
    assert "Completions have" not in signs


@pytest.mark.parametrize(("share", "words"), [(1.0, "its training rows"), (0.25, "25% are trained on")])
def test_an_evaluation_on_training_rows_is_not_called_held_out(run: Path, share: float, words: str) -> None:
    told = {"time": 1e9, "source": "orchestrator", "step": 0, "eval/held/trained_prompts/mean": share}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(told) + "\n")
    report(run)
    page = Reader(page_of(run))
    signs = page.sections["signs"]
    assert words in signs
    assert "The reward on training rows (evaluation held/avg@4)" in signs
    assert "held-out reward" not in signs
    assert "The trained reward rose (z = 4.5) while" not in signs


def test_restarts_are_listed_with_their_causes(run: Path) -> None:
    report(run)
    attempts = Reader(page_of(run)).sections["attempts"]
    assert all(words in attempts for words in ("failed: a node failed", "step 6", "node-1"))


def test_a_page_loads_nothing_and_runs_only_its_own_scripts(run: Path) -> None:
    report(run)
    page = page_of(run)
    reader = Reader(page)
    assert [address for address in reader.addresses if not address.startswith(("#", "data:,"))] == []
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page).group(1)
    assert "default-src &#39;none&#39;" in policy
    code = [text for attrs, text in reader.scripts if "type" not in attrs]
    hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in code]
    assert re.findall(r"sha256-([^&]+)&", policy) == hashes
    assert len(hashes) == 2


def test_the_library_is_the_published_one() -> None:
    """Apache ECharts 6.1.0 from npm, unchanged."""
    text = asset(LIBRARY)
    assert "Licensed to the Apache Software Foundation" in text[:200]
    assert '"6.1.0"' in text


@pytest.mark.parametrize("kind", ["rl", "sft", "eval"])
@pytest.mark.parametrize("steps", [0, 1, 12])
def test_every_kind_of_run_has_a_report(kind: str, steps: int, tmp_path: Path) -> None:
    make_run(tmp_path / "run", kind, steps)
    result = report(tmp_path / "run")
    assert result.exit_code == 0, result.output
    reader = Reader(page_of(tmp_path / "run"))
    assert "unknown" in reader.sections["top"] or kind == "eval"
    if steps == 0:
        told = " ".join(reader.sections.values())
        assert "No step has been finished" in told or "No set of weights has been evaluated" in told
        assert reader.charts == {}


def test_environments_of_one_owner_are_counted_each(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "eval", 1)
    scores = {f"eval/{env}/avg@4": 0.5 for env in ("hub/words", "hub/letters")}
    with paths.metrics.open("a") as metrics:
        metrics.write(json.dumps({"time": START, "source": "eval", "step": 0, **scores}) + "\n")
    assert report(paths.root).exit_code == 0
    assert "3 environments" in page_of(paths.root)


def test_the_first_images_of_sft_are_shown_and_nothing_else_of_the_file(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "sft")
    small = thumbnail(Image.new("RGB", (3000, 2000), "red"))
    assert len(small) < 2000
    write_contact_sheet(paths.contact_sheet, [SmallPicture(small, 3000, 2000, 64)] * 30)
    assert report(tmp_path / "run").exit_code == 0
    read = Reader(page_of(tmp_path / "run"))
    assert read.addresses.count(small) == 24
    assert "3,000 x 2,000, 64 tokens" in read.sections["data"]
    for held in ([{"picture": 'data:image/svg+xml,"><script>', "width": 1, "height": 1, "tokens": 1}], [7], {"a": "b"}):
        paths.contact_sheet.write_text(json.dumps(held))
        assert report(tmp_path / "run").exit_code == 0
        read = Reader(page_of(tmp_path / "run"))
        assert "no pictures of the data's images" in read.sections["data"]
        assert not any("svg" in address for address in read.addresses)


def test_rows_and_validation_of_sft_are_shown(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "sft")
    report(tmp_path / "run")
    reader = Reader(page_of(tmp_path / "run"))
    assert "Validation loss" in {chart["title"] for chart in reader.charts.values()}
    assert re.search(r"rows read\s+120", reader.sections["data"])
    assert "11 (9.2%)" in reader.sections["data"]


def test_a_slow_start_rare_values_and_passes_are_shown_for_what_they_are(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", "sft", 40)
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    for record in records:
        step = record["step"]
        slow = {"time/step": 45.0, "time/forward_backward": 40.0} if step == 0 else {}
        record |= {"progress/epoch": step // 10, "perf/throughput": 11.0 if step == 0 else 500.0, **slow}
        record.pop("val/loss", None)
        record |= {"val/loss": 3.0 - step / 20} if step % 4 == 0 else {}
    paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert report(paths.root).exit_code == 0
    reader = Reader(page_of(paths.root))
    assert "3 → 1.2" in reader.sections["top"]
    assert "at steps 0 and 36" in reader.sections["top"]
    assert "3 complete passes over the data" in reader.sections["top"]
    charts = {chart["title"]: chart for chart in reader.charts.values()}
    assert "Epoch" not in charts
    for title in ("Where the trainer's time goes", "Throughput of the trainer"):
        assert charts[title]["lines"][0]["points"][0][0] == 1
    assert "Without step 0, the start: 45 s." in reader.sections["costs"]
    assert charts["Loss"]["lines"][0]["points"][0][0] == 0


def test_defaults_of_a_section_that_one_run_has_are_folded(tmp_path: Path) -> None:
    config = 'max_steps = 80\n[model]\nname = "m"\n[data]\nname = "a"\nseq_len = 128\n'
    make_run(tmp_path / "a", "sft", config=config)
    make_run(tmp_path / "b", "sft", config=f"{config}[model.lora]\nrank = 4\n[optim]\nlr = 0.5\n")
    assert report(tmp_path / "a", tmp_path / "b", "--out", str(tmp_path / "out")).exit_code == 0
    page = (tmp_path / "out" / "report.html").read_text()
    section = page[page.index('id="differences"') : page.index('id="training"')]
    shown, _, folded = section.partition("<details>")
    assert [key in shown for key in ("model.lora.rank", "optim.lr", "model.lora.dropout", "None")] == [
        True,
        True,
        False,
        False,
    ]
    assert "keys that nobody set" in folded
    assert "model.lora.dropout" in folded


def test_damaged_files_are_named_and_the_rest_is_shown(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": \n\x00\x00\n')
    (run / "attempts" / "001.json").write_text("{")
    (run / "configs" / "rl.toml").write_text("max_steps = [")
    result = report(run)
    assert result.exit_code == 0, result.output
    reader = Reader(page_of(run))
    assert "Left out 2 damaged lines of metrics.jsonl" in reader.sections["attempts"]
    assert "The config cannot be read" in reader.sections["settings"]
    assert "cannot load the config" in reader.sections["settings"]
    assert "Reward" in {chart["title"] for chart in reader.charts.values()}


def test_runs_with_one_label_are_a_band_and_differing_keys_come_first(tmp_path: Path) -> None:
    config = 'max_steps = 80\n[model]\nname = "m"\n[trainer.optim]\nlr = {}\n[orchestrator]\nrollouts_per_example = 8\n'
    for place, (name, rate) in enumerate((("a", "1e-5"), ("b", "1e-5"), ("c", "3e-5"))):
        paths = make_run(tmp_path / name, config=config.format(rate))
        paths.metrics.write_text(paths.metrics.read_text().replace('"loss/mean": 1.0', f'"loss/mean": {2.0 + place}'))
    words = ["--label", "a=base", "--label", "b=base", "--label", "c=fast", "--out", str(tmp_path / "out")]
    result = report(tmp_path / "a", tmp_path / "b", tmp_path / "c", *words)
    assert result.exit_code == 0, result.output
    reader = Reader((tmp_path / "out" / "report.html").read_text())
    assert list(reader.sections)[1] == "differences"
    assert re.search(r"trainer\.optim\.lr\s+1e-05\s+1e-05\s+3e-05", reader.sections["differences"])
    loss = next(chart for chart in reader.charts.values() if chart["title"] == "Loss")
    assert [line["title"] for line in loss["lines"]] == ["base (mean of 2)", "fast"]
    assert loss["lines"][0]["points"][0] == [0, 2.5]
    assert loss["lines"][0]["band"]["rows"][0] == [0, 2.0, 3.0]
    assert "(2 runs)" in reader.sections["finals"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["nowhere"], "nowhere is not the directory of a run: there is no such directory"),
        (["run", "--label", "other=x"], "this report has no run 'other'"),
        (["run", "--label", "x"], "write RUN=LABEL"),
        (["run", "--price", "-1"], "--price"),
        (["run", "--price", "inf"], "give an amount of USD"),
        (["run", "run/"], "is named twice"),
        ([], "RUN"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], fault: str, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    result = report(*words)
    assert result.exit_code == 2
    assert fault in result.output
    assert result.output.count("error:") == 1
    assert "Traceback" not in result.output


def test_runs_of_different_kinds_are_not_compared(run: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "other", "sft")
    assert "runs of one kind can be compared" in report(run, tmp_path / "other").output


def test_only_the_owner_can_read_it(run: Path) -> None:
    report(run)
    file = run / "report" / "report.html"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_pngs_are_drawn_without_a_browser(run: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: uv sync --inexact --extra report")
    result = report(run, pictures=True)
    assert result.exit_code == 0, result.output
    files = list((run / "report").glob("*.png"))
    assert len(files) > 8
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files)


def test_a_missing_matplotlib_is_one_line(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = report(run, pictures=True)
    assert result.exit_code == 0
    assert f"warning: {write.HINT}" in result.output


def test_no_text_can_leave_an_island() -> None:
    evil = {"a": "</script><!--<script>\u2028\u2029&\x00"}
    text = island(evil)
    assert not re.search("[<>&\u2028\u2029\x00]", text)
    assert json.loads(text) == evil


def test_names_of_a_run_are_data_in_the_page(tmp_path: Path) -> None:
    config = 'max_steps = 80\n[model]\nname = "</script><b>"\n[trainer]\n[orchestrator]\nrollouts_per_example = 8\n'
    make_run(tmp_path / "run<b>", config=config)
    assert report(tmp_path / "run<b>").exit_code == 0
    page = page_of(tmp_path / "run<b>")
    assert "run<b>" not in page
    assert "</script><b>" not in page


def test_long_lines_are_thinned_to_means_and_the_page_says_so() -> None:
    values = {step: float(step % 2) for step in range(10_000)}
    drawn = thinned(values)
    assert len(drawn) <= 600
    assert math.isclose(sum(drawn.values()) / len(drawn), 0.5, abs_tol=0.05)
    assert Chart("k", "t", [Line("l", values)]).thinned_to == 17


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (12345.6, "12,346"), (0.123456, "0.1235"), (1e-9, "1e-09"), (None, "–"), (math.nan, "nan"), (3, "3")],
)
def test_numbers_are_short(value: float | None, text: str) -> None:
    assert short(value) == text


def test_headline_and_table_of_preferences_count_pairs_by_the_metrics_of_dpo_and_rm(tmp_path: Path) -> None:
    places = []
    for name, metrics in {"dpo": ("rewards/accuracies", "rewards/margins"), "rm": ("accuracy", "margin")}.items():
        paths = make_run(tmp_path / name, kind="sft")
        records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
        for step, record in enumerate(records):
            record |= dict(zip(metrics, (0.5 + 0.04 * step, 0.2 * step), strict=True))
        paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
        places.append(paths.root)
    runs = open_runs(places)
    for run in runs:
        assert ("Pairs in order", "50% → 94%") in [(tile.title, tile.value) for tile in tiles(run, [], None)]
    table = finals_table(group_runs(runs, []), "sft")
    assert table is not None
    cells = {title: values for title, *values in table.rows}
    assert "Loss" in cells
    for title in ("Pairs whose chosen answer has the higher reward, %", "Margin of the rewards, chosen minus rejected"):
        assert "–" not in cells[title]


def test_a_run_of_preferences_shows_margins_and_both_answers(tmp_path: Path) -> None:
    paths = make_run(tmp_path / "run", kind="sft")
    records = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    for step, record in enumerate(records):
        of_step = {"rewards/chosen": 0.1 * step, "rewards/rejected": -0.1 * step, "rewards/margins": 0.2 * step}
        record |= {**of_step, "rewards/accuracies": 0.5 + 0.04 * step, "logps/chosen": -9.0, "logps/rejected": -12.0}
        record |= {f"val/{name}": value for name, value in of_step.items()} if step % 4 == 0 else {}
    paths.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert report(paths.root).exit_code == 0
    charts = {chart["title"]: chart for chart in Reader(page_of(paths.root)).charts.values()}
    for title in ("Reward of the chosen and rejected answers", "Log-probability of the chosen and rejected answers"):
        assert [line["title"] for line in charts[title]["lines"]] == ["chosen", "rejected"]
    for title in (
        "Pairs whose chosen answer has the higher reward",
        "Margin of the rewards, chosen minus rejected",
        "Validation: reward of the chosen and rejected answers",
        "Validation: margin of the rewards, chosen minus rejected",
    ):
        assert title in charts
    assert charts["Loss"]["unit"] == ""
