"""The training data of a run, for one of its ranks."""

from collections.abc import Callable

from megasparse.config.schema import Config
from megasparse.data.batches import TrainingBatches
from megasparse.data.index import Index
from megasparse.training.ranks import Ranks


def training_batches(
    config: Config, index: Index, ranks: Ranks, position: int, stop_waiting: Callable[[], bool]
) -> TrainingBatches:
    """This rank's steps from the global sample number `position` on; see data/batches.py for the errors."""
    data, training = config.data, config.training
    return TrainingBatches(
        index,
        data.split,
        sequence_length=data.sequence_length,
        seed=config.run.seed,
        shuffle_shards=data.shuffle_shards,
        global_batch=training.global_batch,
        micro_batch=training.micro_batch,
        rank=ranks.rank,
        world_size=ranks.world_size,
        start=position,
        prefetch=data.prefetch,
        max_damaged=data.max_damaged,
        stop_waiting=stop_waiting,
    )
