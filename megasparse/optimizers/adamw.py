"""AdamW (Loshchilov and Hutter 2017)."""

from typing import TYPE_CHECKING, Any

from megasparse.optimizers.spec import OptimizerSpec, Settings

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer


class AdamWSpec(OptimizerSpec):
    """AdamW with two fp32 moments a weight."""

    bytes_per_weight = 8

    def build(self, groups: list[dict[str, Any]], settings: Settings) -> "Optimizer":
        from torch.optim import AdamW

        # fused: one pass over memory and no temporaries as large as the weights, on the CPU as on a GPU
        return AdamW(groups, lr=0.0, betas=settings.betas, eps=settings.eps, fused=True)

    def initial_state(self, weight: "Tensor") -> dict[str, "Tensor"]:
        import torch

        first, second = (torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) for _ in range(2))
        step = torch.zeros((), dtype=torch.float32, device=weight.device)
        return {"step": step, "exp_avg": first, "exp_avg_sq": second}
