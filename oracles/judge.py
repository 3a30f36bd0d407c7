"""The judge: holds the results of a kernel to the clauses that its contract claims.

Each element of a result belongs to one structural clause, so that a failure names the right one: gradients of
unconsumed slots to `zero_slots`, rows past the real ones to `row_padding`, all else to the clauses of bits, bounds
and classes. References are computed only when a clause needs them, and only a failure costs more than a few
vectorised passes.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .bits import bit_pattern, classes, differs, same_bits
from .checks import one_of, require, require_memory, require_tensor, some_of
from .contract import CLAUSES, Contract
from .diagnose import Difference, diagnose
from .inputs import Inputs, Result
from .problem import Slot
from .references import reference
from .verdict import Verdict

_GRADIENTS = ("grad_kv", "grad_score")
_OUTPUTS = ("out", *_GRADIENTS, "grad_ape")
_COMPARED = {"deterministic": ("out", *_GRADIENTS), "dape_deterministic": ("grad_ape",)}
_CHANCE = 3.0  # standard errors: one case in 700 for a kernel exactly as accurate as eager
_SAMPLE = 8  # columns of out below which a standard error says little
_OTHER_ORDER = (
    f"the result has the bits of the summation orders that `ordered` specifies: it is PyTorch {torch.__version__} that "
    "sums in other orders on this device"
)
_AGAINST = {
    "eager": "against the eager reference",
    "native": "against the reference with the device's own exp",
    "portable": "against the portable reference",
    "fp64": "against fp64 and its bound",
}


def judge(
    contract: Contract,
    inputs: Inputs,
    result: Result,
    *,
    kernel: str = "",
    clauses: Collection[str] | None = None,
    reproduce: str | None = None,
) -> Verdict:
    """Judge one result under the clauses of `SINGLE_RESULT` that `contract` claims.

    Args:
        result: of `inputs`, on their device, bf16 and for grad_ape fp32.
        kernel: how the kernel is named on the command line, for the message.
        clauses: look at these only, as far as they are claimed; None for all.
        reproduce: the command that reproduces a failure; None for `check_command`.

    Returns:
        The verdict; its `checked` leaves out clauses that found nothing to look at, such as `row_padding` in a
        problem without padding rows.

    Raises:
        ValueError: an argument is not of its type; a tensor of the result has the wrong shape, dtype or device; a name
            in `clauses` is not in `SINGLE_RESULT`.
    """
    require("contract", contract, Contract)
    require("inputs", inputs, Inputs)
    if clauses is not None:
        clauses = some_of("clauses", clauses, SINGLE_RESULT)
    _check_result("result", inputs, result)
    claimed = [c for c in SINGLE_RESULT if contract.claims(c) and (clauses is None or c in clauses)]
    checked = tuple(c for c in claimed if _applies(c, inputs))
    case = _Case(contract, inputs, result, "nonfinite" in checked)
    found = [difference for clause in checked for difference in _JUDGES[clause](case)]
    return _verdict(checked, inputs, found, kernel, reproduce)


def compare(
    clause: str,
    inputs: Inputs,
    want: Result,
    got: Result,
    *,
    kernel: str = "",
    what: str = "run 2 against run 1",
    outputs: Collection[str] | None = None,
    rows: slice | None = None,
    tokens: slice | None = None,
    groups: Mapping[str, Tensor] | None = None,
    bound: Result | None = None,
    reproduce: str | None = None,
) -> Verdict:
    """Compare two results bit for bit (the places of NaNs, not their payloads), as a clause about two runs.

    Args:
        clause: the clause that a difference breaks.
        inputs: what `got` is the result of; coordinates in the message are of `got`.
        what: the two results in words, got first.
        outputs: the outputs to compare; None for those that the clause is about: grad_ape for `dape_deterministic`,
            all others for `deterministic`, all four for the rest.
        rows, tokens: compare only these rows of out and these tokens of grad_kv and grad_score; `want` then holds
            just as many. Lets a result stand against one at another capacity, or one segment against a pack.
        groups: compare only these (row, column half) groups, bool masks by output; an output without one is compared
            in all of them.
        bound: fp64 tensors, how far apart finite values may be, in place of bit for bit; `want` is in fp64 then.
        reproduce: as in `judge`.

    Raises:
        ValueError: an argument is not of its type, the clause or an output is none, a shape or dtype of `got` does not
            fit `inputs`, or one of `want` does not fit the part of `got` that it is compared with.
    """
    one_of("clause", clause, CLAUSES)
    require("inputs", inputs, Inputs)
    chosen = _COMPARED.get(clause, _OUTPUTS) if outputs is None else some_of("outputs", outputs, _OUTPUTS)
    _check_result("got", inputs, got)
    require("want", want, Result)
    for name, chosen_part in (("rows", rows), ("tokens", tokens)):
        if chosen_part is not None and not (isinstance(chosen_part, slice) and chosen_part.step in (None, 1)):
            raise ValueError(f"{name}: got {chosen_part!r}, need a slice of step 1")
    parts = {"out": rows, "grad_kv": tokens, "grad_score": tokens}
    found: list[Difference] = []
    for name in chosen:
        whole, part = getattr(got, name), parts.get(name) or slice(None)
        start, stop, _ = part.indices(len(whole))
        ours, theirs = whole[start:stop], getattr(want, name)
        _check_tensor(f"want.{name}", theirs, ours.shape, torch.float64 if bound else ours.dtype, ours.device)
        halves = ours.shape[1] // inputs.problem.head_dim
        some = (groups or {}).get(name, torch.ones((len(whole), halves), dtype=torch.bool, device=ours.device))
        _check_tensor(f"groups[{name!r}]", some, (len(whole), halves), torch.bool, ours.device)
        if bound is None:
            found += _bits(clause, name, ours, theirs, some[start:stop], what, start)
        else:
            limits = getattr(bound, name)
            _check_tensor(f"bound.{name}", limits, ours.shape, torch.float64, ours.device)
            found += _within(clause, name, ours, theirs, limits, some[start:stop], what, start)
    return _verdict((clause,), inputs, found, kernel, reproduce)


def check_command(inputs: Inputs, kernel: str) -> str:
    """The command that judges `kernel` on `inputs` again; empty without a kernel's name, a seed or a distribution."""
    if not kernel or inputs.seed is None or inputs.distribution is None:
        return ""
    return (
        f'python -m csa_gate check --kernel {shlex.quote(kernel)} --problem "{inputs.problem}"'
        f" --distribution {inputs.distribution} --seed {inputs.seed} --device {inputs.device.type}"
    )


