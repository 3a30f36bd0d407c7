"""`oracles.judge` and `oracles.verdict`: each clause lets a right result pass and names a planted wrong one."""

import dataclasses
import gc
import math
import shlex
import weakref

import pytest
import torch

from csa_gate.oracles import CLAUSES, Contract, Inputs, Problem, Result, Slot, references
from csa_gate.oracles.bits import NAN_DISTANCE, bit_pattern
from csa_gate.oracles.distributions import make_inputs
from csa_gate.oracles.eager import eager
from csa_gate.oracles.judge import SINGLE_RESULT, check_command, compare, judge
from csa_gate.oracles.ordered import ordered
from csa_gate.oracles.parse import parse_problem

NAN, INF = math.nan, math.inf
# Rows 0, 1 | none | 2, 3 | 4, and two of padding; every class of slot.
PACK = Problem(lens=(9, 3, 8, 4), ratio=4, coff=2, head_dim=8, row_capacity=7, token_capacity=27)
EVERY = {clause: True for clause in SINGLE_RESULT}
EAGER = Contract(**{**EVERY, "forward_bits": "eager", "gradient_bits": "eager", "dape_bits": None})
PORTABLE = Contract(**{**EVERY, "forward_bits": "portable", "gradient_bits": "portable", "dape_bits": "portable"})
BOUNDS = Contract(error_bound=True, zero_slots=True, row_padding=True)
UNCONSUMED = {
    Slot.LAST_BLOCK: (4, 7),  # the second block of segment 0, overlap columns
    Slot.TAIL: (8, 15),
    Slot.SHORT: (10, 0),
    Slot.PADDING: (26, 9),
}


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return make_inputs(PACK, seed=1)


@pytest.fixture(scope="module")
def wild() -> Inputs:
    """Large enough that every output has a NaN and all but grad_ape an Inf of either sign."""
    return make_inputs(Problem(lens=(64, 7), ratio=4, coff=2, head_dim=8), distribution="nonfinite")


def right(inputs: Inputs, contract: Contract = EAGER) -> Result:
    """A result that keeps `contract`, of fresh tensors."""
    return ordered(inputs, exp="portable") if contract.forward_bits == "portable" else eager(inputs)


def plant(result: Result, output: str, at: tuple[int, int], value: float | None = None) -> Result:
    """`result` with one element of one output set, or its lowest bit flipped."""
    tensor = getattr(result, output).clone()
    if value is None:
        bit_pattern(tensor)[at] ^= 1
    else:
        tensor[at] = value
    return dataclasses.replace(result, **{output: tensor})


def broken(contract, inputs, result, **kwargs):
    verdict = judge(contract, inputs, result, **kwargs)
    assert bool(verdict) is (not verdict.failures)
    return verdict.broken


@pytest.mark.parametrize("contract", [EAGER, PORTABLE, BOUNDS], ids=["eager", "portable", "bounds"])
@pytest.mark.parametrize("distribution", ["normal", "wide", "peaked", "ties", "masked", "nonfinite", "exact"])
def test_right_results_pass(contract, distribution):
    """The reference that a contract names keeps every clause of it, in every distribution."""
    inputs = make_inputs(PACK, seed=0, distribution=distribution)
    verdict = judge(contract, inputs, right(inputs, contract), kernel="k")
    assert verdict, verdict.message
    assert verdict.checked == tuple(c for c in SINGLE_RESULT if contract.claims(c))
    assert verdict.message.startswith("contract kept\nkernel k, Problem(")
    verdict.check()


@pytest.mark.parametrize(
    ("contract", "output", "at", "clause"),
    [
        (EAGER, "out", (1, 3), "forward_bits"),
        (PORTABLE, "out", (4, 0), "forward_bits"),
        (EAGER, "grad_kv", (3, 0), "gradient_bits"),
        (PORTABLE, "grad_score", (23, 15), "gradient_bits"),
        (PORTABLE, "grad_ape", (2, 9), "dape_bits"),
        (EAGER, "out", (6, 7), "row_padding"),
        (PORTABLE, "out", (5, 0), "row_padding"),
    ],
)
def test_one_flipped_bit(inputs, contract, output, at, clause):
    """The lowest bit of one element breaks the clause of bits that owns it, one ulp off, at its coordinate."""
    verdict = judge(contract, inputs, plant(right(inputs, contract), output, at))
    # One ulp of bf16 may also be more than the bound allows; no other clause has a say.
    assert set(verdict.broken) - {"error_bound"} == {clause}
    failure = next(f for f in verdict.failures if f.clause == clause)
    assert (failure.output, failure.wrong) == (output, 1)
    assert failure.first == failure.worst
    assert (failure.first.coordinate, failure.first.ulp) == (at, 1)


