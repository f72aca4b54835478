import pytest
import torch

from megasparse.errors import DataError
from megasparse.model.build import build_model
from megasparse.model.initial_embeddings import initialise_from_glove, pca, read_glove
from megasparse.ops.random import RngContext
from tests.helpers.models import random_tokens, small


def glove_file(path, vectors):
    lines = [" ".join([word, *(f"{x:.5f}" for x in vector)]) for word, vector in vectors.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_words_are_found_by_their_last_numbers(tmp_path):
    """Words may hold spaces (as in the file of 840 billion tokens), digits and any letters."""
    vectors = {"the": [1.0, -2.0, 0.5], ". . .": [3.0, 4.0, 5.0], "7": [7.0, 7.0, 7.0], "café": [0.0, -1.0, 2.0]}
    path = glove_file(tmp_path / "glove.txt", vectors)
    matrix, found = read_glove(path, ["café", "missing", ". . .", "the", "7", "café"], 3)
    assert found.tolist() == [True, False, True, True, True, True]
    assert matrix.tolist() == [vectors["café"], [0.0] * 3, vectors[". . ."], vectors["the"], [7.0] * 3, vectors["café"]]


@pytest.mark.parametrize(
    "text,problem",
    [
        ("the 1 2\nof 3 4\n", "line 1 has 2 numbers after the word, but d_model is 3"),
        ("the 1 2 3 4\n", "line 1 has 4 numbers after the word, but d_model is 3"),
        ("400000 3\nthe 1 2 3\n", "line 1 has 1 numbers"),
        ("the 1 2 3\nof 4 5\n", "line 2 has 2 numbers"),
        ("a 1 2 3\nthe 1 x 3\n", 'line 2: "x" is not a finite number'),
        ("a 1 2 3\nb 1 2 3\nthe 1 nan 3\n", 'line 3: "nan" is not'),
        ("the 1 2 1e999\n", 'line 1: "1e999" is not'),
        ("a 1 2 3\n", "none of the 1 words"),
        ("", "none of the 1 words"),
        ("the 1 2 3\n\ufffd 1 2 3\n".encode().replace("\ufffd".encode(), b"\xff"), "line 2 is not UTF-8"),
        ("x" * (1 << 20), "line 1 is longer than 1 MiB"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, text, problem):
    path = tmp_path / "glove.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match="glove") as error:
        read_glove(path, ["the"], 3)
    assert problem in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match="there is no such file"):
        read_glove(tmp_path / "nowhere.txt", ["the"], 3)


def test_pca_finds_the_directions_of_the_largest_variance():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    scale = torch.tensor([9.0, 5.0, 2.0, 0.1, 0.1, 0.1], dtype=torch.float64)
    points = torch.randn(2000, 6, generator=generator, dtype=torch.float64) * scale @ basis.T + 100.0
    found = pca(points, 3)
    torch.testing.assert_close(found.T @ found, torch.eye(3, dtype=torch.float64))
    assert ((found * basis[:, :3]).sum(0).abs() > 0.999).all()
    assert (found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all()
    torch.testing.assert_close(pca(points.flip(0), 3), found)
    _, _, directions = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    torch.testing.assert_close(found.abs(), directions[:3].T.abs())


def test_a_model_starts_from_the_file(tmp_path):
    words = [f"w{i}" for i in range(256)]
    generator = torch.Generator().manual_seed(0)
    vectors = 0.4 * torch.randn(200, 32, generator=generator)
    path = glove_file(tmp_path / "glove.txt", dict(zip(words, vectors.tolist(), strict=False)))
    model = build_model(small(("smart_bird", "local")), seed=0)
    own = model.embedding.weight[200:].clone()
    assert initialise_from_glove(model, path, words) == 200
    weight = model.embedding.weight.detach()
    torch.testing.assert_close(weight[:200], vectors, rtol=0, atol=1e-5)
    torch.testing.assert_close(weight[200:], 0.4 * own, rtol=0.1, atol=0)
    projection = pca(weight[:200], 4).T.float()
    sketches = [block.attention.attention.mechanism("smart_bird") for block in (model.layers[0], model.layers[2])]
    for sketch in sketches:
        for part in (sketch.query, sketch.key, sketch.value):
            torch.testing.assert_close(part.weight.detach(), projection, rtol=1e-4, atol=1e-4)
    objective, _ = model(random_tokens(2, 30), RngContext(0, 0, torch.arange(2), training=True))
    assert objective.isfinite()
