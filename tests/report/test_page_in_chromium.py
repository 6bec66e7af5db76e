"""The page of `medarc_train report` in a real Chromium: charts, filters, search, keys, hostile rollouts, no network."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from report_runs import a_rollout, add_rollouts, make_run, with_tokens
from typer.testing import CliRunner

from medarc_rl import medarc_train
from prime_rl.run.paths import RunPaths
from prime_rl.run.pictures import PictureWriter
from prime_rl.utils.images import thumbnail

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: uv sync --group browser")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium: apt-get install chromium"),
]
EVIL = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>\u2028\u0007\udcff"
WORDS = ("dose", "patient", "renal", "clearance", "therefore", "answer", "mg", "per", "day", "is", "12.5", "so")
MANY = 10_000
SCAN = thumbnail(Image.new("RGB", (512, 256), "red"), 512)


@dataclass
class Opened:
    """A page with what it has complained of and asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"], timeout=0)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two steps of rollouts, some of them hostile, truncated or failed."""
    directory = tmp_path_factory.mktemp("report") / "run"
    paths = make_run(directory)
    hostile = a_rollout(EVIL, 0.9, env=EVIL, metrics={EVIL: 1.0}, error=EVIL, is_truncated=True)
    tools = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "dose", "arguments": "{}"}}]}]
    rollouts = [with_tokens(a_rollout(f"plain {n}", n / 10), ["pl", "ain", EVIL]) for n in range(8)]
    add_rollouts(paths, 0, [*rollouts, a_rollout("", 0.0, completion=tools)])
    add_rollouts(paths, 1, [hostile, a_rollout("a Needle in step one", 0.1), a_rollout("no reward", None)])
    add_rollouts(paths, 2, [a_rollout("seen", 0.2, prompt=[{"role": "user", "content": images(paths)}])])
    return written(directory)


def images(paths: RunPaths) -> list[dict[str, Any]]:
    """An image of a run, and what the run of a stranger may hold in its place."""
    message = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": SCAN}}]}]
    ((good,),) = (each["content"] for each in PictureWriter(paths.pictures).kept(message, {}))
    own = Image.new("RGB", (64, 64), "blue")
    own.save(paths.root.parent / "private.jpg")
    (paths.pictures / f"{'a' * 64}.jpg").symlink_to(paths.root.parent / "private.jpg")
    (paths.pictures / f"{'b' * 64}.jpg").write_text("<svg onload='window.hacked = 1'>")
    Image.new("RGB", (4000, 4000)).save(paths.pictures / f"{'c' * 64}.jpg")
    Image.new("RGB", (64, 64)).save(paths.pictures / f"{'d' * 64}.jpg", "PNG")
    names = (*(letter * 64 for letter in "abcd"), "../../private", EVIL)
    svg = "data:image/svg+xml,<svg onload='window.hacked = 1'>"
    return [
        good,
        *({"type": "image", "image": EVIL, "sha256": name, "width": 1, "height": 1} for name in names),
        {"type": "image_url", "image_url": {"url": "https://example.org/pixel.png"}},
        {"type": "image_url", "image_url": {"url": svg}},
    ]


def written(directory: Path) -> Path:
    result = CliRunner().invoke(medarc_train.app, ["report", str(directory), "--no-pictures"])
    assert result.exit_code == 0, result.output
    return directory / "report" / "report.html"


@pytest.fixture
def opened(chromium: Any, report_file: Path) -> Iterator[Opened]:
    with open_page(chromium, report_file) as opened:
        yield opened


class open_page:
    """Opens a file in a page of its own, and closes the page in the end."""

    def __init__(self, chromium: Any, file: Path, **options: Any) -> None:
        self.context = chromium.new_context(**options)
        self.context.set_default_timeout(0)  # the suite's limit is the only one
        self.file = file

    def __enter__(self) -> Opened:
        page = self.context.new_page()
        opened = Opened(page)
        page.on("console", lambda message: opened.complaints.append(message.text))
        page.on("pageerror", lambda error: opened.complaints.append(str(error)))
        page.on("request", lambda request: opened.requests.append(request.url))
        page.goto(self.file.as_uri())
        page.wait_for_selector("html[data-opened]")
        return opened

    def __exit__(self, *_: object) -> None:
        self.context.close()


def texts(opened: Opened, selector: str) -> list[str]:
    return opened.page.locator(selector).all_inner_texts()


def wait_for(opened: Opened, words: str) -> None:
    opened.page.wait_for_function(
        "words => document.getElementById('matches').textContent.startsWith(words)", arg=words
    )


def test_it_opens_without_a_complaint_and_asks_for_nothing(opened: Opened, report_file: Path) -> None:
    opened.page.mouse.wheel(0, 20_000)
    opened.page.wait_for_selector("[data-chart='costs-phases-trainer'] canvas")
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith("data:")] == [report_file.as_uri()]


def test_hostile_rollouts_are_shown_as_text(opened: Opened) -> None:
    opened.page.select_option("[name=only]", "error")
    wait_for(opened, "1 of 13 ")
    opened.page.wait_for_function("() => document.getElementById('detail').textContent.includes('onerror')")
    assert opened.page.evaluate("() => window.hacked") is None
    assert opened.page.locator("#detail img, #list img").count() == 0
    assert opened.complaints == []


