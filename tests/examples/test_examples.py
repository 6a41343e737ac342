"""Each example works as a stranger's package does, with public imports only."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from textwrap import dedent

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["torchbay-example", "torchbay-openvino"]
PUBLIC = {"torchbay", "torchbay.errors", "torchbay.plugin", "torchbay.testing"}


@pytest.fixture(scope="module")
def openvino(stranger):
    return stranger("torchbay-openvino")


@pytest.mark.slow
@pytest.mark.parametrize("example", NAMES)
def test_passes_the_kit(example, stranger, tmp_path):
    printed = stranger(example).test(example, tmp_path)
    (line,) = [line for line in printed.splitlines() if line.startswith("torchbay: ")]
    assert "0 known failures" in line
    assert "wrong" not in line
    assert " 0 passed" not in line


def test_encodes_sentences_through_openvino(openvino, tmp_path):
    program = """
        import sys
        from torchbay.cli import main
        sys.argv = ["torchbay", "demo", "--backend", "openvino", "--calls", "3", "--json"]
        main()
    """
    document = json.loads(openvino.run("-c", dedent(program), cwd=tmp_path))
    assert document["ok"]
    assert "openvino" in {row["backend"] for row in document["rows"]}


def test_cuts_the_encoder_into_at_most_three_regions(openvino, tmp_path):
    program = """
        import torch, torchbay
        from torchbay.cli import _encoder, _sentences
        encoder, batch = _encoder.load([*_sentences.SENTENCES, _sentences.QUERY])
        compiled = torchbay.compile(encoder, backend="openvino", fullgraph=True)
        with torch.no_grad():
            compiled(*batch)
        (one,) = torchbay.explain(compiled).specializations
        print(*[name for name, _ in one.parts])
    """
    parts = openvino.run("-c", dedent(program), cwd=tmp_path).split()
    assert "openvino" in parts
    assert len(parts) <= 3


@pytest.mark.parametrize("example", NAMES)
def test_imports_public_modules_only(example):
    imported = {name for file in (EXAMPLES / example).rglob("*.py") for name in imports(file)}
    ours = {name for name in imported if name.split(".")[0] == "torchbay"}
    assert "torchbay.plugin" in ours
    assert ours <= PUBLIC


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module


def test_template_has_less_than_60_lines_of_code():
    files = (EXAMPLES / "torchbay-example").rglob("*.py")
    assert sum(lines_of_code(file.read_text()) for file in files) < 60


def lines_of_code(source):
    described = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, described)]
    texts = [node.body[0] for node in nodes if ast.get_docstring(node)]
    docstrings = {line for text in texts for line in range(text.lineno, text.end_lineno + 1)}
    lines = enumerate(source.splitlines(), 1)
    return sum(bool(line.strip()) and number not in docstrings for number, line in lines)
