"""An image of training data becomes upright RGB pixels, and a broken file becomes one line that says what to do."""

from __future__ import annotations

import base64
import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from prime_rl.utils.images import ImageFault, ImageLimits, located, read_image

LIMITS = ImageLimits(max_pixels=10_000, max_bytes=200_000)
RED, BLUE = (200, 30, 20), (10, 40, 220)


def shapes(width: int = 40, height: int = 20) -> Image.Image:
    """Red at the left, blue at the right: a turn or a mirrored side shows."""
    image = Image.new("RGB", (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, pixels: bytes, more: bytes = b"") -> bytes:
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + more + png_chunk(b"IDAT", zlib.compress(pixels)) + png_chunk(b"IEND", b"")


def with_scans(count: int) -> bytes:
    """A progressive JPEG whose last scan is there again and again."""
    content = saved(shapes(), "JPEG", progressive=True)
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * count + b"\xff\xd9"


def flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 0xFF]) + content[middle + 1 :]


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 60, 3), dtype=np.uint8))
FRAMES = {"save_all": True, "append_images": [Image.new("RGB", (40, 20))]}
GIF_HEADER = b"GIF89a" + b"\xff" * 4 + b"\0\0\0"
FLOATS = np.array([[0.0, np.nan], [1.0, 2.0]], np.float32)

BROKEN_FILES: dict[str, tuple[bytes, str]] = {
    "empty.png": (b"", "it is empty"),
    "cut.png": (saved(NOISE)[:-400], "it is damaged or cut short"),
    "cut.jpg": (saved(NOISE, "JPEG")[:-300], "it is damaged or cut short"),
    "cut.gif": (saved(NOISE, "GIF")[:-900], "it is damaged or cut short"),
    "cut.webp": (saved(NOISE, "WEBP")[:-300], "its header is damaged"),
    "cut.bmp": (saved(NOISE, "BMP")[:-300], "it is damaged or cut short"),
    "cut.tif": (saved(NOISE, "TIFF", compression="tiff_lzw")[:-300], "it is cut short or damaged in its header"),
    "flipped.png": (flipped(saved(NOISE)), "it is damaged or cut short"),
    "header_only.png": (saved(NOISE)[:33], "it is cut short or damaged in its header: copy it again"),
    "half_header.png": (saved(NOISE)[:20], "damaged"),
    "noise.png": (np.random.default_rng(1).bytes(500), "it is not an image of a known format (PNG, JPEG, WebP"),
    "zeros.jpg": (bytes(500), "it begins with zeros, as a failed copy leaves it: copy the image again"),
    "text.jpg": (b"patient,age\n1,50\n", "it is not an image of a known format"),
    "page.jpg": (b"\n<!DOCTYPE html><html>404</html>", "it is an HTML page, as a failed download leaves it"),
    "drawing.png": (b'<?xml version="1.0"?><svg xmlns="x"/>', "it is SVG: draw it into a PNG"),
    "report.png": (b"%PDF-1.7\n", "it is a PDF: write the page that is meant to a PNG"),
    "pointer.png": (b"version https://git-lfs.github.com/spec/v1\n", "it is a pointer of Git LFS: run `git lfs pull`"),
    "phone.jpg": (b"\0\0\0\x18ftypheic" + bytes(20), "it is HEIC: write it as PNG or JPEG"),
    "film.gif": (b"\0\0\0\x18ftypisom" + bytes(20), "it is a video: write the frame"),
    "archive.png": (b"PK\x03\x04" + bytes(20), "it is a ZIP archive: write it as PNG or JPEG"),
    "bomb.png": (png(60_000, 60_000, bytes(10)), "its header claims more than 10,000 pixels"),
    "large.png": (png(20_000, 6_000, bytes(10)), "20,000 x 6,000 pixels are more than 10,000: make it smaller"),
    "bomb.gif": (GIF_HEADER + b",\0\0\0\0" + b"\xff" * 4 + b"\0\2\0;", "its header claims more than 10,000 pixels"),
    "text_bomb.png": (png(2, 2, bytes(6), png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(2**27)))), "damaged"),
    "long.png": (saved(Image.new("L", (9000, 1))), "9,000 x 1 pixels: one side may be 200 times the other: cut it"),
    "scans.jpg": (with_scans(600), "scans, and at most 500 of its size are decoded: save it again"),
    "moving.gif": (saved(shapes(), "GIF", **FRAMES), "it has several frames: write the one that is meant"),
    "moving.webp": (saved(shapes(), "WEBP", **FRAMES), "it has several frames"),
    "moving.png": (saved(shapes(), "PNG", **FRAMES), "it has several frames"),
    "stack.tif": (saved(shapes(), "TIFF", **FRAMES), "it has several pages: write the one that is meant"),
    "holes.tif": (saved(Image.fromarray(FLOATS), "TIFF"), "it has pixels that are not numbers"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_a_broken_file_is_one_line(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    content, expected = BROKEN_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ImageFault) as caught:
        read_image(name, tmp_path, LIMITS)
    message = str(caught.value)
    assert message.startswith(f"{name}: ")
    assert expected in message
    assert message.isprintable()
    assert len(message) < 300
    assert capfd.readouterr() == ("", "")  # libraries write nothing of their own


SOURCES: dict[str, tuple[Any, str]] = {
    "nothing there": ("no.png", "no.png: no such file in "),
    "a folder": (".", "Is a directory"),
    "an empty path": (" ", "the image's path is empty"),
    "a null character": ("a\0b.png", "a\\x00b.png: cannot be read: "),
    "commands of a terminal": ("\x1b[2Ja.png", "\\x1b[2Ja.png: no such file"),
    "a long path": ("a" * 5000, "cannot be read: File name too long"),
    "a page of the web": ("https://example.org/a.png", "images are not fetched from the web: download it"),
    "a URL with a host that ends nowhere": ("file://[a.png", "Invalid IPv6 URL"),
    "S3 without a client": ("s3://bucket/a.png", "images on S3 are not read here"),
    "a data URL without base64": ("data:image/svg+xml,<svg/>", "is not of the form data:image/png;base64,…"),
    "a damaged data URL": ("data:image/png;base64,iVBO*", "the image's base64 is damaged"),
    "a data URL of text": ("data:image/png;base64,aGVsbG8=", "the image's data URL: it is not an image of a known"),
    "a huge data URL": ("data:image/png;base64," + "A" * 300_000, "stands for more than"),
    "huge bytes": (bytes(300_000), "the image's bytes: it has "),
    "a number": (7, "the image is a int: expected a path, bytes or a data URL"),
    "a table without bytes": ({"path": None, "bytes": None}, "the image has neither bytes nor a path, but path, bytes"),
    "bytes under their path": ({"path": "a/b.png", "bytes": b"text"}, "a/b.png: it is not an image"),
}


@pytest.mark.parametrize("case", SOURCES)
def test_a_source_that_leads_nowhere_is_one_line(case: str, tmp_path: Path) -> None:
    source, expected = SOURCES[case]
    with pytest.raises(ImageFault) as caught:
        read_image(source, tmp_path, LIMITS)
    assert expected in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 800


SPECIAL_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pipe.png": (lambda path: os.mkfifo(path), "a pipe or a device"),
    "loop.png": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "huge.png": (sparse, "its file has more than 1 MB"),
    "device.png": (lambda path: path.symlink_to("/dev/zero"), "a pipe or a device"),
    "hidden.png": (
        lambda path: (path.write_bytes(saved(shapes())), path.chmod(0)),
        "cannot be read: Permission denied",
    ),
}


