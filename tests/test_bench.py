"""`python -m csa_gate bench`: the arithmetic of its report, its packs, its eager region, and a run on the CPU."""

import importlib
import json
import math
import sys
from types import SimpleNamespace

import pytest
import torch

from csa_gate import _bench, _bench_measure, _bench_picture, _bench_subjects
from csa_gate.__main__ import main
from csa_gate._bench_clock import CpuClock, alone
from csa_gate._bench_measure import Row, differing, measure
from csa_gate._bench_packs import DIRECTIONS, PACKS, Pack, choose, floor_us
from csa_gate._bench_report import aims, percent, speedup, table, targets, times
from csa_gate._bench_subjects import Buffers, EagerSubject, KernelSubject, PeerSubject, Region
from csa_gate.fixtures.kernels import load_kernel
from csa_gate.oracles import Inputs, Problem
from csa_gate.oracles.bits import bit_pattern
from csa_gate.oracles.eager import eager

CPU = torch.device("cpu")
PROBLEM = Problem((37, 0, 3, 12, 4), ratio=4, coff=2, head_dim=8)
BY_ID = {pack.id: pack for pack in choose(None, "cuda")}


@pytest.mark.parametrize(
    ("value", "text"),
    [(10.96, "10.9x"), (11.0, "11.0x"), (10.999999, "10.9x"), (2.3, "2.3x"), (0.96, "0.9x"), (123.45, "123.4x")],
)
def test_speedups_are_cut_off(value, text):
    """A speed-up is never rounded up."""
    assert speedup(value) == text


@pytest.mark.parametrize(("value", "text"), [(1.171, "1.18x"), (1.18, "1.18x"), (1.180001, "1.19x"), (2.0, "2.00x")])
def test_slowdowns_are_rounded_up(value, text):
    """What speaks against the kernel is never rounded down."""
    assert times(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.859, "85%"), (0.85, "85%"), (1.0, "100%"), (0.004, "0%")])
def test_shares_are_cut_off(value, text):
    assert percent(value) == text


def test_traffic_by_hand():
    """Every tensor once: kv, score and, backward, their gradients; rows; ape; both offsets."""
    problem = Problem((9, 3), ratio=4, coff=2, head_dim=8)
    pack = Pack("x", problem)
    tokens, rows, ape, offsets = 12 * 16 * 2, 2 * 8 * 2, 4 * 16 * 4, 2 * 3 * 4
    forward = 2 * tokens + rows + ape + offsets
    backward = 4 * tokens + rows + 2 * ape + offsets
    assert [pack.traffic(d) for d in DIRECTIONS] == [forward, backward, forward + backward]
    assert floor_us(4_260_000, 4.26e12) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("pack", "forward", "backward"),
    [
        ("1x8192-d128-r4c2", 2.1, 4.1),
        ("3x8192-d128-r4c2", 6.3, 12.2),
        ("1x8192-d512-r4c2", 8.4, 16.3),
        ("8x8192-d128-r4c1", 8.9, 16.7),
        ("1x65536-d128-r128c2", 15.8, 31.6),
        ("1x65536-d512-r128c1", 31.7, 63.2),
        ("256x255-d128-r128c2", 15.7, 31.4),
        ("4096x16-d128-r4c2", 16.7, 32.5),
        ("8192x3+1x4096-d128-r4c2", 7.0, 13.9),
    ],
)
def test_floors(pack, forward, backward):
    """Microseconds at an H200's measured 4.26 TB/s, as they stood beside earlier measurements."""
    floors = [floor_us(BY_ID[pack].traffic(d), 4.26e12) for d in ("forward", "backward")]
    assert floors == pytest.approx([forward, backward], abs=0.15)


