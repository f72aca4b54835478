import io
import zlib

import numpy as np
import pytest
from PIL import Image

from megasparse.data.corpora.images import PixelEncoder, decode, file_piece, planar_piece
from megasparse.errors import DataError
from tests.data.corpora.pictures import GREY, PALETTE, chunk, draw, png
from tests.helpers.refusals import refusal

IMAGE = draw(1)[0]


def pixels(content: bytes, side: int = 8) -> np.ndarray:
    return np.frombuffer(decode("folder/one.png", content, side), dtype=np.uint8).reshape(side, side, 3)


def saved(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, format=kind, **options)
    return file.getvalue()


def test_tokens_are_rows_of_pixels_of_red_green_and_blue():
    tokens = PixelEncoder(8).encode(file_piece("one", png(IMAGE)))
    assert tokens.tokens.dtype == np.uint8 and tokens.raw_bytes == 192 and tokens.words == 0
    assert tokens.tokens.tolist() == [int(IMAGE[y, x, c]) for y in range(8) for x in range(8) for c in range(3)]


def test_planes_become_pixels():
    images = draw(3)
    planes = b"".join(images[i, :, :, c].tobytes() for i in range(3) for c in range(3))
    encoder = PixelEncoder(8)
    assert encoder.encode(planar_piece(planes)).tokens.tobytes() == images.tobytes()
    assert (encoder.record, encoder.width, encoder.end, encoder.name) == (192, 1, None, "pixels")


def test_what_has_three_colours_of_a_byte_is_converted():
    grey = IMAGE[:, :, 0]
    three = np.repeat(grey[:, :, None], 3, axis=2)
    assert (pixels(png(grey, GREY)) == three).all()
    palette = bytes(range(256)) * 3
    colours = np.frombuffer(palette, dtype=np.uint8).reshape(256, 3)
    assert (pixels(png(grey, PALETTE, more=chunk(b"PLTE", palette))) == colours[grey]).all()
    bits = np.packbits(grey > 127, axis=1)
    black_and_white = png(bits, GREY, depth=1, size=(8, 8))
    assert (pixels(black_and_white) == np.where(three > 127, 255, 0)).all()
    ppm = b"P6\n8 8\n255\n" + IMAGE.tobytes()
    assert (pixels(ppm) == IMAGE).all()
    smooth = np.repeat(np.arange(0, 64, 8, dtype=np.uint8)[:, None], 8, axis=1)[:, :, None].repeat(3, axis=2)
    assert np.abs(pixels(saved(Image.fromarray(smooth), "JPEG", quality=95)).astype(int) - smooth).max() < 4


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (png(draw(1, 9)[0]), r"9×9 pixels, 8×8 are expected\. Scale or crop"),
        (png(IMAGE[:7]), "8×7 pixels"),
        (saved(Image.fromarray(draw(1)[0]).convert("RGBA")), "mode RGBA, not just red, green and blue"),
        (saved(Image.fromarray(draw(1)[0]).convert("LA")), "mode LA"),
        (saved(Image.fromarray(draw(1)[0]).convert("CMYK"), "JPEG"), "mode CMYK"),
        (png(IMAGE, more=chunk(b"tRNS", bytes(6))), "mode RGB with transparency"),
        (png(np.repeat(IMAGE, 2, axis=2), depth=16, size=(8, 8)), "more than 8 bits"),
        (png(np.repeat(IMAGE[:, :, :1], 2, axis=2), GREY, depth=16, size=(8, 8)), "more than 8 bits"),
        (b"", "no image of a known kind"),
        (b"hello", "no image of a known kind"),
        (saved(Image.fromarray(IMAGE), "GIF"), "no image of a known kind"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n", "no image of a known kind"),
        (png(IMAGE)[:-60], "cannot be decoded: .*truncated"),
        (saved(Image.fromarray(IMAGE), "JPEG")[:-20], "cannot be decoded: .*truncated"),
        (png(IMAGE, size=(8, 8)).replace(b"IDAT", b"IDAX"), "cannot be decoded"),
        (png(IMAGE)[:-20] + b"x" * 20, "cannot be decoded"),
        (bytes(20_000_000), "20,000,000 bytes are too many"),
    ],
)
def test_bad_images_are_refused_in_one_line(content, problem):
    refusal(lambda: pixels(content), match=rf"^folder/one\.png: .*{problem}")


@pytest.mark.parametrize("side", [20_000, 1 << 30])
def test_a_bomb_is_not_decoded(side):
    """An image that claims gigabytes is refused by what its header says."""
    with pytest.raises(DataError, match=r"one\.png: (this image has 20000×20000|cannot be decoded: Image size)"):
        pixels(png(IMAGE, size=(side, side)))


def test_a_bomb_of_text_is_not_unpacked():
    text = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(80_000_000), 9))
    with pytest.raises(DataError, match=r"one\.png: cannot be decoded"):
        pixels(png(IMAGE, more=text))


def test_any_damage_is_a_line_or_leaves_an_image_of_the_size():
    """A flipped byte anywhere in a file is refused, or gives some image; nothing else comes out of Pillow."""
    drawn = np.random.default_rng(0)
    image = np.full((8, 8, 3), 90, dtype=np.uint8)
    for content in (png(IMAGE), saved(Image.fromarray(image), "JPEG"), saved(Image.fromarray(image), "WEBP")):
        for place in drawn.integers(0, len(content), 60):
            damaged = content[:place] + bytes([content[place] ^ int(drawn.integers(1, 256))]) + content[place + 1 :]
            try:
                assert pixels(damaged).shape == (8, 8, 3)
            except DataError as error:
                assert "\n" not in str(error)


def test_names_are_shown_safely():
    with pytest.raises(DataError, match=r"^a\\x1b\[31m\\n: cannot be decoded") as caught:
        PixelEncoder(8).encode(file_piece("a\x1b[31m\n", b"x"))
    assert str(caught.value).isprintable()
    with pytest.raises(DataError, match=r"^\\\\udcff\?x: "):
        PixelEncoder(8).encode(file_piece("\udcff\0x", b"x"))
