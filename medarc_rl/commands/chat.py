"""The command `medarc_train chat`."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Argument, Option

from medarc_rl.errors import UsageError

if TYPE_CHECKING:
    from prime_rl.checks.chat_models import ChatPlan

CHAT = "prime_rl.inference.chat"


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    weights: Annotated[
        str,
        Argument(
            metavar="WEIGHTS",
            help="What to try: a run's directory (its newest weights), one of its steps (`OUT/weights/step_80`), an "
            "adapter, a model's folder, or a hub id.",
        ),
    ]
    base: Annotated[
        str | None, Option(help="Model to compare with; by default, the one that the run or adapter started from.")
    ] = None
    no_base: Annotated[bool, Option("--no-base", help="Let WEIGHTS answer alone.")] = False
    prompt: Annotated[
        list[str] | None,
        Option("--prompt", "-p", help="Answer this and stop; several are the turns of one chat. Without it, chat."),
    ] = None
    image: Annotated[
        list[str] | None, Option(help="Image to show with the first message of a chat; several in this order.")
    ] = None
    system: Annotated[str | None, Option(help="System message.")] = None
    temperature: Annotated[
        float | None, Option(min=0, help="0 always takes the likeliest token; by default, the model's own.")
    ] = None
    top_p: Annotated[float | None, Option(min=1e-9, max=1, help="By default, the model's own.")] = None
    top_k: Annotated[int | None, Option(min=0, help="By default, the model's own; 0 is no limit.")] = None
    max_tokens: Annotated[int, Option(min=1, help="Longest answer, in tokens.")] = 512
    seed: Annotated[int, Option(help="The same seed samples the same answers.")] = 0
    chat_template: Annotated[str | None, Option(help="Replaces the models' own: a file, Jinja text, or `chatml`.")] = (
        None
    )
    device: Annotated[Literal["auto", "cuda", "cpu"], Option(help="`auto` uses a GPU if there is one.")] = "auto"

    @property
    def sampling(self) -> dict[str, Any]:
        given = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        known = {key: value for key, value in given.items() if value is not None}
        return {**known, "max_tokens": self.max_tokens, "seed": self.seed}


def chat(options: ChatOptions) -> int:
    """Chat with trained weights. The base model and the tuned model answer each message, one below the other."""
    plan = plan_of(options)
    sys.stdout.flush()
    sys.stderr.flush()
    # The chat takes over this process and its terminal.
    os.execv(sys.executable, [sys.executable, "-m", CHAT, plan.to_json()])


def plan_of(options: ChatOptions) -> ChatPlan:
    """Find the models of a chat. Raises UsageError."""
    from prime_rl.checks.chat_models import ChatPlan, find_chat_models
    from prime_rl.checks.chat_templates import read_template
    from prime_rl.utils.errors import StartFault
    from prime_rl.utils.images import ImageFault, ImageLimits, read_image

    if options.base is not None and options.no_base:
        raise UsageError("--base and --no-base exclude each other: give one")
    try:
        found = find_chat_models(options.weights, options.base)
        if options.chat_template is not None:
            read_template("--chat-template", options.chat_template)
        for image in options.image or ():
            read_image(image, Path(), ImageLimits())
    except ImageFault as fault:
        raise UsageError(f"--image {fault}") from fault
    except StartFault as fault:
        raise UsageError(str(fault)) from fault
    models = [found.tuned] if found.base is None or options.no_base else [found.base, found.tuned]
    if options.chat_template is not None:
        models = [replace(model, chat_template=options.chat_template) for model in models]
    return ChatPlan(
        tuple(models),
        options.sampling,
        tuple(options.prompt or ()),
        options.system,
        options.device,
        no_base="" if found.base is not None or options.no_base else found.no_base,
        images=tuple(options.image or ()),
    )
