"""Padding and documents, read from the tokens themselves. B batch, L length, S ranks that share a sequence."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.heads import Padding
from megasparse.attention.sequence_part import WHOLE, SequencePart
from megasparse.config.schema import ModelConfig


def padding_of(tokens: Tensor, config: ModelConfig, part: SequencePart = WHOLE) -> Padding:
    """Return the padding and the documents of a batch. tokens: (B, L), or this rank's part of them. All but
    `padding_token` are real; each `document_separator` is its document's last token.
    """
    key_mask, segments = None, None
    if config.padding_token is not None:
        key_mask = part.gather(tokens != config.padding_token, 1)
    if config.document_separator is not None:
        ends = part.gather(tokens == config.document_separator, 1).long()
        segments = ends.cumsum(1) - ends
    return Padding(key_mask, segments, part)


def cut(tokens: Tensor, config: ModelConfig, group: torch.distributed.ProcessGroup | None) -> tuple[Tensor, Padding]:
    """This rank's part of sequences (B, L) of any length that all ranks of a group have whole, and their padding: where
    S does not divide L, masked tokens are added at the end.
    """
    part, padding = SequencePart.of(group), padding_of(tokens, config)
    key_mask, missing = padding.key_mask, -tokens.shape[1] % part.size
    if missing and key_mask is None:
        key_mask = torch.ones_like(tokens, dtype=torch.bool)
    key_mask, segments = (None if x is None else F.pad(x, (0, missing)) for x in (key_mask, padding.segments))
    return part.own(F.pad(tokens, (0, missing)), 1), Padding(key_mask, segments, part)
