"""Export of fine-tuned runs as Hugging Face models."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from megasparse.config.schema import Config, DataConfig, ModelConfig
from megasparse.data.tokenizers.tokenizer import BEGIN, NAMED, PADDING, SEPARATOR
from megasparse.errors import ConfigError, HubError
from megasparse.files import read_file
from megasparse.hub import export
from megasparse.hub.formats import LONGEST, our_logits, require_agreement
from megasparse.hub.megasparse_format import FORMAT, code_files
from megasparse.hub.tensor_file import appearing, refuse_existing, write_tensors
from megasparse.hub.tokenizer_files import (
    FILE,
    GENERATION,
    SETTINGS,
    Files,
    name_of,
    special_token,
    tokenizer_files,
    write_files,
)
from megasparse.ops.random import RngContext
from megasparse.tasks.batches import Inputs, Padded
from megasparse.tasks.exported import MegasparseTaskConfig, MegasparseTaskForSequenceClassification
from megasparse.tasks.form import Form
from megasparse.tasks.run import Finetuned, chosen_checkpoint, restore_task
from megasparse.tasks.start import FOLDER, RECORD
from megasparse.training.checkpoints.manifest import read_manifest

NAME = MegasparseTaskForSequenceClassification.__name__


def to_hf(
    checkpoint: str | Path, output: str | Path, to: str = "megasparse", evaluation: str | Path | None = None
) -> Path:
    """Export a pretrained checkpoint, or a fine-tuned classifier, regression or text-to-text model, as a Hugging Face
    model. The folder is written atomically, if the logits of both models on the same tokens in fp32 agree.

    Args:
        checkpoint: A checkpoint's folder, or a run's (its newest checkpoint, of a fine-tuned run its best by
            validation).
        output: Folder to write; it must not exist.
        to: Architecture, one of `hub.architectures.FORMATS`; "megasparse" for fine-tuned runs.
        evaluation: Result of `megasparse evaluate` for a pretrained model's card; by default the ones in the run's
            folder.

    Returns:
        The folder.

    Raises:
        CheckpointError: The checkpoint is missing or damaged.
        ConfigError: `to` is unknown, or not supported by the run.
        HubError: The architecture cannot express the model, the folder cannot be written, or the two models differ.

    Examples:
        >>> folder = megasparse.to_hf("runs/quickstart", "export/quickstart")
        >>> sorted(path.suffix for path in folder.glob("model.*"))
        ['.safetensors']
    """
    path = chosen_checkpoint(Path(checkpoint))
    if "task" not in read_manifest(path)["config"]:
        return export.to_hf(checkpoint, output, to, evaluation)
    if to != "megasparse":
        raise ConfigError("to", f'"{to}" is for pretrained checkpoints, but {path} is fine-tuned', 'Use "megasparse"')
    if evaluation is not None:
        raise ConfigError("evaluation", "is for cards of pretrained models", "Omit it")
    refuse_existing(output := Path(output))
    model = restore_task(path, ['training.precision="fp32"', 'run.device="cpu"'])
    task = model.form.task
    if task.form not in ("labels", "texts") or task.towers:
        raise HubError(path, f"transformers lacks a class for {task.name}", "Use megasparse predict")
    merge_adapters(model.model)
    with appearing(output) as folder:
        write = _write_text_model if task.form == "texts" else _write_classifier
        write(model, json.loads(read_file(path.absolute().parents[1] / FOLDER / RECORD)), folder)
    return output


def merge_adapters(model: nn.Module) -> None:
    """Add the products of LoRA adapters to their weights, in place."""
    for inner in [name for name, _ in model.named_modules() if name.endswith(".base_layer")]:
        name = inner.removesuffix(".base_layer")
        layer: Any = model.get_submodule(name)
        layer.merge()
        model.set_submodule(name, layer.get_base_layer())


def _write_classifier(model: Finetuned, record: dict[str, Any], folder: Path) -> None:
    task, config, body = model.form.task, model.config, model.model.body
    names = task.classes or ["value"]
    theirs = MegasparseTaskForSequenceClassification(
        MegasparseTaskConfig(
            record, config.head.model_dump(mode="json"), config.run.seed, id2label=dict(enumerate(names)),
            label2id={name: number for number, name in enumerate(names)}, architectures=[NAME],
            problem_type="regression" if task.classes is None else "single_label_classification",
            auto_map={
                "AutoConfig": "configuration_megasparse.MegasparseTaskConfig",
                "AutoModelForSequenceClassification": f"modeling_megasparse.{NAME}",
            },
        )
    )  # fmt: skip
    theirs.task.load_state_dict(model.model.state_dict())
    theirs.save_pretrained(folder)
    settings = {"kind": "decoder" if body.causal else "encoder"}
    shape = ModelConfig.model_validate(record.get("model", settings))
    files: Files = code_files("megasparse.tasks import exported", "MegasparseTaskConfig", [NAME])
    if model.form.tokenizer is not None:
        typed = getattr(body, "typed", False)
        files |= framed(
            tokenizer_files(_as_pretrained(model, record, shape), config.task.max_length), model.form, typed
        )
    _write(files, folder, model, "AutoModelForSequenceClassification")
    length = min(config.task.max_length, LONGEST)
    tokens = torch.arange(2 * length).view(2, -1) * 31 % body.vocabulary
    lengths = torch.tensor([length, -(-length // 2)])
    read = Padded(tokens, torch.zeros_like(tokens), lengths)
    rng = RngContext.evaluation(config.run.seed, 2)
    loaded = MegasparseTaskForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        ours, _ = model.model.predicted(Inputs((read,), None), rng)
        logits = loaded(tokens, torch.arange(length) < lengths[:, None]).logits
    require_agreement([(ours, logits)], folder)


def _write_text_model(model: Any, record: dict[str, Any], folder: Path) -> None:
    from megasparse.hub.modelling import MegasparseForSeq2SeqLM

    stack, shape = model.model.body.stack, ModelConfig.model_validate(record["model"])
    config = _as_pretrained(model, record, shape)
    weights = stack.state_dict()
    exported = FORMAT.export(config, weights.__getitem__)
    rule = model.config.task.generation
    settings = json.loads(exported.files[GENERATION])
    settings |= {"max_length": rule.target_length + 1, "num_beams": rule.beams}
    unused = {*range(model.form.tokenizer.vocabulary, shape.vocabulary)} - {*model.form.end.tolist()}
    settings |= {"suppress_tokens": sorted(unused)} if unused else {}
    files: Files = {**exported.files, "config.json": json.dumps(exported.config, indent=2) + "\n"}
    _write({**files, GENERATION: json.dumps(settings, indent=2) + "\n"}, folder, model, "AutoModelForSeq2SeqLM")
    write_tensors(exported.tensors(), folder)
    loaded = MegasparseForSeq2SeqLM.from_pretrained(folder)
    texts, seed = export.text_tokens(shape), config.run.seed
    require_agreement(((our_logits(stack, x, seed), FORMAT.logits(loaded, x, seed)) for x in texts), folder)


def _as_pretrained(model: Finetuned, record: dict[str, Any], shape: ModelConfig) -> Config:
    """Return a run's configuration as a pretraining run's, with the tokenizer in the run's folder."""
    name = record["tokenizer"]
    start = model.checkpoint.path.absolute().parents[1] / FOLDER
    tokenizer = name if name in NAMED else str(start / Path(name).name)
    return Config(model=shape, run=model.config.run, data=DataConfig(tokenizer=tokenizer))


