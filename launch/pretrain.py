"""Pretrain a decoder, an encoder or an encoder–decoder from a configuration file.

    deepspeed launch/pretrain.py --config configs/quickstart.json     # every GPU of this machine, or its CPU
    python launch/supervise.py --ranks 2 --restarts 3 launch/pretrain.py --config configs/quickstart.json
    python launch/pretrain.py --config configs/quickstart.json        # one process
    python launch/pretrain.py --config configs/quickstart.json --dry-run

Started again, the run goes on from its newest checkpoint in `run.directory`. SIGTERM, SIGINT and SIGUSR1 make it save
and end after the step at hand.
"""

import argparse

from megasparse.config.command_line import config_from, config_parser
from megasparse.config.schema import Config
from megasparse.errors import report_user_errors
from megasparse.training.stopping.signals import StopSignals


def arguments() -> argparse.Namespace:
    parser = config_parser(__doc__)
    parser.add_argument("--resume", default="auto", metavar="auto|never|PATH", help="the checkpoint to go on from")
    parser.add_argument("--allow-changed-config", action="store_true", help="resume although the configuration differs")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and end after this step")
    parser.add_argument("--dry-run", action="store_true", help="one step on dummy data; writes nothing")
    return parser.parse_args()


@report_user_errors
def main() -> None:
    args = arguments()
    config = config_from(args, Config)
    signals = StopSignals()
    signals.follow_launcher()
    # Imported when the configuration is known to be right: a mistake in it should show at once.
    from megasparse.runs.pretraining import pretrain, pretrain_dry_run

    if args.dry_run:
        print(pretrain_dry_run(config))
        return
    pretrain(
        config,
        resume=args.resume,
        allow_changed_config=args.allow_changed_config,
        stop_at=args.stop_at,
        signals=signals,
    )


if __name__ == "__main__":
    main()
