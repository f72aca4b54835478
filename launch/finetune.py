"""Fine-tune a pretrained model on a downstream task, or on one's own CSV or JSONL file.

    python launch/finetune.py --config configs/finetune/quick.json [--dry-run]    # a minute on a CPU
    python launch/finetune.py --config configs/finetune/own_data_4k.json --set task.source=reviews.csv \\
        --set 'task.text=["review"]' --set task.label=stars --set start.huggingface=models/encoder
    deepspeed launch/finetune.py --config configs/finetune/glue_mnli.json            # every GPU of this machine

Started again, it goes on from its newest checkpoint. launch/evaluate.py --task and launch/predict.py read its best one.
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

from megasparse.config.command_line import config_from, config_parser
from megasparse.config.finetuning import FinetuneConfig
from megasparse.errors import report_user_errors
from megasparse.training.stopping.signals import StopSignals


def arguments() -> argparse.Namespace:
    parser = config_parser(__doc__)
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="the checkpoint to go on from")
    parser.add_argument("--allow-changed-config", action="store_true", help="resume although the configuration differs")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and end after this step")
    parser.add_argument("--dry-run", action="store_true", help="predict the memory it takes; writes nothing")
    return parser.parse_args()


@report_user_errors
def main() -> None:
    args = arguments()
    config = config_from(args, FinetuneConfig)
    signals = StopSignals()
    signals.follow_launcher()
    # Imported when the configuration is known to be right: a mistake in it should not take seconds to be told.
    from megasparse.ops.random import RngContext
    from megasparse.tasks.memory_check import predict, require_fit
    from megasparse.tasks.run import open_run
    from megasparse.tasks.scoring import selection_of, validation
    from megasparse.training.checkpoints.resume import find_start
    from megasparse.training.checkpoints.saving import Saver
    from megasparse.training.engine import build_engine
    from megasparse.training.loop import train
    from megasparse.training.ranks import start_ranks
    from megasparse.training.reporting.monitor import Monitor
    from megasparse.training.stopping.hooks import monitored

    ranks = start_ranks(config.run)
    say = lambda line: print(line, file=sys.stderr) if ranks.rank == 0 else None  # noqa: E731
    run = open_run(config, say)
    config, directory = run.config, Path(run.config.run.directory)
    if args.dry_run:
        print(predict(run, ranks).lines())
        return
    require_fit(run, ranks, say)
    make_draws = lambda step, samples: RngContext(config.run.seed, step, samples, training=True)  # noqa: E731
    with monitored(config.run, ranks, signals) as hooks:
        tokenizer = {"name": run.start.tokenizer.name, "sha256": run.start.tokenizer.sha256}
        saver = Saver(config, ranks, run.fingerprint, tokenizer, hooks)
        start = find_start(args.resume, saver, args.allow_changed_config)
        step, position = (start.step, start.sequences) if start else (0, 0)
        if ranks.rank == 0:
            run.start.write(directory)
        selection = selection_of(config)
        with closing(build_engine(run.model, config, make_draws, ranks, start)) as engine:
            evaluate = validation(run, engine, hooks)
            with Monitor(config, ranks, step) as monitor:
                batches = run.batches(ranks, position)
                when = (start, evaluate, args.stop_at, hooks)
                complete = train(engine, config, batches, saver, monitor, *when, selection=selection)
        if complete and ranks.rank == 0:
            selection.write(directory / "best.json")
        ranks.stop()


if __name__ == "__main__":
    main()