@dataclass(frozen=True)
class _Case:
    contract: Contract
    inputs: Inputs
    result: Result
    classes_judged: bool  # whether `nonfinite` is judged too, so that bounds can leave Inf and NaN to it


def _forward_bits(case: _Case) -> Iterator[Difference]:
    yield from _reference_bits("forward_bits", case, "out", case.contract.forward_bits or "eager")


def _gradient_bits(case: _Case) -> Iterator[Difference]:
    for name in _GRADIENTS:
        yield from _reference_bits("gradient_bits", case, name, case.contract.gradient_bits or "eager")


def _dape_bits(case: _Case) -> Iterator[Difference]:
    yield from _reference_bits("dape_bits", case, "grad_ape", case.contract.dape_bits or "portable")


def _error_bound(case: _Case) -> Iterator[Difference]:
    for name in _OUTPUTS:
        yield from _bounds("error_bound", case, name, _real(case.inputs, name), case.classes_judged)


def _dape_accuracy(case: _Case) -> Iterator[Difference]:
    """Where the mean square error of grad_ape is above the eager reference's by more than chance explains.

    Both errors are draws: what rounding left of some terms may cancel in one and not in the other, so that of two
    equally good sums either may come out ahead. The elements that belong to one column of out share its softmax, so
    their errors are no draws of their own; the N columns are. With d the difference of the squared errors of a column,
    mean(d) has the standard error std(d) / sqrt(N), and at most `_CHANCE` of these are let pass, or for few columns
    what is as rare in Student's distribution (the first term of its expansion in 1 / (N - 1)). This tells a worse sum
    from an unlucky one; a single element that is far off is for the bound to find.
    """
    got, truth = case.result.grad_ape, reference(case.inputs, "fp64").grad_ape
    eager = reference(case.inputs, "eager").grad_ape
    judged = torch.isfinite(truth) & torch.isfinite(eager)
    if case.classes_judged:
        judged &= torch.isfinite(got)
    ours, theirs = (torch.where(judged, (t.double() - truth).abs(), 0.0) for t in (got, eager))
    head_dim = case.inputs.problem.head_dim
    squares = (ours.square() - theirs.square()).reshape(-1, head_dim).sum(dim=0)
    chance = _CHANCE * (1 + (_CHANCE**2 + 1) / (4 * (head_dim - 1)))
    if squares.mean() <= chance * squares.std() / head_dim**0.5:
        return
    rms, allowed = (e[judged].square().mean().sqrt().item() for e in (ours, theirs))
    note = f"rms error {rms:.6g}, the eager reference's {allowed:.6g}; bounds below are its error in that element"
    wrong = judged & ~(ours <= theirs)
    groups = _real(case.inputs, "grad_ape")
    yield Difference("dape_accuracy", "grad_ape", got, truth, wrong, groups, "against fp64", ours, theirs, note=note)


