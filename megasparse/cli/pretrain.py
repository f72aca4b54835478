"""Pretrain a decoder, an encoder or an encoder-decoder.

    megasparse pretrain quickstart                                     # one process
    megasparse pretrain quickstart --dry-run                           # one step on dummy data
    megasparse supervise --ranks 2 --restarts 3 pretrain quickstart    # several, looked after
    deepspeed launch/pretrain.py --config configs/quickstart.json      # every GPU of this machine, or its CPU
    megasparse pretrain yoso_table3 --start models/bert-base-uncased   # a BERT's weights, another attention
    megasparse pretrain decoder_64k --start runs/smollm2 --data my_books/    # a downloaded decoder, one's own texts

Started again, the run resumes from its newest checkpoint in `run.directory`. SIGTERM, SIGINT and SIGUSR1 make it save
and end after the current step.
"""

import argparse

from megasparse.cli.arguments import add_start, add_training, config_from
from megasparse.config.schema import Config
from megasparse.errors import ConfigError
from megasparse.training.stopping.signals import StopSignals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training(parser)
    add_start(parser)
    parser.add_argument(
        "--data",
        metavar="TEXTS",
        help="text files, or JSON lines with a field `text`: a file or a folder, prepared once into run.directory;"
        " or a folder of shards",
    )


def run(args: argparse.Namespace) -> None:
    config = config_from(args, Config)
    if args.start is not None and args.resume != "auto":
        raise ConfigError(
            "--start", f"the weights of --resume {args.resume} are asked for too", "Leave one of them out"
        )
    signals = StopSignals()
    if not args.dry_run:
        signals.follow_launcher()
    # Imported when the configuration is known to be right: a mistake in it should be reported at once.
    from megasparse.runs.pretraining import pretrain, pretrain_dry_run

    if args.dry_run:
        for part in pretrain_dry_run(config):
            print(part, flush=True)
        return
    resume, changed = args.resume, args.allow_changed_config
    pretrain(
        config,
        resume=resume,
        start=args.start,
        texts=args.data,
        allow_changed_config=changed,
        stop_at=args.stop_at,
        signals=signals,
    )
