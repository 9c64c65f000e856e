"""The fuzzing command: a fixed few inputs with every run of the suite, two thousand with the long ones."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import campaign, cases, images, recipes, tables
from tests.fuzz.cases import CLASSES_OF_INPUT
from tests.fuzz.running import in_process
from tests.image_models import save_vision_language


def test_a_few_inputs_of_each_class() -> None:
    summary = campaign.run(5, range(90))  # of these every class has some
    assert not summary.faults, "\n".join(summary.faults)
    told = {name: sum(summary.counts[name, end] for end in ("accepted", "refused")) for name in CLASSES_OF_INPUT}
    assert all(told.values()), told
    for name in ("recipe", "adapter config", "adapter weights", "model config", "data"):
        assert summary.counts[name, "accepted"], f"no {name} was accepted: nothing was compared"


@pytest.mark.long
def test_two_thousand_inputs() -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    processes = frozenset(random.Random(seed).sample(range(2000), 100))
    summary = campaign.run(seed, range(2000), processes=processes)
    print(summary)
    assert not summary.faults, f"seed {seed}\n" + "\n".join(summary.faults)


@pytest.mark.long
def test_every_write_of_every_command_fails_once() -> None:
    mounts = ["mount", "--help"] if os.geteuid() == 0 else ["unshare", "-rm", "mount", "-t", "tmpfs", "x", "/mnt"]
    if shutil.which(mounts[0]) is None or subprocess.run(mounts, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    swept = [sys.executable, "-m", "tests.fuzz.full_disks"]
    done = subprocess.run(swept, capture_output=True, text=True, cwd=cases.ROOT, timeout=3600, check=False)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.fixture(scope="module")
def sees(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_vision_language("llava", tmp_path_factory.mktemp("sees") / "model")


@pytest.mark.parametrize("kind", images.BAD)
def test_a_bad_image_is_one_error(kind: str, sees: Path, tmp_path: Path) -> None:
    parts = [images.BAD[kind](tmp_path)]
    images.write_rows(tmp_path, parts, sees)
    for name, arguments in images.commands(sees, parts).items():
        outcome = in_process(arguments, tmp_path)
        assert outcome.status == 2 and not outcome.fault, f"{name}: {outcome.status} {outcome.fault} {outcome.err}"
        assert outcome.err.count("error:") == 1, outcome.err


def test_too_many_image_tokens_are_one_error(sees: Path, tmp_path: Path) -> None:
    parts = [images.sound(tmp_path)] * 40  # of 16 tokens each, and the model has 512 positions
    images.write_rows(tmp_path, parts, sees)
    for arguments in ({**images.commands(sees, parts), "show": ["run", "chat.yaml"]}).values():
        outcome = in_process(arguments, tmp_path)
        assert outcome.status == 2 and not outcome.fault, outcome.err


def test_an_input_is_made_from_seed_and_number_alone() -> None:
    once, twice = (campaign.run(7, [5, 6]).counts for _ in range(2))
    assert once == twice and sum(once.values()) == 2


def test_the_independent_readings_tell_files_apart(tmp_path: Path) -> None:
    assert recipes.read("a: [1, 1.5, ~, true, yes, 0o17, '1']") == {"a": [1, 1.5, None, True, "yes", 15, "1"]}
    with pytest.raises(recipes.Unreadable):
        recipes.read("a: 1\na: 2\n")
    (tmp_path / "x.csv").write_text('text,label\n"a ""b"",\nc",good\n\nd,bad\n')
    assert tables.rows(tmp_path / "x.csv") == [{"text": 'a "b",\nc', "label": "good"}, {"text": "d", "label": "bad"}]
