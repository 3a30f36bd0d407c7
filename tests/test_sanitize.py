"""`python -m csa_gate sanitize`: what it reads in logs, what it holds against a tool, and which cases it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from csa_gate import _sanitize
from csa_gate.__main__ import main
from csa_gate._sanitize import REPORTED, TOOLS, find_sanitizer, missed, options, read, reports, sanitize
from csa_gate._sanitize_plants import KERNELS
from csa_gate._sanitize_worker import chosen
from csa_gate._toolkit import find_tool
from csa_gate.fixtures import kernels
from csa_gate.fixtures.schedules import SCHEDULES, schedules_of

HEAD = "========= COMPUTE-SANITIZER"
LOGS = {
    "memcheck": f"""\
{HEAD}
========= Invalid __global__ write of size 4 bytes
=========     at kernel_cutlass_overrun_kernel_tensor_0+0x70
=========     by thread (63,0,0) in block (0,0,0)
=========     Access at 0x7f3c7ec00100 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f3c7ec00000 of size 256 bytes
=========
========= Target application returned an error
========= ERROR SUMMARY: 1 error
""",
    "racecheck": f"""\
{HEAD}
========= Error: Race reported between Write access at kernel_cutlass_race_kernel_tensor_0+0x90
=========     and Read access at kernel_cutlass_race_kernel_tensor_0+0xb0 [64 hazards]
=========
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
========= ERROR SUMMARY: 0 errors
""",
    "initcheck": f"""\
{HEAD}
========= Uninitialized __global__ memory read of size 4 bytes
=========     at kernel_cutlass_unwritten_kernel_tensor_0+0x40
=========     by thread (0,0,0) in block (0,0,0)
=========     Address 0x7f3c7ec00000
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at kernel_cutlass_unwritten_kernel_tensor_0+0x40
=========     by thread (1,0,0) in block (0,0,0)
=========     Address 0x7f3c7ec00004
=========
========= ERROR SUMMARY: 2 errors
""",
    "synccheck": f"""\
{HEAD}
========= Barrier error detected. Divergent thread(s) in warp.
=========     at kernel_cutlass_divergence_kernel_tensor_0+0xa0
=========     by thread (0,0,0) in block (0,0,0)
=========
========= ERROR SUMMARY: 16 errors
""",
}
"""What each tool says of its plant."""

CLEAN = {tool: f"{HEAD}\n========= ERROR SUMMARY: 0 errors\n" for tool in TOOLS}
CLEAN["racecheck"] = f"{HEAD}\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n"
LINES = [{"cases": ["a", "b"]}, {"ran": "a"}, {"ran": "b"}]


def seen(tool: str, log: str, lines: list[dict[str, object]] = LINES, end: str = "") -> _sanitize.Sanitized:
    return read(tool, log.splitlines(), [json.dumps(line) for line in lines], end)


@pytest.mark.parametrize("tool", TOOLS)
def test_reports_are_faults(tool: str) -> None:
    """Each is one line, with the kernel; the summary counts them, whatever its form."""
    one = seen(tool, LOGS[tool])
    assert one.count == {"memcheck": 1, "racecheck": 1, "initcheck": 2, "synccheck": 16}[tool]
    assert all(f"{TOOLS[tool][0]}_kernel" in report for report in one.reports)
    assert len(one.reports) == LOGS[tool].count("at kernel_cutlass") - (tool == "racecheck")
    assert one.faults == [f"{tool}: {one.reports[0]}", f"{tool}: {one.count} reports"]
    assert not missed([one])


@pytest.mark.parametrize("tool", TOOLS)
def test_clean_logs_have_no_fault(tool: str) -> None:
    assert seen(tool, CLEAN[tool]).faults == []
    assert missed([seen(tool, CLEAN[tool])]) == [f"{tool}: did not report the planted {TOOLS[tool][0]}"]


@pytest.mark.parametrize(
    ("log", "lines", "end", "fault"),
    [
        ("", LINES, "", "memcheck: the log has no summary, so that nothing was looked at"),
        (CLEAN["memcheck"], LINES[:2], "", "memcheck: 1 cases did not run to their end, first b"),
        (CLEAN["memcheck"], [{"cases": []}], "", "memcheck: no case was begun"),
        (CLEAN["memcheck"], [], "", "memcheck: no case was begun"),
        (CLEAN["memcheck"], LINES, "the process ended with status 1", "memcheck: the process ended with status 1"),
        (CLEAN["memcheck"].replace(" 0 ", " 7 "), LINES, "", "memcheck: 7 reports"),
    ],
)
def test_what_was_not_looked_at_is_a_fault(log: str, lines: list[dict[str, object]], end: str, fault: str) -> None:
    assert seen("memcheck", log, lines, end).faults == [fault]


def test_another_kernel_is_not_the_plant() -> None:
    other = LOGS["memcheck"].replace("overrun_kernel", "forward_kernel")
    assert missed([seen("memcheck", other)]) == ["memcheck: did not report the planted overrun"]


def test_lines_of_the_program_are_no_reports() -> None:
    assert reports(["Invalid __global__ write", f"{HEAD}", "=========", "========= LEAK SUMMARY: 0 bytes leaked"]) == []


FAKE = """\
#!{python}
import json, os, sys
args = sys.argv[1:]
assert os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] == "1"
tool = args[args.index("--tool") + 1]
open(args[args.index("--log-file") + 1], "w").write(json.load(open({logs!r}))[tool])
worker = args[args.index("csa_gate._sanitize_worker") + 1:]
with open(worker[-1], "w") as file:
    print(json.dumps({{"cases": [" ".join(worker[:-1])]}}), file=file)
    print(json.dumps({{"ran": " ".join(worker[:-1])}}), file=file)