@pytest.mark.parametrize("name", SPECIAL_FILES)
def test_a_path_that_is_no_plain_file_is_one_line(name: str, tmp_path: Path) -> None:
    make, expected = SPECIAL_FILES[name]
    make(tmp_path / name)
    if name == "hidden.png" and os.access(tmp_path / name, os.R_OK):
        pytest.skip("root reads every file")
    with pytest.raises(ImageFault, match=expected):
        read_image(name, tmp_path, LIMITS)


def test_one_image_is_the_same_from_every_source(tmp_path: Path) -> None:
    content = saved(shapes())
    (tmp_path / "rows").mkdir()
    path = tmp_path / "an image.jpg"  # the suffix is wrong
    path.write_bytes(content)
    (tmp_path / "link.png").symlink_to(path)
    (tmp_path / "rows" / "CT:7.png").write_bytes(content)
    sources = [
        "../an image.jpg",
        "../link.png",
        str(path),
        path.as_uri(),
        "CT:7.png",
        "file:CT%3A7.png",
        content,
        memoryview(content),
        {"bytes": content, "path": "no.png"},
        {"bytes": None, "path": "../an image.jpg"},
        "data:image/jpeg;base64," + base64.encodebytes(content).decode(),
    ]
    for source in sources:
        assert read_image(source, tmp_path / "rows", LIMITS).tobytes() == shapes().tobytes()
        # Training reads it again, and does not know the folder.
        assert read_image(located(source, tmp_path / "rows"), Path(), LIMITS).tobytes() == shapes().tobytes()
    assert located("s3://bucket/a.png", tmp_path) == "s3://bucket/a.png"
    got = read_image("s3://bucket/a.png", tmp_path, LIMITS, fetch=lambda name, max_bytes: path)
    assert got.tobytes() == shapes().tobytes()


