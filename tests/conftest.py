"""One thread per test process, so that two run side by side, and no hypothesis deadline: machines are shared."""

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("clipless", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("clipless")
