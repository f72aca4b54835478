"""Timelines of a step: against hand-made ones, the planner's closed forms, and what two gloo ranks really sent."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
import torch
import torch.distributed

from megasparse.cli.main import door
from megasparse.config.load import build_config
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext
from megasparse.planning.hardware import GPUS
from megasparse.planning.plan import Assumptions, Plan
from megasparse.planning.timeline import Circumstances, Task, run, timeline
from megasparse.training.engines import build_engine
from megasparse.training.ranks import start_ranks
from tests.helpers import commands
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import DummyBatches, tiny_config

MODEL = {"max_length": 24, "layers": 2, "d_model": 32, "d_ff": 64, "heads": 4, "attention": {"pattern": ["lsh"]}}
MODEL["attention"]["lsh"] = {"chunk": 4, "shared_qk": False}
CPU = {"device": "cpu"}


def planned(stage=3, gpus=2, sequence=2, batch=1, offload=False, **model):
    zero = {"stage": stage} | ({"offload_param": CPU, "offload_optimizer": CPU} if offload else {})
    config = build_config(
        {
            "model": {**MODEL, **model},
            "data": {"sequence_length": 24},
            "training": {"global_batch": batch},
            "parallel": {"sequence": sequence},
            "deepspeed": {"zero_optimization": zero},
        }
    )
    return Plan(config, Assumptions(GPUS["A100"], gpus=gpus))


def test_tasks_wait_for_what_they_need_and_for_other_ranks():
    tasks = [
        Task("a", "compute", 2.0),
        Task("b", "gather", 1.0, group=2),
        Task("c", "exchange", 1.0, group=2, needs=(0,)),
        Task("d", "compute", 1.0, needs=(1, 2)),
        Task("e", "compute", 1.0),
    ]
    found = run(tasks, 2, Circumstances({1: 2.0}, {0: 3.0}))
    expected = [[(0, 2), (0, 4)], [(0, 3), (0, 3)], [(4, 7), (4, 7)], [(7, 8), (7, 9)], [(8, 9), (9, 11)]]
    np.testing.assert_array_equal(np.stack([found.begin, found.end], -1), expected)
    assert found.seconds == 11 and found.busy("compute", 1) == 8


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("activations", ["reversible", "stored"])
def test_what_is_sent_is_what_the_planner_counts(stage, activations):
    blocks = {"blocks": "ordinary", "activations": "stored"} if activations == "stored" else {}
    plan = planned(stage, gpus=4, batch=6, offload=stage == 3, **blocks)
    found = timeline(plan)
    assert found.moved("gather") == pytest.approx(plan.communication.zero)
    assert found.moved("exchange") == pytest.approx(plan.communication.sequence)
    swap = plan.offload
    assert found.moved("swap") == pytest.approx(swap.weights + swap.gradients + swap.optimizer)
    assert found.busy("compute", 0) == pytest.approx(plan.time.total)


def test_exchanges_are_waited_for_and_the_rest_hides_behind_computing():
    """A long computation hides all but the first weights, which nothing precedes, and the last gradients."""
    plan = planned(gpus=8, sequence=4, batch=2, offload=True)
    plan.time = plan.time.__class__(*(1.0,) * 7)
    found = timeline(plan)
    waited = found.seconds - plan.time.total - plan.communication.sequence_seconds
    assert 0 < waited < plan.communication.zero_seconds + plan.offload.seconds
    names = [task.name for task in found.tasks]
    assert found.end[names.index("weights 1"), 0] < found.begin[names.index("forward 1"), 0]  # while layer 0 computes
    reduced = [number for number, name in enumerate(names) if name.startswith("gradients")]
    assert found.begin[names.index("optimizer"), 0] >= found.end[reduced].max()


def test_what_is_slow_slows_the_step():
    plan = planned(gpus=4, batch=2, offload=True)
    plain = timeline(plan).seconds
    rank = timeline(plan, Circumstances(slow_ranks={1: 2.0}))
    assert plain + 0.9 * plan.time.passes < rank.seconds <= plain + plan.time.total + 1e-9
    assert rank.busy("compute", 0) == pytest.approx(plan.time.total)  # it waits, and works no longer
    link = timeline(plan, Circumstances(slow_links={3: 5.0})).seconds
    assert link >= plain + 4 * plan.communication.sequence_seconds - 1e-12
    wanted = sum(plan.memory.host.values()) * 4
    hosts = [timeline(plan, Circumstances(host=int(wanted * share))).seconds for share in (2.0, 1.0, 0.5, 0.0)]
    assert hosts[0] == hosts[1] == plain < hosts[2] < hosts[3]


LAYERS, LIVE = 4, 20_000
"""Layers of 8,416 weights, of which two are live at a time."""
SENT = {
    # Collective -> where its own tensor is among the arguments, by name; what a rank sends of it in a ring of two.
    "all_to_all_single": (1, "input", 0.5),
    "all_gather_into_tensor": (1, "input_tensor", 1.0),
    "reduce_scatter_tensor": (1, "input", 0.5),
    "all_reduce": (0, "tensor", 1.0),
}


def sent_by_two_ranks(directory):
    """Bytes that a rank sends in the second step under ZeRO 3 and a shared sequence, of each message."""
    sent = {name: [] for name in SENT}

    def counted(name, place, own, share, collective):
        def call(*args, **kwargs):
            tensor = args[place] if len(args) > place else kwargs[own]
            sent[name].append(share * tensor.numel() * tensor.element_size())
            return collective(*args, **kwargs)

        return call

    for name, (place, own, share) in SENT.items():  # before DeepSpeed looks them up
        setattr(torch.distributed, name, counted(name, place, own, share, getattr(torch.distributed, name)))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0}
    zero |= {"stage3_max_live_parameters": LIVE, "stage3_max_reuse_distance": 9_000}
    config = tiny_config(
        directory, "deepspeed", model=MODEL | {"layers": LAYERS}, data={"sequence_length": 24},
        parallel={"sequence": 2}, training={"global_batch": 1, "micro_batch": 1},
        deepspeed={"zero_optimization": zero},
    )  # fmt: skip
    ranks = start_ranks(config.run, config.parallel.sequence)
    engine = build_engine(
        build_model(config.model, 0), config, lambda step, samples: RngContext(0, step, samples, True), ranks
    )
    batches = DummyBatches(config, ranks)
    for step in (1, 2):
        for messages in sent.values():
            messages.clear()
        engine.train_step(next(batches).micro_batches, step, 0.01)
    engine.close()
    return sent


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    return run_ranks(sent_by_two_ranks, directory=str(tmp_path_factory.mktemp("run")), timeout=300)


def test_two_ranks_send_what_the_timeline_says(sent):
    """Weights that stay live from the forward to the backward are not gathered again; messages of a few bytes, of loss
    and padding, are left out.
    """
    plan = planned(layers=LAYERS)
    found, size = timeline(plan), 4 * plan.passes.states.trained // 2
    for messages in sent:
        large = {name: sum(each for each in found if each > 32) for name, found in messages.items()}
        assert large["all_to_all_single"] == pytest.approx(found.moved("exchange"))
        assert large["reduce_scatter_tensor"] == size and large["all_reduce"] == 0
        moved = sum(messages["all_gather_into_tensor"]) + size
        assert found.moved("gather") - 4 * LIVE / 2 <= moved <= found.moved("gather")


def test_the_command_draws_a_step(tmp_path, capsys):
    file, drawn = tmp_path / "config.json", tmp_path / "step.svg"
    file.write_text(planned().config.model_dump_json())
    words = ["--config", file, "--gpus", 2, "--timeline", drawn]
    commands.run(door("plan"), *words, "--slow-rank", "1=3", "--host-memory", "1GB")
    ElementTree.fromstring(drawn.read_text())  # well-formed
    assert all(f"<!-- {label} -->" in drawn.read_text() for label in ("rank 0", "rank 1", "all-to-all", "backward"))
    assert "a step: " in capsys.readouterr().out
    for text in ("1=x", "2=2", "1=0", "1"):
        assert "--slow-link: " in commands.refused(capsys, door("plan"), *words, "--slow-link", text)
