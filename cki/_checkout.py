"""Where the device sources and the adapters lie: installed inside `cki`, or beside it in a source checkout."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_CHECKOUT = _PACKAGE.parent


def extended_path(path: list[str]) -> list[str]:
    """`cki.__path__` for a source checkout: `cki.adapters` and `cki.cuda_src` are then found beside `cki`.

    Only a directory that holds both, and the project file, counts as a checkout: an installed `cki` lies in
    site-packages, where an `adapters` of somebody else may lie too.
    """
    is_installed = (_PACKAGE / "adapters").is_dir()
    is_checkout = (_CHECKOUT / "pyproject.toml").is_file() and (_CHECKOUT / "cuda_src").is_dir()
    return path if is_installed or not is_checkout else [*path, str(_CHECKOUT)]


def cuda_src() -> Path:
    """The directory of the device sources."""
    installed = _PACKAGE / "cuda_src"
    return installed if installed.is_dir() else _CHECKOUT / "cuda_src"