def test_packs():
    """Names within one choice are unique; every ragged pack has a twin of the same size, in the same choice."""
    assert [sum(p.group == g for p in BY_ID.values()) for g in ("table", "ragged", "single")] == [10, 2, 2]
    for pack in BY_ID.values():
        assert (pack.twin is not None) == (pack.group == "ragged")
        if pack.twin is not None:
            assert BY_ID[pack.twin].problem.total_tokens == pack.problem.total_tokens
            assert len(BY_ID[pack.twin].problem.lens) == 1
    assert [p.id for p in choose(["ragged", "1x8192-d512-r4c2"], "cuda")] == [
        "1x8192-d512-r4c2",
        "4096x16-d128-r4c2",
        "8192x3+1x4096-d128-r4c2",
    ]
    assert {p.group for p in PACKS} == set(_groups())


def _groups():
    return importlib.import_module("csa_gate._bench_packs").GROUPS


def row(pack="1x8192-d512-r4c2", direction="forward", group="table", traffic=200_000_000, floor=10.0, **figures):
    return Row(pack, group, direction, traffic, floor, **figures)


def by_what(rows):
    return {t.what: (t.got, t.met) for t in targets(rows)}


def test_targets_take_the_worst_figure():
    """Each target is decided by the pack that is worst, by the exact figure and not by its text."""
    rows = [
        row(us={"ours": 11.75, "peer": 20.0, "peer-deterministic": 12.0}),
        row("3x8192-d512-r4c2", us={"ours": 10.0, "peer": 40.0}, host_us={"ours": 15.1}, add_us=10.0),
        row("1x8192-d128-r4c2", traffic=9_000_000, floor=2.0, us={"ours": 6.0, "peer": 6.5}),
        row("4096x16-d128-r4c2", group="ragged", us={"ours": 20.0, "peer": 399.0}),
        row("1x65536-d128-r4c2", group="single", us={"ours": 10.0}),
    ]
    found = by_what(rows)
    assert found["forward of 100 MB and more, over the floor"] == ("2.00x (4096x16-d128-r4c2)", False)
    assert found["forward of every pack, over the peer"] == ("1.0x (1x8192-d512-r4c2)", True)
    mean = (12 / 11.75 * 4 * 6.5 / 6) ** (1 / 3)
    assert found["forward, geometric mean over the peer"] == (f"{math.floor(mean * 10) / 10}x (3 packs)", mean >= 1.5)
    assert found["forward of ragged packs, over the peer"] == ("19.9x (4096x16-d128-r4c2)", False)
    assert found["forward of ragged packs, over one segment"] == ("2.00x (4096x16-d128-r4c2)", True)
    assert found["forward, host time over torch.add"] == ("1.51x (3x8192-d512-r4c2)", False)
    assert found["backward of every pack, over the peer"] == ("not measured", None)
    assert by_what(rows[:3])["forward of 100 MB and more, over the floor"] == ("1.18x (1x8192-d512-r4c2)", True)
    slower = by_what([row(us={"ours": 11.81, "peer": 11.8})])
    assert slower["forward of 100 MB and more, over the floor"] == ("1.19x (1x8192-d512-r4c2)", False)
    assert slower["forward of every pack, over the peer"] == ("0.9x (1x8192-d512-r4c2)", False)


def test_targets_of_backward_and_of_a_cpu():
    """The deterministic sum is a share of the backward; on a CPU the eager region is what there is to beat."""
    found = by_what([row(direction="backward", us={"ours": 10.0}, dape_share=0.0501)])
    assert found["the sum of grad_ape, share of backward"] == ("0.06x (1x8192-d512-r4c2)", False)
    rows = [row(threads=n, us={"ours": 10.0, "eager": eager}) for n, eager in ((1, 30.0), (2, 9.99))]
    assert by_what(rows) == {"forward on the CPU, over eager": ("0.9x (1x8192-d512-r4c2 2T)", False)}
    assert by_what([row(group="smoke", threads=1, us={"ours": 10.0, "eager": 1.0})]) == {}


