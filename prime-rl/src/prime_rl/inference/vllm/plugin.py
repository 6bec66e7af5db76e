"""vLLM endpoint plugin with PRIME-RL's routes: weight updates, adapters, pause and resume, pre-tokenized chats."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import psutil
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from prometheus_client import REGISTRY
from starlette.datastructures import State
from transformers.utils import cached_file
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.openai.chat_completion.api_router import create_chat_completion
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionResponse
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.request import LoRARequest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from prime_rl.inference.guards import HEALTH, METRICS, BoundBodies, RequireKey
from prime_rl.inference.model_files import (
    DEFAULT_MAX_RANK,
    AdapterMissing,
    WeightError,
    check_base_version,
    check_name,
    check_same_model,
    checkpoint_shapes,
    mismatch_error,
    read_adapter_spec,
)
from prime_rl.inference.protocol import (
    ASLEEP,
    CONTEXT_LENGTH_MESSAGE,
    NO_SLEEP_MODE,
    PAUSED,
    InitBroadcasterBody,
    LoadAdapterBody,
    RequestError,
    UpdateWeightsBody,
    check_token_ids,
    parse_body,
)
from prime_rl.inference.rendering import bound_rendering
from prime_rl.inference.vllm.versions import UpdateCount, label_of, version_of
from prime_rl.inference.weight_group import NO_WEIGHT_GROUP
from prime_rl.monitors.trace import own_trace
from prime_rl.run.paths import step_of
from prime_rl.run.process import ANYONE, own_beats
from prime_rl.utils.engine_keys import ENGINE_KEY_VARIABLE
from prime_rl.utils.logger import SUCCESS, get_logger, setup_logger


@dataclass(slots=True)
class Adapters:
    """Loads LoRA adapters into vLLM in place and tracks the version of each. Use only while generation is paused."""

    engine: AsyncLLM
    models: OpenAIServingModels
    """vLLM's registry, which resolves a request's `model` to an adapter."""
    base_dir: Path
    versions: dict[str, int] = field(default_factory=dict)

    def check(self, name: str, directory: Path) -> None:
        """Check, from the adapter's config and headers, that it can be loaded.

        Raises:
            AdapterMissing: the directory or one of its files does not exist.
            WeightError: the adapter does not fit the model or exceeds the server's limits.
        """
        limits = self.engine.vllm_config.lora_config
        if limits is None:
            raise WeightError("this server was started without enable_lora")
        check_name(name, self.models.model_name(), self.versions, limits.max_cpu_loras or limits.max_loras)
        spec = read_adapter_spec(directory, checkpoint_shapes(self.base_dir), limits.max_lora_rank or DEFAULT_MAX_RANK)
        # vLLM has one scale for all layers of an adapter, and ignores PEFT's patterns.
        if odd := next((path for path, scale in spec.scales.items() if not math.isclose(scale, spec.scale)), None):
            text = f"vLLM scales all layers by {spec.scale:g}, and the adapter {odd} by {spec.scales[odd]:g}"
            raise mismatch_error(directory, f"{text}: serve weights that it is merged into, such as a run's export")

    async def load(self, name: str, directory: Path) -> int:
        """Load an adapter under `name`, or replace its current version in place. Returns the version.

        With `load_inplace` in a request, vLLM would read the adapter again in every step. So only this call sets it,
        and requests refer to the loaded adapter without it.

        Raises:
            WeightError: vLLM rejects the adapter. The old version then stays live.
        """
        known = self.models.lora_requests.get(name)
        number = known.lora_int_id if known is not None else self.models.lora_id_counter.inc(1)
        try:
            await self.engine.add_lora(LoRARequest(name, number, str(directory), load_inplace=True))
        except Exception as exc:  # workers' errors arrive as various types
            raise WeightError(f"vLLM cannot load the adapter {str(directory)!r}: {exc}") from exc
        self.models.lora_requests[name] = LoRARequest(name, number, str(directory))
        step = step_of(directory)
        self.versions[name] = self.versions.get(name, 0) + 1 if step is None else step
        return self.versions[name]

    async def unload_all(self) -> None:
        """Unload all adapters and abort the requests that use one, because their base weights are being replaced."""
        if not self.versions:
            return
        self.versions.clear()
        self.models.lora_requests.clear()
        states = self.engine.output_processor.request_states
        await self.engine.abort([name for name, state in states.items() if state.lora_name], internal=True)


Handler = TypeVar("Handler")


class TokensChatRequest(ChatCompletionRequest):
    """A chat request whose prompt the client has tokenized already (`tokens`)."""

    tokens: list[int]


class ChatServing(OpenAIServingChat):
    """vLLM's chat handler with weight versions and pre-tokenized prompts."""

    update_count: UpdateCount

    async def render_chat_request(self, request: ChatCompletionRequest) -> Any:
        """Render the messages, which vLLM's parsers need, then replace the prompt ids by the request's tokens."""
        rendered = await super().render_chat_request(request)
        if isinstance(rendered, ErrorResponse):
            return rendered
        conversation, (prompt,) = rendered
        if isinstance(request, TokensChatRequest):
            prompt["prompt_token_ids"] = request.tokens
        check_context_length(len(prompt["prompt_token_ids"]), self.model_config.max_model_len)
        check_token_ids(prompt["prompt_token_ids"], self.model_config.get_vocab_size())
        self.update_count.salt(prompt)
        return conversation, [prompt]

    async def chat_completion_full_generator(
        self, request: ChatCompletionRequest, result_generator: AsyncIterator[RequestOutput], *rest: Any, **options: Any
    ) -> ErrorResponse | ChatCompletionResponse:
        last: list[RequestOutput] = []

        async def keep_last() -> AsyncIterator[RequestOutput]:
            async for output in result_generator:
                last[:] = [output]
                yield output

        response = await super().chat_completion_full_generator(request, keep_last(), *rest, **options)
        if isinstance(response, ChatCompletionResponse) and last:
            _add_versions(response, last[0].outputs)
        return response


