"""`python -m csa_gate static`: what its parsers see in PTX and cubins, and the command on kernels compiled here."""

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from csa_gate import _static_cubin, _static_probe, _toolkit
from csa_gate.__main__ import main
from csa_gate._static import ARCHS, read, table
from csa_gate._static_cubin import LIMITS, Usage, occupancy, parse_resources, parse_spills
from csa_gate._static_probe import Row, rows_of
from csa_gate._static_ptx import kernels
from csa_gate.fused import compiled
from csa_gate.fused.catalogue import CATALOGUE, burden, cap, compile_for, representatives, shared_memory
from csa_gate.fused.checks import Shape

EXPF = """
	fma.rn.f32 	%r10, %r9, 0f3BBB989D, 0f3F000000;
	cvt.sat.f32.f32 	%r11, %r10;
	mov.b32 	%r12, 0f4B400001;
	mov.b32 	%r13, 0f437C0000;
	fma.rm.f32 	%r14, %r11, %r13, %r12;
	add.f32 	%r15, %r14, 0fCB40007F;
	neg.f32 	%r16, %r15;
	fma.rn.f32 	%r17, %r9, 0f3FB8AA3B, %r16;
	fma.rn.f32 	%r18, %r9, 0f32A57060, %r17;
	shl.b32 	%r19, %r14, 23;
	ex2.approx.ftz.f32 	%r20, %r18;
	mul.f32 	%r21, %r20, %r19;
"""
CLEAN = """
	ld.global.v2.b32 	{%r1, %r2}, [%rd1];
	add.rn.f32 	%r3, %r1, %r2; // add.f32 in a comment
	@%p1 mul.rn.f32 	%r4, %r3, %r3;
	sub.rn.f32 %r9, %r1, %r2; div.rn.f32 %r5, %r3, %r4; rcp.rn.f32 %r6, %r5;
	add.rn.f32x2 %rd5, %rd6, %rd7;
	max.f32 %r7, %r1, %r2;
	add.s32 %r8, %r1, 4;
	cvt.rn.bf16x2.f32 %r22, %r1, %r2;
	atom.shared.add.u32 %r23, [%r24], 1;
	red.shared::cta.add.u32 [%r24], 1;
	cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%r24], [%r25], 16, [%r26];
$L__BB0_2:
	fma.rn.f32 %r27, %r1, %r2, %r3;
	setp.lt.f32 	%p1, %r3, %r4;
"""
PINNED = 7  # in CLEAN
HEAD = ".version 8.8\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 dynamic[];\n"


def entry(body, name="one", bounds=".reqntid 32, 8, 1"):
    return (
        f".visible .entry {name}(\n\t.param .u64 {name}_0\n)\n{bounds}\n{{\n\t.reg .b32 %r<40>;\n{body}\n\tret;\n}}\n"
    )


def findings(body):
    (found,) = kernels(HEAD + entry(body)).values()
    return found


def test_clean_ptx():
    """Pinned arithmetic is counted, expf is let through, shared atomics and comments are no fault."""
    found = findings(CLEAN + EXPF + EXPF)
    assert (found.threads, found.pinned, found.expf) == (256, PINNED + 6, 2)
    assert found.unpinned == found.atomics == ()


