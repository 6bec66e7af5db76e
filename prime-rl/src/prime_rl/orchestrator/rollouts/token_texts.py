"""The text of each token, so that a reader of kept rollouts needs no tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from prime_rl.checks.start_dir import looks_like_path

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_ANCHORS = ("a", "0", ".")


def read_tokenizer(model: str) -> Tokenizer | None:
    """The tokenizer of a model, without truncation and padding; None without a `tokenizer.json` on this machine.

    Reads it without Transformers, whose import takes seconds.
    """
    from huggingface_hub import try_to_load_from_cache
    from tokenizers import Tokenizer

    file: object = Path(model, "tokenizer.json")
    if not looks_like_path(model) and not Path(model).is_dir():
        file = try_to_load_from_cache(model, "tokenizer.json")
    if not isinstance(file, str | Path) or not Path(file).is_file():
        return None
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


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


def _bytes_of_letters() -> dict[str, int]:
    """The byte that each letter of a byte-level vocabulary stands for: printable bytes are themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
