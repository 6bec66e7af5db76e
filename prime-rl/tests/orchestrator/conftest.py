"""Fixtures of the orchestrator's tests: an inference server without a model, and environments."""

from __future__ import annotations

import json
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse
from starlette.routing import Route

from prime_rl.configs.orchestrator import OrchestratorConfig
from prime_rl.orchestrator.orchestrator import run
from prime_rl.orchestrator.rollouts.rollout import ExampleRef, Rollout
from prime_rl.orchestrator.rollouts.trace import ModelCall, Prompt, TokenTrace
from prime_rl.run.paths import OrchestratorPaths
from prime_rl.utils.logger import setup_logger
from prime_rl.utils.pydantic_config import load_config

MODEL = "letters"
END = 3
Reply = Callable[[list[dict[str, Any]], int], str | dict[str, Any]]


def encode(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def render(messages: Sequence[dict[str, Any]], add_generation_prompt: bool = True) -> list[int]:
    """The fake server's chat template: `<role>:<content>` and an end token for each message."""
    ids = [token for each in messages for token in [*encode(f"{each['role']}:{each['content']}"), END]]
    return ids + encode("assistant:") * add_generation_prompt


def reverse(messages: list[dict[str, Any]], version: int) -> str:
    """The last message, reversed from version 1 on: the policy learns in one step."""
    text = messages[-1]["content"]
    return text[::-1] if version else text


@dataclass
class PolicyServer:
    """Fake inference server with one token per letter. Its log-probabilities are -0.5 - version."""

    reply: Reply = reverse
    version: int = 0
    ready: bool = True
    token_route: bool = True
    adapters: dict[str, int] = field(default_factory=dict)
    """Version of each loaded adapter."""
    missing_adapters: int = 0
    """Number of adapter loads that fail because the files are missing."""
    loaded: list[str | None] = field(default_factory=list)
    on_sleep: Callable[[], bool] = lambda: False
    """Called by a request to sleep; whether the server can."""
    joins: list[dict[str, Any]] = field(default_factory=list)
    """Requests to join a weight group. Joining fails on port 1."""
    requests: list[dict[str, Any]] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    """Bodies of the chat completions that it returned."""
    gate: threading.Event = field(default_factory=threading.Event)
    """Chat requests are answered only while it is set."""
    refusal: tuple[int, str] | None = None
    """Status and message of the error response to chat requests."""
    models: Any = field(default_factory=lambda: {"object": "list", "data": [{"id": MODEL}]})
    """Answer to the question which models it serves."""
    page: str | None = None
    """HTML in place of each completion, as a gateway sends it."""
    waiting: int = 0
    """Chat requests that wait for the gate."""
    reasoning: str | None = None
    """Reasoning of each answer, whose tokens are left out."""
    tokenized: list[dict[str, Any]] = field(default_factory=list)
    """Requests to tokenize a conversation."""
    tokenize_refusal: tuple[int, str] | None = None
    """Status and message of the error response to requests to tokenize."""
    drops: tuple[str, ...] = ()
    """Fields to omit from chat responses."""
    url: str = ""
    close: Callable[[], None] = lambda: None
    """Stops the server, as a crash would."""

    def __post_init__(self) -> None:
        self.gate.set()

    @property
    def app(self) -> Starlette:
        routes = [
            Route("/health", self._health),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/update_weights", self._update_weights, methods=["POST"]),
            Route("/sleep", self._sleep, methods=["POST"]),
            Route("/load_lora_adapter", self._load_adapter, methods=["POST"]),
            Route("/init_broadcaster", self._join, methods=["POST"]),
        ]
        if self.token_route:
            routes.append(Route("/v1/chat/completions/tokens", self._chat, methods=["POST"]))
        return Starlette(routes=routes)

    async def _health(self, request: Request) -> JSONResponse:
        return JSONResponse({}, 200 if self.ready else 503)

    async def _models(self, request: Request) -> JSONResponse:
        return JSONResponse(self.models)

    async def _tokenize(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.tokenized.append(body)
        if self.tokenize_refusal is not None:
            return _error(*self.tokenize_refusal)
        try:
            ids = render(body["messages"], body.get("add_generation_prompt", True))
        except (KeyError, TypeError) as error:
            return _error(400, f"malformed: {error!r}")
        return JSONResponse({"count": len(ids), "max_model_len": 1024, "tokens": ids})

    async def _update_weights(self, request: Request) -> JSONResponse:
        directory = (await request.json())["weight_dir"]
        self.loaded.append(directory)
        self.version = int(re.search(r"step_(\d+)$", directory).group(1)) if directory else 0
        return JSONResponse({"status": "ok"})

    async def _sleep(self, request: Request) -> JSONResponse:
        can = self.on_sleep()
        return JSONResponse({"status": "sleeping"}) if can else _error(400, "it has no sleep mode")

    async def _load_adapter(self, request: Request) -> JSONResponse:
        body = await request.json()
        if self.missing_adapters:
            self.missing_adapters -= 1
            return _error(404, "no adapter_config.json")
        self.loaded.append(body["lora_path"])
        self.adapters[body["lora_name"]] = int(body["lora_path"].rpartition("step_")[2])
        return JSONResponse({"status": "ok"})

    async def _join(self, request: Request) -> JSONResponse:
        self.joins.append(await request.json())
        return (
            _error(500, "the trainer did not come") if self.joins[-1]["port"] == 1 else JSONResponse({"status": "ok"})
        )

    async def _chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        if not body.get("messages"):
            return _error(400, "messages is required")
        self.requests.append(body | {"path": request.url.path})
        if not self.gate.is_set():
            await self._wait_for_gate(request)
        if self.refusal is not None:
            return _error(*self.refusal)
        if body.get("model", MODEL) not in (MODEL, *self.adapters):
            return _error(404, f"the model {body['model']} does not exist")
        if self.page is not None:
            return HTMLResponse(self.page)
        try:
            response = JSONResponse(self._completion(body))
        except (AttributeError, KeyError, TypeError) as error:
            return _error(400, f"malformed: {error!r}")
        self.answers.append(bytes(response.body))
        return response

    async def _complete(self, request: Request) -> JSONResponse:
        """Answer a prompt of tokens: the letters after its last colon."""
        body = await request.json()
        self.requests.append(body | {"path": request.url.path})
        text = "".join(map(chr, body["prompt"])).rpartition(":")[2]
        letters = "".join(letter for letter in text if letter.isprintable())[: body["max_tokens"] - 1]
        ids = [*encode(letters), END]
        versions = [{"version": self.version, "start": 0, "end": len(ids)}]
        logprobs = {"token_logprobs": [-0.5 - self.version] * len(ids)}
        choice = {"text": letters, "token_ids": ids, "logprobs": logprobs, "weight_versions": versions}
        return JSONResponse({"choices": [choice | {"index": 0, "finish_reason": "stop"}]})

    async def _wait_for_gate(self, request: Request) -> None:
        """Wait as an engine samples: until it is done, or the client is gone."""
        self.waiting += 1
        try:
            while not self.gate.is_set() and not await request.is_disconnected():
                await anyio.to_thread.run_sync(self.gate.wait, 0.05, abandon_on_cancel=True)
        finally:
            self.waiting -= 1

    def _completion(self, body: dict[str, Any]) -> dict[str, Any]:
        version = self.adapters.get(body.get("model", MODEL), self.version)
        said = self.reply(body["messages"], version)
        # A reply that is no text is a message with tool calls.
        message = {"content": said} if isinstance(said, str) else said
        text = said if isinstance(said, str) else json.dumps(said["tool_calls"])
        prompt, ids = body.get("tokens") or render(body["messages"]), [*encode(text), END]
        logprob = -0.5 - version
        content = [{"token": chr(token), "logprob": logprob, "bytes": [], "top_logprobs": []} for token in ids]
        reasoning = {"reasoning_content": self.reasoning}
        choice = {
            "index": 0,
            "message": {"role": "assistant"} | message | (reasoning if self.reasoning else {}),
            "finish_reason": "tool_calls" if "tool_calls" in message else "stop",
            "token_ids": ids,
            "logprobs": {"content": content},
            "weight_versions": [{"version": version, "start": 0, "end": len(ids)}],
        }
        choices = [choice | {"index": index} for index in range(body.get("n") or 1)]
        answer = {"id": "x", "created": 1, "model": MODEL, "prompt_token_ids": prompt, "choices": choices}
        for name in self.drops:
            for each in (answer, *choices):
                each.pop(name, None)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "total_tokens": len(prompt) + len(ids)}
        return answer | {"object": "chat.completion", "usage": usage}


def _error(status: int, message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message, "type": "error", "param": None, "code": status}}, status)


