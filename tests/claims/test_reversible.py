"""Reformer's claims on reversible layers: constant memory in depth, and the same gradients as with stored states."""

import torch

from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.passes import ConfiguredPass
from megasparse.settings.load import load_config
from tests.claims.claim import claim

BLOCKS = {"reversible": ("reversible", "reversible"), "ordinary": ("ordinary", "stored")}
"""Blocks and activations of the two models whose memory is compared."""


def config_of(length, **settings):
    words = [f"model.{key}={value}" for key, value in {**settings, "max_length": length}.items()]
    words += [f"data.sequence_length={length}", 'model.attention.pattern=["local","lsh"]']
    return load_config("quickstart_relu", words)


def measure_memory(trial):
    """Count the peak of a pass without weights in bytes, by depth, on the GPU path."""
    length, depths = trial.settings["length"], trial.settings["layers"]
    peaks = {name: [] for name in BLOCKS}
    for name, (blocks, activations) in BLOCKS.items():
        for layers in depths:
            config = config_of(length, layers=layers, blocks=blocks, activations=activations)
            peaks[name].append(ConfiguredPass(config).count(length).peak(0))
    return {"layers": depths, **peaks}


@claim(
    "Reformer, section 3",
    "With reversible layers the memory of activations does not depend on depth.",
    "From 2 to 16 layers one more layer costs less than 5 % of its cost with ordinary blocks (bytes counted on the GPU "
    "path).",
    cpu={"layers": [2, 4, 8, 16], "length": 4096, "minutes": 1},
    small={"layers": [2, 3], "length": 512},
    seeds=(0,),
)
def test_reversible_memory(trials):
    (run,) = trials.run(measure_memory)
    layers = run["layers"]
    slopes = {name: (run[name][-1] - run[name][0]) / (layers[-1] - layers[0]) for name in BLOCKS}
    share = slopes["reversible"] / slopes["ordinary"]
    table = [["MB at the peak", *(f"{n} layers" for n in layers)]]
    table += [[name, *(f"{count / 1e6:.1f}" for count in run[name])] for name in BLOCKS]
    sentence = f"one more layer costs {share:.1%} of its cost with ordinary blocks"
    trials.verdict(sentence, {"memory does not depend on depth": share < 0.05}, table)


ARMS = {
    "fp32, ReLU": (torch.float32, {}),
    "fp32, GELU": (torch.float32, {"feed_forward": "gelu"}),
    "fp64, ReLU": (torch.float64, {}),
}


def measure_gradients(trial):
    """Compute the relative error of the whole gradient with recomputed states, against stored states."""
    errors = {}
    for arm, (dtype, settings) in ARMS.items():
        recomputed, stored = (gradient(trial, dtype, states, settings) for states in ("reversible", "stored"))
        errors[arm] = float((recomputed - stored).norm() / stored.norm())
    return errors


def gradient(trial, dtype, states, settings):
    length, layers = trial.settings["length"], trial.settings["layers"]
    config = config_of(length, layers=layers, blocks="reversible", activations=states, **settings)
    model = build_model(config.model, trial.seed, dtype)
    tokens = torch.randint(256, (1, length), generator=torch.Generator().manual_seed(trial.seed))
    objective, _ = model(tokens, RngContext(trial.seed, 0, torch.arange(1), training=True))
    objective.backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@claim(
    "Reformer, section 3",
    "Gradients from recomputed states equal gradients from stored states.",
    "At 16 layers the relative difference of the gradients in fp32 with ReLU is at most 1e-5 for every seed. GELU and "
    "fp64 are reported and not judged. (It was part of reversible_memory's rule. When one seed of three missed it, "
    "with 4.4e-5, it became a claim with ten seeds and the variants that show the cause: rounding moves the input of a "
    "hidden unit across 0, where the derivative of ReLU jumps.)",
    cpu={"layers": 16, "length": 512, "minutes": 1},
    small={"layers": 2, "length": 256},
    seeds=tuple(range(10)),
)
def test_reversible_gradients(trials):
    runs = trials.run(measure_gradients)
    worst = {arm: max(run[arm] for run in runs) for arm in ARMS}
    table = [["relative error", *(f"trial {number}" for number in range(len(runs)))]]
    table += [[arm, *(f"{run[arm]:.1e}" for run in runs)] for arm in ARMS]
    errors = ", ".join(f"{arm} {error:.1e}" for arm, error in worst.items())
    trials.verdict(f"largest of all trials: {errors}", {"equal gradients": worst["fp32, ReLU"] <= 1e-5}, table)
