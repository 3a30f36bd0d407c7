"""`Contract`: what a kernel claims, as data that cannot be misspelt."""

from __future__ import annotations

import pytest

from csa_gate.oracles import CLAUSES, Contract


def test_nothing_is_claimed_by_default() -> None:
    assert not any(Contract().claims(clause) for clause in CLAUSES)


@pytest.mark.parametrize("clause", CLAUSES)
def test_each_clause_is_claimed_alone(clause: str) -> None:
    value = {"forward_bits": "eager", "gradient_bits": "portable", "dape_bits": "native"}.get(clause, True)
    assert [c for c in CLAUSES if Contract(**{clause: value}).claims(c)] == [clause]


@pytest.mark.parametrize(
    ("clause", "value", "text"),
    [
        ("forward_bits", True, "forward_bits: got True, need one of None, 'eager', 'portable'"),
        ("gradient_bits", "fp64", "gradient_bits: got 'fp64', need one of None, 'eager', 'portable'"),
        ("zero_slots", "yes", "zero_slots: got 'yes', need one of False, True"),
        ("replay", 1, "replay: got 1, need one of False, True"),
        ("dape_bits", "eager", "dape_bits: got 'eager', need one of None, 'native', 'portable'"),
    ],
)
def test_bits_name_their_reference(clause: str, value: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Contract(**{clause: value})


def test_unknown_clause() -> None:
    with pytest.raises(ValueError, match="clause: got 'speed', need one of forward_bits"):
        Contract().claims("speed")
