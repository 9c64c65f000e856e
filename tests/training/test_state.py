"""Checkpoints, and runs that are resumed from them bit for bit."""

from __future__ import annotations

import shutil
import signal
import zipfile
from pathlib import Path

import pytest
import tiny
import torch
from accelerate import Accelerator
from transformers import ResNetConfig, ResNetForImageClassification

import peftlab
from peftlab.errors import PeftlabError
from peftlab.methods.config import FullConfig
from peftlab.methods.inject import trainable_parameters
from peftlab.pipelines.directory import launch
from peftlab.training import state
from peftlab.training.state import Progress, load_checkpoint, read_checkpoint, save_checkpoint
from tests.forked import python, two


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


def test_running_statistics_come_back(tmp_path):
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3)
    model = peftlab.inject(ResNetForImageClassification(config), FullConfig()).train()
    optimiser = torch.optim.AdamW(trainable_parameters(model).values(), lr=0.1)
    model(torch.randn(4, 3, 32, 32)).logits.sum().backward()
    optimiser.step()
    expected = {name: buffer.clone() for name, buffer in model.named_buffers()}
    accelerator = Accelerator()
    save(tmp_path, (accelerator, model, optimiser), 1)
    model(torch.randn(4, 3, 32, 32))
    load_checkpoint(tmp_path, accelerator, model, optimiser)
    assert all(torch.equal(buffer, expected[name]) for name, buffer in model.named_buffers())


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


# --- N steps, a kill, a resume and M steps are N + M steps, bit for bit.
KILLED, KILLED_AT = (Path(__file__).with_name(f"{name}.py") for name in ("killed", "killed_at"))


