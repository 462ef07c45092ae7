"""Commands of `python -m cki`: one file each, with `main(argv) -> int`."""
