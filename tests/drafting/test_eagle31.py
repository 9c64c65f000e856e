"""EAGLE-3 files with the flags of EAGLE 3.1: read and decoded as the formulas say, and exported with their flags."""

from __future__ import annotations

import contextlib
import json
from itertools import product
from pathlib import Path

import pytest
import torch
from draft_models import VOCAB, tiny
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from peftlab.checkpoints.gguf import read_gguf
from peftlab.decoding.cache import KVCache
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.drafting.base import load_pair, make_drafter
from peftlab.drafting.eagle import Eagle3, Eagle3Kind, EagleStep, read_eagle, read_shape, tensors_of, write_eagle
from peftlab.drafting.export import export_draft
from peftlab.drafting.state_network import WEIGHTS, unroll
from peftlab.drafting.target import head_weight, input_embedding
from peftlab.errors import PeftlabError
from tests.command_line import invoke

H, HEADS, KV, D, MLP, EPS, THETA = 16, 4, 2, 4, 24, 1e-5, 10000.0
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COMBINATIONS = [dict(zip(FLAGS, values, strict=True)) for values in product([False, True], repeat=4)]
COMBINATIONS = [flags for flags in COMBINATIONS if not (flags["norm_before_fc"] and flags["fc_norm"])]


LLAMA3 = {
    "rope_type": "llama3", "rope_theta": THETA, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip


def stranger(
    place: Path, vocab: int, h: int, flags: dict[str, bool], *, flat: bool = False, **layer_keys: object
) -> dict[str, Tensor]:
    """Write a draft with random weights as another trainer would, and return its tensors.

    Args:
        layer_keys: further keys of the layer's configuration.
    """
    g = torch.Generator().manual_seed(5)
    d = h // HEADS
    shapes = {
        "fc.weight": (h, 3 * h), "norm.weight": (h,), "lm_head.weight": (vocab, h),
        **{f"layers.0.{n}.weight": (h,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
        "layers.0.self_attn.q_proj.weight": (h, 2 * h), "layers.0.self_attn.o_proj.weight": (h, h),
        "layers.0.self_attn.k_proj.weight": (KV * d, 2 * h), "layers.0.self_attn.v_proj.weight": (KV * d, 2 * h),
        "layers.0.mlp.gate_proj.weight": (MLP, h), "layers.0.mlp.up_proj.weight": (MLP, h),
        "layers.0.mlp.down_proj.weight": (h, MLP),
        **({"input_norm.weight": (3 * h,)} if flags.get("norm_before_fc") else {}),
        **({f"fc_norm.{i}.weight": (h,) for i in range(3)} if flags.get("fc_norm") else {}),
        **({f"layers.0.self_attn.{n}_norm.weight": (d,) for n in "qk"} if "qwen3" in layer_keys.values() else {}),
    }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.rand(shape, generator=g) + 0.5 if len(shape) == 1 else torch.randn(shape, generator=g) / 3
    layer = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": h, "intermediate_size": MLP, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": d, "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "max_position_embeddings": 128,
        **layer_keys,
    }  # fmt: skip
    if flat:
        nested = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}  # numbered by the state that leaves a layer
        config = {**layer, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}
    else:
        config = {"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}
        config |= {"transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps({**config, "draft_vocab_size": vocab, **flags}))
    save_file(tensors, place / "model.safetensors")
    return tensors


def reference(tensors: dict[str, Tensor], flags: dict[str, bool], embed: Tensor, features: Tensor, ids: Tensor,
              read: int, steps: int, window: int = 99, angles: Tensor | None = None) -> Tensor:  # fmt: skip
    """Logits of ``steps`` tokens drafted after ``read`` tokens, by the formulas alone, each pass from the beginning."""
    angles = THETA ** (-torch.arange(0, D, 2) / D) if angles is None else angles

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight

    def turned(x: Tensor) -> Tensor:  # [rows, heads, D]; a row's place is its position
        angle = torch.arange(len(x))[:, None] * angles
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        one, two = x[..., : D // 2], x[..., D // 2 :]
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    t = {name.removeprefix("layers.0.").removesuffix(".weight"): tensor for name, tensor in tensors.items()}
    states = features[: read - 1]
    if flags["norm_before_fc"]:
        states = norm(states, t["input_norm"])
    if flags["fc_norm"]:
        states = torch.cat([norm(states[:, i * H : (i + 1) * H], t[f"fc_norm.{i}"]) for i in range(3)], -1)
    g, logits = states @ t["fc"].T, []
    for _ in range(steps):
        n = len(g)  # row i reads token i + 1
        normed = norm(g, t["hidden_norm"])
        x = torch.cat((norm(embed[ids[1 : n + 1]], t["input_layernorm"]), normed), -1)
        q, key, v = ((x @ t[f"self_attn.{name}_proj"].T).view(n, -1, D) for name in ("q", "k", "v"))
        if "self_attn.q_norm" in t:
            q, key = norm(q, t["self_attn.q_norm"]), norm(key, t["self_attn.k_norm"])
        q, key = turned(q), turned(key).repeat_interleave(HEADS // KV, 1)
        scores = torch.einsum("ahd,bhd->hab", q, key) / D**0.5
        behind = torch.arange(n)[:, None] - torch.arange(n)
        scores = scores.masked_fill((behind < 0) | (behind >= window), -torch.inf)
        seen = torch.einsum("hab,bhd->ahd", scores.softmax(-1), v.repeat_interleave(HEADS // KV, 1)).reshape(n, -1)
        hidden = (normed if flags["norm_before_residual"] else g) + seen @ t["self_attn.o_proj"].T
        m = norm(hidden, t["post_attention_layernorm"])
        gate, up = m @ t["mlp.gate_proj"].T, m @ t["mlp.up_proj"].T
        out = hidden + (gate * gate.sigmoid() * up) @ t["mlp.down_proj"].T
        last = norm(out[-1], t["norm"])
        logits.append(t["lm_head"] @ last)
        g = torch.cat((g, (last if flags["norm_output"] else out[-1])[None]))
    return torch.stack(logits)


def draft(network: Eagle3, features: Tensor, ids: Tensor, read: int, steps: int) -> Tensor:
    """Logits of ``steps`` tokens drafted after ``read`` tokens, as a drafter computes them, with a cache."""
    step, cache = EagleStep(network, pack=False), KVCache(1, 1, 64)
    states, start, drafted = step.fuse(features[None, : read - 1]), 0, []
    for _ in range(steps):
        block = cache.block([0], [start], states.shape[1])
        tokens = ids[None, start + 1 : start + 1 + states.shape[1]]
        out = step.advance(cache, tokens, states, block)
        start, states = start + states.shape[1], out[:, -1:]
        drafted.append(step.logits(states)[0, 0])
    return torch.stack(drafted)


@pytest.mark.parametrize("flags", COMBINATIONS, ids=lambda flags: "+".join(k for k, v in flags.items() if v) or "none")
def test_a_file_is_decoded_and_trained_as_the_formulas_say(tmp_path: Path, flags: dict[str, bool]) -> None:
    target = tiny(3, layers=4)
    embed = input_embedding(target)
    tensors = stranger(tmp_path, VOCAB, H, flags)
    g = torch.Generator().manual_seed(1)
    ids, features = torch.randint(3, VOCAB, (12,), generator=g), torch.randn(12, 3 * H, generator=g)
    network = read_eagle(tmp_path, embed)
    read, steps = 8, 4
    with torch.no_grad():
        expected = reference(tensors, flags, embed, features, ids, read, steps)
        trained = [network.logits(states)[0, read - 2] for states in unroll(network, features[None], ids[None], steps)]
        torch.testing.assert_close(torch.stack(trained), expected, atol=1e-4, rtol=1e-4)
        drafted = draft(network, features, ids, read, steps)
        torch.testing.assert_close(drafted, expected, atol=1e-4, rtol=1e-4)
        plain = reference(tensors, dict.fromkeys(FLAGS, False), embed, features, ids, read, steps)
    assert any(flags.values()) != torch.allclose(plain, expected, atol=1e-2), "a flag changes what is computed"


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize(
    ("keys", "window", "angles"),
    [
        ({"model_type": "qwen3"}, 99, None),
        ({"layer_types": ["sliding_attention"], "sliding_window": 4}, 4, None),
        ({"layer_types": ["sliding_attention"], "sliding_window": None}, 99, None),
        ({"model_type": "qwen3", "layer_types": ["sliding_attention"], "sliding_window": 4}, 4, None),
        ({"rope_parameters": LLAMA3}, 99, torch.tensor([1.0, 0.00125])),  # by 8: longer than 16 tokens a turn
    ],
    ids=["qwen3", "window", "null window", "qwen3 with a window", "llama3"],
)
def test_layers_of_other_trainers(
    tmp_path: Path, keys: dict[str, object], window: int, angles: Tensor | None, flat: bool
) -> None:
    """The layer of a Qwen3, the sliding window and the scaled angles are computed, and written as they were read."""
    flags = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": True}
    embed = input_embedding(tiny(3, layers=4))
    tensors = stranger(tmp_path / "draft", VOCAB, H, flags, flat=flat, **keys)
    g = torch.Generator().manual_seed(1)
    ids, features = torch.randint(3, VOCAB, (12,), generator=g), torch.randn(12, 3 * H, generator=g)
    network = read_eagle(tmp_path / "draft", embed)
    with torch.no_grad():
        expected = reference(tensors, flags, embed, features, ids, 9, 3, window, angles)
        torch.testing.assert_close(draft(network, features, ids, 9, 3), expected, atol=1e-4, rtol=1e-4)
    plain = {name: tensor for name, tensor in tensors.items() if "_norm.weight" not in name or "self_attn" not in name}
    changed = window < 99 or angles is not None or len(plain) < len(tensors)
    assert changed != torch.allclose(reference(plain, flags, embed, features, ids, 9, 3), expected, atol=1e-2)
    (tmp_path / "again").mkdir()
    write_eagle(network, tmp_path / "again", target="t", architecture="LlamaForCausalLM", tokens=3)
    assert read_eagle(tmp_path / "again", embed).shape == network.shape


def test_embeddings_in_a_file(tmp_path: Path) -> None:
    """Those of the target are shared; others, trained or not, are the draft's own, are read and are written."""
    embed = input_embedding(tiny(3, layers=4))
    tensors = stranger(tmp_path, VOCAB, H, {})
    config = json.loads((tmp_path / "config.json").read_text())
    own = torch.randn(VOCAB, H)

    def stored(embedding: Tensor | None, trained: bool) -> Eagle3:
        save_file(tensors | ({} if embedding is None else {"embed_tokens.weight": embedding}), tmp_path / WEIGHTS)
        (tmp_path / "config.json").write_text(json.dumps(config | {"embed_requires_grad": trained}))
        return read_eagle(tmp_path, embed)

    assert not stored(None, False).shape.own_embedding
    assert not stored(embed.clone(), False).shape.own_embedding
    assert not stored(embed.bfloat16(), False).shape.own_embedding
    for trained in (False, True):
        network = stored(own, trained)
        assert network.shape.own_embedding and torch.equal(network.embedding, own)
        (tmp_path / "again").mkdir(exist_ok=True)
        write_eagle(network, tmp_path / "again", target="t", architecture="LlamaForCausalLM", tokens=3)
        assert torch.equal(read_eagle(tmp_path / "again", embed).embedding, own)
        assert json.loads((tmp_path / "again" / "config.json").read_text())["embed_requires_grad"]
    with pytest.raises(PeftlabError, match=r"embed_requires_grad is true, but model\.safetensors has no embed_tokens"):
        stored(None, True)
    with pytest.raises(PeftlabError, match="for states of 16 and 40 tokens, but the target has 16 and 39"):
        stored(own[1:].clone(), False)


def test_numbers_of_layers(tmp_path: Path) -> None:
    """Without any they are those of all readers; of L, the state after the last layer, other trainers mean another."""
    target = tiny(3, layers=8)
    stranger(tmp_path, VOCAB, H, {})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": None}))
    assert Eagle3Kind.read(tmp_path, target).features == (2, 4, 5)
    (tmp_path / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}))
    with pytest.raises(PeftlabError, match="leaves the target's last layer, 8, before the final norm"):
        Eagle3Kind.read(tmp_path, target)


def test_absent_flags_are_false_and_may_stand_in_eagle_config(tmp_path: Path) -> None:
    def flags(**values: object) -> list[str]:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | values))
        shape, _ = read_shape(tmp_path)
        assert shape.features == (1, 2, 3)
        return [name for name in FLAGS if getattr(shape, name)]

    stranger(tmp_path, VOCAB, H, {})
    assert flags() == [] and flags(norm_output=True) == ["norm_output"]
    stranger(tmp_path, VOCAB, H, {}, flat=True)
    ids = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}
    assert flags() == [] and flags(eagle_config=ids | {"norm_before_fc": True}) == ["norm_before_fc"]
    assert flags(eagle_config=ids | {"use_aux_norm": True}) == ["fc_norm"]
    assert flags(eagle_config={}, eagle_aux_hidden_state_layer_ids=[1, 2, 3]) == []
    for wrong, message in (
        ({"norm_output": "yes"}, "norm_output must be one of true and false"),
        ({"norm_before_fc": True, "fc_norm": True}, "norm_before_fc and fc_norm exclude each other"),
        ({"norm_before_fc": False, "eagle_config": {"norm_before_fc": True}}, "norm_before_fc must be one of"),
        ({"target_hidden_size": 32}, "target_hidden_size 32, but the layer's states have 16"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 2, 1]}, r"must be layer numbers, rising; it is \[3, 2, 1\]"),
        ({"eagle_aux_hidden_state_layer_ids": None}, "in eagle_config lower by one; they are missing"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}, r"lower by one; they are \[1, 2, 3\], \["),
        ({"transformer_layer_config": {"model_type": "gemma3"}}, "model_type gemma3, num_hidden_layers 1; one layer"),
    ):
        stranger(tmp_path, VOCAB, H, {})
        with pytest.raises(PeftlabError, match=message):
            flags(**wrong)