@pytest.mark.parametrize(
    "planted",
    [
        "mul.f32 %r30, %r1, %r2;",
        "add.f32 %r30, %r1, %r2;",
        "@!%p1 sub.f32 %r30, %r1, %r2;",
        "mad.f32 %r30, %r1, %r2, %r3;",
        "fma.rm.f32 %r30, %r1, %r2, %r3;",
        "fma.rn.ftz.f32 %r30, %r1, %r2, %r3;",
        "add.rn.ftz.f32 %r30, %r1, %r2;",
        "add.rn.sat.f32 %r30, %r1, %r2;",
        "add.rz.f32 %r30, %r1, %r2;",
        "mul.f32x2 %rd30, %rd1, %rd2;",
        "{ mul.f32 %r30, %r1, %r2; }",
        "{\n\t.reg .f32 t;\n\tmul.f32 t, %r1, %r2;\n\t}",
        "div.full.f32 %r30, %r1, %r2;",
        "div.approx.f32 %r30, %r1, %r2;",
        "rcp.approx.ftz.f32 %r30, %r1;",
        "sqrt.approx.f32 %r30, %r1;",
        "ex2.approx.f32 %r30, %r1;",
        "tanh.approx.f32 %r30, %r1;",
        "ex2.approx.ftz.bf16x2 %r30, %r1;",
        "setp.lt.ftz.f32 %p2, %r1, %r2;",
        "cvt.ftz.f64.f32 %rd30, %r1;",
        # expf's own instructions, out of their place
        "mul.f32 %r30, %r20, %r2;",
        "mul.f32 %r30, %r20, %r20;",
        "add.f32 %r30, %r21, 0fCB40007F;",
        "add.f32 %r30, %r14, 0f3F800000;",
        "add.f32 %r30, %r14, %r21;",
        "fma.rm.f32 %r30, %r10, %r13, %r12;",
        "fma.rm.f32 %r30, %r11, %r13, %r1;",
        # a register that is expf's on one path alone
        "mov.b32 %r19, %r1;",
    ],
)
def test_unpinned_arithmetic_is_found(planted):
    """Every way to leave fp32 arithmetic open to fusion, flushing or approximation, wherever it stands."""
    found = findings(CLEAN + EXPF + planted)
    assert len(found.unpinned) == 1
    assert found.atomics == ()


@pytest.mark.parametrize(
    "planted",
    [
        "atom.global.add.f32 %r30, [%rd1], %r1;",
        "atom.add.f32 %r30, [%rd1], %r1;",
        "red.global.add.f32 [%rd1], %r1;",
        "@%p1 red.relaxed.gpu.global.add.noftz.bf16x2 [%rd1], %r1;",
        "red.async.relaxed.cluster.global.add.u32 [%rd1], %r1;",
        "atom.global.cas.b32 %r30, [%rd1], %r1, %r2;",
        "multimem.red.global.add.f32 [%rd1], %r1;",
        "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%rd1], [%r24], 16;",
        "cp.reduce.async.bulk.tensor.1d.global.shared::cta.add.tile.bulk_group [%rd1, {%r1}], [%r24];",
    ],
)
def test_global_atomics_are_found(planted):
    """Atomics and reductions on global memory, and on memory whose space is not named."""
    assert len(findings(CLEAN + planted).atomics) == 1


def test_device_functions_count_for_every_kernel():
    """A fault in a function that is called is a fault of each kernel of the module."""
    function = ".func (.param .b32 r) helper(\n\t.param .b32 a\n)\n{\n\tmul.f32 %r30, %r1, %r2;\n\tret;\n}\n"
    found = kernels(HEAD + function + entry(CLEAN, "one") + entry(CLEAN, "two", ".maxntid 96"))
    assert {name: (f.threads, len(f.unpinned)) for name, f in found.items()} == {"one": (256, 1), "two": (96, 1)}
    assert kernels(HEAD + entry("", bounds=""))["one"].threads is None


RESOURCES = """
Resource usage:
 Common:
  GLOBAL:0
 Function one:
  REG:32 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:584 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function kernel_cutlass_two_0:
  REG:128 STACK:8 SHARED:1124 LOCAL:0 CONSTANT[0]:696 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
	code for sm_90a
		Function : one
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;       /* 0x00000a00ff017b82 */
        /*0010*/                   STG.E.64 desc[UR4][R2.64], R4 ;       /* 0x00000a00ff017b82 */
		Function : kernel_cutlass_two_0
        /*0000*/                   STL [R1], R8 ;
        /*0010*/               @P0 STL.64 [R1+0x8], R10 ;
        /*0020*/                   STL.128 [R1+0x10], R12 ;
        /*0030*/                   STL.U8 [R1+0x20], R12 ;
        /*0040*/                   LDL.LU R8, [R1] ;
"""


def test_resource_usage_and_spills():
    """Registers, stack and shared memory as cuobjdump prints them; spills as the width of what is stored."""
    found = parse_resources(RESOURCES)
    assert {name: (r["REG"], r["STACK"], r["SHARED"], r["LOCAL"]) for name, r in found.items()} == {
        "one": (32, 0, 1024, 0),
        "kernel_cutlass_two_0": (128, 8, 1124, 0),
    }
    assert parse_spills(SASS) == {"one": 0, "kernel_cutlass_two_0": 4 + 8 + 16 + 1}


