"""Without a network: one clear message within seconds, what the cache holds, and results that stay."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import adapt, build, save_base
from safetensors.torch import save_file

from peftlab.references import locate
from tests.packages import MINILM

DEAD = "http://127.0.0.1:9"  # nothing listens there


def process(*arguments: str, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    around = os.environ | {"HF_HUB_OFFLINE": "0", "HF_ENDPOINT": DEAD, "HF_HOME": str(cache), "NO_PROXY": "*"} | env
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=around, capture_output=True, text=True, timeout=300, check=False)


def peftlab(*arguments: object, cache: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return process("-m", "peftlab", *map(str, arguments), cache=cache, **env)


def said(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "Retry" not in done.stderr, done.stderr
    return " ".join(done.stderr.split())


# Runs commands one after the other in one process, and prints the exit code and stderr of each.
PROGRAM = """
import contextlib, io, json, runpy, sys
for arguments in json.loads(sys.argv[1]):
    sys.argv, said, code = ["peftlab", *arguments], io.StringIO(), 0
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_module("peftlab", run_name="__main__")
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue()]))
"""


def test_a_model_that_is_nowhere(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "data.csv").write_text("text,label\n" + "good,yes\nbad,no\n" * 20)
    recipe.write_text(
        f"model: me/nothing\noutput_dir: {tmp_path / 'out'}\ntask: text/classification\n"
        f"data: {{path: {tmp_path / 'data.csv'}, text: [text], label: label, validation: 10}}\nmethod: {{name: lora}}\n"
    )
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 1, "target_modules": ["q"]})
    )
    pair = {"base_model.model.q.lora_A.weight": torch.ones(1, 2), "base_model.model.q.lora_B.weight": torch.ones(2, 1)}
    save_file(pair, tmp_path / "adapter" / "adapter_model.safetensors")
    commands = [
        ["inspect", "me/nothing"],
        ["merge", str(tmp_path / "adapter"), "--base", "me/nothing", "-o", str(tmp_path / "merged")],
        ["run", str(recipe)],
    ]
    done = process("-c", PROGRAM, json.dumps(commands), cache=tmp_path / "cache")
    assert done.returncode == 0 and "Retry" not in done.stderr, done.stderr
    for line, command in zip(done.stdout.splitlines(), commands, strict=True):
        code, text = json.loads(line)
        assert code == 2 and "Traceback" not in text and "Retry" not in text, (command, text)
        message = " ".join(text.split())
        assert "'me/nothing': no such directory, no such model in the hub's local cache" in message, command
        assert DEAD in message, command


def test_what_the_cache_holds_is_used(tmp_path: Path, minilm: str) -> None:
    repository = tmp_path / "cache" / "hub" / "models--me--encoder"
    shutil.copytree(locate(MINILM), repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    done = peftlab("inspect", "me/encoder", cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "Retry" not in done.stderr


def test_an_upload_without_a_network_leaves_the_result(tmp_path: Path) -> None:
    model = build("llama")
    base = save_base(model, tmp_path / "base")
    adapter = adapt(model, tmp_path / "adapter")
    out = tmp_path / "merged"
    arguments = ("merge", adapter, "--base", base, "-o", out, "--push-to-hub", "me/x")
    message = said(peftlab(*arguments, cache=tmp_path / "cache", HF_TOKEN="hf_x"))
    assert "is complete, but was not uploaded to 'me/x'" in message and DEAD in message
    assert (out / "model.safetensors").exists()


def test_a_revision_of_the_base_is_merged_into_that_revision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's main has other weights by now: the adapter's own revision counts, for merging, checking, undoing."""
    from peftlab.checkpoints.adapter import load_model, read_adapter, save_adapter
    from peftlab.checkpoints.merge import merge_checkpoint, unmerge_checkpoint
    from peftlab.pipelines.merge import verify_merge

    repository = tmp_path / "hub" / "models--me--llama"
    old, new = build("llama"), build("llama")
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(2)
    for name, model in (("0001", old), ("0002", new)):
        save_base(model, repository / "snapshots" / name)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0002")
    (repository / "refs" / "v1").write_text("0001")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = build("llama")
    adapt(model, tmp_path / "unused")
    adapter = save_adapter(model, tmp_path / "adapter", base="me/llama", revision="v1")
    assert read_adapter(adapter).revision == "v1"
    report = merge_checkpoint(adapter, None, tmp_path / "merged")
    assert report.revision == "v1"
    inputs = {"input_ids": torch.arange(3, 33).view(2, 15)}
    with torch.no_grad():
        expected = model(**inputs).logits
        for place in (tmp_path / "merged", adapter):
            found, _ = load_model(str(place), "AutoModelForCausalLM")
            torch.testing.assert_close(found.eval()(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
    check = verify_merge(adapter, "me/llama", tmp_path / "merged", [inputs])
    assert check.max_logit_difference < 1e-4
    unmerge_checkpoint(tmp_path / "merged", tmp_path / "again")
    again = (tmp_path / "again" / "model.safetensors").read_bytes()
    assert again == (repository / "snapshots" / "0001" / "model.safetensors").read_bytes()
