"""Files of block drafts: each layout is read as its writers mean it, and written as each engine reads it."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

from peftlab.checkpoints.gguf import read_gguf
from peftlab.drafting.base import load_pair
from peftlab.drafting.block import DFlash, read_dflash, tensors_of, write_dflash
from peftlab.drafting.block_files import BlockShape, flat_layout, read_block_shape, speculators_layout
from peftlab.drafting.export import export_draft
from peftlab.drafting.state_network import WEIGHTS, TargetWithNetwork, target_states
from peftlab.drafting.target import head_weight, input_embedding
from peftlab.errors import PeftlabError
from tests.eagle_models import dflash

FEATURES = (1, 3, 4)
SIZES: dict[str, Any] = {"features": FEATURES, "block_size": 5, "mask_token": 511, "limit": 256}


@pytest.fixture(scope="module")
def target(stories: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(stories).requires_grad_(False).eval()


@pytest.fixture
def draft(stories: Path, target: Any, tmp_path: Path) -> Any:
    """Writes a draft with random weights, and returns its directory and the network."""

    def write(tokens: torch.Tensor | None = None, **sizes: Any) -> tuple[Path, DFlash]:
        network = dflash(target, tokens, **SIZES | sizes)
        with torch.no_grad():
            for name, parameter in network.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
        place = tmp_path / f"draft{len(list(tmp_path.iterdir()))}"
        place.mkdir()
        write_dflash(network, place, target=str(stories), architecture="LlamaForCausalLM")
        return place, network

    return write


def change(place: Path, **values: object) -> None:
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({k: v for k, v in (config | values).items() if v is not None}))


@pytest.mark.parametrize("consumer", ["vllm", "sglang"])
def test_the_flat_layout(draft: Any, stories: Path, target: Any, tmp_path: Path, consumer: str) -> None:
    """What vLLM and SGLang read: numbers of layers less one, and attention by the types of layers alone."""
    place, network = draft()
    done = export_draft(place, tmp_path / "out", consumer, str(stories), gamma=2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert "speculators_config" not in config and "speculators_model_type" not in config
    assert config["dflash_config"]["target_layer_ids"] == [0, 2, 3] and config["dflash_config"]["mask_token_id"] == 511
    assert config["dflash_config"]["sample_from_anchor"] is False and config["block_size"] == 5
    assert config["num_hidden_layers"] == 2 and config["num_target_layers"] == target.config.num_hidden_layers
    assert config["layer_types"] == ["full_attention"] * 2 and config["tie_word_embeddings"] is False
    assert not {"is_causal", "causal"} & {*config, *config["dflash_config"]}
    assert set(load_file(tmp_path / "out" / WEIGHTS)) == set(load_file(place / WEIGHTS))
    back = read_dflash(tmp_path / "out", input_embedding(target), head_weight(target))
    assert back.shape == network.shape
    assert all(torch.equal(tensor, tensors_of(back)[name]) for name, tensor in tensors_of(network).items())
    words = shlex.split(done.command)
    if consumer == "vllm":  # all of the block, which was trained with both directions
        expected = {"method": "dflash", "model": str(tmp_path / "out"), "num_speculative_tokens": 4}
        assert json.loads(words[-1]) == expected
    else:
        assert words[words.index("--speculative-algorithm") + 1] == "DFLASH"
    pair = load_pair(str(stories), str(tmp_path / "out"))  # a flat directory is a draft of its own accord
    assert pair.network is not None and pair.network.features == FEATURES


def test_windows_and_a_reduced_vocabulary(draft: Any, stories: Path, target: Any, tmp_path: Path) -> None:
    tokens = torch.arange(0, 512, 3)
    place, network = draft(tokens, window=6)
    done = export_draft(place, tmp_path / "out", "vllm", str(stories), gamma=2)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["layer_types"] == ["sliding_attention"] * 2
    assert (config["sliding_window"], config["use_sliding_window"], config["draft_vocab_size"]) == (
        6,
        True,
        len(tokens),
    )
    stored = load_file(tmp_path / "out" / WEIGHTS)
    assert torch.equal(stored["d2t"] + torch.arange(len(tokens)), tokens) and stored["t2d"].sum() == len(tokens)
    assert read_dflash(tmp_path / "out", input_embedding(target)).shape == network.shape
    assert json.loads(shlex.split(done.command)[-1])["num_speculative_tokens"] == 2  # a shorter block is a part of it
    with pytest.raises(PeftlabError, match=r"drafts 171 of 512 tokens; SGLang drafts all.*draft\.vocabulary: null"):
        export_draft(place, tmp_path / "sglang", "sglang", str(stories))
    assert not (tmp_path / "sglang").exists()


def test_speculators_layout(draft: Any, stories: Path, tmp_path: Path) -> None:
    """speculators numbers layers as here; vLLM reads the direction within a block from a key of its own."""
    for window, both in ((None, True), (6, False)):
        place, network = draft(window=window)
        out = tmp_path / f"out {window}"
        done = export_draft(place, out, "speculators", str(stories))
        config = json.loads((out / "config.json").read_text())
        assert "model_type" not in config and config["speculators_model_type"] == "dflash"
        assert config["aux_hidden_state_layer_ids"] == list(FEATURES) and config["mask_token_id"] == 511
        assert config["sample_from_anchor"] is False and config["sliding_window_non_causal"] is both
        assert config["speculators_config"]["verifier"]["name_or_path"] == str(stories)
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4
        assert not {"embed_tokens.weight", "lm_head.weight"} & set(load_file(out / WEIGHTS))
        assert "SpeculatorModel.from_pretrained" in done.command
        assert read_block_shape(out)[0] == network.shape
    # Full attention sees the whole block whatever the key says, as its class and its trainer have it.
    change(place := draft()[0], sliding_window_non_causal=False)
    assert read_block_shape(place)[0].window is None


def test_flat_files_of_other_trainers(draft: Any, stories: Path, target: Any, tmp_path: Path) -> None:
    """Keys nested or not, other names of tensors, the target's own embeddings and head beside the layers."""
    place, network = draft()
    export_draft(place, tmp_path / "flat", "vllm", str(stories))
    flat, config = tmp_path / "flat", json.loads((tmp_path / "flat" / "config.json").read_text())
    embedding, head = input_embedding(target), head_weight(target)
    nested = config["dflash_config"]
    change(flat, block_size=None, dflash_config=nested | {"block_size": 5}, draft_vocab_size=None)
    assert read_block_shape(flat) == (network.shape, 512)
    change(flat, dflash_config={"block_size": 5}, mask_token_id=511, target_layer_ids=[0, 2, 3])
    assert read_block_shape(flat) == (network.shape, 512)
    change(flat, eagle_aux_hidden_state_layer_ids=[1, 3, 4])
    tensors = load_file(flat / WEIGHTS)
    renamed = {
        name.replace("fc.", "encoder.fc."): tensor for name, tensor in tensors.items() if "hidden_norm" not in name
    }
    renamed["encoder.output_norm_enc.weight"] = tensors["hidden_norm.weight"]
    save_file(renamed | {"embed_tokens.weight": embedding.clone(), "lm_head.weight": head.clone()}, flat / WEIGHTS)
    back = read_dflash(flat, embedding, head)
    assert all(torch.equal(tensor, tensors_of(back)[name]) for name, tensor in tensors_of(network).items())
    for name in ("embed_tokens.weight", "lm_head.weight"):
        save_file(tensors | {name: torch.randn(512, 64)}, flat / WEIGHTS)
        with pytest.raises(PeftlabError, match=f"{name} is not the target's"):
            read_dflash(flat, embedding, head)
    for wrong, message in (
        ({"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}, r"are not target_layer_ids plus one, \[1, 3, 4\]"),
        ({"eagle_aux_hidden_state_layer_ids": None, "target_layer_ids": [2, 0, 3]}, r"rising; they are \[3, 1, 4\]"),
        ({"block_size": 7}, "block_size is 7, but 5 in dflash_config"),
        ({"is_causal": True}, "see all tokens but no later row of their block"),
        ({"dflash_config": {"block_size": 5, "causal": True}}, "see all tokens but no later row of their block"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 6, "is_causal": False}, "see later rows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "2 times full_attention or 2 times sliding"),
        ({"sample_from_anchor": True}, "sample_from_anchor is true"),
        ({"mask_token_id": 512}, "one of the 512 tokens"),
        ({"mask_token_id": None}, "mask_token_id"),
        ({"target_hidden_size": 32}, "target_hidden_size 32, but the layers' states have 64"),
        ({"model_type": "gemma4"}, "must be a qwen3's"),
    ):
        kept = (flat / "config.json").read_text()
        change(flat, **wrong)
        with pytest.raises(PeftlabError, match=message):
            read_block_shape(flat)
        (flat / "config.json").write_text(kept)
    change(flat, layer_types=None)
    assert read_block_shape(flat)[0] == network.shape  # without types all layers see everything


def test_what_an_engine_cannot_serve_is_refused(draft: Any, stories: Path, tmp_path: Path) -> None:
    place, _ = draft(features=(1, 3, 5))
    with pytest.raises(PeftlabError, match="more than 5 layers"):  # engines give the last state before the norm
        export_draft(place, tmp_path / "x", "vllm", str(stories))
    with pytest.raises(PeftlabError, match="is written for vllm, sglang, speculators"):
        export_draft(place, tmp_path / "x", "transformers", str(stories))
    assert not (tmp_path / "x").exists()


def test_a_gguf_file(draft: Any, stories: Path, tmp_path: Path) -> None:
    tokens = torch.arange(0, 512, 3)
    place, network = draft(tokens)
    done = export_draft(place, tmp_path / "draft.gguf", "llama.cpp", str(stories))
    stored = read_gguf(tmp_path / "draft.gguf")
    assert torch.equal(stored["d2t"], tokens) and torch.equal(stored["output.weight"], network.lm_head.weight)
    assert torch.equal(stored["enc.output_norm.weight"], network.hidden_norm.weight)
    assert torch.equal(stored["blk.1.attn_q.weight"], network.state_dict()["layers.1.self_attn.q_proj.weight"])
    words = shlex.split(done.command)
    assert words[words.index("--spec-type") + 1] == "draft-dflash" and words[-1] == "4"


SPARKS: list[dict[str, Any]] = [
    {"markov_rank": 8},
    {"markov_rank": 8, "markov_head": "gated", "confidence": True},
    {"markov_rank": 8, "confidence": True, "confidence_sees_token": False},
    {"markov_rank": 8, "from_anchor": False},
    {"markov_rank": 0, "confidence": True, "confidence_sees_token": False},
]


def spark(draft: Any, stories: Path, **sizes: Any) -> tuple[Path, BlockShape]:
    """Write a DSpark's files: a DFlash's tensors, and those of the heads."""
    place, network = draft()
    shape = replace(network.shape, **{"from_anchor": True, **sizes})
    tensors, rank = load_file(place / WEIGHTS), shape.markov_rank
    heads = {"markov_head.markov_w1.weight": (512, rank), "markov_head.markov_w2.weight": (512, rank)} if rank else {}
    if shape.markov_head == "gated":
        heads |= {"markov_head.gate_proj.weight": (rank, 64 + rank), "markov_head.gate_proj.bias": (rank,)}
    if shape.confidence:
        width = 64 + rank * shape.confidence_sees_token
        heads |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    save_file(tensors | {name: torch.randn(size) for name, size in heads.items()}, place / WEIGHTS)
    config = speculators_layout(shape, 512, torch.float32, target=str(stories), architecture="LlamaForCausalLM")
    (place / "config.json").write_text(json.dumps(config))
    return place, shape


@pytest.mark.parametrize("sizes", SPARKS, ids=str)
def test_dspark_in_both_layouts(draft: Any, stories: Path, tmp_path: Path, sizes: dict[str, Any]) -> None:
    """Whether a block drafts from its anchor is always written: readers differ in what a missing key means."""
    place, shape = spark(draft, stories, **sizes)
    config = json.loads((place / "config.json").read_text())
    assert config["speculators_model_type"] == "dspark" and config["sample_from_anchor"] is shape.from_anchor
    assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == shape.length
    assert read_block_shape(place) == (shape, 512)
    flat = flat_layout(shape, 512, torch.float32, 6)
    nested = flat["dflash_config"]
    assert isinstance(nested, dict) and flat["architectures"] == ["Qwen3DSparkModel"]
    assert nested["projector_type"] == "dspark" and nested["target_layer_ids"] == flat["target_layer_ids"] == [0, 2, 3]
    for key in ("sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head", "mask_token_id"):
        assert flat[key] == nested[key], key
    (place / "config.json").write_text(json.dumps(flat))
    assert read_block_shape(place) == (shape, 512)


def test_keys_that_a_dspark_lacks(draft: Any, stories: Path) -> None:
    """They have speculators' values in its layout; in the flat one the heads' flags are false."""
    place, shape = spark(draft, stories, markov_rank=8, confidence=True)
    change(place, sample_from_anchor=None, enable_confidence_head=None, confidence_head_with_markov=None)
    assert read_block_shape(place)[0] == shape
    flat = flat_layout(shape, 512, torch.float32, 6) | {"dflash_config": {}}
    (place / "config.json").write_text(json.dumps(flat))
    assert read_block_shape(place)[0] == shape
    change(place, sample_from_anchor=None, enable_confidence_head=None, confidence_head_with_markov=None)
    found = read_block_shape(place)[0]
    assert (found.from_anchor, found.confidence, found.confidence_sees_token) == (True, False, False)
    change(place, architectures=["DSparkDraftModel"])
    assert read_block_shape(place)[0] == found
    change(place, sample_from_anchor=False, markov_head_type="rnn")  # speculators' memory begins at the anchor's row
    with pytest.raises(PeftlabError, match="sample_from_anchor is false: the memory of an rnn Markov head begins"):
        read_block_shape(place)
    change(place, markov_head_type="linear")
    with pytest.raises(PeftlabError, match="markov_head_type 'linear' one of vanilla, gated and rnn"):
        read_block_shape(place)


@pytest.mark.parametrize(
    ("sizes", "refusing"),
    list(zip(SPARKS, ["", "vllm llama.cpp", "llama.cpp", "sglang", "vllm sglang llama.cpp"], strict=True)),
    ids=str,
)
def test_dspark_for_engines(draft: Any, stories: Path, tmp_path: Path, sizes: dict[str, Any], refusing: str) -> None:
    place, shape = spark(draft, stories, **sizes)
    for consumer in ("vllm", "sglang", "llama.cpp", "speculators"):
        out = tmp_path / f"{consumer}.gguf"
        if consumer in refusing.split():
            with pytest.raises(PeftlabError, match=f"--for {consumer}: .* (Markov head|anchor|confidence head)"):
                export_draft(place, out, consumer, str(stories))
            assert not out.exists()
            continue
        done = export_draft(place, out, consumer, str(stories))
        if consumer == "llama.cpp":
            stored = read_gguf(out)
            assert stored["markov_w1.weight"].shape == stored["markov_w2.weight"].shape == (512, 8)
            assert ("conf_proj.weight" in stored) == shape.confidence and "draft-dspark" in done.command
        else:
            assert read_block_shape(out)[0] == shape
            named = {"vllm": '"method": "dspark"', "sglang": "DSPARK", "speculators": "SpeculatorModel"}[consumer]
            assert named in done.command


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("markov_rank", 4, "markov_head.markov_w1.weight"),
        ("markov_head_type", "rnn", "markov_head.joint_proj.bias"),
        ("enable_confidence_head", False, "confidence_head.proj.bias"),
        ("aux_hidden_state_layer_ids", [1, 3], "fc.weight"),
        ("draft_vocab_size", 100, "d2t"),
    ],
)
def test_flags_that_contradict_tensors_are_not_exported(
    draft: Any, stories: Path, tmp_path: Path, key: str, value: object, named: str
) -> None:
    place, _ = spark(draft, stories, markov_rank=8, confidence=True)
    change(place, **{key: value})
    for consumer in ("vllm", "sglang", "llama.cpp", "speculators"):
        with pytest.raises(PeftlabError, match=named):
            export_draft(place, tmp_path / "out", consumer, str(stories))
        assert not (tmp_path / "out").exists()