def test_usage_of_a_cubin(monkeypatch):
    """Static shared memory leaves out the system's kilobyte where cubins count it; SASS is read if there is a stack."""
    dumps = {"-res-usage": RESOURCES, "-sass": SASS}
    monkeypatch.setattr(_static_cubin, "_dump", lambda option, path: dumps[option])
    used = _static_cubin.usage(b"", "sm_90a")
    assert used == {"one": Usage(32, 0, 0, 0), "kernel_cutlass_two_0": Usage(128, 8, 29, 100)}
    assert _static_cubin.usage(b"", "sm_80")["kernel_cutlass_two_0"].shared_bytes == 1124
    del dumps["-sass"]
    dumps["-res-usage"] = RESOURCES.replace("STACK:8", "STACK:0")
    assert _static_cubin.usage(b"", "sm_90a")["kernel_cutlass_two_0"].spill_bytes == 0


@pytest.mark.parametrize(
    ("arch", "registers", "shared", "threads", "blocks", "limit"),
    [
        ("sm_90a", 32, 0, 1024, 2, "registers"),  # 64 warps of 1024 registers fill the file and the threads alike
        ("sm_90a", 32, 0, 32, 32, "blocks"),
        ("sm_90a", 40, 0, 256, 6, "registers"),  # 1280 registers a warp: 51 warps, 48 in fours
        ("sm_90a", 33, 0, 256, 6, "registers"),  # handed out in 256s: as 40
        ("sm_90a", 16, 0, 256, 8, "threads"),
        ("sm_90a", 16, 36896, 512, 4, "threads"),
        ("sm_90a", 16, 75 * 1024, 128, 3, "shared memory"),  # 3 x 76 KiB
        ("sm_90a", 16, 75 * 1024 + 1, 128, 2, "shared memory"),
        ("sm_90a", 255, 0, 512, 0, "registers"),
        ("sm_90a", 16, 227 * 1024, 128, 1, "shared memory"),
        ("sm_90a", 16, 227 * 1024 + 1, 128, 0, "shared memory"),
        ("sm_80", 16, 164 * 1024 // 2 - 1024, 128, 2, "shared memory"),
        ("sm_120a", 16, 0, 256, 6, "threads"),
        ("sm_120a", 16, 99 * 1024 + 1, 128, 0, "shared memory"),
        ("sm_120a", 80, 0, 33, 12, "registers"),  # 25 warps of 2560, 24 in fours
    ],
)
def test_occupancy(arch, registers, shared, threads, blocks, limit):
    """The bounds of the CUDA occupancy calculator."""
    found = occupancy(arch, registers, shared, threads)
    assert found.blocks == blocks
    assert found.limited_by == limit or blocks == LIMITS[arch].threads // threads


def module(ptx, used, monkeypatch, **attributes):
    monkeypatch.setattr(_static_probe, "usage", lambda cubin, arch: used)
    return SimpleNamespace(name="mine", ptx=HEAD + ptx, cubin=b"", threads=None, shared_bytes=64, **attributes)


def test_rows_and_their_faults(monkeypatch):
    """A row has every figure; a spill, a stack, an unpinned operation, an atomic and an impossible block are faults."""
    used = {"one": Usage(32, 0, 0, 100), "two": Usage(255, 8, 4, 0)}
    bad = CLEAN + "mul.f32 %r30, %r1, %r2; mul.f32 %r31, %r1, %r2; red.global.add.f32 [%rd1], %r1;"
    ptx = entry(CLEAN, "one") + entry(bad, "two", ".reqntid 512")
    good, faulty = rows_of(module(ptx, used, monkeypatch, details="d"), "sm_90a")
    assert good == Row("mine/one", "sm_90a", 32, 0, 0, 164, 256, 8, 64, "registers", PINNED, 0, "one", "d")
    assert (faulty.name, faulty.blocks_per_multiprocessor) == ("mine/two", 0)
    assert faulty.faults == [
        "spills 4 bytes",
        "stack of 8 bytes",
        "does not fit a multiprocessor: registers",
        "unpinned: mul.f32 %r30, %r1, %r2 and 1 more",
        "atomic on global memory: red.global.add.f32 [%rd1], %r1",
    ]
    lines = table([good, faulty])
    assert [line.endswith("FAULT") for line in lines] == [False, False, True]


@pytest.mark.parametrize(
    ("ptx", "attributes", "message"),
    [
        (entry(CLEAN, "other"), {}, r"the PTX has the kernels \['other'\], the cubin \['one'\]"),
        (entry(CLEAN) + entry(CLEAN, "other"), {}, "the PTX has the kernels"),
        ("", {}, "the PTX has the kernels"),
        (entry(CLEAN, bounds=""), {}, "no threads"),
        (entry(CLEAN), {"shared_bytes": {"other": 4}}, "no threads, or no shared memory, known of one"),
    ],
)
def test_what_cannot_be_probed(ptx, attributes, message, monkeypatch):
    """A kernel of which something is unknown is an error, not a row."""
    mine = module(ptx, {"one": Usage(32, 0, 0, 0)}, monkeypatch)
    vars(mine).update(attributes)
    with pytest.raises(ValueError, match=message):
        rows_of(mine, "sm_90a")


def test_threads_and_shared_memory_by_kernel(monkeypatch):
    """Both may be one number, or one for each kernel; what a module says goes before the bound in the PTX."""
    mine = module(entry(CLEAN), {"one": Usage(32, 0, 0, 0)}, monkeypatch)
    mine.threads, mine.shared_bytes = {"one": 64}, {"one": 32}
    (row,) = rows_of(mine, "sm_90a")
    assert (row.name, row.threads, row.shared_bytes) == ("mine", 64, 32)


def test_what_a_probe_leaves_out_is_a_fault():
    """A module that failed, one that was never reached, and a process that wrote nothing are not probed."""
    lines = [
        {"modules": ["a", "b", "c"]},
        {"module": "a", "rows": []},
        {"module": "b", "error": "ValueError: no"},
    ]
    assert read("sm_80", lines, "status 1").faults == (
        "sm_80 b: not probed: ValueError: no",
        "sm_80 c: not probed: status 1",
    )
    assert read("sm_80", [], "status 1").faults == ("sm_80: not probed: status 1",)
    assert read("sm_80", [{"modules": []}]).faults == ()


IR = """
!memref_smem_i8 = !cute.memref<i8, smem, align<16>, "8:1">
!memref_rmem = !cute.memref<f32, rmem, align<32>, "(8,2):(2,1)">
module {
    cuda.kernel @one(%arg0: !memref_gmem) {
        %smem = cute.memref.alloca() {smem.partition_id = 1 : i32} : !memref_smem_i8
        %smem_1 = cute.memref.alloca() {smem.partition_id = 1 : i32} : !memref_smem_i8
        %rmem = cute.memref.alloca() : !memref_rmem
        %smem_2 = cute.memref.alloca() : !cute.memref<i8, smem, align<128>, "100:1">
    cuda.kernel @two(%arg0: !memref_gmem) {
"""


def test_shared_memory_of_the_ir():
    """Allocations follow one another, aligned; another form of them is an error rather than no allocation."""
    assert shared_memory(IR) == {"one": 128 + 100, "two": 0}
    with pytest.raises(ValueError, match="got shared memory of type"):
        shared_memory(IR.replace('"8:1"', '"(4,2):(2,1)"'))


def test_every_schedule_is_in_the_catalogue():
    """No call gets a schedule, its narrow blocks aside, or a compiled family that the catalogue does not have."""

    def kind(direction, config):
        return direction, replace(config.schedule, threads_x=0), config.vec

    kept = {kind(d, shipped.config(d)) for shipped in CATALOGUE for d in ("forward", "backward")}
    ratios = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)
    missing = {}
    for ratio, coff, head_dim, rows in itertools.product(
        ratios, (1, 2), (65, 66, 128, 512, 520), (1, 64, 100, 200, 300, 500, 768, 1600, 2048, 6144, 12288, 65536)
    ):
        for direction in ("forward", "backward"):
            shape = Shape(1, rows * ratio, rows, head_dim)
            config = compiled.configure(direction, ratio, coff, shape, "native", torch.device("cuda"), [])
            if kind(direction, config) not in kept:
                missing.setdefault(kind(direction, config), (ratio, coff, head_dim, rows))
    assert not missing
    configs = [shipped.config("forward") for shipped in CATALOGUE]
    assert {c.exp for c in configs} == {"native", "portable"}
    assert any(c.softmax_lanes > 1 for c in configs) and any(c.pool_lanes > 1 for c in configs)
    assert len({shipped.name for shipped in CATALOGUE}) == len(CATALOGUE)


