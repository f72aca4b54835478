import math

import torch

from megasparse.ops.positions import sinusoids
from tests.helpers.operators import DEVICE


def test_sinusoids_are_the_definition_and_the_same_again():
    for _ in range(2):
        for position, row in zip(range(1000, 1003), sinusoids(1000, 3, 5, DEVICE).cpu().tolist(), strict=True):
            angles = [position / 10000 ** (i / 3) for i in range(3)]
            expected = [*map(math.sin, angles), *map(math.cos, angles)][:5]
            torch.testing.assert_close(torch.tensor(row), torch.tensor(expected), rtol=1e-6, atol=1e-7)


def test_a_table_made_in_inference_trains():
    with torch.inference_mode():
        first = sinusoids(0, 4, 6)
    x = torch.ones(4, 6, requires_grad=True)
    (x * sinusoids(0, 4, 6)).sum().backward()
    assert torch.equal(x.grad, first)


def test_shape_only_tables_are_created_on_the_requested_device():
    assert sinusoids(0, 1 << 20, 1024, "meta").is_meta
