"""A mechanism's attention weights as a matrix, and as a picture. B batch, H heads, L length."""

import torch
from torch import Tensor

from megasparse.attention.contract import Attention
from megasparse.attention.observation import Call
from megasparse.evaluation.pictures import BACKGROUND


@torch.no_grad()
def weights_of(call: Call, mechanism: Attention) -> Tensor:
    """The attention matrix (B, H, L, L) of a mechanism on a call's input, in the dtype of its output.

    These are its outputs of one-hot values, some columns at a time, so it holds for whatever is linear in the values.
    A mechanism that scales each output to length 1 gets one column more with the value 1 of every key, by which the
    others are divided: its rows, too, sum to 1.
    """
    length, width = call.inputs.v.shape[2:]
    normalises = mechanism.normalises
    step = width - normalises
    one_hot = torch.eye(length, dtype=call.inputs.v.dtype, device=call.inputs.v.device)
    columns = []
    for start in range(0, length, step):
        piece = one_hot[:, start : start + step]
        v = torch.zeros_like(call.inputs.v)
        v[..., : piece.shape[1]] = piece
        if normalises:
            v[..., -1] = 1.0
        out = call.run(mechanism, v)
        total = out[..., -1:]
        columns.append(torch.where(total > 0, out / total, 0.0) if normalises else out)
        columns[-1] = columns[-1][..., : piece.shape[1]]
    return torch.cat(columns, dim=-1)


LEGEND = "a query a row, a key a column; white: not seen; blue: seen; darker: more of its query's attention"
"""What `attention_map` draws, for the foot of a sheet."""


def attention_map(weights: Tensor, visible: Tensor, size: int = 256, causal: bool = False) -> Tensor:
    """A picture of attention matrices (..., L, L): uint8 (..., S, S, 3), S = min(L, size).

    Queries downwards, keys to the right. White is not visible, blue visible; darker has more of its query's weight. Of
    the pairs that share a pixel the strongest shows. causal: keys behind their query are ground, not part of the map.
    """
    if causal:
        weights, visible = weights.tril(), visible.tril()
    strength = (weights / weights.amax(-1, keepdim=True).clamp_min(1e-30)).sqrt() * visible
    side = min(weights.shape[-1], size)
    shape = (*weights.shape[:-2], side, side)
    dark, seen = (
        torch.nn.functional.adaptive_max_pool2d(x.float().reshape(-1, *x.shape[-2:]), side).reshape(shape)
        for x in (strength, visible)
    )
    blue = torch.tensor([0.75, 0.87, 1.0], device=weights.device)
    paper = 1.0 - seen.unsqueeze(-1) * (1.0 - blue)
    picture = (255 * paper * (1.0 - dark.unsqueeze(-1))).round().to(torch.uint8)
    if causal:
        later = torch.ones(side, side, dtype=torch.bool, device=weights.device).triu(1)
        picture[..., later, :] = torch.tensor(BACKGROUND, dtype=torch.uint8, device=weights.device)
    return picture