def test_table():
    """A column for each figure, `-` where there is none; on a CPU only what a CPU has."""
    full = row(
        us={"ours": 10.0, "eager": 109.6, "peer": 20.0, "peer-deterministic": 15.99},
        graph_us={"ours": 12.0},
        host_us={"ours": 9.0},
        add_us=8.0,
        peak_bytes={"ours": 3 << 20, "eager": 512 << 20},
        differing=0,
        floor=8.59,
    )
    lines = table([full, row(direction="backward")])
    header, first, second = (line.split() for line in lines)
    assert header[:5] == ["pack", "direction", "us", "floor", "copy%"]
    assert first == [
        "1x8192-d512-r4c2", "forward", "10.0", "8.6", "85%", "109.6", "10.9x", "20.0", "16.0", "1.5x",
        "12.0", "9.0", "1.13x", "3.0", "512.0", "0",
    ]  # fmt: skip
    assert second == ["1x8192-d512-r4c2", "backward", "-", "10.0", *["-"] * 12]
    assert len({len(line) for line in lines}) == 1
    cpu = table([row(threads=2, us={"ours": 10.0, "eager": 20.0})])
    assert [line.split() for line in cpu] == [
        ["pack", "direction", "us", "floor", "copy%", "eager", "x", "eager"],
        ["1x8192-d512-r4c2", "2T", "forward", "10.0", "10.0", "100%", "20.0", "2.0x"],
    ]
    assert table([full], header=False) == [lines[1]]


def test_lines_of_targets():
    """One line each: what, how much, whether, and the figure with the pack that it comes from."""
    lines = [" ".join(line.split()) for line in aims(targets([row(us={"ours": 10.0, "peer": 15.99}, floor=8.0)]))]
    assert lines[:2] == [
        "forward of 100 MB and more, over the floor <= 1.18x MISSED 1.25x (1x8192-d512-r4c2)",
        "forward of every pack, over the peer >= 1x met 1.5x (1x8192-d512-r4c2)",
    ]
    assert "forward, host time over torch.add <= 1.5x - not measured" in lines


@pytest.mark.parametrize("coff", [1, 2])
def test_eager_region_is_the_oracle(coff):
    """The region that is timed gives the bits of `oracles.eager`, gradients included."""
    problem = Problem((37, 0, 3, 12, 4), ratio=4, coff=coff, head_dim=8)
    b = Buffers.make(problem, CPU, 0)
    inputs = Inputs(problem, b.kv, b.score, b.ape, b.grad_out, b.cu_seqlens, b.cu_seqlens_comp)
    want = eager(inputs)
    region = Region(problem, CPU)
    got = region.forward_backward(b.kv, b.score, b.ape, b.grad_out)
    for a, (name, wanted) in zip(got, want.items(), strict=True):
        assert torch.equal(bit_pattern(a), bit_pattern(wanted)), name
    assert torch.equal(bit_pattern(region.forward(b.kv, b.score, b.ape)), bit_pattern(want.out))


def test_buffers():
    """The same seed, the same values; fresh outputs are new, inputs are shared."""
    one, same, other = (Buffers.make(PROBLEM, CPU, seed) for seed in (0, 0, 1))
    assert torch.equal(one.kv, same.kv) and not torch.equal(one.kv, other.kv)
    outputs = {"forward": {"out"}, "backward": {"grad_kv", "grad_score", "grad_ape"}}
    for direction in DIRECTIONS:
        fresh = one.fresh(direction)
        new = {n for n, t in vars(fresh).items() if n != "problem" and t.data_ptr() != getattr(one, n).data_ptr()}
        assert new == outputs.get(direction, outputs["forward"] | outputs["backward"])


def test_differing_bits_are_counted():
    """A kernel of the eager region's own bits has none; each wrong element is one."""

    class Wrong:
        name = "wrong"

        def forward(self, kv, *args, ratio, coff, out):
            out.copy_(EagerSubject().calls(b)["forward"]())
            out[1, 3] = -out[1, 3]

        def backward(self, *args, ratio, coff, grad_kv, grad_score, grad_ape):
            for into, gradient in zip(
                (grad_kv, grad_score, grad_ape), EagerSubject().calls(b)["both"]()[1:], strict=True
            ):
                into.copy_(gradient)
            grad_kv[0, 0] += 1
            grad_score[2] = torch.where(grad_score[2] == 0, -grad_score[2], grad_score[2])

    b = Buffers.make(PROBLEM, CPU, 0)
    zeros = int((EagerSubject().calls(b)["both"]()[2][2] == 0).sum())
    assert differing(KernelSubject(Wrong()), EagerSubject(), b) == (1, 1 + zeros)
    assert differing(KernelSubject(load_kernel("eager")), EagerSubject(), b) == (0, 0)


