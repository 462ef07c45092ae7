"""Scripts of bench/ as modules."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of bench/ by its name; it finds its neighbours as when it runs.

    All are forgotten after the test: they change settings of their own and have names, like `attention`, of others too.
    """
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{BENCH}/"):
            del sys.modules[name]