class CompletionServing(OpenAIServingCompletion):
    """vLLM's completion handler with weight versions."""

    update_count: UpdateCount

    async def render_completion_request(self, request: Any) -> Any:
        rendered = await super().render_completion_request(request)
        for prompt in [] if isinstance(rendered, ErrorResponse) else rendered:
            check_context_length(len(prompt["prompt_token_ids"]), self.model_config.max_model_len)
            check_token_ids(prompt["prompt_token_ids"], self.model_config.get_vocab_size())
            self.update_count.salt(prompt)
        return rendered

    def request_output_to_completion_response(
        self, final_res_batch: list[RequestOutput], *rest: Any, **options: Any
    ) -> CompletionResponse:
        response = super().request_output_to_completion_response(final_res_batch, *rest, **options)
        _add_versions(response, [output for result in final_res_batch for output in result.outputs])
        return response


def as_subclass(kind: type[Handler], handler: Any, update_count: UpdateCount) -> Handler:
    """Create a `kind` with the state of vLLM's handler, to avoid repeating vLLM's many constructor arguments."""
    converted = kind.__new__(kind)
    converted.__dict__.update(handler.__dict__, update_count=update_count)
    return converted


def check_context_length(length: int, limit: int) -> None:
    """Raise RequestError if a prompt fills the context. Clients match on the wording of the message."""
    if length >= limit:
        raise RequestError(CONTEXT_LENGTH_MESSAGE.format(limit=limit, length=length))


def _add_versions(response: ChatCompletionResponse | CompletionResponse, outputs: Sequence[CompletionOutput]) -> None:
    """Add `weight_versions` to every choice: spans with the version number of the response's model.

    vLLM itself reports versions as text labels, and only on its own routes.
    """
    for choice, output in zip(response.choices, outputs, strict=True):
        spans: list[dict[str, int]] = []
        for span in output.weight_versions or []:
            version = version_of(span.version, response.model)
            if spans and spans[-1]["version"] == version:
                spans[-1]["end"] = span.end
            else:
                spans.append({"version": version, "start": span.start, "end": span.end})
        choice.weight_versions = spans


_TOKENS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")


class EngineProgress:
    """Reports the engine's progress to the launcher. Call `look` several times a second."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine
        self._seen: tuple[float, int] | None = None
        # The engine runs in child processes, which a signal may stop.
        own_beats().include(child.pid for child in psutil.Process().children(recursive=True))
        own_beats().started()
        own_trace()

    def look(self, why_idle: str | None) -> None:
        """`why_idle` says why the engine generates nothing; None if it may."""
        unfinished = self._engine.get_num_unfinished_requests()
        seen = (_tokens(), unfinished)
        if why_idle is not None:
            own_beats().say(why_idle)
        elif not unfinished:
            own_beats().say("waiting for requests", waits_for=ANYONE)
        else:
            own_beats().say("generating")
            if seen != self._seen:
                own_beats().tick()
        self._seen = seen


def _tokens() -> float:
    """Number of tokens so far, of prompts and of answers. 0 if vLLM's statistics are off, or in several processes."""
    metrics = REGISTRY.restricted_registry(_TOKENS).collect()
    return sum(sample.value for metric in metrics for sample in metric.samples if sample.name in _TOKENS)


