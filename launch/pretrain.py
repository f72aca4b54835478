"""Pretrain a decoder, or an encoder, from a configuration file.

    deepspeed launch/pretrain.py --config configs/quickstart.json     # every GPU of this machine, or its CPU
    python launch/pretrain.py --config configs/quickstart.json        # one process
    python launch/pretrain.py --config configs/quickstart.json --dry-run

Started again, the run goes on from its newest checkpoint in `run.directory`.
"""

import argparse

from torch import Tensor, nn

from megasparse.config.command_line import config_from, config_parser
from megasparse.config.schema import Config
from megasparse.data.batches import TrainingBatches
from megasparse.data.index import Index
from megasparse.data.tokenizer import build_tokenizer
from megasparse.errors import report_user_errors
from megasparse.evaluation.held_out import held_out
from megasparse.model.build import build_model
from megasparse.ops.random import Draws
from megasparse.planning.dry_run import dry_run
from megasparse.planning.flops import model_flops_per_token
from megasparse.training.engine import build_engine
from megasparse.training.loop import train
from megasparse.training.monitor import Monitor
from megasparse.training.ranks import Ranks, start_ranks
from megasparse.training.resume import find_start
from megasparse.training.saving import Saver


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

    def make_draws(step: int, samples: Tensor) -> Draws:
        return Draws(config.run.seed, step, samples, training=True)

    if args.dry_run:
        print(dry_run(config, fresh_model, make_draws).lines(config))
        return
    index = Index.load(config.data.path)
    index.require_tokenizer(build_tokenizer(config.data.tokenizer))
    ranks = start_ranks(config.run)
    saver = Saver(config, ranks, index.fingerprint, index.file.tokenizer.model_dump())
    start = find_start(args.resume, saver, args.allow_changed_config)
    step, position = (start.step, start.sequences) if start else (0, 0)
    engine = build_engine(fresh_model(config), config, make_draws, ranks, start)
    flops = model_flops_per_token(config.model, config.data.sequence_length)
    with Monitor(config, ranks, step, flops) as monitor, batches(config, index, ranks, position) as data:
        train(engine, config, data, saver, monitor, step, held_out(engine, index, config), args.stop_at)
    engine.close()
    ranks.stop()


def fresh_model(config: Config) -> nn.Module:
    return build_model(config.model, config.run.seed)


def batches(config: Config, index: Index, ranks: Ranks, position: int) -> TrainingBatches:
    data, training = config.data, config.training
    sizes = {"global_batch": training.global_batch, "micro_batch": training.micro_batch}
    place = {"rank": ranks.rank, "world_size": ranks.world_size, "start": position, "prefetch": data.prefetch}
    order = {"seed": config.run.seed, "shuffle_shards": data.shuffle_shards}
    return TrainingBatches(index, data.split, sequence_length=data.sequence_length, **sizes, **place, **order)


if __name__ == "__main__":
    main()