class _Uvicorn(uvicorn.Server):
    """Signals when it is listening, and reports its port."""

    listening: threading.Event

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @property
    def port(self) -> int:
        return self.servers[0].sockets[0].getsockname()[1]


@pytest.fixture
def serve() -> Iterator[Callable[[PolicyServer], PolicyServer]]:
    """Starts a policy server, on a free port unless the test says which."""
    with serving() as start:
        yield start


@pytest.fixture(scope="module")
def module_server() -> Iterator[PolicyServer]:
    """A policy server for all tests of a module."""
    with serving() as start:
        yield start(PolicyServer())


@contextmanager
def serving() -> Iterator[Callable[[PolicyServer], PolicyServer]]:
    started: list[PolicyServer] = []

    def stop(policy: PolicyServer, server: _Uvicorn, thread: threading.Thread) -> None:
        policy.gate.set()
        server.should_exit = True
        thread.join()

    def start(policy: PolicyServer, host: str = "127.0.0.1", port: int = 0) -> PolicyServer:
        config = uvicorn.Config(policy.app, host=host, port=port, log_level="error", timeout_graceful_shutdown=1)
        server = _Uvicorn(config)
        server.listening = threading.Event()
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        server.listening.wait()
        policy.url = f"http://{host}:{server.port}/v1"
        policy.close = partial(stop, policy, server, thread)
        started.append(policy)
        return policy

    yield start
    for policy in started:
        policy.close()


