"""`python -m cki COMMAND`: what CKI sees and compiles, checks of its kernels, the demo."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from cki.errors import CkiError

#: Command -> (module and function of `(argv) -> int`, what it does).
COMMANDS = {
    "show-config": ("cki.cli.listings:show_config", "settings, device, driver, compilers, support table"),
    "list-kernels": ("cki.cli.listings:list_kernels", "all kernels, or those of a family"),
    "compile": (
        "cki.cli.compile_kernels:main",
        "compile all kernels into the cache, or with --out into a prebuilt directory",
    ),
    "cache": ("cki.cli.listings:cache", "`info` or `clear`: compiled kernels on disk"),
    "dump": ("cki.cli.dump:main", "a kernel's source, PTX, SASS, or registers and spills"),
    "sanitize": ("cki.cli.sanitize:main", "run a kernel on the simulated device with every check"),
    "selftest": ("cki.cli.selftest:main", "run the main operations against their reference"),
    "demo": ("cki.demo:main", "embed sentences with a real encoder"),
    "generate": ("cki.cli.generate:main", "continue a text with a language model"),
}


def usage() -> str:
    """The list of commands."""
    lines = [f"  {name:<14}{what}" for name, (_, what) in COMMANDS.items()]
    return (
        "usage: python -m cki COMMAND [options]\n\n"
        + "\n".join(lines)
        + "\n\n`COMMAND --help` shows its options."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0, 1 for an error that is explained on stderr, 2 for wrong usage."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    command = arguments[0]
    if command not in COMMANDS:
        print(f"there is no command {command!r}\n\n{usage()}", file=sys.stderr)
        return 2
    try:
        module, _, function = COMMANDS[command][0].partition(":")
        return int(getattr(import_module(module), function)(arguments[1:]) or 0)
    except CkiError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `| head`
        sys.stderr.close()
        return 0


if __name__ == "__main__":
    sys.exit(main())
