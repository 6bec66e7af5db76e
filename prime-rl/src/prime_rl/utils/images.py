"""Reads images of training data: a path, bytes or a data URL becomes RGB pixels, or one line says why not.

    read_image("scans/7.png", Path("data"), ImageLimits())

Files are hostile until they are read: a small one may claim a billion pixels, hold a thousand layers or never end. The
size that the header claims is checked before any pixel is decoded, and only six formats are decoded at all, and DICOM
with the extra `dicom` (`utils/dicom.py`).

What happens to pixels:

- EXIF's orientation is applied, so that up is up. Colour profiles are not applied.
- Transparent parts are white, as on paper.
- 16-bit grey, 32-bit integers and floats are scaled from the file's lowest value to its highest, to 0 to 255. Pillow's
  own conversion cuts at 255, which makes most X-rays of 12 or 16 bits white.
- CMYK, palettes and black-and-white become RGB.
- Files with several frames or pages are refused: which one is meant is the user's to say. The second picture that
  phones hide in a JPEG (a depth map, a preview) does not count.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import io
import posixpath
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from prime_rl.utils.errors import PrimeError, first_line, one_line
from prime_rl.utils.files import open_regular, size_text
from prime_rl.utils.terminal import shortened

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
KNOWN_FORMATS = "PNG, JPEG, WebP, BMP, GIF, TIFF or DICOM"
MOST_PIXELS = 178_956_970
"""Pillow refuses files above this number, whatever our limit is."""
MOST_SCANS, _MOST_SCANNED = 500, 2_000_000_000
"""Of a progressive JPEG: scans, and pixels of all scans together, which take 3 seconds. A scan goes over all pixels,
and may be as short as ten bytes: a megabyte of them would take hours."""
_NAME_CHARS = 200
_MOST_SIDES_RATIO = 200
"""As processors of Qwen's models allow: nothing is left of the short side once the long one fits."""
_ROWS_AT_ONCE = 256

Fetch = Callable[[str, int], Path]
"""The local copy of what `s3://…` names, if it has at most so many bytes. Its PrimeErrors and ValueErrors are told."""


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """What the images of one row may have."""

    max_pixels: int = 50_000_000
    """Of one image. A chest X-ray has 10 million, phones make up to 50. Each takes up to 24 bytes while it is read."""
    max_bytes: int = 2**27
    """Of one file, as it is stored."""
    max_images: int = 32
    """Of one row."""


class ImageFault(ValueError):
    """An image cannot be used. The message is one line: which image, what is wrong, what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))  # it may quote the data


def read_image(
    source: Any, folder: Path, limits: ImageLimits, fetch: Fetch | None = None, digest: str | None = None
) -> Image:
    """The pixels of an image in RGB.

    Args:
        source: a path, relative to `folder` or absolute, also to outside of the folder, because data and images may lie
            side by side; a `file:` or `data:` URL; `s3://…`; bytes; or `{"bytes": …, "path": …}`, as `datasets` writes
            images.
        folder: the folder of the data file; also one on S3, as a path.
        fetch: gets what lies on S3. Without it such names are refused.
        digest: SHA-256 that the file's content must have; None: any.

    Raises:
        ImageFault: it cannot be read, is damaged, or is larger than `limits` allow.
    """
    name, content = _content(source, folder, limits, fetch)
    if digest is not None and content_digest(content) != digest:
        raise ImageFault(f"{name}: the file has another content")
    try:
        return decoded_image(content, limits)
    except ImageFault as fault:
        raise ImageFault(f"{name}: {fault}") from None


def decoded_image(content: bytes, limits: ImageLimits) -> Image:
    """The pixels of a file's content in RGB. Raises ImageFault, whose message does not say which image it is."""
    if not content:
        raise ImageFault("it is empty")
    if len(content) > limits.max_bytes:
        raise ImageFault(f"it has {size_text(len(content))}, and at most {size_text(limits.max_bytes)} are read")
    if content.startswith(b"DICM", 128):
        from prime_rl.utils.dicom import dicom_image

        return dicom_image(content, limits.max_pixels).convert("RGB")
    from PIL import Image, UnidentifiedImageError

    # Of damaged metadata, Pillow warns on stderr, with the name of a file of its own.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            image = Image.open(io.BytesIO(content), formats=FORMATS)
        except UnidentifiedImageError:
            raise ImageFault(_what_it_is(content)) from None
        except Image.DecompressionBombError:
            most = min(limits.max_pixels, MOST_PIXELS)
            raise ImageFault(f"its header claims more than {most:,} pixels") from None
        except Exception as error:  # a damaged header: each of Pillow's readers has errors of its own
            raise ImageFault(f"its header is damaged ({first_line(error) or type(error).__name__})") from error
        with image:
            _check_header(image, content, limits)
            try:
                image.load()
                return _rgb(image)
            except ImageFault:
                raise
            except MemoryError:
                raise ImageFault(f"its {image.width:,} x {image.height:,} pixels do not fit into memory") from None
            except Exception as error:
                raise ImageFault(f"it is damaged or cut short ({first_line(error) or type(error).__name__})") from error