def test_a_subject_that_fails_leaves_a_note():
    """The others are measured all the same."""

    class Failing:
        name = "peer"

        def refuses(self, problem):
            return None

        def calls(self, buffers):
            return {"forward": self._fail, "backward": lambda: None}

        def _fail(self):
            raise RuntimeError("out of\nluck")

    class Refusing(Failing):
        def refuses(self, problem):
            return "no such ratio"

    kernel = KernelSubject(load_kernel("eager"))
    pack = Pack("tiny", PROBLEM, "smoke")
    rows = measure(pack, [Failing(), Refusing(), kernel, EagerSubject()], CpuClock(1), 1e9, CPU)
    assert [r.direction for r in rows] == list(DIRECTIONS)
    assert [sorted(r.us) for r in rows] == [["eager", "ours"], ["ours", "peer"], ["eager", "ours"]]
    assert rows[0].notes == ["peer: RuntimeError: out of luck", "peer: no such ratio"]
    assert rows[1].notes == ["peer: no such ratio"]
    assert all(r.threads == torch.get_num_threads() for r in rows)


class Instant:
    """A clock of a GPU that does nothing: what the rows hold is what it was asked."""

    def sets(self, traffic):
        return 2

    def kernel_us(self, calls):
        assert len(calls) == 2
        return 5.0

    def graph_us(self, call):
        return 6.0

    def host_us(self, call, kernel_us):
        assert kernel_us == 5.0
        return 3.0, 2.0

    def peak_bytes(self, call):
        return 1000 + (call() is None)

    def dape_share(self, call):
        return 0.01


def test_every_figure_of_a_gpu(monkeypatch):
    """All figures are asked for and land where the report looks for them."""
    monkeypatch.setattr(_bench_measure, "_too_large", lambda *args: None)
    subjects = [KernelSubject(load_kernel("eager")), EagerSubject()]
    device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(Buffers, "make", lambda problem, device, seed, make=Buffers.make: make(problem, CPU, seed))
    forward, backward, both = measure(Pack("tiny", PROBLEM), subjects, Instant(), 1e9, device)
    assert forward.us == both.us == {"ours": 5.0, "eager": 5.0}
    assert backward.us == {"ours": 5.0}
    assert forward.graph_us == {"ours": 6.0, "eager": 6.0}
    assert (forward.host_us["ours"], forward.add_us, forward.peak_bytes["ours"]) == (3.0, 2.0, 1000)
    assert (forward.differing, backward.differing, both.differing) == (0, 0, None)
    assert (forward.dape_share, backward.dape_share) == (None, 0.01)
    assert forward.notes == backward.notes == both.notes == []


