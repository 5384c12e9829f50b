"""Images of requests: their sizes, and the data URIs that a client sends."""

import base64
import re
import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from flagcore.domain.files import read_regular
from flagcore.domain.model import Vision
from flagcore.domain.space import IntArray
from flagcore_serving.job import IMAGE_SIZE, Images

MAX_FILE = 1 << 27
DELIMITERS = 2
"""Additional tokens of an image, before and after it (`<|vision_start|>`, `<|vision_end|>`)."""
BLOCK = 8
"""Pixels per side of the one-colored squares in random images. A choice: a PNG is then about as large as a photo."""
WORDS = re.findall(
    r"\w+", "the of and to in is that for it was on with as be by this are or from at which not have an but they one"
)


class Image(NamedTuple):
    """An image: its size in pixels, and the path of its file, which is empty for a random image."""

    width: int
    height: int
    path: str = ""


RequestImages: TypeAlias = Sequence[Sequence[Image]]
"""The images of each request."""


def draw_images(images: Images, count: int, rng: np.random.Generator) -> RequestImages:
    """Draw the number of images and their sizes for each of `count` requests."""
    low, high = images.counts
    counts = rng.integers(low, high, size=count, endpoint=True)
    shares = np.array([share for _, _, share in images.buckets])
    buckets = iter(rng.choice(len(images.buckets), p=shares / shares.sum(), size=int(counts.sum())).tolist())
    return [tuple(Image(*images.buckets[next(buckets)][:2]) for _ in range(each)) for each in counts.tolist()]


def read_image(text: str, folder: Path) -> Image:
    """Return an image of a trace, given as its size or as a path in `folder` (PNG or JPEG).

    Raises ValueError or OSError for an invalid file.
    """
    if size := re.match(IMAGE_SIZE, text):
        return Image(int(size[1]), int(size[2]))
    path = str((folder / text).resolve())
    return Image(*size_of_file(path), path)


@lru_cache(maxsize=100_000)
def size_of_file(path: str) -> tuple[int, int]:
    """Return the width and height of a PNG or JPEG file. Raises ValueError or OSError."""
    data = read_regular(Path(path), max_bytes=MAX_FILE)
    if data.startswith(b"\x89PNG\r\n\x1a\n") and len(data) >= 24:
        width, height = struct.unpack(">2I", data[16:24])
        return width, height
    position = 2
    while data.startswith(b"\xff\xd8") and position + 9 <= len(data) and data[position] == 0xFF:
        marker, length = data[position + 1], int.from_bytes(data[position + 2 : position + 4], "big")
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):  # a start-of-frame marker (ITU T.81, table B.1)
            height, width = struct.unpack(">2H", data[position + 5 : position + 9])
            return width, height
        position += 2 + length
    raise ValueError(f"{path} is neither a PNG nor a JPEG file")


def image_tokens(images: RequestImages, vision: Vision) -> IntArray:
    """Return, for each request, the number of tokens of its images."""
    sizes = {image[:2]: vision.tokens(*image[:2]) for request in images for image in request}
    counts = [sum(sizes[image[:2]] + DELIMITERS for image in request) for request in images]
    return np.array(counts, dtype=np.int64)


def data_uri(image: Image, seed: Sequence[int]) -> str:
    """Return an image as a data URI: the content of the image's file, or random squares that depend on `seed`."""
    if image.path:
        return _uri_of_file(image.path)
    shape = (-(-image.height // BLOCK), -(-image.width // BLOCK), 3)
    squares = np.random.default_rng(seed).integers(0, 256, size=shape, dtype=np.uint8)
    pixels = squares.repeat(BLOCK, 0).repeat(BLOCK, 1)[: image.height, : image.width]
    return _uri(_png(pixels), "png")


def random_text(count: int, rng: np.random.Generator) -> str:
    """Return `count` frequent English words. Each is one token in common vocabularies."""
    return " ".join(WORDS[index] for index in rng.integers(len(WORDS), size=count).tolist())


def _uri(data: bytes, kind: str) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


@lru_cache(maxsize=256)
def _uri_of_file(path: str) -> str:
    data = read_regular(Path(path), max_bytes=MAX_FILE)
    return _uri(data, "png" if data.startswith(b"\x89PNG") else "jpeg")


def _png(pixels: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    """Encode an RGB image as PNG (W3C PNG specification, third edition). Rows store differences to the row above."""
    height, width, _ = pixels.shape
    flat = pixels.reshape(height, -1)
    scanlines = np.full((height, 1 + flat.shape[1]), 2, dtype=np.uint8)  # PNG filter type 2: up
    scanlines[0, 1:] = flat[0]
    scanlines[1:, 1:] = flat[1:] - flat[:-1]

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(scanlines.tobytes(), 1)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + content