def test_turned_images_become_upright(tmp_path: Path) -> None:
    from PIL import ImageOps

    for orientation in range(1, 9):
        for kind in ("PNG", "JPEG", "WEBP", "TIFF"):
            exif = Image.Exif()
            exif[0x0112] = orientation
            content = saved(shapes(), kind, exif=exif.tobytes() if kind != "TIFF" else exif)
            expected = ImageOps.exif_transpose(Image.open(io.BytesIO(content))).convert("RGB")
            assert read_image(content, tmp_path, LIMITS).tobytes() == expected.tobytes(), (orientation, kind)


def grey(values: Any, kind: str = "PNG") -> bytes:
    return saved(Image.fromarray(np.array(values)), kind)


def test_pixels_of_every_mode_become_rgb(tmp_path: Path) -> None:
    def first_row(content: bytes) -> list[Any]:
        image = read_image(content, tmp_path, LIMITS)
        assert image.mode == "RGB"
        return [image.getpixel((x, 0)) for x in range(image.width)]

    def greys(content: bytes) -> list[int]:
        pixels = first_row(content)
        assert all(len(set(pixel)) == 1 for pixel in pixels)
        return [pixel[0] for pixel in pixels]

    # 12 bits in a file of 16, as X-rays are; expected by the formula in float64.
    values = np.array([[0, 1000, 4095]], np.uint16)
    assert greys(grey(values)) == greys(grey(values, "TIFF")) == [0, round(1000 / 4095 * 255), 255]
    assert greys(grey(np.array([[-1000, 0, 3000]], np.int32), "TIFF")) == [0, 64, 255]
    assert greys(grey(np.array([[-0.5, 0.0, 0.5]], np.float32), "TIFF")) == [0, 128, 255]
    assert greys(grey(np.array([[700, 700]], np.uint16))) == [0, 0]
    assert greys(grey(np.array([[0, 128, 255]], np.uint8))) == [0, 128, 255]
    assert greys(saved(Image.fromarray(np.array([[False, True]])))) == [0, 255]

    clear = Image.new("RGBA", (2, 1), (255, 0, 0, 0))
    clear.putpixel((1, 0), (0, 0, 0, 128))
    assert first_row(saved(clear)) == [(255, 255, 255), (127, 127, 127)]
    assert first_row(saved(clear.convert("LA"))) == [(255, 255, 255), (127, 127, 127)]
    palette = shapes(2, 1).quantize(4)
    assert first_row(saved(palette)) == [RED, BLUE]
    assert first_row(saved(palette, "GIF", transparency=palette.getpixel((0, 0)))) == [(255, 255, 255), BLUE]
    assert first_row(saved(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF")) == [(255, 0, 0)]
    assert first_row(saved(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "JPEG"))[0][0] > 240
    # A phone's second picture is no second frame.
    assert read_image(saved(shapes(), "MPO", save_all=True, append_images=[shapes()]), tmp_path, LIMITS).size == (
        40,
        20,
    )


# --- DICOM


def dicom(values: Any, **elements: Any) -> bytes:
    """A file of one frame, with a name in it that no message may have."""
    pydicom = pytest.importorskip("pydicom", reason="needs the extra dicom")
    from pydicom.dataset import FileDataset, FileMetaDataset

    values = np.asarray(values)
    meta = FileMetaDataset()
    meta.TransferSyntaxUID = elements.pop("syntax", pydicom.uid.ExplicitVRLittleEndian)
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = "1.2.840.10008.5.1.4.1.1.1", "1.2.3.7654321"
    dataset = FileDataset("", {}, file_meta=meta, preamble=bytes(128))
    dataset.PatientName, dataset.PatientID = "Secret^Jane", "7654321"
    dataset.Rows, dataset.Columns = values.shape[:2]
    dataset.SamplesPerPixel = 1 if values.ndim == 2 else 3
    dataset.PhotometricInterpretation = "MONOCHROME2" if values.ndim == 2 else "RGB"
    if values.ndim == 3:
        dataset.PlanarConfiguration = 0
    dataset.BitsAllocated = dataset.BitsStored = 8 * values.itemsize
    dataset.HighBit = dataset.BitsStored - 1
    dataset.PixelRepresentation = int(np.issubdtype(values.dtype, np.signedinteger))
    dataset.PixelData = values.tobytes()
    for name, value in elements.items():
        setattr(dataset, name, value)
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()


STORED = np.array([[-1000, 0, 40, 400, 3000]], np.int16)


def test_dicom_is_shown_as_the_file_says(tmp_path: Path) -> None:
    """The reference is pydicom's windowing, or the formula of the standard in float64."""
    pytest.importorskip("pydicom", reason="needs the extra dicom")
    from pydicom.dataset import Dataset
    from pydicom.encaps import encapsulate
    from pydicom.pixels import apply_windowing

    def greys(**elements: Any) -> list[int]:
        image = read_image(dicom(STORED, **elements), tmp_path, LIMITS)
        return [image.getpixel((x, 0))[0] for x in range(image.width)]  # type: ignore[index]

    values = STORED[0].astype(np.float64)
    full = [round((value + 1000) / 4000 * 255) for value in values]
    assert greys() == greys(RescaleSlope="2", RescaleIntercept="-1024") == full
    assert greys(PhotometricInterpretation="MONOCHROME1") == [255 - grey for grey in full]
    window = {"WindowCenter": ["40", "300"], "WindowWidth": ["400", "1500"]}
    for function in ("LINEAR", "LINEAR_EXACT", "SIGMOID"):
        dataset = Dataset()
        dataset.update({"PhotometricInterpretation": "MONOCHROME2", "BitsStored": 16, "PixelRepresentation": 1})
        dataset.update({"VOILUTFunction": function, "RescaleSlope": 1, "RescaleIntercept": 0, **window})
        expected = (apply_windowing(values, dataset) + 2**15) / (2**16 - 1) * 255
        assert np.abs(np.array(greys(VOILUTFunction=function, **window)) - expected).max() <= 0.51, function
    table = Dataset()
    table.LUTDescriptor, table.LUTData = [4, 0, 8], struct.pack("<4H", 10, 20, 30, 255)
    assert greys(VOILUTSequence=[table]) == [10, 10, 255, 255, 255]
    colours = np.asarray(shapes())
    assert read_image(dicom(colours), tmp_path, LIMITS).tobytes() == shapes().tobytes()
    jpeg = saved(shapes(), "JPEG", quality=95)
    held = {"syntax": "1.2.840.10008.1.2.4.50", "PhotometricInterpretation": "YBR_FULL_422"}
    image = read_image(dicom(colours, PixelData=encapsulate([jpeg]), **held), tmp_path, LIMITS)
    expected = np.asarray(Image.open(io.BytesIO(jpeg))).astype(int)
    assert np.abs(np.asarray(image).astype(int) - expected).max() <= 2
    bombs = {
        "its DICOM and the compressed image in it have different sizes": saved(Image.new("RGB", (400, 20)), "JPEG"),
        "its JPEG has .* scans, and at most 500 of its size are decoded": with_scans(600),
    }
    for fault, bomb in bombs.items():
        with pytest.raises(ImageFault, match=fault):
            read_image(dicom(colours, PixelData=encapsulate([bomb]), **held), tmp_path, LIMITS)


def test_a_broken_dicom_is_one_line_without_a_name(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    recwarn: pytest.WarningsRecorder,
) -> None:
    whole = dicom(STORED)
    broken = {
        "cut": (whole[:-4], "its DICOM is damaged or not supported (ValueError)"),
        "of_elements": (whole[:160], "its DICOM has no pixels, as a report has none"),
        "bomb": (dicom(STORED, Rows=60_000, Columns=60_000), "60,000 x 60,000 pixels are more than 10,000"),
        "long": (dicom(np.zeros((1000, 1), np.int16)), "1 x 1,000 pixels: one side may be 200 times the other"),
        "film": (dicom(STORED, NumberOfFrames=30), "its DICOM has several frames"),
        "palette": (
            dicom(STORED, PhotometricInterpretation="PALETTE COLOR"),
            "is neither grey of 8, 16 or 32 bits nor",
        ),
        "lossless": (
            dicom(STORED, syntax="1.2.840.10008.1.2.4.70", PixelData=b"\xfe\xff\x00\xe0"),
            "with JPEG Lossless",
        ),
        "syntax": (whole.replace(b"10008.1.2.1\0", b"1\xff008.1.2.1\0"), "is compressed with an unknown method"),
        "deflated": (dicom(STORED, syntax="1.2.840.10008.1.2.1.99"), "its DICOM is deflated"),
        "window": (dicom(STORED, WindowCenter="40", WindowWidth="0"), "has a window without a width"),
        "values": (whole.replace(b"7654321", b"76\xff\x1b[2J"), ""),
    }
    recwarn.clear()
    for name, (content, expected) in broken.items():
        (tmp_path / name).write_bytes(content)
        if not expected:
            read_image(name, tmp_path, LIMITS)  # a damaged identifier is not even read
            continue
        with pytest.raises(ImageFault) as caught:
            read_image(name, tmp_path, LIMITS)
        assert expected in str(caught.value), name
        assert "Secret" not in str(caught.value)
    assert not recwarn.list
    shown = "".join([*capfd.readouterr(), caplog.text])
    assert "Secret" not in shown
    assert "7654321" not in shown
