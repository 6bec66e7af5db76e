"""Small pictures of the first images that SFT reads: the trainer writes them, the report embeds them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from prime_rl.utils.files import replacing_file

MOST_IMAGES = 24
_MOST_BYTES = 2**20
_PICTURE = re.compile(r"data:image/jpeg;base64,[A-Za-z0-9+/]{1,40000}={0,2}")


@dataclass(frozen=True, slots=True)
class SmallPicture:
    """An image as a model sees it, made smaller, and what it was before."""

    picture: str
    """JPEG as a data URL."""
    width: int
    height: int
    tokens: int

    def __post_init__(self) -> None:
        counts = (self.width, self.height, self.tokens)
        if not (isinstance(self.picture, str) and _PICTURE.fullmatch(self.picture)) or {*map(type, counts)} != {int}:
            raise ValueError("not a small picture")


def write_contact_sheet(path: Path, pictures: Sequence[SmallPicture]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing_file(path) as scratch:
        scratch.write_text(json.dumps([asdict(each) for each in pictures[:MOST_IMAGES]]), encoding="utf-8")


def read_contact_sheet(path: Path) -> list[SmallPicture]:
    """The pictures that were written; none if there is no such file. Raises ValueError or OSError if it is damaged."""
    if not path.exists():
        return []
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError("it is larger than a run writes it")
    try:
        return [SmallPicture(**each) for each in json.loads(path.read_text(encoding="utf-8"))][:MOST_IMAGES]
    except TypeError as error:
        raise ValueError(str(error)) from error
