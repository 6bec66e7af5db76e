"""Several teachers of a run: their weights, the environments that each scores, and hints that only a teacher reads."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.decoders import Metaspace as MetaspaceDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFKC
from tokenizers.pre_tokenizers import ByteLevel, Metaspace
from tokenizers.trainers import BpeTrainer

from prime_rl.configs.orchestrator import TeacherModelConfig
from prime_rl.configs.rl import RLConfig
from prime_rl.orchestrator.batches.teacher import Teachers, filled_hint
from prime_rl.orchestrator.errors import OrchestratorError
from prime_rl.orchestrator.rollouts.token_texts import Alignment, spread_spans
from prime_rl.utils.pydantic_config import ConfigError, load_config


class ScoringServer(BaseHTTPRequestHandler):
    """Gives token t at place p the log-probability -scale * p, and the token after it half of that."""

    scale = 1.0

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({"tokens": [7, *map(ord, body["messages"][-1]["content"])]})
            return
        if len(body["prompt"]) > 100:
            self.answer({"error": {"message": "maximum context length is 100 tokens"}}, 400)
            return
        found: list[dict[str, Any] | None] = [None]
        for place, token in enumerate(body["prompt"][1:], start=1):
            at = -self.scale * place
            found.append({str(token): {"logprob": at}, str(token + 1): {"logprob": at / 2}})
        self.answer({"choices": [{"prompt_logprobs": found}]})

    def answer(self, body: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Keeps the test's output clean."""


class OtherServer(ScoringServer):
    scale = 3.0


@pytest.fixture(scope="module")
def urls() -> Iterator[list[str]]:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), each) for each in (ScoringServer, OtherServer)]
    for server in servers:
        threading.Thread(target=server.serve_forever, daemon=True).start()
    yield [f"http://127.0.0.1:{server.server_port}/v1" for server in servers]
    for server in servers:
        server.shutdown()
        server.server_close()


def teacher_at(url: str, **keys: Any) -> TeacherModelConfig:
    client = {"base_url": [url], "skip_model_check": True}
    return TeacherModelConfig.model_validate({"client": client, "model": {"name": "letters"}, "top_k": 1, **keys})


async def test_scores_are_mixed_by_weight_and_a_hint_is_read_by_its_teacher_only(urls, turn, rollout) -> None:
    given = rollout(turn([1, 2, 3], [10, 20]))
    given.prompt = [{"role": "user", "content": "ab"}]
    configs = [
        teacher_at(urls[0], weight=3.0),
        teacher_at(urls[1], envs=[given.example.env], hint="Say {answer}."),
        teacher_at(urls[1], envs=["elsewhere"]),
    ]
    teachers = Teachers(configs, lambda example: {"answer": "yes"})
    await teachers.wait_ready(None)
    ((sample,),) = await teachers.begin([given])
    # "ab", two line ends, "Say yes." and the token before them: 13 tokens in place of the prompt's 3.
    alone, hinted = [-3.0, -4.0], [-3.0 * 13, -3.0 * 14]
    mixed = [0.75 * a + 0.25 * b for a, b in zip(alone, hinted, strict=True)]
    assert sample.teacher_logprobs[3:] == pytest.approx(mixed)
    top = sample.teacher_top
    assert np.frombuffer(top.ids, "<i4").reshape(2, 2).tolist() == [[11, 11], [21, 21]]
    values = np.frombuffer(top.logprobs, "<f4").reshape(2, 2).tolist()
    assert values == [[each / 2 for each in pair] for pair in zip(alone, hinted, strict=True)]
    assert np.frombuffer(top.weights, "<f4").tolist() == [0.75, 0.25] * 2
    with pytest.raises(OrchestratorError, match=r"names the column 'key', and rows of environment 'e' have answer"):
        filled_hint("{key}", {"answer": 1}, "e")
    given.prompt = [{"role": "user", "content": "ab" * 50}]
    ((sample,),) = await teachers.begin([given])
    assert sample.completion_mask == [False, False]
    assert sample.teacher_logprobs == [0.0] * 5
    assert sample.teacher_top.fault(0, "") is None
    given.prompt = "ab"
    with pytest.raises(OrchestratorError, match=r"needs a prompt with a user's message"):
        await teachers.begin([given])
    await teachers.close()


TEXTS = ["Answer: naïve café 🙂🙃 — 12.5 mg", "  blanks\n\n and\ttabs ", "ééé 日本語 日本", ""]


def byte_tokenizer(size: int) -> Tokenizer:
    """Merges of the most frequent bytes: characters are whole, or in parts that may lie in one token with others."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=size, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator([*TEXTS, "Answer", "caf", "日本 café mg mg"], trainer)
    tokenizer.add_special_tokens([f"<|end of {size}|>"])
    return tokenizer


def boundaries(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Bytes up to the end of each token: a vocabulary of bytes writes each as one letter."""
    return [sum(len(tokenizer.id_to_token(each)) for each in ids[: at + 1]) for at in range(len(ids))]


