"""EAGLE-3 files with the flags of EAGLE 3.1: read and decoded as the formulas say, and exported with their flags."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from draft_models import VOCAB, tiny
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from peftlab.decoding.cache import KVCache
from peftlab.decoding.decode import StoppingCriteria, decode
from peftlab.drafting.base import load_pair, make_drafter
from peftlab.drafting.eagle import EagleStep, read_eagle, read_shape, tensors_of
from peftlab.drafting.export import export_draft
from peftlab.drafting.state_network import unroll
from peftlab.drafting.target import head_weight, input_embedding
from peftlab.errors import PeftlabError
from tests.command_line import invoke

H, HEADS, KV, D, MLP, EPS, THETA = 16, 4, 2, 4, 24, 1e-5, 10000.0
FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
COMBINATIONS = [dict(zip(FLAGS, values, strict=True)) for values in product([False, True], repeat=4)]
COMBINATIONS = [flags for flags in COMBINATIONS if not (flags["norm_before_fc"] and flags["fc_norm"])]


def stranger(place: Path, vocab: int, h: int, flags: dict[str, bool], *, flat: bool = False) -> dict[str, Tensor]:
    """Write a draft with random weights as another trainer would, and return its tensors."""
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
    }  # fmt: skip
    tensors = {}
    for name, shape in shapes.items():
        tensors[name] = torch.rand(shape, generator=g) + 0.5 if len(shape) == 1 else torch.randn(shape, generator=g) / 3
    layer = {
        "model_type": "llama", "vocab_size": vocab, "hidden_size": h, "intermediate_size": MLP, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV, "head_dim": d, "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "max_position_embeddings": 128,
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
              read: int, steps: int) -> Tensor:  # fmt: skip
    """Logits of ``steps`` tokens drafted after ``read`` tokens, by the formulas alone, each pass from the beginning."""

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight

    def turned(x: Tensor) -> Tensor:  # [rows, heads, D]; a row's place is its position
        angle = torch.arange(len(x))[:, None] * THETA ** (-torch.arange(0, D, 2) / D)
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
        q, key = turned(q), turned(key).repeat_interleave(HEADS // KV, 1)
        scores = torch.einsum("ahd,bhd->hab", q, key) / D**0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
        seen = torch.einsum("hab,bhd->ahd", scores.softmax(-1), v.repeat_interleave(HEADS // KV, 1)).reshape(n, -1)
        hidden = (normed if flags["norm_before_residual"] else g) + seen @ t["self_attn.o_proj"].T
        m = norm(hidden, t["post_attention_layernorm"])
        gate, up = m @ t["mlp.gate_proj"].T, m @ t["mlp.up_proj"].T
        out = hidden + (gate * gate.sigmoid() * up) @ t["mlp.down_proj"].T
        last = norm(out[-1], t["norm"])
        logits.append(t["lm_head"] @ last)
        g = torch.cat((g, (last if flags["norm_output"] else out[-1])[None]))
    return torch.stack(logits)


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
        step, cache = EagleStep(network, pack=False), KVCache(1, 1, 64)
        states, start, drafted = step.fuse(features[None, : read - 1]), 0, []
        for _ in range(steps):
            block = cache.block([0], [start], states.shape[1])
            tokens = ids[None, start + 1 : start + 1 + states.shape[1]]
            device = ids.device
            out = step.advance(cache, tokens, states, block, block.positions(device), block.visible(None, device))
            start, states = start + states.shape[1], out[:, -1:]
            drafted.append(step.logits(states)[0, 0])
        torch.testing.assert_close(torch.stack(drafted), expected, atol=1e-4, rtol=1e-4)
        plain = reference(tensors, dict.fromkeys(FLAGS, False), embed, features, ids, read, steps)
    assert any(flags.values()) != torch.allclose(plain, expected, atol=1e-2), "a flag changes what is computed"


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
        ({"embed_requires_grad": True}, "embeddings of the draft's own are not supported"),
    ):
        stranger(tmp_path, VOCAB, H, {})
        with pytest.raises(PeftlabError, match=message):
            flags(**wrong)


def test_a_drafter_with_all_flags_decodes_and_is_exported(stories: Path, tmp_path: Path) -> None:
    """The norms that speculators' trainer writes by default, and the sliding window."""
    flags = {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": False, "norm_output": True}
    tensors = stranger(tmp_path / "draft", 512, 64, flags)
    target = AutoModelForCausalLM.from_pretrained(stories)
    tensors["lm_head.weight"] = head_weight(target).detach().clone()
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    config["transformer_layer_config"] |= {"layer_types": ["sliding_attention"], "sliding_window": 2048}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    pair = load_pair(str(stories), str(tmp_path / "draft"))
    assert any("the last 2048 tokens" in warning for warning in pair.warnings)
    prompt = AutoTokenizer.from_pretrained(stories)("Once upon a time")["input_ids"]
    for width in (1, 3):
        found = decode(pair.target, [prompt], StoppingCriteria(24), make_drafter("draft", pair, width))
        assert found[0].tokens == decode(pair.target, [prompt], StoppingCriteria(24))[0].tokens
    export_draft(tmp_path / "draft", tmp_path / "vllm", "vllm", str(stories))
    written = json.loads((tmp_path / "vllm" / "config.json").read_text())
    assert {name: written[name] for name in FLAGS} == flags
    assert written["transformer_layer_config"]["sliding_window"] == 2048
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
    assert exported.command.endswith("--speculative-draft-window-size 2048")


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
    with pytest.raises(PeftlabError, match=r"draft\.norm_output: .* was trained with true"):
        invoke(
            "run", recipe, f"draft={{kind: eagle3, norm_output: false, from: {first}}}", f"output_dir={tmp_path / 'x'}"
        )
    with pytest.raises(PeftlabError, match="exclude each other"):
        invoke("run", recipe, "draft={kind: eagle3, norm_before_fc: true, fc_norm: true}")
