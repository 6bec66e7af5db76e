"""The text of each token, so that a reader of kept rollouts needs no tokenizer; one text in two tokenizations."""

from __future__ import annotations

import codecs
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.checks.model_files import loaded_tokenizer
from prime_rl.checks.start_dir import looks_like_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ANCHORS = ("a", "0", ".")


def read_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model, without truncation and padding; None without a `tokenizer.json` on this machine.

    Raises:
        StartFault: the file is damaged.
    """
    from huggingface_hub import try_to_load_from_cache

    file: object = Path(model, "tokenizer.json")
    if not looks_like_path(model) and not Path(model).is_dir():
        file = try_to_load_from_cache(model, "tokenizer.json")
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return None
    return loaded_tokenizer(Path(file))


class TokenTexts:
    """Texts of single tokens, each decoded once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor = self._find_anchor()
        self._bytes = _bytes_of_letters()
        self._known: dict[int, str | list[int]] = {}

    def of(self, ids: Iterable[int]) -> dict[str, str | list[int]]:
        """The text of each id that occurs. A part of a character is a list of its bytes."""
        found: dict[str, str | list[int]] = {}
        for token in set(ids):
            if token not in self._known:
                self._known[token] = self._decode(token)
            found[str(token)] = self._known[token]
        return found

    def _decode(self, token: int) -> str | list[int]:
        # Some decoders drop the space at the start of a text, so another token goes first.
        before, ids = self._anchor
        text = self._tokenizer.decode([*ids, token], skip_special_tokens=False)
        text = text[len(before) :] if text.startswith(before) else self._tokenizer.decode([token], False)
        if _REPLACEMENT not in text:
            return text
        piece = self._tokenizer.id_to_token(token) or ""
        if len(piece) == 6 and piece.startswith("<0x"):  # byte fallback: <0xE2>
            return [int(piece[3:5], 16)]
        parts = [self._bytes.get(letter) for letter in piece]
        return [part for part in parts if part is not None] if None not in parts and parts else text

    def _find_anchor(self) -> tuple[str, list[int]]:
        for text in _ANCHORS:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == 1:
                return self._tokenizer.decode(ids, skip_special_tokens=False), ids
        return "", []

    def written(self, ids: Sequence[int]) -> Written:
        """The text of a sequence, and where each token ends in it."""
        found = self.of(ids)
        parts = [found[str(token)] for token in ids]
        texts = [part.encode("utf-8", "replace") if isinstance(part, str) else bytes(part) for part in parts]
        return Written(b"".join(texts), list(accumulate(map(len, texts))))


@dataclass(frozen=True, slots=True)
class Written:
    """A text in UTF-8, and the number of bytes up to the end of each of its tokens.

    Bytes, because a token may hold a part of a character.
    """

    data: bytes
    ends: list[int]

    @property
    def text(self) -> str:
        """Without a part of a character at the end, where an answer may be cut."""
        return codecs.getincrementaldecoder("utf-8")("replace").decode(self.data)


class Alignment:
    """One text in the tokens of two tokenizers: the policy's, and that of a teacher, which scores the same text."""

    def __init__(self, ours: Tokenizer, theirs: Tokenizer) -> None:
        self._ours, self._theirs = TokenTexts(ours), TokenTexts(theirs)
        self._tokenizer = theirs
        self._our_ends, self._their_ends = special_ids(ours), special_ids(theirs)

    def read(self, ids: Sequence[int]) -> tuple[Written, bool]:
        """The text of an answer in our tokens without the special one at its end, and whether there is one."""
        is_ended = bool(ids) and ids[-1] in self._our_ends
        return self._ours.written(ids[:-1] if is_ended else ids), is_ended

    def write(self, text: str) -> tuple[Written, list[int]]:
        """The teacher's tokens of a text."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        written = self._theirs.written(ids)
        # Some tokenizers write a blank before every text.
        if written.data.startswith(b" ") and not text.startswith(" "):
            written = Written(written.data[1:], [max(end - 1, 0) for end in written.ends])
        return written, ids

    def end_of_turn(self, one: Sequence[int], other: Sequence[int]) -> int | None:
        """The special token behind an answer, from two conversations that differ in the answer alone."""
        count = _equal_at_start(one[::-1], other[::-1])
        return next((token for token in one[len(one) - count :] if token in self._their_ends), None)


def special_ids(tokenizer: Tokenizer) -> set[int]:
    return {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}


def spread_spans(ours: Written, logprobs: Sequence[float], theirs: Written, scores: Sequence[float]) -> list[float]:
    """A teacher's log-probabilities `scores` of its tokens, moved to our tokens of the same text.

    A span begins and ends at the same places of the text in both tokenizations, and is as short as possible. The
    teacher's log-probability of its text is the sum over the teacher's tokens in it, and the policy's is the sum of
    `logprobs` over ours. Each of our n tokens gets its own log-probability plus 1 / n of the difference, so that the
    sum over the span is the teacher's. A token alone in its span gets the teacher's sum itself; one that the teacher
    cannot score keeps its own. Where the texts differ, as one tokenizer may normalize accents, the rest is one span.
    """
    shared = _equal_at_start(ours.data, theirs.data)
    common = sorted({end for end in set(ours.ends) & set(theirs.ends) if 0 < end <= shared})
    spans = [bisect_left(common, end) for end in ours.ends]
    policy, teacher = [0.0] * (len(common) + 1), dict[int, float]()
    for span, value in zip(spans, logprobs, strict=True):
        policy[span] += value
    for end, value in zip(theirs.ends, scores, strict=True):
        span = bisect_left(common, end)
        teacher[span] = teacher.get(span, 0.0) + value
    counts = Counter(spans)
    return [
        value
        if span not in teacher
        else teacher[span]
        if counts[span] == 1
        else value + (teacher[span] - policy[span]) / counts[span]
        for span, value in zip(spans, logprobs, strict=True)
    ]


def _equal_at_start(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
