"""Messages between orchestrator, packer and trainer, encoded as MessagePack arrays.

Fields are identified by position. Add new fields at the end, with a default: older readers ignore them, and newer
readers use the default for messages without them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import msgspec


class LikeliestTokens(msgspec.Struct, array_like=True):
    """The k likeliest tokens at M places, of n teachers or of the engine (n = 1). 8 * n * k + 4 * n bytes each."""

    sources: int
    k: int
    ids: bytes
    """int32 [M, n, k], little-endian, as are the others."""
    logprobs: bytes
    """float32 [M, n, k]: a teacher's at temperature 1, the engine's as it samples. Minus infinity: no token."""
    weights: bytes
    """float32 [M, n]: the weight of each teacher, 0 for one that does not score the sample. Of the engine, 1: it
    sampled from these tokens alone."""

    def places(self, count: int) -> LikeliestTokens:
        """The first `count` places."""
        size = 4 * count * self.sources
        return LikeliestTokens(
            self.sources, self.k, self.ids[: size * self.k], self.logprobs[: size * self.k], self.weights[:size]
        )

    def chosen(self, places: Sequence[int]) -> LikeliestTokens:
        """Those of some places. A negative one has no tokens."""
        parts = [(self.ids, self.k, b"\0" * 4), (self.logprobs, self.k, _NO_TOKEN), (self.weights, 1, b"\0" * 4)]
        columns = []
        for values, width, nothing in parts:
            size = 4 * width * self.sources
            empty = nothing * (width * self.sources)
            columns.append(b"".join(values[at * size : (at + 1) * size] if at >= 0 else empty for at in places))
        return LikeliestTokens(self.sources, self.k, *columns)

    @classmethod
    def joined(cls, parts: Sequence[LikeliestTokens | None]) -> LikeliestTokens | None:
        """One after another. None if none is given.

        Raises:
            ValueError: some are missing, or of other numbers of tokens.
        """
        given = [part for part in parts if part is not None]
        if not given:
            return None
        first = given[0]
        if len(given) < len(parts) or any((each.sources, each.k) != (first.sources, first.k) for each in given):
            raise ValueError("samples have different numbers of likeliest tokens")
        columns = zip(*((each.ids, each.logprobs, each.weights) for each in given), strict=True)
        return cls(first.sources, first.k, *(b"".join(column) for column in columns))

    def fault(self, count: int, name: str) -> str | None:
        """What is wrong with it for `count` places, or None."""
        size = 4 * count * self.sources
        if [len(self.ids), len(self.logprobs), len(self.weights)] != [size * self.k, size * self.k, size]:
            return f"{name} is not of {count} tokens"
        return None


_NO_TOKEN = struct.pack("<f", -math.inf)


class RoutedExperts(msgspec.Struct, array_like=True):
    """The experts that the engine routed T consecutive tokens to, for `trainer.enable_router_replay`."""

    layers: int
    """All layers of the model; those without experts have zeros."""
    top_k: int
    width: int
    """Bytes of an id: 1 up to 256 experts, otherwise 2."""
    ids: bytes
    """uint8 or uint16 [T, layers, top_k], little-endian."""

    @property
    def token_bytes(self) -> int:
        return self.layers * self.top_k * self.width

    def __len__(self) -> int:
        """T."""
        return len(self.ids) // self.token_bytes

    def tokens(self, start: int = 0, end: int | None = None) -> RoutedExperts:
        """Those of the tokens from `start` to `end`."""
        size = self.token_bytes
        ids = self.ids[start * size : None if end is None else end * size]
        return RoutedExperts(self.layers, self.top_k, self.width, ids)

    @classmethod
    def joined(cls, parts: Sequence[RoutedExperts | None]) -> RoutedExperts | None:
        """One after another. None if any of them is missing.

        Raises:
            ValueError: they are of different models.
        """
        given = [part for part in parts if part is not None]
        if len(given) < len(parts) or not given:
            return None
        if len({(part.layers, part.top_k, part.width) for part in given}) > 1:
            raise ValueError("routed experts of models with different numbers of layers or experts")
        first = given[0]
        return cls(first.layers, first.top_k, first.width, b"".join(part.ids for part in given))


class ImageReference(msgspec.Struct, array_like=True, frozen=True):
    """An image that the policy saw. Pixels are read where they are needed."""

    digest: str
    """SHA-256 of the file's content, by which samples name it."""
    source: str
    """An absolute path, an `s3://` address, or a data URL."""
    height: int
    """Pixels, upright."""
    width: int


class TrainingSample(msgspec.Struct, array_like=True):
    """One token sequence to train on: N prompt tokens, then M completion tokens."""

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    """False for tokens that the environment wrote; they are not trained on."""
    inference_logprobs: list[float]
    """Log-probability of each completion token under the policy that sampled it; 0.0 for environment tokens."""
    completion_temperatures: list[float]
    teacher_logprobs: list[float] | None = None
    """N + M values; entry t is the log-probability of token t."""
    advantage: float | None = None
    reward: float | None = None
    """For reports only; the loss uses `advantage`."""
    pixel_values: list[list[float]] | None = None
    image_grid_thw: list[list[int]] | None = None
    version: int | None = None
    """Oldest policy version that sampled any of its tokens; None if unknown."""
    kept_as: list[int] | None = None
    """Group, rollout and line of conversation of the kept rollout (`RUN/samples`) that it belongs to. None if none."""
    completion_advantages: list[float] | None = None
    """M values, if the tokens of several calls have different ones. None: `advantage`, for all of them."""
    teacher_top: LikeliestTokens | None = None
    """At the tokens that are trained on, in their order. None without `trainer.distillation`."""
    routed_experts: RoutedExperts | None = None
    """Of all N + M tokens. The last one was never routed, and has those of the token before. None if a server did not
    answer with them."""
    images: list[str] | None = None
    """Digests of its images, in the order of their tokens. None if it has none."""
    sampler_top: LikeliestTokens | None = None
    """What the engine reported of the M completion tokens, with `sampling.top_logprobs` or `top_k`. None without."""


class TrainingBatch(msgspec.Struct, array_like=True):
    """All samples that the trainer consumes in one step."""

    examples: list[TrainingSample]
    step: int
    run_idx: int | None = None
    """Set by the receiver."""
    early_end: str | None = None
    """Why the run ends here, without a batch of this step. `examples` is then empty."""
    images: list[ImageReference] = []
    """All images of the samples, each once."""


class MicroBatch(msgspec.Struct, array_like=True):
    """One packed row of T tokens for one data-parallel rank. A sequence starts at each token with position 0."""

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    temperatures: list[float]
    teacher_logprobs: list[float] | None = None
    lora_num_tokens: list[int] | None = None
    pixel_values: list[list[float]] | None = None
    image_grid_thw: list[list[int]] | None = None
    versions: list[int] | None = None
    """Oldest policy version of each token's sequence, -1 if unknown. None if no version is known."""
    minibatch: int = 0
    """Index of the optimizer update within the step that this row belongs to."""
    kept_as: list[list[int] | None] | None = None
    """`TrainingSample.kept_as` of each sequence. None if no sequence is kept."""
    teacher_top: LikeliestTokens | None = None
    """At the row's trained tokens."""
    routed_experts: RoutedExperts | None = None
    """Of its T tokens."""
    images: list[list[ImageReference]] | None = None
    """The images of each sequence. None if no sequence has one."""
    sampler_top: LikeliestTokens | None = None
    """At the row's trained tokens."""