@torch.no_grad()
def test_transformers_computes_the_same_logits(
    draft: Any, stories: Path, target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exported weights in transformers' own class and generation: each drafted block has the network's logits."""
    place, network = draft()
    export_draft(place, tmp_path / "out", "vllm", str(stories))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    nested = config.pop("dflash_config")
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types", "block_size")
    sizes = {name: config[name] for name in names} | {"mask_token_id": nested["mask_token_id"]}
    assistant = MuseGlimmerAssistantModel(
        MuseGlimmerAssistantConfig(**sizes, target_layer_ids=nested["target_layer_ids"])
    ).eval()
    tensors = load_file(tmp_path / "out" / WEIGHTS)
    renamed = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    assistant.load_state_dict({renamed.get(name, name): tensor for name, tensor in tensors.items()})
    drafted: list[tuple[torch.Tensor, torch.Tensor]] = []
    original = DFlashTokenCandidateGenerator.get_candidates

    def recorded(self: Any, input_ids: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        found = original(self, input_ids, *arguments, **options)
        if found[0].shape[1] > input_ids.shape[1]:
            drafted.append((input_ids[0], found[1][0]))
        return found

    monkeypatch.setattr(DFlashTokenCandidateGenerator, "get_candidates", recorded)
    inputs = AutoTokenizer.from_pretrained(stories)("Once upon a time", return_tensors="pt")
    settings: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    plain = target.generate(**inputs, **settings)
    outputs = target.generate(**inputs, **settings, assistant_model=assistant, speculation_type="dflash")
    assert torch.equal(outputs, plain) and len(drafted) > 5
    for ids, logits in drafted:
        features, _ = target_states(TargetWithNetwork(target, network), ids[None], torch.ones_like(ids)[None])
        states = network.drafts(features, ids[None], torch.tensor([[len(ids) - 1]]))
        torch.testing.assert_close(network.logits(states[0, 0]), logits, atol=1e-4, rtol=1e-5)
        assert logits.std() > 0.3