@pytest.mark.parametrize("contract", [EAGER, PORTABLE], ids=["eager", "portable"])
@pytest.mark.parametrize("output", ["grad_kv", "grad_score"])
def test_sign_of_a_zero(contract, output):
    """-0 where the reference has +0, which `==` cannot see, breaks gradient_bits and nothing else."""
    inputs = make_inputs(PACK, seed=0, distribution="peaked")
    result = right(inputs, contract)
    consumed = torch.from_numpy(PACK.slots == Slot.CONSUMED).repeat_interleave(8, dim=1)
    at = tuple(((getattr(result, output) == 0) & consumed).nonzero()[-1].tolist())
    wrong = plant(result, output, at, -0.0)
    assert torch.equal(getattr(wrong, output), getattr(result, output)) or output == "grad_score"
    verdict = judge(contract, inputs, wrong)
    assert verdict.broken == ("gradient_bits",)
    (failure,) = verdict.failures
    assert failure.first.coordinate == at
    assert "all differ by the sign of zero only" in failure.hints
    assert "got -0 (0x8000), want 0 (0x0000), 1 ulp apart" in verdict.message


@pytest.mark.parametrize("value", [1.0, -0.0, 1e-40, NAN, -INF])
@pytest.mark.parametrize("output", ["grad_kv", "grad_score"])
@pytest.mark.parametrize("slot", UNCONSUMED)
def test_stale_values_in_unconsumed_slots(inputs, slot, output, value):
    """Anything but +0 in a slot that no row consumes breaks zero_slots alone, and the class of the slot is named."""
    verdict = judge(EAGER, inputs, plant(right(inputs), output, UNCONSUMED[slot], value))
    assert verdict.broken == ("zero_slots",)
    (failure,) = verdict.failures
    assert (failure.output, failure.wrong) == (output, 1)
    assert failure.total == 8 * int((PACK.slots != Slot.CONSUMED).sum())
    assert (failure.first.coordinate, failure.first.place.slot) == (UNCONSUMED[slot], slot)
    assert failure.first.place.row is None
    assert f"{slot.name} slot" in verdict.message


@pytest.mark.parametrize("contract", [EAGER, PORTABLE, BOUNDS], ids=["eager", "portable", "bounds"])
@pytest.mark.parametrize("value", [100.0, NAN])
def test_wrong_padding_row(inputs, contract, value):
    """A padding row that is not token 0's block breaks row_padding alone, whether bits are claimed or bounds."""
    verdict = judge(contract, inputs, plant(right(inputs, contract), "out", (5, 2), value))
    assert verdict.broken == ("row_padding",)
    assert {f.first.coordinate for f in verdict.failures} == {(5, 2)}
    assert verdict.failures[0].first.place.segment == -1
    assert "row 5 (capacity padding, a first block)" in verdict.message


@pytest.mark.parametrize("value", [0.0, INF])
def test_nonfinite_padding_rows(value):
    """Where padding rows hold NaN, a claim of nonfinite makes row_padding, asked for alone, insist on it."""
    problem = Problem(lens=(64,), ratio=4, coff=1, head_dim=64, row_capacity=18)
    inputs = make_inputs(problem, distribution="nonfinite")
    result = right(inputs)
    (row, column), *_ = (torch.isnan(result.out[16:]).nonzero() + torch.tensor([16, 0])).tolist()
    wrong = plant(result, "out", (row, column), value)
    contract = dataclasses.replace(BOUNDS, nonfinite=True)
    assert judge(contract, inputs, result, clauses=["row_padding"]).checked == ("row_padding",)
    for clauses in (None, ["row_padding"]):
        verdict = judge(contract, inputs, wrong, clauses=clauses)
        assert [(f.clause, f.first.coordinate) for f in verdict.failures] == [("row_padding", (row, column))]
    assert judge(BOUNDS, inputs, wrong, clauses=["row_padding"])


