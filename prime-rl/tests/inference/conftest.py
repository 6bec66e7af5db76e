"""Fixtures: servers of both engines on a tiny model, and Transformers' own model as the reference."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from prime_rl.launch import reserved_ports
from prime_rl.utils.engine_keys import client_key

READY = "Inference ready"

TEMPLATE = """
{%- if tools %}{{- '<|im_start|>tools\\n' }}
{%- for tool in tools %}{{- tool.function.name }}{% endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""ChatML with tool names in the system prompt and calls in Hermes format."""


SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SMALL_MODELS = {
    "qwen3": ("Qwen3Config", {"head_dim": 8}),
    "qwen3_with_tied_head": ("Qwen3Config", {"head_dim": 8, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "llama": ("LlamaConfig", {}),
    "llama_with_gelu": ("LlamaConfig", {"hidden_act": "gelu"}),
    "mistral_with_window": ("MistralConfig", {"sliding_window": 6}),
    "mistral_with_longer_window": ("MistralConfig", {"sliding_window": 20}),
    "qwen3_moe": ("Qwen3MoeConfig", {"head_dim": 8, **EXPERTS}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 8, "sliding_window": 20, "num_local_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0},
    ),
    "diffllama": ("DiffLlamaConfig", {}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 8, "layer_types": ["full_attention"] * 2}),
}
"""Names of Transformers' config classes, and settings in addition to `SIZES`."""


class Server:
    """An inference server in its own process."""

    def __init__(self, python: str, model: Path, *options: str, **env: str) -> None:
        self.model = str(model)
        with reserved_ports(1) as (port,):
            argv = [python, "-m", "prime_rl.inference.server", "--model.name", self.model, "--model.dtype", "float32"]
            argv += ["--server.host", "127.0.0.1", "--server.port", str(port), *options]
            self.process = subprocess.Popen(
                argv,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **env},
            )
            self.lines: list[str] = []
            self._read_until_ready()
        url = f"http://127.0.0.1:{port}"
        # httpx keeps an idle connection for 5 s, and the server closes it after 5 s: a request in between is reset.
        once = httpx.Limits(max_keepalive_connections=0)
        headers = {"Authorization": f"Bearer {self.key(url)}"}
        self.client = httpx.Client(base_url=url, timeout=None, headers=headers, limits=once)

    @staticmethod
    def key(url: str) -> str:
        """The key that this user's clients find for a server on this machine."""
        key = client_key(url, "UNSET_VARIABLE")
        assert key is not None, f"no key was published for {url}"
        return key

    def _read_until_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if READY in line:
                threading.Thread(target=lambda: self.lines.extend(self.process.stdout), daemon=True).start()
                return
        pytest.fail("the server did not start:\n" + "".join(self.lines[-30:]))

    def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chat(self, text: str, **options: Any) -> dict[str, Any]:
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "logprobs": True}
        return self.post("/v1/chat/completions", body | {"return_token_ids": True} | options)

    def complete(self, prompt: str | list[int], **options: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "logprobs": 0, "return_token_ids": True}
        return self.post("/v1/completions", body | options)

    def complete_all(self, prompts: list[list[int]], **options: Any) -> list[dict[str, Any]]:
        """Send one request per prompt, all concurrently, and return the first choice of each."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = pool.map(lambda prompt: self.complete(prompt, **options), prompts)
            return [answer["choices"][0] for answer in answers]

    def events(self, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the chunks of a stream. The stream must end with `[DONE]`."""
        with self.client.stream("POST", route, json={"model": self.model, "stream": True} | body) as answer:
            assert answer.status_code == 200, answer.read()
            assert answer.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in answer.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        *chunks, done = [line.removeprefix("data: ") for line in lines]
        assert done == "[DONE]"
        return [json.loads(chunk) for chunk in chunks]

    def stop(self) -> int:
        self.client.close()
        self.process.terminate()
        return self.process.wait()


def vllm_python() -> str | None:
    """An interpreter with vLLM: `PRIME_RL_VLLM_PYTHON`, or the current one."""
    if named := os.environ.get("PRIME_RL_VLLM_PYTHON"):
        return named
    return sys.executable if importlib.util.find_spec("vllm") else None