def test_compile_for_needs_its_process(monkeypatch):
    """The architecture is fixed before the DSL is imported, so another one is refused."""
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_80")
    with pytest.raises(ValueError, match="CUTE_DSL_ARCH: got 'sm_80', need 'sm_90a'"):
        compile_for("sm_90a")
    monkeypatch.delenv("CUTE_DSL_KEEP", raising=False)
    with pytest.raises(ValueError, match="CUTE_DSL_KEEP: got None"):
        compile_for("sm_80")


SHARED = """
import re
from csa_gate.fused.catalogue import compile_for
(module,) = [m for m in compile_for("sm_90a") if m.name == "backward-r64c1-d16-n1024-native"]
launched = {int(n) for n in re.findall(r"constant\\((\\d+) : i64\\)", str(module._compiled.ir_module))}
sizes = set(module.shared_bytes.values())
assert len(sizes) == 2 and min(sizes) > 4096, sizes
assert sizes <= launched, (sizes, launched)
"""


def run(*options, capfd):
    """Exit status, stdout and stderr of the command."""
    try:
        status = main(["static", *map(str, options)])
    except SystemExit as ended:
        status = ended.code
    captured = capfd.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize(("which", "expf", "sums"), [("r2c2-d64-", False, 1), ("r64c1-d16-n1024-", True, 2)])
