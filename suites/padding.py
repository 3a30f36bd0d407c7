"""Static capacity: rows and tokens past the segments, whatever is in them and however many there are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from csa_gate.fixtures.cases import ROW_PADDING, TOKEN_PADDING, Case
from csa_gate.fixtures.derive import fill_padding_rows, fill_padding_tokens, part
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
        spoiled = fill_padding_rows(clean, fill)
        want = gate.run(fill_padding_rows(clean, "zero"))
        what = f"with {fill} in grad_out of padding rows against zeros there"
        gate.hold("row_padding", spoiled, gate.run(spoiled), want, what)

    @clause("row_padding")
    @pytest.mark.parametrize("growth", _GROWTH)
    @pytest.mark.parametrize("case", each(ROW_PADDING))
    def test_row_growth(self, gate: Gate, case: Case, growth: str) -> None:
        p = case.problem
        case = replace(case, problem=replace(p, row_capacity=p.rows))
        large = case.grown(rows=_more(growth, p.rows))
        small, want = gate.inputs(case), gate.run(gate.inputs(case))
        inputs = gate.inputs(large)
        got = gate.run(inputs)
        what = f"at {large.problem.total_comp} rows against {p.rows}"
        outputs = [o for o in gate.repeated if o != "out" or gate.same_order(small.problem, large.problem)]
        gate.same("row_padding", inputs, want, got, what, outputs=outputs, rows=slice(p.rows))
        gate.hold("row_padding", inputs, got, None, what)


class TokenPaddingSuite(GateSuite):
    """Tokens past cu_seqlens[-1]."""

    @clause("token_padding")
    @pytest.mark.parametrize("fill", _FILLS)
    @pytest.mark.parametrize("case", each(TOKEN_PADDING))
    def test_padding_tokens(self, gate: Gate, case: Case, fill: str) -> None:
        clean = gate.inputs(case)
        spoiled = fill_padding_tokens(clean, fill)
        want = gate.run(fill_padding_tokens(clean, "zero"))
        what = f"with {fill} in kv and score of padding tokens against zeros there"
        gate.hold("token_padding", spoiled, gate.run(spoiled), want, what)

    @clause("token_padding")
    @pytest.mark.parametrize("growth", _GROWTH)
    @pytest.mark.parametrize("case", each(TOKEN_PADDING))
    def test_token_growth(self, gate: Gate, case: Case, growth: str) -> None:
        p = case.problem
        case = replace(case, problem=replace(p, token_capacity=p.tokens))
        want = gate.run(gate.inputs(case))
        inputs = gate.inputs(case.grown(tokens=_more(growth, p.tokens)))
        got = gate.run(inputs)
        what = f"at {inputs.problem.total_tokens} tokens against {p.tokens}"
        tokens = slice(p.tokens)
        gate.same(
            "token_padding", inputs, part(want, slice(None), tokens), got, what, outputs=gate.repeated, tokens=tokens
        )
        gate.hold("token_padding", inputs, got, None, what)