def framed(files: Files, form: Form, typed: bool) -> Files:
    """Add a form's special tokens around a text, and around both texts of a pair, to a tokenizer, and a padding token
    if it has none. typed: True if the model reads the types of segments.
    """
    if FILE not in files:
        return files
    values, settings = json.loads(files[FILE]), json.loads(files[SETTINGS])
    special: dict[str, Any] = {}
    added = values["added_tokens"]
    names = {} if form.special is None else {form.special.begin: BEGIN[0], form.special.separator: SEPARATOR[0]}
    used = max([len(values["model"]["vocab"]) - 1, *(entry["id"] for entry in added)])
    if "pad_token" not in settings:
        names[max(used, *names, 0) + 1] = settings["pad_token"] = PADDING[0]
    for token in range(used + 1, max(names, default=0) + 1):  # added tokens are numbered consecutively
        added.append(special_token(token, names.get(token, f"[unused{token}]")))

    def template(frame: list[np.ndarray]) -> list[Any]:
        parts: list[Any] = []
        for number, ids in enumerate(frame):
            if number:
                parts.append({"Sequence": {"id": " AB"[number], "type_id": number - 1}})
            for token in ids.tolist():
                name = name_of(values, token)
                assert name is not None, f"token {token} is not in the tokenizer"
                special[name] = {"id": name, "ids": [token], "tokens": [name]}
                parts.append({"SpecialToken": {"id": name, "type_id": max(0, number - 1)}})
        return parts

    single, pair = template(form.frame(1)), template(form.frame(2))
    rule = {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}
    settings["model_input_names"] = ["input_ids", *["token_type_ids"] * typed, "attention_mask"]
    values |= {"post_processor": rule, "truncation": None, "padding": None}
    return {**files, FILE: json.dumps(values, ensure_ascii=False), SETTINGS: json.dumps(settings, indent=2) + "\n"}


def _write(files: Files, folder: Path, model: Finetuned, auto: str) -> None:
    task, classes = model.form.task, model.form.task.classes
    text = f"# {task.name}: a megasparse model\n\nFine-tuned for {model.checkpoint.step:,} steps"
    text += f" on the classes {', '.join(classes)}.\n" if classes else ".\n"
    text += f"Add a licence before you publish it.\n\n```python\nfrom transformers import {auto}, AutoTokenizer\n\n"
    text += f"model = {auto}.from_pretrained(FOLDER, trust_remote_code=True)  # needs megasparse\n"
    text += "tokenizer = AutoTokenizer.from_pretrained(FOLDER)\n```\n"
    write_files({**files, "README.md": text}, folder)