@pytest.mark.parametrize(
    ("output", "at"), [("out", (2, 2)), ("grad_kv", (0, 1)), ("grad_score", (13, 8)), ("grad_ape", (3, 15))]
)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_nonfinite_where_the_reference_is_finite(inputs, output, at, value):
    """Inf and NaN out of nowhere are nonfinite's; clauses of bits see them too, bounds and accuracy leave them to it.

    Without a claim of nonfinite they are far from fp64 and break error_bound.
    """
    bits = {"out": {"forward_bits"}, "grad_ape": {"dape_bits"}}.get(output, {"gradient_bits"})
    wrong = plant(right(inputs, PORTABLE), output, at, value)
    assert set(broken(PORTABLE, inputs, wrong)) == bits | {"nonfinite"}
    verdict = judge(PORTABLE, inputs, wrong, clauses=["nonfinite"])
    assert [(f.output, f.wrong, f.first.coordinate) for f in verdict.failures] == [(output, 1, at)]
    verdict = judge(BOUNDS, inputs, plant(right(inputs), output, at, value))
    assert verdict.broken == ("error_bound",)
    assert verdict.failures[0].first.coordinate == at


@pytest.mark.parametrize(
    ("output", "kind", "value"),
    [
        ("out", torch.isnan, 0.0),
        ("out", torch.isnan, INF),
        ("out", torch.isinf, NAN),
        ("out", torch.isposinf, -INF),
        ("grad_kv", torch.isnan, 0.0),
        ("grad_kv", torch.isneginf, -3e38),
        ("grad_score", torch.isnan, -INF),
        ("grad_score", torch.isneginf, INF),
        ("grad_ape", torch.isnan, 1.0),
    ],
)
def test_finite_where_the_reference_is_not(wild, output, kind, value):
    """An Inf or NaN that gets lost, or one in place of another, breaks nonfinite at its coordinate."""
    result = right(wild)
    at = tuple(kind(getattr(result, output)).nonzero()[0].tolist())
    verdict = judge(EAGER, wild, plant(result, output, at, value), clauses=["nonfinite"])
    assert [(f.clause, f.output, f.first.coordinate) for f in verdict.failures] == [("nonfinite", output, at)]


def test_nan_payloads_pass(wild):
    """Another payload or sign of NaN is no difference."""
    result = right(wild)
    for _, tensor in result.items():
        nan = torch.isnan(tensor)
        assert bool(nan.any())
        bits = bit_pattern(tensor)
        bits[nan] ^= 0x11 + torch.iinfo(bits.dtype).min
        assert torch.equal(torch.isnan(tensor), nan)
    judge(EAGER, wild, result).check()


def test_rounded_weights_violate_the_bound():
    """The bound is tight enough to tell softmax weights rounded to bf16 from fp32 ones, forward and backward."""
    inputs = make_inputs(Problem(lens=(64, 33), ratio=4, coff=2, head_dim=16), seed=0)
    assert not broken(BOUNDS, inputs, right(inputs))
    verdict = judge(BOUNDS, inputs, eager(inputs, numerics="megatron"))
    assert verdict.broken == ("error_bound",)
    assert {f.output for f in verdict.failures} >= {"out", "grad_score"}
    for failure in verdict.failures:
        assert failure.worst.error > failure.worst.bound
        assert failure.worst.error / failure.worst.bound >= failure.first.error / failure.first.bound
    assert "times)" in verdict.message


def test_bound_admits_overflow_only_where_rounding_may_overflow(monkeypatch, inputs):
    """Inf passes if the bound reaches 2^128 - 2^119, half an ulp past the largest bf16, and fails below."""
    truth, zero = (Result(*(torch.zeros_like(t, dtype=torch.float64) for _, t in right(inputs).items())) for _ in "ab")
    monkeypatch.setitem(references.ORACLES, "fp64", lambda _: truth)
    monkeypatch.setitem(references.ORACLES, "bound", lambda _: zero)
    again = dataclasses.replace(inputs)
    result = Result(*(t.to(s.dtype) for (_, t), (_, s) in zip(truth.items(), right(inputs).items(), strict=True)))
    edge = 2.0**128 - 2.0**119
    contract = Contract(error_bound=True)
    for value, got, kept in (
        (edge, INF, True),
        (-edge, -INF, True),
        (edge, -INF, False),
        (edge * (1 - 2**-50), INF, False),
    ):
        truth.out[1, 1], result.out[1, 1] = value, got
        assert bool(judge(contract, again, result)) is kept
    truth.out[1, 1], zero.out[1, 1] = edge - 2.0**120, 2.0**120
    result.out[1, 1] = INF
    assert judge(contract, again, result)
    for zero.out[1, 1], truth.out[1, 1] in ((INF, 0.0), (0.0, NAN), (0.0, INF)):
        for result.out[1, 1] in (5.0, NAN, -INF):
            assert judge(contract, again, result), "bounds and fp64 values that are not finite bind nothing"


