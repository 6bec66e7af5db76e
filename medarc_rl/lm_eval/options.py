"""The options of `medarc_train lm-eval`.

Help pages read them without importing the command itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option


@dataclass(frozen=True, kw_only=True)
class LmEvalOptions:
    """Evaluate weights with lm-evaluation-harness: each checkpoint of a run next to its base model.

    Start the command again to continue.
    """

    weights: Annotated[
        str,
        Argument(
            metavar="RUN|WEIGHTS",
            help="A run's directory (all of its weights), one of its steps (`OUT/weights/step_80`), an adapter, a "
            "model's folder, a hub id, or any of these places on S3.",
        ),
    ]
    tasks: Annotated[str, Option(help="Tasks, groups or tags of lm-eval, separated by commas.")]
    num_fewshot: Annotated[
        str | None,
        Option(metavar="N[,N…]", help="Examples in the prompt; several numbers evaluate each. By default, the task's."),
    ] = None
    base: Annotated[
        str | None, Option(help="Model to compare with; by default, the one that the run or adapter started from.")
    ] = None
    no_base: Annotated[bool, Option("--no-base", help="Evaluate no base model.")] = False
    steps: Annotated[str | None, Option(metavar="N[,N…]", help="Steps of the run; by default all.")] = None
    watch: Annotated[
        bool, Option("--watch", help="Evaluate the run's checkpoints as they appear, until the run ends.")
    ] = False
    limit: Annotated[
        int | None, Option(min=1, help="Questions of each task; by default all. For trials: scores become coarse.")
    ] = None
    include_path: Annotated[Path | None, Option(help="Folder with tasks of your own, as lm-eval's YAML files.")] = None
    gen_kwargs: Annotated[
        str | None,
        Option(metavar="KEY=VALUE[,…]", help="How answers are sampled, such as `temperature=0.7,top_p=0.9`."),
    ] = None
    max_gen_toks: Annotated[
        int | None, Option(min=1, help="Longest answer, in tokens; by default the task's, or 1024 if it sets none.")
    ] = None
    apply_chat_template: Annotated[
        Literal["auto", "yes", "no"],
        Option(help="Ask questions as a chat. `auto`: if the model has a chat template and is not named `…-Base`."),
    ] = "auto"
    allow_unsafe_code: Annotated[
        bool, Option("--allow-unsafe-code", help="Allow tasks that run the code that the model writes, as you.")
    ] = False
    batch_size: Annotated[int, Option(min=1, max=1024, help="Requests at once.")] = 32
    max_model_len: Annotated[int | None, Option(min=1, help="Context length; by default the model's own.")] = None
    device: Annotated[Literal["auto", "cuda", "cpu"], Option(help="`auto` uses a GPU if there is one.")] = "auto"
    backend: Annotated[
        Literal["auto", "vllm", "embedded"], Option(help="The engine; `auto` is vLLM on a GPU if it is installed.")
    ] = "auto"
    output_dir: Annotated[
        Path | None, Option(help="Where results go; by default OUT/lm_eval, or lm_eval/MODEL for other models.")
    ] = None
    json: Annotated[bool, Option("--json", help="Print the scores as JSON, and progress on stderr.")] = False