def test_a_drafter_with_all_flags_decodes_and_is_exported(stories: Path, tmp_path: Path) -> None:
    """The norms that speculators' trainer writes by default, and the sliding window."""
    flags = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": True}
    tensors = stranger(tmp_path / "draft", 512, 64, flags)
    window = 6
    target = AutoModelForCausalLM.from_pretrained(stories)
    tensors["lm_head.weight"] = head_weight(target).detach().clone()
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": window}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    pair = load_pair(str(stories), str(tmp_path / "draft"))
    assert pair.network is not None and pair.network.window == window
    prompt = AutoTokenizer.from_pretrained(stories)("Once upon a time")["input_ids"]
    for width in (1, 3):
        found = decode(pair.target, [prompt], StoppingCriteria(24), make_drafter("draft", pair, width))
        assert found[0].tokens == decode(pair.target, [prompt], StoppingCriteria(24))[0].tokens
    export_draft(tmp_path / "draft", tmp_path / "vllm", "vllm", str(stories))
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert {name: written[name] for name in FLAGS} == flags
    assert written["transformer_layer_config"]["sliding_window"] == window
    assert written["transformer_layer_config"]["layer_types"] == ["sliding_attention"]
    one, other = (read_eagle(tmp_path / name, input_embedding(target)) for name in ("draft", "vllm"))
    assert one.shape == other.shape
    assert all(torch.equal(tensor, tensors_of(other)[name]) for name, tensor in tensors_of(one).items())
    with pytest.raises(PeftlabError, match="has norm_before_residual, which SGLang does not read"):
        export_draft(tmp_path / "draft", tmp_path / "sglang", "sglang", str(stories))
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config | {"norm_before_residual": False}))
    exported = export_draft(tmp_path / "draft", tmp_path / "sglang", "sglang", str(stories))
    written = json.loads((tmp_path / "sglang" / "config.json").read_text())
    assert (written["norm_before_fc"], written["norm_output"]) == (True, True)
    assert "norm_before_residual" not in written
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3] and written["num_aux_hidden_states"] == 3
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert read_eagle(tmp_path / "sglang", input_embedding(target)).features == (1, 2, 3)
    assert exported.command.endswith(f"--speculative-draft-window-size {window}")


