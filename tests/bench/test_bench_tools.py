"""Result files, charts and the runner; the timing itself needs a GPU."""

from __future__ import annotations

import csv
import time
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest


@pytest.fixture
def tools(script):
    return script("common"), script("plot"), script("run")


def test_row_computes_rates(tools):
    common, _, _ = tools
    line = common.row("norm", "rows=4", "bf16", "cki", common.Timing(10.0, 9.0, 12.0), nbytes=1e6, flops=2e7)
    assert (line["gb_per_s"], line["tflop_per_s"]) == (100.0, 2.0)  # 1 MB and 20 MFLOP in 10 us
    assert (line["p10_us"], line["p90_us"]) == (9.0, 12.0)


def test_csv_carries_the_environment(tools, tmp_path, capsys):
    common, _, _ = tools
    rows = [
        common.row("a", "n=1", "f32", "cki", 3.0),
        common.row("a", "n=2", "f32", "cki", 4.0, registers=40),
    ]
    path = common.write_csv("family", rows, tmp_path / "deep")
    with path.open(newline="") as file:
        read = list(csv.DictReader(file))
    assert [line["median_us"] for line in read] == ["3.0", "4.0"]
    assert [line["registers"] for line in read] == ["", "40"]
    assert {"gpu", "driver_cuda", "nvrtc", "commit", "torch"} <= read[0].keys()
    assert "n=2" in capsys.readouterr().out


def test_a_part_of_a_benchmark_replaces_its_own_rows_alone(tools, tmp_path, monkeypatch):
    common, _, _ = tools
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.delenv("BENCH_OUT", raising=False)

    def measured(*rows):
        with common.write_csv("family", rows).open(newline="") as file:
            return [
                (line["problem"], line["median_us"], line.get("blocks", "")) for line in csv.DictReader(file)
            ]

    def row(problem, time, **more):
        return common.row("op", problem, "f32", "cki", time, **more)

    monkeypatch.setattr("sys.argv", ["family.py"])
    assert len(measured(row("a", 1.0, blocks=7), row("b", 2.0))) == 2
    monkeypatch.setattr("sys.argv", ["family.py", "--shape", "b"])
    assert measured(row("b", 3.0)) == [("a", "1.0", "7"), ("b", "3.0", "")]
    monkeypatch.setenv("BENCH_OUT", str(tmp_path))
    assert measured(row("c", 4.0)) == [("c", "4.0", "")]


def test_measuring_nothing_is_an_error(tools, tmp_path):
    common, _, _ = tools
    with pytest.raises(ValueError, match="measured nothing"):
        common.write_csv("family", [], tmp_path)


def test_commit_may_be_given(tools, monkeypatch):
    common, _, _ = tools
    monkeypatch.setenv("BENCH_COMMIT", "abc123")
    assert common.git_commit() == "abc123"


def test_host_time_is_in_microseconds(tools):
    common, _, _ = tools
    timing = common.host_time(lambda: time.sleep(0.001), calls=2, repeats=3, synchronize=lambda: None)
    assert 1000 <= timing.p10_us <= timing.median_us <= timing.p90_us < 100_000


def test_bars_are_in_proportion(tools, tmp_path):
    common, plot, _ = tools
    rows = [
        common.row("norm", "rows<4", "f32", "cki", 10.0, nbytes=2e6),
        common.row("norm", "rows<4", "f32", "torch", 20.0, nbytes=2e6),
    ]
    common.write_csv("norm", rows, tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    (drawn,) = plot.draw_all(tmp_path)
    root = ElementTree.parse(drawn).getroot()
    widths = [float(bar.get("width")) for bar in root.iter("{http://www.w3.org/2000/svg}rect")][-2:]
    assert widths[0] == pytest.approx(2 * widths[1])
    assert "GB/s" in drawn.read_text()


def test_runner_names_unknown_families(tools, capsys):
    _, _, run = tools
    with pytest.raises(SystemExit):
        run.main(["no_such_family"])
    assert "no benchmark named no_such_family" in capsys.readouterr().err


GUARD = '\nif __name__ == "__main__":\n    '


def test_runner_reports_failures(tools, tmp_path, capfd):
    _, _, run = tools
    (tmp_path / "bad.py").write_text(GUARD + "raise SystemExit(3)")
    (tmp_path / "good.py").write_text("import os" + GUARD + "print('to', os.environ['BENCH_OUT'])")
    (tmp_path / "module.py").write_text("SHARED = 1")
    assert run.families(tmp_path) == ["bad", "good"]
    outcomes = [run.run_family(family, tmp_path, tmp_path) for family in ("bad", "good")]
    assert [outcome.ending for outcome in outcomes] == ["failed (3)", "done"]
    assert run.report(outcomes, []) == 1
    assert run.report(outcomes[1:], []) == 0
    out, err = capfd.readouterr()
    assert f"to {tmp_path}" in out and "1 of 2 done" in out
    assert "failed: bad" in err


def test_runner_stops_what_takes_too_long(tools, tmp_path):
    """It may still write what it has; what it started ends with it."""
    _, _, run = tools
    (tmp_path / "slow.py").write_text(
        "import os, subprocess, sys, time\nfrom pathlib import Path"
        + GUARD
        + "out = Path(os.environ['BENCH_OUT'])\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "    try:\n        time.sleep(60)\n"
        "    finally:\n        (out / 'written').write_text(str(child.pid))\n"
    )
    outcome = run.run_family("slow", tmp_path, tmp_path, limit_s=2.0)
    assert outcome.ending == "stopped after 2 s" and not outcome.is_done
    assert outcome.seconds < 20
    assert _ends((tmp_path / "written").read_text(), seconds=10)


def _ends(pid, seconds):
    """Whether a process that was killed is gone, or dead and not yet waited for, within that time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if "Z (zombie)" in (Path("/proc") / pid / "status").read_text():
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_every_benchmark_is_found_and_no_module_is_one(tools):
    _, _, run = tools
    found = set(run.families())
    assert {"attention", "attention_micro", "bert_large", "norms"} <= found
    assert (
        not {"bert_model", "peers", "peers_torch", "gemm_hopper", "run", "plot", "plot_sweeps", "common"}
        & found
    )


def test_an_operation_on_rows_beside_torch_and_a_copy(script, monkeypatch):
    common, rowwise = script("common"), script("rowwise")
    microseconds = {"torch": 30.0, "cki": 10.0}
    monkeypatch.setattr(common, "graph_time", lambda run, *_, **__: common.Timing(run(), 1.0, 1.0))
    monkeypatch.setattr(common, "copy_rate", lambda: 200.0)
    problem = SimpleNamespace(op="norm", rows=4, width=8, dtype="bf16", nbytes=1e6)
    checked = []

    def check(run, what):
        checked.append(what)
        return 1e-3

    variants = [(name, lambda us=us: us) for name, us in microseconds.items()]
    torch, cki = rowwise.measured(problem, variants, [()], check)
    assert checked == ["norm cki"]
    assert (torch["vs_torch"], torch["of_copy"], torch["error"]) == (1.0, 0.167, "0.0e+00")
    assert (cki["vs_torch"], cki["of_copy"], cki["error"]) == (3.0, 0.5, "1.0e-03")  # 1 MB in 10 us
    assert (cki["problem"], cki["copy_gb_per_s"], rowwise.shape("4x8")) == ("rows=4 width=8", 200.0, (4, 8))
