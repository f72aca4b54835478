"""RoBERTa, and ours of `style` bert: the same network under other names."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasparse.config.schema import ModelConfig
from megasparse.hub.bert import BERTFormat

PADDING = 1
"""Its `pad_token_id`: real tokens have the positions from the one after it on, so two rows of the table come before."""
RENAMED = {
    "cls.predictions.transform.dense": "lm_head.dense",
    "cls.predictions.transform.LayerNorm": "lm_head.layer_norm",
    "cls.predictions.decoder": "lm_head.decoder",
    "cls.predictions.bias": "lm_head.bias",
}


class RoBERTaFormat(BERTFormat):
    """`RobertaForMaskedLM`: BERTFormat with the head under other names, one type of tokens, and two rows of the
    position table that only padding reads, which `max_position_embeddings` counts.
    """

    name = "roberta"
    architecture = "RobertaForMaskedLM"
    offset = PADDING + 1
    head = "lm_head."
    ignored = ("roberta.pooler.", "roberta.embeddings.position_ids")

    def their_name(self, name: str) -> str:
        start = next((start for start in RENAMED if name.startswith(start)), "")
        return RENAMED.get(start, "") + name.removeprefix(start)

    def inputs(self, tokens: Tensor) -> dict[str, Tensor]:
        positions = torch.arange(self.offset, self.offset + tokens.shape[1])
        return {"input_ids": tokens, "position_ids": positions.expand_as(tokens)}

    def _read_config(self, values: dict[str, Any], path: Path) -> Any:
        config = super()._read_config({"pad_token_id": PADDING, **values}, path)
        config.max_position_embeddings -= self.offset
        return config

    def _hf_config(self, model: ModelConfig) -> dict[str, Any]:
        positions = model.max_length + self.offset
        return {**super()._hf_config(model), "max_position_embeddings": positions, "pad_token_id": PADDING}


FORMAT = RoBERTaFormat()
