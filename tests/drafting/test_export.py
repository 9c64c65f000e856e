"""Exported drafts: what is written is what was trained, and a released engine loads it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from draft_models import medusa, tiny
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from peftlab.drafting.export import CONSUMERS, _transformers_example, export_draft
from peftlab.drafting.heads import read_medusa, write_medusa
from peftlab.drafting.target import truncate
from peftlab.errors import PeftlabError
from peftlab.models.load import load_base

SPECULATORS = "0.9.0"


@pytest.fixture(scope="module")
def draft(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plain draft directory: two of the target's layers."""
    place = tmp_path_factory.mktemp("draft") / "merged"
    truncate(load_base(str(stories), "AutoModelForCausalLM")[0], [0, 4]).save_pretrained(place)
    AutoTokenizer.from_pretrained(stories).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def registered(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The model types that the speculators package registers, read from its wheel without installing it."""
    place = tmp_path_factory.mktemp("speculators")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--retries", "0", "--timeout", "10"]
    command = [*pip, "--dest", str(place), f"speculators=={SPECULATORS}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"speculators {SPECULATORS} cannot be downloaded: {' '.join(done.stderr.split())[-200:]}")
    (wheel,) = place.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        configs = [name for name in archive.namelist() if re.fullmatch(r"speculators/models/\w+/config\.py", name)]
        sources = [archive.read(name).decode() for name in configs]
    return {kind for source in sources for kind in re.findall(r"\.register\(\"(\w+)\"\)", source)}


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_plain_directories(draft: Path, stories: Path, tmp_path: Path, consumer: str) -> None:
    exported = export_draft(draft, tmp_path / "out", consumer, str(stories), gamma=3)
    assert exported.max_logit_difference == 0.0
    written = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert written.config.vocab_size == 512 and written.config.num_hidden_layers == 2
    if consumer == "vllm":
        program, verb, served, option, method = shlex.split(exported.command)
        assert (program, verb, served, option) == ("vllm", "serve", str(stories), "--speculative-config")
        expected = {"method": "draft_model", "model": str(tmp_path / "out"), "num_speculative_tokens": 3}
        assert json.loads(method) == expected
    if consumer == "sglang":
        _, _, program, *options = shlex.split(exported.command)
        assert program == "sglang.launch_server"
        assert dict(zip(options[::2], options[1::2], strict=True)) == {
            "--model-path": str(stories),
            "--speculative-algorithm": "STANDALONE",
            "--speculative-draft-model-path": str(tmp_path / "out"),
            "--speculative-num-steps": "3",
            "--speculative-eagle-topk": "1",
            "--speculative-num-draft-tokens": "4",
        }


def test_a_gguf_file(draft: Path, stories: Path, tmp_path: Path) -> None:
    """For llama.cpp: one file, read back by transformers' own reader, and the command that serves it."""
    exported = export_draft(draft, tmp_path / "draft.gguf", "llama.cpp", str(stories), gamma=3)
    assert exported.max_logit_difference == 0.0
    written = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="draft.gguf").eval()
    model = AutoModelForCausalLM.from_pretrained(draft).eval()
    ids = torch.arange(1, 17)[None]
    assert torch.equal(written(ids).logits, model(ids).logits)
    words = shlex.split(exported.command)
    options = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "llama-server" and options["--spec-draft-model"] == str(tmp_path / "draft.gguf")
    assert options["--spec-type"] == "draft-simple" and options["--spec-draft-n-max"] == "3"
    with pytest.raises(PeftlabError, match=r"-o out\.gguf"):
        export_draft(draft, tmp_path / "out", "llama.cpp", str(stories))
    with pytest.raises(PeftlabError, match="exists"):
        export_draft(draft, tmp_path / "draft.gguf", "llama.cpp", str(stories))


@pytest.mark.parametrize("consumer", CONSUMERS)
def test_a_speculators_type_is_one_that_speculators_registers(
    draft: Path, stories: Path, tmp_path: Path, consumer: str, registered: set[str]
) -> None:
    """``independent``, which drafts once were, is none; what is loaded as a plain directory names no type at all."""
    assert {"eagle3", "dflash", "mtp"} <= registered and "independent" not in registered
    export_draft(draft, tmp_path / "out", consumer, str(stories))
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "speculators_config" not in written or written.get("speculators_model_type") in registered


