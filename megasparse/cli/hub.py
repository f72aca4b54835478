"""Commands for Hugging Face models."""

import argparse
import sys
from pathlib import Path

from megasparse.cli.arguments import add_checkpoint, require_checkpoint, require_model, require_paths
from megasparse.config.files import parse_json
from megasparse.errors import ConfigError, whole

ARCHITECTURES = (
    "bert", "gpt2", "llama", "megasparse", "mistral", "peft", "qwen2", "qwen3", "reformer", "roberta", "yoso",
)  # fmt: skip
"""Keys of `hub.architectures.FORMATS`, whose import takes seconds, and peft."""


def quiet_transformers() -> None:
    """Raise HubError unless transformers is installed, and disable its progress bars."""
    from megasparse.hub import require_transformers

    require_transformers()
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def add_convert_from_hf(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="NAME_OR_DIR", help="folder, GGUF file or cached name")
    add("--output", type=Path, required=True, metavar="DIR", help="new folder, in the layout of a run")
    first = "token id of byte 0 in a byte-level model (default: 0); ids are rotated so that byte 0 becomes token 0"
    add("--first-byte", type=whole, default=0, metavar="ID", help=first)


def convert_from_hf(args: argparse.Namespace) -> None:
    """Convert a Hugging Face model (Llama, SmolLM, Mistral, Qwen2, Qwen3, GPT-2, BERT, Reformer, YOSO, or an export of
    `megasparse convert to-hf`) to a checkpoint.

        megasparse convert from-hf --model ~/models/SmolLM2-135M --output runs/imported
        megasparse convert from-hf --model ~/models/SmolLM2-135M-Instruct.Q4_1.gguf --output runs/imported
        megasparse convert from-hf --model google/reformer-enwik8 --first-byte 2 --output runs/imported
        megasparse pretrain runs/imported/config.json --set data.path=data/enwik8
        megasparse evaluate --checkpoint runs/imported --data data/enwik8

    The third command reads transformers' local cache. Nothing is downloaded, and code that comes with a model is never
    run. GGUF files are dequantised to fp32 by transformers and gguf. The tokenizer.json and a decoder's chat template
    are copied. Nothing is written unless the outputs of both models on the same tokens agree. This needs memory for
    both models, and for a Reformer, which is compared in float64, three times as much.
    """
    require_model(args.model)
    from megasparse.data.tokenizers import build_tokenizer
    from megasparse.settings.load import build_config

    quiet_transformers()
    from megasparse.hub.importing import HFModel, with_first_token, write_checkpoint
    from megasparse.hub.tensor_file import refuse_existing

    refuse_existing(args.output)
    model = HFModel.open(args.model)
    values = model.config.model_dump(mode="json")
    values["run"]["directory"] = str(args.output)
    tokenizer = None if args.first_byte else build_tokenizer(model.config.data.tokenizer).file
    if args.first_byte:
        values["data"]["tokenizer"] = "bytes"
    elif tokenizer is not None:
        values["data"]["tokenizer"] = str(args.output / f"tokenizer{tokenizer.suffix}")
    config = build_config(values)
    print(f"{args.model}: logits agree with the converted model's on {model.compare()} tokens", file=sys.stderr)
    files = {} if tokenizer is None else model.companion_files
    print(write_checkpoint(config, with_first_token(model.tensors, args.first_byte), args.output, tokenizer, files))