def test_dape_less_accurate_than_eager():
    """grad_ape with 16 bits of significand instead of 24 breaks dape_accuracy; the eager sum and ours keep it."""
    inputs = make_inputs(Problem(lens=(400,), ratio=4, coff=2, head_dim=64), seed=0)
    contract = Contract(dape_accuracy=True)
    for kept in (eager(inputs), ordered(inputs), ordered(inputs, exp="portable")):
        judge(contract, inputs, kept).check()
    grad_ape = eager(inputs).grad_ape
    bit_pattern(grad_ape).bitwise_and_(-(2**8))
    verdict = judge(contract, inputs, dataclasses.replace(eager(inputs), grad_ape=grad_ape))
    assert verdict.broken == ("dape_accuracy",)
    (failure,) = verdict.failures
    assert failure.note.startswith("rms error ")
    assert failure.worst.error > failure.worst.bound
    assert failure.worst.place.ape_rows == (99 if failure.worst.coordinate[1] < 64 else 100)


def test_only_claimed_clauses_are_judged(inputs):
    """What is not claimed, or not asked for, is not held against the kernel."""
    wrong = plant(plant(right(inputs), "out", (0, 0)), "grad_kv", (10, 0), 1.0)
    assert judge(Contract(), inputs, wrong).checked == ()
    nothing = judge(Contract(), inputs, wrong)
    assert not nothing and not nothing.failures
    with pytest.raises(AssertionError, match="nothing was judged"):
        nothing.check()
    assert broken(Contract(zero_slots=True), inputs, wrong) == ("zero_slots",)
    assert judge(EAGER, inputs, wrong, clauses=["nonfinite"])
    assert broken(EAGER, inputs, wrong, clauses=["zero_slots", "row_padding"]) == ("zero_slots",)
    assert judge(Contract(zero_slots=True), inputs, wrong, clauses=["forward_bits"]).checked == ()


def test_clauses_without_a_subject_are_not_checked():
    """No padding rows, no unconsumed slots, no rows, few columns: these clauses then count as not checked."""
    whole = make_inputs(Problem(lens=(8,), ratio=4, coff=1, head_dim=2))
    assert judge(PORTABLE, whole, right(whole, PORTABLE)).checked == (
        "forward_bits", "gradient_bits", "dape_bits", "error_bound", "nonfinite",
    )  # fmt: skip
    short = make_inputs(Problem(lens=(3,), ratio=4, coff=2, head_dim=8))
    verdict = judge(PORTABLE, short, right(short, PORTABLE))
    assert verdict.checked == ("dape_bits", "error_bound", "dape_accuracy", "zero_slots", "nonfinite")
    assert verdict
    nothing = make_inputs(Problem(lens=(), ratio=4, coff=2, head_dim=4))
    assert judge(PORTABLE, nothing, right(nothing, PORTABLE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": torch.zeros(5, 8, dtype=torch.bfloat16)}, r"result.out: got shape \(5, 8\), need \(7, 8\)"),
        ({"grad_kv": torch.zeros(27, 16)}, "result.grad_kv: got dtype torch.float32, need torch.bfloat16"),
        ({"grad_ape": torch.zeros(4, 16, device="meta")}, "result.grad_ape: got device meta, need cpu"),
        ({"grad_score": None}, "result.grad_score: got NoneType, need a torch.Tensor"),
    ],
)
def test_tensors_that_do_not_fit(inputs, change, message):
    """A wrong shape, dtype or device is a ValueError that names the tensor, not a verdict."""
    with pytest.raises(ValueError, match=message):
        judge(EAGER, inputs, dataclasses.replace(right(inputs), **change))
    with pytest.raises(ValueError, match=message.replace("result", "got")):
        compare("replay", inputs, right(inputs), dataclasses.replace(right(inputs), **change))


