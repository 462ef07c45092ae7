"""`python -m cki demo`: embeds sentences with all-MiniLM-L6-v2, every operation of the encoder in a CKI kernel.

The first line says which device runs it.  Then come the sentences' cosine similarities, the largest error against
`cki.reference` in float64, the time, and the number of kernel launches; a heat map is written as a PNG.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

SENTENCES = (
    "A man plays the guitar on a small stage.",
    "Someone is performing music with a guitar.",
    "The stock market fell sharply this morning.",
    "Share prices dropped steeply after the market opened.",
    "How do I bake sourdough bread at home?",
    "What is a good recipe for homemade sourdough?",
)
DTYPES = ("f32", "f16", "bf16")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cki demo",
        description="embed sentences with all-MiniLM-L6-v2 through CKI's kernels and show how similar they are",
    )
    parser.add_argument(
        "--text", action="append", metavar="TEXT", help="a sentence; repeat for more (default: six)"
    )
    parser.add_argument(
        "--device",
        choices=("auto", "sim", "cuda"),
        default="auto",
        help="auto: the GPU, else the simulated device",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="f32", help="of weights and activations (default f32)"
    )
    parser.add_argument(
        "--png",
        type=Path,
        default=Path("demo_similarity.png"),
        metavar="PATH",
        help="heat map (default %(default)s)",
    )
    parser.add_argument("--build-only", action="store_true", help="build the kernels for the device and stop")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the demo; returns the exit status: 0, or 1 after a message on stderr."""
    arguments = _parser().parse_args(argv)
    from cki.demo.show import show
    from cki.errors import CkiError

    try:
        show(
            arguments.text or SENTENCES, arguments.device, arguments.dtype, arguments.png,
            build_only=arguments.build_only,
        )  # fmt: skip
    except (CkiError, OSError) as error:
        print(f"cki demo: {error}", file=sys.stderr)
        return 1
    return 0
