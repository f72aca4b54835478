"""One thread is fastest for models this small, and makes the tests' times independent of other processes."""

import torch

torch.set_num_threads(1)
