"""The options of the commands `medarc_train env`.

Help pages read them without importing the command itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

Kind = Literal["single-turn", "multi-turn", "tools", "judge"]


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Write the package of a new environment: `env new medqa --kind tools`. It trains as it is; replace its rows."""

    name: Annotated[str, Argument(metavar="NAME", help="Id of the environment: lower case, digits and dashes.")]
    kind: Annotated[Kind, Option(help="What the environment does.")] = "single-turn"
    directory: Annotated[Path, Option(help="Where the folder NAME is made.")] = Path()


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Look at an environment's dataset, and try its rewards on scripted answers: `env check medqa`. Needs no model.

    Ends with 1 if something failed.
    """

    environment: Annotated[
        str, Argument(metavar="ID|PATH", help="Id of an installed environment, or the directory of its package.")
    ]
    args: Annotated[str, Option(metavar="JSON", help='Arguments of load_environment: \'{"split": "test"}\'.')] = "{}"
    model: Annotated[Path | None, Option(help="Folder of a model whose tokenizer counts the tokens of prompts.")] = None
    rows: Annotated[
        int,
        Option(
            min=1,
            max=1000,
            help="Rows in which all kinds of answers are tried. Right answers are tried in the first 64, too.",
        ),
    ] = 4
    form: Annotated[
        str | None,
        Option(metavar="TEXT", help="How a right answer is written, with {answer} in it: '<answer>{answer}</answer>'."),
    ] = None
    turn: Annotated[
        list[str] | None,
        Option(
            metavar="TEXT",
            help="A message of a right conversation, for an environment of several turns; once for each message, with "
            "{answer} for the answer of a row.",
        ),
    ] = None
    limit_s: Annotated[float, Option(min=0.1, help="Longest time of one rollout, in seconds.")] = 30.0
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class TryOptions:
    """Roll out a few examples, and show the conversations and their rewards: `env try medqa --model MODEL`.

    Evaluation rows are used, or training rows if there are none.
    """

    environment: Annotated[
        str, Argument(metavar="ID|PATH", help="Id of an installed environment, or the directory of its package.")
    ]
    model: Annotated[
        str,
        Option(
            help="A run's directory (its newest weights), one of its steps, a model's folder, a hub id, or with "
            "--base-url the name on the server."
        ),
    ]
    base_url: Annotated[
        str | None, Option(metavar="URL", help="OpenAI-compatible server to ask; without it, one is started.")
    ] = None
    args: Annotated[str, Option(metavar="JSON", help='Arguments of load_environment: \'{"split": "test"}\'.')] = "{}"
    examples: Annotated[int, Option("--examples", "-n", min=1, max=1000, help="Number of examples.")] = 3
    rollouts: Annotated[int, Option(min=1, max=100, help="Rollouts of each example.")] = 1
    max_tokens: Annotated[int, Option(min=1, help="Longest answer, in tokens.")] = 256
    temperature: Annotated[float | None, Option(min=0, help="By default, the model's own.")] = None
    chat_template: Annotated[str | None, Option(help="Replaces the model's own: a file, Jinja text, or `chatml`.")] = (
        None
    )
    device: Annotated[Literal["auto", "cuda", "cpu"], Option(help="`auto` uses a GPU if there is one.")] = "auto"
    html: Annotated[Path | None, Option(metavar="FILE", help="Write the conversations as an HTML page, too.")] = None
    full: Annotated[bool, Option("--full", help="Show long messages whole.")] = False


@dataclass(frozen=True, kw_only=True)
class InstallOptions:
    """Install an environment for this user's runs: `env install ./medqa`. Its id then works in every config.

    If the run's interpreter meets its requirements, it is installed there, otherwise into a separate interpreter.
    """

    source: Annotated[str, Argument(metavar="PATH|PACKAGE", help="Directory of a package, a wheel, or a requirement.")]
    own: Annotated[
        bool, Option("--own", help="Install it into a separate interpreter, even if the run's would do.")
    ] = False
    shared: Annotated[bool, Option("--shared", help="Install it into the run's interpreter, or fail.")] = False
    python: Annotated[
        str | None,
        Option(metavar="VERSION", help="Python of the separate interpreter: a version such as `3.12`, or a path."),
    ] = None
    copy: Annotated[bool, Option("--copy", help="Copy a directory. Without it, later changes in PATH take effect.")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class ListOptions:
    """List the environments that runs find by id: installed ones, and those of the run's own interpreter."""

    json: Annotated[bool, Option("--json", help="Print JSON.")] = False


@dataclass(frozen=True, kw_only=True)
class UninstallOptions:
    """Remove an environment that `env install` has installed."""

    id: Annotated[str, Argument(metavar="ID", help="Id of an environment that `env install` has installed.")]