@pytest.fixture
def policy_server(serve: Callable[[PolicyServer], PolicyServer]) -> PolicyServer:
    return serve(PolicyServer())


ENVIRONMENTS = '''
import asyncio
import os
import threading
from pathlib import Path
import verifiers as vf
from datasets import Dataset

TEXTS = ["abc", "hello", "verifiers", "noon time"]


def reversed_text(completion, answer):
    return float(completion[-1]["content"] == answer)


def one_letter(completion):
    return float(len(completion[-1]["content"]) == 1)


def characters(completion):
    return float(len(completion[-1]["content"]))


class Twice(vf.MultiTurnEnv):
    """Asks for one more text after the first answer."""

    async def env_response(self, messages, state):
        return [{"role": "user", "content": "again"}]


class Screenshots(vf.MultiTurnEnv):
    """Shows the model an image after its first answer."""

    async def env_response(self, messages, state):
        return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}]}]


def with_image(text):
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
    return [{"role": "user", "content": [{"type": "text", "text": text}, *[image] * (text == "hello")]}]


class EvalFails(vf.SingleTurnEnv):
    """Fails on evaluation rows."""

    async def setup_state(self, state):
        if (state["input"].get("info") or {}).get("split") == "eval":
            raise RuntimeError("no such database")
        return state


async def catch_cancellations():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass


class Stuck(vf.SingleTurnEnv):
    """Keeps every thread of the event loop, and leaves tasks that do not end."""

    async def setup_state(self, state):
        for _ in range(64):
            asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)
        self.left = asyncio.create_task(catch_cancellations())
        return state


class EvalDies(vf.SingleTurnEnv):
    """Ends its process at the first evaluation row."""

    async def setup_state(self, state):
        is_eval = (state["input"].get("info") or {}).get("split") == "eval"
        if is_eval and not self.died.exists():
            self.died.touch()
            os._exit(9)
        return state


class Cooler(vf.SingleTurnEnv):
    """Samples at a temperature of its own: in its state's arguments, or in new ones."""

    async def setup_state(self, state):
        if self.way == "in place":
            state["sampling_args"]["temperature"] = 0.25
        elif self.way == "in new ones":
            state["sampling_args"] = {**state["sampling_args"], "temperature": 0.25}
        else:
            state["sampling_args"] = {**state["sampling_args"], "temperature": self.way}
        return state


class Crashing(Twice):
    async def env_response(self, messages, state):
        raise RuntimeError("the database is down")


def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


def load_environment(kind="single", rows=4, died=None, way="in place"):
    data = Dataset.from_list([{"question": text, "answer": text[::-1]} for text in TEXTS]).select(range(rows))
    rubric = vf.Rubric(funcs=[reversed_text])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=data, rubric=rubric)
    if kind == "two parts":
        rubric = vf.Rubric(funcs=[reversed_text, one_letter, characters], weights=[1.0, 0.2, 0.0])
        return vf.SingleTurnEnv(dataset=data, rubric=rubric)
    if kind == "twice":
        return Twice(dataset=data, rubric=rubric, max_turns=2)
    if kind == "tools":
        return vf.ToolEnv(tools=[add], dataset=data, rubric=rubric, system_prompt="Use the tool.")
    if kind == "stuck threads":
        return Stuck(dataset=data, rubric=rubric)
    if kind == "crashing":
        return Crashing(dataset=data, rubric=rubric, max_turns=2)
    if kind == "eval fails":
        return EvalFails(dataset=data, eval_dataset=data.add_column("info", [{"split": "eval"}] * rows), rubric=rubric)
    if kind == "eval dies":
        evals = data.add_column("info", [{"split": "eval"}] * rows)
        return EvalDies(dataset=data, eval_dataset=evals, rubric=rubric, died=Path(died))
    if kind == "cooler":
        return Cooler(dataset=data, rubric=rubric, way=way)
    if kind == "screenshots":
        return Screenshots(dataset=data, rubric=rubric, max_turns=2)
    if kind in ("images", "parts"):
        texts = TEXTS if kind == "images" else TEXTS[:1]
        rows = Dataset.from_list([{"prompt": with_image(text)} for text in texts])
        return vf.SingleTurnEnv(dataset=rows, rubric=rubric)
    if kind == "odd arguments":
        rubric = vf.Rubric(funcs=[lambda completion, answr: 1.0])
        return vf.SingleTurnEnv(dataset=data, rubric=rubric)
    if kind == "odd group arguments":
        rubric = vf.Rubric(funcs=[lambda completions, answer: [1.0] * len(completions)])
        return vf.SingleTurnEnv(dataset=data, rubric=rubric)
    if kind == "no answers":
        return vf.SingleTurnEnv(dataset=data.rename_column("answer", "reply"), rubric=rubric)
    if kind == "many arguments":
        rubric = vf.Rubric(funcs=[lambda state, level, judge, bonus=1.0, *rest, **more: 1.0])
        rubric.add_class_object("judge", None)
        return vf.SingleTurnEnv(dataset=data.add_column("level", [1] * rows), rubric=rubric)
    if kind == "odd weight":
        return vf.SingleTurnEnv(dataset=data, rubric=vf.Rubric(funcs=[reversed_text], weights=[float("nan")]))
    if kind == "forgotten return":
        return None
    if kind == "unawaited":
        return asyncio.sleep(0)
    if kind == "class":
        return vf.SingleTurnEnv
    if kind in ("list", "late list"):
        rows = [{"question": "a", "answer": "b"}]
        return vf.SingleTurnEnv(dataset=rows if kind == "list" else lambda: rows, rubric=vf.Rubric())
    if kind == "eval only":
        return vf.SingleTurnEnv(eval_dataset=data, rubric=rubric)
    raise KeyError(f"no such kind: {kind}")
'''


