"""Golden vectors: reproduced on any number of threads, true, in the format they say, and guarded against edits."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import struct
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import fastjsonschema
import pytest
import torch

import csa_gate.suites.golden
from csa_gate import _vectors
from csa_gate.__main__ import main
from csa_gate.fixtures.adapters.fused import portable
from csa_gate.fixtures.golden import CHANGES, FOLDER, digest, digests, load, names
from csa_gate.fixtures.run import run
from csa_gate.oracles import DISTRIBUTIONS, Result
from csa_gate.oracles.bits import same_bits
from csa_gate.oracles.bound import error_bound
from csa_gate.oracles.judge import compare
from csa_gate.oracles.ordered import ordered

from .test_plugin import BARE

SMALL, LARGE = names(digests=False), names(digests=True)
SCHEMA = json.loads((FOLDER / "schema.json").read_text())
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def content(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.json").read_text())


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of torch's threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# True.


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 2])
def test_ordered_reproduces_every_vector(count: int, device: str, threads: None) -> None:
    """Of the digests with two threads one in eight: threads that wait for each other take long on a busy machine."""
    torch.set_num_threads(count)
    for name in SMALL:
        for vector in load(name):
            got = ordered(vector.inputs.to(device), exp="portable").to("cpu")
            for output, tensor in got.items():
                assert same_bits(tensor, getattr(vector.portable, output)), (vector.id, output)
    for name in LARGE:
        for vector in load(name)[:: (1, 8)[count - 1]]:
            assert digests(ordered(vector.inputs.to(device), exp="portable")) == vector.digests, vector.id


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("id", ["r4c2-d128-threads-normal", "r4c1-d520-threads-normal"])
def test_threads_change_no_bit_of_the_kernel(id: str, device: str, threads: None) -> None:
    """Calls large enough for several threads, also where columns divide unevenly."""
    (vector,) = (v for name in LARGE for v in load(name) if v.id == id)
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        assert digests(run(portable, vector.inputs.to(device))) == vector.digests, count


@pytest.mark.parametrize("name", SMALL)
def test_exact_values_are_within_the_bounds_of_portable_ones(name: str) -> None:
    """Both are roundings of one real value, so each is within one bound of it. The bounds bind: most are finite."""
    finite = total = 0
    for vector in load(name):
        bound = error_bound(vector.inputs)
        twice = Result(**{output: 2 * tensor for output, tensor in bound.items()})
        want = Result(**{output: tensor.double() for output, tensor in vector.exact.items()})
        compare("error_bound", vector.inputs, want, vector.portable, bound=twice, what=vector.id).check()
        for _, tensor in bound.items():
            finite, total = finite + int(tensor.isfinite().sum()), total + tensor.numel()
    assert finite > 0.6 * total


def test_a_reader_of_its_own_gets_the_exact_values() -> None:
    """The README followed without NumPy or torch, in plain Python: without overlap, one segment after the other."""
    seen = 0
    for case in content("short")["cases"]:
        p = case["problem"]
        if p["coff"] != 1 or case["distribution"] not in ("normal", "ties"):
            continue
        kv, score, grad_out = ([decoded(row, 4) for row in case["inputs"][n]] for n in ("kv", "score", "grad_out"))
        ape = [decoded(row, 8) for row in case["inputs"]["ape"]]
        row, token = 0, 0
        for length in p["lens"]:
            for block in range(length // p["ratio"]):
                own = range(token + block * p["ratio"], token + (block + 1) * p["ratio"])
                for j in range(p["head_dim"]):
                    x = [score[t][j] + ape[k][j] for k, t in enumerate(own)]
                    e = [math.exp(v - max(x)) for v in x]
                    out = sum(w * kv[t][j] for w, t in zip(e, own, strict=True)) / sum(e)
                    want = decoded(case["exact"]["out"][row], 4)[j]
                    assert abs(out - want) <= 2.0**-8 * abs(out) + 1e-15
                    for w, t in zip(e, own, strict=True):
                        dkv = grad_out[row][j] * w / sum(e)
                        assert abs(dkv - decoded(case["exact"]["grad_kv"][t], 4)[j]) <= 2.0**-8 * abs(dkv) + 1e-15
                seen += 1
                row += 1
            token += length
    assert seen > 20


def decoded(row: str, digits: int) -> list[float]:
    """A row of hexadecimal bit patterns as numbers."""
    words = [row[i : i + digits].ljust(8, "0") for i in range(0, len(row), digits)]  # bf16 is the upper half of fp32
    return [struct.unpack(">f", bytes.fromhex(word))[0] for word in words]


# Format.


@pytest.mark.parametrize("name", [*SMALL, *LARGE])
def test_files_follow_the_schema(name: str) -> None:
    fastjsonschema.compile(SCHEMA)(content(name))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda case: case.update(version=3),
        lambda case: case.update(comment="by hand"),
        lambda case: case.pop("seed"),
        lambda case: case["inputs"].pop("kv"),
        lambda case: case["portable"]["out"].append("3F8"),
        lambda case: case["portable"]["out"].append("3f80"),
        lambda case: case["flags"].append("new"),
        lambda case: case.pop("exact"),
    ],
)
def test_the_schema_refuses(spoil) -> None:
    case = content("short")["cases"][0]
    spoil(case)
    with pytest.raises(fastjsonschema.JsonSchemaException):
        fastjsonschema.compile(SCHEMA)({"version": 2, "name": "short", "cases": [case]})


def test_what_the_vectors_cover() -> None:
    """Every flag of the schema more than once, every distribution, each id once, and in the size that was meant."""
    cases = [case for name in (*SMALL, *LARGE) for case in content(name)["cases"]]
    small = [case for case in cases if "inputs" in case]
    flags = Counter(flag for case in cases for flag in case["flags"])
    known = SCHEMA["definitions"]["case"]["properties"]["flags"]["items"]["enum"]
    assert set(flags) == set(known)
    assert min(flags.values()) > 1
    assert len(small) >= 200
    assert len(cases) == len({case["id"] for case in cases})
    assert {case["distribution"] for case in small} == set(DISTRIBUTIONS)
    assert {case["changed"] for case in small} == set(CHANGES)
    assert {1, 512} <= {case["problem"]["ratio"] * case["problem"]["coff"] for case in small}
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 2_000_000


def test_digests_are_of_low_bytes_first_and_of_one_nan() -> None:
    values = torch.tensor([[1.0, -2.0]])
    assert digest(values) == hashlib.sha256(bytes.fromhex("0000803F000000C0")).hexdigest()
    assert digest(values.bfloat16()) == hashlib.sha256(bytes.fromhex("803F00C0")).hexdigest()
    negative = torch.tensor([[-1]], dtype=torch.int16).view(torch.bfloat16)
    assert digest(negative) == hashlib.sha256(bytes.fromhex("C07F")).hexdigest()
    assert digest(-torch.zeros((1, 1))) != digest(torch.zeros((1, 1)))


# Made and guarded.


def test_files_are_what_is_made_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vectors", "--check"]) == 0
    assert capsys.readouterr().out.count(": as made here\n") == len([*SMALL, *LARGE])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the vectors; what would be made is what is in the package, without the work."""
    for path in FOLDER.glob("*.json"):
        shutil.copy(path, tmp_path)
    made = {f"{name}.json": (FOLDER / f"{name}.json").read_text() for name in (*SMALL, *LARGE)}
    monkeypatch.setattr(_vectors, "generate", lambda: made)
    return tmp_path


