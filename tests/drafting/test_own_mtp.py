"""The MTP layer of a target's own checkpoint: read, computed as the family does, tuned, and put back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_layers import MtpModel

from peftlab.decoding.cache import KVCache
from peftlab.decoding.decode import Fixed, StoppingCriteria, decode
from peftlab.drafting.base import load_pair, make_drafter
from peftlab.drafting.export import export_draft
from peftlab.drafting.mtp import MtpStep, OwnMtp, find_own_layer, read_own_layer, read_tuned_layer, write_mtp
from peftlab.drafting.objectives import Objective
from peftlab.drafting.state_network import FeatureLoss, TargetWithNetwork, unroll
from peftlab.drafting.target import forward_hidden
from peftlab.drafting.text import Collate, make_dataset
from peftlab.errors import PeftlabError
from peftlab.pipelines.draft import run_draft
from peftlab.pipelines.update import update_draft
from peftlab.recipe.load import load_recipe
from peftlab.tasks.prompts import Request
from tests.mtp_targets import TARGETS, VOCAB, save_target, stored_tensors

QWEN = [name for name in TARGETS if name.startswith("qwen")]
Rows = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Embeddings [n, H], states [n, H] and positions [n] of rows in order -> the layer's outputs before its last norm."""


@pytest.fixture(scope="module", params=TARGETS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def place(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(name, tmp_path_factory.mktemp(name) / "target")


@pytest.fixture(scope="module")
def target(place: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(place).eval().requires_grad_(False)


@pytest.fixture
def network(place: Path, target: Any) -> OwnMtp:
    own, warnings = read_own_layer(find_own_layer(str(place), target.config, "draft.from"), target)
    assert not warnings
    return own


def norm(x: Tensor, w: Tensor, eps: float = 1e-6) -> Tensor:
    """Return the norm of Qwen3-Next and Qwen3.5, which multiplies by 1 + w."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + w)


def qwen_rows(tensors: dict[str, Tensor], config: Any) -> Rows:
    """Return the layer of Qwen3-Next or Qwen3.5, written out from the checkpoint's tensors."""
    w = {key.removeprefix("mtp."): tensor for key, tensor in tensors.items() if key.startswith("mtp.")}
    block = {key.removeprefix("layers.0."): tensor for key, tensor in w.items()}
    heads, groups, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    rotary = int(dim * config.rope_parameters["partial_rotary_factor"])
    angles = config.rope_parameters["rope_theta"] ** -(torch.arange(0, rotary, 2) / rotary)

    def rotate(x: Tensor, positions: Tensor) -> Tensor:  # [n, heads, D]
        turn = (positions[:, None].float() * angles).repeat(1, 2)[:, None]
        head, tail = x[..., :rotary], x[..., rotary:]
        first, second = head.chunk(2, -1)
        return torch.cat((head * turn.cos() + torch.cat((-second, first), -1) * turn.sin(), tail), -1)

    def mlp(x: Tensor, where: str) -> Tensor:
        gate, up, down = (block[f"{where}{part}_proj.weight"] for part in ("gate", "up", "down"))
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    def experts(x: Tensor) -> Tensor:
        shares = F.linear(x, block["mlp.gate.weight"]).softmax(-1)
        best = shares.topk(config.num_experts_per_tok, -1)
        weights = torch.zeros_like(shares).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
        routed = sum(weights[:, i, None] * mlp(x, f"mlp.experts.{i}.") for i in range(config.num_experts))
        shared = F.linear(x, block["mlp.shared_expert_gate.weight"]).sigmoid() * mlp(x, "mlp.shared_expert.")
        return routed + shared

    def rows(embedded: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        both = (norm(embedded, w["pre_fc_norm_embedding.weight"]), norm(states, w["pre_fc_norm_hidden.weight"]))
        h = F.linear(torch.cat(both, -1), w["fc.weight"])
        x = norm(h, block["input_layernorm.weight"])
        q, gate = F.linear(x, block["self_attn.q_proj.weight"]).view(-1, heads, 2 * dim).chunk(2, -1)
        k, v = (F.linear(x, block[f"self_attn.{part}_proj.weight"]).view(-1, groups, dim) for part in "kv")
        q, k = norm(q, block["self_attn.q_norm.weight"]), norm(k, block["self_attn.k_norm.weight"])
        q, k = rotate(q, positions), rotate(k, positions)
        k, v = (part.repeat_interleave(heads // groups, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
        seen = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v) * gate.sigmoid()
        h = h + F.linear(seen.flatten(1), block["self_attn.o_proj.weight"])
        x = norm(h, block["post_attention_layernorm.weight"])
        return h + (experts(x) if "mlp.gate.weight" in block else mlp(x, "mlp."))

    return rows


def transformers_rows(place: Path) -> tuple[Rows, MtpModel]:
    """Return the layer of GLM-4.5 or DeepSeek-V3 as transformers reads and computes it for ``use_mtp``."""
    main = AutoModelForCausalLM.from_pretrained(place).eval()
    # The library knows the layer by the number that it has in the released checkpoints.
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2.*"]
    theirs = MtpModel.from_pretrained(main).eval()
    theirs.layers[0].use_post_norm = False  # the output before its last norm

    def rows(embedded: Tensor, states: Tensor, positions: Tensor) -> Tensor:
        some = {"inputs_embeds": embedded[None], "position_ids": positions[None], "mtp_cache": None}
        return theirs.forward_layer(0, states[None], **some)[0]

    return rows, theirs


def test_logits_are_those_of_the_family(name: str, place: Path, target: Any, network: OwnMtp) -> None:
    """Three steps, each of which reads the outputs of the steps before as an engine's cache has them."""
    tensors = stored_tensors(place)
    if name in QWEN:
        rows, theirs = qwen_rows(tensors, target.config.get_text_config()), None
    else:
        rows, theirs = transformers_rows(place)
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    hidden = forward_hidden(target, ids, torch.ones_like(ids))[-1]
    embedding = target.get_input_embeddings().weight

    def embed(tokens: Tensor) -> Tensor:
        embedded = F.embedding(tokens, embedding)
        # vLLM gives these families zeros at position 0, which nothing was drafted after.
        return embedded if theirs is None else embedded.index_fill(0, torch.tensor([0]), 0)

    def normed(y: Tensor) -> Tensor:
        return norm(y, tensors["mtp.norm.weight"]) if theirs is None else theirs.layers[0].post_norm(y)

    with torch.no_grad():
        found = list(unroll(network, hidden, ids, 3))
        for last in (2, 7):
            tokens, states, positions = ids[0, 1 : last + 2], hidden[0, : last + 1], torch.arange(last + 1)
            for k in range(3):
                y = rows(embed(tokens), states, positions)
                expected = F.linear(normed(y[-1]), target.lm_head.weight)
                torch.testing.assert_close(network.logits(found[k][0, last]), expected, atol=1e-4, rtol=1e-4)
                # vLLM passes GLM's output on before its norm, the others' after it.
                following = y[-1:] if name == "glm4_moe" else normed(y[-1:])
                tokens, states = torch.cat((tokens, ids[0, last + 2 + k, None])), torch.cat((states, following))
                positions = torch.arange(len(tokens))


def test_a_step_of_training_is_a_drafted_token(target: Any, network: OwnMtp) -> None:
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(1))
    hidden = forward_hidden(target, ids, torch.ones_like(ids))[-1]
    step = MtpStep(network)
    with torch.no_grad():
        trained = list(unroll(network, hidden, ids, 3))
        for row in (0, 7):
            cache, state = KVCache(1, 1, 64), hidden[:, : row + 1]
            block = cache.block([0], [0], row + 1)
            for k in range(3):
                tokens = ids[:, 1 : row + 2] if k == 0 else ids[:, row + 1 + k : row + 2 + k]
                state = step.advance(cache, tokens, state, block)[:, -1:]
                torch.testing.assert_close(trained[k][:, row], state[:, 0], atol=1e-4, rtol=1e-3)
                block = cache.block([0], [row + 1 + k], 1)


def test_tuning_lowers_the_loss(target: Any, network: OwnMtp) -> None:
    generator = torch.Generator().manual_seed(2)
    texts = [torch.randint(3, VOCAB, (12,), generator=generator).tolist() for _ in range(4)]
    data = make_dataset([Request(text[:3], text[3:]) for text in texts])
    batch, model = Collate()([data[i] for i in range(4)]), TargetWithNetwork(target, network.train())
    loss, trained = FeatureLoss(Objective("ce"), 3, 0.6), [p for p in network.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    optimiser = torch.optim.Adam(trained, lr=3e-3)
    found = []
    for _ in range(8):
        optimiser.zero_grad()
        found.append(loss(model, batch))
        found[-1].backward()
        optimiser.step()
    assert found[-1].item() < 0.9 * found[0].item()
    assert not any(torch.equal(old, new) for old, new in zip(before, trained, strict=True))


def tuned(network: OwnMtp, directory: Path) -> Path:
    """Write the layer with other values, and return its directory."""
    directory.mkdir()
    with torch.no_grad():
        for parameter in network.mtp_layers.parameters():
            parameter.mul_(1.25)
    write_mtp(network, directory, target="mine", architecture="any", tokens=3)
    return directory


def digests(directory: Path) -> dict[str, str]:
    return {
        str(file.relative_to(directory)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in directory.rglob("*")
        if file.is_file() and file.name != "peftlab.json"
    }


def test_stitched_only_the_layer_differs(name: str, place: Path, target: Any, network: OwnMtp, tmp_path: Path) -> None:
    draft = tuned(network, tmp_path / "draft")
    assert json.loads((draft / "config.json").read_text())["transformer_layer_config"]["model_type"].startswith(name)
    back = read_tuned_layer(draft, target)
    written = export_draft(draft, tmp_path / "out", "stitched", str(place))
    assert f"vllm serve {tmp_path / 'out'} --speculative-config" in written.command and '"mtp"' in written.command
    own = find_own_layer(str(place), target.config, "")
    old, new = stored_tensors(place), stored_tensors(tmp_path / "out")
    copies = {own.start + key for key in own.family.copies}
    assert old.keys() == new.keys()
    for key, tensor in old.items():
        layer = key in own.shards.keys() - copies
        wanted = tensor * 1.25 if layer and not key.endswith("correction_bias") else tensor
        assert torch.equal(new[key], wanted), key
    touched = {shard.path.name for key, shard in own.shards.items() if key not in copies}
    before, after = digests(place), digests(tmp_path / "out")
    assert before.keys() == after.keys() and {f for f in before if before[f] != after[f]} == touched
    again, _ = read_own_layer(find_own_layer(str(tmp_path / "out"), target.config, ""), target)
    for one, other in zip(back.mtp_layers.state_dict().values(), again.mtp_layers.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    if name in QWEN:
        alone = export_draft(draft, tmp_path / "speculators", "speculators", str(place), gamma=5)
        assert alone.command == f"speculators stitch-mtp {tmp_path / 'speculators'} {place}"
        config, first = (json.loads((at / "config.json").read_text()) for at in (tmp_path / "speculators", draft))
        decoding = config.pop("speculators_config")
        assert decoding["verifier"]["name_or_path"] == str(place)
        assert decoding["proposal_methods"][0]["speculative_tokens"] == 5
        first.pop("speculators_config")
        assert config == first and "draft_vocab_size" not in config
    else:
        with pytest.raises(PeftlabError, match=r"knows such layers of qwen3_next, .* is of a "):
            export_draft(draft, tmp_path / "speculators", "speculators", str(place))
    with pytest.raises(PeftlabError, match=r"--for stitched writes a copy of the target"):
        export_draft(draft, tmp_path / "other", "vllm", str(place))


def changed(place: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrite the shard of a checkpoint that has the MTP layer's tensors alone."""
    file = place / "model-mtp.safetensors"
    tensors, index = load_file(file), json.loads((place / "model.safetensors.index.json").read_text())
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    kept = {key: where for key, where in index["weight_map"].items() if where != file.name}
    index["weight_map"] = kept | dict.fromkeys(tensors, file.name)
    (place / "model.safetensors.index.json").write_text(json.dumps(index))


SMALL = ["draft={kind: mtp, from: target}", "~method", "train.lr=3e-2", "base.dtype=bf16", "data.samples=2",
         "data.held_out=2", "data.temperature=0.2", "data.max_new_tokens=12", "train.max_length=64",
         "train.max_steps=6", "train.epochs=6", "train.eval_every=3"]  # fmt: skip


class TestRuns:
    """Runs of the recipe on Qwen3.5's mixture of experts, in bfloat16, which a composite checkpoint contains."""

    def recipe(self, place: Path, out: Path, *overrides: str) -> Any:
        return load_recipe("draft/ci", [f"target={place}", *SMALL, f"output_dir={out}", *overrides])

    @pytest.fixture(scope="class")
    def place(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return save_target("qwen3_5_moe", tmp_path_factory.mktemp("runs") / "target", dtype=torch.bfloat16)

    @pytest.fixture(scope="class")
    def run(self, place: Path) -> Path:
        run_draft(self.recipe(place, place.parent / "run"))
        return place.parent / "run"

    def test_a_run_tunes_resumes_and_decodes_the_target(self, run: Path, place: Path) -> None:
        results = json.loads((run / "results.json").read_text())
        assert results["decoding"]["before"]["lossless"] and results["decoding"]["after"]["lossless"]
        assert results["metrics"]["prompts"]["acceptance"] > results["baseline_metrics"]["prompts"]["acceptance"]
        assert load_recipe(str(run / "recipe.yaml"), []).draft.vocabulary is None
        weights = load_file(run / "mtp" / "model.safetensors")
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        sorted((run / "checkpoints").glob("step-*.pt"))[-1].unlink()
        (run / "results.json").unlink()
        run_draft(self.recipe(place, run), resume=True)
        again = load_file(run / "mtp" / "model.safetensors")
        assert again.keys() == weights.keys() and all(torch.equal(again[key], weights[key]) for key in weights)

    def test_chains_and_trees_are_the_targets_own(self, run: Path, place: Path) -> None:
        pair, tokenizer = load_pair(str(place), str(run)), AutoTokenizer.from_pretrained(place)
        prompts = [tokenizer(text)["input_ids"] for text in ("A", "Once upon a time", "Tom had a big dog")]
        plain = [output.tokens for output in decode(pair.target, prompts, StoppingCriteria(16))]
        for width, gamma in ((1, 3), (3, 6)):
            drafter = make_drafter("draft", pair, width)
            outputs = decode(pair.target, prompts, StoppingCriteria(16), drafter, policy=lambda n=gamma: Fixed(n))
            assert [output.tokens for output in outputs] == plain
            assert any(step.drafted for output in outputs for step in output.steps)

    def test_an_update_continues_and_is_stitched(self, run: Path, place: Path, tmp_path: Path) -> None:
        rows = [{"prompt_ids": [5, 60 + i], "response_ids": [70, 71, 72 + i, 80]} for i in range(5)]
        (tmp_path / "log.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        update_draft(run, tmp_path / "log.jsonl", overrides=("train.max_steps=2",))
        export_draft(run / "updates" / "0001", tmp_path / "out", "stitched", str(place))
        first, second = load_file(run / "mtp/model.safetensors"), stored_tensors(tmp_path / "out")
        assert not torch.equal(first["mtp_layers.0.input_proj.weight"], second["mtp.fc.weight"])
        assert digests(tmp_path / "out")["config.json"] == digests(place)["config.json"]

    def test_lora_tunes_the_layer(self, place: Path, tmp_path: Path) -> None:
        method = "method={name: lora, r: 2, target_modules: [q_proj, o_proj, input_proj]}"
        run_draft(self.recipe(place, tmp_path / "lora", method, "train.max_steps=2"))
        old, new = stored_tensors(place), load_file(tmp_path / "lora" / "mtp" / "model.safetensors")
        assert not torch.equal(new["mtp_layers.0.input_proj.weight"], old["mtp.fc.weight"])
        assert torch.equal(new["mtp_layers.0.final_layernorm.weight"], old["mtp.norm.weight"])

    @pytest.mark.parametrize(
        ("change", "overrides", "message"),
        [
            (None, ["draft={kind: mtp, from: targt}"], r"draft.from: targt is no draft \(did you mean 'target'\?\)"),
            (
                lambda t: t.update({"mtp.fc.weight": torch.zeros(32, 60)}),
                [],
                r"mtp.fc.weight has shape \(32, 60\), and",
            ),
            (lambda t: t.update({"mtp.layers.1.x": torch.zeros(1)}), [], "mtp.layers.1.x are not of one MTP layer"),
            (lambda t: t.pop("mtp.norm.weight"), [], "its MTP layer lacks mtp.norm.weight"),
            (
                lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].to(torch.float8_e4m3fn)}),
                [],
                "mtp.fc.weight is stored as F8_E4M3",
            ),
        ],
    )
    def test_mistakes(self, tmp_path: Path, change: Any, overrides: list[str], message: str) -> None:
        place = save_target("qwen3_5_moe", tmp_path / "target", dtype=torch.bfloat16)
        if change is not None:
            changed(place, change)
        with pytest.raises(PeftlabError, match=message):
            run_draft(self.recipe(place, tmp_path / "run", *overrides))
        assert not (tmp_path / "run" / "mtp").exists()

    def test_targets_without_such_a_layer(self, stories: Path, tmp_path: Path) -> None:
        with pytest.raises(
            PeftlabError, match=r"draft.from: target: .* is a llama, which has no MTP layers of its own"
        ):
            run_draft(self.recipe(stories, tmp_path / "run"))
        saved = save_target("qwen3_5", tmp_path / "target", mtp=False)
        with pytest.raises(PeftlabError, match=r"no tensor is called mtp.fc.weight.*\{kind: mtp\} without from trains"):
            run_draft(self.recipe(saved, tmp_path / "run"))
        assert not (tmp_path / "run").exists()

    def test_another_target_is_not_stitched(self, run: Path, place: Path, stories: Path, tmp_path: Path) -> None:
        other = save_target("glm4_moe", tmp_path / "other", dtype=torch.bfloat16)
        wide = save_target("qwen3_5_moe", tmp_path / "wide")
        for to, message in ((other, "the MTP layer of a qwen3_5_moe_text"), (wide, r"torch.bfloat16, .* in F32")):
            with pytest.raises(PeftlabError, match=message):
                export_draft(run, tmp_path / "out", "stitched", str(to))
        with pytest.raises(PeftlabError, match="stitched is for a target's own mtp layer"):
            export_draft(stories, tmp_path / "out", "stitched", str(stories))
        assert not (tmp_path / "out").exists()
