"""`convert from-hf` and `convert to-hf`: their outputs, the use of these, and rejected inputs."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch import evaluate, pretrain
from megasparse.cli.hub import ARCHITECTURES
from megasparse.cli.main import door
from megasparse.hub.architectures import FORMATS
from megasparse.training.checkpoints.checkpoint import Checkpoint
from tests.helpers.cases import together
from tests.helpers.commands import refused, run
from tests.helpers.hub import checkpoint, decoder
from tests.helpers.trained import prepared
from tests.hub.test_reformer import theirs
from tools import convert_to_hf

main = door("convert from-hf")


def saved(folder, **settings):
    model = theirs(**settings)
    model.save_pretrained(folder)
    return model


def convert(model, output):
    main(["--model", str(model), "--output", str(output)])


def told(capsys, program, *arguments):
    capsys.readouterr()
    run(program, *arguments)
    return capsys.readouterr().out


CPU = ("--set", "run.engine=torch", "--set", "run.device=cpu", "--set", "checkpoint.every=0")


def test_an_imported_reformer_is_trained_further_and_evaluated(tmp_path, capsys):
    model = saved(tmp_path / "theirs", attn_layers=["local", "lsh", "local"])
    convert(tmp_path / "theirs", tmp_path / "run")
    written = tmp_path / "run" / "checkpoints" / "00000000"
    reported = capsys.readouterr()
    assert reported.out.splitlines()[-1] == str(written) and "model's on 128 tokens" in reported.err
    words = model.reformer.embeddings.word_embeddings.weight
    assert torch.equal(Checkpoint.open(written).tensor("weight", "embedding.weight"), words)

    data = prepared(tmp_path)
    given = ["--checkpoint", tmp_path / "run", "--data", data, "--limit", 2]
    scored = told(capsys, evaluate, *given, "--allow-leaking-attention")
    assert "bits/dim" in scored and "step 0" in scored
    band = [f"model.attention.lsh.{key}" for key in ("window=band", "same_bucket=true", "count_rounds=true")]
    assert "bits/dim" in told(capsys, evaluate, *given, *(word for setting in band for word in ("--set", setting)))
    sets = ("--set", f"data.path={data}", "--set", "training.steps=2", "--set", "training.global_batch=2")
    run(pretrain, "--config", tmp_path / "run" / "config.json", *CPU, *sets)
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert (tmp_path / "run" / "checkpoints" / "00000002").exists()


def test_the_first_byte_of_a_vocabulary_can_be_named(tmp_path):
    """In google/reformer-enwik8 byte b has the id b + 2."""
    model = saved(tmp_path / "theirs", attn_layers=["local"], vocab_size=258)
    main(["--model", str(tmp_path / "theirs"), "--output", str(tmp_path / "run"), "--first-byte", "2"])
    opened = Checkpoint.open(tmp_path / "run" / "checkpoints" / "00000000")
    for name, original in (
        ("embedding.weight", model.reformer.embeddings.word_embeddings.weight),
        ("head.weight", model.lm_head.decoder.weight),
        ("head.bias", model.lm_head.bias),
    ):
        ours = opened.tensor("weight", name)
        assert torch.equal(ours[:256], original[2:]) and torch.equal(ours[256:], original[:2])
    start = opened.tensor("weight", "embedding.start")[0]
    assert torch.equal(start, model.reformer.embeddings.word_embeddings.weight[0])

    data = prepared(tmp_path)
    result = tmp_path / "result.json"
    run(evaluate, "--checkpoint", tmp_path / "run", "--data", data, "--json", result)
    text = (tmp_path / "source.txt").read_bytes()[-400:]
    nats = 0.0
    for window in (text[:128], text[128:256], text[256:384], text[384:]):
        tokens = torch.tensor(list(window)) + 2
        with torch.no_grad():
            logits = model(torch.cat([torch.zeros(1, dtype=torch.long), tokens[:-1]])[None]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits + model.lm_head.bias, tokens, reduction="sum").item()
    assert json.loads(result.read_text())["nats"] == pytest.approx(nats, rel=1e-5)


def test_a_name_is_looked_up_only_in_the_local_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "cache" / "models--someone--reformer"
    saved(place / "snapshots" / ("0" * 40), attn_layers=["local"])
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    convert("someone/reformer", tmp_path / "run")
    assert (tmp_path / "run" / "config.json").exists()
    refuses("someone/else", tmp_path / "other", "no such file or folder, nor a model", capsys)


def refuses(model, output, message, capsys):
    capsys.readouterr()
    before = sorted(path.name for path in output.parent.iterdir())
    with pytest.raises(SystemExit) as stop:
        convert(model, output)
    reported = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert stop.value.code == 2 and len(reported) == 1 and message in reported[0], reported
    assert sorted(path.name for path in output.parent.iterdir()) == before


def change_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


REFUSED = {
    "another architecture": (lambda f: change_config(f, model_type="mamba"), "model_type is 'mamba', which cannot be"),
    "remote code": (
        lambda f: change_config(f, model_type="evil", auto_map={"AutoConfig": "evil.Config"}),
        "model_type is 'evil', whose code comes with the model; such code is not run",
    ),
    "a vocabulary too small for bytes": (
        lambda f: saved(f, attn_layers=["local"], vocab_size=20), "model.vocabulary: 20 is too small for bytes"
    ),
    "not finite": (
        lambda f: change_tensors(f, lambda t: t["lm_head.decoder.weight"].fill_(torch.nan)), "by inf"
    ),
    "a torn file": (cut, "damaged safetensors file"),
    "a pickle": (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "is a pickle"),
    "a torn configuration": (lambda f: (f / "config.json").write_text('{"model_type": "refo'), "not JSON"),
}  # fmt: skip


@together("name", REFUSED)
def test_an_error_is_one_line_and_leaves_no_file(name, tmp_path, capsys):
    saved(tmp_path / "theirs", attn_layers=["local"])
    damage, message = REFUSED[name]
    damage(tmp_path / "theirs")
    refuses(tmp_path / "theirs", tmp_path / "run", message, capsys)


def test_code_next_to_a_known_architecture_is_not_run(tmp_path):
    """The file config.json asks for it; transformers' own class is taken."""
    saved(tmp_path / "theirs", attn_layers=["local"])
    change_config(tmp_path / "theirs", auto_map={"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"})
    (tmp_path / "theirs" / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    convert(tmp_path / "theirs", tmp_path / "run")
    assert (tmp_path / "run").exists() and not (tmp_path / "ran").exists()


def test_an_existing_output_is_rejected_first(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "config.json").write_text("{}")
    refuses(tmp_path, tmp_path / "run", "exists already", capsys)


def test_a_run_is_converted(tmp_path, capsys):
    checkpoint(decoder("local"), tmp_path / "run")
    run(convert_to_hf, "--checkpoint", tmp_path / "run", "--output", tmp_path / "deep" / "out")
    assert f"wrote {tmp_path / 'deep' / 'out'}" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "deep" / "out").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "tokenizer.json", "generation_config.json"} <= names
    assert not any(name.startswith((".", "__pycache__")) for name in names)


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, capsys):
    refused(capsys, convert_to_hf, "--checkpoint", tmp_path, "--output", tmp_path / "out")


def test_missing_transformers_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "run/checkpoints/00000001").mkdir(parents=True)
    said = refused(capsys, convert_to_hf, "--checkpoint", tmp_path / "run", "--output", tmp_path / "out")
    assert said.startswith('error: transformers: is not installed. Install it: pip install "transformers>=')


def test_the_help_lists_all_architectures_without_importing_them():
    assert list(ARCHITECTURES) == sorted([*FORMATS, "peft"])
