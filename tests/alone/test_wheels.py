"""Each distribution works when it is installed from its wheel, with nothing it did not ask for.

Every case is a virtual environment that holds one or two wheels and links to exactly those
installed distributions that they require, so that an undeclared dependency is missed at once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import Distribution, distribution
from pathlib import Path
from textwrap import dedent

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "torchbay": "core",
    "torchbay-eager": "plugins/eager",
    "torchbay-inductor-triton": "plugins/inductor_triton",
    "torchbay-aoti": "plugins/aoti",
}
PLUGINS = {name: Path(folder).name for name, folder in FOLDERS.items() if name != "torchbay"}
SITE = Path(sysconfig.get_path("purelib"))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory):
    """The four wheels by distribution, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = [ROOT / source for source in FOLDERS.values()]
    pip("wheel", "--no-index", "--no-deps", "--no-build-isolation", "-w", folder, *sources)
    return {name: next(folder.glob(f"{name.replace('-', '_')}-*.whl")) for name in FOLDERS}


def pip(*arguments):
    command = [sys.executable, "-m", "pip", "--quiet", *map(str, arguments)]
    subprocess.run(command, check=True)


@pytest.fixture(scope="session")
def alone(wheels, tmp_path_factory):
    """Make an environment with these distributions only, and return its interpreter."""

    def make(*names):
        folder = tmp_path_factory.mktemp("alone")
        venv.create(folder, symlinks=True, with_pip=False)
        python = folder / "bin" / "python"
        site = next(folder.glob("lib/python*/site-packages"))
        for name in names:
            with zipfile.ZipFile(wheels[name]) as wheel:
                wheel.extractall(site)
        link_requirements(names, site)
        return python

    return make


def link_requirements(names, site):
    seen = set(names)
    found = [Distribution.at(next(site.glob(f"{name.replace('-', '_')}-*"))) for name in names]
    while found:
        for required in requirements(found.pop()) - seen:
            seen.add(required)
            found.append(distribution(required))
            link(found[-1], site)


def requirements(installed):
    wanted = map(Requirement, installed.requires or [])
    kept = [one for one in wanted if not one.marker or one.marker.evaluate({"extra": ""})]
    return {re.sub(r"[-_.]+", "-", one.name).lower() for one in kept}


def link(installed, site):
    tops = {file.parts[0] for file in installed.files or [] if file.parts[0] not in (".", "..")}
    for top in tops - {"__pycache__"}:
        source, target = Path(installed.locate_file(top)), site / top
        if source.exists() and not target.exists():
            target.symlink_to(source)


def run(python, program, cwd):
    """Run a program in an environment and return the words it prints."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", dedent(program)],
        cwd=cwd,
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_core_alone_explains_what_to_install(alone, tmp_path):
    program = """
        import torch, torchbay
        assert torchbay.backends() == []
        try:
            torchbay.compile(lambda x: x + 1)(torch.ones(2))
        except torchbay.errors.NoBackend as error:
            print(error)
    """
    told = run(alone("torchbay"), program, tmp_path)
    assert {"pip", "install", "torchbay-inductor-triton", "torchbay-aoti"} <= {
        word.strip(".;:,") for word in told
    }


USE = """
    import sys, warnings
    import torch, torchbay

    # From here on: without NumPy, which torch does not require, importing torch warns.
    warnings.simplefilter("error")
    (listing,) = torchbay.backends()
    square = torchbay.compile(lambda x: x * x + 1, backend=listing.name)
    served = []
    with torch.no_grad():
        for value in (2.0, 3.0, 4.0):
            x = torch.full((8,), value)
            torch.testing.assert_close(square(x), x * x + 1)
            served.append(torchbay.explain(square).calls["graph"])
    assert served[2] == served[1] + 1, served
    print(listing.name, *sys.modules)
"""


@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_plugin_alone_works(alone, plugin, tmp_path):
    name, *loaded = run(alone("torchbay", plugin), USE, tmp_path)
    assert name == PLUGINS[plugin]
    ours = {module.split(".")[0] for module in loaded if module.startswith("torchbay")}
    assert ours == {"torchbay", f"torchbay_{name}"}


def test_eager_imports_no_compiler(alone, tmp_path):
    program = """
        import sys
        import torchbay_eager
        torchbay_eager.torchbay_make_backend()
        print(*sys.modules)
    """
    loaded = run(alone("torchbay", "torchbay-eager"), program, tmp_path)
    assert {"torch._dynamo", "torch._inductor", "triton"}.isdisjoint(loaded)


def test_eager_compiles_with_no_compiler(alone, tmp_path):
    _, *loaded = run(alone("torchbay", "torchbay-eager"), USE, tmp_path)
    # Fake tensors import the package torch._inductor, but nothing that compiles.
    assert {"torch._inductor.compile_fx", "torch._inductor.scheduler"}.isdisjoint(loaded)


def test_no_file_is_in_two_wheels(wheels):
    owners = {}
    for name, path in wheels.items():
        for file in zipfile.ZipFile(path).namelist():
            owners.setdefault(file, []).append(name)
    assert {file: names for file, names in owners.items() if len(names) > 1} == {}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_wheel_carries_types_and_license(wheels, name):
    files = zipfile.ZipFile(wheels[name]).namelist()
    assert f"{name.replace('-', '_')}/py.typed" in files
    assert any(file.endswith("licenses/LICENSE") for file in files)
    assert not [file for file in files if "__pycache__" in file]


def test_the_command_line_is_installed_with_the_core(wheels):
    with zipfile.ZipFile(wheels["torchbay"]) as wheel:
        (entries,) = [file for file in wheel.namelist() if file.endswith("entry_points.txt")]
        assert "torchbay = torchbay.cli:main" in wheel.read(entries).decode()
