"""csa-gate: does this compressor kernel still keep its contract?

Subpackages are imported on demand, so that importing `csa_gate` (the pytest plugin does) costs nothing:

- `csa_gate.oracles`: what is true
- `csa_gate.fused`: our own fused kernels
- `csa_gate.fixtures`: what the suites stand on
- `csa_gate.suites`: the contracts as tests
"""

__version__ = "0.1.0"
