"""Every Python block of the documentation runs, as a program of its own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    page
    for pattern in ("*.md", "core/*.md", "plugins/*/*.md", "docs/**/*.md", "benchmarks/*.md")
    for page in sorted(ROOT.glob(pattern))
]
# A block under this comment is shown, not run.
SHOWN = "<!-- not run -->"
BLOCK = re.compile(rf"^({re.escape(SHOWN)}\n+)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)")


def blocks():
    for page in PAGES:
        text = page.read_text()
        for found in BLOCK.finditer(text):
            if not found[1]:
                line = text.count("\n", 0, found.start(2)) + 1
                where = f"{page.relative_to(ROOT)}:{line}"
                # Blank lines keep the page's line numbers in tracebacks.
                yield pytest.param("\n" * (line - 1) + found[2], id=where)


@pytest.mark.parametrize("program", [*blocks()])
def test_runs(program, tmp_path):
    script = tmp_path / "block.py"
    script.write_text(program)
    command = [sys.executable, "-W", "error::UserWarning", script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    missing = [link for link in LINK.findall(page.read_text()) if not (page.parent / link).exists()]
    assert missing == []


def test_finds_the_blocks_of_the_front_page():
    assert any(block.id.startswith("README.md:") for block in blocks())
