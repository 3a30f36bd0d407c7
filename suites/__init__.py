"""The contracts as tests, over any kernel."""

from .compressor import CompressorSuite

__all__ = ["CompressorSuite"]
