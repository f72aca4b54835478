"""Replace the attention of a pretrained HuggingFace encoder (BERT, RoBERTa, XLM-RoBERTa, DistilBERT), for inputs of
any length, or of a decoder (Llama, SmolLM, Mistral, Qwen2, Qwen3, GPT-2).

    megasparse replace-attention --model DIR --attention '{"kind": "yoso"}' --max-length 4096 --output DIR
    megasparse replace-attention --model DIR --output DIR \\
      --attention '{"kind": "lsh", "chunk": 64, "buckets": 64, "local": true, "sinks": 4}'
    megasparse replace-attention --model DIR --output DIR \\
      --attention '{"pattern": [{"local": 6, "lha": 6}], "local": {"chunk": 64}}'

Queries, keys and values stay; an encoder's positions are extended by repeating them. The settings are those of
model.attention (docs/attention.md): one kind with its settings, or a pattern of layers and heads. LHA's hash functions
are untrained then: see `megasparse teach`. megasparse.hub.load_replaced loads the folder; transformers alone reads
it as the same model with full attention.
"""

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of the pretrained model")
    parser.add_argument("--attention", required=True, metavar="JSON", help="settings of the new attention")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="longest input; by default the model's own")
    parser.add_argument("--seed", type=int, default=0, help="seed of new parameters and draws (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")


def run(args: argparse.Namespace) -> None:
    from megasparse.config.files import parse_json
    from megasparse.errors import ConfigError
    from megasparse.hub import require_transformers

    require_transformers()
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from megasparse.hub.replace import load_plain, positions, replace_attention, save_replaced

    attention = parse_json(args.attention, "--attention")
    if not isinstance(attention, dict):
        raise ConfigError("--attention", "is no object", 'Write it as {"kind": "lha"}')
    disable_progress_bar()
    model = load_plain(args.model)
    replace_attention(model, attention, max_length=args.max_length, seed=args.seed)
    tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    tokenizer.model_max_length = positions(model)
    save_replaced(model, args.output, tokenizer)
    print(args.output)
