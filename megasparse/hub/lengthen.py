"""Longer inputs for a pretrained encoder: its table of positions, repeated (as LHA and YOSO do it).

P positions of the table that stand for tokens, E width.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from megasparse.errors import HubError

OFFSET = {"roberta", "xlm-roberta"}
"""Families whose first token has the position pad_token_id + 1."""


def position_offset(model: PreTrainedModel) -> int:
    """Rows of the table before that of the first token."""
    return model.config.pad_token_id + 1 if model.config.model_type in OFFSET else 0


def positions(model: PreTrainedModel) -> int:
    """Tokens of the longest input that the model has positions for."""
    return int(model.config.max_position_embeddings) - position_offset(model)


@torch.no_grad()
def extend_positions(model: PreTrainedModel, length: int, tokenizer: Any = None) -> None:
    """Let a pretrained encoder take `length` tokens, in place: position i gets the embedding of position i mod P.

    The configuration, the buffers that hold positions, and the tokenizer where one is given, follow. Raises HubError
    where the model has more positions already.
    """
    old, offset = positions(model), position_offset(model)
    if length < old:
        problem = f"has {old} positions, more than the {length} asked for"
        raise HubError(type(model).__name__, problem, f"Ask for {old} or more")
    embeddings: Any = model.base_model.embeddings
    table: nn.Embedding = embeddings.position_embeddings
    rows = torch.arange(length, device=table.weight.device) % old + offset
    longer = torch.cat([table.weight[:offset], table.weight[rows]])
    table.weight = nn.Parameter(longer, requires_grad=table.weight.requires_grad)
    table.num_embeddings = model.config.max_position_embeddings = len(longer)
    embeddings.position_ids = torch.arange(len(longer), device=longer.device).expand(1, -1)
    if hasattr(embeddings, "token_type_ids"):
        embeddings.token_type_ids = torch.zeros_like(embeddings.position_ids)
    if tokenizer is not None:
        tokenizer.model_max_length = length
