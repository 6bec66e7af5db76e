"""Small pictures of a run's images: of the first that SFT reads, and of those that kept rollouts show.

The run writes them, the report embeds them. Nobody opens an image because a kept rollout names it.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from prime_rl.utils.files import open_regular, replacing_file
from prime_rl.utils.images import (
    Fetch,
    ImageFault,
    ImageLimits,
    content_digest,
    decoded_image,
    is_data_url,
    is_image,
    located_url,
    read_image,
    requested_bytes,
    source_of,
    thumbnail,
)

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


# Of kept rollouts.


SIDE = 256
"""Pixels of the longer side of a small picture of a rollout's image. It takes 5 to 30 kB."""
MOST_PICTURES = 10_000
"""Pictures that a run keeps. Rollouts of further images are kept without."""
_MOST_UNSEEN = 32
"""Images of a rollout's messages that are read although the policy has not seen them: a second each, at most."""
_MOST_FILE_BYTES = 2**18
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Shown(Protocol):
    """An image that the policy saw: `ImageReference`."""

    @property
    def digest(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...


class PictureWriter:
    """Writes a small picture of each image of kept rollouts, and what stands for the image in their messages.

    Any thread may call it: rollouts of one image often end together.
    """

    def __init__(self, folder: Path, fetch: Fetch | None = None) -> None:
        self._folder = folder
        self._fetch = fetch
        self._kept = {file.stem for file in folder.glob("*.jpg")}
        self._lock = threading.Lock()

    def kept(self, messages: Any, shown: Mapping[str, Shown]) -> Any:
        """Messages with `{"type": "image", "image": "scans/7.png", "sha256": …, "height": …, "width": …}` for an image.

        One that was given as bytes has no `image`: its content is in the data. Of `shown`, by source, and of the first
        images that the messages hold, a picture is written. An image that they only name is not opened.
        """
        if not isinstance(messages, list):
            return messages
        room = itertools.count(-_MOST_UNSEEN)
        return [self._message(each, shown, room) for each in messages]

    def _message(self, message: Any, shown: Mapping[str, Shown], room: Iterator[int]) -> Any:
        content = message.get("content") if hasattr(message, "get") else None
        if not isinstance(content, list) or not any(map(is_image, content)):
            return message
        plain = message.model_dump() if hasattr(message, "model_dump") else dict(message)
        return {**plain, "content": [self._part(part, shown, room) if is_image(part) else part for part in content]}

    def _part(self, part: Any, shown: Mapping[str, Shown], room: Iterator[int]) -> Any:
        source, seen = source_of(part), None
        try:
            seen = shown.get(located_url(source, Path())) if source is not None else None
            if seen is not None:
                self._write(seen.digest, source)
                facts = {"sha256": seen.digest, "height": seen.height, "width": seen.width}
            else:
                facts = self._of_content(source) if is_data_url(source) and next(room) < 0 else {}
        except (ImageFault, OSError, TypeError, ValueError, KeyError) as fault:
            facts = {"fault": str(fault)}  # a rollout of an image that is gone is kept all the same
        source = source if seen is None else seen.source  # absolute
        named = {"image": source} if isinstance(source, str) and not is_data_url(source) else {}
        return {"type": "image", **named, **facts}

    def _of_content(self, source: str) -> dict[str, Any]:
        content = requested_bytes(source, None, ImageLimits())
        image = decoded_image(content, ImageLimits())
        digest = content_digest(content)
        self._write(digest, content)
        return {"sha256": digest, "height": image.height, "width": image.width}

    def _write(self, digest: str, source: Any) -> None:
        with self._lock:
            if digest in self._kept or len(self._kept) >= MOST_PICTURES:
                return
            image = read_image(source, Path(), ImageLimits(), self._fetch, digest)
            with replacing_file(self._folder / f"{digest}.jpg") as scratch:
                scratch.write_bytes(requested_bytes(thumbnail(image, SIDE), None, ImageLimits()))
            self._kept.add(digest)


def read_picture(folder: Path, digest: str) -> str | None:
    """The picture that `PictureWriter` has written, drawn anew, as a data URL; None if there is none.

    The run may be a stranger's: a picture is a small JPEG in `folder` itself, whose bytes are not passed on.
    """
    file = folder / f"{digest}.jpg"
    if not _DIGEST.fullmatch(digest) or file.is_symlink() or not file.is_file():
        return None
    try:
        with open_regular(file) as opened:
            content = opened.read(_MOST_FILE_BYTES + 1)
        if not content.startswith(b"\xff\xd8\xff"):
            return None
        return thumbnail(decoded_image(content, ImageLimits(SIDE * SIDE, _MOST_FILE_BYTES)), SIDE)
    except (OSError, ImageFault):
        return None
