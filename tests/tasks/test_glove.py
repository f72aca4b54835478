"""Embeddings out of GloVe files of any width, and Smart Bird's sketches out of their principal components."""

import pytest
import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.tokenizer import words_of
from megasparse.errors import ConfigError, DataError
from megasparse.model.build import build_model
from megasparse.settings.checks import check
from megasparse.tasks.glove import initialise_from_glove, pca, read_glove
from megasparse.tasks.start import open_start
from tests.helpers.cases import together
from tests.helpers.commands import refusal
from tests.helpers.finetuning import bert_tokenizer, form_for
from tests.helpers.models import attention, small
from tests.helpers.tokenizers import written


def glove_file(path, vectors):
    lines = [" ".join([word, *(f"{x:.5f}" for x in vector)]) for word, vector in vectors.items()]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_words_are_found_by_their_last_numbers(tmp_path):
    """Words may hold spaces (as in the file of 840 billion tokens), digits and any letters."""
    vectors = {"the": [1.0, -2.0, 0.5], ". . .": [3.0, 4.0, 5.0], "7": [7.0, 7.0, 7.0], "café": [0.0, -1.0, 2.0]}
    path = glove_file(tmp_path / "glove.txt", vectors)
    matrix, found = read_glove(path, ["café", "missing", ". . .", "the", "7", "café", ""])
    assert found.tolist() == [True, False, True, True, True, True, False]
    expected = [vectors["café"], [0.0] * 3, vectors[". . ."], vectors["the"], [7.0] * 3, vectors["café"], [0.0] * 3]
    assert matrix.tolist() == expected


@together(
    "text,problem",
    [
        ("the 1 2 3\nof 4 5\n", ":2: 2 numbers after the word, but 3 in the first line"),
        ("400000 3\nthe 1 2 3\n", "none of the 1 words is in it"),
        ("a 1 2 3\nthe 1 x 3\n", ':2: "x" is not a finite number'),
        ("a 1 2 3\nb 1 2 3\nthe 1 nan 3\n", ':3: "nan" is not'),
        ("a 1 2 3\n", "none of the 1 words"),
        ("", "none of the 1 words"),
        ("the\n", ":1: 0 numbers after the word"),
        ("the 1 2 3\n\ufffd 1 2 3\n".encode().replace("\ufffd".encode(), b"\xff"), ":2: not UTF-8"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(tmp_path, text, problem):
    path = tmp_path / "glove.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(DataError, match="glove") as error:
        read_glove(path, ["the"])
    assert problem in str(error.value)


def test_pca_finds_the_directions_of_the_largest_variance():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    scale = torch.tensor([9.0, 5.0, 2.0, 0.1, 0.1, 0.1], dtype=torch.float64)
    points = torch.randn(2000, 6, generator=generator, dtype=torch.float64) * scale @ basis.T + 100.0
    found = pca(points, 3)
    _, _, directions = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    torch.testing.assert_close(found.abs(), directions[:3].T.abs())
    assert (found.gather(0, found.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("width", [20, 32, 50])
def test_a_model_starts_from_vectors_of_any_width(tmp_path, width):
    words = [f"w{i}" for i in range(256)]
    vectors = 0.4 * torch.randn(200, width, generator=torch.Generator().manual_seed(0))
    path = glove_file(tmp_path / "glove.txt", dict(zip(words, vectors.tolist(), strict=False)))
    for sketch in ("attention", "transformer"):
        section = attention("smart_bird", "local", smart_bird={"sketch": sketch})
        model = build_model(small(attention=section), seed=0)
        own = model.embedding.weight[200:].clone()
        assert initialise_from_glove(model, path, words) == 200
        weight = model.embedding.weight.detach()
        expected = vectors.double()
        if width > 32:  # principal components: the best approximation of 32 numbers
            centred = expected - expected.mean(0)
            u, s, _ = torch.linalg.svd(centred, full_matrices=False)
            best = (u[:, :32] * s[:32]) @ (u[:, :32] * s[:32]).T
            mine = weight[:200].double() - weight[:200].double().mean(0)
            torch.testing.assert_close(mine @ mine.T, best, rtol=1e-3, atol=1e-3)
        else:
            torch.testing.assert_close(weight[:200, :width].double(), expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(weight[200:], weight[:200, :width].std() * own, rtol=0.1, atol=0)
        for layer in (0, 2):
            sketch_of = model.layers[layer].attention.attention.mechanism("smart_bird")
            if sketch == "attention":
                table = torch.nn.functional.pad(expected, (0, 32 - width)) if width < 32 else weight[:200].double()
                for part in (sketch_of.query, sketch_of.key, sketch_of.value):
                    torch.testing.assert_close(part.weight.double(), pca(table, 4).T, rtol=1e-3, atol=1e-3)
            else:
                projected = expected @ pca(expected, 4)
                torch.testing.assert_close(sketch_of.embedding.weight[:200].double(), projected, rtol=1e-3, atol=1e-3)


def test_the_words_of_a_run_come_from_its_tokenizer_by_one_key(tmp_path):
    file = tmp_path / "words.txt"
    file.write_text("<unk>\n<eos>\nfilm\nbad\ngood\n")
    path = glove_file(tmp_path / "glove.txt", {"film": [1.0, 2.0], "bad": [3.0, 4.0], "other": [5.0, 5.0]})
    model = {"kind": "encoder", "vocabulary": 8, "d_model": 8, "heads": 2, "layers": 1, "blocks": "ordinary"}
    model |= {"activations": "stored", "max_length": 64, "attention": {"pattern": ["full"]}}
    task = {"name": "sentence_polarity", "max_length": 64, "tokenizer": str(file)}
    config = FinetuneConfig(model=model, task=task, start={"glove": str(path)})
    weight = open_start(config, form_for(config), 2).body.stack.embedding.weight
    assert weight[2:4, :2].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    pretrained = FinetuneConfig(start={"huggingface": "models/bert", "glove": "glove.txt"})
    assert refusal(lambda: check(pretrained), ConfigError).startswith('start.glove: "glove.txt", but the embeddings')


def test_continuation_pieces_have_no_vector(tmp_path):
    written(tmp_path, bert_tokenizer())
    tokenizer = build_tokenizer(str(tmp_path / "tokenizer.json"))
    words, begins = words_of(tokenizer), tokenizer.word_starts()
    assert len(words) == tokenizer.vocabulary and not any(w.startswith("##") for w in words)
    assert all(not word for word, begin in zip(words, begins.tolist(), strict=False) if not begin)
    assert words[tokenizer.special.mask] == "" and any(words)