@pytest.mark.parametrize(
    ("tamper", "line"),
    [
        (lambda f: f.write_text(f.read_text().replace("3F80", "3F81", 1)), "edges.json: differs from line "),
        (lambda f: f.write_text(f.read_text() + "\n"), "edges.json: differs from line "),
        (lambda f: f.unlink(), "edges.json: missing"),
        (lambda f: shutil.copy(f, f.with_name("more.json")), "more.json: not one of the golden vectors"),
    ],
)
def test_check_finds_what_was_tampered_with(folder: Path, tamper, line: str, capsys) -> None:
    assert main(["vectors", "--check", "--out", str(folder)]) == 0
    tamper(folder / "edges.json")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert main(["vectors", "--check", "--out", str(folder)]) == 1
    assert line in capsys.readouterr().out
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_out_writes_the_same_files(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    assert main(["vectors", "--out", str(elsewhere)]) == 0
    made = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    assert made == {f"{name}.json": (FOLDER / f"{name}.json").read_bytes() for name in (*SMALL, *LARGE)}


def test_out_must_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["vectors", "--out", str(tmp_path / "nowhere")])
    assert "--out: got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("edges", '"version": 2,\n  "id"', '"version": 1,\n  "id"', "version: got 1 in r4c2-d2-single-token-normal"),
        ("edges", '"kv": ["3FB4', '"kv": ["3FB5', "kv: r4c2-d2-single-token-normal has other bits here than in the"),
        ("digests", '"seed": 0', '"seed": 1', "r4c2-d64-normal has other bits here than the file's digest says"),
    ],
)
def test_load_refuses(folder: Path, name: str, old: str, new: str, message: str) -> None:
    path = folder / f"{name}.json"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=message):
        load(name, folder)


