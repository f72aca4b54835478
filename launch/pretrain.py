"""Pretrain a decoder, an encoder or an encoder–decoder from a configuration file.

    deepspeed launch/pretrain.py --config configs/quickstart.json     # every GPU of this machine, or its CPU
    python launch/supervise.py --ranks 2 --restarts 3 launch/pretrain.py --config configs/quickstart.json
    python launch/pretrain.py --config configs/quickstart.json        # one process
    python launch/pretrain.py --config configs/quickstart.json --dry-run

Started again, the run goes on from its newest checkpoint in `run.directory`. SIGTERM, SIGINT and SIGUSR1 make it save
and end after the step at hand.
"""

import argparse
from contextlib import closing
from typing import Any

from megasparse.config.command_line import config_from, config_parser
from megasparse.config.schema import Config
from megasparse.errors import report_user_errors
from megasparse.training.stopping.signals import StopSignals


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
    config = config_from(args, Config)
    if not args.dry_run:
        signals = StopSignals()
        signals.follow_launcher()
    # Imported when the configuration is known to be right: a mistake in it should not take seconds to be told.
    from megasparse.evaluation.held_out import held_out
    from megasparse.model.build import build_model
    from megasparse.ops.random import RngContext
    from megasparse.planning.flops import hardware_flops_per_token, model_flops_per_token
    from megasparse.planning.report import dry_run_report
    from megasparse.training.batches import open_data, training_batches
    from megasparse.training.checkpoints.resume import find_start
    from megasparse.training.checkpoints.saving import Saver
    from megasparse.training.engine import build_engine
    from megasparse.training.loop import train
    from megasparse.training.ranks import start_ranks
    from megasparse.training.reporting.monitor import Monitor
    from megasparse.training.stopping.hooks import monitored

    if args.dry_run:
        print(dry_run_report(config))
        return

    def make_draws(step: int, samples: Any) -> RngContext:
        return RngContext(config.run.seed, step, samples, training=True)

    data = open_data(config)
    ranks = start_ranks(config.run, config.parallel.sequence)
    with monitored(config.run, ranks, signals) as hooks:
        saver = Saver(config, ranks, data.fingerprint, data.evaluation.tokenizer.model_dump(), hooks)
        start = find_start(args.resume, saver, args.allow_changed_config)
        step, position = (start.step, start.sequences) if start else (0, 0)
        model: Any = build_model(config.model, config.run.seed)
        if config.model.masking.whole_words:
            model.set_word_starts(data.tokenizer.word_starts())
        length = config.data.sequence_length
        flops = [count(config.model, length) for count in (model_flops_per_token, hardware_flops_per_token)]
        batches = training_batches(config, data, ranks, position, hooks)
        with closing(build_engine(model, config, make_draws, ranks, start)) as engine:
            evaluate = held_out(engine, data.evaluation, config, hooks)
            with batches, Monitor(config, ranks, step, *flops) as monitor:
                train(engine, config, batches, saver, monitor, start, evaluate, args.stop_at, hooks, batches.damage)
        ranks.stop()


if __name__ == "__main__":
    main()
