"""Give a pretrained encoder of HuggingFace's (BERT, RoBERTa, XLM-RoBERTa, DistilBERT) another attention, for inputs of
up to any length.

    python tools/replace_attention.py --model DIR --attention '{"kind": "yoso"}' --max-length 4096 --output DIR
    python tools/replace_attention.py --model DIR --output DIR \
      --attention '{"pattern": [{"local": 6, "lha": 6}], "local": {"chunk": 64}}'

Its queries, keys and values stay; positions are extended by repeating them. The settings are those of
model.attention (docs/attention.md): one kind with its settings, or a pattern of layers and heads. LHA's hash functions
are untrained then: tools/train_hash.py. megasparse.hub.load_replaced loads the folder; transformers alone reads it as
the same model with full attention.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from megasparse.config.strict_json import parse
from megasparse.errors import ConfigError, report_user_errors
from megasparse.hub import require_transformers


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="replace_attention.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of the pretrained model")
    parser.add_argument("--attention", required=True, metavar="JSON", help="what computes its attention from now on")
    parser.add_argument("--max-length", type=int, metavar="TOKENS", help="longest input; the model's own if left out")
    parser.add_argument("--seed", type=int, default=0, help="of new parameters and of draws (default: %(default)s)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="a new folder")
    return parser


@report_user_errors
def main(arguments: Sequence[str] | None = None) -> None:
    given = build_parser().parse_args(arguments)
    require_transformers()
    from transformers import AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    from megasparse.hub.lengthen import positions
    from megasparse.hub.replace import replace_attention
    from megasparse.hub.replaced_folder import load_plain, save_replaced

    attention = parse(given.attention, "--attention")
    if not isinstance(attention, dict):
        raise ConfigError("--attention", "is no object", 'Write it as {"kind": "lha"}')
    disable_progress_bar()
    model = load_plain(given.model)
    replace_attention(model, attention, max_length=given.max_length, seed=given.seed)
    tokenizer = AutoTokenizer.from_pretrained(given.model, local_files_only=True)
    tokenizer.model_max_length = positions(model)
    save_replaced(model, given.output, tokenizer)
    print(given.output)


if __name__ == "__main__":
    main()