def test_names_that_are_no_clause(inputs):
    """Unknown clauses, and clauses that one result cannot show, are refused."""
    for name in ("speed", "deterministic"):
        with pytest.raises(ValueError, match=f"clauses: got '{name}', need some of forward_bits"):
            judge(EAGER, inputs, right(inputs), clauses=[name])
    with pytest.raises(ValueError, match="clause: got 'speed', need one of forward_bits"):
        compare("speed", inputs, right(inputs), right(inputs))


def test_references_are_lazy_and_shared(monkeypatch):
    """zero_slots needs no oracle, bits need one, and several results of one Inputs need each only once."""
    inputs = make_inputs(PACK, seed=2)
    result = right(inputs, PORTABLE)
    calls = []
    for name, oracle in list(references.ORACLES.items()):
        monkeypatch.setitem(references.ORACLES, name, lambda i, n=name, o=oracle: calls.append(n) or o(i))
    judge(PORTABLE, inputs, result, clauses=["zero_slots"]).check()
    assert calls == []
    judge(PORTABLE, inputs, result, clauses=["forward_bits", "dape_bits"]).check()
    assert calls == ["portable"]
    for _ in range(2):
        judge(PORTABLE, inputs, result).check()
    assert sorted(calls) == ["bound", "eager", "fp64", "portable"]
    inputs.kv[0, 0] += 1
    judge(PORTABLE, inputs, right(inputs, PORTABLE), clauses=["forward_bits"]).check()
    assert sorted(calls) == ["bound", "eager", "fp64", "portable", "portable"]


def test_references_keep_no_inputs_alive():
    """The cache lets go of inputs that nobody else holds."""
    inputs = make_inputs(PACK, seed=3)
    judge(EAGER, inputs, right(inputs)).check()
    key, alive = id(inputs), weakref.ref(inputs)
    assert key in references._CACHE
    del inputs
    gc.collect()
    assert alive() is None
    assert key not in references._CACHE


TWO_RUNS = [*sorted(set(CLAUSES) - set(SINGLE_RESULT)), "row_padding"]


@pytest.mark.parametrize("output", ["out", "grad_kv", "grad_score", "grad_ape"])
@pytest.mark.parametrize("clause", TWO_RUNS)
def test_compare_finds_one_flipped_bit(inputs, clause, output):
    """Two results that differ in one bit break the clause at the coordinate, if the clause is about that output."""
    at = {"out": (6, 1), "grad_kv": (26, 15), "grad_score": (0, 0), "grad_ape": (3, 3)}[output]
    first = right(inputs)
    assert compare(clause, inputs, first, right(inputs))
    verdict = compare(clause, inputs, first, plant(first, output, at), what="replay against a fresh run")
    about = {"deterministic": output != "grad_ape", "dape_deterministic": output == "grad_ape"}.get(clause, True)
    assert verdict.checked == (clause,)
    if not about:
        assert verdict
        return
    assert verdict.broken == (clause,)
    (failure,) = verdict.failures
    assert (failure.output, failure.wrong, failure.first.coordinate) == (output, 1, at)
    assert failure.total == getattr(first, output).numel()
    assert f"{clause}: {output} replay against a fresh run: 1 of {failure.total} elements wrong" in verdict.message


@pytest.mark.parametrize(("value", "was"), [(-0.0, 0.0), (NAN, 1.0)])
def test_compare_is_about_bits(inputs, value, was):
    """A sign of zero and a NaN differ between runs; two NaNs of any payload do not."""
    first = plant(right(inputs), "grad_kv", (8, 0), was)
    second = plant(first, "grad_kv", (8, 0), value)
    assert not compare("deterministic", inputs, first, second)
    third = plant(second, "grad_kv", (8, 0))
    assert bool(compare("deterministic", inputs, second, third)) is math.isnan(value)


def test_compare_across_capacities(inputs):
    """Against a run at smaller capacity only the common rows and tokens are compared, with coordinates of `got`."""
    tight = make_inputs(dataclasses.replace(PACK, row_capacity=None, token_capacity=None), seed=1)
    small, large = right(tight, PORTABLE), right(inputs, PORTABLE)
    common = {"rows": slice(0, PACK.rows), "tokens": slice(0, PACK.tokens)}
    compare("token_padding", inputs, small, large, **common).check()
    compare("token_padding", inputs, small, plant(large, "out", (5, 0), 9.0), **common).check()
    assert not compare("token_padding", inputs, small, plant(large, "grad_kv", (23, 0), 9.0), **common)
    with pytest.raises(ValueError, match=r"want.out: got shape \(5, 8\), need \(7, 8\)"):
        compare("token_padding", inputs, small, large)
    with pytest.raises(ValueError, match=r"tokens: got slice\(0, 24, 2\), need a slice of step 1"):
        compare("token_padding", inputs, large, large, tokens=slice(0, 24, 2))


