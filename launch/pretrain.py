"""Pretrain a decoder, or an encoder, from a configuration file.

    deepspeed launch/pretrain.py --config configs/quickstart.json     # every GPU of this machine, or its CPU
    python launch/supervise.py --ranks 2 --restarts 3 launch/pretrain.py --config configs/quickstart.json
    python launch/pretrain.py --config configs/quickstart.json        # one process
    python launch/pretrain.py --config configs/quickstart.json --dry-run

Started again, the run goes on from its newest checkpoint in `run.directory`. SIGTERM, SIGINT and SIGUSR1 make it save
and end after the step at hand.
"""

import argparse
from typing import Any

from megasparse.config.command_line import config_from, config_parser
from megasparse.errors import report_user_errors
from megasparse.training.signals import StopSignals


def arguments() -> argparse.Namespace:
    parser = config_parser(__doc__)
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="the checkpoint to go on from")
    parser.add_argument("--allow-changed-config", action="store_true", help="resume although the configuration differs")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and end after this step")
    parser.add_argument("--dry-run", action="store_true", help="one step on made-up data; writes nothing")
    return parser.parse_args()


@report_user_errors
def main() -> None:
    args = arguments()
    config = config_from(args)
    if not args.dry_run:
        signals = StopSignals()
        signals.follow_launcher()
    # Imported when the configuration is known to be right: a mistake in it should not take seconds to be told.
    from megasparse.data.index import Index
    from megasparse.data.tokenizers import build_tokenizer
    from megasparse.evaluation.held_out import held_out
    from megasparse.model.build import build_model
    from megasparse.ops.random import Draws
    from megasparse.planning.dry_run import dry_run
    from megasparse.planning.flops import model_flops_per_token
    from megasparse.training.batches import training_batches
    from megasparse.training.engine import build_engine
    from megasparse.training.loop import train
    from megasparse.training.monitor import Monitor
    from megasparse.training.ranks import start_ranks
    from megasparse.training.resume import find_start
    from megasparse.training.saving import Saver
    from megasparse.training.watch import watching

    if args.dry_run:
        print(dry_run(config).lines(config))
        return

    def make_draws(step: int, samples: Any) -> Draws:
        return Draws(config.run.seed, step, samples, training=True)

    index = Index.load(config.data.path, tolerant=config.data.max_damaged > 0)
    index.require_tokenizer(build_tokenizer(config.data.tokenizer))
    ranks = start_ranks(config.run)
    with watching(config.run, ranks, signals) as watch:
        saver = Saver(config, ranks, index.fingerprint, index.file.tokenizer.model_dump(), watch)
        start = find_start(args.resume, saver, args.allow_changed_config)
        step, position = (start.step, start.sequences) if start else (0, 0)
        engine = build_engine(build_model(config.model, config.run.seed), config, make_draws, ranks, start)
        evaluate = held_out(engine, index, config, watch)
        flops = model_flops_per_token(config.model, config.data.sequence_length)
        data = training_batches(config, index, ranks, position, watch.stop_wanted)
        with data, Monitor(config, ranks, step, flops) as monitor:
            train(engine, config, data, saver, monitor, start, evaluate, args.stop_at, watch, data.damage.summary)
        engine.close()
        ranks.stop()


if __name__ == "__main__":
    main()
