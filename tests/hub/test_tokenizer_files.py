"""The tokenizer of an exported model gives AutoTokenizer the ids of the training; and comes back."""

import json

import pytest
import torch
from safetensors.torch import load_file
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM, BertModel, PreTrainedTokenizerFast

from megasparse.cli.main import door
from megasparse.config.schema import Config, DataConfig, RunConfig
from megasparse.data.corpora.pairs import ParallelEncoder
from megasparse.data.tokenizers import build_tokenizer
from megasparse.data.tokenizers.simple import vocabulary_file
from megasparse.errors import ConfigError, HubError
from megasparse.hub.export import to_hf
from megasparse.hub.importing import HFModel, write_start
from megasparse.hub.tokenizer_files import files_with_start, found_tokenizer, of_bytes, of_unigram, tokenizer_files
from megasparse.settings.load import build_config
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.helpers.hub import SEED, decoder, encoder, made, write_model
from tests.helpers.models import small_pair
from tests.helpers.tokenizers import ODD_TEXTS, PROSE, byte_level, random_texts, sentencepiece_model, wordpiece, written

main = door("convert from-hf")

TEXTS = [raw.decode("utf-8", "replace") for raw in [*ODD_TEXTS.values(), *random_texts(100)]]


def tokenizer_file(folder, kind):
    folder.mkdir(parents=True, exist_ok=True)
    if kind in ("unigram", "bpe"):
        (folder / "x.model").write_bytes(sentencepiece_model(kind))
        return folder / "x.model"
    if kind == "words":
        (folder / "x.txt").write_bytes(vocabulary_file([PROSE.encode()]))
        return folder / "x.txt"
    return written(folder, {"wordpiece": wordpiece, "byte-level": byte_level}[kind](), "x.json")


def trained(folder, model, tokenizer):
    """A checkpoint of a made model, whose tokenizer is a file."""
    source = 0 if model.source is None else model.source.length
    data = DataConfig(sequence_length=source + 64, tokenizer=str(tokenizer), path=str(folder))
    config = Config(run=RunConfig(seed=SEED), model=model, data=data)
    return write_model(config, made(model), folder / "run")


def sized(kind, tokenizer):
    return decoder(kind, vocabulary=build_tokenizer(str(tokenizer)).vocabulary)


def exported(folder, file, kind="decoder", mask=256):
    """AutoTokenizer's of a model with the tokenizer of a file."""
    model = {"vocabulary": 10_000, "max_length": 64, "kind": kind}
    model |= {"masking": {"token": mask}} if kind == "encoder" else {}
    config = build_config({"model": model, "data": {"tokenizer": str(file), "sequence_length": 64}})
    out = folder / kind
    out.mkdir()
    for name, content in tokenizer_files(config, 100).items():
        (out / name).write_bytes(content.encode() if isinstance(content, str) else content)
    assert (out / f"tokenizer{file.suffix}").read_bytes() == file.read_bytes()
    return AutoTokenizer.from_pretrained(out)


@pytest.mark.parametrize("kind", ["unigram", "words", "byte-level", "wordpiece"])
def test_a_decoders_tokenizer_gives_the_same_ids(tmp_path, kind):
    file = tokenizer_file(tmp_path, kind)
    ours, theirs = build_tokenizer(str(file)), exported(tmp_path, file)
    points = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x11000), *range(0x1F000, 0x1FB00), 0x10FFFF]))
    texts = [*TEXTS, " a".join(points), "".join(f"x{c}y\n" for c in points[:0x3100])]
    for text in texts if kind in ("unigram", "words") else TEXTS:
        if kind == "wordpiece" and "[" in text:  # BERT's pieces of a name, where it is split, are others
            continue
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ids == ours.encode(text).tolist(), text
        if ours.lossless and text in TEXTS:
            assert theirs.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("kind", ["unigram", "byte-level", "wordpiece"])
