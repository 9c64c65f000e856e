"""Combined adapters are peft's ``add_weighted_adapter``, tensor by tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import build, load, save_base
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import peftlab
from peftlab.checkpoints.adapter import Adapter, read_adapter
from peftlab.checkpoints.combine import combine
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from peftlab.methods.inject import make_config, trainable_parameters


def _adapters(tmp_path: Path, ranks: tuple[int, int] = (4, 4), targets: tuple[str, ...] = ("q_proj", "v_proj")):
    base = save_base(build("llama"), tmp_path / "base")
    model = load(type(build("llama")), base)
    config = {"target_modules": list(targets), "task_type": "CAUSAL_LM", "init_lora_weights": False}
    torch.manual_seed(3)
    peft_model = peft.get_peft_model(model, peft.LoraConfig(r=ranks[0], lora_alpha=6, **config), adapter_name="a")
    peft_model.add_adapter("b", peft.LoraConfig(r=ranks[1], lora_alpha=3, use_rslora=True, **config))
    peft_model.save_pretrained(tmp_path / "adapters")
    return base, peft_model, [tmp_path / "adapters" / name for name in "ab"]


@pytest.mark.parametrize("weights", [(0.7, 0.3), (1.0, -0.5)])
@pytest.mark.parametrize("method", ["linear", "cat", "svd", "ties"])
def test_equal_to_peft(tmp_path: Path, method: str, weights: tuple[float, float]) -> None:
    _, peft_model, paths = _adapters(tmp_path)
    rank = 3 if method == "svd" else None
    peft_model.add_weighted_adapter(["a", "b"], list(weights), "c", method, svd_rank=rank, density=0.5)
    peft_model.save_pretrained(tmp_path / "combined", selected_adapters=["c"])
    theirs = read_adapter(tmp_path / "combined" / "c")
    ours = combine([read_adapter(path) for path in paths], weights, method, rank=rank)
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert (ours.config.r, ours.config.lora_alpha) == (theirs.config.r, theirs.config.lora_alpha)
    for name, tensor in theirs.tensors.items():
        if method != "svd":  # its factors are unique up to signs only
            torch.testing.assert_close(ours.tensors[name], tensor, rtol=1e-5, atol=1e-6)
        elif name.endswith("lora_A"):
            b = name.replace("lora_A", "lora_B")
            product = ours.tensors[b] @ ours.tensors[name]
            torch.testing.assert_close(product, theirs.tensors[b] @ tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_random_choice_is_pefts(method: str) -> None:
    torch.manual_seed(0)
    config = make_config("lora", r=2, lora_alpha=4.0)
    adapters = [Adapter(config, {"m.q.lora_A": torch.randn(2, 9), "m.q.lora_B": torch.randn(7, 2)}) for _ in range(3)]
    weights = (0.5, -0.25, 1.5)
    ours = combine(adapters, weights, method, density=0.7, seed=9)
    theirs = getattr(peft.utils.merge_utils, method)
    torch.manual_seed(9)
    for name, sign in (("m.q.lora_A", True), ("m.q.lora_B", False)):
        roots = torch.tensor([abs(2 * w) ** 0.5 * (-1 if sign and w < 0 else 1) for w in weights])
        expected = theirs([adapter.tensors[name] for adapter in adapters], roots, 0.7)
        torch.testing.assert_close(ours.tensors[name], expected)


def test_the_combined_adapter_merges(tmp_path: Path) -> None:
    base, _, paths = _adapters(tmp_path, ranks=(4, 2))
    both = [read_adapter(path) for path in paths]
    merge_checkpoint(combine(both, (0.7, -0.3), "cat"), base, tmp_path / "out")
    merged = load(type(build("llama")), tmp_path / "out").state_dict()
    plain = load(type(build("llama")), base).state_dict()
    for name in ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"):
        delta = sum(
            weight * adapter.config.scale(name) * adapter.tensors[f"{name}.lora_B"] @ adapter.tensors[f"{name}.lora_A"]
            for adapter, weight in zip(both, (0.7, -0.3), strict=True)
        )
        torch.testing.assert_close(merged[f"{name}.weight"], plain[f"{name}.weight"] + delta)


def test_the_command_combines_what_it_names(tmp_path: Path) -> None:
    base, _, paths = _adapters(tmp_path, ranks=(4, 2))
    odd = paths[1].rename(tmp_path / "adapters" / "b:2")  # a directory whose name ends like a weight
    shell = [
        "merge",
        f"{paths[0]}:0.7",
        f"{odd}:-0.3",
        "--method",
        "cat",
        "--base",
        str(base),
        "-o",
        str(tmp_path / "cli"),
    ]
    assert CliRunner().invoke(app, shell, catch_exceptions=False).exit_code == 0
    merge_checkpoint(combine(list(map(read_adapter, (paths[0], odd))), (0.7, -0.3), "cat"), base, tmp_path / "python")
    ours, same = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("cli", "python"))
    assert ours == same
    with pytest.raises(PeftlabError, match="'much' is not a weight"):
        CliRunner().invoke(app, ["merge", f"{paths[0]}:much", str(odd)], catch_exceptions=False)


def test_an_adapter_of_peft_and_one_of_ours_in_either_order(tmp_path: Path) -> None:
    base, _, (theirs, other) = _adapters(tmp_path)
    ours = peftlab.save_adapter(peftlab.load_adapter(load(type(build("llama")), base), other), tmp_path / "ours")
    empty = Path(shutil.copytree(theirs, tmp_path / "empty"))
    save_file({}, empty / "adapter_model.safetensors")
    config = json.loads((empty / "adapter_config.json").read_text())
    (empty / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": None}))
    one, two, nothing = (read_adapter(place) for place in (theirs, ours, empty))
    assert combine([one, two], (1, 2)).tensors.keys() == combine([two, one], (2, 1)).tensors.keys()
    for order in ([one, nothing], [nothing, one]):
        combined = combine(order, (1, 1))
        assert combined.config.r == 4 and combined.base_reference == one.base_reference
    with pytest.raises(PeftlabError, match="no LoRA factors to combine"):
        combine([nothing], (1,))


@pytest.mark.parametrize("pattern", [{"alpha_pattern": {"attn": 32}}, {"rank_pattern": {"attn": 4}}])
def test_the_output_projection_of_attention_has_its_attentions_rank_and_alpha(pattern) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attn(x, x, x)[0]

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(1, 3, 8)
    peftlab.inject(model, make_config("lora", r=2, lora_alpha=8, target_modules=["attn"], **pattern))
    for parameter in trainable_parameters(model).values():
        parameter.data.normal_(std=0.3)
    before = model(x)
    peftlab.add_weighted_adapter(model, ["default"], [1.0], "same")
    torch.testing.assert_close(model(x), before)


def test_several_files_of_loralib_take_their_options(tmp_path: Path) -> None:
    """Such a file does not contain α; one of them has a weight that is not finite."""
    base, _, paths = _adapters(tmp_path)
    files = []
    for path, value in zip(paths, (0.5, float("inf")), strict=True):
        tensors = read_adapter(path).tensors
        tensors["model.layers.0.self_attn.q_proj.lora_A"][0, 0] = value
        files.append(path.with_suffix(".bin"))
        torch.save(tensors, files[-1])
    command = ["merge", *map(str, files), "--base", str(base), "-o", str(tmp_path / "out")]
    for options, words in (([], "lora_alpha|lora-alpha"), (["--lora-alpha", "6"], "contains NaN or infinity")):
        with pytest.raises(PeftlabError, match=words):
            CliRunner().invoke(app, [*command, *options], catch_exceptions=False)
    options = ["--lora-alpha", "6", "--allow-nonfinite"]
    assert CliRunner().invoke(app, [*command, *options], catch_exceptions=False).exit_code == 0


@settings(max_examples=30)
@given(
    ranks=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    weights=st.tuples(st.floats(-2, 2), st.floats(-2, 2)),
    experts=st.integers(1, 3),
)
def test_cat_and_full_rank_svd_are_exact(ranks, weights, experts) -> None:
    adapters, total = [], 0
    for r, weight in zip(ranks, weights, strict=True):
        a, b = torch.randn(experts * r, 5), torch.randn(4, r * experts)
        name = "m.experts.up_proj_lora_" if experts > 1 else "m.q.lora_"
        config = make_config("lora", r=r, lora_alpha=3.0, target_modules=["q"])
        adapters.append(Adapter(config, {f"{name}A": a, f"{name}B": b}))
        total = total + weight * 3 / r * _delta(a, b, experts)
    for method in ("cat", "svd"):
        made = combine(adapters, weights, method, rank=4 if method == "svd" else None)
        a, b = made.tensors.values()
        torch.testing.assert_close(_delta(a, b, experts), total, rtol=1e-4, atol=1e-4)


def test_linear_takes_equal_rank_patterns() -> None:
    """The module of a lower rank has zeros up to the rank of the result."""
    config = make_config("lora", r=3, lora_alpha=3, rank_pattern={"v": 2}, alpha_pattern={"v": 2})
    shapes = {"m.q.lora_A": (3, 5), "m.q.lora_B": (4, 3), "m.v.lora_A": (2, 5), "m.v.lora_B": (4, 2)}
    one, two = (Adapter(config, {name: torch.randn(shape) for name, shape in shapes.items()}) for _ in range(2))
    both = combine([one, two], (0.25, 1.0), "linear")
    assert (both.config.r, both.config.rank_pattern) == (3, {})
    for module in ("m.q", "m.v"):
        a, b = (0.5 * one.tensors[f"{module}.lora_{s}"] + two.tensors[f"{module}.lora_{s}"] for s in "AB")
        found = both.tensors[f"{module}.lora_B"] @ both.tensors[f"{module}.lora_A"]
        torch.testing.assert_close(found, b @ a)


def _delta(a: torch.Tensor, b: torch.Tensor, experts: int) -> torch.Tensor:
    return torch.einsum("eri,ore->eoi", a.view(experts, -1, a.shape[1]), b.view(b.shape[0], -1, experts))


def test_refusals(tmp_path: Path) -> None:
    a = {"m.q.lora_A": torch.randn(2, 5), "m.q.lora_B": torch.randn(4, 2)}
    plain = Adapter(make_config("lora", r=2), a)
    wide = Adapter(make_config("lora", r=1), {"m.q.lora_A": torch.randn(1, 5), "m.q.lora_B": torch.randn(4, 1)})
    dora = Adapter(make_config("lora", r=2, use_dora=True), a)
    other = Adapter(make_config("bitfit"), {})
    heads = [Adapter(plain.config, a | {"classifier.weight": torch.full((2, 2), float(i))}) for i in range(2)]
    alone = Adapter(plain.config, {"m.q.lora_A": a["m.q.lora_A"]})
    short = Adapter(plain.config, a | {"m.q.lora_B": torch.randn(4, 1)})
    larger = Adapter(plain.config, {"m.q.lora_A": torch.randn(2, 6), "m.q.lora_B": torch.randn(4, 2)})
    biased = Adapter(make_config("lora", r=2, bias="all"), a)
    for adapters, weights, method, words in (
        ([plain, wide], (1, 1), "linear", "ranks differ"),
        ([plain, dora], (1, 1), "cat", "DoRA"),
        ([plain, other], (1, 1), "cat", "only LoRA"),
        (heads, (1, 1), "cat", "classifier.weight"),
        ([plain, plain], (1,), "cat", "as many weights"),
        ([plain, plain], (1, 1), "linera", "did you mean 'linear'"),
        ([plain, alone], (1, 1), "cat", r"no m\.q\.lora_B"),
        ([plain, short], (1, 1), "cat", r"a rank of 1, not 2, in m\.q\.lora_B"),
        ([plain, larger], (1, 1), "svd", r"m\.q\.lora_A: .* different sizes, 4 × 5 and 4 × 6"),
        ([plain, biased], (1, 1), "cat", "different bias: none and all"),
    ):
        with pytest.raises(PeftlabError, match=words):
            combine(adapters, weights, method)
    with pytest.raises(PeftlabError, match="density"):
        combine([plain], (1,), "ties", density=0)
    with pytest.raises(PeftlabError, match="at least 1"):
        combine([plain], (1,), "svd", rank=-1)
    with pytest.raises(PeftlabError, match="cat has none, svd does"):
        combine([plain], (1,), rank=4)


def test_the_order_of_the_adapters_decides_nothing_but_the_base() -> None:
    """The second adapter alone trains a head and is stored in fp32."""
    config = make_config("lora", r=2)
    headed = make_config("lora", r=2, modules_to_save=["score"])
    half = {"m.q.lora_A": torch.randn(2, 5).bfloat16(), "m.q.lora_B": torch.randn(4, 2).bfloat16()}
    full = {"m.q.lora_A": torch.randn(2, 5), "m.q.lora_B": torch.randn(4, 2), "score.weight": torch.ones(2, 2)}
    both = [Adapter(config, half, base_reference="a"), Adapter(headed, full, base_reference="b")]
    one, other = combine(both, (1, 2)), combine(both[::-1], (2, 1))
    assert one.config.modules_to_save == other.config.modules_to_save == ["score"]
    assert {t.dtype for t in one.tensors.values()} == {t.dtype for t in other.tensors.values()} == {torch.float32}
    delta = [made.tensors["m.q.lora_B"] @ made.tensors["m.q.lora_A"] for made in (one, other)]
    torch.testing.assert_close(delta[0], delta[1])
    assert any("different base models: a, b" in note for note in one.notes)