print("the last words")
sys.exit({status})
"""


def fake(folder: Path, logs: dict[str, str], status: int = 0) -> str:
    """A program that writes what a tool would, and runs nothing."""
    (folder / "logs").write_text(json.dumps(logs))
    path = folder / "compute-sanitizer"
    path.write_text(FAKE.format(python=sys.executable, logs=str(folder / "logs"), status=status))
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(("status", "end"), [(0, ""), (REPORTED, ""), (9, "status 9: the last words")])
def test_a_process_under_a_tool(tmp_path: Path, status: int, end: str) -> None:
    one = sanitize(fake(tmp_path, LOGS, status), "racecheck", ["plant", "race"])
    assert (one.planned, one.ran, one.count) == (("plant race",), ("plant race",), 1)
    assert one.end == (end and f"the process ended with {end}")


@pytest.mark.parametrize(
    ("given", "logs", "status", "last"),
    [
        ([], CLEAN, 0, "nothing was reported"),
        ([], CLEAN | {"racecheck": LOGS["racecheck"]}, 1, "2 faults"),
        (["--self-check"], LOGS, 0, "every planted fault was reported"),
        (["--self-check"], LOGS | {"racecheck": CLEAN["racecheck"]}, 1, "1 faults"),
        (["--tool", "memcheck"], CLEAN | {"racecheck": LOGS["racecheck"]}, 0, "nothing was reported"),
    ],
)
def test_command(
    given: list[str],
    logs: dict[str, str],
    status: int,
    last: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every tool that is asked for, its counts in a table and a file, and the exit status."""
    monkeypatch.setattr(_sanitize, "find_sanitizer", lambda: fake(tmp_path, logs))
    monkeypatch.setattr(kernels, "choose_device", lambda wanted, kernel: torch.device("cuda"))
    assert main(["sanitize", *given, "--json", str(tmp_path / "seen.json")]) == status
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == last
    report = json.loads((tmp_path / "seen.json").read_text())
    tools = ["memcheck"] if "--tool" in given else list(TOOLS)
    assert [one["tool"] for one in report["tools"]] == tools == [line.split()[0] for line in out[1 : 1 + len(tools)]]
    assert len(report["faults"]) == int(last.split()[0]) if status else report["faults"] == []
    planned = f"plant {TOOLS['memcheck'][0]}" if "--self-check" in given else "cases fused covering "
    assert report["tools"][0]["planned"] == [planned]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--tool", "leakcheck"], "argument --tool: invalid choice: 'leakcheck'"),
        (["--kernel", "nosuch"], "nosuch"),
        (["-k", "r7c9"], "-k: no case has 'r7c9' in its name"),
        (["--json", "{folder}/none/seen.json"], "need a file in a folder that exists"),
    ],
)
def test_bad_arguments_run_nothing(
    given: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_sanitize, "find_sanitizer", lambda: "unused")
    monkeypatch.setattr(kernels, "choose_device", lambda wanted, kernel: torch.device("cuda"))
    monkeypatch.setattr(_sanitize, "sanitize", lambda *args: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as ended:
        main(["sanitize", *(g.format(folder=tmp_path) for g in given)])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sanitize, "find_tool", lambda name: None)
    with pytest.raises(ValueError, match="compute-sanitizer: found none, need that of a CUDA toolkit"):
        find_sanitizer()


def test_no_device(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_sanitize, "find_sanitizer", lambda: "unused")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main(["sanitize"])
    assert "device 'cuda': torch sees no CUDA device" in capsys.readouterr().err


def test_cases_reach_every_schedule() -> None:
    every = {found for case in SCHEDULES for found in schedules_of(case.problem)}
    assert {found for case in chosen("covering", "") for found in schedules_of(case.problem)} == every
    assert chosen("all", "") == list(SCHEDULES)
    assert {case.problem.ratio for case in chosen("all", "r4c2-")} == {4}


def test_every_tool_has_a_plant() -> None:
    assert [plant for plant, _ in TOOLS.values()] == list(KERNELS)
    assert len({tuple(options(tool, Path("log"))) for tool in TOOLS}) == len(TOOLS)


PLANTS = """
import re
from csa_gate._sanitize_plants import KERNELS, compile_plant
ptx = {name: str(compile_plant(name).artifacts.PTX) for name in KERNELS}
assert re.search(r"st.global.b32 \\s*\\[%rd\\d+\\+4\\]", ptx["overrun"]), ptx["overrun"]
assert "st.shared" in ptx["race"] and "ld.shared" in ptx["race"] and "bar" not in ptx["race"], ptx["race"]
assert re.search(r"@%p\\d+ bra\\s.*\\n\\s*bar.sync", ptx["divergence"]), ptx["divergence"]
assert "shared" not in ptx["unwritten"] and "+4" not in ptx["unwritten"], ptx["unwritten"]
"""


def test_plants_have_their_faults_compiled_in(tmp_path: Path) -> None:
    """The compiler leaves them as they are, one each."""
    keep = {"CUTE_DSL_ARCH": "sm_90a", "CUTE_DSL_KEEP": "ptx,cubin,ir", "CUTE_DSL_DUMP_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PLANTS]
    done = subprocess.run(command, env={**os.environ, **keep}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(
    not torch.cuda.is_available() or find_tool("compute-sanitizer") is None,
    reason="needs a CUDA device and compute-sanitizer",
)
def test_every_tool_finds_its_plant(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sanitize", "--self-check"]) == 0, capsys.readouterr().out
