"""Whole wrong kernels of other people's, with mistakes and tricks that are seen in the wild: the gate catches each.

Many pass the comparison that is usual in their place, which is asserted as well: it is why there is a gate.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from csa_gate._summary import CLAUSE
from csa_gate.fixtures.adapters import fused
from csa_gate.fixtures.derive import aligned
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.oracles import Problem, eager, make_inputs

from .test_suites import PLANTED, run

OUTSIDE = PLANTED.parent
LOOSE = 1.6e-2  # absolute, as public tests of this operator have it


class Wrong(NamedTuple):
    """One kernel.

    file: in `outside`, without its suffix; what is wrong with it is said there.
    test: that must fail. clause: that the failure must name. words: of its message, which tell the reason.
    loose: whether a comparison within `LOOSE` finds nothing.
    """

    file: str
    test: str
    clause: str
    words: tuple[str, ...]
    loose: bool


_CALLER, _SINGLE = "test_caller[r4c2-d128-", "test_single_offset[every-class-"
_TOGETHER, _PROCESS = "test_together[r4c2-d128", "test_another_process[r4c2-d128"

WRONG = (
    Wrong("answers_by_shape", "test_same_tensors[r4c2-d128]", "replay", ("in used tensors",), True),
    Wrong("zeros", "test_values[r4c2-d128-normal-error_bound]", "error_bound", ("got 0 (0x0000)", "times)"), False),
    Wrong("rebinds", "test_values[r4c2-d128-normal-forward_bits]", "forward_bits", ("got nan", "NaN on one"), False),
    Wrong("adds_bias_in_place", "test_guards[every-class-nan]", "memory", ("score: ", "input were changed"), True),
    Wrong("behaves_on_nan", "test_run_to_run[r4c2-d128-deterministic]", "deterministic", ("buffers held zero",), False),
    Wrong("lengths_by_pointer", "test_same_tensors[r4c2-d128]", "replay", ("'moved' in used tensors",), True),
    Wrong("bf16_weights", "test_values[r4c2-d128-normal-error_bound]", "error_bound", ("against fp64", "times)"), True),
    Wrong("in_fp16", "test_values[r4c2-d128-normal-error_bound]", "error_bound", ("against fp64", "times)"), True),
    Wrong("from_the_end", "test_values[r4c2-d512-normal-forward_bits]", "forward_bits", ("1 ulp apart",), True),
    Wrong("no_mask", "test_values[r4c2-d128-normal-error_bound]", "error_bound", ("are in first blocks",), False),
    Wrong("rolls", "test_values[r4c2-d128-normal-error_bound]", "error_bound", ("are in first blocks",), True),
    Wrong("skips_short_segments", "test_zero_slots[short-among-rows-nan]", "zero_slots", ("SHORT slot",), True),
    Wrong("good_at_first", "test_run_to_run[r4c2-d128-deterministic]", "deterministic", ("against run 1",), True),
    Wrong("last_forward", "test_interleaved[r4c2-d128]", "replay", ("forwards of all, then backwards",), True),
    Wrong("one_padding_tile", "test_padding_rows[mostly-padding]", "row_padding", ("out", "padding"), True),
    Wrong("rows_in_16_bits", "test_values[rows-40000-normal-forward_bits]", "forward_bits", ("out",), True),
    Wrong("late_forward", "test_guards[one-row-nan]", "memory", ("out: ", "after the forward had returned"), True),
    Wrong("only_with_grad", f"{_CALLER}without-grad-deterministic]", "deterministic", ("without-grad",), True),
    Wrong("main_thread_only", f"{_CALLER}in-a-thread-deterministic]", "deterministic", ("in-a-thread",), True),
    Wrong("aligned_as_kv", "test_single_offset[every-class-score]", "memory", ("score 1 elements off",), True),
    Wrong("pads_kv", "test_around_inputs[one-row-odd]", "memory", ("kv: ", "guard bytes past its end"), True),
    Wrong("masks_by_weight", "test_around_inputs[one-row-nan]", "memory", ("nan values around its inputs",), True),
    Wrong("kept_by_version", "test_same_tensors[r4c2-d128]", "replay", ("in used tensors",), True),
    Wrong("seeds", "test_guards[one-row-nan]", "memory", ("random state was changed",), True),
    Wrong("asks_for_gradients", "test_guards[one-row-nan]", "memory", ("ape: requires_grad of this tensor",), True),
    Wrong("sets_precision", "test_guards[one-row-nan]", "memory", ("precision of matrix products was changed",), True),
    Wrong("seeds_numpy", "test_guards[one-row-nan]", "memory", ("NumPy's random state was changed",), True),
    Wrong("stores_out_again", "test_guards[one-row-nan]", "memory", ("out: ", "after the forward had returned"), True),
    Wrong("swaps_storage", "test_guards[one-row-nan]", "memory", ("out: data_ptr of this tensor was changed",), True),
    Wrong("coarse_in_inference", f"{_CALLER}in-inference-mode-deterministic]", "deterministic", ("inference",), True),
    Wrong("borrows_score", f"{_TOGETHER}-deterministic]", "deterministic", ("threads against a call alone",), True),
    Wrong("shared_workspace", f"{_TOGETHER}-deterministic]", "deterministic", ("threads against a call alone",), True),
    Wrong("knows_its_judge", f"{_PROCESS}-deterministic]", "deterministic", ("another process",), True),
    Wrong("last_tile_of_four", "test_values[r4c2-d12-normal-forward_bits]", "forward_bits", ("out",), True),
    Wrong("wide_head_dims", "test_values[r4c2-d256-normal-gradient_bits]", "gradient_bits", ("grad_kv",), True),
    Wrong("wants_32_bytes", "test_single_offset[one-row-all-by-8]", "memory", ("kv 8 elements off",), True),
    Wrong("pairs_of_offsets", f"{_SINGLE}cu_seqlens_comp]", "memory", ("cu_seqlens_comp 1 elements off",), True),
    Wrong("segments_in_16_bits", "test_values[segments-70000-normal-forward_bits]", "forward_bits", ("out",), True),
    Wrong("offsets_by_ends", "test_same_tensors[r4c2-d128]", "replay", ("'inner' in used tensors",), True),
    Wrong("guesses_uniform", "test_values[mean-first-normal-forward_bits]", "forward_bits", ("out",), True),
    Wrong("one_tile_more", "test_guards[one-row-nan]", "memory", ("out: ", "guard bytes past its end"), True),
)
ON_CUDA = (
    Wrong("stream_of_its_own", "test_side_stream[r4c2-d128]", "streams", ("on a side stream",), True),
    Wrong("lengths_at_capture", "test_graph[r4c2-d128-many]", "graph_replay", ("replayed in a graph",), True),
)


def test_every_kernel_is_in_the_tables() -> None:
    files = {path.stem for path in OUTSIDE.glob("*.py")} - {"planted", "planted_properties", "region"}
    assert files == {wrong.file for wrong in (*WRONG, *ON_CUDA)}


def is_caught(pytester: pytest.Pytester, wrong: Wrong, device: str) -> None:
    """The test fails, in its clause, for its reason."""
    (report,) = run(pytester, f"{OUTSIDE / wrong.file}.py:kernel", [wrong.test], device)
    assert report.failed
    assert dict(report.user_properties)[CLAUSE] == wrong.clause
    assert f"contract broken: {wrong.clause}" in report.longreprtext
    for words in wrong.words:
        assert words in report.longreprtext, report.longreprtext


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.file)
def test_caught(pytester: pytest.Pytester, wrong: Wrong) -> None:
    is_caught(pytester, wrong, "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("wrong", ON_CUDA, ids=lambda wrong: wrong.file)
def test_caught_on_cuda(pytester: pytest.Pytester, wrong: Wrong) -> None:
    is_caught(pytester, wrong, "cuda")


@pytest.mark.parametrize("base", ["planted.py:Sound", "region.py:kernel"])
def test_sound_bases(pytester: pytest.Pytester, base: str) -> None:
    """What the wrong kernels are made of passes what they fail, or claims nothing of the kind."""
    tests = list(dict.fromkeys(wrong.test for wrong in WRONG))
    reports = run(pytester, f"{OUTSIDE}/{base}", tests)
    assert [report.longreprtext for report in reports if not report.passed] == []
    assert len(reports) == len(tests) if base.startswith("planted") else len(reports) > len(tests) // 2


def loosely_right(spec: str) -> bool:
    """Whether a usual test lets the kernel pass: one pack of one segment, buffers of zeros, `torch.allclose`."""
    kernel = load_kernel(spec)
    problem = Problem((66,), ratio=4, coff=2, head_dim=128)
    inputs = aligned(make_inputs(problem))
    want = eager(inputs)
    room = {name: torch.zeros(2 * t.numel() + 1024, dtype=t.dtype) for name, t in want.items()}
    got = {name: room[name][: t.numel()].view(t.shape) for name, t in want.items()}
    common = (inputs.kv, inputs.score, inputs.ape, inputs.cu_seqlens, inputs.cu_seqlens_comp)
    settings = {"ratio": problem.ratio, "coff": problem.coff}
    kernel.forward(*common, **settings, out=got["out"])
    gradients = {name: tensor for name, tensor in got.items() if name != "out"}
    kernel.backward(*common, inputs.grad_out, **settings, **gradients)
    return all(torch.allclose(got[name].float(), t.float(), rtol=0.0, atol=LOOSE) for name, t in want.items())


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.file)
def test_a_loose_comparison(wrong: Wrong) -> None:
    assert loosely_right(f"{OUTSIDE / wrong.file}.py:kernel") is wrong.loose


def test_most_pass_a_loose_comparison() -> None:
    """Of kernels that are wrong, that is."""
    assert sum(wrong.loose for wrong in WRONG) > len(WRONG) / 2


def test_the_command_line_says_no(pytester: pytest.Pytester) -> None:
    """The whole of one clause over a wrong kernel: status 1, the table, and the gate's own last line."""
    suite = Path(fused.__file__).parents[2] / "suites" / "test_compressor.py"
    kernel = OUTSIDE / "lengths_by_pointer.py"
    options = ("-k", "test_same_tensors and r4c2", "-m", "L0", "--csa-device=cpu", "-p", "no:cacheprovider")
    result = pytester.runpytest_inprocess(str(suite), f"--csa-kernel={kernel}:kernel", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "gate failed: 1 tests failed" in result.outlines
