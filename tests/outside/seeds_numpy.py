"""Seeds NumPy's generator, for its random choice of a configuration, and leaves it seeded."""

from __future__ import annotations

import numpy as np
from planted import Sound
from torch import Tensor


class SeedsNumpy(Sound):
    def forward(self, *inputs: Tensor, ratio: int, coff: int, out: Tensor) -> None:
        np.random.seed(0)
        super().forward(*inputs, ratio=ratio, coff=coff, out=out)


kernel = SeedsNumpy()
