"""Fine-tune a pretrained model on a downstream task, or on one's own CSV or JSONL file.

    python launch/finetune.py --config configs/finetune/quick.json [--dry-run]    # a minute on a CPU
    python launch/finetune.py --config configs/finetune/own_data_4k.json --set task.source=reviews.csv \\
        --set 'task.text=["review"]' --set task.label=stars --set start.huggingface=models/encoder
    deepspeed launch/finetune.py --config configs/finetune/glue_mnli.json            # every GPU of this machine

Started again, it goes on from its newest checkpoint. launch/evaluate.py --task and launch/predict.py read its best one.
"""

import argparse

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
    # Imported when the configuration is known to be right: a mistake in it should show at once.
    from megasparse.runs.finetuning import finetune, finetune_dry_run

    if args.dry_run:
        print(finetune_dry_run(config))
        return
    finetune(
        config,
        resume=args.resume,
        allow_changed_config=args.allow_changed_config,
        stop_at=args.stop_at,
        signals=signals,
    )


if __name__ == "__main__":
    main()
