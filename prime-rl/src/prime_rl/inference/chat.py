"""A chat with one or two models, started by `medarc_train chat`. Its one argument is a `ChatPlan` as JSON.

Answers go to stdout, everything else to stderr. Exit status: 0 at the end of the chat,
1 if a model cannot be loaded or a prompt cannot be answered.
"""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Self

from prime_rl.checks.chat_models import ChatModel, ChatPlan
from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.errors import EngineError
from prime_rl.inference.model_files import WeightError
from prime_rl.inference.protocol import ChatBody, RequestError
from prime_rl.inference.rendering import in_time
from prime_rl.utils.images import ImageFault, ImageLimits, shown_image
from prime_rl.utils.imports import import_transformers, import_without_gc
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.signals import start_program
from prime_rl.utils.terminal import tell

if TYPE_CHECKING:
    from prime_rl.inference.embedded.http.service import Service

Message = dict[str, Any]
PROMPT = "> "
HELP = "Type a message. /reset starts a new conversation, /quit or Ctrl-D ends the chat, Ctrl-C ends an answer."
ADAPTER = "tuned"
"""Name under which an engine holds the adapter of a chat."""


class CannotAnswer(Exception):
    """A model cannot answer. The message is one line for the user."""


class Speaker:
    """One model with its own conversation. Answers while it is `loaded`."""

    def __init__(self, model: ChatModel, service: Service, system: str | None, images: Sequence[str] = ()) -> None:
        """`images` are URLs of what the model sees with the first message."""
        self._images = [{"type": "image_url", "image_url": {"url": url}} for url in images]
        self.title = model.title
        self._model = model
        self._service = service
        self._opening: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._opening)

    @contextmanager
    def loaded(self) -> Iterator[Self]:
        """Run the engine during the block, with the model's own weights or its adapter.

        Raises WeightError if they do not fit the model.
        """
        with self._service.engine.in_thread(f"engine of {self.title}") as engine:
            if self._model.weights is not None:
                engine.update_weights(Path(self._model.weights)).result()
            if self._model.adapter is not None:
                engine.load_adapter(ADAPTER, Path(self._model.adapter)).result()
            yield self

    def reset(self) -> None:
        self._messages = list(self._opening)

    def answer(self, message: str, sampling: dict[str, Any]) -> Iterator[str]:
        """Yield the answer piece by piece. What was yielded becomes part of the conversation, also if it is cut off.

        Raises:
            CannotAnswer: the template rejects the conversation, or it is longer than the model's context.
        """
        from prime_rl.inference.embedded.http.answers import SampleStream

        content: Any = message
        if self._images and self._messages == self._opening:
            content = [*self._images, {"type": "text", "text": message}]
        asked = [*self._messages, {"role": "user", "content": content}]
        name = ADAPTER if self._model.adapter is not None else None
        body = ChatBody.model_validate({"messages": asked, "model": name, **sampling})
        try:
            (request,) = in_time(lambda: self._service.chat_requests(body))
        except RequestError as error:
            raise CannotAnswer(str(error)) from error
        grown: SimpleQueue[None] = SimpleQueue()
        request.on_progress = lambda: grown.put(None)
        request.result.add_done_callback(lambda _: grown.put(None))
        sample = SampleStream(request.sequences[0], 0, body, self._service.text)
        pieces: list[str] = []
        try:
            self._service.engine.submit(request)
            while not sample.is_finished:
                grown.get()
                if (piece := sample.advance(len)) is not None:
                    pieces.append(piece.text)
                    yield piece.text
                elif request.result.done():
                    request.result.result()
        except EngineError as error:
            raise CannotAnswer(str(error)) from error
        finally:
            request.result.cancel()
            self._messages = [*asked, {"role": "assistant", "content": "".join(pieces)}]


def speaker_of(model: ChatModel, plan: ChatPlan, images: Sequence[str]) -> Speaker:
    """Load a model, which sees images.

    Raises:
        EngineError: it cannot be loaded; the message is one line.
    """
    from prime_rl.inference.embedded.startup import start_service

    config = InferenceConfig.model_validate(
        {
            "model": {"name": model.name, "chat_template": model.chat_template},
            "device": plan.device,
            "enable_lora": model.adapter is not None,
            "max_lora_rank": None if model.adapter is None else _rank(Path(model.adapter)),
        }
    )
    return Speaker(model, start_service(config), plan.system, images)


def _rank(adapter: Path) -> int | None:
    rank = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8")).get("r")
    return rank if isinstance(rank, int) else None


def converse(plan: ChatPlan, speakers: list[Speaker]) -> int:
    """Answer the plan's prompts, or else what stdin says, until its end. Returns the exit status."""
    succeeded = True
    for message in plan.prompts or _typed():
        if message == "/reset":
            for speaker in speakers:
                speaker.reset()
        elif message in ("/quit", "/exit"):
            break
        elif message.startswith("/"):
            tell(f"{message.split()[0]}: unknown command. {HELP}")
        elif message:
            answered = [_show(speaker, message, plan) for speaker in speakers]
            succeeded = succeeded and all(answered)
    return 0 if succeeded else 1


def _show(speaker: Speaker, message: str, plan: ChatPlan) -> bool:
    """Print the model's name and its answer. Returns False if it has no answer."""
    sys.stdout.write(f"[{speaker.title}]\n")
    try:
        for piece in speaker.answer(message, plan.sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except CannotAnswer as error:
        sys.stdout.flush()
        tell(f"error: {error}")
        return False
    except KeyboardInterrupt:
        if plan.prompts:
            raise
    finally:
        sys.stdout.write("\n\n")
        sys.stdout.flush()
    return True


def _typed() -> Iterator[str]:
    """The lines of stdin, with a prompt and editing on a terminal."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401 - gives `input` editing and a history

    tell(HELP)
    while True:
        try:
            yield input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
            return


def _entered(model: ChatModel, plan: ChatPlan, images: Sequence[str], closing: ExitStack) -> Speaker | None:
    """A running speaker; None if a model that may be missing cannot be loaded."""
    try:
        return closing.enter_context(speaker_of(model, plan, images).loaded())
    except (EngineError, WeightError) as error:
        if not model.is_optional:
            tell(f"error: {error}")
            raise SystemExit(1) from None
        tell(f"warning: chatting without the base model: {error}")
        return None


def _shown(file: str) -> str:
    """The URL of an image, of which the user sees size and hash."""
    try:
        shown = shown_image(file, Path(), ImageLimits())
    except ImageFault as fault:
        tell(f"error: {fault}")
        raise SystemExit(1) from None
    tell(f"[image {shown.width}x{shown.height} sha {shown.digest[:4]}…] {file}")
    return shown.url


def main() -> None:
    start_program()
    plan = ChatPlan.from_json(sys.argv[1])
    setup_logger("warning")
    with import_without_gc():
        import_transformers()
    with ExitStack() as closing:
        images = [_shown(image) for image in plan.images]
        entered = [_entered(model, plan, images, closing) for model in plan.models]
        speakers = [speaker for speaker in entered if speaker is not None]
        if plan.no_base:
            tell(f"warning: chatting without the base model: {plan.no_base}")
        # From here on Ctrl-C ends an answer.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            exit_code = converse(plan, speakers)
        except KeyboardInterrupt:
            exit_code = 128 + signal.SIGINT
    raise SystemExit(exit_code)


if __name__ == "__main__":
    main()
