"""Lists of clusters for `cluster_attention`, each document's chosen as if it were alone.

B batch, H heads, L length, D head dim, W clusters, M places of a cluster.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megasparse.attention.contract import AttentionInputs
from megasparse.attention.documents import Document, documents
from megasparse.ops.custom import custom

Lists = tuple[Tensor, Tensor]
"""Queries and keys of every cluster: token numbers, (B, H, W, M) each, −1 at empty places."""


def clusters_by_document(inputs: AttentionInputs, choose: Callable[[Document], Lists]) -> Lists:
    """The clusters of all documents side by side, int32. choose: a document's own, as numbers of its tokens; a
    dataclass of tensors and constants, so that torch.compile has one operator for all documents.
    """
    if inputs.key_mask is None and inputs.segments is None:
        queries, keys = choose(Document(slice(None), None))
        return queries.to(torch.int32), keys.to(torch.int32)
    return _clusters_by_document(inputs, choose)


def _like(inputs: AttentionInputs, choose: Callable[[Document], Lists]) -> Lists:
    """Lists of sizes that the documents decide, which a compiled graph does not know."""
    size = torch.library.get_ctx().new_dynamic_size
    queries, keys = (inputs.q.new_empty(*inputs.q.shape[:2], size(), size(), dtype=torch.int32) for _ in range(2))
    return queries, keys


@custom(_like, copies=True)
def _clusters_by_document(inputs: AttentionInputs, choose: Callable[[Document], Lists]) -> Lists:
    batch, count = inputs.q.shape[:2]
    empty = torch.full((count, 1, 1), -1, dtype=torch.int64, device=inputs.q.device)
    rows: list[list[Lists]] = [[(empty, empty)] for _ in range(batch)]
    for document in documents(inputs.key_mask, inputs.segments):
        assert document.tokens is not None
        queries, keys = choose(document)
        numbers = F.pad(document.tokens, (0, 1), value=-1)  # the last one is that of an empty place
        rows[document.rows.start].append((numbers[queries[0]], numbers[keys[0]]))
    return _side_by_side([[part[0] for part in row] for row in rows]), _side_by_side([[p[1] for p in r] for r in rows])


def _side_by_side(rows: list[list[Tensor]]) -> Tensor:
    """Lists (H, W, M) of each row's documents, as one (B, H, ΣW, M) with empty places at the ends."""
    size = max(part.shape[-1] for row in rows for part in row)
    joined = [torch.cat([F.pad(part, (0, size - part.shape[-1]), value=-1) for part in row], dim=1) for row in rows]
    clusters = max(row.shape[1] for row in joined)
    full = [F.pad(row, (0, 0, 0, clusters - row.shape[1]), value=-1) for row in joined]
    return torch.stack(full).to(torch.int32)
