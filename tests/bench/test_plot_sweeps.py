"""Curves and heat maps of sweeps: which rows are taken, the ratios, and that the drawings are well-formed."""

from __future__ import annotations

import csv
from xml.etree import ElementTree

import pytest


@pytest.fixture
def plot_sweeps(script):
    return script("plot_sweeps")


def rows_of_attention():
    times = {"cki": 100.0, "hopper 128 rows": 80.0, "fa3": 88.0, "cudnn": 96.0, "generic": 300.0}
    problems = {
        "batch=2 tokens=8192 heads=16 head_dim=128 causal": 1.0,
        "batch=4 tokens=4096 heads=16 head_dim=128 causal": 0.5,
        "batch=4 tokens=512 heads=16 head_dim=64": 1.0,  # BERT's: not of the sweep
    }
    return [
        {
            "op": "attention", "problem": problem, "dtype": "bf16", "implementation": name,
            "median_us": str(us * factor), "tflop_per_s": str(1e4 / us), "gpu": "a GPU", "commit": "abc",
        }
        for problem, factor in problems.items()
        for name, us in times.items()
    ]  # fmt: skip


def test_the_best_of_ours_against_the_best_peer(plot_sweeps):
    found = plot_sweeps.samples(rows_of_attention(), plot_sweeps.SWEEPS[0])
    assert {sample.panel for sample in found} == {"D = 128, causal"}
    assert {s.owner: s.median_us for s in found if s.x == 8192} == {
        "cki": 80.0, "fa3": 88.0, "cudnn": 96.0, "generic": 300.0
    }  # fmt: skip
    assert plot_sweeps.ratios(found) == {
        ("D = 128, causal", 8192): pytest.approx(1.1),
        ("D = 128, causal", 4096): pytest.approx(1.1),
    }


def test_drawings(plot_sweeps, tmp_path):
    rows = rows_of_attention()
    with (tmp_path / "attention_hopper.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    (tmp_path / "decode.csv").write_text("op,problem,dtype,implementation,median_us,gb_per_s,gpu,commit\n")
    drawn = plot_sweeps.draw_all(tmp_path)
    assert [path.name for path in drawn] == ["attention_hopper_curves.svg", "attention_hopper_ratios.svg"]
    curves, ratios = (ElementTree.fromstring(path.read_text(encoding="utf-8")) for path in drawn)
    lines = [element for element in curves.iter() if element.tag.endswith("polyline")]
    assert len([line for line in lines if line.get("points")]) == 4  # one an implementation
    texts = [element.text for element in ratios.iter() if element.tag.endswith("text")]
    assert texts.count("1.10") == 2 and "geometric mean 1.100, least 1.100" in texts


def test_unmeasured_peers_give_no_ratio(plot_sweeps):
    rows = [row for row in rows_of_attention() if row["implementation"] in ("cki", "generic")]
    assert plot_sweeps.ratios(plot_sweeps.samples(rows, plot_sweeps.SWEEPS[0])) == {}