def _zero_slots(case: _Case) -> Iterator[Difference]:
    unconsumed = ~_real(case.inputs, "grad_kv")
    groups = unconsumed.nonzero(as_tuple=True)
    for name in _GRADIENTS:
        got = getattr(case.result, name)
        if bool(bit_pattern(got).reshape(*unconsumed.shape, case.inputs.problem.head_dim)[groups].any()):
            yield from _bits("zero_slots", name, got, torch.zeros_like(got), unconsumed, "against exact +0")


def _row_padding(case: _Case) -> Iterator[Difference]:
    padding, source = ~_real(case.inputs, "out"), case.contract.forward_bits
    if source is not None:
        yield from _reference_bits("row_padding", case, "out", source, padding)
        return
    # No other clause looks at these rows, so the classes belong here even if `nonfinite` was not asked for.
    yield from _bounds("row_padding", case, "out", padding, case.contract.nonfinite)
    if case.contract.nonfinite:
        yield from _classes("row_padding", case, "out", padding)


def _nonfinite(case: _Case) -> Iterator[Difference]:
    for name in _OUTPUTS:
        yield from _classes("nonfinite", case, name, _real(case.inputs, name))


_JUDGES: dict[str, Callable[[_Case], Iterator[Difference]]] = {
    "forward_bits": _forward_bits,
    "gradient_bits": _gradient_bits,
    "dape_bits": _dape_bits,
    "error_bound": _error_bound,
    "dape_accuracy": _dape_accuracy,
    "zero_slots": _zero_slots,
    "row_padding": _row_padding,
    "nonfinite": _nonfinite,
}

SINGLE_RESULT: tuple[str, ...] = tuple(_JUDGES)
"""The clauses that one result shows kept or broken."""


def _applies(clause: str, inputs: Inputs) -> bool:
    """Whether the problem holds an element that the clause looks at."""
    p = inputs.problem
    if clause == "row_padding":
        return p.total_comp > p.rows
    if clause == "zero_slots":
        return bool((p.slots != Slot.CONSUMED).any())
    if clause == "dape_accuracy":
        return p.head_dim >= _SAMPLE
    return clause not in ("forward_bits", "gradient_bits") or p.rows > 0


def _real(inputs: Inputs, output: str) -> Tensor:
    """The (row, column half) groups of an output that no structural clause owns, bool on the inputs' device."""
    p = inputs.problem
    if output == "out":
        return (torch.arange(p.total_comp, device=inputs.device) < p.rows)[:, None]
    if output == "grad_ape":
        return torch.ones((p.ratio, p.coff), dtype=torch.bool, device=inputs.device)
    return torch.from_numpy(p.slots == Slot.CONSUMED).to(inputs.device)