def test_special_tokens_of_an_encoder_are_read_by_name(tmp_path, kind):
    file = tokenizer_file(tmp_path, kind)
    special = build_tokenizer(str(file)).special
    theirs = exported(tmp_path, file, "encoder", special.mask)
    names = "<s></s><pad><mask>" if kind == "byte-level" else "[CLS][SEP][PAD][MASK]"
    assert theirs(names, add_special_tokens=False)["input_ids"] == list(special)
    assert (theirs.cls_token_id, theirs.sep_token_id, theirs.pad_token_id, theirs.mask_token_id) == tuple(special)
    assert theirs(["the", "the the"], padding=True)["attention_mask"][0][-1] == 0


def test_every_id_has_a_separate_piece_and_other_models_are_not_written_as_tokenizer_json():
    pieces = [piece for piece, _ in of_unigram(sentencepiece_model())["model"]["vocab"]]
    assert len(set(pieces)) == len(pieces) == 420
    proto = ModelProto()
    proto.ParseFromString(sentencepiece_model())
    assert of_unigram(proto.SerializeToString()) is not None
    for piece in ("of\u2581the", "\nthe"):
        proto.pieces[-1].piece = piece
        assert of_unigram(proto.SerializeToString()) is None
    proto.pieces[-1].piece = "x"
    assert of_unigram(proto.SerializeToString()) is not None
    proto.pieces[-1].score += 0.001  # equally good splittings would be so no more in single precision
    assert of_unigram(proto.SerializeToString()) is None
    proto.pieces[-1].score = -20.0
    proto.pieces[-1].type = ModelProto.SentencePiece.USER_DEFINED
    assert of_unigram(proto.SerializeToString()) is None


@pytest.mark.parametrize("kind", ["unigram", "bpe", "words"])
def test_a_tokenizer_is_exported_with_its_model_and_imported_again(tmp_path, kind):
    file = tokenizer_file(tmp_path, kind)
    ours = build_tokenizer(str(file))
    folder = to_hf(trained(tmp_path, sized("local", file), file), tmp_path / "out")
    assert (folder / f"tokenizer{file.suffix}").read_bytes() == file.read_bytes()
    card = (folder / "README.md").read_text()
    assert f"`tokenizer{file.suffix}`" in card and f"over {ours.name}" in card
    assert str(tmp_path) not in card + (folder / "config.json").read_text()
    has_fast = (folder / "tokenizer.json").exists(), (folder / "tokenizer_config.json").exists()
    assert has_fast == (kind != "bpe", kind != "bpe")
    assert ("tokenizer.json cannot express its" in card) == (kind == "bpe") != ("AutoTokenizer.from" in card)
    if kind != "bpe":
        theirs = PreTrainedTokenizerFast.from_pretrained(folder)
        assert theirs(PROSE)["input_ids"] == ours.encode(PROSE).tolist()
    main(["--model", str(folder), "--output", str(tmp_path / "again")])
    opened = Checkpoint.open(tmp_path / "again" / "checkpoints" / "00000000")
    copy = tmp_path / "again" / f"tokenizer{file.suffix}"
    assert opened.config.data.tokenizer == str(copy) and copy.read_bytes() == file.read_bytes()
    assert opened.manifest["tokenizer"] == {"name": ours.name, "sha256": ours.sha256}


