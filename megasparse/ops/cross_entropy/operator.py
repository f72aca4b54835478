"""The scores of tokens, by the implementation that suits the device. N tokens, V vocabulary."""

from torch import Tensor

from megasparse.ops.autocast import without_autocast
from megasparse.ops.backend import implementation
from megasparse.ops.cross_entropy import blockwise, reference


@without_autocast
def token_scores(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Scores of every token, a column each: −ln p of its target under softmax(logits); 1 where the target is the
    likeliest id (the first of equals), else 0; and with smoothing ε a third, (1 − ε) times the first plus ε times the
    mean of −ln p over all ids.

    logits: (N, V). targets: (N,) int64 ids. Returns (N, 2) or (N, 3) in fp32 at least; all but the second have
    gradients.
    """
    name = implementation(logits, largest_width=None)
    if name == "triton":
        from megasparse.ops.cross_entropy import gpu

        return gpu.token_scores(logits, targets, smoothing)
    return (reference if name == "reference" else blockwise).token_scores(logits, targets, smoothing)
