from __future__ import annotations

import json
import subprocess
import sys

from click.testing import CliRunner

import torchbay
from torchbay.cli import main

OURS = {
    "aoti": "torchbay-aoti",
    "eager": "torchbay-eager",
    "inductor_triton": "torchbay-inductor-triton",
}


def run(*arguments):
    return CliRunner().invoke(main, arguments)


def run_python(program):
    finished = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return finished.stdout


def test_help_names_each_command():
    result = run("--help")
    assert result.exit_code == 0
    for command in main.commands:
        assert command in result.stdout


def test_help_imports_nothing_heavy():
    program = "import sys, torchbay.cli; print(*sys.modules)"
    loaded = run_python(program).split()
    assert not {"rich", "torch", "transformers", "torchbay_eager"} & set(loaded)


def test_backends_names_distribution_and_version():
    result = run("backends")
    assert result.exit_code == 0
    for name, distribution in OURS.items():
        row = next(line for line in result.stdout.splitlines() if f" {name} " in line)
        assert distribution in row
        assert "0.1.0" in row


def test_backends_prints_one_json_document():
    result = run("backends", "--json")
    listed = {row["name"]: row["distribution"] for row in json.loads(result.stdout)}
    assert OURS.items() <= listed.items()


def test_backends_imports_no_plugin():
    program = (
        "import sys; from torchbay.cli import main; "
        "main(['backends'], standalone_mode=False); print(*sys.modules)"
    )
    loaded = run_python(program).split()
    assert not {"torchbay_aoti", "torchbay_eager", "torchbay_inductor_triton"} & set(loaded)


def test_backends_says_what_to_install_when_there_is_none(monkeypatch):
    monkeypatch.setattr(torchbay, "backends", list)
    printed = run("backends").stdout
    for distribution in OURS.values():
        assert f"pip install {distribution}" in printed


def test_backends_shows_which_are_hidden(monkeypatch):
    monkeypatch.setenv("TORCHBAY_SKIP_BACKENDS", "aoti")
    states = {row["name"]: row["state"] for row in json.loads(run("backends", "--json").stdout)}
    assert states["aoti"] == "skipped"
    assert states["eager"] != "skipped"


def test_reports_an_error_without_a_traceback():
    result = run("demo", "--backend", "eagre")
    assert result.exit_code == 1
    assert "Error: " in result.stderr
    assert "eager" in result.stderr
    assert "Traceback" not in result.output
