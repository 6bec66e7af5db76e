"""Renders a report as one HTML file that needs no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from medarc_rl.report.charts import Chart, Section, Table
from medarc_rl.report.overview import Tile

_ASSETS = files("medarc_rl.report") / "page"
LIBRARY = "vendor/echarts.common.min.js"
SCRIPTS = ("theme.js", "charts.js", "browser.js")


@dataclass(frozen=True, slots=True)
class Browser:
    """The rollouts of the page. Texts are base64, so that nothing in a rollout can end a script."""

    index: str
    blocks: Sequence[str]


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
