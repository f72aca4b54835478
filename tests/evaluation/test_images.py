"""Images drawn and completed by a synthetic model, their files and sheets, and mistakes."""

import io
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from megasparse.config.schema import Config
from megasparse.errors import ConfigError, DataError
from megasparse.evaluation import held_out, images
from megasparse.evaluation.generate import Sampling
from megasparse.evaluation.held_out import sampler
from megasparse.evaluation.images import (
    BACKGROUND,
    GAP,
    HEADING,
    Shape,
    complete_images,
    draw_images,
    image_shape,
    open_output,
    picture_of,
    png_bits_per_dim,
    png_size,
    read_picture,
    shape_of,
)
from megasparse.training.ranks import Ranks, StopWanted
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.scoring import Stream

RGB = Shape(4, 3)
ODD = Shape(3, 1)
GREEDY = Sampling(temperature=0.0)


class Counter(torch.nn.Module):
    """The likeliest sub-pixel is 5 more than the one before; the first one is 0."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def new_cache(self, batch, seed):
        return SimpleNamespace(batch=batch)

    def prefill(self, tokens, cache):
        assert len(tokens) == cache.batch
        last = tokens[:, -1] if tokens.shape[1] else torch.full((len(tokens),), -5)
        return self.decode(last, cache)

    def decode(self, token, cache):
        return 50.0 * torch.nn.functional.one_hot((token + 5) % 256, 300)


def opened(path) -> np.ndarray:
    with Image.open(path) as image:
        assert image.format == "PNG"
        return np.asarray(image)


def saved(path, values) -> str:
    Image.fromarray(np.asarray(values, dtype=np.uint8)).save(path)
    return str(path)


@together(
    ("tokens", "shape"), [(12288, (64, 3)), (3072, (32, 3)), (784, (28, 1)), (3, (1, 3)), (1, (1, 1)), (27, (3, 3))]
)
def test_the_shape_follows_from_the_number_of_tokens(tokens, shape):
    assert image_shape(tokens) == shape
    assert image_shape(tokens).tokens == tokens


@pytest.mark.parametrize("tokens", [2, 100_000, 12287, 6])
def test_other_lengths_are_not_images(tokens):
    refusal(lambda: image_shape(tokens), ConfigError, rf"data.sequence_length: {tokens} is neither 3·s² nor s²")


def test_sub_pixels_are_drawn_in_order_and_the_rest_is_black():
    picture = picture_of(list(range(1, 20)), RGB)
    assert picture.shape == (4, 4, 3) and picture.dtype == np.uint8
    for i in range(48):
        row, column, channel = i // 12, i // 3 % 4, i % 3
        assert picture[row, column, channel] == (i + 1 if i < 19 else 0)
    grey = picture_of([9, 8], ODD)
    assert grey[0, 0].tolist() == [9, 9, 9] and grey[0, 1].tolist() == [8, 8, 8] and not grey[1:].any()


@pytest.mark.parametrize("at_once", [2, 16])
def test_each_image_is_a_file_and_all_are_on_the_sheet(tmp_path, monkeypatch, at_once, capsys):
    monkeypatch.setattr(images, "AT_ONCE", at_once)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)  # where the progress is shown
    draw_images(Counter(), RGB, 3, 0, GREEDY, str(tmp_path / "new" / "out"))
    out = tmp_path / "new" / "out"
    assert sorted(path.name for path in out.iterdir()) == ["0000.png", "0001.png", "0002.png", "sheet.png"]
    for number in range(3):
        assert (opened(out / f"{number:04}.png").flatten() == np.arange(48) * 5 % 256).all()
    drawn, cell = opened(out / "sheet.png"), 128 + GAP
    assert drawn.shape == (2 * cell + GAP, 2 * cell + GAP, 3)
    assert (drawn[GAP:cell:32, GAP:cell:32] == opened(out / "0000.png")).all()
    assert (drawn[cell + GAP :, cell + GAP :] == BACKGROUND).all()  # the fourth place
    assert "images 1-" in capsys.readouterr().err


def test_an_image_does_not_depend_on_the_batch_size(tmp_path, monkeypatch):
    for at_once in (2, 16):
        monkeypatch.setattr(images, "AT_ONCE", at_once)
        draw_images(Counter(), RGB, 5, 0, Sampling(temperature=40.0), str(tmp_path / str(at_once)))
    drawn = [(tmp_path / "2" / f"{number:04}.png").read_bytes() for number in range(5)]
    assert len(set(drawn)) == 5
    assert drawn == [(tmp_path / "16" / f"{number:04}.png").read_bytes() for number in range(5)]


def test_the_lower_half_is_drawn_and_the_upper_one_kept(tmp_path):
    originals = np.random.default_rng(0).integers(0, 256, (2, 4, 4, 3))
    files = [saved(tmp_path / f"{name}.png", pixels) for name, pixels in zip("ab", originals, strict=True)]
    complete_images(Counter(), RGB, files, 0, GREEDY, str(tmp_path / "out"))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0000_a.png", "0001_b.png", "sheet.png"]
    for number, name in enumerate("ab"):
        found = opened(tmp_path / "out" / f"{number:04}_{name}.png")
        assert (found[:2] == originals[number, :2]).all()
        assert (found[2:].flatten() == (originals[number, 1, 3, 2] + 5 * np.arange(1, 25)) % 256).all()
    drawn, cell = opened(tmp_path / "out" / "sheet.png"), 128 + GAP
    assert drawn.shape == (HEADING + 2 * cell + GAP, 3 * cell + GAP, 3)
    given = originals[1].copy()
    given[2:] = 0
    for x, picture in enumerate((originals[1], given, found)):
        there = drawn[HEADING + cell + GAP : HEADING + 2 * cell, GAP + x * cell : (x + 1) * cell]
        assert (there == picture.repeat(32, axis=0).repeat(32, axis=1)).all()
    assert (drawn[:HEADING] != BACKGROUND).any()


def test_files_are_read_as_they_are(tmp_path):
    values = np.random.default_rng(1).integers(0, 256, (4, 4, 3))
    assert read_picture(saved(tmp_path / "rgb.png", values), RGB).tolist() == values.flatten().tolist()
    grey = values[:3, :3, 0]
    assert read_picture(saved(tmp_path / "grey.png", grey), ODD).tolist() == grey.flatten().tolist()
    assert read_picture(saved(tmp_path / "grey4.png", values[..., 0]), RGB)[:3].tolist() == [values[0, 0, 0]] * 3


def test_images_that_do_not_fit_are_named_and_nothing_is_made(tmp_path):
    good, wide = np.zeros((4, 4, 3)), np.zeros((4, 6, 3))
    files = [saved(tmp_path / "good.png", good), saved(tmp_path / "wide.png", wide)]
    with pytest.raises(DataError, match=r"wide\.png: .*6×4 pixels.*4×4.*Scale or crop it"):
        complete_images(Counter(), RGB, files, 0, GREEDY, str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "text.png").write_text("no image")
    colours = np.zeros((3, 3, 3))
    colours[0, 0] = 1, 2, 3
    for name, shape, message in (
        ("text.png", RGB, "text.png: cannot be decoded"),
        ("none.png", RGB, "none.png: cannot be read: No such file"),
        (saved(tmp_path / "colours.png", colours), ODD, "colours.png: this image is in colour"),
    ):
        with pytest.raises(DataError, match=message):
            read_picture(tmp_path / name, shape)


def test_an_output_folder_with_files_is_not_changed(tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    refusal(lambda: draw_images(Counter(), RGB, 1, 0, GREEDY, str(tmp_path)), ConfigError, r"--output: .* is not empty")
    assert [path.name for path in tmp_path.iterdir()] == ["kept.txt"]
    refusal(lambda: open_output(None), ConfigError, "--output: it is missing")
    with pytest.raises(ConfigError, match=r"--output: .* cannot be created or read"):
        open_output(str(tmp_path / "kept.txt" / "below"))
    refusal(lambda: draw_images(Counter(), RGB, 0, 0, GREEDY, str(tmp_path / "new")), ConfigError, "--images: 0")


def test_only_decoders_of_pixels_draw():
    with pytest.raises(ConfigError, match=r'--images: this is a decoder of data.tokenizer = "bytes"'):
        shape_of(Config(), "--images")
    assert shape_of(of_pixels(0), "--images") == RGB


def of_pixels(sample_tokens: int) -> Config:
    config = Config()
    data = config.data.model_copy(update={"tokenizer": "pixels", "sequence_length": 48})
    evaluation = config.evaluation.model_copy(update={"sample_tokens": sample_tokens})
    return config.model_copy(update={"data": data, "evaluation": evaluation})


def test_a_stop_request_interrupts_a_sample(monkeypatch):
    monkeypatch.setattr(held_out, "PAUSE", 10)
    pauses: list[int] = []

    def pause() -> None:
        pauses.append(1)
        if len(pauses) == 3:
            raise StopWanted

    with pytest.raises(StopWanted):
        sampler(Counter(), of_pixels(48), Ranks(), pause)()


@together(("tokens", "drawn"), [(20, 20), (48, 48), (100, 48)])
def test_a_sample_is_a_picture_whose_missing_pixels_are_black(tokens, drawn):
    pauses: list[int] = []
    found = sampler(Counter(), of_pixels(tokens), Ranks(), lambda: pauses.append(1))()
    assert isinstance(found, torch.Tensor) and len(pauses) == 1
    assert found.shape == (4, 4, 3) and found.dtype == torch.uint8
    wanted = (torch.arange(48) * 5 % 256).masked_fill(torch.arange(48) >= drawn, 0)
    assert (found.flatten() == wanted).all()  # odds of e^50 to 1


def test_png_bits_equal_all_images_or_of_the_first():
    images = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
    images[0] = 7
    flat, noisy = (8 * png_size(images[i]) / 192 for i in (0, 1))
    assert flat < 3.5 and noisy > 8  # noise cannot be made smaller, and 8×8 pixels do not pay for the chunks
    assert png_bits_per_dim(Stream(images), 192, limit=1) == flat
    assert png_bits_per_dim(Stream(images), 192, limit=9) == png_bits_per_dim(Stream(images), 192)
    assert png_bits_per_dim(Stream(images), 192) == 8 * sum(len_of_file(image) for image in images) / images.size


def len_of_file(image: np.ndarray) -> int:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="png", optimize=True)
    Image.open(io.BytesIO(file.getvalue())).verify()
    return len(file.getvalue())


@pytest.mark.parametrize(("count", "length", "problem"), [(192, 100, "do not divide"), (192, 96, "not form a square")])
def test_png_wants_whole_square_images(count, length, problem):
    with pytest.raises(ConfigError, match=f"data.sequence_length: .*{problem}"):
        png_bits_per_dim(Stream(np.zeros(count, dtype=np.uint8)), length)