def test_eager_is_left_out_where_it_does_not_fit(monkeypatch):
    """Before it takes the memory, and with both figures."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 2 * 10**9))
    large = Pack("large", Problem((65536,), ratio=4, coff=2, head_dim=512))
    said = _bench_measure._too_large(EagerSubject(), large, torch.device("cuda"))
    assert said == "needs about 3 GB, of which 1 are free"
    assert _bench_measure._too_large(EagerSubject(), Pack("tiny", PROBLEM), torch.device("cuda")) is None
    assert _bench_measure._too_large(KernelSubject(load_kernel("eager")), large, torch.device("cuda")) is None


PEER = {"run_fwd": 10, "run_bwd": 13, "run_fwd_r128": 10, "run_bwd_r128": 13}


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_peer_is_called_as_its_api_calls_it(ratio, deterministic, monkeypatch):
    """Tensors, rows, ratio, head_dim and coff in the peer's order; a workspace for the deterministic form alone."""
    seen = []

    def record(name):
        return lambda *args, **kwargs: seen.append((name, args, kwargs))

    peer = SimpleNamespace(
        **{name: record(name) for name in PEER},
        bwd_dape_workspace_bytes=lambda rows, ratio, head_dim, coff: 64,
        bwd_dape_workspace_bytes_r128=lambda rows, ratio, head_dim, coff, device: 128,
    )
    monkeypatch.setattr(_bench_subjects.importlib, "import_module", lambda name: peer)
    monkeypatch.setattr(_bench_subjects.importlib.metadata, "version", lambda name: "1.32.0")
    problem = Problem((2 * ratio,), ratio=ratio, coff=2, head_dim=128)
    subject, b = PeerSubject(deterministic=deterministic), Buffers.make(problem, CPU, 0)
    assert subject.refuses(problem) is None
    assert subject.refuses(Problem((9,), ratio=3, coff=2, head_dim=8)) == (
        "nvidia-cudnn-frontend has no ratio 3 with head_dim 8"
    )
    subject.calls(b)["both"]()
    (forward, fargs, fkwargs), (backward, bargs, bkwargs) = seen
    suffix = "_r128" if ratio == 128 else ""
    assert (forward, backward) == (f"run_fwd{suffix}", f"run_bwd{suffix}")
    assert (len(fargs), len(bargs)) == (PEER[forward], PEER[backward])
    assert fargs[5] is b.out and bargs[5] is b.grad_out and bargs[8] is b.grad_ape
    assert fargs[6:] == bargs[9:] == (problem.total_comp, ratio, 128, 2)
    assert fkwargs == {}
    if deterministic:
        assert bkwargs["deterministic"] is True
        assert bkwargs["workspace"].numel() == (128 if suffix else 64)
    else:
        assert bkwargs == {}


def test_no_peer(monkeypatch):
    """Not installed, and installed but broken, are reasons and no errors."""

    def missing(name):
        raise _bench_subjects.importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_bench_subjects.importlib.metadata, "version", missing)
    assert PeerSubject(deterministic=False).refuses(PROBLEM) == "nvidia-cudnn-frontend is not installed"
    monkeypatch.setattr(_bench_subjects.importlib.metadata, "version", lambda name: "1.32.0")
    monkeypatch.setitem(sys.modules, "cudnn", None)
    said = PeerSubject(deterministic=False).refuses(PROBLEM)
    assert said is not None and said.startswith("nvidia-cudnn-frontend cannot be used: ModuleNotFoundError")


def bench(capsys, *options):
    """Exit status, stdout and stderr of the command in this process."""
    try:
        status = main(["bench", *map(str, options)])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_smoke(tmp_path, capsys):
    """The whole command on a CPU: every direction, every number of threads, and the same rows in the file."""
    before = torch.get_num_threads()
    status, out, err = bench(capsys, "--smoke", "--repeats", "1", "--json", tmp_path / "bench.json")
    assert (status, err) == (0, "")
    assert torch.get_num_threads() == before
    report = json.loads((tmp_path / "bench.json").read_text())
    assert report["about"]["command"].startswith("python -m csa_gate bench --smoke --kernel fused --repeats 1 --json ")
    assert set(report) == {"about", "copy_bytes_per_second", "rows", "targets"}
    rows = report["rows"]
    threads = sorted({r["threads"] for r in rows})
    assert threads in ([1], [1, 2])
    smoke = choose(None, "smoke")
    assert [(r["threads"], r["pack"], r["direction"]) for r in rows] == [
        (n, pack.id, direction) for n in threads for pack in smoke for direction in DIRECTIONS
    ]
    assert len(report["copy_bytes_per_second"]) == len(threads)
    for r in rows:
        assert set(r["us"]) == ({"ours"} if r["direction"] == "backward" else {"ours", "eager"})
        assert r["notes"] == []
        assert f"{r['us']['ours']:.1f}" in out
    assert "machine: " in out and "versions: csa-gate " in out


