"""Fused compressor kernels in the CuTe DSL. Never imports oracles, fixtures or suites."""

from .api import compress_backward, compress_forward

__all__ = ["compress_backward", "compress_forward"]