def test_the_lines_for_transformers_run_anywhere(
    draft: Path, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From references relative to the directory in which they were printed."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    target = os.path.relpath(stories)
    lines = export_draft(draft, "out", "transformers", target).command
    monkeypatch.chdir(tmp_path)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(lines, {})
    model = AutoModelForCausalLM.from_pretrained(stories).eval()
    tokenizer = AutoTokenizer.from_pretrained(stories)
    inputs = tokenizer("Once upon a time", return_tensors="pt")
    plain = tokenizer.decode(model.generate(**inputs, max_new_tokens=32, do_sample=False)[0])
    assert said.getvalue().strip() == plain.strip()


def test_a_model_in_a_package_is_named_as_transformers_loads_it(smollm2: str, draft: Path) -> None:
    lines = _transformers_example(smollm2, Path("out"), 4)
    found = re.search(r"target = AutoModelForCausalLM.from_pretrained\('(.+)', gguf_file='(.+)'\)", lines)
    assert found is not None and "package:" not in lines
    assert AutoConfig.from_pretrained(found[1], gguf_file=found[2]).model_type == "llama"
    with pytest.raises(PeftlabError, match="is a GGUF file, which vLLM without a plugin does not load"):
        export_draft(draft, "out", "vllm", smollm2)


def test_what_a_consumer_cannot_load_is_said(draft: Path, stories: Path, tmp_path: Path) -> None:
    out, run = tmp_path / "out", tmp_path / "run"
    model = medusa(load_base(str(stories), "AutoModelForCausalLM")[0], heads=2)
    write_medusa(model.heads, run / "heads")
    bare = tmp_path / "bare"
    bare.mkdir()
    for source, consumer, message in (
        (run, "vllm", "contains Medusa heads, which no released engine loads"),
        (run / "heads", "transformers", "contains Medusa heads, which no released engine loads"),
        (bare, "vllm", "contains no plain model directory"),
        (tmp_path / "bear", "vllm", r"bear: no such directory \(did you mean 'bare'\?\)"),
        (
            draft,
            "vllm-medusa",
            r"one of transformers, vllm, sglang, speculators, llama.cpp, stitched \(did you mean 'vllm'\?\)",
        ),
        (draft, "speculators", "is a model of its own; speculators is for eagle3, dflash and own mtp drafts"),
    ):
        with pytest.raises(PeftlabError, match=message):
            export_draft(source, out, consumer, str(stories))
    other = tiny(0, vocab=514)
    other.save_pretrained(tmp_path / "padded")
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "padded")
    for consumer in ("transformers", "sglang"):
        with pytest.raises(PeftlabError, match=r"vocab_size is 514, the target's 512.*resize_token_embeddings\(512\)"):
            export_draft(tmp_path / "padded", out, consumer, str(stories))
    assert not out.exists()


def speculative(command: str) -> dict[str, object]:
    return json.loads(shlex.split(command)[-1])


def test_vllm_drafts_with_other_tokens(draft: Path, stories: Path, tmp_path: Path) -> None:
    """Tokens are matched by their text, a space by any of its signs; the draft's tokenizer is in its directory."""
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tiny(0, vocab=514).save_pretrained(tmp_path / "padded")
    tokenizer.save_pretrained(tmp_path / "padded")
    done = export_draft(tmp_path / "padded", tmp_path / "out", "vllm", str(stories))
    assert speculative(done.command)["use_heterogeneous_vocab"] is True
    assert "drafts the 512 common ones, greedily" in done.notes[0] and (tmp_path / "out" / "tokenizer.json").exists()
    words = ["<unk>", "\u0120the", "\u0120a", "zzz", "yyy"]
    other = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<unk>")),
        unk_token="<unk>", eos_token="<unk>",
    )  # fmt: skip
    tiny(0, vocab=5).save_pretrained(tmp_path / "words")
    other.save_pretrained(tmp_path / "words")
    assert {"\u2581the", "\u2581a"} <= tokenizer.get_vocab().keys()
    done = export_draft(tmp_path / "words", tmp_path / "words out", "vllm", str(stories))
    assert "drafts the 3 common ones" in done.notes[0] and "fewer than 100" in done.notes[1]
    for consumer in ("transformers", "sglang"):
        with pytest.raises(PeftlabError, match="its tokenizer is not the target's"):
            export_draft(tmp_path / "words", tmp_path / "x", consumer, str(stories))
    strange = Tokenizer(models.WordLevel({"zzz": 0, "yyy": 1}, "zzz"))
    PreTrainedTokenizerFast(tokenizer_object=strange, unk_token="zzz", eos_token="yyy").save_pretrained(
        tmp_path / "words"
    )
    with pytest.raises(PeftlabError, match="has no token in common"):
        export_draft(tmp_path / "words", tmp_path / "x", "vllm", str(stories))
    assert not (tmp_path / "x").exists()
    assert "use_heterogeneous_vocab" not in speculative(
        export_draft(draft, tmp_path / "same", "vllm", str(stories)).command
    )


def test_heads_round_trip_key_for_key(tmp_path: Path) -> None:
    model = medusa(tiny(0), heads=2, bias=True)
    with torch.no_grad():
        model.heads.blocks[1].layers[0].bias.fill_(0.5)
    back = read_medusa(write_medusa(model.heads, tmp_path / "m"))
    hidden = torch.randn(3, 16)
    torch.testing.assert_close(back(hidden), model.heads(hidden))
    blocks = {f"blocks.{i}.layers.0.{kind}" for i in range(2) for kind in ("weight", "bias")}
    assert set(back.state_dict()) == blocks | {f"lm_heads.{i}.weight" for i in range(2)}
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    sizes = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "hidden_size": 16, "vocab_size": 40}
    assert sizes.items() <= config.items()
    config["num_heads"] = 3
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(PeftlabError, match="do not fit its configuration"):
        read_medusa(tmp_path / "m")
