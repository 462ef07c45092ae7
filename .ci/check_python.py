"""Ends with a clear line when this Python cannot run CKI.  Run by make, before anything is installed."""

import sys

OLDEST, NEWEST = (3, 10), (3, 13)

version = sys.version_info[:2]
if not OLDEST <= version <= NEWEST:
    sys.exit(
        "CKI needs Python 3.10 to 3.13; {} is {}.{}.  Name another one: make demo PYTHON=python3.12".format(
            sys.executable, *version
        )
    )
