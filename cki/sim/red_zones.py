"""Gaps behind static `__shared__` arrays in instrumented kernels, so that an overflow of one does not meet the next.

With `-fdata-sections` each array (a thread-local variable) has a section of its own, which holds no bytes in the file:
making it longer in the object file's section header is all it takes.  The linker then places the next array behind the
gap, and the runtime knows where the arrays end (`cki_sim_shared_array`).
"""

from __future__ import annotations

from pathlib import Path

from cki.sim.elf import ElfFile

FLAGS = ("-fdata-sections",)

#: Of each gap.  A multiple of every alignment that an array can ask for, so that all else stays as without gaps.
BYTES = 1024


def add(object_file: Path) -> None:
    """Put a gap behind each static shared array of a relocatable object."""
    ElfFile(object_file).lengthen(".tbss.", BYTES)