SLEEP_LEVEL = 1
"""vLLM keeps the weights in the machine's memory: an adapter needs them again, and so does an update that fails."""
_POLL_S = 0.1
_GRACE_S = 3


class PrimeRoutes:
    """The endpoint plugin. Each API server process has one instance."""

    name = "prime_rl"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._updating = asyncio.Lock()
        self._version = 0
        self._watching: asyncio.Task[None] | None = None
        self._open_paths = {HEALTH}
        self._is_held = False
        """Whether a request to `/pause` holds the engine."""
        self._is_asleep = False

    def attach_router(self, app: FastAPI) -> None:
        self._app = app
        # The last one added runs first: bodies are read once the key is checked.
        app.add_middleware(BoundBodies)
        app.add_middleware(RequireKey, key=os.environ[ENGINE_KEY_VARIABLE], open_paths=self._open_paths)
        app.add_exception_handler(RequestError, _request_error_response)
        for path, handler in {
            "/update_weights": self.update_weights,
            "/reload_weights": self.reload_weights,
            "/load_lora_adapter": self.load_adapter,
            "/init_broadcaster": self.init_broadcaster,
            "/pause": self.pause,
            "/resume": self.resume,
            "/sleep": self.sleep,
            "/v1/chat/completions/tokens": self.chat_from_tokens,
        }.items():
            app.add_api_route(path, handler, methods=["POST"])
        # vLLM's own route would answer first. It counts requests, not samples, and counts one twice as ended if its
        # client leaves in the moment in which the answer is ready: from then on it is wrong.
        app.router.routes[:] = [route for route in app.router.routes if getattr(route, "path", None) != "/load"]
        app.add_api_route("/load", self.load, methods=["GET"])
        app.add_api_route("/is_paused", self.is_paused, methods=["GET"])
        app.add_api_route("/is_sleeping", self.is_sleeping, methods=["GET"])

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        assert engine_client is not None, "the task `generate` requires an engine"
        setup_logger("info")
        if args.public_metrics:
            self._open_paths.add(METRICS)
        self._engine = engine_client
        tokenizer = engine_client.renderer.tokenizer
        if tokenizer is not None and (fault := bound_rendering(tokenizer)):
            get_logger().error(str(fault))
            raise SystemExit(1)
        self._base = Path(str(cached_file(args.model, "config.json"))).parent
        self._from_trainer = args.weight_broadcast == "nccl"
        self._workers = args.data_parallel_size * args.tensor_parallel_size
        self._may_sleep = args.may_sleep
        self._adapters = Adapters(engine_client, state.openai_serving_models, self._base)
        self._update_count = UpdateCount()
        await self._engine.update_weight_version(label_of(0, {}))
        state.openai_serving_chat = as_subclass(ChatServing, state.openai_serving_chat, self._update_count)
        state.openai_serving_completion = as_subclass(
            CompletionServing, state.openai_serving_completion, self._update_count
        )
        self._watching = asyncio.create_task(self._watch(args))

    async def update_weights(self, request: Request) -> JSONResponse:
        body = parse_body(UpdateWeightsBody, await request.body())
        return await self._swap(Path(body.weight_dir) if body.weight_dir is not None else None)

    async def reload_weights(self) -> JSONResponse:
        return await self._swap(None)

    async def load_adapter(self, request: Request) -> JSONResponse:
        body = parse_body(LoadAdapterBody, await request.body())
        directory, started = Path(body.lora_path), time.perf_counter()
        async with self._updating:
            try:
                check_base_version(self._version)
                await asyncio.to_thread(self._adapters.check, body.lora_name, directory)
                async with self._between_steps():
                    version = await self._adapters.load(body.lora_name, directory)
            except AdapterMissing as exc:
                raise RequestError(str(exc), HTTPStatus.NOT_FOUND, "lora_path") from exc
            except (WeightError, OSError) as exc:
                raise RequestError(str(exc), param="lora_path") from exc
        seconds = time.perf_counter() - started
        get_logger().info(f"Adapter {body.lora_name}: version {version} live after {seconds:.2f}s")
        return JSONResponse({"status": "ok", "version": version})

    async def init_broadcaster(self, request: Request) -> JSONResponse:
        """Make all workers join the trainer's weight group."""
        body = parse_body(InitBroadcasterBody, await request.body())
        if not self._from_trainer:
            raise RequestError(NO_WEIGHT_GROUP)
        await self._on_workers("join_weight_group", body.model_dump(), self._workers)
        return JSONResponse({"status": "ok"})

    async def pause(self) -> JSONResponse:
        self._refuse_asleep()
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        self._is_held = True
        return JSONResponse({"status": "paused"})

    async def resume(self) -> JSONResponse:
        self._refuse_asleep()
        await self._engine.resume_generation()
        self._is_held = False
        return JSONResponse({"status": "resumed"})

    def _refuse_asleep(self) -> None:
        """Its cache is gone: it cannot generate, and the weights that wake it up also resume it."""
        if self._is_asleep:
            raise RequestError(ASLEEP)

    async def load(self) -> JSONResponse:
        return JSONResponse({"server_load": self._engine.get_num_unfinished_requests()})

    async def is_paused(self) -> JSONResponse:
        return JSONResponse({"is_paused": await self._engine.is_paused()})

    async def sleep(self) -> JSONResponse:
        """Free the GPU's memory once running requests have ended. The next weights or adapter wake the engine up."""
        if not self._may_sleep:
            raise RequestError(NO_SLEEP_MODE)
        if self._is_held:
            raise RequestError(PAUSED)
        async with self._updating:
            if not self._is_asleep:
                await self._engine.sleep(level=SLEEP_LEVEL, mode="wait")
                self._is_asleep = True
        return JSONResponse({"status": "sleeping"})

    async def is_sleeping(self) -> JSONResponse:
        return JSONResponse({"is_sleeping": self._is_asleep})

    async def chat_from_tokens(self, request: TokensChatRequest, raw_request: Request) -> Any:
        return await create_chat_completion(request, raw_request=raw_request)

    async def _swap(self, directory: Path | None) -> JSONResponse:
        """Load weights on all workers between two steps. Running requests keep their keys and values."""
        started = time.perf_counter()
        source = directory or self._base
        received = directory is not None and self._from_trainer
        if not received:
            try:
                await asyncio.to_thread(check_same_model, source, checkpoint_shapes(self._base))
            except (WeightError, OSError) as exc:
                raise RequestError(str(exc), param="weight_dir") from exc
        async with self._updating, self._between_steps():
            await self._adapters.unload_all()
            await self._on_workers("receive_checkpoint" if received else "load_checkpoint", str(source))
            step = step_of(source) if directory else 0
            self._version = self._version + 1 if step is None else step
        seconds = time.perf_counter() - started
        get_logger().info(f"Weights: version {self._version} live after {seconds:.2f}s")
        return JSONResponse({"status": "ok", "version": self._version})

    async def _on_workers(self, method: str, *args: Any) -> None:
        """Call a method on every worker.

        Raises:
            RequestError: a worker failed; the message is the first worker's error.
        """
        faults = [fault for fault in await self._engine.collective_rpc(method, args=args) if fault is not None]
        if faults:
            raise RequestError(faults[0], HTTPStatus.INTERNAL_SERVER_ERROR)

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        """Pause generation while the block changes weights, then relabel them and invalidate the prefix cache."""
        was_paused = await self._engine.is_paused()
        if self._is_asleep:
            # The cache stays away until the weights are loaded, which need memory for a while.
            await self._engine.wake_up(["weights"])
        elif not was_paused:
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        try:
            yield
            self._update_count.advance()
            # Features of images by the old tower.
            await self._engine.reset_encoder_cache()
            await self._engine.update_weight_version(label_of(self._version, self._adapters.versions))
        finally:
            if self._is_asleep:
                await self._engine.wake_up()  # which resumes, too
                self._is_asleep = False
            elif not was_paused:
                await self._engine.resume_generation()

    async def _watch(self, args: Namespace) -> None:
        """Log when the server is ready, then exit with status 1 if the engine dies.

        vLLM has no hook for readiness, and it exits with status 0 when its engine dies.
        """
        while not getattr(getattr(self._app.state, "server", None), "started", False):
            await asyncio.sleep(_POLL_S)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._stop)
        get_logger().log(SUCCESS, f"Inference ready: {args.model} on {args.host}:{args.port}")
        progress = EngineProgress(self._engine)
        while not self._engine.errored:
            progress.look(self._why_idle())
            await asyncio.sleep(_POLL_S)
        get_logger().error("vLLM's engine has died")
        raise SystemExit(1)

    def _why_idle(self) -> str | None:
        if self._is_asleep:
            return "sleeping until the next weights"
        return "paused until a request to /resume" if self._is_held else None

    def _stop(self) -> None:
        """Shut down through uvicorn: stop accepting requests and give those in flight a few seconds to finish."""
        assert self._watching is not None
        self._watching.cancel()
        server: uvicorn.Server = self._app.state.server
        server.config.timeout_graceful_shutdown = _GRACE_S
        server.should_exit = True


def _request_error_response(_: Request, exc: Exception) -> JSONResponse:
    assert isinstance(exc, RequestError)
    return JSONResponse(exc.body(), status_code=exc.status)
