"""`python -m cki ...`"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cki import __main__, cache, compiler, config, disk, registry
from cki.cli import compile_kernels, examples
from cki.kernel import ARCHITECTURES, kernel_spec

ROOT = Path(__file__).resolve().parents[1]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    status = __main__.main(argv)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_usage_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "--help")
    assert status == 0
    for name in __main__.COMMANDS:
        assert name in out
    assert run(capsys)[0] == 2
    status, _, err = run(capsys, "frobnicate")
    assert status == 2
    assert "no command 'frobnicate'" in err


def test_show_config(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKI_VALIDATE", "maybe")
    monkeypatch.setenv("CKI_CASHE_DIR", "/tmp")
    status, out, _ = run(capsys, "show-config")
    assert status == 0
    for setting in config.SETTINGS:
        assert setting.name in out
    for words in ("not valid: 0 or 1", "CKI_CASHE_DIR", "no such variable", "NVRTC", "sm_100a", "driver"):
        assert words in out


def test_list_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "list-kernels", "--arch", "sm_80")
    assert status == 0
    for family in registry.FAMILIES:
        assert f"{family}: " in out
    assert "layer_norm<" in out


def test_compile_out_serves_a_machine_without_a_compiler(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = registry.representative_specs("norm", "sm_89")[:2]
    monkeypatch.setattr(registry, "representative_specs", lambda family, arch: specs)
    out = tmp_path / "prebuilt"
    status, text, _ = run(capsys, "compile", "--arch", "sm_89", "--family", "norm", "--out", str(out))
    assert status == 0
    assert "sm_89: 2 of 2 kernels" in text
    assert len(disk.KernelDirectory(out).entries()) == 2
    monkeypatch.setattr(cache, "_state", cache._State())
    monkeypatch.setattr(compiler, "fingerprint", lambda: None)
    monkeypatch.setenv("CKI_CUBIN_DIR", str(out))
    assert cache.get(specs[0], "sm_89")[1].cubin.startswith(b"\x7fELF")
    assert cache.statistics().from_cubin_dir == 1


def test_compile_looks_at_its_directory_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cki.cli.compile_kernels.compile_all", lambda *_: pytest.fail("compiled"))
    with pytest.raises(SystemExit):
        __main__.main(["compile", "--arch", "sm_80", "--out", "/dev/null/kernels"])
    assert "--out /dev/null/kernels: Not a directory" in capsys.readouterr().err


def test_compile_fails_for_a_kernel_that_does_not_compile(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.cu").write_text("nonsense")
    bad = kernel_spec(str(tmp_path / "bad.cu"), "bad", "P")
    monkeypatch.setattr(registry, "representative_specs", lambda family, arch: [bad])
    status, text, err = run(capsys, "compile", "--arch", "sm_89", "--family", "norm")
    assert status == 1
    assert "0 of 1" in text
    assert "bad.cu(1): error" in err


def test_complaints() -> None:
    kernel = compiler.KernelReport("k", registers=200, spill_store_bytes=8, spill_load_bytes=4)
    report = compiler.CompileReport("sm_90a", (kernel,), ("C7508 ignored",), (), "", 0.0)
    spec = kernel_spec("k.cu", "k", "P", max_registers=128)
    assert compile_kernels.complaints_about(spec, report) == [
        "C7508 ignored", "spills 8 bytes, loads 4", "200 registers, budget 128",
    ]  # fmt: skip


def test_cache_info_and_clear(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CKI_CACHE_DIR", str(tmp_path))
    (tmp_path / f"0{disk.SUFFIX}").write_text("damaged")
    assert "1 kernels" in run(capsys, "cache", "info")[1]
    assert "1 damaged" in run(capsys, "cache", "info")[1]
    assert "deleted 1 kernels" in run(capsys, "cache", "clear")[1]
    assert "0 kernels" in run(capsys, "cache", "info")[1]
    built = tmp_path / "sim" / "scale-1.so"
    built.parent.mkdir()
    built.write_bytes(bytes(3_000_000))
    assert "1 builds of the simulated device, 3.0 MB" in run(capsys, "cache", "info")[1]
    assert "deleted 0 kernels and 1 builds" in run(capsys, "cache", "clear")[1]
    assert not built.exists()


def test_dump(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "dump", "rms_norm", "--source", "--arch", "sm_90a")
    assert status == 0
    assert "constexpr int kRowAxes" in out
    assert "namespace cki" in out
    _, out, _ = run(capsys, "dump", "rms_norm", "--ptx", "--arch", "sm_90a")
    assert ".target sm_90a" in out
    assert ".visible .entry rms_norm" in out
    status, _, err = run(capsys, "dump", "no_such_kernel", "--info")
    assert status == 1
    assert "layer_norm" in err
    status, _, err = run(capsys, "dump", "rms_norm", "--ptx", "--index", "100000")
    assert status == 1
    assert "specialisations" in err


def test_dump_sass(capsys: pytest.CaptureFixture[str]) -> None:
    from cki.cli.dump import find_nvdisasm
    from cki.errors import DeviceError

    try:
        find_nvdisasm()
    except DeviceError:
        pytest.skip("no nvdisasm")
    status, out, _ = run(capsys, "dump", "rms_norm", "--sass", "--arch", "sm_90a")
    assert status == 0
    assert "EXIT" in out


def test_dump_info_names_registers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = registry.representative_specs("norm", "sm_90a")[:1]
    monkeypatch.setattr(registry, "find", lambda name, arch: specs)
    _, out, _ = run(capsys, "dump", "layer_norm", "--info", "--arch", "sm_90a")
    assert " registers, " in out


def test_sanitize_reports_clean_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "sanitize", "rms_norm", "--dtype", "f32", "--seeds", "1")
    assert status == 0
    assert out.count("clean") == 3
    assert "no faults found" in out


def test_sanitize_tries_at_least_one_order(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["sanitize", "rms_norm", "--seeds", "0"])
    assert "argument --seeds: 0, not 1 or more" in capsys.readouterr().err


def test_sanitize_reports_a_fault(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cki.cli import sanitize

    monkeypatch.setattr(
        sanitize, "checked_run", lambda op, arguments, seed: "race at line 3" if seed == 1 else ""
    )
    status, out, _ = run(capsys, "sanitize", "rms_norm", "--dtype", "f32", "--seeds", "2")
    assert status == 1
    assert "race at line 3" in out
    assert "3 problems with faults" in out


@pytest.mark.gpu
def test_sanitize_runs_its_problems_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "sanitize", "append_kv", "softmax", "--dtype", "bf16", "--device", "cuda")
    assert status == 0
    assert "append_kv bf16: k [5, 2, 64]" in out and out.rstrip().endswith("all ran")


def test_every_example_has_an_operation_and_a_reference() -> None:
    import cki

    for name in examples.NAMES:
        for example in examples.examples(name, ("f32",)):
            assert callable(getattr(cki, example.op))
            assert callable(getattr(cki.reference, example.op)), example.op


def test_selftest_prints_ok() -> None:
    command = [sys.executable, "-c", "import cki; cki.selftest()"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CKI_DEVICE": "sim", "CKI_COMPILE": "lazy"}
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.rstrip().endswith("ok")


def test_architectures_are_one_list() -> None:
    setting = next(setting for setting in config.SETTINGS if setting.name == "CKI_SIM_ARCH")
    assert all(setting.accepts(arch) for arch in ARCHITECTURES)
