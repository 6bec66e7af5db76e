"""Reads the pixels of a DICOM file as 8-bit grey or RGB.

The file's own display is used: its VOI LUT, or else the first of its windows, or else the lowest to the highest value.
MONOCHROME1, in which the highest value is black, is inverted.

Who a file is about never leaves it: only the elements that pixels need are parsed, and no message has a value of one.
pydicom's own errors, warnings and logs quote values, so none of them is passed on.
"""

from __future__ import annotations

import io
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prime_rl.utils.images import ImageFault, check_scans, check_size

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from PIL.Image import Image

_DEFLATED = b"1.2.840.10008.1.2.1.99"
_PLAIN = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2")
_RLE = "1.2.840.10008.1.2.5"
_JPEG = ("1.2.840.10008.1.2.4.50", "1.2.840.10008.1.2.4.51", "1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91")
"""JPEG and JPEG 2000, which Pillow decodes."""
_MOST_RLE_BYTES = 2**24
"""Of pixels in RLE, as they are stored. A hostile file makes 64 bytes of one, and nothing says so before."""
_GREY, _COLOUR = ("MONOCHROME1", "MONOCHROME2"), ("RGB", "YBR_FULL", "YBR_FULL_422", "YBR_ICT", "YBR_RCT")
_ELEMENTS = (
    *("Rows", "Columns", "NumberOfFrames", "SamplesPerPixel", "PlanarConfiguration", "PhotometricInterpretation"),
    *("BitsAllocated", "BitsStored", "HighBit", "PixelRepresentation", "PixelData"),
    *("ModalityLUTSequence", "RescaleSlope", "RescaleIntercept"),
    *("VOILUTSequence", "WindowCenter", "WindowWidth", "VOILUTFunction"),
)
_ROWS_AT_ONCE = 256


def dicom_image(content: bytes, max_pixels: int) -> Image:
    """The one frame of a file. Raises ImageFault."""
    try:
        import pydicom
    except ModuleNotFoundError:
        raise ImageFault(
            "it is DICOM, which needs the package pydicom: install it with `uv sync --inexact --extra dicom`"
        ) from None
    if _DEFLATED in content:
        raise ImageFault("its DICOM is deflated, and nothing says how long it gets: write it without compression")
    with _quiet():
        try:
            # Elements that are not asked for are skipped unread.
            dataset = pydicom.dcmread(io.BytesIO(content), specific_tags=list(_ELEMENTS))
            _check(dataset, max_pixels)
            return _image(dataset)
        except ImageFault:
            raise
        except MemoryError:
            raise ImageFault("its DICOM pixels do not fit into memory") from None
        except Exception as error:  # noqa: BLE001 - `from error` would show what pydicom quotes
            # Without its message, and without the error itself, which a traceback would show.
            raise ImageFault(f"its DICOM is damaged or not supported ({type(error).__name__})") from None


@contextmanager
def _quiet() -> Iterator[None]:
    logger = logging.getLogger("pydicom")
    was_disabled, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = was_disabled


def _check(dataset: Any, max_pixels: int) -> None:
    """Refuse by the header, before a pixel is decoded."""
    if "PixelData" not in dataset:
        raise ImageFault("its DICOM has no pixels, as a report has none")
    rows, columns = int(dataset.Rows), int(dataset.Columns)
    check_size((columns, rows), max_pixels)
    if int(dataset.get("NumberOfFrames") or 1) != 1:
        raise ImageFault("its DICOM has several frames: write the one that is meant to a file of its own")
    kind = str(dataset.PhotometricInterpretation)
    samples, bits = int(dataset.SamplesPerPixel), int(dataset.BitsAllocated)
    if not (
        (kind in _GREY and samples == 1 and bits in (8, 16, 32)) or (kind in _COLOUR and (samples, bits) == (3, 8))
    ):
        raise ImageFault("its DICOM is neither grey of 8, 16 or 32 bits nor RGB of 8: write it as PNG")
    syntax = str(dataset.file_meta.TransferSyntaxUID)
    if syntax == _RLE:
        if len(dataset.PixelData) > _MOST_RLE_BYTES:
            raise ImageFault(f"its RLE has more than {_MOST_RLE_BYTES >> 20} MiB: write it without compression")
    elif syntax in _JPEG:
        _check_jpeg(dataset, (columns, rows))
    elif syntax not in _PLAIN:
        name = (
            dataset.file_meta.TransferSyntaxUID.name if dataset.file_meta.TransferSyntaxUID.is_transfer_syntax else ""
        )
        raise ImageFault(
            f"its DICOM is compressed with {name or 'an unknown method'}, which is not decoded: write it without "
            "compression, as with dcmdjpeg or gdcmconv --raw"
        )


