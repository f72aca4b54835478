"""Launches and bytes by count: the counter against counts by hand, and the most that layers and steps may take."""

import pytest
import torch

from megasparse.attention.heads import build_mechanism
from megasparse.ops.counting_sort import counting_sort
from megasparse.ops.kernels import Launch
from megasparse.settings.load import load_config
from tests.helpers.launches import LaunchCounter, count_layer, count_step, total
from tools.bench.attention import model_of


def test_operations_are_launches_and_views_are_not():
    x = torch.empty(100, 200, device="meta")
    with LaunchCounter() as counter:
        y = x.t() @ x.view(100, 200)
        y.add_(1)
    counts = counter.counts
    assert (counts.torch, counts.kernels, counts.transfers, counts.host) == (2, 0, 0, 0)
    assert counts.by_name == {"mm": [1, 4 * (100 * 200 * 2 + 200 * 200)], "add": [1, 2 * 4 * 200 * 200]}
    assert counts.moved == 160_000 + 160_000 + 320_000
    assert counts.flops == 2 * 200 * 100 * 200


def test_work_of_the_host_and_copies_to_the_device_are_counted():
    with LaunchCounter() as counter:
        x = torch.arange(10) * 2
        (x.to("meta") * torch.tensor(3)).sum()
    counts = counter.counts
    assert (counts.host, counts.transfers, counts.torch) == (2, 1, 3)


def test_kernels_are_counted_and_not_started():
    keys = torch.empty(2, 1000, dtype=torch.int16, device="meta")
    with LaunchCounter() as counter:
        counting_sort(keys, 8)
    assert counter.counts.kernels == 3 and counter.counts.torch == 0
    count, total_, order = 2 * 256 * 4, 2 * 256 * 4, 2 * 1000 * 4
    by_name = counter.counts.by_name
    assert by_name["kernel count"] == [1, 4000 + count] and by_name["kernel add_up"] == [1, count + total_]
    assert by_name["kernel place"] == [1, 4000 + count + total_ + order]


class FakeKernel:
    """A kernel of Triton, or its binary, that records its calls."""

    arg_names = ("x", "y", "count", "SIZE", "WIDTH")

    def __init__(self, calls, binary=None):
        self.fn, self.calls, self.binary = object(), calls, binary

    def __getitem__(self, grid):
        def start(*arguments, **settings):
            self.calls.append((grid, [a if isinstance(a, int) else a.data_ptr() for a in arguments], settings))
            return self.binary

        return start


def test_a_launch_like_an_earlier_one_starts_its_binary():
    looked_up, started = [], []
    kernel = FakeKernel(looked_up, FakeKernel(started))
    x, y, halves = torch.zeros(12), torch.zeros(12), torch.zeros(12, dtype=torch.bfloat16)
    settings = {"num_warps": 4, "WIDTH": 3, "SIZE": 2}

    def start(*arguments, **changes):
        Launch(kernel, (5,), arguments, settings | changes).start()

    start(x, y, 16)
    start(y, x[4:], 16)  # 16 bytes later
    assert started == [((5, 1, 1), [y.data_ptr(), x.data_ptr() + 16, 16, 2, 3], {})]
    for other in (lambda: start(x, y[1:], 16), lambda: start(x, halves, 16), lambda: start(x, y, 17)):
        before = len(looked_up)
        other()
        assert len(looked_up) == before + 1  # Triton may need another binary
    start(x, y, 16, SIZE=4)
    start(x, y, 16, num_warps=8)
    assert len(looked_up) == 6 and len(started) == 1


def layer(kind, length=65536):
    return count_layer(kind, model_of(kind, length, heads=8, dim=64, rounds=2, window=128), 1, torch.bfloat16)


MOST = {
    # kind: torch's launches, kernels, GB moved, copies to the GPU; B·H = 8, D = 64, M = 128, L = 64K, R = 2, bf16
    # a kernel moves each tensor that it is given once, also those of which it reads nothing for a mask that is off
    "lsh": (1, 17, 4.1, 0),
    "yoso": (3, 36, 27.2, 0),
    "lha": (112, 19, 4.61, 0),
    "smart_bird": (149, 17, 4.3, 1),  # the copy: seeds of its draws
    "local": (1, 5, 1.1, 0),
}


@pytest.mark.parametrize("kind", MOST)
def test_a_layer_takes_no_more_launches_and_bytes_than_recorded(kind):
    both = total(layer(kind))
    launches, kernels, gigabytes, copies = MOST[kind]
    assert both.transfers <= copies and both.host == 0
    assert both.torch <= launches and both.kernels <= kernels and both.moved <= gigabytes * 1e9


def test_lha_costs_no_more_than_one_and_a_half_times_lsh():
    """Includes the training of hashes; bytes by count, FLOPs as the mechanisms state them."""
    moved = {kind: total(layer(kind)).moved for kind in ("lha", "lsh")}
    assert moved["lha"] <= 1.5 * moved["lsh"]
    model = model_of("lha", 65536, heads=8, dim=64, rounds=2, window=128)
    with torch.device("meta"):
        flops = {kind: build_mechanism(kind, model, 8).flops(65536).both for kind in ("lha", "lsh")}
    assert flops["lha"] <= 1.5 * flops["lsh"]


def test_the_bytes_of_lha_are_linear():
    """Between lengths of which a document has more keys than a sample."""
    short, long = (total(layer("lha", length)).moved for length in (16384, 65536))
    assert long < 4.4 * short


@pytest.mark.parametrize("kind", ["lsh", "yoso", "local"])
def test_launches_do_not_grow_with_the_length(kind):
    short, long = (total(layer(kind, length)) for length in (4096, 16384))
    assert (short.torch, short.kernels) == (long.torch, long.kernels)
    assert long.moved < 4.4 * short.moved


def test_a_step_of_reformer_64k_takes_no_more_than_recorded():
    """A third of the launches of the first count, 7,664, and half of its 417 GB without products and attention."""
    both = total(count_step(load_config("reformer_64k")))
    assert (both.transfers, both.host) == (0, 0)
    assert both.torch + both.kernels <= 2140 and both.moved <= 349.7e9 and both.flops <= 77.8e12
    products = {"mm", "addmm", *(f"kernel {name}" for name in ("forward", "query_gradient", "key_gradient"))}
    assert sum(moved for name, (_, moved) in both.by_name.items() if name not in products) <= 417e9 / 2


@pytest.mark.parametrize("kind,relative", [("sinusoidal", "true"), ("rotary", "false")])
def test_a_step_has_no_work_of_the_host(kind, relative):
    positions = f'model.positions={{"kind":"{kind}"}}'
    both = total(count_step(load_config("quickstart", [positions, f"model.attention.local.relative={relative}"])))
    assert (both.transfers, both.host) == (0, 0)