def test_compare_of_some_groups(inputs):
    """Groups that are not named are left out, and all of an output without a mask is compared."""
    first = right(inputs)
    groups = {"grad_kv": torch.ones((27, 2), dtype=torch.bool)}
    groups["grad_kv"][5, 1] = False
    compare("batch_invariance", inputs, first, plant(first, "grad_kv", (5, 9)), groups=groups).check()
    assert not compare("batch_invariance", inputs, first, plant(first, "grad_kv", (5, 7)), groups=groups)
    assert not compare("batch_invariance", inputs, first, plant(first, "grad_score", (5, 9)), groups=groups)
    with pytest.raises(ValueError, match=r"groups\['out'\]: got shape \(7, 2\), need \(7, 1\)"):
        compare("batch_invariance", inputs, first, first, groups={"out": torch.ones((7, 2), dtype=torch.bool)})


@pytest.mark.parametrize(("off", "kept"), [(0.5, True), (1.0, True), (1.5, False), (NAN, False), (INF, False)])
def test_compare_within_a_bound(inputs, off, kept):
    """Finite values up to the bound away are let pass, no Inf or NaN is; what is not finite in `want` binds nothing."""
    got = Result(**{name: torch.zeros_like(tensor) for name, tensor in right(inputs).items()})
    want = Result(**{name: tensor.double() for name, tensor in got.items()})
    bound = Result(**{name: torch.ones_like(tensor) for name, tensor in want.items()})
    got.out[2, 3] = off
    verdict = compare("error_bound", inputs, want, got, bound=bound, what="against zeros")
    assert bool(verdict) is kept
    if not kept:
        (failure,) = verdict.failures
        assert (failure.output, failure.wrong, failure.first.coordinate) == ("out", 1, (2, 3))
    want.out[2, 3] = INF
    assert compare("error_bound", inputs, want, got, bound=bound)
    with pytest.raises(ValueError, match=r"want.out: got dtype torch.bfloat16, need torch.float64"):
        compare("error_bound", inputs, got, got, bound=bound)
    with pytest.raises(ValueError, match=r"bound.out: got dtype torch.bfloat16, need torch.float64"):
        compare("error_bound", inputs, want, got, bound=got)


def test_compare_of_one_segment_with_a_pack(inputs):
    """A segment on its own stands against its part of a pack; a difference is found at the pack's coordinate."""
    alone = make_inputs(dataclasses.replace(PACK, lens=(8,), row_capacity=None, token_capacity=None), seed=1)
    part, tokens = slice(2, 4), slice(12, 20)
    alone = dataclasses.replace(
        alone, kv=inputs.kv[tokens], score=inputs.score[tokens], ape=inputs.ape, grad_out=inputs.grad_out[part]
    )
    chosen = {"outputs": ("out", "grad_kv", "grad_score"), "rows": part, "tokens": tokens}
    pack = right(inputs, PORTABLE)
    compare("batch_invariance", inputs, right(alone, PORTABLE), pack, **chosen).check()
    verdict = compare("batch_invariance", inputs, right(alone, PORTABLE), plant(pack, "grad_kv", (17, 9)), **chosen)
    assert [f.first.coordinate for f in verdict.failures] == [(17, 9)]
    assert verdict.failures[0].first.place.row == 3
    with pytest.raises(ValueError, match="outputs: got 'dape', need some of out, grad_kv"):
        compare("batch_invariance", inputs, pack, pack, outputs=["dape"])


