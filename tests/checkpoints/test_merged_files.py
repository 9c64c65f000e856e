"""What is in a merged directory beside its weights, the way back to its base, and its upload."""

from __future__ import annotations

import base64
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from fnmatch import fnmatch
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import transformers
from models import adapt, build, load, save_base, weight_files
from safetensors.torch import load_file, save_file

import peftlab
from peftlab.checkpoints.merge import OTHERS, copy_side_files, merge_checkpoint, unmerge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.errors import PeftlabError
from peftlab.files import TOKENIZER
from peftlab.pipelines.merge import run_merge, verify_merge

# Files copied beside merged weights: the directory's own, never what a link in it leads to elsewhere.

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
    copy_side_files(tmp_path / "base", [], tmp_path / "out")
    assert SECRET not in contents(tmp_path / "out")


def test_links_in_a_circle_or_to_nothing(tmp_path: Path) -> None:
    for name in ("base", "out"):
        (tmp_path / name).mkdir()
    (tmp_path / "base" / "tokenizer.json").symlink_to("tokenizer.json")
    (tmp_path / "base" / "vocab.txt").symlink_to("nowhere")
    (tmp_path / "base" / "LICENSE").write_text("MIT")
    (tmp_path / "base" / "NOTICE").symlink_to("LICENSE")
    assert copy_side_files(tmp_path / "base", [], tmp_path / "out") == []
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


def test_every_file_of_a_tokenizer_of_transformers_is_copied() -> None:
    place = Path(transformers.__file__).parent / "models"
    names = {"tekken.json", "tokenizer.model", "tokenizer.json", "chat_template.jinja"}
    for source in place.glob("*/tokenization*.py"):
        for found in re.findall(r"VOCAB_FILES_NAMES = (\{.*?\})", source.read_text(), re.DOTALL):
            names |= set(re.findall(r':\s*"([\w.]+)"', found))
    assert len(names) > 20
    assert not [name for name in names if not any(fnmatch(name, pattern) for pattern in TOKENIZER)]


def test_the_tokenizer_of_combined_adapters_is_the_first_ones(tmp_path: Path) -> None:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    first = adapt(model, tmp_path / "first")
    second = Path(shutil.copytree(first, tmp_path / "second"))
    for place, text in ((base, "base"), (first, "first"), (second, "first")):
        (place / "tokenizer_config.json").write_text("{}")
        (place / "tokenizer.json").write_text(text)
    merged = run_merge([f"{first}:0.5", str(second)], str(base), tmp_path / "one", verify=False)
    assert (tmp_path / "one" / "tokenizer.json").read_text() == "first" and merged.report.notes == []
    (second / "tokenizer.json").write_text("second")
    merged = run_merge([f"{first}:0.5", str(second)], str(base), tmp_path / "two", verify=False)
    assert merged.report.notes == [f"the adapters have different tokenizers; that of {first} was copied"]
    (second / "gated_lora.json").write_text("{}")
    with pytest.raises(PeftlabError, match="a gated LoRA"):
        run_merge([f"{second}:1.0"], str(base), tmp_path / "gated", verify=False)


def test_one_weight_file_has_the_name_that_is_found_without_an_index(tmp_path: Path) -> None:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    (base / "model.safetensors").rename(base / "model-00001-of-00001.safetensors")
    weights = dict.fromkeys(load_file(base / "model-00001-of-00001.safetensors"), "model-00001-of-00001.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    merge_checkpoint(adapt(model, tmp_path / "adapter"), base, tmp_path / "merged")
    load(type(model), tmp_path / "merged")
    # Where both are there, transformers reads the single file.
    model = load(type(model), tmp_path / "merged")
    with torch.no_grad():
        model.get_parameter("model.norm.weight").fill_(3)
    save_file({key: model.state_dict()[key].clone() for key in weights}, base / "model.safetensors", {"format": "pt"})
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "both")
    for place in ("base", "both"):
        assert load(type(model), tmp_path / place).get_parameter("model.norm.weight").eq(3).all()