def test_images_of_a_rollout_are_small_pictures_and_no_other_file(opened: Opened) -> None:
    opened.page.select_option("[name=step]", "step 2")
    wait_for(opened, "1 of 13 ")
    opened.page.wait_for_selector("#detail .pictures img")
    (picture,) = opened.page.locator("#detail img").all()
    assert picture.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [256, 128]
    assert picture.get_attribute("src").startswith("data:image/jpeg;base64,")
    shown = opened.page.inner_text("#detail .message .text")
    assert "[image 512x256, sha256 " in shown
    assert "[image pixel.png]" in shown
    assert "[image (51 characters of data)]" in shown
    assert opened.page.evaluate("() => window.hacked") is None
    assert opened.complaints == []
    assert [url for url in opened.requests if not url.startswith(("data:", "file:"))] == []


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("low", "0.5", "4 of 13"),
        ("high", "0.05", "2 of 13"),
        ("search", "needle", "1 of 13"),
        ("search", "none", "0 of 13"),
    ],
)
def test_filters_and_search_choose_rollouts(opened: Opened, name: str, value: str, shown: str) -> None:
    """A rollout without a reward is in no range of rewards."""
    opened.page.fill(f"[name={name}]", value)
    wait_for(opened, f"{shown} ")
    assert opened.complaints == []


def test_a_step_and_truncation_choose_rollouts_and_reset_shows_all(opened: Opened) -> None:
    opened.page.select_option("[name=step]", "step 1")
    wait_for(opened, "3 of 13 ")
    opened.page.select_option("[name=only]", "truncated")
    wait_for(opened, "1 of 13 ")
    opened.page.click("button[type=reset]")
    wait_for(opened, "13 of 13 ")
    assert opened.complaints == []


def test_arrows_move_in_the_list_and_the_detail_follows(opened: Opened) -> None:
    opened.page.focus("#list")
    opened.page.keyboard.press("ArrowDown")
    opened.page.keyboard.press("ArrowDown")
    opened.page.keyboard.press("ArrowUp")
    opened.page.wait_for_function("() => document.getElementById('detail').textContent.includes('plain 1')")
    assert opened.page.get_attribute("[role=option][aria-selected=true]", "aria-posinset") == "2"


def test_tokens_are_coloured_by_their_log_probability(opened: Opened) -> None:
    opened.page.click("text=log-probability: engine")
    opened.page.wait_for_selector("#detail .token")
    colors = opened.page.eval_on_selector_all(
        "#detail .token", "tokens => tokens.map(token => token.style.backgroundColor)"
    )
    alphas = [0.0 if not color else float(color.rstrip(")").split(",")[3]) for color in colors]
    assert len(alphas) == 4
    assert alphas[0] == alphas[1] == 0.0
    assert 0 < alphas[2] < alphas[3]
    assert texts(opened, "#detail .token")[1:3] == ["pl", "ain"]


def test_the_button_switches_between_light_and_dark(opened: Opened) -> None:
    background = "() => getComputedStyle(document.body).backgroundColor"
    light = opened.page.evaluate(background)
    opened.page.click("#theme")
    assert opened.page.evaluate(background) != light


@pytest.mark.parametrize("width", [390, 1400])
def test_nothing_is_wider_than_the_screen(chromium: Any, report_file: Path, width: int) -> None:
    with open_page(chromium, report_file, viewport={"width": width, "height": 900}) as opened:
        assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_ten_thousand_rollouts_open(
    chromium: Any, tmp_path: Path, record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints how long it took; a slow machine is no failure."""
    chance = random.Random(0)
    paths = make_run(tmp_path / "run", steps=100)
    for step in range(100):
        add_rollouts(paths, step, [long_rollout(chance, step) for _ in range(MANY // 100)])
    file = written(tmp_path / "run")
    with open_page(chromium, file) as opened:
        wait_for(opened, "10,000 of 10,000 ")
        opened_ms = int(opened.page.get_attribute("html", "data-opened"))
        assert opened.page.locator("#list .row").count() < 60
        opened.page.fill("[name=search]", "needle 77 ")
        wait_for(opened, "100 of 10,000 ")
        assert opened.complaints == []
    with capsys.disabled():
        print(f"\n10,000 rollouts: {file.stat().st_size / 1e6:.1f} MB, open after {opened_ms} ms")  # noqa: T201
    record_property("open_ms", opened_ms)


def long_rollout(chance: random.Random, step: int) -> dict[str, Any]:
    words = [chance.choice(WORDS) + " " for _ in range(120)]
    answer = "".join(words) + f"needle {step} "
    logprobs = [round(-chance.expovariate(2), 4) for _ in words]
    return with_tokens(a_rollout(answer, round(chance.random(), 3), row=chance.randrange(500)), words, logprobs)


def test_a_printed_chart_fits_its_card_and_comes_back(chromium: Any, report_file: Path) -> None:
    with open_page(chromium, report_file) as opened:
        page = opened.page
        before = page.evaluate("() => document.querySelector('.chart').clientWidth")
        page.emulate_media(media="print")
        page.evaluate("() => dispatchEvent(new Event('beforeprint'))")
        fits = """() => [...document.querySelectorAll('.chart')].every((chart) => {
            const canvas = chart.querySelector('canvas'), card = chart.closest('figure').getBoundingClientRect();
            const drawn = canvas.getBoundingClientRect();
            const fits = drawn.right <= card.right && drawn.bottom <= card.bottom;
            return fits && drawn.width > 0 && canvas.width >= 2 * 400;
        })"""
        assert page.evaluate(fits)
        page.emulate_media(media="screen")
        page.evaluate("() => dispatchEvent(new Event('afterprint'))")
        width = "() => document.querySelector('.chart canvas').getBoundingClientRect().width"
        assert abs(page.evaluate(width) - before) <= 1
        assert opened.complaints == []