def test_what_an_engine_does_not_compute_is_refused(stories: Path, tmp_path: Path) -> None:
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path / "draft")
    for keys, changed, sglang, llama_cpp in (
        ({"model_type": "qwen3"}, {}, "norms of heads", "has head_norms"),
        ({"rope_parameters": LLAMA3}, {}, None, "rope_type llama3"),
        ({}, {"norm_output": True}, None, "has norm_output"),
        ({}, {"embed_requires_grad": True}, "embeddings of its own", None),
    ):
        tensors = stranger(tmp_path / "draft", 512, 64, {}, **keys)
        config = json.loads((tmp_path / "draft" / "config.json").read_text())
        (tmp_path / "draft" / "config.json").write_text(json.dumps(config | changed))
        own = torch.randn(512, 64)
        if "embed_requires_grad" in changed:
            save_file(tensors | {"embed_tokens.weight": own}, tmp_path / "draft" / WEIGHTS)
        for consumer, message in (("sglang", sglang), ("llama.cpp", llama_cpp)):
            out = tmp_path / f"{consumer}.gguf"
            with contextlib.nullcontext() if message is None else pytest.raises(PeftlabError, match=message):
                export_draft(tmp_path / "draft", out, consumer, str(stories), overwrite=True)
    assert torch.equal(read_gguf(tmp_path / "llama.cpp.gguf")["token_embd.weight"], own)


