"""The embedded engine reads images: tokens and log-probabilities are those of Transformers' own class."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import shutil
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers as tf
from PIL import Image
from safetensors.torch import load_file, save_file

from prime_rl.configs.inference import InferenceConfig
from prime_rl.inference.embedded.engine.generation import Generation, GenerationRequest
from prime_rl.inference.embedded.engine.vision import PromptImages
from prime_rl.inference.embedded.errors import GenerationFailed
from prime_rl.inference.embedded.http.service import Service
from prime_rl.inference.embedded.startup import start_service
from prime_rl.inference.guards import BoundBodies
from prime_rl.inference.model_files import WeightError
from prime_rl.inference.protocol import ChatBody, RequestError, check_messages
from prime_rl.transport.images import rope_positions

from ..trainer.vision_checkpoints import FAMILIES, picture, save_checkpoint
from .conftest import Server

SIZES = ((40, 30), (64, 33), (28, 28), (90, 60))
Messages = list[dict[str, Any]]


def part(pixels: Image.Image) -> dict[str, Any]:
    file = io.BytesIO()
    pixels.save(file, "PNG")
    return {
        "type": "image_url",
        "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"},
    }


class Reference:
    """Transformers' own processor and class."""

    def __init__(self, family: str, directory: Path) -> None:
        self.family = family
        self.tokenizer = tf.AutoTokenizer.from_pretrained(directory)
        images = tf.AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.processor = FAMILIES[family].processor(images, self.tokenizer)
        self.model = tf.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)

    def inputs(self, messages: Messages) -> dict[str, torch.Tensor]:
        plain, images = [], []
        for message in messages:
            content = message["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            urls = [each["image_url"]["url"] for each in parts if each["type"] == "image_url"]
            images += [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
            plain.append(
                {**message, "content": [each if each["type"] == "text" else {"type": "image"} for each in parts]}
            )
        text = self.tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=True)
        nested = {"images": [images]} if images else {}
        given = dict(self.processor(text=[text], return_tensors="pt", return_mm_token_type_ids=True, **nested))
        if self.family in ("idefics3", "smolvlm"):
            given.pop("mm_token_type_ids", None)
        return given

    @torch.no_grad()
    def check(self, messages: Messages, request: GenerationRequest, answer: Generation) -> None:
        """The prompt has the processor's tokens, and the answer the likeliest ones with their log-probabilities."""
        given = self.inputs(messages)
        assert list(request.prompt) == given["input_ids"][0].tolist()
        for completion in answer.completions:
            added = torch.tensor([completion.token_ids])
            whole = given | {"input_ids": torch.cat([given["input_ids"], added], 1)}
            for name, behind in (("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
                if name in given:
                    whole[name] = torch.cat([given[name], torch.full_like(added, behind)], 1)
            logits = self.model(**whole, use_cache=False).logits[0, len(request.prompt) - 1 : -1]
            own = logits.log_softmax(-1)
            of_tokens = own.gather(1, added[0][:, None])[:, 0]
            torch.testing.assert_close(of_tokens, own.amax(-1), atol=1e-5, rtol=0)
            torch.testing.assert_close(torch.tensor(completion.logprobs), of_tokens, atol=1e-5, rtol=0)


def served(directory: Path, **keys: Any) -> Service:
    model = {"name": str(directory), "dtype": "float32", **keys}
    return start_service(InferenceConfig.model_validate({"model": model, "device": "cpu"}))


def submitted(service: Service, messages: Messages, **options: Any) -> tuple[GenerationRequest, Future[Generation]]:
    body = ChatBody.model_validate(
        {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True, **options}
    )
    (request,) = service.chat_requests(body)
    return request, service.engine.submit(request)


def user(*parts: dict[str, Any] | str) -> dict[str, Any]:
    return {
        "role": "user",
        "content": [{"type": "text", "text": each} if isinstance(each, str) else each for each in parts],
    }


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_answers_about_images_are_those_of_transformers(family: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    start, newer = tmp_path / "start", tmp_path / "step_3"
    save_checkpoint(family, start, tiny_model_dir)
    reference, service = Reference(family, start), served(start)
    images = [part(picture(*size, number)) for number, size in enumerate(SIZES)]
    twin = part(picture(*SIZES[0], 100))
    chats: list[Messages] = [
        [user(images[0], "What is it?")],
        [user(twin, "What is it?")],
        [user("one", images[1], "two", images[2])],
        [{"role": "user", "content": "Say yes."}],
        [user(images[3], "What is it?"), {"role": "assistant", "content": "A cat."}, user("and", images[0])],
    ]
    with service.engine.in_thread() as engine:
        engine.pause().result()
        asked = [submitted(service, chat, n=2) for chat in chats]
        engine.resume().result()
        for chat, (request, answer) in zip(chats, asked, strict=True):
            reference.check(chat, request, answer.result())
        assert asked[0][0].prompt == asked[1][0].prompt, "the same tokens, and other images"
        assert asked[0][1].result().completions[0].logprobs != asked[1][1].result().completions[0].logprobs

        # An image whose tower makes another number of features than its text has tokens fails, and the others go on.
        (wrong,) = service.chat_requests(ChatBody.model_validate({"messages": chats[0]}))
        assert wrong.images is not None
        image = replace(wrong.images.images[0], digest=1, tokens=wrong.images.images[0].tokens + 1)
        wrong.images = replace(wrong.images, images=(image,))
        with pytest.raises(GenerationFailed, match="the checkpoint's image processor does not belong to its vision"):
            engine.submit(wrong).result()
        (asleep,) = service.chat_requests(ChatBody.model_validate({"messages": chats[0]}))
        asleep.images = wrong.images
        engine.sleep().result()
        failing = engine.submit(asleep)
        engine.update_weights(None).result()
        with pytest.raises(GenerationFailed, match="the checkpoint's image processor does not belong to its vision"):
            failing.result()

        # Later turns begin with cached prefixes, of which some end within or before an image.
        for chat in chats:
            longer = [*chat, {"role": "assistant", "content": "A dog."}, user("then", images[2], "?")]
            for each in (longer, [*longer[:-1], user("then", twin, "?")], [user(images[0], "What else?")]):
                request, answer = submitted(service, each)
                reference.check(each, request, answer.result())

        tensors = load_file(start / "model.safetensors")
        newer.mkdir()
        save_file({name: each * 1.1 for name, each in tensors.items()}, newer / "model.safetensors", {"format": "pt"})
        assert engine.update_weights(newer).result() == 3
        reference.model.load_state_dict({name: each * 1.1 for name, each in reference.model.state_dict().items()})
        request, answer = submitted(service, chats[2])
        reference.check(chats[2], request, answer.result())
        # A run that trains the language model alone sends no tower, and a part of one is refused.
        language = {name for name in tensors if any(word in name for word in ("language", "text_model", "lm_head"))}
        language |= {name for name in tensors if name.startswith(("model.layers", "model.embed", "model.norm"))}
        first = min(name for name in tensors if name not in language)
        save_file({name: each for name, each in tensors.items() if name != first}, newer / "model.safetensors")
        with pytest.raises(WeightError, match=r"does not fit the model: .* of the vision tower is missing"):
            engine.update_weights(newer).result()
        save_file({name: tensors[name] for name in language}, newer / "model.safetensors")
        engine.update_weights(newer).result()
        mixed = newer.with_name("mixed")
        shutil.copytree(start, mixed)
        parts = {name: each if name in language else each * 1.1 for name, each in tensors.items()}
        save_file(parts, mixed / "model.safetensors", {"format": "pt"})
        request, answer = submitted(service, chats[2])
        Reference(family, mixed).check(chats[2], request, answer.result())


@pytest.mark.slow
def test_a_server_takes_images_as_data_and_files_of_its_folder_and_says_why_it_refuses_others(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    start, folder = tmp_path / "start", tmp_path / "scans"
    save_checkpoint("smolvlm", start, tiny_model_dir)
    folder.mkdir()
    pixels = picture(64, 33, 0)
    pixels.save(folder / "7.png")
    pixels.save(tmp_path / "outside.png")
    (folder / "link.png").symlink_to(tmp_path / "outside.png")
    (folder / "page.jpg").write_text("<html>")
    server = Server(sys.executable, start, "--backend", "embedded", "--model.allowed-local-media-path", str(folder))

    def ask(*urls: str, text: str = "What is it?", **body: Any) -> httpx.Response:
        images = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
        messages = [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]
        settings = {"max_tokens": 2, "temperature": 0, "logprobs": True, **body}
        return server.client.post("/v1/chat/completions", json={"messages": messages, **settings})

    def ids(answer: dict[str, Any]) -> list[int]:
        return answer["choices"][0]["token_ids"]

    try:
        data, file = part(pixels)["image_url"]["url"], f"file://{folder}/7.png"
        by_data, by_file = ask(data), ask(file)
        assert by_data.status_code == 200, by_data.text
        tokens = by_data.json()["prompt_token_ids"]
        assert ids(by_file.json()) == ids(by_data.json())
        messages = [{"role": "user", "content": [part(pixels), {"type": "text", "text": "What is it?"}]}]
        assert server.post("/tokenize", {"messages": messages})["tokens"] == tokens
        again = server.post(
            "/v1/chat/completions/tokens",
            {"messages": messages, "tokens": tokens, "max_tokens": 2, "temperature": 0, "logprobs": True},
        )
        assert ids(again) == ids(by_data.json())
        for urls, fault in (
            (["https://example.org/a.png"], "image 1: https://example.org/a.png: images are not fetched from the web"),
            ([file, f"file://{folder}/../outside.png"], "image 2: .*outside.png: it is not in the folder"),
            ([f"file://{folder}/link.png"], "it is not in the folder of allowed_local_media_path"),
            ([f"file://{folder}/8.png"], "no such file in"),
            ([f"file://{folder}/page.jpg"], "it is an HTML page"),
            (["7.png"], "7.png: expected a data URL"),
            (["data:image/png;base64,!!"], "base64 is damaged"),
            ([f"data:image/png;base64,{'A' * 400}"], "it begins with zeros"),
            ([data] * 33, "33 images; at most 32 are read"),
            ([data] * 32, "maximum context length is 512 tokens"),
        ):
            refused = ask(*urls)
            assert refused.status_code == 400, urls
            message = refused.json()["error"]["message"]
            assert re.search(fault, message), message
            assert "\n" not in message
        assert "the chat template must write it once for each image" in ask(data, text="an <image>").text
        assert "a text holds <image>, the token that stands for images" in ask(text="an <image>").text
        body = {"messages": messages, "tokens": [*tokens, tokens[-1]], "max_tokens": 2}
        assert server.client.post("/v1/chat/completions/tokens", json=body).status_code == 200
        image_id = tf.AutoTokenizer.from_pretrained(start).convert_tokens_to_ids("<image>")
        refused = server.client.post("/v1/chat/completions/tokens", json=body | {"tokens": [*tokens, image_id]})
        assert "the token that stands for images, and 1 image of" in refused.json()["error"]["message"]
    finally:
        assert server.stop() == 0, "".join(server.lines[-30:])


def test_an_answer_that_is_read_again_has_the_positions_behind_its_prompt() -> None:
    rope = rope_positions(np.array([False, True, True, True, True, False]), [[2, 2]])
    images = PromptImages((), np.zeros(6, int), None, rope, (0,) * 6)
    again = images.rope_positions(4, 9)
    assert again is not None
    assert again.tolist() == [[1, 3, 4, 5, 6], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6]]


@pytest.mark.parametrize("image", [7, {"url": 7}, {"url": "data:,", "path": 7}, None, {}])
def test_a_part_whose_image_is_no_text_is_refused(image: Any) -> None:
    with pytest.raises(ValueError, match="a part that is neither `text` nor `image_url`"):
        check_messages([user({"type": "image_url", "image_url": image})])


def test_models_that_read_text_alone_refuse_images_in_one_line(tiny_model_dir: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    save_checkpoint("qwen3_vl", start, tiny_model_dir)
    image = user(part(picture(40, 30, 0)))
    for directory, keys, fault in (
        (tiny_model_dir, {}, "the model has no vision tower"),
        (start, {"language_model_only": True}, "language_model_only = true"),
        (start, {"chat_template": "chatml"}, "its chat template does not write <|image_pad|> for an image"),
    ):
        service = served(directory, **keys)
        with pytest.raises(RequestError) as refused:
            submitted(service, [image])
        assert str(refused.value) == f"This server reads text alone: {fault}"


def test_bodies_that_would_fill_the_memory_together_wait_and_small_ones_do_not() -> None:
    size, read = 100_000, list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        read.append(len((await receive())["body"]))

    async def request(guard: BoundBodies, length: int, arrives: asyncio.Event, answers: list[Any]) -> None:
        async def receive() -> dict[str, Any]:
            await arrives.wait()
            return {"type": "http.request", "body": bytes(length)}

        async def send(message: dict[str, Any]) -> None:
            answers.append(message.get("status"))

        headers = [(b"content-length", str(length).encode())]
        await guard({"type": "http", "headers": headers}, receive, send)

    async def check() -> None:
        slow, now, answers = asyncio.Event(), asyncio.Event(), list[Any]()
        now.set()
        guard = BoundBodies(app, most_bytes=2 * size)
        first = [asyncio.create_task(request(guard, size, slow, answers)) for _ in range(2)]
        third = asyncio.create_task(request(guard, size, now, answers))
        await request(guard, 10, now, answers)
        assert read == [10], "the third waits until one of the first has arrived"
        slow.set()
        await asyncio.gather(*first, third)
        assert (read, answers) == ([10, size, size, size], [])
        impatient = BoundBodies(app, timeout_s=0.01, most_bytes=size)
        async with impatient._room(size):
            await request(impatient, size, now, answers)
        assert answers == [503, None]

    asyncio.run(check())
