"""The documentation as a whole: no dead link, no page that the map leaves out."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_to_a_file_leads_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_map_names_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    named = {(index.parent / target).resolve() for target in LINK.findall(index.read_text())}
    pages = {page.resolve() for page in ROOT.glob("docs/*.md")} - {index.resolve()}
    assert pages - named == set()