def _check_header(image: Image, content: bytes, limits: ImageLimits) -> None:
    """Refuse by what the header says, before a pixel is decoded."""
    check_size(image.size, limits.max_pixels)
    # A phone's JPEG may hold a second picture, which Pillow calls MPO.
    if image.format != "MPO" and getattr(image, "is_animated", False):
        what = "pages" if image.format == "TIFF" else "frames"
        raise ImageFault(f"it has several {what}: write the one that is meant to a file of its own")
    if image.format in ("JPEG", "MPO"):
        check_scans(content, image.size)


def check_size(size: tuple[int, int], max_pixels: int) -> None:
    """Raises ImageFault if an image has too many pixels, or one side is too long for the other."""
    width, height = size
    if width * height > max_pixels:
        raise ImageFault(f"{width:,} x {height:,} pixels are more than {max_pixels:,}: make it smaller")
    if max(width, height) > _MOST_SIDES_RATIO * max(1, min(width, height)):
        raise ImageFault(f"{width:,} x {height:,} pixels: one side may be {_MOST_SIDES_RATIO} times the other: cut it")


def check_scans(jpeg: bytes, size: tuple[int, int]) -> None:
    """Raises ImageFault if a JPEG of this size has too many scans to be decoded in seconds."""
    # In a JPEG's data, FF is followed by 00: DA after it begins a scan.
    scans, most = jpeg.count(b"\xff\xda"), min(MOST_SCANS, _MOST_SCANNED // (size[0] * size[1]))
    if scans > most:
        raise ImageFault(f"its JPEG has {scans:,} scans, and at most {most} of its size are decoded: save it again")


def _rgb(image: Image) -> Image:
    from PIL import Image as images

    # Before the conversions below, which leave it out. Pillow turns a TIFF by itself, and then says 1.
    turn = _TURNS.get(image.getexif().get(_ORIENTATION, 1))
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        image = _scaled(image)
    elif image.mode in ("RGBA", "LA", "PA", "RGBa") or "transparency" in image.info:
        whole = image if image.mode == "RGBA" else image.convert("RGBA")
        image = images.new("RGB", whole.size, "white")
        image.paste(whole, mask=whole.getchannel("A"))
    image = image.convert("RGB")
    return image if turn is None else image.transpose(images.Transpose[turn])


_ORIENTATION = 0x0112
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's name for what undoes each orientation of EXIF; 1 is upright."""


def _scaled(image: Image) -> Image:
    """Grey values of any range as 8 bits: the lowest is 0, the highest 255. An image of one value is black."""
    import numpy as np
    from PIL import Image as images

    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        raise ImageFault("it has pixels that are not numbers (NaN or infinite)")
    grey = np.empty(values.shape, np.uint8)
    factor = 255.0 / (high - low) if high > low else 0.0
    for start in range(0, len(values), _ROWS_AT_ONCE):  # in parts: float64 takes 8 bytes a pixel
        part = values[start : start + _ROWS_AT_ONCE].astype(np.float64)
        grey[start : start + _ROWS_AT_ONCE] = np.rint((part - low) * factor)
    return images.fromarray(grey)


@dataclass(frozen=True, slots=True)
class ShownImage:
    """An image of a conversation, and how a program gets it that knows neither our files nor our formats."""

    digest: str
    """SHA-256 of the file's content."""
    url: str
    """A data URL. Whoever decodes it has the pixels of `read_image`."""
    height: int
    width: int


def shown_image(source: Any, folder: Path, limits: ImageLimits, fetch: Fetch | None = None) -> ShownImage:
    """Read an image for an inference server. The arguments, and what is raised, are those of `read_image`.

    Files that every program decodes alike are passed on as they are. Of others (turned by EXIF, transparent, of more
    than 8 bits, DICOM) a PNG is made of the pixels.
    """
    from PIL import Image

    name, content = _content(source, folder, limits, fetch)
    try:
        image = decoded_image(content, limits)
    except ImageFault as fault:
        raise ImageFault(f"{name}: {fault}") from None
    digest = content_digest(content)
    if not content.startswith(b"DICM", 128):
        with Image.open(io.BytesIO(content), formats=FORMATS) as stored:
            is_plain = stored.mode in ("RGB", "L") and "transparency" not in stored.info
            if stored.format in ("PNG", "JPEG") and is_plain and stored.getexif().get(_ORIENTATION, 1) == 1:
                return ShownImage(digest, _data_url(stored.format, content), image.height, image.width)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return ShownImage(digest, _data_url("PNG", file.getvalue()), image.height, image.width)


def check_sources(messages: Any, limits: ImageLimits, *, decodes: bool) -> None:
    """Check that the images of a conversation can be read: with `decodes`, by reading those that lie on this machine;
    otherwise only that their files exist.

    Raises:
        ImageFault: one of them cannot, or there are too many.
    """
    parts = image_parts(messages)
    if len(parts) > limits.max_images:
        raise ImageFault(f"it has {len(parts)} images, more than model.vision.max_images = {limits.max_images}")
    for part in parts:
        source = part.source
        if isinstance(source, str) and _scheme(source) == "s3":
            continue
        if decodes:
            read_image(source, Path(), limits)
        elif isinstance(source, str) and not _scheme(source) and not Path(source).is_file():
            raise ImageFault(f"{_shown(source)}: no such file in {_shown(str(Path(source).absolute().parent))}")


class ShownImages:
    """Shows inference servers the images of conversations. The last ones are kept: the rollouts of a group begin with
    the same."""

    def __init__(
        self, limits: ImageLimits, fetch: Fetch | None = None, most_kept: int = 64, most_bytes: int = 1 << 28
    ) -> None:
        """At most `most_kept` images are kept, which have `most_bytes` together as they are sent."""
        self.limits = limits
        self._fetch = fetch
        self._most_kept, self._most_bytes = most_kept, most_bytes
        self._read: OrderedDict[str, _Reading] = OrderedDict()

    async def of(self, messages: Any) -> list[ShownImage]:
        """The images of a conversation, in order. Paths are relative to this process's folder.

        Raises:
            ImageFault: one of them cannot be used, or there are too many.
        """
        parts = image_parts(messages)
        if len(parts) > self.limits.max_images:
            raise ImageFault(f"the messages have {len(parts)} images, and at most {self.limits.max_images} are read")
        try:
            return [await self._one(part.source) for part in parts]
        except ImageFault as fault:
            raise ImageFault(f"an image of the messages cannot be shown: {fault}") from None

    async def _one(self, source: Any) -> ShownImage:
        if not isinstance(source, str):
            return await asyncio.to_thread(shown_image, source, Path(), self.limits, self._fetch)
        known, state = self._read.get(source), _file_state(source)
        if known is None or known.state != state or (known.task.done() and known.shown is None):
            reading = asyncio.to_thread(shown_image, source, Path(), self.limits, self._fetch)
            digest = None if known is None else known.digest
            known = self._read[source] = _Reading(state, asyncio.create_task(reading), digest)
        self._read.move_to_end(source)
        shown = await asyncio.shield(known.task)
        while len(self._read) > self._most_kept or sum(map(self._num_bytes, self._read)) > self._most_bytes:
            self._read.popitem(last=False)
        if known.first_digest not in (None, shown.digest):
            raise ImageFault(f"{_shown(source)}: it has changed since it was shown: give each image a name of its own")
        return shown

    def _num_bytes(self, source: str) -> int:
        shown = self._read[source].shown
        return len(source) + (0 if shown is None else len(shown.url))


@dataclass(frozen=True, slots=True)
class _Reading:
    """An image that is read, or has been."""

    state: tuple[int, ...] | None
    """Of its file, which tells whether it has been written again."""
    task: asyncio.Task[ShownImage]
    first_digest: str | None
    """Of what the same name was first shown as; None if this is the first time."""

    @property
    def shown(self) -> ShownImage | None:
        """None until it has been read, and if it cannot be."""
        is_read = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        return self.task.result() if is_read else None

    @property
    def digest(self) -> str | None:
        """Of what the name has been shown as."""
        return self.shown.digest if self.first_digest is None and self.shown is not None else self.first_digest


def _file_state(source: str) -> tuple[int, ...] | None:
    """What changes when the file that a source names is written; None if it names none on this machine."""
    if _scheme(source) in ("data", "s3"):
        return None
    try:
        found = Path(_path_in(source)).stat()
    except (OSError, ValueError):
        return None  # reading it says what is wrong
    return found.st_mtime_ns, found.st_size, found.st_ino


def content_digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _data_url(kind: str, content: bytes) -> str:
    return f"data:image/{kind.lower()};base64,{base64.b64encode(content).decode()}"


def thumbnail(image: Image, side: int = 144) -> str:
    """A picture of at most `side` pixels a side, as a data URL of a few kilobytes. The image stays as it is."""
    from PIL import Image as images

    small = image.copy() if max(image.size) <= side else image.resize(_fitting(image.size, side), images.Resampling.BOX)
    file = io.BytesIO()
    small.save(file, "JPEG", quality=70)
    return _data_url("JPEG", file.getvalue())


def _fitting(size: tuple[int, int], side: int) -> tuple[int, int]:
    width, height = size
    return max(1, width * side // max(size)), max(1, height * side // max(size))


# Images in messages.


PART_TYPES = frozenset({"image", "image_url", "input_image"})
"""Types of parts of messages that are images: Hugging Face's and Anthropic's, and two of OpenAI's."""
_SOURCE_KEYS = ("image", "image_url", "input_image", "source", "path", "url", "base64", "data", "bytes")


@dataclass(frozen=True, slots=True)
class ImagePart:
    """An image in a conversation."""

    message: int
    """Number of its message, from 1."""
    source: Any
    """What `read_image` takes. None if the part only says that an image is here."""


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image."""
    return hasattr(part, "get") and str(part.get("type")) in PART_TYPES


def source_of(part: Mapping[str, Any]) -> Any:
    """What a part of a message holds or names, for `read_image`; None if the part only says that an image is here.

    `{"type": "image_url", "image_url": {"url": …}}` is of OpenAI; that of Hugging Face has `image`, `path`, `url` or
    `base64` beside its type, that of Anthropic `"source": {"type": "base64", "data": …}`.
    """
    value: Any = part
    key = ""
    for _ in range(3):  # objects in objects, as of OpenAI and Anthropic
        if not isinstance(value, Mapping) or isinstance(value.get("bytes"), bytes):
            break
        key = next((name for name in _SOURCE_KEYS if value.get(name) is not None), "")
        value = value.get(key)
    # Only the key says that text is base64 and no path.
    return f"data:;base64,{value}" if key in ("base64", "data") and isinstance(value, str) else value


def image_parts(messages: Any) -> list[ImagePart]:
    """The images of a conversation, in order. A prompt of plain text has none."""
    if not isinstance(messages, list):
        return []
    contents = ((number, each.get("content")) for number, each in enumerate(messages, 1) if hasattr(each, "get"))
    return [
        ImagePart(number, source_of(part))
        for number, content in contents
        if isinstance(content, list)
        for part in content
        if is_image(part)
    ]


def read_images(messages: Any, folder: Path, limits: ImageLimits, fetch: Fetch | None = None) -> list[Image]:
    """The pixels of all images of a conversation, in order. The arguments are those of `read_image`.

    Raises:
        ImageFault: one of them cannot be used, or there are too many.
    """
    parts = image_parts(messages)
    if len(parts) > limits.max_images:
        raise ImageFault(f"the row has {len(parts)} images, and at most {limits.max_images} are read")
    images = []
    for part in parts:
        try:
            images.append(read_image(part.source, folder, limits, fetch))
        except ImageFault as fault:
            raise ImageFault(f"message {part.message}: {fault}") from None
    return images


# Where the bytes come from.


def _content(source: Any, folder: Path, limits: ImageLimits, fetch: Fetch | None) -> tuple[str, bytes]:
    """What messages call the image, and its bytes."""
    if isinstance(source, Mapping):
        held, path = source.get("bytes"), source.get("path")
        if held is None and isinstance(path, str):
            source = path
        elif isinstance(held, bytes | bytearray | memoryview):
            return (_shown(path) if isinstance(path, str) and path else "the image's bytes"), bytes(held)
        else:
            raise ImageFault(f"the image has neither bytes nor a path, but {', '.join(map(str, source)) or 'nothing'}")
    if isinstance(source, bytes | bytearray | memoryview):
        return "the image's bytes", bytes(source)
    if not isinstance(source, str):
        raise ImageFault(f"the image is a {type(source).__name__}: expected a path, bytes or a data URL")
    source = _beside(folder, source)
    scheme = _scheme(source)
    if scheme == "data":
        return "the image's data URL", _of_data_url(source, limits)
    if scheme in ("http", "https"):
        raise ImageFault(f"{_shown(source)}: images are not fetched from the web: download it, and name the file")
    if scheme == "s3":
        return _shown(source), _read(_fetched(source, limits, fetch), _shown(source), limits)
    source = _path_in(source)
    if not source.strip():
        raise ImageFault("the image's path is empty")
    return _shown(source), _read(folder / source, _shown(source), limits)


def with_urls(messages: Sequence[Any], urls: Sequence[str]) -> list[Any]:
    """The same conversation with its images as OpenAI writes them, each with the URL of its place in `urls`."""
    given = iter(urls)

    def changed(content: Any) -> Any:
        if not isinstance(content, list):
            return content
        return [
            {"type": "image_url", "image_url": {"url": next(given)}} if is_image(part) else part for part in content
        ]

    return [{**each, "content": changed(each.get("content"))} if hasattr(each, "get") else each for each in messages]


def requested_bytes(url: str, folder: Path | None, limits: ImageLimits) -> bytes:
    """The bytes of an image that a request to a server names: a data URL, or a `file:` URL of a file in `folder`.

    Raises:
        ImageFault: it is something else, cannot be read, or is too large. Nothing is fetched from the web.
    """
    scheme = _scheme(url)
    if scheme == "data":
        return _of_data_url(url, limits)
    if scheme in ("http", "https"):
        raise ImageFault(
            f"{_shown(url)}: images are not fetched from the web: send a data URL, data:image/png;base64,…"
        )
    if scheme != "file":
        raise ImageFault(f"{_shown(url)}: expected a data URL, data:image/png;base64,…")
    if folder is None:
        raise ImageFault(f"{_shown(url)}: this server reads no files (allowed_local_media_path): send a data URL")
    try:
        path = (folder / _path_in(url)).resolve()
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ImageFault(f"{_shown(url)}: cannot be read: {error}") from error
    if not path.is_relative_to(folder.resolve()):
        raise ImageFault(f"{_shown(url)}: it is not in the folder of allowed_local_media_path: send a data URL")
    return _read(path, _shown(url), limits)


def located_url(source: Any, folder: Path) -> str:
    """As `located`, in text: bytes as a data URL."""
    found = located(source, folder)
    return found if isinstance(found, str) else f"data:;base64,{base64.b64encode(found).decode()}"


def located(source: Any, folder: Path) -> str | bytes:
    """A source that `read_image` has read from `folder`, for a reader that does not know the folder."""
    if isinstance(source, Mapping):  # as `datasets` stores images
        source = source["path"] if source.get("bytes") is None else source["bytes"]
    if not isinstance(source, str):
        return bytes(source)
    source = _beside(folder, source)
    return source if _scheme(source) in ("data", "s3") else str((folder / _path_in(source)).absolute())


def _beside(folder: Path, source: str) -> str:
    """The source; a relative path as a name on S3 if the folder is there, `s3:/bucket/folder`."""
    if not str(folder).startswith(_ON_S3) or _scheme(source) or Path(source).is_absolute():
        return source
    return f"s3://{posixpath.normpath(f'{str(folder).removeprefix(_ON_S3)}/{source}')}"


_ON_S3 = "s3:/"
"""As a path writes `s3://`."""


def is_data_url(source: Any) -> bool:
    return isinstance(source, str) and _scheme(source) == "data"


def _scheme(source: str) -> str:
    """What stands before the first colon, if it may be the scheme of a URL. A file's name may have colons too."""
    return source[:8].partition(":")[0].lower() if ":" in source[:8] else ""


def _path_in(source: str) -> str:
    """The path that a source without a scheme is, or that a `file:` URL names."""
    try:
        return unquote(urlsplit(source).path) if _scheme(source) == "file" else source
    except ValueError as error:  # brackets of an IPv6 address that do not close
        raise ImageFault(f"{_shown(source)}: {error}") from None


def _shown(source: str) -> str:
    return shortened(source, _NAME_CHARS)


def _fetched(source: str, limits: ImageLimits, fetch: Fetch | None) -> Path:
    if fetch is None:
        raise ImageFault(f"{_shown(source)}: images on S3 are not read here")
    try:
        return fetch(source, limits.max_bytes)
    except (PrimeError, ValueError) as error:
        raise ImageFault(str(error)) from error


def _read(path: Path, name: str, limits: ImageLimits) -> bytes:
    try:
        with open_regular(path) as file:
            # One byte more than is allowed shows that there is more: a file may be sparse, or grow.
            content = file.read(limits.max_bytes + 1)
    except FileNotFoundError:
        raise ImageFault(f"{name}: no such file in {_shown(str(path.parent))}") from None
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise ImageFault(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if len(content) > limits.max_bytes:
        raise ImageFault(f"{name}: its file has more than {size_text(limits.max_bytes)}")
    return content


def _of_data_url(url: str, limits: ImageLimits) -> bytes:
    head, comma, data = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageFault("the image's data URL is not of the form data:image/png;base64,…")
    return of_base64(data, limits)


def of_base64(data: str, limits: ImageLimits) -> bytes:
    """The bytes of an image in base64. Raises ImageFault: it is something else, or too large."""
    if len(data) * 3 // 4 > limits.max_bytes + 3:
        raise ImageFault(f"the image's base64 stands for more than {size_text(limits.max_bytes)}")
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageFault(f"the image's base64 is damaged ({error})") from None


# What else a file may be, for messages.


_SIGNATURES = (
    *(
        (0, start, "cut short or damaged in its header: copy it again")
        for start in (b"\x89PNG", b"\xff\xd8\xff", b"GIF8")
    ),
    *((0, start, "cut short or damaged in its header: copy it again") for start in (b"II*\0", b"MM\0*", b"BM")),
    (8, b"WEBP", "cut short or damaged in its header: copy it again"),
    (0, b"%PDF", "a PDF: write the page that is meant to a PNG"),
    (0, b"version https://git-lfs", "a pointer of Git LFS: run `git lfs pull`"),
    (0, b"\x00\x00\x00\x0cJXL ", "JPEG XL"),
    (0, b"\xff\x0a", "JPEG XL"),
    (0, b"\x00\x00\x00\x0cjP  ", "JPEG 2000"),
    (0, b"\xff\x4f\xff\x51", "JPEG 2000"),
    (4, b"ftypavif", "AVIF"),
    (4, b"ftypavis", "AVIF"),
    (4, b"ftyphei", "HEIC"),
    (4, b"ftyphev", "HEIC"),
    (4, b"ftypmif", "HEIC"),
    (4, b"ftyp", "a video: write the frame that is meant to a PNG"),
    (0, b"8BPS", "a Photoshop file"),
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"\x93NUMPY", "a NumPy array"),
)


def _what_it_is(content: bytes) -> str:
    """Why a content that is none of the formats is refused: by what it is, where that is known."""
    for offset, signature, kind in _SIGNATURES:
        if content.startswith(signature, offset):
            advice = "" if ":" in kind else ": write it as PNG or JPEG"
            return f"it is {kind}{advice}"
    text = content[:4096].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<svg", b"<?xml")) and b"<svg" in text:
        return "it is SVG: draw it into a PNG"
    if text.startswith((b"<!doctype html", b"<html")):
        return "it is an HTML page, as a failed download leaves it: download the image again"
    if not any(content[:4096]):
        return "it begins with zeros, as a failed copy leaves it: copy the image again"
    return f"it is not an image of a known format ({KNOWN_FORMATS})"