@pytest.mark.parametrize("text", TEXTS)
def test_spans_of_two_tokenizers_are_as_short_as_possible_and_keep_the_teachers_sum(text: str) -> None:
    policy, teacher = byte_tokenizer(290), byte_tokenizer(310)
    ids = policy.encode(text).ids
    values = np.random.default_rng(0).normal(-2, 1, len(ids))
    alignment = Alignment(policy, teacher)
    ours, is_ended = alignment.read([*ids, policy.token_to_id("<|end of 290|>")])
    theirs, tokens = alignment.write(ours.text)
    scores = np.random.default_rng(1).normal(-2, 1, len(tokens))
    assert is_ended
    assert ours.text == text
    assert tokens == teacher.encode(text).ids
    found = spread_spans(ours, values.tolist(), theirs, scores.tolist())
    ends, their_ends = boundaries(policy, ids), boundaries(teacher, tokens)
    expected, begin, their_begin = list[float](), 0, 0
    for at, end in enumerate(ends):
        if end in their_ends:
            their_at = their_ends.index(end) + 1
            span = values[begin : at + 1]
            gap = scores[their_begin:their_at].sum() - span.sum()
            expected += (span + gap / len(span)).tolist()
            begin, their_begin = at + 1, their_at
    assert found == pytest.approx(expected, abs=1e-12)
    assert sum(found) == pytest.approx(scores.sum(), abs=1e-12)
    own, own_ids = Alignment(policy, policy).write(text)
    assert own_ids == ids
    assert spread_spans(ours, values.tolist(), own, values[::-1].tolist()) == values[::-1].tolist()


def test_what_a_teacher_cannot_score_keeps_the_policys_own_value() -> None:
    policy, teacher = byte_tokenizer(256), byte_tokenizer(310)
    alignment = Alignment(policy, teacher)
    cut = policy.encode("xy🙂").ids[:-1]
    ours, is_ended = alignment.read(cut)
    theirs, tokens = alignment.write(ours.text)
    assert (ours.text, is_ended) == ("xy", False)
    found = spread_spans(ours, [-1.0] * len(cut), theirs, [-3.0] * len(tokens))
    assert found == [-3.0, -3.0, -1.0, -1.0, -1.0]
    # A tokenizer that normalizes: from the first other character on, all is one span.
    teacher.normalizer = NFKC()
    ours, _ = alignment.read(policy.encode("xy\u2460\u2461").ids)
    theirs, tokens = alignment.write(ours.text)
    assert theirs.data == b"xy12"
    found = spread_spans(ours, [-1.0] * 8, theirs, [-3.0] * len(tokens))
    assert found == pytest.approx([-3.0, -3.0, *[-(len(tokens) - 2) / 2] * 6])
    assert alignment.end_of_turn([5, 1, 310, 9], [5, 2, 310, 9]) is None
    end = teacher.token_to_id("<|end of 310|>")
    assert alignment.end_of_turn([end, 1, end, 9], [end, 2, end, 9]) == end
    written = Tokenizer(BPE(unk_token=None))
    written.pre_tokenizer, written.decoder = Metaspace(), MetaspaceDecoder()
    written.train_from_iterator(["▁ab ab"], BpeTrainer(vocab_size=9, show_progress=False))
    theirs, _ = Alignment(policy, written).write("ab ab")
    assert (theirs.data, theirs.ends) == (b"ab ab", [2, 5])


OUTSIDE = ["--orchestrator.teacher-model.client.base-url", "http://teacher:8000/v1", "--trainer.loss.teacher-tau", "1"]
POLICY = ["--orchestrator.teacher-model.is-policy", "--trainer.loss.teacher-tau", "1"]


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--trainer.distillation.beta", "1"], r"\[trainer.distillation\] needs a teacher"),
        ([*OUTSIDE, "--trainer.distillation.beta", "1.5"], "beta"),
        ([*OUTSIDE, "--trainer.distillation.top-k", "2000"], "top-k"),
        ([*OUTSIDE, "--orchestrator.teacher-model.top-k", "5"], "has no effect without"),
        ([*OUTSIDE[2:], "--orchestrator.teacher-model.client.elastic.hostname", "h"], "servers cannot be elastic"),
        ([*OUTSIDE, "--orchestrator.teacher-model.envs", "maths"], "'maths' is none of the training environments"),
        (POLICY, "without a hint, the policy has nothing to teach itself"),
        (
            [*POLICY, "--orchestrator.teacher-model.hint", "{answer}", "--trainer.model.lora.rank", "8"],
            "cannot be its own teach",
        ),
        (
            [*POLICY, "--orchestrator.teacher-model.hint", "{answer}", "--teacher-inference.model.name", "x/y"],
            "exclude each other",
        ),
        ([*OUTSIDE, "--orchestrator.teacher-model.tokenizer", "x/y", "--trainer.distillation.beta", "1"], "two token"),
        ([*POLICY, "--orchestrator.teacher-model.tokenizer", "x/y"], "the policy has its own tokenizer"),
    ],
)
def test_what_cannot_teach_is_refused(words: list[str], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        load_config(RLConfig, overrides=["--device", "cpu", *words])


def test_all_teachers_return_as_many_tokens() -> None:
    words = [
        "--trainer.distillation.top-k",
        "7",
        *OUTSIDE[:2],
        "--orchestrator.teachers.0.client.base-url",
        "http://b/v1",
    ]
    config = load_config(RLConfig, overrides=["--device", "cpu", *words])
    assert [each.top_k for each in config.orchestrator.all_teachers.values()] == [7, 7]
