"""Writes the wgmma headers: ptx/wgmma/n<first>_to_<last>.cuh with the asm of each N, and the same in sim/ptx/wgmma.

An asm statement lists its accumulators one by one, so each N needs its own text; two of them are a file, which packs
into less of a wheel than two files. Run `python cuda_src/ptx/generate_wgmma.py`
after a change; `--check` exits with 1 when a committed file differs from what would be written.
"""

from __future__ import annotations

import sys
from pathlib import Path

DEVICE_DIRECTORY = Path(__file__).resolve().parent / "wgmma"
SIMULATOR_DIRECTORY = Path(__file__).resolve().parents[1] / "sim" / "ptx" / "wgmma"
LINE_WIDTH = 116
WIDTHS = range(8, 257, 8)
#: Those of a file.
GROUPS = [WIDTHS[first : first + 2] for first in range(0, len(WIDTHS), 2)]

# element name, K of one instruction, whether the operands may be MN-major
ELEMENTS = (("f16", 16, True), ("bf16", 16, True), ("e4m3", 32, False))


def wrap(items: list[str], indent: str) -> str:
    """Comma-separated items broken into lines of at most LINE_WIDTH characters."""
    lines, line = [], indent
    for i, item in enumerate(items):
        piece = item + (", " if i + 1 < len(items) else "")
        if len(line) + len(piece.rstrip()) > LINE_WIDTH:
            lines.append(line.rstrip())
            line = indent
        line += piece
    return "\n".join([*lines, line])


def string_lines(items: list[str], indent: str) -> str:
    """Like wrap, as adjacent string literals of one asm text."""
    text = wrap(items, "").split("\n")
    return "\n".join(f'{indent}"{line}{" " if line.endswith(",") else ""}"' for line in text)


def instruction(n: int, element: str, k: int, transposable: bool, a_in_registers: bool) -> str:
    """One static member function: a single wgmma.mma_async."""
    count = n // 2
    a_operands = 4 if a_in_registers else 1
    b = count + a_operands
    scale_d = b + 1
    transposes = []
    if transposable:
        transposes = ["TransposeB"] if a_in_registers else ["TransposeA", "TransposeB"]
    template = f"  template <{', '.join('int ' + t for t in transposes)}>\n" if transposes else ""
    name = f"{element}_{'registers' if a_in_registers else 'shared'}"
    a_parameter = "const u32 (&a)[4]" if a_in_registers else "u64 a"
    a_text = "{" + ", ".join(f"%{count + i}" for i in range(4)) + "}" if a_in_registers else f"%{count}"
    immediates = ", ".join(["p", "1", "1", *(f"%{scale_d + 1 + i}" for i in range(len(transposes)))])
    accumulators = [f"%{i}" for i in range(count)]
    accumulators = ["{" + accumulators[0], *accumulators[1:-1], accumulators[-1] + "}"]
    inputs = [f'"r"(a[{i}])' for i in range(4)] if a_in_registers else ['"l"(a)']
    inputs += ['"l"(b)', '"r"(scale_d)', *(f'"n"({t})' for t in transposes)]
    return f"""{template}  static __device__ __forceinline__ void {name}(float (&d)[{count}], {a_parameter}, u64 b, int scale_d) {{
    asm volatile(
        "{{\\n"
        ".reg .pred p;\\n"
        "setp.ne.b32 p, %{scale_d}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{element}.{element} "
{string_lines(accumulators, "        ")}
        ", {a_text}, %{b}, {immediates};\\n"
        "}}"
        :
{wrap([f'"+f"(d[{i}])' for i in range(count)], "        ")}
        : {", ".join(inputs)});
  }}
"""


def specialisation(n: int) -> str:
    body = "\n".join(
        instruction(n, element, k, transposable, a_in_registers)
        for element, k, transposable in ELEMENTS
        for a_in_registers in (False, True)
    )
    return f"""// {n // 2} accumulators a thread.
template <>
struct WgmmaInstruction<{n}> {{
{body}}};
"""


def name_of(group: range) -> str:
    """The file of some N."""
    return f"n{group[0]}_to_{group[-1]}.cuh"


def device_header(group: range) -> str:
    every = "\n".join(map(specialisation, group))
    return f"""// Written by ptx/generate_wgmma.py. wgmma.mma_async with N from {group[0]} to {group[-1]}.
#pragma once

#include "ptx/wgmma.cuh"

namespace cki::ptx {{

{every}
}}  // namespace cki::ptx
"""


def simulator_header(group: range) -> str:
    return f"""// Written by ptx/generate_wgmma.py. The simulated wgmma takes any N: nothing is special about {group[0]} to {group[-1]}.
#pragma once

#include "ptx/wgmma.cuh"
"""


def all_header() -> str:
    includes = "\n".join(f'#include "ptx/wgmma/{name_of(group)}"' for group in GROUPS)
    return f"""// Written by ptx/generate_wgmma.py. Every N, for a kernel whose N is a prelude constant: 30 ms more to compile than one.
#pragma once

{includes}
"""


def files() -> dict[Path, str]:
    """Every generated file with its text."""
    device = {DEVICE_DIRECTORY / name_of(group): device_header(group) for group in GROUPS}
    device[DEVICE_DIRECTORY / "all.cuh"] = all_header()
    simulator = {SIMULATOR_DIRECTORY / name_of(group): simulator_header(group) for group in GROUPS}
    simulator[SIMULATOR_DIRECTORY / "all.cuh"] = all_header()
    return device | simulator


def main() -> int:
    stale = [path for path, text in files().items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        print("\n".join(f"stale: {path}" for path in stale) or "wgmma headers are current")
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(files()[path])
    print(f"{len(stale)} files written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
