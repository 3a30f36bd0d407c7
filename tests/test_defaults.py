"""torch's default dtype and device, which programs set while they build a model, change no bit of anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from csa_gate.fused import compress_backward, compress_forward
from csa_gate.oracles import Problem, Result, eager, fp64, make_inputs, mp, ordered

def fused(inputs):
    p, inputs_only = inputs.problem, (inputs.kv, inputs.score, inputs.ape, inputs.cu_seqlens, inputs.cu_seqlens_comp)
    out = torch.empty((p.total_comp, p.head_dim), dtype=torch.bfloat16, device="cpu")
    gradients = [torch.empty_like(t) for t in inputs_only[:3]]
    compress_forward(*inputs_only, ratio=p.ratio, coff=p.coff, out=out)
    names = dict(zip(("grad_kv", "grad_score", "grad_ape"), gradients, strict=True))
    compress_backward(*inputs_only, inputs.grad_out, ratio=p.ratio, coff=p.coff, **names)
    return Result(out=out, **names)

def bits():
    small, found = make_inputs(Problem((9, 3), 4, 2, 2), 0, "normal", "cpu"), {}
    inputs = make_inputs(Problem((37, 0, 3, 64, 4), 4, 2, 16), 0, "normal", "cpu")
    calls = {"eager": (eager, inputs), "fp64": (fp64, inputs), "mp": (mp, small), "fused": (fused, inputs)}
    calls["ordered"] = (lambda given: ordered(given, exp="portable"), inputs)
    for name, (call, given) in calls.items():
        for output, tensor in call(given).items():
            found[name, output] = tensor.dtype, tensor.device, bytes(tensor.contiguous().view(torch.uint8).numpy())
    return found

{setting}
got = bits()
torch.set_default_dtype(torch.float32)
torch.set_default_device("cpu")
want = bits()
assert got.keys() == want.keys()
print([name for name in want if got[name] != want[name]])
"""


@pytest.mark.parametrize(
    "setting",
    [*(f"torch.set_default_dtype(torch.{name})" for name in ("bfloat16", "float16", "float64")),
     "torch.set_default_device('meta')"],
)  # fmt: skip
def test_defaults(setting: str) -> None:
    """Set before anything is compiled. In a process of its own: memory of the wrong size may end it."""
    program = PROGRAM.replace("{setting}", setting)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr[-2000:]
