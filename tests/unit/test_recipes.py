"""What the recipes say is tested: the tests are there, and have the families that are named."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(p for p in (ROOT / "docs" / "recipes").glob("*.md") if p.name != "README.md")
# Where the names of a row are defined, if not in the file that it names.
DEFINED = {
    "tests/e2e/test_families.py": "tests/e2e/lab.py",
    "tests/scheduler": "tests/scheduler/families.py",
    "tests/unit/transfer": "tests/unit/transfer/worlds.py",
    "tests/unit/vllm_connector/test_byte_oracle.py": "tests/unit/vllm_connector/resolved.py",
}


def claims(text: str) -> list[tuple[str, list[str]]]:
    """(test, names behind it) of each row of the table under "What is tested"."""
    found = []
    for line in text.partition("## What is tested")[2].splitlines():
        quoted = re.findall(r"`([\w./]+)`", line.partition(" | ")[2].split(": every")[0])
        quoted = [word for word in quoted if not word.startswith("tools/")]
        if quoted and quoted[0].startswith("tests/"):
            found.append((quoted[0], quoted[1:]))
    return found


def unknown(test: str, names: list[str]) -> list[str]:
    """Names that this test does not have."""
    text = (ROOT / DEFINED.get(test, test)).read_text()
    return [name for name in names if not re.search(rf'"{name}"|def {name}\(', text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_a_page_says_is_tested_is_tested(page: Path) -> None:
    told = claims(page.read_text())

    assert len(told) >= 2
    assert [(test, names) for test, names in told if unknown(test, names)] == []


def test_a_name_that_no_test_has_is_found() -> None:
    row = "## What is tested\n| probe | yes: `tests/e2e/test_probe.py`, `deepseek_v3_apc` |\n"
    ((test, names),) = claims(row)

    assert unknown(test, names) == ["deepseek_v3_apc"]


def test_every_tiny_model_has_a_page_and_every_page_is_listed() -> None:
    texts = "\n".join(page.read_text() for page in PAGES)
    families = {path.stem for path in (ROOT / "tools/tiny_models/families").glob("*.py")}

    named = set(re.findall(r"`(\w+)`", texts))
    assert families - {"__init__", "common"} <= named
    listed = re.findall(r"\((\S+\.md)\)", (ROOT / "docs/recipes/README.md").read_text())
    assert {page.name for page in PAGES} <= set(listed)
