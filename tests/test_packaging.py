"""The wheel as a person gets it: in an empty environment, with the packages it asks for and no torch."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder)]
    subprocess.run([*command, str(REPOSITORY)], check=True, stdout=subprocess.DEVNULL)
    assert len(list(folder.glob("infill_lsp-*.tar.gz"))) == 1  # the wheel is built from it
    (path,) = folder.glob("infill_lsp-*.whl")
    return path


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    packages = {"infill_lsp", "infill_engine", "infill_kernels"}
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == packages
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    assert "infill_engine/adapter.safetensors" in names
    assert any(name.endswith("/licenses/LICENSE") for name in names)


def test_it_runs_with_its_base_requirements_alone(wheel: Path, tmp_path: Path) -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    venv.create(tmp_path / "venv", with_pip=True)
    scripts = tmp_path / "venv" / "bin"
    pip = [str(scripts / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    subprocess.run([*pip, "-c", str(REPOSITORY / "constraints.txt"), *project["dependencies"]], check=True)

    version = subprocess.run([scripts / "infill-lsp", "--version"], check=True, capture_output=True, text=True)
    assert version.stdout == f"infill-lsp {wheel.name.split('-')[1]}\n"
    frozen = subprocess.run([*pip[:3], "list"], check=True, capture_output=True, text=True).stdout
    assert "torch" not in frozen

    # The server starts, looks for the engine, and says what is missing.
    folders = {"RUNTIME": "r", "CACHE": "c", "CONFIG": "s"}
    home = {f"INFILL_{name}_DIR": str(tmp_path / folder) for name, folder in folders.items()}
    doctor = subprocess.run([scripts / "infill-lsp", "doctor"], env=home, capture_output=True, text=True, timeout=60)
    assert doctor.returncode == 1
    assert "✗ torch is not installed" in doctor.stdout
    assert "pip install" in doctor.stdout
    assert "Traceback" not in doctor.stdout + doctor.stderr
