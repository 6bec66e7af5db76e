"""A teacher: planned with the run, asked for log-probabilities, and a run that ends by its name when it is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from prime_rl.checks.model_files import other_token
from prime_rl.checks.start_dir import StartDir
from prime_rl.configs.orchestrator import TeacherModelConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.configs.rollouts.judges import TEACHER
from prime_rl.launch.plan import rl_request
from prime_rl.orchestrator.batches.teacher import Teachers
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.rollouts.rollout import Line
from prime_rl.run.paths import RunPaths
from prime_rl.transport.messages import TrainingSample
from prime_rl.utils.pydantic_config import ConfigWarning, load_config

REPOSITORY = Path(__file__).resolve().parents[3]
MODEL = REPOSITORY / "examples" / "reverse_text" / "checkpoint"
SETTINGS = {
    "device": "cpu",
    "seq_len": 64,
    "max_steps": 1000,
    "model": {"name": str(MODEL)},
    "trainer": {"loss": {"adv_tau": 0.0, "teacher_tau": 1.0}, "model": {"attn": "sdpa"}},
    "orchestrator": {
        "batch_size": 8,
        "rollouts_per_example": 2,
        "sampling": {"max_tokens": 16},
        "env": [{"id": "reverse-text"}],
    },
    "teacher_inference": {"model": {"name": str(MODEL)}},
}


def rl_config(*words: str) -> RLConfig:
    return load_config(RLConfig, overrides=list(words))


def sample_of(prompt: list[int], completion: list[int]) -> TrainingSample:
    count = len(completion)
    return TrainingSample(prompt, [False] * len(prompt), completion, [True] * count, [-1.0] * count, [1.0] * count)


def test_a_teacher_gets_gpus_behind_those_of_the_judges() -> None:
    words = ["--judge.grader.model", "x/y", "--deployment.num-teacher-gpus", "2", "--deployment.gpus-per-node", "8"]
    assert rl_request(rl_config(*words)).frozen == (1, 2)
    assert rl_request(rl_config("--device", "cpu", "--teacher-inference.model.name", "x/y")).frozen == (0,)
    outside = ["--orchestrator.teacher-model.client.base-url", "http://teacher:8000/v1"]
    assert rl_request(rl_config(*outside)).frozen == ()


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["--trainer.loss.teacher-tau", "1", "--orchestrator.sampling.temperature", "0.7"], "those at temperature 1"),
        ([], "trainer.loss.teacher_tau is 0"),
    ],
)
def test_a_teacher_that_may_not_do_what_is_meant_is_a_warning(words: list[str], warning: str) -> None:
    with pytest.warns(ConfigWarning, match=warning):
        rl_config("--device", "cpu", "--teacher-inference.model.name", "x/y", *words)


@pytest.mark.parametrize("vocabulary", ["table", "list"])
def test_a_teacher_with_another_tokenizer_is_told_by_its_first_token(tmp_path: Path, vocabulary: str) -> None:
    tokens = ["a", "b", "c"]
    for name, changed in (("policy", "b"), ("teacher", "B"), ("same", "b")):
        texts = [changed if each == "b" else each for each in tokens]
        model = (
            {text: at for at, text in enumerate(texts)} if vocabulary == "table" else [[text, -1.0] for text in texts]
        )
        (tmp_path / name).mkdir()
        tokenizer = {"model": {"vocab": model}, "added_tokens": [{"id": 3, "content": "<|end|>"}]}
        (tmp_path / name / "tokenizer.json").write_text(json.dumps(tokenizer))
    start = StartDir(tmp_path)
    assert other_token("policy", "teacher", start) == "1 ('b' and 'B')"
    assert other_token("policy", "same", start) is None
    longer = {"model": {"vocab": {"a": 0, "b": 1, "c": 2}}, "added_tokens": [{"id": 3, "content": "<|end|>"}]}
    longer["added_tokens"].append({"id": 4, "content": "<|think|>"})
    (tmp_path / "longer").mkdir()
    (tmp_path / "longer" / "tokenizer.json").write_text(json.dumps(longer))
    assert other_token("policy", "longer", start) is None
    assert other_token("longer", "policy", start) == "4 ('<|think|>' and nothing)"
    (tmp_path / "same" / "tokenizer.json").write_text("[")
    assert other_token("policy", "same", start) is None


@pytest.fixture(scope="module")
def distillation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[str], RunPaths]]:
    """A run whose teacher is the model that it starts from, after two steps."""
    folder = tmp_path_factory.mktemp("distillation")
    (folder / "rl.toml").write_text(tomli_w.dumps(SETTINGS))
    paths = RunPaths(folder / "run")
    command = [Path(sys.executable).with_name("medarc_train"), "rl", folder / "rl.toml", "--output-dir", paths.root]
    process = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 1 "):
            break
    else:
        pytest.fail("".join(lines))
    yield process, paths
    process.kill()
    process.wait()


def pid_of(name: str, run: RunPaths) -> int:
    """The first process in the heartbeats of a child: itself."""
    return int(json.loads(run.heartbeat(name).read_bytes().partition(b"\n")[0])[5][0])


def teacher_at(run: RunPaths, model: Path = MODEL, **client: Any) -> Teachers:
    """A client of the run's teacher, which finds the key in this user's file."""
    url = re.search(r"--server.host (\S+) --server.port (\d+)", run.log(TEACHER).read_text())
    assert url is not None
    settings = {"base_url": [f"http://{url[1]}:{url[2]}/v1"], "api_key_var": "UNSET_VARIABLE", **client}
    return Teachers([TeacherModelConfig.model_validate({"client": settings, "model": {"name": str(model)}})])


def test_a_teacher_that_is_the_policy_has_nothing_to_teach_in_the_first_step(distillation) -> None:
    records = [json.loads(line) for line in distillation[1].metrics.read_text().splitlines()]
    first = next(record for record in records if "teacher_kl/mean" in record)
    assert first["teacher_kl/mean"] == pytest.approx(0, abs=1e-3)
    assert next(record["time/teacher_logprobs"] for record in records if "time/teacher_logprobs" in record) > 0


@pytest.mark.parametrize(
    ("settings", "tokens", "fault"),
    [
        ({"model": REPOSITORY}, 2, "teacher: .* does not serve .* correct model.name"),
        ({}, 70_000, "cannot read a sample of 70000 tokens and one more: raise its max_model_len"),
        ({}, -1, "the teacher at http://.* does not answer: .* 400"),
    ],
)
async def test_what_a_teacher_cannot_score_is_one_line(distillation, settings, tokens: int, fault: str) -> None:
    teacher = teacher_at(distillation[1], **settings)
    sample = sample_of([3], [10**9] if tokens < 0 else [9] * (tokens - 1))

    async def ask() -> None:
        await teacher.wait_ready(None)
        await teacher.score([Line(sample)])

    with pytest.raises(OrchestratorError, match=fault):
        await ask()
    await teacher.close()


class ForgetfulServer(BaseHTTPRequestHandler):
    """Completes any prompt, and ignores what it does not know."""

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"choices": [{"text": "a"}]})

    def _answer(self, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


async def test_a_server_without_prompt_logprobs_is_told_before_the_first_step() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), ForgetfulServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = {"base_url": [f"http://127.0.0.1:{server.server_port}/v1"], "skip_model_check": True}
        teacher = Teachers([TeacherModelConfig.model_validate({"client": client, "model": {"name": "letters"}})])
        with pytest.raises(OrchestratorError, match="does not return log-probabilities of a prompt: it needs"):
            await teacher.wait_ready(None)
        await teacher.close()
        server.shutdown()


def test_a_run_whose_teacher_is_killed_ends_by_its_name(distillation) -> None:
    process, paths = distillation
    os.kill(pid_of(TEACHER, paths), signal.SIGKILL)
    output = process.stdout.read()
    assert process.wait() == 1, output
    assert re.search(r"teacher_inference was ended by SIGKILL|the teacher at \S+ does not answer", output), output
    # The launch's key is 43 URL-safe letters, which nothing else in its text files is.
    for file in (*paths.configs.rglob("*.toml"), *paths.logs.rglob("*.log"), paths.metrics):
        assert not re.search(r"(?<![\w/-])[\w-]{43}(?![\w/-])", file.read_text()), file
