"""The gateway to judges, against a judge that this test plays over HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from prime_rl.configs.orchestrator import EnvConfig
from prime_rl.configs.rollouts.judges import JudgeConfig
from prime_rl.configs.shared import LogConfig
from prime_rl.environments.judging.gateway import JudgeGateway
from prime_rl.environments.judging.judge import JudgeCache, JudgeLost, JudgeServer, key_of
from prime_rl.orchestrator.errors import EnvironmentFault, JudgeFault
from prime_rl.orchestrator.workers.judges import run_judges
from prime_rl.orchestrator.workers.loading import load_environments
from prime_rl.run.paths import RunPaths

KEY = "the judge's key"
Script = Callable[[dict[str, Any], int], tuple[int, Any, dict[str, str]]]


def verdict(text: str = "yes") -> dict[str, Any]:
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 1000, "completion_tokens": 10, "total_tokens": 1010}
    return {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "judge",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": usage,
    }


@dataclass
class PlayedJudge:
    """An OpenAI-compatible server that answers as `script` says, from the body and the number of the request."""

    script: Script = lambda body, number: (200, verdict(), {})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    at_once: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    gate: threading.Event = field(default_factory=threading.Event)
    """It answers only while this is set."""
    asked: threading.Event = field(default_factory=threading.Event)
    """Set by the first request."""
    url: str = ""

    def answer(self, body: dict[str, Any], authorization: str) -> tuple[int, Any, dict[str, str]]:
        with self.lock:
            self.bodies.append(body)
            number = len(self.bodies)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        self.asked.set()
        try:
            self.gate.wait()
            if authorization != f"Bearer {KEY}":
                return 401, {"error": {"message": "Incorrect API key"}}, {}
            return self.script(body, number)
        finally:
            with self.lock:
                self.at_once -= 1


@pytest.fixture
def played() -> Iterator[PlayedJudge]:
    judge = PlayedJudge()
    judge.gate.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, answer, headers = judge.answer(body, self.headers.get("Authorization", ""))
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(data))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    judge.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield judge
    judge.gate.set()
    server.shutdown()
    server.server_close()


@contextmanager
def gateway(played: PlayedJudge, cache: Path | None = None, key: str = KEY, **settings: Any) -> Iterator[JudgeGateway]:
    config = JudgeConfig.model_validate({"model": "judge", "base_url": played.url, **settings})
    server = JudgeServer("grader", played.url, key, "GRADER_KEY")
    with JudgeGateway({"grader": (server, config, None if cache is None else JudgeCache(cache))}) as opened:
        yield opened


def client(opened: JudgeGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=opened.base_url("grader"), api_key=opened.key)


async def ask(opened: JudgeGateway, text: str = "Is 4 right?", **arguments: Any) -> str:
    async with client(opened) as asking:
        messages = [{"role": "user", "content": text}]
        answer = await asking.chat.completions.create(model="any", messages=messages, **arguments)
    return str(answer.choices[0].message.content)


async def test_answers_are_kept_by_model_prompt_and_sampling_and_counted(played: PlayedJudge, tmp_path: Path) -> None:
    file = tmp_path / "private" / "grader.sqlite"
    prices = {"prompt_price": 2.0, "completion_price": 100.0}
    with gateway(played, file, sampling={"temperature": 0.5, "max_tokens": 3}, **prices) as opened:
        played.gate.clear()
        equal = [asyncio.create_task(ask(opened)) for _ in range(3)]
        await asyncio.to_thread(played.asked.wait)
        played.gate.set()
        assert await asyncio.gather(*equal) == ["yes"] * 3
        assert await ask(opened) == "yes"
        assert [(body["model"], body["temperature"], body["max_tokens"]) for body in played.bodies] == [
            ("judge", 0.5, 3)
        ]
        await ask(opened, max_tokens=9)
        await ask(opened, "Is 5 right?")
        assert len(played.bodies) == 3
        metrics = opened.take_metrics()
        assert metrics["judge/grader/calls"] == 6
        assert metrics["judge/grader/cache_hit_rate"] == pytest.approx(0.5)
        assert metrics["judge/grader/prompt_tokens"] == 3000
        assert metrics["judge/grader/completion_tokens"] == 30
        assert metrics["judge/grader/cost"] == pytest.approx((3000 * 2 + 30 * 100) / 1e6)
        assert opened.take_metrics()["judge/grader/calls"] == 0
    assert {path.stat().st_mode & 0o777 for path in (file, file.parent)} == {0o600, 0o700}
    with gateway(played, file, sampling={"temperature": 0.5, "max_tokens": 3}) as later:
        assert await ask(later) == "yes"
    with gateway(played, None, sampling={"temperature": 0.5, "max_tokens": 3}) as without:
        await ask(without)
        await ask(without)
    assert len(played.bodies) == 5
    assert key_of("a", {"x": 1, "y": 2}) == key_of("a", {"y": 2, "x": 1}) != key_of("b", {"x": 1, "y": 2})


def test_two_writers_share_a_cache_and_a_damaged_file_is_named(tmp_path: Path) -> None:
    one, other = JudgeCache(tmp_path / "grader.sqlite"), JudgeCache(tmp_path / "grader.sqlite")
    writers = [
        threading.Thread(target=lambda cache=cache: [cache.put(bytes([at]), {"at": at}) for at in range(50)])
        for cache in (one, other)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [one.get(bytes([at])) for at in range(51)] == [*({"at": at} for at in range(50)), None]
    one.close(), other.close()
    (tmp_path / "torn.sqlite").write_bytes(b"not a database" * 100)
    with pytest.raises(JudgeLost, match=r"torn\.sqlite cannot be used.*delete the file, or set cache = false"):
        JudgeCache(tmp_path / "torn.sqlite")


async def test_a_call_is_repeated_after_429_500_garbage_and_an_empty_answer(played: PlayedJudge) -> None:
    answers = [
        (429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}),
        (500, b"<html>oops", {}),
        (200, b"\x00 no json", {}),
        (200, {"choices": [{"message": {"content": None}}]}, {}),
        (200, verdict("no"), {}),
    ]
    played.script = lambda body, number: answers[number - 1]
    with gateway(played) as opened:
        assert await ask(opened) == "no"
        assert opened.take_metrics()["judge/grader/retries"] == 4
        assert not opened.lost.done()


@pytest.mark.parametrize(
    ("answer", "settings", "named"),
    [
        ((500, {"error": {"message": "overloaded"}}, {}), {"max_retries": 1}, r"status 500: overloaded \(2 attempts"),
        ((200, b"garbage\x1b[31m", {}), {"max_retries": 0}, r"not a chat completion: garbage \[31m \(1 attempts"),
        ((429, {}, {"Retry-After": "900"}), {"timeout_s": 1}, r"within timeout_s = 1 s; last: status 429"),
        ((404, {"error": "no such model"}, {}), {}, r"does not serve 'judge': status 404: no such model"),
    ],
    ids=["500", "garbage", "429", "404"],
)
async def test_a_judge_without_an_answer_is_lost_by_name(
    played: PlayedJudge, answer: Any, settings: dict[str, Any], named: str
) -> None:
    played.script = lambda body, number: answer
    with gateway(played, **settings) as opened:
        with pytest.raises(openai.APIStatusError):
            await ask(opened)
        with pytest.raises(JudgeLost, match=rf"judge 'grader'.*{named}"):
            await asyncio.wrap_future(opened.lost)
        asked = len(played.bodies)
        with pytest.raises(openai.APIStatusError, match="the run is ending"):
            await ask(opened)
        assert len(played.bodies) == asked


async def test_a_judge_that_hangs_or_refuses_the_key_is_lost(played: PlayedJudge) -> None:
    played.gate.clear()
    with gateway(played, timeout_s=1, startup_timeout_s=1) as opened:
        with pytest.raises(openai.APIStatusError, match="within timeout_s = 1 s"):
            await ask(opened)
        with pytest.raises(JudgeLost, match=r"waited for judge 'grader' .* \(limit: startup_timeout_s = 1 s\)"):
            await opened.warm()
    played.gate.set()
    with gateway(played, key="wrong") as opened:
        with pytest.raises(
            JudgeLost, match=r"refuses the key in GRADER_KEY \(its value is refused\): status 401"
        ) as lost:
            await opened.warm()
        assert "wrong" not in str(lost.value)


async def test_a_wait_for_a_judge_says_what_it_waits_for(played: PlayedJudge, caplog) -> None:
    loading, answer = (503, {"error": {"message": "the model loads"}}, {}), (200, verdict(), {})
    played.script = lambda body, number: loading if number < 2 else answer
    with caplog.at_level("INFO"), gateway(played) as opened:
        await opened.warm()
    (line,) = [record.message for record in caplog.records if record.message.startswith("Waiting for judge 'grader'")]
    assert "startup_timeout_s" in line
    assert "status 503" in line


async def test_a_judge_that_the_run_does_not_start_and_that_does_not_answer_is_a_warning_at_once(
    played: PlayedJudge, caplog
) -> None:
    played.script = lambda body, number: (503, {}, {}) if number < 2 else (200, verdict(), {})
    with caplog.at_level("INFO"), gateway(played) as opened:
        await opened.warm()
    (warning,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("Judge 'grader' at http://127.0.0.1:")
    assert "correct judge.grader.base_url; the run waits 1800 s" in warning


async def test_a_judge_that_reasons_and_takes_no_max_tokens_starts(played: PlayedJudge) -> None:
    no_text = {"choices": [{"message": {"content": None}, "finish_reason": "length"}]}
    refused = {"error": {"message": "Unsupported parameter: max_tokens"}}
    played.script = lambda body, number: (400, refused, {}) if "max_tokens" in body else (200, no_text, {})
    with gateway(played) as opened:
        await opened.warm()
    assert len(played.bodies) == 1
    assert KEY not in repr(opened._configs)


async def test_a_retry_waits_for_the_rate_like_any_other_request(played: PlayedJudge) -> None:
    played.script = lambda body, number: (503, {}, {"Retry-After": "0"})
    with (
        gateway(played, timeout_s=2, requests_per_minute=1, tolerated_failures=1) as opened,
        pytest.raises(openai.APIStatusError, match="within timeout_s = 2 s"),
    ):
        await ask(opened)
    assert len(played.bodies) <= 1, "none where two seconds do not suffice for one"


async def test_a_refused_request_is_the_environments_own_and_failures_may_be_tolerated(played: PlayedJudge) -> None:
    bad = {"error": {"message": "the prompt is too long"}}
    played.script = lambda body, number: (400, bad, {}) if "long" in str(body) else (503, {}, {})
    with gateway(played, max_retries=0, tolerated_failures=1) as opened:
        with pytest.raises(openai.BadRequestError, match="the prompt is too long"):
            await ask(opened, "long")
        with pytest.raises(openai.APIStatusError):
            await ask(opened)
        assert not opened.lost.done()
        with pytest.raises(openai.APIStatusError):
            await ask(opened)
        assert opened.lost.done()


async def test_bodies_that_are_no_chat_and_what_is_not_http_are_refused_in_one_line(
    played: PlayedJudge, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING", "prime_rl")
    messages = [{"role": "user", "content": "a"}]
    cases = {
        b"": "messages: a list of messages, and at least one",
        b"[1]": "the body must be a JSON object",
        b'{"messages": NaN}': "the body is not JSON: ",
        b'{"messages": ["a"]}': "messages: a list of messages, and at least one",
        json.dumps({"messages": messages * 5000}).encode(): "messages: 5000 entries; at most 4096 are allowed",
        json.dumps({"messages": messages, "stream": [1]}).encode(): "stream: not supported",
        b'{"messages":[' + b"{}," * 600_000 + b"{}]}": "the body has 600005 opening brackets and quotation marks",
    }
    with gateway(played) as opened:
        url = f"{opened.base_url('grader')}/chat/completions"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {opened.key}"}) as http:
            for body, message in cases.items():
                async with http.post(url, data=body) as response:
                    shown = (await response.json())["error"]["message"]
                assert (response.status, shown[: len(message)]) == (400, message)
        for head, status in (
            (b"GET / HTTP/9.9", b" 400 "),
            (b"nonsense", b" 400 "),
            (b"GET /grader/v1/models HTTP/1.1", b" 401 "),
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", opened.port)
            writer.write(head + b"\r\nHost: a\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
            assert status in await reader.readline()
            writer.close()
    (record,) = caplog.records
    assert record.getMessage().startswith("judges: a malformed request was refused: ")


async def test_only_max_concurrent_requests_run_at_once_and_only_with_the_key(played: PlayedJudge) -> None:
    with gateway(played, max_concurrent=2) as opened:
        assert await asyncio.gather(*(ask(opened, f"question {at}") for at in range(8))) == ["yes"] * 8
        assert played.most_at_once <= 2
        async with openai.AsyncOpenAI(base_url=opened.base_url("grader"), api_key="another") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.models.list()
        async with openai.AsyncOpenAI(base_url=opened.base_url("other"), api_key=opened.key) as lost:
            with pytest.raises(openai.NotFoundError, match="no judge is called 'other'"):
                await lost.models.list()
        # Code that blocks the event loop is answered, too.
        with openai.OpenAI(base_url=opened.base_url("grader"), api_key=opened.key) as blocking:
            messages: Any = [{"role": "user", "content": "Is it so?"}]
            assert (
                blocking.chat.completions.create(model="judge", messages=messages).choices[0].message.content == "yes"
            )
            with pytest.raises(openai.BadRequestError, match="stream: not supported"):
                blocking.chat.completions.create(model="judge", messages=messages, stream=True)


ASKING = """
import os
import openai
import verifiers as vf
from datasets import Dataset


