"""Reformer's claim on reversible layers: they keep nothing per layer, and their gradients are those of kept ones."""

from collections.abc import Sequence
from typing import Any

import torch

from megasparse.claims.claim import Claim, Curve, Judgement, Numbers, Picture, Trial
from megasparse.config.load import load_config
from megasparse.config.schema import Config
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.pass_memory import PassMemory

BLOCKS = {"reversible": ("reversible", "reversible"), "ordinary": ("ordinary", "stored")}
"""Blocks and activations of the two models whose memory is compared."""


def _config(trial: Trial, layers: int, blocks: str, activations: str) -> Config:
    length = trial.settings["length"]
    settings = {"layers": layers, "blocks": blocks, "activations": activations, "max_length": length}
    words = [f"model.{key}={value}" for key, value in settings.items()]
    words += [f"data.sequence_length={length}", 'model.attention.pattern=["local","lsh"]']
    return load_config("quickstart", words)


def measure(trial: Trial) -> Numbers:
    """bytes: peak of a pass beside the weights, by depth, counted on the GPU path. error: of the gradient of a
    reversible model, relative, with the states recomputed against the same model with the states kept, in fp32."""
    memory: dict[str, list[int]] = {}
    for name, (blocks, activations) in BLOCKS.items():
        memory[name] = []
        for layers in trial.settings["layers"]:
            trial.progress(f"{name}, {layers} layers")
            config = _config(trial, layers, blocks, activations)
            memory[name].append(PassMemory(config, "counted").curve.bytes(1, trial.settings["length"], gradients=0))
    gradients = [
        _gradient(_config(trial, max(trial.settings["layers"]), "reversible", activations), trial.seed)
        for activations in ("reversible", "stored")
    ]
    error = float((gradients[0] - gradients[1]).norm() / gradients[1].norm())
    return {"layers": trial.settings["layers"], **memory, "error": error}


def _gradient(config: Config, seed: int) -> torch.Tensor:
    """The whole gradient of one sequence of random tokens, fp64."""
    model: Any = build_model(config.model, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(256, (1, 512), generator=generator)
    objective, _ = model(tokens, RngContext(seed, 0, torch.arange(1), training=True))
    objective.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def judge(runs: Sequence[Numbers]) -> Judgement:
    layers, worst = runs[0]["layers"], max(run["error"] for run in runs)
    slopes = {name: (runs[0][name][-1] - runs[0][name][0]) / (layers[-1] - layers[0]) for name in BLOCKS}
    share = slopes["reversible"] / slopes["ordinary"]
    table = [["MB at the peak", *(f"{n} layers" for n in layers)]]
    table += [[name, *(f"{count / 1e6:.1f}" for count in runs[0][name])] for name in BLOCKS]
    sentence = f"a layer more costs {share:.1%} of what it costs ordinary blocks; gradients differ by {worst:.1e}"
    return Judgement(share < 0.05 and worst <= 1e-5, sentence, table)


def draw(runs: Sequence[Numbers]) -> Picture:
    curves = [Curve(name, runs[0]["layers"], [count / 1e6 for count in runs[0][name]]) for name in BLOCKS]
    return Picture("peak of a pass beside the weights", "layers", "MB", curves)


REVERSIBLE = Claim(
    name="reversible",
    paper="Reformer, section 3",
    says="With reversible layers the memory of activations does not depend on depth.",
    rule="From 2 to 16 layers a layer more costs less than 5 % of what it costs with ordinary blocks (bytes counted on "
    "the GPU path); gradients are those of kept states within 1e-5, relative, in fp32.",
    budgets={"cpu": {"layers": [2, 4, 8, 16], "length": 4096, "minutes": 2}},
    measure=measure,
    judge=judge,
    draw=draw,
)