@pytest.mark.slow
def test_killed_and_resumed_for_every_method(model, rows, tmp_path):
    """Killed in step 8 of 12, in the second of three parts of its batch; epochs end at 4, 8 and 12."""
    options = {"epochs": 3, "gradient_accumulation_steps": 3, "save_every": 3}
    files = []
    for method in tiny.METHODS:
        (tmp_path / method).mkdir()
        values = tiny.recipe(model, rows, tmp_path / method / "run", method, **options)
        files.append(tiny.write_recipe(values, tmp_path / method / "recipe.yaml"))
    done = python(KILLED, *files, seconds=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for method in tiny.METHODS:
        tiny.run(tiny.recipe(model, rows, tmp_path / method / "whole", method, **options))
        tiny.assert_same_run(tmp_path / method / "run", tmp_path / method / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop(number, model, rows, tmp_path):
    options = {"max_steps": 12, "eval_every": 12, "save_every": 5}
    file = tiny.write_recipe(tiny.recipe(model, rows, tmp_path / "run", **options), tmp_path / "recipe.yaml")
    stopped = python(KILLED_AT, "run", file, KILLED="saved 5", SIGNAL=number.name)
    assert stopped.returncode == 128 + number, stopped.stderr
    assert max((tmp_path / "run" / "checkpoints").glob("*.pt")).name < "step-00000012.pt"
    letters = "".join(stopped.stderr.replace("│", "").split())  # the message as it is, however it was wrapped
    assert f"stoppedby{number.name}afterstep" in letters
    assert f"continuewith`peftlabresume{tmp_path}/run`" in letters
    if number == signal.SIGINT:
        return
    done = python("-m", "peftlab", "resume", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    tiny.run(tiny.recipe(model, rows, tmp_path / "whole", **options))
    tiny.assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_the_seconds_of_a_resumed_run_have_those_of_earlier_training(model, rows, tmp_path, monkeypatch):
    values = tiny.recipe(model, rows, tmp_path / "run", save_every=2)
    with tiny.stopped_after(4):
        tiny.run(values)
    read = state.read_checkpoint

    def slower(path):
        found = read(path)
        return {**found, "progress": {**found["progress"], "seconds": 1000.0}}

    monkeypatch.setattr(state, "read_checkpoint", slower)
    found = tiny.run(values, resume=True)
    assert 1000 < found["train_seconds"] <= found["total_seconds"] + 0.1 < 1100


def test_a_finished_run_resumes_to_itself(model, rows, tmp_path, capsys):
    values = tiny.recipe(model, rows, tmp_path / "run")
    first = tiny.run(values)
    before = {
        name: (tmp_path / "run" / name).read_bytes() for name in ("metrics.jsonl", "adapter/adapter_model.safetensors")
    }
    again = tiny.run(values, resume=True)
    assert "nothing left to train after step 8;" in capsys.readouterr().out
    assert again["metrics"] == first["metrics"] and again["steps"] == first["steps"]
    assert (again["train_seconds"], again["total_seconds"]) == (first["train_seconds"], first["total_seconds"])
    for name, content in before.items():
        assert (tmp_path / "run" / name).read_bytes() == content


def test_resuming_may_train_longer_and_change_no_step_already_taken(model, tmp_path):
    rows = tiny.save_rows(tmp_path / "rows.csv")
    values = tiny.recipe(model, rows, tmp_path / "run", max_steps=2, eval_every=1)
    tiny.run(values)
    longer = {**values, "train": {**values["train"], "max_steps": 4}}
    before = (tmp_path / "run" / "recipe.yaml").read_bytes()
    for section, changed, words in (
        ("train", {"lr": 0.5}, r"train\.lr [0-9.]+, now 0\.5"),
        ("train", {"seed": 7}, "train.seed 3, now 7"),
        ("method", {"lora_alpha": 64}, r"method\.lora_alpha [0-9.]+, now 64"),
        ("method", {"r": 4}, "method.r 2, now 4"),
    ):
        other = {**longer, section: {**longer[section], **changed}}
        with pytest.raises(PeftlabError, match=f"run was begun by another recipe: {words}"):
            tiny.run(other, resume=True)
    assert (tmp_path / "run" / "recipe.yaml").read_bytes() == before
    assert tiny.run(longer, resume=True)["steps"] == 4
    rows.write_text(rows.read_text().replace("good", "fine"))
    with pytest.raises(PeftlabError, match="the examples are others"):
        tiny.run({**longer, "train": {**longer["train"], "max_steps": 6}}, resume=True)


# --- Runs that torchrun starts again after one of their processes has died.
SETTINGS = {"save_every": 2, "eval_every": 6, "max_steps": 6}


@pytest.fixture
def files(model, rows, tmp_path):
    """The recipes of the same run in two directories."""
    return [
        tiny.write_recipe(tiny.recipe(model, rows, tmp_path / name, **SETTINGS), tmp_path / f"{name}.yaml")
        for name in ("whole", "again")
    ]


def test_a_restarted_run_continues(files, tmp_path):
    """torchrun's variables, but not torchrun: two processes, of which one is killed after four steps of six."""
    whole, again = files
    assert [each.returncode for each in two("-m", "peftlab", "run", whole)] == [0, 0]
    job = {"KILLED": "saved 4", "TORCHELASTIC_RUN_ID": "job-7"}
    killed = two(KILLED_AT, "run", again, **job, TORCHELASTIC_RESTART_COUNT="0")
    assert killed[1].returncode == -9, killed[1].stderr[-3000:]
    assert not (tmp_path / "again" / "results.json").exists()
    ended = two(KILLED_AT, "run", again, **job, TORCHELASTIC_RESTART_COUNT="1")
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr[-3000:] + ended[1].stderr[-3000:]
    tiny.assert_same_run(tmp_path / "again", tmp_path / "whole")


@pytest.mark.long
def test_torchrun_restarts_a_run(files, tmp_path, monkeypatch):
    whole, again = files
    assert [each.returncode for each in two("-m", "peftlab", "run", whole)] == [0, 0]
    monkeypatch.setenv("KILLED", "saved 4")
    options = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2")
    ended = tiny.command(*options, KILLED_AT, "run", again, timeout=600)
    assert ended.returncode == 0, ended.stderr[-6000:]
    assert ended.stdout.count("trainable params") == 2  # it was started twice
    tiny.assert_same_run(tmp_path / "again", tmp_path / "whole")


def test_only_the_same_launch_continues(files, monkeypatch, tmp_path):
    """A run of another launch, or of none, is refused, restarted or not; without checkpoints it starts again."""
    _, file = files
    with tiny.stopped_after(3):
        peftlab.run(file)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    with pytest.raises(PeftlabError, match="again exists already"):
        peftlab.run(file)
    with tiny.stopped_after(3):
        peftlab.run(file, overwrite=True)
    shutil.rmtree(tmp_path / "again" / "checkpoints")
    with tiny.stopped_after(2):
        peftlab.run(file)
    with pytest.raises(PeftlabError, match="again exists already"):  # another recipe of the same launch
        peftlab.run(file, ["train.lr=1e-3"])
    assert peftlab.run(file).steps == 6
    with pytest.raises(PeftlabError, match="again exists already"):  # it has ended
        peftlab.run(file)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-8")
    with pytest.raises(PeftlabError, match="again exists already"):
        peftlab.run(file)


def test_a_launch_without_a_name_is_known_by_its_logs(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    for attempt in (0, 1):
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"/logs/torchelastic_ab/none_cd/attempt_{attempt}/3/error.json")
        assert launch() == "none_cd"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", "")
    assert launch() is None
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert launch() is None