def load_environment(judge_base_url, judge_api_key_var, judge_model, judge_sampling_args, greeting="none"):
    with openai.OpenAI(base_url=judge_base_url, api_key=os.environ[judge_api_key_var]) as client:
        answer = client.chat.completions.create(model=judge_model, messages=[{"role": "user", "content": greeting}])
    said = answer.choices[0].message.content + str(judge_sampling_args) + str("JUDGE_SERVER_KEY" in os.environ)
    return vf.SingleTurnEnv(dataset=Dataset.from_list([{"question": said, "answer": ""}]), rubric=vf.Rubric())
"""


@pytest.mark.parametrize("python", [None, sys.executable], ids=["here", "own interpreter"])
def test_an_environment_gets_its_judge_by_name_wherever_it_runs(
    played: PlayedJudge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, python: str | None
) -> None:
    (tmp_path / "asking_env.py").write_text(ASKING)
    (tmp_path / "deaf_env.py").write_text("def load_environment(judge_model): pass")
    monkeypatch.syspath_prepend(tmp_path)
    # A guest gets no PYTHONPATH, which is ours.
    monkeypatch.chdir(tmp_path)
    program = None if python is None else tmp_path / "python"
    if program is not None:
        program.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {python} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setenv("JUDGE_SERVERS", json.dumps({"grader": played.url}))
    monkeypatch.setenv("JUDGE_SERVER_KEY", KEY)
    judges = {"grader": JudgeConfig.model_validate({"model": "judge", "sampling": {"top_p": 0.5}})}
    settings = {"python": program, "judge": "grader"}
    with run_judges(judges, RunPaths(tmp_path / "run")):
        env = EnvConfig(id="asking-env", args={"greeting": "hello"}, **settings)
        (loaded,) = load_environments([env], LogConfig()).values()
        try:
            assert loaded.prompt(0)[-1]["content"] == "yes{'top_p': 0.5}False"
            assert [body["messages"][0]["content"] for body in played.bodies] == ["hello"]
        finally:
            asyncio.run(loaded.close())
        with pytest.raises(EnvironmentFault, match="has none of the arguments judge_client, judge_base_url"):
            load_environments([EnvConfig(id="deaf-env", **settings)], LogConfig())
        with pytest.raises(
            EnvironmentFault, match="judge = 'another': this process is not part of a run that starts the judge"
        ):
            load_environments([EnvConfig(id="asking-env", python=program, judge="another")], LogConfig())
    assert "ENVIRONMENT_JUDGE_KEY" not in os.environ


def test_a_judge_that_nothing_has_started_is_named(tmp_path: Path) -> None:
    judges = {"grader": JudgeConfig(model="judge")}
    with (
        pytest.raises(JudgeFault, match=r"judge\.grader: no server was started for it: set judge\.grader\.base_url"),
        run_judges(judges, RunPaths(tmp_path)),
    ):
        pass