@pytest.mark.parametrize("kind", ["bytes", "unigram", "byte-level", "wordpiece"])
def test_the_tokenizer_of_an_encoder_decoder_encodes_as_the_records_and_is_imported_again(tmp_path, kind):
    file = "bytes" if kind == "bytes" else str(tokenizer_file(tmp_path, kind))
    ours = build_tokenizer(file)
    end, padding = ours.special.separator, ours.special.padding
    vocabulary = max(ours.vocabulary, *(token + 1 for token in ours.special))
    folder = to_hf(trained(tmp_path, small_pair(vocabulary=vocabulary, padding_token=padding), file), tmp_path / "out")
    theirs = AutoTokenizer.from_pretrained(folder)
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.model_max_length) == (end, padding, 40)
    lines = ["the attention of models", "of the models, an attention </s>"]
    record = ParallelEncoder(file, 40, 40).encode("\n".join([*lines, ""]).encode()).tokens.reshape(2, 40)
    made = theirs(lines, padding="max_length", max_length=40)
    assert made["input_ids"] == record.tolist()
    assert made["attention_mask"] == (record != padding).astype(int).tolist()
    cut = theirs(lines[1], truncation=True, max_length=5)["input_ids"]
    assert cut == [*record[1, :4].tolist(), end]
    a, b = (ours.encode(line).tolist() for line in lines)
    assert theirs(*lines)["input_ids"] == [*a, end, *b, end]
    assert theirs.decode(made["input_ids"][0], skip_special_tokens=True) == lines[0]
    card = (folder / "README.md").read_text()
    assert ("`training_tokenizer.json`" in card) == (kind in ("byte-level", "wordpiece"))

    main(["--model", str(folder), "--output", str(tmp_path / "again")])
    opened = Checkpoint.open(tmp_path / "again" / "checkpoints" / "00000000")
    assert opened.manifest["tokenizer"] == {"name": ours.name, "sha256": ours.sha256}
    assert opened.config.data.sequence_length == 40 + 128


def test_pixels_have_no_tokenizer_there(tmp_path):
    folder = to_hf(trained(tmp_path, decoder("local"), "pixels"), tmp_path / "out")
    card = (folder / "README.md").read_text()
    assert not list(folder.glob("tokenizer*")) and "sub-pixel" in card and "AutoTokenizer" not in card
    assert HFModel.open(folder).config.data.tokenizer == "pixels"


@pytest.mark.parametrize("to, room", [("yoso", 257), ("bert", 264)])
def test_byte_encoders_export_their_tokenizer_with_other_architectures(tmp_path, to, room):
    bert = {"style": "bert", "blocks": "ordinary", "activations": "stored", "positions": {"kind": "learned"}}
    model = encoder({"bert": "full"}.get(to, to), tied_embeddings=True, **bert).model_copy(update={"vocabulary": room})
    folder = to_hf(trained(tmp_path, model, "bytes"), tmp_path / "out", to)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs("a[MASK]é")["input_ids"] == [97, 256, *"é".encode()]
    assert theirs.pad_token_id == (257 if room > 257 else None)
    assert HFModel.open(folder).config.data.tokenizer == "bytes"
    assert HFModel.open(folder).config.model.masking.token == 256


def test_a_reformer_takes_its_tokenizer_along(tmp_path):
    file = tokenizer_file(tmp_path, "unigram")
    folder = to_hf(trained(tmp_path, sized("local", file), file), tmp_path / "out", "reformer")
    ours, theirs = build_tokenizer(str(file)), AutoTokenizer.from_pretrained(folder)
    assert theirs("the [MASK]\n")["input_ids"] == [420, *ours.encode("the [MASK]\n").tolist()]


def bert(folder, model_class=BertForMaskedLM, **changes):
    """A BERT of HuggingFace's, with its tokenizer."""
    vocabulary = len(wordpiece()["model"]["vocab"])
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary + 3, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=48, **changes,
    )  # fmt: skip
    model_class(config).save_pretrained(folder)
    return written(folder, wordpiece())


def test_a_bert_comes_in_with_its_tokenizer(tmp_path, capsys):
    file = bert(tmp_path / "bert")
    main(["--model", str(tmp_path / "bert"), "--output", str(tmp_path / "run")])
    assert "logits agree with the converted model's" in capsys.readouterr().err
    config = Checkpoint.open(tmp_path / "run" / "checkpoints" / "00000000").config
    assert config.data.tokenizer == str(tmp_path / "run" / "tokenizer.json")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == file.read_bytes()
    assert config.model.masking.token == 4  # [MASK]
    again = to_hf(tmp_path / "run", tmp_path / "out", "bert")
    text = "The attention of [MASK] models!"
    folders = again, tmp_path / "bert"
    found, expected = (AutoTokenizer.from_pretrained(folder)(text)["input_ids"] for folder in folders)
    assert found == expected and found[0] == 2 and found[-1] == 3