def test_a_run_that_is_stopped_keeps_the_packs_before(tmp_path, monkeypatch):
    """The file has every pack that was measured whole."""
    first, second = choose(None, "smoke")[:2]

    def stopped(pack, *rest):
        if pack == second:
            raise KeyboardInterrupt
        return measure(pack, *rest)

    monkeypatch.setattr(_bench, "measure", stopped)
    assert main(["bench", "--smoke", "--repeats", "1", "--json", str(tmp_path / "bench.json")]) == 130
    report = json.loads((tmp_path / "bench.json").read_text())
    assert [(r["pack"], r["direction"]) for r in report["rows"]] == [(first.id, direction) for direction in DIRECTIONS]
    assert len(report["copy_bytes_per_second"]) == 1


def test_a_kernel_that_fails_is_status_1(tmp_path, capsys):
    """A pack on which the kernel could not be measured is no success."""
    path = tmp_path / "failing.py"
    path.write_text(
        "from csa_gate.fixtures.adapters.eager import EagerKernel\n"
        "class Failing(EagerKernel):\n"
        "    name = 'failing'\n"
        "    def backward(self, *args, **kwargs):\n"
        "        raise RuntimeError('no backward')\n"
    )
    status, out, _ = bench(capsys, "--smoke", "--repeats", "1", "--without", "eager", "--kernel", f"{path}:Failing")
    assert status == 1
    assert "ours: RuntimeError: no backward" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--smoke", "--device", "cuda"], "--smoke: runs on the CPU, not with --device cuda"),
        (["--smoke", "--repeats", "0"], "--repeats: got 0, need at least 1"),
        (["--smoke", "--repeats", "x"], "argument --repeats: invalid int value: 'x'"),
        (["--smoke", "--pack", "nosuch"], "--pack: got 'nosuch', need table, ragged"),
        (["--smoke", "--kernel", "nosuch"], "nosuch"),
        (["--smoke", "--without", "ours"], "argument --without: invalid choice: 'ours'"),
        (
            ["--smoke", "--picture", "{folder}/none/x.png"],
            "--picture: got {folder}/none/x.png, need a file in a folder",
        ),
        (["--device", "tpu"], "argument --device: invalid choice: 'tpu'"),
    ],
)
def test_bad_arguments_write_nothing(options, message, tmp_path, capsys):
    """Status 2, one line on stderr, and no file."""
    given = [option.format(folder=tmp_path) for option in options]
    status, out, err = bench(capsys, *given, "--json", tmp_path / "bench.json")
    assert (status, out) == (2, "")
    assert message.format(folder=tmp_path) in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_no_gpu(capsys):
    """Without a GPU the command says so, rather than measure something else."""
    status, _, err = bench(capsys)
    assert status == 2
    assert "torch sees no CUDA device" in err


def test_picture(tmp_path, capsys, monkeypatch):
    """A PNG where matplotlib is there; where it is not, the command says so before it measures."""
    path = tmp_path / "bench.png"
    if importlib.util.find_spec("matplotlib") is not None:
        rows = [row(direction=d, us={"ours": 10.0, "eager": 100.0}) for d in ("forward", "both")]
        _bench_picture.draw(rows, "a machine", path)
        assert path.read_bytes().startswith(b"\x89PNG")
        path.unlink()
    monkeypatch.setattr(_bench_picture.importlib.util, "find_spec", lambda name: None)
    status, out, err = bench(capsys, "--smoke", "--picture", path)
    assert (status, out) == (2, "")
    assert "--picture: needs matplotlib: pip install csa-gate[bench]" in err
    assert not path.exists()


@pytest.mark.parametrize(
    ("spans", "part"),
    [
        ([(0.0, 8.0, False), (9.0, 11.0, True)], 0.2),
        ([(0.0, 8.0, False), (3.0, 10.0, True)], 0.2),  # launched early, and waiting
        ([(3.0, 10.0, True), (0.0, 8.0, False), (20.0, 28.0, False), (23.0, 30.0, True)], 0.2),
        ([(0.0, 8.0, False)], 0.0),
    ],
)
def test_a_kernel_that_waits_takes_no_time(spans: list[tuple[float, float, bool]], part: float) -> None:
    assert alone(spans) == pytest.approx(part)