def test_message_tells_all(inputs):
    """The message holds clause, case, counts, coordinates, bits, distances, the window's values and the command."""
    result = plant(right(inputs, PORTABLE), "grad_kv", (1, 3))
    result = plant(result, "grad_kv", (5, 12), 64.0)
    verdict = judge(PORTABLE, inputs, result, kernel="my.py:k", clauses=["gradient_bits"])
    message = verdict.message
    with pytest.raises(AssertionError) as caught:
        verdict.check()
    assert str(caught.value) == message
    assert message.startswith("contract broken: gradient_bits\n")
    for text in (
        f"kernel my.py:k, {PACK}, distribution normal, seed 1, device cpu",
        f"grad_kv against the portable reference: 2 of {8 * int((PACK.slots == 0).sum())} elements wrong",
        "first grad_kv[1, 3]: got ",
        ", 1 ulp apart",
        "CONSUMED slot, consumed by row 1 (segment 0, block 1)",
        "worst grad_kv[5, 12]: got 64 (0x4280), want ",
        "window of that row, 8 entries:",
        "all wrong elements are in segment 0",
        "reproduce: python -m csa_gate check --kernel my.py:k",
    ):
        assert text in message
    # The own half of row 1's window for column 12 - 8: token 5 is entry 5, column 12, ape row 1.
    entry = verdict.failures[0].worst.place.window[5]
    assert entry.at == (5, 12, 1)
    assert (entry.score, entry.kv) == (inputs.score[5, 12].item(), inputs.kv[5, 12].item())
    assert entry.ape == inputs.ape[1, 12].item()
    assert str(entry) in message


def test_command_spells_the_case(inputs):
    """A shell and the parser read kernel, problem, distribution, seed and device back from the command."""
    words = shlex.split(check_command(inputs, "a file.py:k"))
    assert words[:4] == ["python", "-m", "csa_gate", "check"]
    options = dict(zip(words[4::2], words[5::2], strict=True))
    assert parse_problem(options.pop("--problem")) == PACK
    assert options == {"--kernel": "a file.py:k", "--distribution": "normal", "--seed": "1", "--device": "cpu"}
    assert check_command(inputs, "") == ""
    assert check_command(dataclasses.replace(inputs, seed=None), "k") == ""
    verdict = judge(EAGER, inputs, plant(right(inputs), "out", (0, 0)), kernel="k", reproduce="pytest -k this")
    assert verdict.message.endswith("reproduce: pytest -k this")


def test_first_blocks_show_their_invalid_entries(inputs):
    """In a first block's window the overlap entries are marked invalid."""
    verdict = judge(EAGER, inputs, plant(right(inputs), "out", (2, 5)), clauses=["forward_bits"])
    place = verdict.failures[0].first.place
    assert (place.row, place.segment, place.block, place.first, place.window_size) == (2, 2, 0, True, 8)
    assert [v.at for v in place.window] == [None] * 4 + [(12 + k, 13, k) for k in range(4)]
    assert verdict.message.count("invalid: first block") == 4


def test_long_windows_are_shortened():
    """Of 256 entries eight at most are shown: both ends, the largest logit, and the entry of the wrong gradient."""
    inputs = make_inputs(Problem(lens=(300,), ratio=128, coff=2, head_dim=2), seed=0)
    verdict = judge(EAGER, inputs, plant(right(inputs), "grad_kv", (60, 1)), clauses=["gradient_bits"])
    place = verdict.failures[0].first.place
    logits = inputs.score[:128, 1].float() + inputs.ape[:, 1]
    own = inputs.score[128:256, 3].float() + inputs.ape[:, 3]
    largest = int(torch.cat([logits, own]).argmax())
    assert [v.k for v in place.window] == sorted({0, 1, 2, 253, 254, 255, 60, largest})
    assert place.window_size == 256
    assert "\n           ...\n" in verdict.message