def add_convert_to_hf(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_checkpoint(parser)
    add("--output", type=Path, required=True, metavar="OUT", help="new folder for the model")
    add("--to", choices=ARCHITECTURES, default="megasparse", help="architecture (%(default)s)")
    card = "result of `megasparse evaluate --json` for the model card; by default all results in the run's folder"
    add("--evaluation", type=Path, metavar="FILE", help=card)
    base = "with --to peft: folder of the Hugging Face model that the run started from"
    add("--base", type=Path, metavar="DIR", help=base)


def convert_to_hf(args: argparse.Namespace) -> None:
    r"""Write a checkpoint as a Hugging Face model.

        megasparse convert to-hf --checkpoint runs/quickstart --output export/quickstart
        megasparse convert to-hf --checkpoint runs/enwik8/checkpoints/00020000 --output export/enwik8 \
          --evaluation runs/enwik8/test.json
        megasparse convert to-hf --checkpoint runs/local --to reformer --output export/reformer
        megasparse convert to-hf --checkpoint runs/smollm --to llama --output export/smollm
        megasparse convert to-hf --checkpoint runs/reviews --output export/reviews
        megasparse convert to-hf --checkpoint runs/decoder_64k --to peft --base models/SmolLM2 --output export/adapters

    `--to megasparse`, the default, exports any megasparse model. With megasparse installed, AutoModelForCausalLM,
    AutoModelForMaskedLM or AutoModelForSeq2SeqLM load the folder with trust_remote_code=True, as do
    AutoModelForSequenceClassification and pipeline(), except for encoder-decoders. The other architectures are part of
    transformers and support only models that they can express. The export includes the tokenizer and chat template.

    For a fine-tuned run, the best checkpoint by validation is exported: AutoModelForSequenceClassification loads
    classifiers and models that predict a number, AutoModelForSeq2SeqLM models that write texts.

    `--to peft` writes only the adapters of a run with `lora`, which peft, transformers and vLLM load on top of DIR;
    only peft reads DoRA's norms. The other formats merge adapters with the weights, as they were quantised in training.

    OUT is written only if the outputs of both models on the same text agree to 1e-4.
    """
    require_checkpoint(args.checkpoint)
    require_paths(args.evaluation, args.base)
    if (args.to == "peft") != (args.base is not None):
        raise ConfigError("--base", f"does not fit --to {args.to}", "Give it with --to peft, and only then")
    quiet_transformers()
    if args.to == "peft":
        from megasparse.hub.adapter_folder import to_peft

        print(f"wrote {to_peft(args.checkpoint, args.output, args.base)}")
        return
    from megasparse.tasks.exporting import to_hf

    print(f"wrote {to_hf(args.checkpoint, args.output, args.to, args.evaluation)}")


def add_replace_attention(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="folder of the pretrained model")
    add("--attention", required=True, metavar="JSON", help="settings of the new attention")
    add("--max-length", type=whole, metavar="TOKENS", help="longest input; by default the model's")
    add("--seed", type=whole, default=0, help="seed of new parameters and draws (default: %(default)s)")
    add("--output", type=Path, required=True, metavar="DIR", help="a new folder")


def replace_attention(args: argparse.Namespace) -> None:
    r"""Replace the attention of a Hugging Face encoder (BERT, RoBERTa, XLM-RoBERTa, DistilBERT) or of a
    decoder that uses transformers' attention interface (Llama, Qwen, Gemma, Phi, GPT-2, ...).

        megasparse replace-attention --model DIR --attention '{"kind": "yoso"}' --max-length 4096 --output DIR
        megasparse replace-attention --model DIR --output DIR \
          --attention '{"kind": "lsh", "chunk": 64, "buckets": 64, "local": true, "sinks": 4}'
        megasparse replace-attention --model DIR --output DIR \
          --attention '{"pattern": [{"local": 6, "lha": 6}], "local": {"chunk": 64}}'

    The projections are unchanged; an encoder's position embeddings are repeated up to --max-length. --attention takes
    the keys of model.attention (docs/attention.md): one kind with its settings, or a pattern of layers and heads. Train
    LHA's new hash functions with `megasparse teach`. `megasparse.hub.load_replaced` loads the folder; transformers'
    from_pretrained with attn_implementation="sdpa" loads it with full attention.
    """
    require_model(args.model)
    attention = parse_json(args.attention, "--attention")
    if not isinstance(attention, dict):
        raise ConfigError("--attention", "is not a JSON object", 'Write it as {"kind": "lha"}')
    quiet_transformers()
    from megasparse.hub.checker import load_tokenizer
    from megasparse.hub.replace import load_plain, positions, replace_attention, save_replaced

    model = load_plain(args.model)
    replace_attention(model, attention, max_length=args.max_length, seed=args.seed)
    tokenizer = load_tokenizer(args.model)
    tokenizer.model_max_length = positions(model)
    save_replaced(model, args.output, tokenizer)
    print(args.output)


def add_teach(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="written by `megasparse replace-attention`")
    files = "text files, or folders with *.txt"
    add("--texts", type=Path, nargs="+", required=True, metavar="FILE", help=files)
    add("--length", type=whole, metavar="TOKENS", help="tokens per window (default: longest input)")
    add("--passes", type=whole, default=24, help="windows to train on (default: %(default)s)")
    add("--held-out", type=whole, default=1, metavar="N", help="held-out windows (%(default)s)")
    add("--seed", type=whole, default=0, help="seed of the windows' order and draws (%(default)s)")
    add("--output", type=Path, required=True, metavar="DIR", help="a new folder")


def teach(args: argparse.Namespace) -> None:
    r"""Train the hashes or sketches of a Hugging Face model with replaced attention to select the keys with the largest
    weights in its full attention; in a decoder, keys beyond the window and the sinks. Other weights are unchanged.

        megasparse replace-attention --model MODEL --output HASHED --max-length 4096 --attention \
          '{"kind": "smart_bird", "keys": 96, "sketch": "heads", "objective": "attention", "local": true, "sinks": 4}'
        megasparse teach --model HASHED --texts books/ --length 4096 --passes 24 --output TAUGHT

    Text files are split into windows of --length tokens; a pass reads one window. The loss on the last --held-out
    windows is printed before and after. Progress is saved in TAUGHT.teaching after every pass: the same command resumes
    from there with bit-identical results. For hashes use {"kind": "lha", "chunk": 64} in an encoder, {"kind": "lha",
    "joint": false, "utility": "collisions"} in a decoder. It runs on a GPU if there is one.
    """
    for key, value in (("--passes", args.passes), ("--held-out", args.held_out)):
        if value < 1:
            raise ConfigError(key, f"{value} is too few", "Give 1 or more")
    require_model(args.model)
    require_paths(*args.texts)
    import shutil

    import torch

    from megasparse.errors import DataError

    quiet_transformers()
    from megasparse.hub.checker import load_tokenizer
    from megasparse.hub.replace import load_replaced, replacement_of, save_replaced
    from megasparse.hub.teaching import Teacher, read_windows
    from megasparse.hub.tensor_file import refuse_existing

    refuse_existing(args.output)
    longest = replacement_of(args.model)["max_length"]
    length = longest if args.length is None else args.length
    if not 8 <= length <= longest:
        raise ConfigError("--length", f"{length} is not from 8 to {longest}, the longest input", "Change it")
    model = load_replaced(args.model)
    if torch.cuda.is_available():
        torch.nn.Module.to(model, "cuda")
    tokenizer = load_tokenizer(args.model)
    windows = [tokens for tokens in read_windows(tokenizer, args.texts, length) if len(tokens) == length]
    if len(windows) <= args.held_out:
        raise DataError(args.texts[0], f"{len(windows)} windows of {length} tokens are too few", "Give more text")
    folder = args.output.with_name(f"{args.output.name}.teaching")
    teacher = Teacher(model, args.seed)
    before, after = teacher.teach(windows[: -args.held_out], windows[-args.held_out :], args.passes, folder)
    save_replaced(model, args.output, tokenizer)
    shutil.rmtree(folder, ignore_errors=True)
    print(f"held-out loss ({args.held_out} windows): {before:.4f} before, {after:.4f} after {teacher.passes} passes")
    print(args.output)


def add_check_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    checked = parser.add_mutually_exclusive_group(required=True)
    checked.add_argument("--model", type=Path, metavar="DIR", help="folder of a causal language model")
    checked.add_argument("--checkpoint", metavar="DIR", help="a run of a decoder, checked on its first batch")
    add("--length", type=whole, default=64, help="tokens per row of --model (default: %(default)s)")
    add("--seed", type=whole, default=0, help="seed of the tokens (default: %(default)s)")


def check_model(args: argparse.Namespace) -> None:
    """Check a Hugging Face decoder on random tokens: no logit may depend on later tokens, padding, other rows of a
    batch or other documents packed into the row, and decoding from a cache must give the logits of the whole pass.

        megasparse check-model --model models/SmolLM2-135M
        megasparse check-model --length 512 --model export/quickstart
        megasparse check-model --checkpoint runs/decoder_64k              # a run, on the first batch of its data

    Prints PASS or FAIL with the largest difference, relative to the standard deviation of the logits, and the first
    token that differs by more than rounding. A failed check ends the command with exit code 2. Weights are loaded in
    fp32. Exports and models with replaced attention are supported, too. Code in the folder is never executed.
    """
    from megasparse.errors import UserError

    if args.length < 8:
        raise ConfigError("--length", f"{args.length} is too short", "Give 8 or more")
    if args.checkpoint is None:
        require_model(args.model)
    else:
        require_checkpoint(args.checkpoint)
    quiet_transformers()
    from transformers.utils.logging import set_verbosity_error

    from megasparse.hub import checker

    set_verbosity_error()
    if args.checkpoint is None:
        results = checker.check_model(checker.load_model(args.model), args.length, args.seed)
    else:
        from megasparse.evaluation.results import restore
        from megasparse.runs.data import open_data, training_batches
        from megasparse.training.ranks import RunHooks

        model, config, _, ranks = restore(args.checkpoint)
        if config.model.kind != "decoder":
            raise ConfigError("--checkpoint", f"is of the kind {config.model.kind}", "Name a run of a decoder")
        with training_batches(config, open_data(config), ranks, 0, RunHooks()) as steps:
            tokens = next(steps).micro_batches[0].tokens
        results = checker.check_batch(model, tokens.to(ranks.device), args.seed)
    print(checker.table(results))
    failed = [result.name for result in results if result.passed is False]
    if failed:
        raise UserError(
            f"{args.model or args.checkpoint}: fails {len(failed)} of {len(results)} checks: {', '.join(failed)}"
        )
