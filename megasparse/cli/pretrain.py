"""Pretrain a decoder, an encoder or an encoder-decoder.

    megasparse pretrain quickstart                                     # one process
    megasparse pretrain quickstart --dry-run                           # one step on dummy data
    megasparse supervise --ranks 2 --restarts 3 pretrain quickstart    # several, looked after
    deepspeed launch/pretrain.py --config configs/quickstart.json      # every GPU of this machine, or its CPU

Started again, the run resumes from its newest checkpoint in `run.directory`. SIGTERM, SIGINT and SIGUSR1 make it save
and end after the current step.
"""

import argparse

from megasparse.cli.arguments import add_training, config_from
from megasparse.config.schema import Config
from megasparse.training.stopping.signals import StopSignals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training(parser)


def run(args: argparse.Namespace) -> None:
    config = config_from(args, Config)
    signals = StopSignals()
    if not args.dry_run:
        signals.follow_launcher()
    # Imported when the configuration is known to be right: a mistake in it should be reported at once.
    from megasparse.runs.pretraining import pretrain, pretrain_dry_run

    if args.dry_run:
        print(pretrain_dry_run(config))
        return
    resume, changed = args.resume, args.allow_changed_config
    pretrain(config, resume=resume, allow_changed_config=changed, stop_at=args.stop_at, signals=signals)
