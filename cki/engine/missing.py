"""What to say when a package of the extra `engine` is not installed."""

from __future__ import annotations

from cki.errors import MissingPackageError

INSTALL = 'pip install "cki-runtime[engine]"'


def missing(package: str, needed_by: str) -> MissingPackageError:
    """The error, to be raised."""
    return MissingPackageError(
        f"{needed_by} needs the package {package}, which is not installed; do: {INSTALL}"
    )
