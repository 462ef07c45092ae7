"""docs/index.md names every page, no link is dead, and what pages and docstrings name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
#: CHANGELOG.md tells of what was.
NAMING_PAGES = [ROOT / "README.md", ROOT / "bench" / "results" / "README.md", *PAGES[:-1]]
SOURCES = [
    path
    for folder in ("adapters", "bench", "cki", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def anchors(page: Path) -> set[str]:
    """Names of a page's headings as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_index_links_every_page():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert not {page for page in pages if f"]({page})" not in index}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_anchors_are_headings(page):
    links = re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text(encoding="utf-8"))
    assert not [
        f"{name}#{at}" for name, at in links if at not in anchors(page.parent / name if name else page)
    ]


def _is_there(name: str) -> bool:
    """Whether a dotted name, cki.x.y, is a module, or something that one defines or imports."""
    module, rest = ROOT / "cki", name.split(".")[1:]
    if rest[0] in ("adapters", "cuda_src"):
        module, rest = ROOT / rest[0], rest[1:]
    while rest and (module / rest[0]).is_dir():
        module, rest = module / rest[0], rest[1:]
    if rest and (module / f"{rest[0]}.py").exists():
        file, rest = module / f"{rest[0]}.py", rest[1:]
    else:
        file = module / "__init__.py"
    # Attributes of a class are looked for in all of the package: which class it is, text does not tell.
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    return not rest or re.search(rf"\b{rest[0]}\b", text) is not None


def test_dotted_names_are_there():
    """In pages, docstrings and comments: a module that is renamed is named so everywhere."""
    wrong = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in [*NAMING_PAGES, *SOURCES]
        for name in re.findall(r"\bcki(?:\.[A-Za-z_]\w*)+(?![\w{])", path.read_text(encoding="utf-8"))
        if not _is_there(name)
    ]
    assert not wrong


def test_paths_are_there():
    """Those that begin with one of the checkout's folders."""
    folders = "|".join(("adapters", "bench", "cki", "cuda_src", "docs", "examples", "tests"))
    wrong = [
        f"{path.relative_to(ROOT)}: {found}"
        for path in [*NAMING_PAGES, *SOURCES]
        for found in re.findall(
            rf"(?<![\w/.-])(?:{folders})/[\w/]+\.(?:py|cuh?|h|cpp|md|csv|svg)\b",
            path.read_text(encoding="utf-8"),
        )
        if not (ROOT / found).exists()
    ]
    assert not wrong


def test_commands_have_their_options():
    """`python bench/norms.py --shape ...` in a page: options that the programs name."""
    defined = {
        option
        for path in SOURCES
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", path.read_text(encoding="utf-8"))
    }
    wrong = [
        f"{path.name}: {option}"
        for path in NAMING_PAGES
        for line in re.findall(r"python (?:bench|examples|-m cki)[^`|#\n]*", path.read_text(encoding="utf-8"))
        for option in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", line)
        if option not in defined
    ]
    assert not wrong
