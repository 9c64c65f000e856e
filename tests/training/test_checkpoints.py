from __future__ import annotations

import zipfile

import pytest
import tiny
import torch
from accelerate import Accelerator

from peftlab.errors import PeftlabError
from peftlab.methods.injection import trainable_parameters
from peftlab.training import state
from peftlab.training.state import Progress, load_checkpoint, read_checkpoint, save_checkpoint


@pytest.fixture()
def parts(still, rows, tmp_path):
    """An injected model and its optimiser after one step."""
    _, problem = tiny.prepare(tiny.recipe(still, rows, tmp_path))
    optimiser = torch.optim.AdamW(trainable_parameters(problem.model).values(), lr=0.1, fused=True)
    step(problem, optimiser)
    return Accelerator(), problem.model, optimiser


def step(problem, optimiser):
    for parameter in trainable_parameters(problem.model).values():
        parameter.grad = torch.randn_like(parameter)
    optimiser.step()


def save(directory, parts, step, keep=2, best=0):
    save_checkpoint(directory, *parts, Progress(step=step, best_step=best), keep)


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def test_everything_comes_back(parts, tmp_path):
    accelerator, model, optimiser = parts
    save(tmp_path, parts, 1)
    before = read_checkpoint(tmp_path / "step-00000001.pt")
    expected = torch.rand(3)
    for parameter in trainable_parameters(model).values():
        parameter.data.zero_()
        parameter.grad = torch.ones_like(parameter)
    optimiser.step()
    assert load_checkpoint(tmp_path, accelerator, model, optimiser) == Progress(step=1)
    assert torch.equal(torch.rand(3), expected)
    save(tmp_path, parts, 2)
    after = read_checkpoint(tmp_path / "step-00000002.pt")
    for key in ("adapter", "optimiser"):
        tiny.assert_same(before[key], after[key], key)


def test_the_newest_and_the_best_are_kept(parts, tmp_path):
    for number in range(1, 6):
        save(tmp_path, parts, number, best=min(number, 2))
    assert names(tmp_path) == [f"step-0000000{number}.pt" for number in (2, 4, 5)]
    save(tmp_path, parts, 6, keep=1, best=6)
    assert names(tmp_path) == ["step-00000006.pt"]


@pytest.mark.parametrize("damage", ["cut", "empty", "changed", "other file"])
def test_a_damaged_checkpoint_is_passed_over_aloud(damage, parts, tmp_path, capsys):
    accelerator, model, optimiser = parts
    for number in (1, 2):
        save(tmp_path, parts, number)
    newest = tmp_path / "step-00000002.pt"
    content = newest.read_bytes()
    (tmp_path / ".peftlab-tmp-1-step-00000003.pt").write_bytes(content[:100])
    bad = {"cut": content[: len(content) // 2], "empty": b"", "other file": b"not a checkpoint"}
    newest.write_bytes(bad.get(damage, content[:2000] + bytes([content[2000] ^ 1]) + content[2001:]))
    assert load_checkpoint(tmp_path, accelerator, model, optimiser).step == 1
    said = capsys.readouterr().out
    assert f"skipped {newest}: damaged checkpoint (" in said
    assert "resuming from step-00000001.pt" in said
    assert names(tmp_path) == ["step-00000001.pt", "step-00000002.pt.damaged"]
    save(tmp_path, parts, 2, keep=1)
    assert names(tmp_path) == ["step-00000002.pt", "step-00000002.pt.damaged"]


def test_a_checkpoint_with_other_contents_is_passed_over(parts, tmp_path, capsys):
    """Whoever rewrites a checkpoint makes valid checksums, too."""
    for number in (1, 2, 3):
        save(tmp_path, parts, number, keep=3)
    second, third = (tmp_path / f"step-0000000{number}.pt" for number in (2, 3))
    changed = torch.load(third, weights_only=True)
    changed["adapter"] = {name: tensor + 1 for name, tensor in changed["adapter"].items()}
    torch.save(changed, third)  # which writes no digest
    torch.save({**changed, "progress": 1}, tmp_path / "other.pt")
    with zipfile.ZipFile(tmp_path / "other.pt", "a") as other, zipfile.ZipFile(second) as archive:
        name = archive.namelist()[-1]
        other.writestr(f"other/{name.rpartition('/')[2]}", archive.read(name))
    (tmp_path / "other.pt").rename(second)
    assert load_checkpoint(tmp_path, *parts).step == 1
    said = capsys.readouterr().out
    assert f"{second}: damaged checkpoint (its contents were changed after it was written)" in said
    assert f"{third}: damaged checkpoint (it has no peftlab-digest: written by another program)" in said


def test_nothing_to_resume_from(parts, tmp_path):
    with pytest.raises(PeftlabError, match="no checkpoint to resume from"):
        load_checkpoint(tmp_path, *parts)
    save(tmp_path, parts, 1)
    (tmp_path / "step-00000001.pt").write_bytes(b"")
    with pytest.raises(
        PeftlabError,
        match=r"no checkpoint to resume from \(none of its .*--overwrite` starts again\n.*step-00000001.pt: damaged",
    ):
        load_checkpoint(tmp_path, *parts)


def test_a_checkpoint_of_other_parameters(parts, tmp_path):
    accelerator, model, optimiser = parts
    save(tmp_path, parts, 1)
    model.classifier.bias.requires_grad_(False)
    with pytest.raises(PeftlabError, match="other parameters than the recipe trains"):
        load_checkpoint(tmp_path, accelerator, model, optimiser)


def test_a_checkpoint_of_more_processes(parts, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(state, "gather_object", lambda states: states * 2)
        save(tmp_path, parts, 1)
    with pytest.raises(PeftlabError, match="was written by 2 processes; resume with the same number, not 1"):
        load_checkpoint(tmp_path, *parts)
