"""Settings of low-rank adapters, in pretraining and in fine-tuning."""

from typing import Annotated

from pydantic import Field

from megasparse.config.section import Positive, Rate, Section


class LoRAConfig(Section):
    """Low-rank adapters on linear layers (Hu et al. 2021), by peft; the pretrained weights are frozen."""

    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0.0)] = 16.0
    """Adapters are scaled by alpha/rank."""
    dropout: Rate = 0.0
    targets: list[str] = Field(default=["query", "value"], min_length=1)
    """Names of the linear layers, their last parts: of BERT and of our models query, key, value, output, ..."""