def test_shipped_kernels(which, expf, sums, tmp_path, capfd):
    """The command on a part of the catalogue: nothing at fault, every figure in the file; a name for every kernel."""
    status, out, _ = run("--arch", "sm_90a", "-k", which, "--json", tmp_path / "rows.json", capfd=capfd)
    assert status == 0, out
    report = json.loads((tmp_path / "rows.json").read_text())
    assert report["faults"] == []
    rows = {row["name"].partition("-")[0] + row["name"].partition("/")[1:][1]: row for row in report["kernels"]}
    of_leaves = ["backwardgrad_ape", "backwardgrad_ape-2"][:sums]
    assert sorted(rows) == ["backwardbackward", *of_leaves, "forward"]
    for row in rows.values():
        assert row["arch"] == "sm_90a"
        assert row["spill_bytes"] == row["stack_bytes"] == 0
        assert row["pinned"] > 10
        assert 16 <= row["registers"] <= 255
        assert row["blocks_per_multiprocessor"] >= 1
        assert row["shared_bytes"] > 0
    assert all((rows[name]["expf"] > 0) == expf for name in ("forward", "backwardbackward"))
    assert f"{2 + sums} kernels on sm_90a: no spill, no stack, every fp32 operation pinned, no atomics" in out


MINE = '''
from types import SimpleNamespace
from csa_gate.fixtures.adapters.eager import EagerKernel

class Mine(EagerKernel):
    """Garbage for a cubin."""
    name = "mine"

    def compile_for(self, arch):
        ptx = ".visible .entry k(\\n)\\n.reqntid 32\\n{\\nret;\\n}\\n"
        return [SimpleNamespace(name=n, ptx=ptx, cubin=b"no cubin", threads=None, shared_bytes=0) for n in ("a1", "a2")]

class Broken(EagerKernel):
    name = "broken"

    def compile_for(self, arch):
        raise RuntimeError(f"nothing for {arch}")
'''


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def test_kernels_of_others(mine, tmp_path, capfd):
    """What `compile_for` returns is probed in a process of its own; what cannot be read is a fault."""
    file = tmp_path / "rows.json"
    status, out, _ = run("--kernel", f"{mine}:Mine", "--arch", "sm_80", "-k", "a", "--json", file, capfd=capfd)
    assert status == 1
    assert "fault: sm_80 a1: not probed: RuntimeError: cuobjdump -res-usage" in out
    assert [f.split(":")[0] for f in json.loads(file.read_text())["faults"]] == ["sm_80 a1", "sm_80 a2"]
    status, out, _ = run("--kernel", f"{mine}:Broken", "--arch", "sm_80", capfd=capfd)
    assert status == 1
    assert "sm_80: not probed: the process ended with status 1: RuntimeError: nothing for sm_80" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--arch", "sm_70"], "argument --arch: invalid choice: 'sm_70'"),
        (["--kernel", "eager"], "--kernel: eager has no method compile_for(arch)"),
        (["--kernel", "nosuch"], "nosuch"),
        (["--kernel", "{mine}:Mine", "--arch", "sm_80", "-k", "b"], "-k: no kernel of {mine}:Mine has 'b' in its name"),
        (
            ["--json", "{folder}/none/rows.json"],
            "--json: got {folder}/none/rows.json, need a file in a folder that exists",
        ),
    ],
)
def test_bad_arguments_write_nothing(options, message, mine, tmp_path, capfd):
    """Status 2, one line on stderr, and no file."""
    names = {"mine": mine, "folder": tmp_path}
    given = [option.format(**names) for option in options]
    if "--json" not in given:
        given += ["--json", str(tmp_path / "rows.json")]
    status, _, err = run(*given, capfd=capfd)
    assert status == 2
    assert message.format(**names) in err
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".json"] == []


