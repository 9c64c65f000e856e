"""References: a local path that is mistyped is not a model of the hub's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from peftlab.errors import PeftlabError
from peftlab.models.load import load_config
from peftlab.references import locate


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with two runs in it."""
    for name in ("runs/medusa", "runs/draft-quickstart/merged", "models"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("runs/medsua", "'runs' is a directory here, and this is not in it (did you mean 'medusa'?)"),
        ("models/mine", "'models' is a directory here, and this is not in it; "),
        ("runs/draft-quickstart/merge", "no such file or directory (did you mean 'merged'?)"),
        ("./run", "no such file or directory (did you mean 'runs'?)"),
    ],
)
def test_a_path_into_a_directory_is_local(here: Path, reference: str, message: str) -> None:
    with pytest.raises(PeftlabError) as caught:
        locate(reference)
    assert message in str(caught.value)


def test_other_names_are_the_hubs(here: Path) -> None:
    assert locate("runs/medusa") == Path("runs/medusa")
    for reference in ("gpt2", "HuggingFaceTB/SmolLM2-135M", "run"):
        assert locate(reference) == reference


def test_a_model_in_the_hubs_cache_is_found_beside_a_directory_of_that_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = here / "cache" / "models--models--mine" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0")
    with pytest.raises(PeftlabError, match="is a directory here"):
        locate("models/mine")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(here / "cache"))
    assert locate("models/mine") == "models/mine"


def test_a_name_that_the_hub_does_not_have_either(here: Path) -> None:
    """The hub is not asked in these tests."""
    with pytest.raises(
        PeftlabError, match=r"'run': no such directory \(did you mean 'runs'\?\), no such model in the hub's"
    ):
        load_config("run")


def test_a_hub_that_does_not_answer_is_asked_once(here: Path) -> None:
    """Nothing listens on the discard port of this machine; the libraries would retry for most of a minute."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONPATH": str(root)}
    program = "from peftlab.models.load import load_config; load_config('run')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert "no such directory (did you mean 'runs'?)" in done.stderr
    assert "http://127.0.0.1:9 does not answer" in done.stderr
    assert "Retrying" not in done.stdout + done.stderr