def _check_jpeg(dataset: Any, size: tuple[int, int]) -> None:
    """The compressed frame claims a size of its own, and may hold scans without end."""
    from PIL import Image as images
    from pydicom.encaps import get_frame

    frame = get_frame(dataset.PixelData, 0, number_of_frames=1)
    with images.open(io.BytesIO(frame), formats=("JPEG", "JPEG2000")) as image:
        if image.size != size:
            raise ImageFault("its DICOM and the compressed image in it have different sizes")
        if image.format == "JPEG":
            check_scans(frame, size)


def _image(dataset: Any) -> Image:
    from PIL import Image as images
    from pydicom.pixels import pixel_array

    values = pixel_array(dataset)
    if str(dataset.PhotometricInterpretation) in _COLOUR:
        return images.fromarray(values)
    return images.fromarray(_grey(values, dataset))


def _grey(values: NDArray[Any], dataset: Any) -> NDArray[Any]:
    """Stored values as 8 bits, in parts, because each step takes 8 bytes a pixel."""
    import numpy as np
    from pydicom.pixels import apply_modality_lut

    parts = [values[start : start + _ROWS_AT_ONCE] for start in range(0, len(values), _ROWS_AT_ONCE)]
    shares = _display(dataset)
    if shares is None:
        ends = [end(apply_modality_lut(part, dataset)) for part in parts for end in (np.min, np.max)]
        shares = _full_range(float(min(ends)), float(max(ends)))
    grey = np.empty(values.shape, np.uint8)
    for at, part in enumerate(parts):
        share = np.clip(shares(apply_modality_lut(part, dataset)), 0.0, 1.0)
        if str(dataset.PhotometricInterpretation) == "MONOCHROME1":
            share = 1.0 - share
        grey[at * _ROWS_AT_ONCE : at * _ROWS_AT_ONCE + len(part)] = np.rint(share * 255.0)
    return grey


def _display(dataset: Any) -> Callable[[NDArray[Any]], NDArray[Any]] | None:
    """From values to shares of the display's range, as the file says; None if it says nothing (DICOM PS3.3, C.11.2)."""
    import numpy as np

    if dataset.get("VOILUTSequence"):
        from pydicom.pixels import apply_voi

        highest = 2.0 ** int(dataset.VOILUTSequence[0].LUTDescriptor[2]) - 1
        return lambda values: apply_voi(np.rint(values).astype(np.int64), dataset) / highest
    centers, widths = _numbers(dataset.get("WindowCenter")), _numbers(dataset.get("WindowWidth"))
    if not (centers and widths):
        return None
    center, width, function = centers[0], widths[0], str(dataset.get("VOILUTFunction") or "LINEAR")
    if not (np.isfinite(center) and width > 0):
        raise ImageFault("its DICOM has a window without a width")
    if function == "SIGMOID":
        return lambda values: 1.0 / (1.0 + np.exp(np.clip(-4.0 * (values - center) / width, -700.0, 700.0)))
    if function == "LINEAR_EXACT":
        return lambda values: (values - center) / width + 0.5
    # The usual one is off by half a value, and a width of 1 is a step.
    return lambda values: (values - (center - 0.5)) / max(width - 1.0, 1e-9) + 0.5


def _numbers(value: Any) -> list[float]:
    """The values of an element that has none, one or several."""
    if value is None or value == "":
        return []
    return [float(each) for each in value] if hasattr(value, "__iter__") else [float(value)]


def _full_range(low: float, high: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda values: (values - low) / max(high - low, 1e-9)
