"""Runs of `bench` merged into medians."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from csa_gate.__main__ import main
from csa_gate._bench_runs import medians

ROW = {
    "pack": "1x8192-d128-r4c2", "group": "table", "direction": "forward", "traffic_bytes": 1000, "floor_us": 2.0,
    "threads": None, "us": {"ours": 5.0, "peer": 7.0}, "graph_us": {"ours": 4.0}, "host_us": {"ours": 9.0},
    "add_us": 8.0, "peak_bytes": {"ours": 64}, "differing": 0, "dape_share": None, "notes": [],
}  # fmt: skip
ABOUT = {"command": "python -m csa_gate bench", "machine": "a GPU", "versions": "1", "kernel": "fused"}


def a_run(**changes: Any) -> dict[str, Any]:
    return {"about": dict(ABOUT), "copy_bytes_per_second": [4e12], "rows": [{**copy.deepcopy(ROW), **changes}]}


def written(folder: Path, *runs: Any) -> list[Path]:
    paths = [folder / f"{i}.json" for i in range(len(runs))]
    for path, run in zip(paths, runs, strict=True):
        path.write_text(json.dumps(run))
    return paths


def test_medians_by_hand(tmp_path: Path) -> None:
    """The middle of three; the most of memory and of differing elements; who was left out once counts in the others."""
    runs = [
        a_run(us={"ours": 5.0, "peer": 7.0, "eager": 90.0}, peak_bytes={"ours": 64}, add_us=8.0),
        a_run(us={"ours": 50.0, "peer": 6.0}, peak_bytes={"ours": 66}, differing=2, add_us=None, notes=["slow"]),
        a_run(us={"ours": 6.0, "peer": 8.0}, floor_us=1.0, add_us=9.0, notes=["slow"]),
    ]
    runs[1]["copy_bytes_per_second"], runs[1]["about"]["command"] = [5e12], "python -m csa_gate bench --without eager"
    (row,), bandwidths, about = medians(written(tmp_path, *runs))
    assert row.us == {"ours": 6.0, "peer": 7.0, "eager": 90.0}
    assert (row.floor_us, row.peak_bytes, row.differing, row.add_us) == (2.0, {"ours": 66}, 2, 8.5)
    assert (row.dape_share, row.notes, bandwidths) == (None, ["slow"], [4e12])
    assert about["command"] == "python -m csa_gate bench; python -m csa_gate bench --without eager"
    assert about["runs"] == "medians of 3"


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (a_run(pack="another"), "1.json has other packs, directions or threads than"),
        ({**a_run(), "about": {**ABOUT, "machine": "a CPU"}}, "1.json has machine 'a CPU', need 'a GPU' of"),
        ({**a_run(), "about": {}}, "need what `bench --json` wrote"),
        (a_run(unknown=1), "need what `bench --json` wrote"),
        ([], "need what `bench --json` wrote"),
        (a_run(floor_us=None), "None is no figure"),
        (a_run(notes=None), "need what `bench --json` wrote"),
        (a_run(us={"ours": "abc"}), "'abc' is no figure"),
        (a_run(us={"ours": float("nan")}), "nan is no figure"),
        ({**a_run(), "copy_bytes_per_second": [4e12, 4e12]}, "1.json has another number of copy bandwidths than"),
    ],
)
def test_runs_that_do_not_belong_together(
    other: Any, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, status 2, and nothing is written."""
    paths = written(tmp_path, a_run(), other)
    out = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "--medians", *map(str, paths), "--json", str(out)])
    assert ended.value.code == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out and not out.exists()


def test_what_is_to_be_measured_makes_no_sense(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path,) = written(tmp_path, a_run())
    with pytest.raises(SystemExit):
        main(["bench", "--medians", str(path), "--smoke", "--repeats", "3"])
    assert "--medians: got --smoke and --repeats too" in capsys.readouterr().err


def test_the_command_prints_and_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And what it writes can be merged again."""
    paths = written(tmp_path, a_run(), a_run(us={"ours": 7.0}), a_run(us={"ours": 9.0}))
    out = tmp_path / "out.json"
    assert main(["bench", "--medians", *map(str, paths), "--json", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "runs: medians of 3" in printed and "1x8192-d128-r4c2" in printed
    assert json.loads(out.read_text())["rows"][0]["us"] == {"ours": 7.0, "peer": 7.0}
    assert medians([out])[0][0].us["ours"] == 7.0
