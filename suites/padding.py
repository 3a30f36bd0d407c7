"""Static capacity: rows and tokens past the segments, whatever is in them and however many there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from csa_gate.fixtures.cases import ROW_PADDING, TOKEN_PADDING, Case
from csa_gate.fixtures.derive import fill_padding_rows, fill_padding_tokens
from csa_gate.fixtures.marks import clause

from .base import Gate, GateSuite, each

_GROWTH = ("plus-1", "plus-33", "double")
_FILLS = ("noise", "nan", "inf")


def _more(growth: str, now: int) -> int:
    return {"plus-1": 1, "plus-33": 33, "double": max(2, now)}[growth]


class RowPaddingSuite(GateSuite):
    """Rows past cu_seqlens_comp[-1]."""

    @clause("row_padding")
    @pytest.mark.parametrize("case", each(ROW_PADDING))
    def test_padding_rows(self, gate: Gate, case: Case) -> None:
        inputs = gate.inputs(case)
        gate.judge(inputs, gate.run(inputs), "row_padding")

    @clause("row_padding")
    @pytest.mark.parametrize("fill", _FILLS)
    @pytest.mark.parametrize("case", each(ROW_PADDING))
    def test_padding_gradients(self, gate: Gate, case: Case, fill: str) -> None:
        clean = gate.inputs(case)
        spoiled, blank = fill_padding_rows(clean, fill), fill_padding_rows(clean, "zero")
        want = gate.run(blank)
        what = f"with {fill} in grad_out of padding rows against zeros there"
        gate.hold("row_padding", spoiled, gate.run(spoiled), what, plain=(blank, want), want=want)

    @clause("row_padding")
    @pytest.mark.parametrize("growth", _GROWTH)
    @pytest.mark.parametrize("case", each(ROW_PADDING))
    def test_row_growth(self, gate: Gate, case: Case, growth: str) -> None:
        p = case.problem
        exact = replace(case, problem=replace(p, row_capacity=p.rows))
        small, inputs = gate.inputs(exact), gate.inputs(exact.grown(rows=_more(growth, p.rows)))
        want, got = gate.run(small), gate.run(inputs)
        what = f"at {inputs.problem.total_comp} rows against {p.rows}"
        outputs = [o for o in gate.repeated if o != "out" or gate.same_order(small.problem, inputs.problem)]
        gate.same("row_padding", inputs, want, got, what, outputs=outputs, rows=slice(p.rows))
        gate.hold("row_padding", inputs, got, what, plain=(small, want))


class TokenPaddingSuite(GateSuite):
    """Tokens past cu_seqlens[-1]."""

    @clause("token_padding")
    @pytest.mark.parametrize("fill", _FILLS)
    @pytest.mark.parametrize("case", each(TOKEN_PADDING))
    def test_padding_tokens(self, gate: Gate, case: Case, fill: str) -> None:
        p, clean = case.problem, gate.inputs(case)
        exact = gate.inputs(replace(case, problem=replace(p, token_capacity=p.tokens)))
        spoiled, want = fill_padding_tokens(clean, fill), gate.run(fill_padding_tokens(clean, "zero"))
        what = f"with {fill} in kv and score of padding tokens against zeros there"
        gate.hold("token_padding", spoiled, gate.run(spoiled), what, plain=(exact, gate.run(exact)), want=want)

    @clause("token_padding")
    @pytest.mark.parametrize("growth", _GROWTH)
    @pytest.mark.parametrize("case", each(TOKEN_PADDING))
    def test_token_growth(self, gate: Gate, case: Case, growth: str) -> None:
        p = case.problem
        exact = replace(case, problem=replace(p, token_capacity=p.tokens))
        small, inputs = gate.inputs(exact), gate.inputs(exact.grown(tokens=_more(growth, p.tokens)))
        want, got = gate.run(small), gate.run(inputs)
        what = f"at {inputs.problem.total_tokens} tokens against {p.tokens}"
        gate.same("token_padding", inputs, want, got, what, outputs=gate.repeated, tokens=slice(p.tokens))
        gate.hold("token_padding", inputs, got, what, plain=(small, want))