def test_a_bert_without_its_head_is_one_to_start_from(tmp_path):
    bert(tmp_path / "bert", BertModel)
    found = HFModel.open(tmp_path / "bert")
    with pytest.raises(HubError, match=r"contains no head\.norm_weight.*--start FOLDER"):
        found.build()
    attention = found.config.model.attention.model_copy(update={"pattern": ["yoso"]})
    model = found.config.model.model_copy(update={"attention": attention})
    config = found.config.model_copy(update={"model": model})
    new, _ = write_start(config, tmp_path / "bert", tmp_path / "run")
    assert {name.split(".")[0] for name in new} == {"head"}
    began = Checkpoint.open(tmp_path / "run" / "checkpoints" / "00000000")
    theirs = load_file(tmp_path / "bert" / "model.safetensors")
    for ours, name in (
        ("embedding.weight", "embeddings.word_embeddings.weight"),
        ("blocks.1.attention.attention.key.weight", "encoder.layer.1.attention.self.key.weight"),
    ):
        assert torch.equal(began.tensor("weight", ours), theirs[name])
    other = config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": "bytes"})})
    with pytest.raises(HubError, match="its tokenizer"):
        write_start(other, tmp_path / "bert", tmp_path / "other")


def test_a_bert_without_a_sound_tokenizer_is_rejected(tmp_path):
    file = bert(tmp_path / "bert")
    values = wordpiece()
    values["model"]["vocab"] |= {f"more{i}": len(values["model"]["vocab"]) + i for i in range(4)}
    for content, problem in (
        (json.dumps(values), r"tokenizer.json contains the token \d+, but the model only \d+ tokens"),
        ("{", "is no usable tokenizer.json"),
        (None, r"tokenizer\.json: is missing"),
    ):
        file.write_text(content) if content is not None else file.unlink()
        with pytest.raises(Exception, match=problem) as error:
            HFModel.open(tmp_path / "bert")
        assert "\n" not in str(error.value)
    written(tmp_path / "bert", of_bytes({}))
    with pytest.raises(ConfigError, match=r"model\.vocabulary: 95 is too small for bytes"):
        HFModel.open(tmp_path / "bert")


def test_a_tokenizer_that_is_not_there_or_another_is_rejected(tmp_path):
    file = tokenizer_file(tmp_path, "words")
    path = trained(tmp_path, sized("local", file), file)
    folder = to_hf(path, tmp_path / "out")
    (folder / "tokenizer.txt").unlink()
    with pytest.raises(HubError, match=r"the tokenizer 'tokenizer.txt' of its config.json is missing"):
        HFModel.open(folder)
    for name in ("../x.txt", str(file), "", "..", "x" * 5000):
        with pytest.raises(HubError, match=r"of its config.json is missing"):
            found_tokenizer(folder, name)
    file.write_text("<unk>\n<eos>\n")
    with pytest.raises(HubError, match="is not the tokenizer that the model was trained with"):
        to_hf(path, tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("token", [256, 300])
def test_a_start_token_keeps_its_id(tmp_path, token):
    """Also where ids below it have no name: HuggingFace numbers added tokens one after another."""
    config = build_config({"model": {"vocabulary": 300, "max_length": 64}, "data": {"sequence_length": 64}})
    for name, content in files_with_start(tokenizer_files(config, 64), token, "[BOS]").items():
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert theirs.bos_token_id == theirs.pad_token_id == token
    assert theirs("aß")["input_ids"] == [token, 97, 0xC3, 0x9F]