@pytest.mark.parametrize(
    ("output", "rows", "columns", "value", "hint"),
    [
        ("out", [0, 2, 4], [1, 4], None, "all wrong elements are in first blocks"),
        ("out", [1, 3], [1, 4], None, "all wrong elements are in blocks that are not a first one"),
        ("out", [1, 4], [1, 4], None, "all wrong elements are in the last blocks of segments"),
        ("out", [2, 3], [0], None, "all wrong elements are in rows 2 to 3"),
        ("out", [2, 3], [0], None, "all wrong elements are in segment 2"),
        ("out", [3], [0, 2, 6], None, "all wrong elements are in even columns"),
        ("out", [3], [0, 2, 6], None, "all wrong elements are in row 3"),
        ("out", [0, 3], [7], None, "all wrong elements are in column 7"),
        ("out", [0, 3], [5, 6, 7], None, "all wrong elements are in columns 5 to 7"),
        ("out", [0, 1, 2, 3, 4], list(range(8)), None, "every judged element is wrong"),
        ("out", [0, 3], [0, 3], NAN, "all wrong elements hold the same bits: nan (0x7FC0)"),
        ("out", [0, 3], [0, 3], None, "all differ by one ulp"),
        ("grad_kv", [8], [2, 15], 2.0, "all wrong elements are in TAIL slots"),
        ("grad_kv", [8, 25], [2, 15], 2.0, "all wrong elements hold the same bits: 2 (0x4000)"),
        ("grad_kv", [4, 19], [2, 5], 2.0, "all wrong elements are in LAST_BLOCK slots"),
        ("grad_score", [3, 13], [9, 14], None, "all wrong elements are in columns >= head_dim (own block)"),
        ("grad_score", [1, 13], [1, 6], None, "all wrong elements are in columns < head_dim (overlap)"),
        ("grad_ape", [2], [3, 9], None, "all wrong elements are in ape row 2"),
    ],
)
def test_hints(inputs, output, rows, columns, value, hint):
    """What all wrong elements have in common, and the others have not, is said."""
    result = right(inputs, PORTABLE)
    for row in rows:
        for column in columns:
            result = plant(result, output, (row, column), value)
    failures = [f for f in judge(PORTABLE, inputs, result).failures if f.output == output]
    assert hint in failures[0].hints


def test_hints_are_silent_without_a_pattern(inputs):
    """Wrong elements here and there get no hint."""
    result = right(inputs)
    for at, value in (((0, 1), 9.0), ((1, 4), -3.0), ((4, 6), 5.0)):
        result = plant(result, "out", at, value)
    verdict = judge(EAGER, inputs, result, clauses=["forward_bits"])
    assert [f.hints for f in verdict.failures] == [()]
    alone = make_inputs(Problem(lens=(20,), ratio=4, coff=1, head_dim=5))
    wrong = plant(plant(right(alone), "out", (0, 0), 9.0), "out", (4, 3), -3.0)
    verdict = judge(EAGER, alone, wrong, clauses=["forward_bits"])
    assert [f.hints for f in verdict.failures] == [()], "that all are in segment 0 says nothing where there is no other"


def test_worst_is_by_distance_and_nan_is_worst(inputs):
    """The worst element has the most ulp; NaN on one side only is worse than any number."""
    result = plant(plant(right(inputs), "out", (0, 0)), "out", (1, 1), 1e30)
    (failure,) = judge(EAGER, inputs, result, clauses=["forward_bits"]).failures
    assert (failure.first.coordinate, failure.worst.coordinate) == ((0, 0), (1, 1))
    verdict = judge(EAGER, inputs, plant(result, "out", (3, 3), NAN), clauses=["forward_bits"])
    (failure,) = verdict.failures
    assert (failure.worst.coordinate, failure.worst.ulp) == ((3, 3), NAN_DISTANCE)
    assert "NaN on one side only" in verdict.message


def test_a_place_is_described_once(inputs):
    """Where two clauses fail at one element, its window is printed once."""
    verdict = judge(EAGER, inputs, plant(right(inputs), "out", (1, 1), 50.0))
    assert verdict.broken == ("forward_bits", "error_bound")
    assert verdict.message.count("window of that row") == 1
    assert verdict.message.count("place as above") == 1


def test_verdicts_are_data(inputs):
    """Verdicts and failures are frozen."""
    verdict = judge(EAGER, inputs, plant(right(inputs), "out", (0, 0)))
    for frozen in (verdict, verdict.failures[0], verdict.failures[0].first, verdict.failures[0].first.place):
        field = dataclasses.fields(frozen)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(frozen, field, None)


def test_an_order_that_pytorch_changed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result with the bits of the documented order that eager no longer has: the message blames the release."""
    inputs = make_inputs(Problem((8,), 4, 1, 8), 0)
    result = ordered(inputs)
    moved = dataclasses.replace(result, out=result.out * 1.25)
    monkeypatch.setitem(references.ORACLES, "eager", lambda _: moved)
    verdict = judge(Contract(forward_bits="eager"), inputs, result)
    assert f"it is PyTorch {torch.__version__} that sums in other orders" in verdict.message
    wrong = dataclasses.replace(result, out=-result.out)
    assert "it is PyTorch" not in judge(Contract(forward_bits="eager"), inputs, wrong).message
