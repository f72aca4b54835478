"""Fine-tuned runs as Hugging Face models: pipelines predict as the run does, and Trainer trains them."""

from functools import partial

import pytest
import torch
import transformers
from transformers import AutoModelForSeq2SeqLM, AutoModelForSequenceClassification, AutoTokenizer

import megasparse
from megasparse.cli.main import main
from megasparse.errors import ConfigError, HubError
from tests.helpers.finetuning import (
    ENCODER,
    FORECASTER,
    TASK,
    WORDS,
    bert,
    launch,
    numbers,
    reviews,
    table,
    write,
)
from tests.helpers.hub import assert_trainer_resumes

DECODER = {**ENCODER, "kind": "decoder", "attention": {"pattern": ["lsh"], "lsh": {"chunk": 8}}}
START = {"attention": {"pattern": ["lha"], "lha": {"chunk": 8}}}
NUMBERS = {"labels": []}
PAIR = {"text": ["a", "b"]}
RUNS = {
    "classes": ("model", {"model": ENCODER}, {}),
    "numbers": ("model", {"model": DECODER}, NUMBERS),
    "pair": ("model", {"model": ENCODER}, PAIR),
    "bert": ("bert", {}, PAIR),
    "replaced": ("bert", {"start": START}, NUMBERS),
    "adapters": ("bert", {"lora": {"targets": ["query"], "rank": 2}, "head": {"pooling": "mean", "hidden": 8}}, {}),
}


def rows(task):
    texts = [" ".join(WORDS[i % 5 : i % 5 + 3 + i % 4]) for i in range(24)]
    labels = [str(i / 10) if "labels" in task else ["bad", "good"][i % 2] for i in range(24)]
    if "text" in task:
        return [(text, other, label) for text, other, label in zip(texts, texts[::-1], labels, strict=True)], ("a", "b")
    return list(zip(texts, labels, strict=True)), ("text",)


def exported(folder, kind, sections, task):
    """Train, export by the command and load. Returns the run, the folder, the model and its tokenizer."""
    examples, columns = rows(task)
    source = table(folder / "rows.csv", examples, (*columns, "label"))
    sections = dict(sections)
    if kind == "bert":
        start = {"huggingface": str(bert(folder / "bert")), **sections.pop("start", {})}
        sections |= {"start": start}
    launch(folder / "run", source, task=task, **sections)
    main(["convert", "to-hf", "--checkpoint", str(folder / "run"), "--output", str(folder / "out")])
    model = AutoModelForSequenceClassification.from_pretrained(folder / "out", trust_remote_code=True)
    return folder / "run", folder / "out", model.eval(), AutoTokenizer.from_pretrained(folder / "out")


@pytest.mark.parametrize("name", RUNS)
def test_a_pipeline_predicts_as_the_run(name, tmp_path):
    kind, sections, task = RUNS[name]
    run, folder, model, tokenizer = exported(tmp_path, kind, sections, task)
    texts = [f"{' '.join(WORDS[:5])} {word}" for word in WORDS]
    inputs = [(text, "we go") for text in texts] if "text" in task else [(text,) for text in texts]
    classifier = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)
    pairs = [dict(zip(("text", "text_pair"), one, strict=False)) for one in inputs]
    found = classifier(pairs, top_k=None, batch_size=4)
    for one, scores in zip(inputs, found, strict=True):
        expected = megasparse.predict(run, *one)
        if "labels" in task:
            assert scores[0]["score"] == pytest.approx(expected["predicted"], abs=1e-5)
        else:
            by_class = {score["label"]: score["score"] for score in scores}
            assert by_class == pytest.approx(expected["probabilities"], abs=1e-5)
    disk = {"device_map": {"": "disk"}, "offload_folder": tmp_path / "disk", "trust_remote_code": True}
    offloaded = AutoModelForSequenceClassification.from_pretrained(folder, **disk)
    tokens = torch.arange(40).view(2, 20) % 11
    assert offloaded(tokens).logits.equal(model(tokens).logits)


def test_trainer_trains_an_export_further_and_saves_it(tmp_path):
    _, _, model, tokenizer = exported(tmp_path, "model", {"model": ENCODER}, {})
    data = [{**tokenizer("a model", truncation=True), "labels": number % 2} for number in range(8)]
    options = {
        "report_to": [],
        "use_cpu": True,
        "max_steps": 2,
        "save_strategy": "no",
        "per_device_train_batch_size": 4,
    }
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path / "trainer"), **options)
    before = model.task.head.output.weight.clone()
    trainer = transformers.Trainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    saved = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert saved.config.id2label == {0: "bad", 1: "good"} and not torch.equal(before, saved.task.head.output.weight)
    tokens = torch.arange(20)[None]
    assert torch.equal(saved.eval()(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.slow
def test_a_resumed_trainer_repeats_the_run_bit_for_bit(tmp_path):
    _, folder, _, tokenizer = exported(tmp_path, "model", {"model": {**ENCODER, **START, "dropout": 0.1}}, {})
    data = [{**tokenizer("a model", truncation=True), "labels": number % 2} for number in range(8)]
    load = partial(AutoModelForSequenceClassification.from_pretrained, folder, trust_remote_code=True)
    assert_trainer_resumes(load, data, tmp_path)


def test_an_exported_text_to_text_model_generates_the_runs_answers(tmp_path):
    pairs = [(" ".join(WORDS[i % 5 : i % 5 + 4]), WORDS[i % 13]) for i in range(24)]
    bert(tmp_path / "bert")
    model = {**DECODER, "kind": "encoder_decoder", "source": {"length": 48, "attention": {"pattern": ["full"]}}}
    task = {"name": "text_table", "tokenizer": str(tmp_path / "bert" / "tokenizer.json"), "validation_fraction": 0.25}
    source = table(tmp_path / "rows.csv", pairs)
    launch(tmp_path / "run", source, model=model, task={**task, "generation": {"target_length": 8, "beams": 1}})
    out = megasparse.to_hf(tmp_path / "run", tmp_path / "out")
    loaded = AutoModelForSeq2SeqLM.from_pretrained(out, trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(out)
    texts = [text for text, _ in pairs[:6]]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    answers = tokenizer.batch_decode(loaded.generate(**inputs), skip_special_tokens=True)
    assert answers == [megasparse.predict(tmp_path / "run", text)["predicted"] for text in texts]


def test_runs_that_transformers_has_no_class_for_are_refused(tmp_path):
    launch(tmp_path / "run", reviews(tmp_path / "reviews.csv", 24), model=ENCODER)
    with pytest.raises(ConfigError, match=r'to: "bert" is for pretrained checkpoints, but .* is fine-tuned'):
        megasparse.to_hf(tmp_path / "run", tmp_path / "out", to="bert")
    launch(tmp_path / "series", write(tmp_path / "series.csv", numbers(80)), task=TASK, model=FORECASTER)
    with pytest.raises(HubError, match="transformers lacks a class for series"):
        megasparse.to_hf(tmp_path / "series", tmp_path / "out")
    assert not (tmp_path / "out").exists()