def test_settings_of_generation_that_the_base_has_in_its_configuration(tmp_path: Path) -> None:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    (base / "generation_config.json").unlink()
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "do_sample": True, "temperature": 0.7, "max_length": 50}))
    merge_checkpoint(adapt(model, tmp_path / "adapter"), base, tmp_path / "merged")
    settings = load(type(model), tmp_path / "merged").generation_config
    assert (settings.do_sample, settings.temperature, settings.max_length) == (True, 0.7, 50)


def test_logits_that_are_no_numbers_are_no_match(tmp_path: Path) -> None:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(model, tmp_path / "adapter")
    merge_checkpoint(adapter, base, tmp_path / "merged")
    file = tmp_path / "merged" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"].fill_(float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(PeftlabError, match="the merged model gives logits that are NaN"):
        verify_merge(adapter, str(base), tmp_path / "merged", [{"input_ids": torch.arange(5)[None]}])


# Unmerging gives W0 back bit for bit, in memory a hundred times over and on disk.


@pytest.mark.parametrize("family", ["bert", "llama", "gpt2", "mixtral"])
def test_a_hundred_merges_are_undone_in_bf16(tmp_path: Path, family: str) -> None:
    base = save_base(build(family).to(torch.bfloat16), tmp_path / "base")
    model = load(type(build(family)), base, torch.bfloat16)
    fields = {"target_parameters": ["experts.down_proj"]} if family == "mixtral" else {}
    if family == "llama":
        fields = {"target_modules": ["embed_tokens", "q_proj"]}
    adapt(model, tmp_path / "adapter", **fields)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = list(peftlab.trainable_parameters(model))
    tied = model.config.tie_word_embeddings
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        answer = model(ids).logits
        for _ in range(100):
            peftlab.merge(model, keep=True)
            assert not any("lora" in name for name in model.state_dict())
            peftlab.unmerge(model)
        assert torch.equal(model(ids).logits, answer)
        merged = peftlab.merge(model, keep=True)(ids).logits
    torch.testing.assert_close(merged, answer, rtol=0.1, atol=0.1)
    peftlab.unmerge(model)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[name], before[name]) for name in before)
    assert list(peftlab.trainable_parameters(model)) == trained
    assert model.config.tie_word_embeddings == tied


def test_unmerging_what_was_not_kept() -> None:
    model = build("bert")
    with pytest.raises(PeftlabError, match="nothing to unmerge"):
        peftlab.unmerge(model)
    peftlab.inject_lora(model)
    peftlab.merge(model)
    with pytest.raises(PeftlabError, match="nothing to unmerge"):
        peftlab.unmerge(model)


def test_unmerging_on_disk(tmp_path: Path) -> None:
    base = save_base(build("llama").to(torch.bfloat16), tmp_path / "base", max_shard_size="20KB")
    model = load(type(build("llama")), base, torch.bfloat16)
    merge_checkpoint(adapt(model, tmp_path / "adapter"), base, tmp_path / "merged")
    assert weight_files(tmp_path / "merged") != weight_files(base)
    unmerge_checkpoint(tmp_path / "merged", tmp_path / "back")
    assert weight_files(tmp_path / "back") == weight_files(base)
    other = save_base(build("llama", hidden_size=16).to(torch.bfloat16), tmp_path / "other")
    with pytest.raises(PeftlabError, match="was not made of"):
        unmerge_checkpoint(tmp_path / "merged", tmp_path / "no", base=other)
    assert not (tmp_path / "no").exists()
    with pytest.raises(PeftlabError, match=r"merge\.json"):
        unmerge_checkpoint(base, tmp_path / "no")
    merge_checkpoint(tmp_path / "adapter", base, tmp_path / "half", MergeOptions(dtype=torch.float16))
    changed = load(type(build("llama")), base, torch.bfloat16)
    with torch.no_grad():
        changed.get_parameter("model.norm.weight").fill_(3)
    same_sizes = save_base(changed, tmp_path / "same-sizes")
    with pytest.raises(PeftlabError, match="was not made of"):
        unmerge_checkpoint(tmp_path / "half", tmp_path / "no", base=same_sizes)
    unmerge_checkpoint(tmp_path / "half", tmp_path / "again")
    assert weight_files(tmp_path / "again") == weight_files(base)