def _of_groups(mask: Tensor, groups: Tensor) -> Tensor:
    """`mask` (rows, columns) where `groups` (rows, halves) is true, else False."""
    return mask & groups.repeat_interleave(mask.shape[1] // groups.shape[1], dim=1)


def _reference_bits(
    clause: str, case: _Case, name: str, source: str, groups: Tensor | None = None
) -> Iterator[Difference]:
    groups = _real(case.inputs, name) if groups is None else groups
    got, want = getattr(case.result, name), getattr(reference(case.inputs, source), name)
    for difference in _bits(clause, name, got, want, groups, _AGAINST[source]):
        if source == "eager" and same_bits(got, getattr(reference(case.inputs, "native"), name)):
            yield replace(difference, note=_OTHER_ORDER)
        else:
            yield difference


def _bits(
    clause: str, name: str, got: Tensor, want: Tensor, groups: Tensor, against: str, start: int = 0
) -> Iterator[Difference]:
    if same_bits(got, want):
        return
    wrong = _of_groups(differs(got, want), groups)
    if bool(wrong.any()):
        yield Difference(clause, name, got, want, wrong, groups, against, start=start)


def _classes(clause: str, case: _Case, name: str, groups: Tensor) -> Iterator[Difference]:
    got, want = getattr(case.result, name), getattr(reference(case.inputs, "eager"), name)
    wrong = _of_groups(classes(got) != classes(want), groups)
    if bool(wrong.any()):
        yield Difference(clause, name, got, want, wrong, groups, "against the eager reference's Inf and NaN")


def _bounds(clause: str, case: _Case, name: str, groups: Tensor, classes_judged: bool) -> Iterator[Difference]:
    """Where |got - fp64| is more than its bound; fp64 values and bounds that are not finite bind nothing.

    With `classes_judged` an Inf or NaN in the result is left to the comparison of classes.
    """
    got, want = getattr(case.result, name), getattr(reference(case.inputs, "fp64"), name)
    bound = getattr(reference(case.inputs, "bound"), name)
    if classes_judged:
        bound = torch.where(torch.isfinite(got), bound, torch.inf)
    yield from _within(clause, name, got, want, bound, groups, _AGAINST["fp64"])


def _within(
    clause: str, name: str, got: Tensor, want: Tensor, bound: Tensor, groups: Tensor, against: str, start: int = 0
) -> Iterator[Difference]:
    error = _error(got, want)
    wrong = _of_groups(~(error <= bound) & torch.isfinite(bound) & torch.isfinite(want), groups)
    if bool(wrong.any()):
        yield Difference(clause, name, got, want, wrong, groups, against, error, bound, start=start)


def _error(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| in fp64, an infinite `got` standing for the nearest number that rounds to it.

    Close to overflow a value within its bound may so come out as Inf. That number is half an ulp past the largest
    finite one, 2^128 - eps * 2^126 in bf16 and fp32 alike.
    """
    edge = 2.0**128 - torch.finfo(got.dtype).eps * 2.0**126
    overflow = (edge - want * got.sign()).clamp(min=0)
    return torch.where(torch.isinf(got), overflow, (got.double() - want).abs())


def _check_result(argument: str, inputs: Inputs, result: Result) -> None:
    require(argument, result, Result)
    p = inputs.problem
    tokens, rows = (p.total_tokens, p.width), (p.total_comp, p.head_dim)
    shapes = {"out": rows, "grad_kv": tokens, "grad_score": tokens, "grad_ape": (p.ratio, p.width)}
    for name, tensor in result.items():
        dtype = torch.float32 if name == "grad_ape" else torch.bfloat16
        _check_tensor(f"{argument}.{name}", tensor, shapes[name], dtype, inputs.device)


def _check_tensor(
    argument: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    require_tensor(argument, tensor)
    for what, came, need in (
        ("shape", tuple(tensor.shape), tuple(shape)),
        ("dtype", tensor.dtype, dtype),
        ("device", tensor.device, device),
    ):
        if came != need:
            raise ValueError(f"{argument}: got {what} {came}, need {need}")
    require_memory(argument, tensor)


def _verdict(
    checked: tuple[str, ...], inputs: Inputs, found: list[Difference], kernel: str, reproduce: str | None
) -> Verdict:
    made = f"distribution {inputs.distribution}, seed {inputs.seed}" if inputs.seed is not None else "inputs given"
    return Verdict(
        checked=checked,
        failures=tuple(diagnose(inputs, difference) for difference in found),
        subject=f"{f'kernel {kernel}, ' if kernel else ''}{inputs.problem}, {made}, device {inputs.device}",
        reproduce=check_command(inputs, kernel) if reproduce is None else reproduce,
    )
