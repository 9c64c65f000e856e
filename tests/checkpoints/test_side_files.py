"""Files copied beside merged weights: the directory's own, never what a link in it leads to elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from models import adapt, build, save_base

from peftlab.checkpoints.merge import OTHERS, copy_side_files, merge_checkpoint

SECRET = "not to be published"


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


def contents(directory: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.txt", "LICENSE", "modeling_x.py", "chat_template.jinja"])
def test_links_out_of_the_base_are_left_out_and_noted(tmp_path: Path, secret: Path, name: str) -> None:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(model, tmp_path / "adapter")
    (base / name).symlink_to(secret)
    report = merge_checkpoint(adapter, base, tmp_path / "merged")
    assert not (tmp_path / "merged" / name).exists() and SECRET not in contents(tmp_path / "merged")
    assert any(str(base / name) in note and str(secret) in note for note in report.notes)


def test_links_out_of_the_adapter(tmp_path: Path, secret: Path) -> None:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(model, tmp_path / "adapter")
    (adapter / "tokenizer_config.json").write_text("{}")
    (adapter / "tokenizer.json").symlink_to("../secret")
    (adapter / "additional_chat_templates").mkdir()
    (adapter / "additional_chat_templates" / "a.jinja").symlink_to(secret)
    (adapter / "additional_chat_templates" / "b.jinja").write_text("b")
    report = merge_checkpoint(adapter, base, tmp_path / "merged")
    merged = tmp_path / "merged"
    assert SECRET not in contents(merged) and len(report.notes) == 2
    assert (merged / "tokenizer_config.json").exists()
    assert [path.name for path in (merged / "additional_chat_templates").iterdir()] == ["b.jinja"]


def test_a_linked_directory_of_templates(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "key").write_text(SECRET)
    for name in ("base", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "additional_chat_templates").symlink_to(tmp_path / "elsewhere")
    copy_side_files(tmp_path / "base", None, tmp_path / "out")
    assert SECRET not in contents(tmp_path / "out")


def test_links_in_a_circle_or_to_nothing(tmp_path: Path) -> None:
    for name in ("base", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "tokenizer.json").symlink_to("tokenizer.json")
    (tmp_path / "base" / "vocab.txt").symlink_to("nowhere")
    (tmp_path / "base" / "LICENSE").write_text("MIT")
    (tmp_path / "base" / "NOTICE").symlink_to("LICENSE")
    assert copy_side_files(tmp_path / "base", None, tmp_path / "out") == []
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["LICENSE", "NOTICE"]


def test_the_licence_line_of_a_linked_card_is_not_read(tmp_path: Path, secret: Path) -> None:
    secret.write_text("---\nlicense: hidden\n---\n")
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    (base / "README.md").symlink_to(secret)
    merge_checkpoint(adapt(model, tmp_path / "adapter"), base, tmp_path / "merged")
    assert "hidden" not in (tmp_path / "merged" / "README.md").read_text()


def test_the_hubs_cache_links_to_its_own_contents(tmp_path: Path) -> None:
    """``models--x/snapshots/<revision>`` holds links into ``models--x/blobs``: those are the model's files."""
    model = build("llama")
    plain = save_base(model, tmp_path / "plain")
    adapter = adapt(model, tmp_path / "adapter")
    for name, text in {"tokenizer.json": "{}", "LICENSE": "MIT", "additional_chat_templates/x.jinja": "x"}.items():
        (plain / name).parent.mkdir(exist_ok=True)
        (plain / name).write_text(text)
    repository = tmp_path / "hub" / "models--me--x"
    snapshot = repository / "snapshots" / "0123"
    (repository / "blobs").mkdir(parents=True)
    for i, file in enumerate(path for path in sorted(plain.rglob("*")) if path.is_file()):
        shutil.copyfile(file, repository / "blobs" / str(i))
        link = snapshot / file.relative_to(plain)
        link.parent.mkdir(parents=True, exist_ok=True)
        depth = len(link.relative_to(repository).parts) - 1
        link.symlink_to(Path(*[".."] * depth) / "blobs" / str(i))
    (tmp_path / "linked").symlink_to(snapshot)
    for number, base in enumerate((plain, snapshot, tmp_path / "linked")):
        report = merge_checkpoint(adapter, base, tmp_path / f"merged{number}")
        assert report.notes == []
    first, *others = (
        {f.relative_to(out): f.read_bytes() for f in out.rglob("*") if f.is_file() and f.name != "merge.json"}
        for out in (tmp_path / f"merged{number}" for number in range(3))
    )
    assert all({k: v for k, v in other.items() if k.name != "README.md"}
               == {k: v for k, v in first.items() if k.name != "README.md"} for other in others)  # fmt: skip
    assert {"tokenizer.json", "LICENSE"} <= {path.name for path in first}
    assert any(Path("LICENSE").match(pattern) for pattern in OTHERS)
