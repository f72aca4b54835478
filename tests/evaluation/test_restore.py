"""A restored model is the one that was trained: the loss that training reported last, whatever its heads are."""

import pytest
import torch

from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.evaluation.restore import restore
from megasparse.ops.random import RngContext
from tests.helpers.trained import prepared, trained


@pytest.mark.parametrize("pattern", [[{"local": 2, "lha": 2}], [{"yoso": 1, "lsh": 3}, {"routing": 2, "bigbird": 2}]])
def test_a_restored_model_has_the_loss_that_training_reported(tmp_path, pattern):
    data = prepared(tmp_path)
    lines = trained(data, tmp_path / "run", pattern, 6, evaluation={"every": 6, "sequences": 1})
    decoder, _, checkpoint, _ = restore(tmp_path / "run")
    assert checkpoint.step == 6
    tokens = EvaluationStream(Index.load(data), "validation").read(0, 64).unsqueeze(0)
    nats = decoder.token_scores(tokens, RngContext.evaluation(0, 1)).nats
    assert nats.mean().item() == pytest.approx(lines[-1]["evaluation/loss"], rel=1e-5)
    assert torch.isfinite(nats).all()
