"""What a trained model is worth on text or examples it has not seen.

    python launch/evaluate.py --checkpoint runs/quickstart --data data/quickstart --json runs/quickstart/test.json
    python launch/evaluate.py --checkpoint runs/quickstart --data data/quickstart --stride 1024 --rounds 8
    python launch/evaluate.py --task rte --checkpoint runs/rte --source glue_data/RTE --predictions rte.jsonl
    python launch/evaluate.py --task rte --checkpoint runs/rte_0 runs/rte_1 runs/rte_2 --source glue_data/RTE

A pretrained decoder: held-out bits/dim, perplexities and accuracy; an encoder's loss and accuracy on masked tokens, an
encoder-decoder's on its targets. Scores every symbol of the split once (or the first --limit windows). A fine-tuned
model (--task): the official metric with its confidence interval. The numbers are written with their whole protocol.
"""

import argparse
import sys
from typing import Any

from megasparse.data.reader import EvaluationStream
from megasparse.errors import report_user_errors
from megasparse.evaluation import code_length, masked_tokens, target_tokens
from megasparse.evaluation.arguments import evaluation_arguments
from megasparse.evaluation.bits_per_dim import refuse_leaks
from megasparse.evaluation.outputs import require_writable, write_json
from megasparse.evaluation.protocol import protocol_of
from megasparse.evaluation.restore import restore, trained_tokenizer
from megasparse.model.decoder import Causal
from megasparse.model.encoder import Encoder
from megasparse.runs.data import open_folder

MEASURES: dict[str, Any] = {"decoder": code_length, "encoder": masked_tokens, "encoder_decoder": target_tokens}


def score_split(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Of a pretrained model: the result, and its summary."""
    model, config, checkpoint, device = restore(args.checkpoint[0], args.set)
    if isinstance(model, Causal) and not args.allow_leaking_attention:
        refuse_leaks(model.leaks)
    tokenizer = trained_tokenizer(config, checkpoint)
    index = open_folder(args.data or config.data.path, config, tokenizer)
    if isinstance(model, Encoder) and config.model.masking.whole_words:
        model.set_word_starts(tokenizer.word_starts())
    split = args.split or "test"
    protocol = protocol_of(config, checkpoint, index, tokenizer, split, args.stride, args.rounds, args.hash_seeds)
    measure = MEASURES[config.model.kind]
    result = measure.evaluate(model, EvaluationStream(index, split), protocol, args.batch or 1, args.limit, device)
    return result, measure.summary(result)


def score_task(args: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Of fine-tuned models: the result, and its summary. Writes the predictions, where these are asked for."""
    from megasparse.tasks.evaluate import evaluate_checkpoints, summary
    from megasparse.tasks.predictions import write_predictions

    overrides = args.set + ([f"evaluation.batch={args.batch}"] if args.batch else [])
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    result, evaluated = evaluate_checkpoints(
        args.checkpoint, overrides, args.task, args.source, args.split, args.hash_seeds, say
    )
    if args.predictions:
        write_predictions(args.predictions, evaluated[0].predictions(), evaluated[0].form)
    return result, summary(result)


@report_user_errors
def main() -> None:
    args = evaluation_arguments(__doc__)
    require_writable(args.json, args.predictions, sources=args.source or ())
    result, summary = score_task(args) if args.task else score_split(args)
    print(summary)
    if args.json:
        write_json(args.json, result)


if __name__ == "__main__":
    main()
