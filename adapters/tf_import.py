"""Registers CKI's operations with TensorFlow when both are there, in whichever order they are imported.

Saved models that hold them, or calls of them for XLA, then run after `import cki`.  Imports nothing of TensorFlow's by
itself.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_searching = threading.local()


def watch() -> None:
    """Register now if TensorFlow has been imported, else when it is."""
    if "tensorflow" in sys.modules:
        _register()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _register() -> None:
    from cki.errors import CkiError

    # What is missing is said at the first call (`tf_ops.missing`): importing cki must not fail for it.
    with contextlib.suppress(CkiError, ImportError, AttributeError):
        from cki.adapters import tf_ops

        tf_ops.register()
    with contextlib.suppress(CkiError, ImportError, AttributeError):
        from cki.adapters import tf_xla

        tf_xla.register()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds `tensorflow` as the others do, and adds to what its import does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "tensorflow" or getattr(_searching, "active", False):
            return None
        _searching.active = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            _searching.active = False
        if spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Another loader, and the registration behind it."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register()

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._loader, name)
