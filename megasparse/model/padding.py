"""Which tokens are real, and which document each belongs to, told by the tokens themselves. B batch, L length."""

from torch import Tensor

from megasparse.attention.heads import Padding
from megasparse.config.schema import ModelConfig


def padding_of(tokens: Tensor, config: ModelConfig) -> Padding:
    """tokens: (B, L). All but `padding_token` are real; each `document_separator` is its document's last token."""
    key_mask, segments = None, None
    if config.padding_token is not None:
        key_mask = tokens != config.padding_token
    if config.document_separator is not None:
        ends = (tokens == config.document_separator).long()
        segments = ends.cumsum(1) - ends
    return Padding(key_mask, segments)
