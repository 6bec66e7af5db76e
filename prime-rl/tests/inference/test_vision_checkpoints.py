"""vLLM serves checkpoints with a vision tower; their language part is trained, and updated alone. Images reach it."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from prime_rl.configs.shared import ClientConfig
from prime_rl.orchestrator.proxy.completions import complete
from prime_rl.orchestrator.proxy.recording import Session
from prime_rl.orchestrator.servers.server import InferenceServer
from prime_rl.utils.images import ImageLimits, ShownImages, read_image

from ..trainer.vision_checkpoints import TEMPLATE, picture
from .conftest import Server, vllm_python

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PROMPT = [12, 9, 16, 16, 19, 30, 31]
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 128}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
VISION = {"hidden_size": 32, "intermediate_size": 48, "depth": 2, "num_heads": 2, "out_hidden_size": 64}
TOKENS = {"image_token_id": 3, "video_token_id": 4, "vision_start_token_id": 5, "vision_end_token_id": 6}
NAMES = {"image_token": 3, "video_token": 4, "vision_bos_token": 5, "vision_eos_token": 6}
COLOURS = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "rescale_factor": 1 / 255}
PIXELS = COLOURS | {
    "do_rescale": True,
    "do_normalize": True,
    "patch_size": 16,
    "size": {"shortest_edge": 1024, "longest_edge": 4096},
}
"""vLLM takes colours that the file does not name as they are."""


def save_checkpoint(directory: Path, text: Path) -> None:
    """A tiny Qwen3-VL with a processor, as on the hub. `text` has its tokenizer."""
    config = tf.Qwen3VLConfig(
        text_config=TEXT | HEADS | {"rope_parameters": ROPE},
        vision_config=VISION | {"deepstack_visual_indexes": [0]},
        **TOKENS,
    )
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = tf.Qwen3VLForConditionalGeneration(config)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(directory)
    tokenizer = tf.AutoTokenizer.from_pretrained(text)
    special = {name: tokenizer.convert_ids_to_tokens(number) for name, number in NAMES.items()}
    tokenizer = tf.AutoTokenizer.from_pretrained(text, extra_special_tokens=special)
    marks = (NAMES["vision_bos_token"], NAMES["image_token"], NAMES["vision_eos_token"])
    tokenizer.chat_template = TEMPLATE.replace("IMAGE", "".join(tokenizer.convert_ids_to_tokens(marks)))
    tokenizer.save_pretrained(directory)
    for file, kind in (("preprocessor", "image"), ("video_preprocessor", "video")):
        named = {f"{kind}_processor_type": "Qwen2VLImageProcessor" if kind == "image" else "Qwen3VLVideoProcessor"}
        (directory / f"{file}_config.json").write_text(json.dumps(PIXELS | named))
    (directory / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')


def check(server: Server, model: Any, name: str | None = None) -> None:
    """Log-probabilities of the server's answer are the model's."""
    answer = server.complete(PROMPT, max_tokens=8, top_k=-1, seed=1, model=name or server.model)
    (choice,) = answer["choices"]
    tokens = torch.tensor(PROMPT + choice["token_ids"])
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, tokens[len(PROMPT) :, None])[:, 0]
    torch.testing.assert_close(torch.tensor(choice["logprobs"]["token_logprobs"]), expected, atol=1e-4, rtol=1e-4)


async def see(server: Server, model: Any, start: Path, file: Path) -> None:
    """A policy is shown an image twice. Its tokens, and where the trainer finds the image, are recorded; the
    log-probabilities are those of `model`, which may be another one than the server's."""
    shown = {"role": "user", "content": [{"type": "image", "image": str(file)}, {"type": "text", "text": "What?"}]}
    config = ClientConfig(base_url=[f"{server.client.base_url}/v1".replace("//v1", "/v1")])
    policy = InferenceServer(config.base_url[0], config, server.model, images=ShownImages(ImageLimits()))
    session = Session("key", policy, server.model, {"max_completion_tokens": 8, "temperature": 1.0, "top_k": -1})
    answer = await complete(session, {"messages": [shown]})
    await complete(session, {"messages": [shown, answer["choices"][0]["message"], shown]})
    await policy.close()
    (_, first), (_, second) = session.recorded
    assert [len(call.images) for call in (first, second)] == [1, 2]
    processor = tf.AutoImageProcessor.from_pretrained(start, backend="pil")
    for call in (first, second):
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        images = processor([read_image(each.source, Path(), ImageLimits(), None, each.digest) for each in call.images])
        inputs = {name: torch.tensor(images[name]) for name in ("pixel_values", "image_grid_thw")}
        is_image = (ids == TOKENS["image_token_id"]) & (torch.arange(ids.shape[1]) < len(call.prompt_ids))
        # The text stands for as many features as the trainer computes.
        assert int(is_image.sum()) == 4 * len(call.images)
        if (ids == TOKENS["image_token_id"]).sum() > is_image.sum():
            continue  # sampled, which Transformers takes for an image
        logits = model(input_ids=ids, mm_token_type_ids=is_image.int(), **inputs).logits
        logprobs = logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
        expected = logprobs.gather(1, torch.tensor(call.completion_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(call.inference_logprobs), expected, atol=1e-4, rtol=1e-4)


def fetched(server: Server) -> list[str]:
    """The addresses that vLLM requests for an image on a forbidden domain, and for one that redirects there."""
    asked: list[str] = []

    class Redirecting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host, _, port = self.headers["Host"].partition(":")
            asked.append(f"{host}{self.path}")
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{port}/seen.png")
            self.end_headers()

    with ThreadingHTTPServer(("127.0.0.1", 0), Redirecting) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        for url in (f"http://127.0.0.1:{web.server_port}/seen.png", f"http://localhost:{web.server_port}/away"):
            content = [{"type": "image_url", "image_url": {"url": url}}]
            answer = server.client.post(
                "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
            )
            assert answer.status_code != 200
        web.shutdown()
    return asked


@torch.no_grad()
def test_updates_of_the_language_part_and_adapters_reach_vllm(tiny_model_dir: Path, tmp_path: Path) -> None:
    python = vllm_python()
    if python is None:
        pytest.skip("needs vLLM: `bash .ci/make-vllm-env DIR`, and DIR/bin/python in PRIME_RL_VLLM_PYTHON")
    start, version, adapter = tmp_path / "start", tmp_path / "step_1", tmp_path / "adapter"
    save_checkpoint(start, tiny_model_dir)
    whole = tf.AutoModelForImageTextToText.from_pretrained(start, dtype=torch.float32)
    options = ("--enable-lora", "--max-lora-rank", "8", "--gpu-memory-utilization", "0.1")
    (tmp_path / "domains.toml").write_text('[vllm]\nallowed_media_domains = ["localhost"]\n')
    options += ("@", str(tmp_path / "domains.toml"))
    server = Server(python, start, "--backend", "vllm", "--model.enforce-eager", *options)
    try:
        check(server, whole)
        picture(64, 64, 1).save(tmp_path / "seen.png")  # not resized, which vLLM does with another library
        asyncio.run(see(server, whole, start, tmp_path / "seen.png"))
        assert fetched(server) == ["localhost/away"], "neither the image of another domain, nor by way of this one"

        peft = get_peft_model(whole, LoraConfig(r=4, lora_alpha=8, target_modules=r".*language_model.*(q|down)_proj"))
        for name, parameter in peft.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
        peft.save_pretrained(adapter)
        server.client.post("/load_lora_adapter", json={"lora_name": "r4", "lora_path": str(adapter)}).raise_for_status()
        check(server, peft, "r4")

        tensors = load_file(start / "model.safetensors")
        changed = {name: each + 0.05 * torch.randn_like(each) for name, each in tensors.items() if "visual" not in name}
        version.mkdir()
        save_file(changed, version / "model.safetensors", metadata={"format": "pt"})
        server.post("/update_weights", {"weight_dir": str(version)})
        updated = tf.AutoModelForImageTextToText.from_pretrained(start, dtype=torch.float32)
        updated.load_state_dict(changed, strict=False)
        check(server, updated)
        asyncio.run(see(server, updated, start, tmp_path / "seen.png"))
    finally:
        assert server.stop() == 0, "".join(server.lines[-30:])
