"""Labels: token ids against transformers' tokenizer, truncation, counts and errors; losses, pooling and dropout of the
model. B batch, L length, E width, C classes."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, BertModel, GPT2Config, GPT2Model

from megasparse.config.finetuning import FinetuneConfig, HeadConfig, TaskConfig
from megasparse.data.tokenizers import build_tokenizer
from megasparse.errors import ConfigError, DataError
from megasparse.hub.replace import mechanisms, replace_attention
from megasparse.ops.random import EVALUATION_STEP, RngContext
from megasparse.tasks.batches import EncodedExample, Padded, Segments, collate
from megasparse.tasks.body import Backbone, HuggingFaceBody
from megasparse.tasks.form import Head, LabelForm, TaskModel, dropped
from megasparse.tasks.task import Example, SourceLocation, Task
from tests.helpers.cases import together
from tests.helpers.finetuning import bert, bert_tokenizer, our_body, write_tokenizer
from tests.helpers.tokenizers import byte_level, written

TEXTS = ["The attention of a model", "Unable!", "we go to it [MASK] [SEP]", "it's" + " the models" * 12]


class Made(Task):
    name = "made"
    metrics = ("accuracy",)
    classes = ("no", "yes")

    def files(self, folder: Path) -> dict[str, list[Path]]:
        return {}

    def read(self, file: Path) -> Iterator[Example]:
        raise NotImplementedError


class Towers(Made):
    towers = True


def encoder(tokenizer: str | None, kind: type[Task] = Made, vocabulary: int = 1000, separators: int = 1,
            **settings: object) -> LabelForm:  # fmt: skip
    task = kind(TaskConfig.model_validate({"max_length": 40, **settings}))
    task.vocabulary = vocabulary if tokenizer is None else None
    form, body = LabelForm(task, FinetuneConfig()), SimpleNamespace(vocabulary=vocabulary, separators=separators)
    form.prepare(body, build_tokenizer(tokenizer or "bytes"))  # type: ignore[arg-type]
    return form


def examples(*inputs: tuple[object, ...]) -> list[Example]:
    return [Example(given, i % 2, SourceLocation(Path("made.tsv"), i + 5), str(i)) for i, given in enumerate(inputs)]  # type: ignore[arg-type]


def only(examples: Iterator[EncodedExample]) -> Segments:
    (each,) = examples
    (sequence,) = each.sequences
    return sequence


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path, bert_tokenizer())
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    return tmp_path


@pytest.mark.parametrize("limit", [*range(5, 16), 40, 100])
def test_encoded_texts_and_pairs_equal_transformers(folder, limit):
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = encoder(str(folder / "tokenizer.json"), max_length=limit)
    texts = [text for text in TEXTS if "[" not in text]  # there a text can name a special token
    for given in [*((text,) for text in texts), *itertools.product(texts, texts)]:
        expected = theirs(*given, truncation=True, max_length=limit, return_token_type_ids=True)
        result = only(ours.encode(examples(given)))
        assert result.tokens.tolist() == expected["input_ids"], given
        assert result.types.tolist() == expected["token_type_ids"]
        assert result.tokens.dtype == result.types.dtype == np.int64


def test_robertas_pairs_have_two_separators(tmp_path):
    values = byte_level()
    special = {"pad_token": "<pad>", "unk_token": "<unk>", "cls_token": "<s>", "sep_token": "</s>"}
    written(tmp_path, values)
    written(tmp_path, {"tokenizer_class": "PreTrainedTokenizerFast", **special}, "tokenizer_config.json")
    (tmp_path / "config.json").write_text('{"model_type": "roberta"}')
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    ours = encoder(str(tmp_path / "tokenizer.json"), separators=2)
    for given in (("the other",), ("the other", "then, one"), ("the" * 30, "a b c d e f g")):
        expected = theirs(*given, truncation=True, max_length=40)["input_ids"]
        assert only(ours.encode(examples(given))).tokens.tolist() == expected
    assert expected.count(2) == 3


def test_bytes_with_room_for_special_tokens():
    special = build_tokenizer("bytes").special
    assert special is not None
    result = only(encoder("bytes", vocabulary=264).encode(examples(("ab", "c"))))
    assert result.tokens.tolist() == [special.begin, 97, 98, special.separator, 99, special.separator]
    assert result.types.tolist() == [0, 0, 0, 0, 1, 1]


def test_ids_get_no_special_tokens():
    ids = np.array([3, 1, 4, 1], dtype=np.int64)
    assert only(encoder(None).encode(examples((ids,)))).tokens.tolist() == [3, 1, 4, 1]
    (result,) = encoder(None, Towers).encode(examples((ids, ids[:2])))
    assert [each.tokens.tolist() for each in result.sequences] == [[3, 1, 4, 1], [3, 1]]
    assert all(not each.types.any() for each in result.sequences)


@together("kind", [Made, Towers])
@together("given", [("", "b"), ("a", "")])
def test_an_empty_input_is_rejected_where_it_stands(kind, given):
    with pytest.raises(DataError, match=r"^made\.tsv:6: empty.*task\.empty=\"keep\"$"):
        list(encoder("bytes", kind).encode(examples(("a", "b"), given)))


def test_empty_inputs_are_kept_and_counted():
    ours = encoder("bytes", empty="keep", vocabulary=264)
    assert [len(example.sequences[0].tokens) for example in ours.encode(examples(("a",), ("",), ("",)))] == [3, 2, 2]
    assert ours.counts.empty == 2 and str(ours.counts.first_empty) == "made.tsv:6"
    assert ours.lines("training")[-1] == "training: 2 inputs are empty, the first in made.tsv:6"


def test_too_long_an_input_is_rejected_where_it_stands():
    ours = encoder("bytes", too_long="refuse", vocabulary=264, max_length=6)
    with pytest.raises(DataError, match=r"^made\.tsv:6: 7 tokens are more than task\.max_length = 6\. .*too_long"):
        list(ours.encode(examples(("abcd",), ("abcde",))))


def test_truncated_texts_are_counted_and_printed():
    ours = encoder("bytes", vocabulary=264, max_length=6)
    result = list(ours.encode(examples(("abcd",), ("abcdefgh",), ("ab", "cdef"), ("x",))))
    assert [len(example.sequences[0].tokens) for example in result] == [6, 6, 6, 3]
    assert (ours.counts.examples, ours.counts.cut, ours.counts.longest) == (4, 2, 10)
    said = ours.lines("training")
    assert said[0] == "training: 4 examples, the longest of 10 tokens; no: 2, yes: 2"
    assert said[1].startswith("training: 2 inputs of more than 6 tokens are truncated to their start")
    assert "made.tsv:6" in said[1] and "task.max_length" in said[1] and len(said) == 2


def test_a_limit_without_room_for_any_text_is_rejected():
    for limit in (1, 3, 4):
        with pytest.raises(ConfigError, match=rf"^task\.max_length: {limit} leaves no space for text next to 3 spe"):
            list(encoder("bytes", vocabulary=264, max_length=limit).encode(examples(("ab", "cd"))))


LENGTHS = (30, 7, 1, 18, 44)
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "lsh": {"chunk": 8, "rounds": 2},
    "lha": {"chunk": 8},
    "yoso": {"hashes": 8, "code_bits": 4},
    "smart_bird": {"keys": 6},
}


class Slow(Backbone):
    """States depend only on the token; padding is NaN."""

    width, vocabulary, longest = 6, 256, 64

    def __init__(self, causal: bool = False):
        super().__init__()
        self.causal = causal
        self.table = torch.nn.Embedding(256, self.width)
        self.seen: list[Tensor | None] = []

    def forward(self, read: Padded, rng: RngContext, classes: Tensor | None) -> tuple[Tensor, Tensor]:
        self.seen.append(classes)
        real = torch.arange(read.tokens.shape[1]) < read.lengths.unsqueeze(1)
        states = torch.where(real.unsqueeze(-1), self.table(read.tokens), torch.nan)
        return states, torch.tensor(0.25)

    def attention(self) -> None:
        return None


def encoded(number: int, length: int, label: int | float | None = 0, towers: int = 1) -> EncodedExample:
    generator = np.random.default_rng(number)
    sequences = []
    for tower in range(towers):
        ids = generator.integers(5, 60, length + 3 * tower)
        sequences.append(Segments(ids, (np.arange(len(ids)) > len(ids) // 2).astype(np.int64)))
    return EncodedExample(tuple(sequences), label, SourceLocation(Path("made"), number + 1), str(number))


def evaluation(*samples: int) -> RngContext:
    return RngContext(3, EVALUATION_STEP, torch.tensor(samples), training=False)


def training(*samples: int, step: int = 1) -> RngContext:
    return RngContext(3, step, torch.tensor(samples), training=True)


def model_of(body: Backbone, outputs: int = 3, towers: bool = False, **head: Any) -> TaskModel:
    model = TaskModel(body, outputs, HeadConfig(**head), towers, seed=1)
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    return model.eval()


@pytest.mark.parametrize("pooling", ["first", "mean", "last"])
def test_pooling_against_slow_loops(pooling):
    model = model_of(Slow(), pooling=pooling)
    inputs = collate([encoded(i, length) for i, length in enumerate(LENGTHS)], 64)
    (read,), (states, _) = inputs.sequences, model.body(inputs.sequences[0], evaluation(*range(5)), None)
    result = model._pool(states, read)
    for row, length in enumerate(LENGTHS):
        real = [states[row, place] for place in range(length)]
        expected = {"first": real[0], "last": real[-1], "mean": sum(real[1:], real[0]) / length}[pooling]
        assert (result[row] - expected).abs().max() < 1e-6


def test_classes_are_learned_by_cross_entropy():
    model, labels = model_of(Slow()), [0, 2, 1, 2, 0]
    inputs = collate([encoded(i, 5 + i, label) for i, label in enumerate(labels)], 64)
    objective, result = model(inputs, evaluation(*range(5)))
    each = [-torch.log_softmax(row.double(), 0)[label] for row, label in zip(result["predicted"], labels, strict=True)]
    assert result["predicted"].shape == (5, 3) and result["predicted"].dtype == torch.float32
    assert objective.item() == pytest.approx(sum(each).item() / 5 + 0.25, rel=1e-6)  # type: ignore[union-attr]
    assert result["nats"].item() == pytest.approx(sum(each).item(), rel=1e-6)  # type: ignore[union-attr]
    right = sum(int(row.argmax()) == label for row, label in zip(result["predicted"], labels, strict=True))
    assert result["tokens"] == 5 and result["accuracy"].item() == pytest.approx(right / 5)


def test_numbers_are_learned_by_squared_error():
    model, labels = model_of(Slow(), outputs=1), [0.5, -2.0, 3.25]
    inputs = collate([encoded(i, 5 + i, label) for i, label in enumerate(labels)], 64)
    objective, result = model(inputs, evaluation(0, 1, 2))
    squares = ((result["predicted"][:, 0] - torch.tensor(labels)) ** 2).tolist()
    assert objective.item() == pytest.approx(sum(squares) / 3 + 0.25, rel=1e-5)
    assert result["nats"].item() == pytest.approx(sum(squares), rel=1e-5) and "accuracy" not in result


def test_mechanisms_get_classes_only_in_training():
    body = Slow()
    inputs = collate([encoded(0, 5, 1), encoded(1, 9, 0)], 64)
    model = model_of(body)
    model(inputs, evaluation(0, 1))
    result = model(inputs, training(0, 1))[1]
    model_of(body, outputs=1)(collate([encoded(0, 5, 1.5)], 64), training(0))
    assert body.seen[0] is None and body.seen[1] is not None and body.seen[1].tolist() == [1, 0]
    assert body.seen[2] is None and "predicted" not in result


def test_a_head_equals_its_definition():
    head = Head(6, 3, HeadConfig(hidden=5), towers=False, seed=1)
    x = torch.randn(4, 6)
    expected = torch.tanh(x @ head.dense.weight.T + head.dense.bias) @ head.output.weight.T + head.output.bias
    assert torch.allclose(head([x], evaluation(*range(4))), expected, atol=1e-6)
    assert head.dense.weight.shape == (5, 6) and Head(6, 3, HeadConfig(), False, 1).dense.weight.shape == (6, 6)
    assert 0.01 < head.dense.weight.std() < 0.03 and not head.dense.bias.any()
    head, (u, v) = Head(6, 2, HeadConfig(), towers=True, seed=1), torch.randn(2, 4, 6)
    expected = head.output(torch.tanh(head.dense(torch.cat([u, v, u * v, u - v], dim=1))))
    assert torch.allclose(head([u, v], evaluation(*range(4))), expected, atol=1e-6)


def test_dropout_of_a_head_is_an_examples_own():
    x = torch.ones(2, 1, 400)
    kept = dropped(x, 0.5, training(7, 8), "head dropout")
    assert set(kept.unique().tolist()) == {0.0, 2.0} and 150 < (kept[0] > 0).sum() < 250
    swapped = dropped(x, 0.5, training(8, 7), "head dropout")
    assert torch.equal(swapped.flip(0), kept) and not torch.equal(kept[0], kept[1])
    assert not torch.equal(dropped(x, 0.5, training(7, 8, step=2), "head dropout"), kept)
    assert torch.equal(dropped(x, 0.5, evaluation(7, 8), "head dropout"), x)


def test_a_pooler_reads_states_before_dropout():
    for pooling, touched in (("pooler", False), ("first", True)):
        head = Head(400, 3, HeadConfig(dropout=0.5, pooling=pooling), False, seed=1)
        seen: list[Tensor] = []
        head.dense.register_forward_pre_hook(lambda module, given, seen=seen: seen.append(given[0]))
        head([torch.ones(2, 400)], training(7, 8))
        assert bool((seen[0] == 0).any()) == touched


def test_dropout_of_transformers_is_the_steps_own(tmp_path):
    body = HuggingFaceBody(BertModel.from_pretrained(bert(tmp_path / "bert")), False, 64).train()
    (read,) = collate([encoded(0, 20), encoded(1, 9)], 64).sequences
    state = torch.get_rng_state()
    first = body(read, training(4, 5), None)[0]
    torch.manual_seed(99)
    again, later = body(read, training(4, 5), None)[0], body(read, training(4, 5, step=2), None)[0]
    others = body(read, training(4, 6), None)[0]
    assert torch.equal(first, again) and not torch.equal(first, later) and not torch.equal(first, others)
    torch.set_rng_state(state)
    body(read, training(4, 5), None)
    assert torch.equal(torch.get_rng_state(), state)


def body_of(kind: str, where: str, folder: Path) -> Backbone:
    if where == "ours":
        sketch = {"objective": "pooled", "labels": 3} if kind == "smart_bird" else {}
        return our_body(attention={"pattern": [kind], kind: {**KINDS[kind], **sketch}}, dropout=0.0)
    model = BertModel.from_pretrained(bert(folder / "bert"))
    model.pooler = None
    if where == "replaced":
        replace_attention(model, {"kind": kind, **KINDS[kind]}, max_length=64, seed=3)
        with torch.no_grad():
            for mechanism in mechanisms(model):
                for parameter in mechanism.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(4))
    return HuggingFaceBody(model, False, 64)


@pytest.mark.parametrize(
    ("kind", "where"), [*((kind, where) for where in ("ours", "replaced") for kind in KINDS), ("full", "kept")]
)
def test_a_prediction_depends_only_on_its_example(kind, where, tmp_path):
    model = model_of(body_of(kind, where, tmp_path))
    examples = [encoded(i, length, i % 3) for i, length in enumerate(LENGTHS)]
    alone = torch.cat([model(collate([each], 64), evaluation(i))[1]["predicted"] for i, each in enumerate(examples)])
    assert alone.std(0).min() > 1e-3
    for order in ([0, 1, 2, 3, 4], [4, 2, 0], [3, 1], [2, 2]):
        predicted = model(collate([examples[i] for i in order], 64), evaluation(*order))[1]["predicted"]
        assert (predicted - alone[order]).abs().max() < 1e-5
    predicted = model(collate([examples[i] for i in (1, 3)], 64), evaluation(70, 71))[1]["predicted"]
    assert (predicted - alone[[1, 3]]).abs().max() < 1e-5


@pytest.mark.parametrize("where", ["reversible", "transformers"])
def test_a_decoders_last_state_does_not_depend_on_padding(where):
    body: Backbone
    if where == "transformers":
        torch.manual_seed(0)
        gpt = GPT2Model(GPT2Config(vocab_size=64, n_positions=64, n_embd=32, n_layer=2, n_head=4))
        body = HuggingFaceBody(gpt.eval(), True, 64)
    else:
        body = our_body(kind="decoder", blocks="reversible", activations="reversible", dropout=0.0,
                        attention={"pattern": ["lsh", "full"], "lsh": {"chunk": 8}})  # fmt: skip
    model = model_of(body)
    assert model.pooling == "last"
    examples = [encoded(i, length) for i, length in enumerate(LENGTHS)]
    inputs = collate(examples, 64)
    predicted = model(inputs, evaluation(*range(5)))[1]["predicted"]
    states = body(inputs.sequences[0], evaluation(*range(5)), None)[0]
    for row, (each, length) in enumerate(zip(examples, LENGTHS, strict=True)):
        ids = torch.from_numpy(each.sequences[0].tokens).unsqueeze(0)
        separate = body(Padded(ids, torch.zeros_like(ids), torch.tensor([length])), evaluation(row), None)[0]
        assert separate.shape == (1, length, body.width) and (states[row, :length] - separate[0]).abs().max() < 1e-5
        assert (predicted[row] - model.head([separate[:, -1]], evaluation(row))[0]).abs().max() < 1e-5


def test_towers_read_each_text_apart():
    model = model_of(our_body(dropout=0.0), outputs=2, towers=True)
    examples = [encoded(i, length, 0, towers=2) for i, length in enumerate((20, 9, 14))]
    predicted = model(collate(examples, 64), evaluation(0, 1, 2))[1]["predicted"]
    for row, each in enumerate(examples):
        pooled = []
        for sequence in each.sequences:
            ids = torch.from_numpy(sequence.tokens).unsqueeze(0)
            read = Padded(ids, torch.zeros_like(ids), torch.tensor([ids.shape[1]]))
            pooled.append(model.body(read, evaluation(row), None)[0].mean(1))
        assert (predicted[row] - model.head(pooled, evaluation(row))[0]).abs().max() < 1e-5