@pytest.fixture(scope="session")
def environments_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the module `letters_env` and the module `broken_env`, which fails to import."""
    directory = tmp_path_factory.mktemp("environments")
    (directory / "letters_env.py").write_text(ENVIRONMENTS)
    (directory / "broken_env.py").write_text("import a_module_that_is_not_there\n")
    return directory


@pytest.fixture
def importable_environments(environments_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(environments_dir))
    sys.modules.pop("letters_env", None)


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A model directory with the one file that the orchestrator reads."""
    directory = tmp_path / MODEL
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": 128}))
    return directory


@pytest.fixture
def orchestrate(tmp_path: Path, policy_server, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    """Runs the orchestrator with the given settings; returns the exit code and the log."""

    def finish(**settings: Any) -> tuple[int, str]:
        defaults = {
            "output_dir": tmp_path / "run_default",
            "max_steps": 1,
            "batch_size": 4,
            "rollouts_per_example": 2,
            "model": {"name": "letters"},
            "client": {"base_url": [policy_server.url]},
            "env": [{"id": "letters-env"}],
            "filters": [{"type": "repetition"}],
            "log": {"vf_level": "critical"},
        }
        config = load_config(OrchestratorConfig, overrides=defaults | settings)
        setup_logger("info")
        return run(config, OrchestratorPaths(config.output_dir), no_sleep), capsys.readouterr().out

    async def no_sleep(seconds: float) -> None:
        """Return immediately."""

    return finish


def make_turn(prompt: Sequence[int], completion: Sequence[int], logprob: float = -1.0) -> ModelCall:
    return ModelCall(
        prompt=Prompt.of(list(prompt)),
        completion_ids=list(completion),
        completion_mask=[True] * len(completion),
        inference_logprobs=[logprob] * len(completion),
    )


def make_rollout(*turns: ModelCall, reward: float = 0.0, env: str = "letters", **fields: Any) -> Rollout:
    trace = TokenTrace()
    for each in turns:
        trace.append(each)
    return Rollout(ExampleRef(env, 0), reward, trace, temperature=1.0, version=0, num_turns=len(turns), **fields)


@pytest.fixture
def turn() -> Callable[..., ModelCall]:
    return make_turn


@pytest.fixture
def rollout() -> Callable[..., Rollout]:
    return make_rollout
