"""The built distributions: what they contain, and that an installed wheel works away from the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import peftlab

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without the repository on the path, and return what it prints."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([*map(str, command)], check=False, capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    pytest.importorskip("hatchling")
    directory = tmp_path_factory.mktemp("source")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", directory, cwd=ROOT)
    (archive,) = directory.glob("*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(directory, filter="data")
    return directory / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from the source distribution, as pip builds it."""
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory, cwd=source)
    (found,) = directory.glob("*.whl")
    return found


def files(root: Path, *parts: str) -> set[str]:
    """Return the files below some directories, without what Python writes there."""
    found = (path for part in parts for path in (root / part).rglob("*"))
    return {p.relative_to(root).as_posix() for p in found if p.is_file() and "__pycache__" not in p.parts}


def test_the_wheel_has_all_files_of_the_package_and_the_recipes(wheel: Path, source: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        assert message_from_bytes(file.read(metadata))["Version"] == peftlab.__version__
    inside = files(ROOT, "peftlab") | {f"peftlab/_{name}" for name in files(ROOT, "recipes")}
    assert {name for name in names if ".dist-info/" not in name} == inside
    assert {path.suffix for path in map(Path, inside)} >= {".py", ".pyi", ".j2", ".css", ".json", ".yaml", ".typed"}
    assert files(source, "peftlab", "recipes", "tests", "docs") >= files(ROOT, "peftlab", "recipes", "tests")
    assert not (source / ".venv").exists()


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, in which its dependencies are those of this one; the folder of its programs."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment, symlinks=os.name != "nt")
    programs = environment / ("Scripts" if os.name == "nt" else "bin")
    run(
        sys.executable,
        "-m",
        "pip",
        "--python",
        programs / "python",
        "install",
        "--no-deps",
        "--no-index",
        wheel,
        cwd=environment,
    )
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(programs / "python", "-c", where, cwd=environment).strip())
    (packages / "dependencies.pth").write_text(run(sys.executable, "-c", where, cwd=environment))
    return programs


def test_an_installed_wheel_knows_its_version_and_recipes(installed: Path, tmp_path: Path) -> None:
    place = run(installed / "python", "-c", "import peftlab; print(peftlab.__file__)", cwd=tmp_path)
    assert Path(place.strip()).is_relative_to(installed.parent)
    assert run(installed / "peftlab", "--version", cwd=tmp_path).strip() == f"peftlab {peftlab.__version__}"
    assert "glue/cola-lora" in run(installed / "peftlab", "recipes", cwd=tmp_path)
    assert "lora_alpha: 8" in run(installed / "peftlab", "validate", "glue/cola-lora", cwd=tmp_path)


@pytest.mark.model
def test_an_installed_wheel_runs_the_quickstart_anywhere(
    minilm: str, reviews: str, installed: Path, tmp_path: Path
) -> None:
    small = ["train.max_steps=1", "data.validation=20", "data.max_train_examples=32", "train.max_length=16"]
    printed = run(installed / "peftlab", "run", "quickstart", *small, cwd=tmp_path)
    assert "run directory: runs/quickstart" in printed
    written = {path.name for path in (tmp_path / "runs" / "quickstart").iterdir()}
    assert {"adapter", "merged", "results.json", "report.html", "recipe.yaml"} <= written