def test_a_recipe_trains_with_the_flags(stories: Path, tmp_path: Path) -> None:
    """They are written, decode losslessly, stay as they are where a run continues, and may not contradict the file."""
    recipe = tmp_path / "draft.yaml"
    recipe.write_text(
        f"kind: draft\ntarget: {stories}\nmethod: null\ngamma: 2\ndraft: {{kind: eagle3, steps: 2}}\n"
        f"data: {{prompts: {tmp_path}/prompts.txt, held_out: 2, max_new_tokens: 8}}\n"
        "train: {max_steps: 2, batch_size: 4, max_length: 64, warmup: 0}\n"
    )
    (tmp_path / "prompts.txt").write_text(
        "".join(f"Once upon a time, {name}\n" for name in ["Lily", "Tom", "Ann", "Ben", "Sue"])
    )
    chosen = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": True, "norm_output": True}
    section = ", ".join(f"{name}: {str(flag).lower()}" for name, flag in chosen.items())
    first, second = tmp_path / "first", tmp_path / "second"
    invoke("run", recipe, f"draft={{kind: eagle3, steps: 2, features: [1, 2, 3, 4], {section}}}", f"output_dir={first}")
    invoke("run", recipe, f"draft={{kind: eagle3, steps: 2, from: {first}}}", f"output_dir={second}")
    for run in (first, second):
        (config,) = [path for path in run.rglob("config.json") if "speculators_model_type" in path.read_text()]
        written = json.loads(config.read_text())
        assert {name: written[name] for name in FLAGS} == chosen
        assert written["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3, 4]
    assert json.loads((second / "results.json").read_text())["decoding"]["after"]["lossless"]
    export_draft(first, tmp_path / "vllm", "vllm", str(stories))
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert written["transformer_layer_config"]["num_aux_hidden_states"] == 4
    with pytest.raises(PeftlabError, match=r"draft\.norm_output: .* was trained with true"):
        invoke(
            "run", recipe, f"draft={{kind: eagle3, norm_output: false, from: {first}}}", f"output_dir={tmp_path / 'x'}"
        )
    with pytest.raises(PeftlabError, match="exclude each other"):
        invoke("run", recipe, "draft={kind: eagle3, norm_before_fc: true, fc_norm: true}")
