"""Every environment variable that CKI reads: name, default, meaning, what it accepts.  One table.

Nothing else in the package looks at `os.environ` for a CKI_ name.  Values are read when they are needed, not at
import, so a test or a notebook may set them late; what is decided once a process says so in its meaning.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

from cki.errors import InvalidArgumentError


@dataclass(frozen=True)
class Setting:
    """One variable.  accepts: a predicate of the text; expected: the same in words, for the error."""

    name: str
    default: str
    meaning: str
    expected: str
    accepts: Callable[[str], bool]


def _one_of(*values: str) -> Callable[[str], bool]:
    return lambda text: text in values


def _is_positive_integer(text: str) -> bool:
    return text.isascii() and text.isdigit() and int(text) > 0


def _anything(text: str) -> bool:
    return True


_ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a")
_ARCH_NAMES = ", ".join(_ARCHS)


def _default_cache_dir() -> str:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(home, "cki")


SETTINGS: tuple[Setting, ...] = (
    Setting(
        "CKI_DEVICE", "cuda", "Device that runs the kernels: the GPU, or the simulated device on the CPU. Read once.",
        "cuda or sim", _one_of("cuda", "sim"),
    ),
    Setting(
        "CKI_COMPILE", "background",
        "background: `import cki` compiles the default kernels for this GPU in a thread when the cache is cold. "
        "lazy: each kernel is compiled at its first use.",
        "background or lazy", _one_of("background", "lazy"),
    ),
    Setting(
        "CKI_CACHE_DIR", "", "Directory of compiled kernels. Empty: $XDG_CACHE_HOME/cki or ~/.cache/cki.",
        "a directory", _anything,
    ),
    Setting(
        "CKI_CUBIN_DIR", "",
        "Read-only directory of prebuilt kernels, made by `python -m cki compile --out DIR`; it serves machines "
        "without a compiler. Empty: none.",
        "a directory", _anything,
    ),
    Setting(
        "CKI_ARCH", "", f"Choose kernels as for this architecture, not the GPU's own: {_ARCH_NAMES}. Read once.",
        f"one of {_ARCH_NAMES}, or empty", _one_of("", *_ARCHS),
    ),
    Setting(
        "CKI_SIM_ARCH", "sm_90a", f"Architecture that the simulated device stands for: {_ARCH_NAMES}.",
        f"one of {_ARCH_NAMES}", _one_of(*_ARCHS),
    ),
    Setting(
        "CKI_SIM_THREADS", "", "Threads that run blocks of the simulated device. Empty: one for each CPU.",
        "a positive integer, or empty", lambda text: text == "" or _is_positive_integer(text),
    ),
    Setting(
        "CKI_CXX", "", "Host C++17 compiler of the simulated device. Empty: $CXX, g++ or clang++, the first found.",
        "a command, or empty", _anything,
    ),
    Setting(
        "CKI_LOG", "0", '1: log each compile, and each launch before it happens, to stderr (logger "cki", level INFO).',
        "0 or 1", _one_of("0", "1"),
    ),
    Setting(
        "CKI_VALIDATE", "0",
        "1: also check values that lie in device memory (offsets, tables, lengths); costs a host sync for each call.",
        "0 or 1", _one_of("0", "1"),
    ),
)  # fmt: skip

_BY_NAME = {setting.name: setting for setting in SETTINGS}


def text(name: str) -> str:
    """The value of a variable, or its default; InvalidArgumentError when the environment holds a bad one."""
    setting = _BY_NAME[name]
    value = os.environ.get(name)
    if value is None:
        return setting.default
    if not setting.accepts(value):
        raise InvalidArgumentError(
            f"environment variable {name}={value!r} is not valid",
            hint=f"{setting.expected}; unset: {setting.default!r}",
        )
    return value


def flag(name: str) -> bool:
    """A 0/1 variable."""
    return text(name) == "1"


def integer(name: str) -> int | None:
    """A number, or None where the variable is empty."""
    value = text(name)
    return int(value) if value else None


def cache_dir() -> str:
    """Where compiled kernels are kept."""
    return text("CKI_CACHE_DIR") or _default_cache_dir()


def unknown_names() -> list[str]:
    """Variables that start with CKI_ but are in no table: most likely misspelt."""
    return sorted(name for name in os.environ if name.startswith("CKI_") and name not in _BY_NAME)
