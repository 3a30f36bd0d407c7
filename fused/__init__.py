"""Fused compressor kernels in the CuTe DSL. Never imports oracles, fixtures or suites."""

from .api import compress_backward, compress_forward
from .classes import CSACompressorBackward, CSACompressorForward
from .dispatch import maybe_compress_thd_fused
from .op import compress_thd
from .wrappers import csa_compressor_backward_wrapper, csa_compressor_forward_wrapper

__all__ = [
    "CSACompressorBackward",
    "CSACompressorForward",
    "compress_backward",
    "compress_forward",
    "compress_thd",
    "csa_compressor_backward_wrapper",
    "csa_compressor_forward_wrapper",
    "maybe_compress_thd_fused",
]
