"""What the suites run: tables of cases, packs of documents, derived inputs, and memory that calls take turns in."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
import torch
from torch import Tensor

from csa_gate.fixtures import cases, derive
from csa_gate.fixtures.cases import Case, Turns
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.fixtures.packs import document_lengths, pack
from csa_gate.fixtures.replay import Graph, Stage
from csa_gate.fixtures.run import Buffers, run
from csa_gate.fixtures.schedules import SCHEDULES
from csa_gate.fixtures.vast import VAST, Vast
from csa_gate.oracles import DISTRIBUTIONS, Inputs, Problem, Slot, fp64, make_inputs, ordered, windows
from csa_gate.oracles.bits import same_bits
from csa_gate.oracles.orders import pool_lanes, softmax_lanes

TABLES: dict[str, tuple[Case, ...]] = {
    name: getattr(cases, name)
    for name in (
        "NUMERICS", "PACKS", "ZERO_SLOTS", "DETERMINISM", "MEMORY", "ROW_PADDING", "TOKEN_PADDING", "BATCH"
    )
}  # fmt: skip
TURNS: tuple[Turns, ...] = (*cases.SHORTER, *cases.TURNS)
PROBLEM = Problem((9, 0, 3, 16), 4, 2, 8, row_capacity=8, token_capacity=40)

# What each function of `derive` fills: (row or token, column half) masks.
_PADDING_TOKENS = np.repeat(np.arange(40)[:, None] >= PROBLEM.tokens, 2, axis=1)
FILLERS = {
    "fill_padding_rows": {"grad_out": np.arange(8)[:, None] >= PROBLEM.rows},
    "fill_padding_tokens": dict.fromkeys(("kv", "score"), _PADDING_TOKENS),
    "fill_unconsumed": dict.fromkeys(("kv", "score"), PROBLEM.slots != Slot.CONSUMED),
}
HOLDS = {"nan": torch.isnan, "inf": torch.isposinf, "zero": lambda t: t == 0, "noise": lambda t: t.abs() < 1e3}


def tensors(inputs: Inputs) -> dict[str, Tensor]:
    return {name: t for name, t in vars(inputs).items() if isinstance(t, Tensor)}


class TestTables:
    @pytest.mark.parametrize("table", [cases.SCALE, SCHEDULES, VAST], ids=["SCALE", "SCHEDULES", "VAST"])
    def test_ids_of_the_full_level(self, table: tuple[Case | Vast, ...]) -> None:
        assert len({case.id for case in table}) == len(table)
        assert all(re.fullmatch(r"[a-z0-9-]+", case.id) for case in table)
        assert {case.level for case in table} == {"L1"}

    def test_scales(self) -> None:
        """Every operand and all at once, up and down, at the production ratios; and products that overflow in part."""
        powers = {(c.problem.ratio, c.kv_log2, c.score_log2, c.grad_log2) for c in cases.NUMERICS if c.level == "L1"}
        for ratio in (4, 128):
            for n in (6, -6, 40, -40):
                assert {(ratio, n, 0, 0), (ratio, 0, n, 0), (ratio, 0, 0, n), (ratio, n, n, n)} <= powers
            for name in ("some", "most"):
                (case,) = (c for c in cases.NUMERICS if c.id.startswith(f"r{ratio}c") and c.id.endswith(f"-{name}"))
                nan = torch.isnan(ordered(case.inputs("cpu"), exp="portable").grad_score)
                assert 0.02 < float(nan.float().mean()) < 0.6

    def test_sizes(self) -> None:
        problems = [c.problem for c in cases.SCALE]
        assert max(p.total_tokens for p in problems) == 1_048_576
        assert max(len(p.lens) for p in problems) == 65_536
        assert max(p.head_dim for p in problems) == 16_384

    @pytest.mark.parametrize("table", [*TABLES.values(), cases.SHORTER, cases.TURNS], ids=[*TABLES, "SHORTER", "TURNS"])
    def test_ids_are_unique_and_can_be_named_with_k(self, table: tuple[Case | Turns, ...]) -> None:
        counts = Counter(case.id for case in table)
        assert max(counts.values()) == 1, counts.most_common(1)
        assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in counts)
        assert {case.level for case in table} == {"L0", "L1"}

    def test_distributions_exist_and_all_are_in_the_quick_level(self) -> None:
        every = [(d, case.level) for table in TABLES.values() for case in table for d in case.distributions]
        assert {d for d, level in every if level == "L0"} == {d for d, _ in every} == set(DISTRIBUTIONS)

    @pytest.mark.parametrize(("ratio", "coff"), [(4, 2), (128, 1)])
    @pytest.mark.parametrize("head_dim", [128, 512])
    def test_production_shapes_are_in_both_levels(self, ratio: int, coff: int, head_dim: int) -> None:
        shape = (ratio, coff, head_dim)
        levels = {c.level for c in cases.NUMERICS if (c.problem.ratio, c.problem.coff, c.problem.head_dim) == shape}
        assert levels == {"L0", "L1"}

    def test_shapes_cover_what_decides_the_code_that_runs(self) -> None:
        problems = [case.problem for case in cases.NUMERICS]
        assert {1, 2, 3, 4, 6, 7, 8, 9, 10, 13, 16, 32, 33, 64, 67, 100, 128, 256} == {p.ratio for p in problems}
        assert {1, 3, 8, 16, 64, 65, 66, 128, 512} <= {p.head_dim for p in problems}
        assert {(2, 2), (4, 1), (128, 2)} <= {(p.ratio, p.coff) for p in problems}
        leaves = {-(-p.rows // 32) for p in problems}
        assert {1, 2, 32, 33} <= leaves, "of 32 rows; beyond 32 of them a lane takes a second one"
        assert {p.rows % 32 for p in problems} >= {0, 1, 31}

    def test_shapes_cover_the_orders_of_summation(self) -> None:
        orders = {
            (softmax_lanes(p.window, p.head_dim) > 1, pool_lanes(p.window, p.head_dim) > 1)
            for p in (case.problem for case in cases.NUMERICS)
        }
        assert orders == {(False, False), (False, True), (True, False), (True, True)}
        one_row = next(c.problem for c in cases.NUMERICS if c.id == "r32c2-d8-one-row")
        assert pool_lanes(one_row.window, 8, 1) != pool_lanes(one_row.window, 8)

    @pytest.mark.parametrize(
        ("name", "slot"),
        [
            ("last-block", Slot.LAST_BLOCK),
            ("tail", Slot.TAIL),
            ("short-among-rows", Slot.SHORT),
            ("padding", Slot.PADDING),
        ],
    )
    def test_each_zero_class_stands_alone(self, name: str, slot: Slot) -> None:
        (case,) = (c for c in cases.ZERO_SLOTS if c.id == name)
        assert set(np.unique(case.problem.slots)) == {Slot.CONSUMED, slot}

    def test_all_zero_classes_stand_together(self) -> None:
        (case,) = (c for c in cases.ZERO_SLOTS if c.id == "every-class")
        assert set(np.unique(case.problem.slots)) == set(Slot)

    def test_zero_slot_cases_have_some(self) -> None:
        assert all((case.problem.slots != Slot.CONSUMED).any() for case in cases.ZERO_SLOTS)

    def test_padding_cases_have_padding(self) -> None:
        assert all(c.problem.total_comp > c.problem.rows for c in cases.ROW_PADDING)
        assert all(c.problem.total_tokens > c.problem.tokens >= c.problem.ratio for c in cases.TOKEN_PADDING)

    def test_offset_ids_are_memory_cases(self) -> None:
        assert set(cases.OFFSETS) <= {case.id for case in cases.MEMORY}

    @pytest.mark.parametrize("turns", TURNS, ids=lambda t: t.id)
    def test_turns_share_one_memory(self, turns: Turns) -> None:
        buffers = Buffers(turns.cases[0].problem, "cpu")
        for case in turns.cases:
            assert buffers.narrow(case.problem).problem == case.problem
        assert len({case.problem.lens for case in turns.cases}) < len(turns.cases), "lengths come back with other data"

    @pytest.mark.parametrize("turns", cases.TURNS, ids=lambda t: t.id)
    def test_turns_have_equal_shapes(self, turns: Turns) -> None:
        assert len({(p.total_tokens, p.total_comp, len(p.lens)) for p in (c.problem for c in turns.cases)}) == 1
        assert len({case.seed for case in turns.cases}) == len(turns.cases)


class TestCase:
    def test_growth_keeps_the_data(self) -> None:
        small, large = Case("a", PROBLEM).inputs("cpu"), Case("a", PROBLEM).grown(rows=5, tokens=7).inputs("cpu")
        assert (large.problem.total_comp, large.problem.total_tokens) == (13, 47)
        for name in ("kv", "score", "grad_out"):
            now = getattr(small, name)
            assert same_bits(getattr(large, name)[: len(now)], now)

    def test_scaling_is_exact_and_no_longer_claims_its_seed(self) -> None:
        plain = Case("a", PROBLEM).inputs("cpu")
        inputs = Case("a", PROBLEM, kv_log2=40, score_log2=6, grad_log2=-40, score_shift=200.0).inputs("cpu")
        assert torch.equal(inputs.kv.double(), plain.kv.double() * 2.0**40)
        assert torch.equal(inputs.grad_out.double(), plain.grad_out.double() * 2.0**-40)
        assert torch.equal(inputs.score, plain.score * 64 + 200.0)
        assert (inputs.seed, inputs.distribution) == (None, None)

    @pytest.mark.parametrize("problem", [PROBLEM, Problem((), 4, 2, 8)], ids=str)
    def test_tensors_are_torch_allocations(self, problem: Problem) -> None:
        for name, tensor in tensors(Case("a", problem).inputs("cpu")).items():
            assert tensor.stride() == torch.empty(tensor.shape).stride(), name
            assert tensor.data_ptr() % 64 == 0, name


class TestPacks:
    def test_documents_are_those_of_the_data_file(self) -> None:
        lengths = document_lengths()
        assert len(lengths) == 1790 and min(lengths) == 0
        assert lengths[:4] == (1304, 56, 24, 24)

    def test_pack_keeps_order_and_cuts_the_last_document(self) -> None:
        assert pack(0, 1400) == (1304, 56, 24, 16)
        assert pack(1, 1400) == (847, 553), "a pack starts with the next document"

    @pytest.mark.parametrize("number", [0, 1])
    def test_pack_is_filled_exactly(self, number: int) -> None:
        assert sum(pack(number)) == 65536

    def test_no_pack_after_the_last_document(self) -> None:
        with pytest.raises(ValueError, match="number: got 3, need a pack of 4000000 tokens"):
            pack(3, 4_000_000)


class TestDerive:
    def test_select_takes_segments_with_all_that_is_theirs(self) -> None:
        inputs = make_inputs(PROBLEM)
        chosen = derive.select(inputs, [3, 1, 0])
        assert chosen.problem.lens == (16, 0, 9)
        for place, segment in enumerate([3, 1, 0]):
            (rows, tokens), (from_rows, from_tokens) = (
                derive.spans(chosen.problem, place),
                derive.spans(PROBLEM, segment),
            )
            assert same_bits(chosen.kv[tokens], inputs.kv[from_tokens])
            assert same_bits(chosen.score[tokens], inputs.score[from_tokens])
            assert same_bits(chosen.grad_out[rows], inputs.grad_out[from_rows])

    @pytest.mark.parametrize("fill", derive.FILLS)
    @pytest.mark.parametrize("function", FILLERS)
    def test_fill_changes_the_bystanders_alone(self, function: str, fill: str) -> None:
        before = make_inputs(PROBLEM)
        after = getattr(derive, function)(before, fill)
        for name, old in tensors(before).items():
            new, spared = getattr(after, name), torch.ones(old.shape, dtype=torch.bool)
            if name in FILLERS[function]:
                spared = ~torch.from_numpy(FILLERS[function][name]).repeat_interleave(8, dim=1)
                filled = new[~spared]
                assert bool(HOLDS[fill](filled).all())
                assert not torch.equal(filled, old[~spared])
            assert torch.equal(new[spared], old[spared]), name

    def test_windows_cancel(self) -> None:
        """Exactly, term by term; what an order of summation leaves is small, and is not the same in another."""
        problem = Problem((64, 40), 32, 1, 8)
        inputs = derive.cancelling(make_inputs(problem), "windows")
        terms = windows.gather(inputs.kv, problem, 0.0).float()
        weights = windows.logits(inputs.score, inputs.ape, problem).softmax(dim=1)
        assert torch.equal(terms[:, :16], -terms[:, 16:]) and torch.equal(weights[:, :16], weights[:, 16:])
        exact, got = fp64(inputs).out, ordered(inputs, exp="portable", output_dtype=torch.float32).out
        assert float(exact.abs().max()) < 1e-15
        assert 0 < float(got.abs().max()) < 1e-6

    def test_rows_cancel(self) -> None:
        """grad_ape is that of the rows between, beside terms that leave no room for it in fp32."""
        problem = Problem((256,), 2, 1, 8)
        plain = make_inputs(problem)
        inputs = derive.cancelling(plain, "rows")
        between = derive.rebuilt(
            plain,
            Problem((128,), 2, 1, 8),
            kv=plain.kv[64:-64], score=plain.score[64:-64], grad_out=plain.grad_out[32:-32],
        )  # fmt: skip
        result = fp64(inputs)
        assert float(result.grad_score.abs().max()) > 2.0**38
        torch.testing.assert_close(result.grad_ape, fp64(between).grad_ape, rtol=0, atol=2.0**-10)

    @pytest.mark.parametrize(
        ("problem", "what"),
        [
            (Problem((64,), 4, 2, 8), "windows"),
            (Problem((63,), 3, 1, 8), "windows"),
            (Problem((256,), 2, 2, 8), "rows"),
            (Problem((257,), 2, 1, 8), "rows"),
            (Problem((126,), 2, 1, 8), "rows"),
            (Problem((256,), 2, 1, 8, row_capacity=129), "rows"),
            (Problem((128, 128), 2, 1, 8), "rows"),
        ],
    )
    def test_what_cannot_cancel(self, problem: Problem, what: str) -> None:
        with pytest.raises(ValueError, match="inputs: got Problem"):
            derive.cancelling(make_inputs(problem), what)
        with pytest.raises(ValueError, match="what: got 'columns', need 'windows' or 'rows'"):
            derive.cancelling(make_inputs(problem), "columns")

    def test_part_cuts_rows_and_tokens(self) -> None:
        result = Buffers(PROBLEM, "cpu").result
        cut = derive.part(result, slice(2), slice(3))
        assert [len(t) for _, t in cut.items()] == [2, 3, 3, 4]


class TestStage:
    def test_load_writes_in_place(self) -> None:
        first, second = (make_inputs(PROBLEM, seed) for seed in (0, 1))
        stage = Stage(first)
        staged = stage.load(first)
        pointers = {name: tensor.data_ptr() for name, tensor in tensors(staged).items()}
        again = stage.load(second)
        assert {name: tensor.data_ptr() for name, tensor in tensors(again).items()} == pointers
        assert all(torch.equal(getattr(again, name), tensor) for name, tensor in tensors(second).items())
        assert staged.kv.data_ptr() != first.kv.data_ptr(), "the inputs themselves stay as they are"

    def test_other_shape_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"kv: got shape \(8, 16\), need \(40, 16\)"):
            Stage(make_inputs(PROBLEM)).load(make_inputs(Problem((8,), 4, 2, 8)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_replays_new_data() -> None:
    kernel = load_kernel("fused")
    first, second = (Case("a", PROBLEM, seed=seed).inputs("cuda") for seed in (0, 1))
    _, got = Graph(kernel, first).replay(second)
    for (name, want), (_, tensor) in zip(run(kernel, second).items(), got.items(), strict=True):
        assert same_bits(tensor, want), name
