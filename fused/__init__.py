"""Fused compressor kernels in the CuTe DSL. Never imports oracles, fixtures or suites."""
