"""Devices: the choice between GPU and simulated device, what is known of each, and what is said when there is none."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import cki
from cki import config, driver, nvml
from cki.device import ARCH_OF_CAPABILITY, arch_of, cuda_device, current, sim_device
from cki.errors import DeviceError, InvalidArgumentError
from cki.kernel import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    everything = {**os.environ, "PYTHONPATH": str(ROOT), "CKI_COMPILE": "lazy", **env}
    return subprocess.run(
        [sys.executable, "-c", code], env=everything, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_simulated_device(arch: str) -> None:
    info = sim_device(arch)
    assert (info.kind, info.arch) == ("sim", arch)
    assert info.sm_count > 100
    assert info.shared_memory_per_block >= 99 * 1024


def test_unknown_simulated_architecture() -> None:
    with pytest.raises(InvalidArgumentError, match="sm_70") as caught:
        cki.device("sim", arch="sm_70")
    assert "sm_90a" in str(caught.value)


def test_unknown_device() -> None:
    with pytest.raises(InvalidArgumentError, match="'gpu'"):
        cki.device("gpu")
    with pytest.raises(InvalidArgumentError, match="CKI_ARCH"):
        cki.device("cuda", arch="sm_80")


def test_contexts_nest_and_belong_to_a_thread() -> None:
    seen: list[str] = []
    with cki.device("sim", arch="sm_80"):
        assert current().arch == "sm_80"
        with cki.device("cuda"):
            assert current().kind == "cuda"
        assert current().arch == "sm_80"
        thread = threading.Thread(target=lambda: seen.append(current().kind))
        thread.start()
        thread.join()
    assert seen == ["cuda"]
    assert current().kind == "cuda"


def test_one_context_object_may_be_entered_twice() -> None:
    context = cki.device("sim")
    with context, context:
        assert current().kind == "sim"
    assert current().kind == "cuda"


def test_environment_chooses_the_device() -> None:
    result = python(
        "from cki.device import current; print(current())", CKI_DEVICE="sim", CKI_SIM_ARCH="sm_89"
    )
    assert result.stdout.strip() == "simulated device (sm_89)"


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("CKI_DEVICE", "gpu", "cuda or sim"),
        ("CKI_SIM_ARCH", "sm_70", "one of sm_80"),
        ("CKI_SIM_THREADS", "-1", "a positive integer"),
        ("CKI_VALIDATE", "yes", "0 or 1"),
        ("CKI_COMPILE", "", "background or lazy"),
    ],
)
def test_bad_settings(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expected: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(InvalidArgumentError) as caught:
        config.text(name)
    assert f"{name}={value!r}" in str(caught.value)
    assert expected in str(caught.value)


def test_misspelt_settings_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKI_CACHEDIR", "/somewhere")
    assert "CKI_CACHEDIR" in config.unknown_names()


def test_default_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CKI_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert config.cache_dir() == "/elsewhere/cki"


def test_every_supported_capability_has_kernels() -> None:
    assert set(ARCH_OF_CAPABILITY.values()) == set(ARCHITECTURES)
    with pytest.raises(DeviceError) as caught:
        arch_of((7, 0), "Tesla V100")
    assert "Tesla V100 has compute capability 7.0" in str(caught.value)
    assert "H100, H200" in str(caught.value)


@pytest.mark.parametrize("version", [11080, 9000])
def test_driver_that_is_too_old(version: int) -> None:
    with pytest.raises(DeviceError) as caught:
        driver.check_driver_version(version)
    assert f"supports CUDA {version // 1000}" in str(caught.value)
    assert "CKI needs 12.0" in str(caught.value)
    assert "525" in str(caught.value)


def test_driver_older_than_the_compiler() -> None:
    driver.check_driver_version(13000, (13, 0))
    driver.check_driver_version(12080, (12, 9))
    with pytest.raises(DeviceError) as caught:
        driver.check_driver_version(12080, (13, 0))
    assert "NVRTC 13.0 needs 13.0" in str(caught.value)
    assert "cki-runtime[cuda12]" in str(caught.value)


def test_without_a_driver_the_error_says_what_to_do() -> None:
    if nvml.survey().gpus:
        pytest.skip("this machine has a GPU")
    with pytest.raises(DeviceError) as caught:
        cuda_device(0)
    assert "driver" in str(caught.value)
    assert 'cki.device("sim")' in str(caught.value)


def test_without_cuda_bindings_the_error_says_what_to_install() -> None:
    result = python(
        "import sys; sys.modules['cuda'] = None\n"
        "from cki.device import cuda_device\n"
        "try: cuda_device(0)\n"
        "except RuntimeError as error: print(error)"
    )
    assert "pip install 'cki-runtime[cuda13]'" in result.stdout, result.stderr


def test_visible_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = tuple(nvml.Gpu(f"gpu {i}", (9, 0), f"GPU-{i}{i}") for i in range(3))
    monkeypatch.setattr(nvml, "survey", lambda: nvml.Survey(gpus, (13, 0), "580"))
    for value, expected in (
        ("1", [1]),
        ("2,0", [2, 0]),
        ("GPU-11", [1]),
        ("0,9,1", [0]),
        ("", []),
        ("-1", []),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        assert [gpus.index(gpu) for gpu in nvml.visible_gpus()] == expected, value
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert nvml.gpu_count() == 3


@pytest.mark.gpu
def test_gpu_properties() -> None:
    import cupy

    info = cuda_device(0)
    attributes = cupy.cuda.Device(0).attributes
    assert info.sm_count == attributes["MultiProcessorCount"]
    assert info.shared_memory_per_block == attributes["MaxSharedMemoryPerBlockOptin"]
    assert info.l2_bytes == attributes["L2CacheSize"]
    assert info.arch == ARCH_OF_CAPABILITY[nvml.visible_gpus()[0].capability]
    with pytest.raises(DeviceError, match="cuda:99"):
        cuda_device(99)


@pytest.mark.gpu
def test_looking_at_gpus_makes_no_context() -> None:
    result = python(
        "from cki import nvml, driver\n"
        "from cki.device import cuda_device\n"
        "assert nvml.survey().gpus\n"
        "cuda_device(0)\n"
        "print(driver.current_device())"
    )
    assert result.stdout.strip() == "-1", result.stderr