# Kernels.

SUITE = f"{Path(csa_gate.suites.__file__).parent / 'test_compressor.py'}::TestCompressor"
COMMON = (*BARE, "--import-mode=importlib", "--csa-device=cpu")
PLANTED = """
from csa_gate.fixtures.adapters.fused import FusedKernel

class Sound(FusedKernel):
    def __init__(self):
        super().__init__("planted", "portable")

class LastBit(Sound):
    def forward(self, *inputs, out, **options):
        super().forward(*inputs, out=out, **options)
        if len(out) > 1:
            out.view(dtype=__import__("torch").int16)[-1, -1] ^= 1

class RoundsApe(Sound):
    def backward(self, *inputs, grad_ape, **options):
        super().backward(*inputs, grad_ape=grad_ape, **options)
        grad_ape.copy_(grad_ape.bfloat16())
"""


@pytest.mark.parametrize(
    ("kernel", "broken"),
    [
        ("Sound", set()),
        ("LastBit", {"test_vectors[edges-forward_bits]", "test_digests[digests-forward_bits]"}),
        ("RoundsApe", {"test_vectors[edges-dape_bits]", "test_digests[digests-dape_bits]", "test_exact_values[edges]"}),
    ],
)
def test_the_suite_holds_kernels_to_the_vectors(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, kernel: str, broken: set[str]
) -> None:
    """A part of each file, for what costs time is to compile."""
    some = {"edges": slice(-30, None), "digests": slice(7)}
    monkeypatch.setattr(csa_gate.suites.golden, "load", lambda name: load(name)[some[name]])
    mine = pytester.makepyfile(mine=PLANTED)
    tests = [f"{SUITE}::{name}" for name in ("test_vectors", "test_exact_values", "test_digests")]
    recorder = pytester.inline_run(*tests, "-k", "edges or digests", f"--csa-kernel={mine}:{kernel}", *COMMON)
    reports = [r for r in recorder.getreports("pytest_runtest_logreport") if r.when == "call"]
    assert len(reports) == 7
    assert {r.nodeid.rpartition("::")[2] for r in reports if r.failed} == broken
    for report in reports:
        if report.failed:
            assert "contract broken: " in report.longreprtext
            assert "reproduce: python -m " in report.longreprtext
            if "digests" not in report.nodeid:
                assert "golden vector r" in report.longreprtext


def test_a_kernel_of_other_bits_is_held_to_the_values_alone(pytester: pytest.Pytester) -> None:
    tests = [f"{SUITE}::{name}" for name in ("test_vectors", "test_exact_values")]
    mine = pytester.makepyfile(
        mine="""
        from csa_gate.fixtures.adapters.eager import EagerKernel
        from csa_gate.oracles import Contract

        class Mine(EagerKernel):
            def contract(self, device):
                return Contract(forward_bits="eager", error_bound=True)
        """
    )
    recorder = pytester.inline_run(*tests, "-k", "edges", f"--csa-kernel={mine}:Mine", *COMMON)
    reports = recorder.getreports("pytest_runtest_logreport")
    assert [r.nodeid.rpartition("::")[2] for r in reports if r.when == "call" and r.passed] == [
        "test_exact_values[edges]"
    ]
    assert any("forward_bits here are those of eager" in str(r.longrepr) for r in reports if r.skipped)
