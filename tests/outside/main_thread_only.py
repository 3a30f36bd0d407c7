"""Sets up its scratch in the thread that imports it; in another one, as autograd's, the last column is left out."""

from __future__ import annotations

import threading

from planted import Sound
from torch import Tensor


class MainThreadOnly(Sound):
    def __init__(self) -> None:
        self.home = threading.get_ident()

    def backward(self, *inputs: Tensor, ratio: int, coff: int, **gradients: Tensor) -> None:
        super().backward(*inputs, ratio=ratio, coff=coff, **gradients)
        if threading.get_ident() != self.home:
            gradients["grad_kv"][:, -1] = 0


kernel = MainThreadOnly()