@pytest.fixture(scope="session")
def served_model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a tool template and wider heads: vLLM on a CPU requires a head size of at least 32."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    directory = tmp_path_factory.mktemp("served_model") / "model"
    shutil.copytree(tiny_model_dir, directory)
    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.head_dim = 32
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Creates random models by name in `SMALL_MODELS`, once per `seed`, and returns their directories."""
    import transformers

    @functools.cache
    def directory_of(name: str, seed: int = 0) -> Path:
        config_class, settings = SMALL_MODELS[name]
        directory = tmp_path_factory.mktemp(name)
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            model = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, config_class)(**SIZES, **settings)
            )
            # Larger than the usual initialization, which gives nearly uniform distributions that hide errors.
            for parameter in model.parameters():
                parameter *= 4
            model.save_pretrained(directory)
        return directory

    return directory_of


@pytest.fixture(scope="session")
def adapter_of() -> Callable[..., Path]:
    """Saves a random PEFT adapter of a base model in a directory, and returns the directory."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    @torch.no_grad()
    def saved(
        base: Path, directory: Path, seed: int, targets: list[str] | str = "all-linear", rank: int = 4, **options: Any
    ) -> Path:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
            peft = get_peft_model(model, LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, **options))
            for name, parameter in peft.named_parameters():
                if "lora_B" in name:  # not zero, as in a trained adapter
                    parameter.normal_(std=0.3)
            peft.save_pretrained(directory)
        return directory

    return saved


@pytest.fixture(scope="session", params=["embedded", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def shared_server(engine: str, served_model_dir: Path) -> Iterator[Server]:
    """One server per engine, because starting vLLM takes a minute. It parses tool calls in the Hermes (Qwen) format."""
    python = sys.executable if engine == "embedded" else vllm_python()
    if python is None:
        pytest.skip("needs vLLM: install prime-rl[vllm], or name an interpreter that has it in PRIME_RL_VLLM_PYTHON")
    # On a CPU, vLLM reserves a share of the machine's memory and fails to start if that much is not free.
    options = ("--backend", engine, "--model.enforce-eager", "--gpu-memory-utilization", "0.1")
    options += ("--model.tool-call-parser", "hermes", "--enable-lora", "--max-lora-rank", "8")
    options += ("--enable-sleep-mode",)
    server = Server(python, served_model_dir, *options)
    yield server
    assert server.stop() == 0, "".join(server.lines[-30:])


@pytest.fixture
def server(shared_server: Server) -> Iterator[Server]:
    """The engine's server. After every test, its initial weights are restored."""
    yield shared_server
    shared_server.post("/resume", {})
    shared_server.post("/reload_weights", {})


@pytest.fixture
def wait_for_load(server: Server) -> Callable[[Callable[[float], bool]], None]:
    """Waits until the server has the expected number of samples."""

    def wait(is_expected: Callable[[float], bool]) -> None:
        while not is_expected(server.client.get("/load").json()["server_load"]):
            continue

    return wait


class Reference:
    """Reference results computed with Transformers."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    @torch.no_grad()
    def logprobs(self, prompt: list[int], completion: list[int], temperature: float = 1.0) -> list[float]:
        """Log-probability of each completion token."""
        logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        scaled = (logits / temperature).log_softmax(-1)
        return scaled.gather(1, torch.tensor(completion).unsqueeze(1)).squeeze(1).tolist()

    @torch.no_grad()
    def best_logprobs(self, tokens: list[int]) -> list[float]:
        """Log-probability of the likeliest token in the place of each token but the first."""
        return self.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1).max(-1).values.tolist()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        output = self.model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False
        )
        return output[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def reference(served_model_dir: Path) -> Reference:
    return Reference(served_model_dir)


@pytest.fixture(scope="session")
def next_weights(served_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory `step_3` with weights of another policy version, as the trainer broadcasts it (weights only)."""
    from safetensors.torch import load_file, save_file

    directory = tmp_path_factory.mktemp("broadcasts") / "step_3"
    directory.mkdir()
    generator = torch.Generator().manual_seed(3)
    tensors = load_file(served_model_dir / "model.safetensors")
    changed = {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}
    save_file(changed, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "STABLE").touch()
    return directory


@pytest.fixture(scope="session")
def next_reference(served_model_dir: Path, next_weights: Path) -> Reference:
    from safetensors.torch import load_file

    reference = Reference(served_model_dir)
    reference.model.load_state_dict(load_file(next_weights / "model.safetensors"), strict=False)
    return reference