def test_no_tool(monkeypatch, capfd):
    """Without cuobjdump the command says where to get it."""
    monkeypatch.setattr(_static_cubin.importlib.metadata, "distribution", _missing)
    monkeypatch.setattr(_static_cubin, "find_tool", lambda name: None)
    _static_cubin.find_cuobjdump.cache_clear()
    status, _, err = run(capfd=capfd)
    _static_cubin.find_cuobjdump.cache_clear()
    assert status == 2
    assert "cuobjdump: found none, need that of `pip install csa-gate[static]`" in err


def test_tools_of_a_toolkit(tmp_path, monkeypatch):
    """A toolkit's program is found on the PATH, else where the variables say, else in the default folder."""
    for folder in ("on_path", "home/bin", "default/bin"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "cuobjdump").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "on_path"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(_toolkit, "FOLDERS", (str(tmp_path / "default"),))
    seen = [_toolkit.find_tool("cuobjdump")]
    for folder in ("on_path", "home/bin", "default/bin"):
        (tmp_path / folder / "cuobjdump").unlink()
        seen.append(_toolkit.find_tool("cuobjdump"))
    assert seen == [*(str(tmp_path / f / "cuobjdump") for f in ("on_path", "home/bin", "default/bin")), None]


@pytest.mark.parametrize(("which", "names"), [("all", "abcde"), ("representative", "abce"), ("sample", "ab")])
def test_which_modules_are_looked_at(which, names):
    """All, those that stand for others or do not say, and the first of these; always with the substring."""
    said = {"a": {}, "b": {"representative": True}, "c": {}, "d": {"representative": False}, "e": {}}
    modules = [SimpleNamespace(name=f"k-{name}", **attributes) for name, attributes in said.items()]
    others = [SimpleNamespace(name="other")]
    assert _static_probe.chosen(others + modules, "k-", which) == [m for m in modules if m.name[-1] in names]


def test_every_limit_of_registers_has_a_representative():
    """The heaviest entry stands for its like, in each direction; no limit is without one."""
    entries, chosen = [(s, d, s.config(d)) for s in CATALOGUE for d in ("forward", "backward")], representatives()
    assert Counter(cap(d, c) for s, d, c in entries if (s, d) in chosen) == Counter({cap(d, c) for _, d, c in entries})
    for s, d, c in entries:
        if (s, d) in chosen:
            assert burden(c) == max(burden(o) for _, e, o in entries if cap(e, o) == cap(d, c))

    def limits(of):
        return {(d, c.vec, c.schedule.threads * c.schedule.min_blocks) for _, d, c in of if c.schedule.min_blocks > 1}

    assert limits((s, d, c) for s, d, c in entries if (s, d) in chosen) == limits(entries)


def _missing(name):
    raise _static_cubin.importlib.metadata.PackageNotFoundError(name)


def test_shared_memory_is_what_is_launched(tmp_path):
    """The bytes read off the intermediate representation are those that the compiled host code passes on."""
    keep = {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "ptx,cubin,ir", "CUTE_DSL_DUMP_DIR": str(tmp_path)}
    env = {**os.environ, **keep}
    done = subprocess.run([sys.executable, "-c", SHARED], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_architectures():
    """Those of the contract, each with its limits."""
    assert ARCHS == ("sm_80", "sm_90a", "sm_100a", "sm_120a")
    assert set(ARCHS) <= set(LIMITS)