def test_unmerging_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    base = save_base(build("mixtral"), tmp_path / "base")
    model = load(type(build("mixtral")), base)
    adapter = adapt(model, tmp_path / "adapter", method="lora", target_parameters=["experts.down_proj"])
    merge_checkpoint(adapter, base, tmp_path / "merged")
    unmerge_checkpoint(tmp_path / "merged", tmp_path / "back")
    assert weight_files(tmp_path / "back") == weight_files(base)


def test_a_full_disk_and_a_base_with_files_of_its_owners(tmp_path: Path) -> None:
    """The error names the output; a file of a name that peftlab never writes is copied, and never removed again."""
    base = save_base(build("llama").to(torch.bfloat16), tmp_path / "base")
    (base / "thesis.tex").write_text("x" * 100_000)
    model = load(type(build("llama")), base, torch.bfloat16)
    merge_checkpoint(adapt(model, tmp_path / "adapter"), base, tmp_path / "merged")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, limits[1]))
    try:
        with pytest.raises(PeftlabError, match=r"back: cannot be written \(File too large\); nothing was left behind"):
            unmerge_checkpoint(tmp_path / "merged", tmp_path / "back")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    unmerge_checkpoint(tmp_path / "merged", tmp_path / "back")
    assert (tmp_path / "back" / "thesis.tex").exists()
    with pytest.raises(PeftlabError, match=r"contains thesis\.tex, which peftlab did not write"):
        unmerge_checkpoint(tmp_path / "merged", tmp_path / "back", overwrite=True)


# ``--push-to-hub`` against a server that speaks the hub's protocol: what arrives is the merged directory.


class Hub(ThreadingHTTPServer):
    """Remembers the repositories made and the files committed; ``refuses`` makes commits fail."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, object]] = []
        self.files: dict[str, bytes] = {}
        self.refuses = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.url}/me/merged", "id": "me/merged"})
        elif self.path.endswith("/preupload/main"):
            files = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": f, "uploadMode": "regular", "shouldIgnore": False} for f in files]})
        elif self.path.endswith("/commit/main") and self.server.refuses:
            self.answer({"error": "no room left"}, 403)
        elif self.path.endswith("/commit/main"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            self.answer({"success": True, "commitOid": "0" * 40, "commitUrl": f"{self.server.url}/me/merged/commit/0"})
        else:
            self.answer({"errors": [], "warnings": []})

    def do_GET(self) -> None:
        self.answer({"id": "me/merged", "sha": "0" * 40, "siblings": []})

    def answer(self, content: dict[str, object], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def push(hub: Hub, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(model, tmp_path / "adapter", method="lora", target_modules="all-linear")
    command = [sys.executable, "-m", "peftlab", "merge", adapter, "--base", base, "-o", tmp_path / "merged"]
    command += ["--push-to-hub", "me/merged"]
    env = os.environ | {"HF_ENDPOINT": hub.url, "HF_TOKEN": "hf_x", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
    return subprocess.run([*map(str, command)], env=env, capture_output=True, text=True, timeout=120, check=False)


def test_what_arrives_is_the_directory(hub: Hub, tmp_path: Path) -> None:
    done = push(hub, tmp_path)
    assert done.returncode == 0, done.stderr
    made = hub.created[0]
    assert made["name"] == "merged" and (made.get("private") or made.get("visibility") == "private"), made
    merged = tmp_path / "merged"
    assert hub.files == {p.relative_to(merged).as_posix(): p.read_bytes() for p in merged.rglob("*") if p.is_file()}
    assert "model.safetensors" in hub.files


def test_a_refused_upload_leaves_the_result_and_says_so(hub: Hub, tmp_path: Path) -> None:
    hub.refuses = True
    done = push(hub, tmp_path)
    assert done.returncode == 2 and "is complete, but was not uploaded to 'me/merged'" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr and (tmp_path / "merged" / "model.safetensors").exists()
