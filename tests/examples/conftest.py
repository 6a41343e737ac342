"""A stranger's machine: an environment with wheels of the core, eager and one example."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "torchbay": ROOT / "core",
    "torchbay-eager": ROOT / "plugins" / "eager",
    "torchbay-example": ROOT / "examples" / "torchbay-example",
    "torchbay-openvino": ROOT / "examples" / "torchbay-openvino",
}


class Machine:
    """An environment that holds some wheels, and links to what they require."""

    def __init__(self, folder):
        venv.create(folder, symlinks=True, with_pip=False)
        self.python = folder / "bin" / "python"
        self.site = next(folder.glob("lib/python*/site-packages"))

    def install(self, wheels, extras):
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(self.site)
        self._link([Distribution.at(path) for path in self.site.glob("*.dist-info")], extras)

    def _link(self, found, extras):
        seen = {canonical(one.metadata["Name"]) for one in found}
        while found:
            for name in requirements(found.pop(), extras) - seen:
                seen.add(name)
                found.append(distribution(name))
                link(found[-1], self.site)

    def run(self, *arguments, cwd):
        """Run Python in a folder and return what it prints; fail as it fails."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [self.python, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=cwd, env=kept, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def test(self, example, folder):
        """Run the tests of an example in a folder that holds nothing else of it."""
        shutil.copytree(FOLDERS[example] / "tests", folder / "tests")
        shutil.copy(FOLDERS[example] / "pyproject.toml", folder)
        return self.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder)


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(installed, extras):
    wanted = map(Requirement, installed.requires or [])
    # Those of the core are ours; what others offer on top is not asked for.
    chosen = extras if installed.metadata["Name"] == "torchbay" else [""]
    return {
        canonical(one.name)
        for one in wanted
        if not one.marker or any(one.marker.evaluate({"extra": extra}) for extra in chosen)
    }


def link(installed, site):
    tops = {file.parts[0] for file in installed.files or [] if file.parts[0] not in (".", "..")}
    for top in tops - {"__pycache__"}:
        source, target = Path(installed.locate_file(top)), site / top
        if source.exists() and not target.exists():
            target.symlink_to(source)


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """Wheels by distribution, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "--quiet", "wheel", "--no-index", "--no-deps"]
    command += ["--no-build-isolation", "-w", folder, *FOLDERS.values()]
    subprocess.run(command, check=True)
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in FOLDERS}


@pytest.fixture(scope="session")
def stranger(wheels, tmp_path_factory):
    """Make a machine with the core, eager and one example on it."""

    def make(example):
        machine = Machine(tmp_path_factory.mktemp("stranger"))
        chosen = [wheels[name] for name in ("torchbay", "torchbay-eager", example)]
        machine.install(chosen, ["testing", "demo"])
        return machine

    return make
