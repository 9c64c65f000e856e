"""``peftlab adapter extract``: the difference of two checkpoints as an adapter, and what it says of the error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, BertModel, PreTrainedModel
from typer.testing import CliRunner

import peftlab
from peftlab.checkpoints import extract
from peftlab.checkpoints.extract import extract_adapter, low_rank_factors
from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from tests.checkpoints.models import adapt, build, save_base


def extracted(finetuned: Path, base: Path, out: Path, *options: object) -> dict[str, Any]:
    """Run the verb and return its JSON."""
    arguments = ["adapter", "extract", str(finetuned), "--base", str(base), "-o", str(out), *map(str, options)]
    done = CliRunner().invoke(app, [*arguments, "--json", "-"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def weights(directory: Path) -> dict[str, Tensor]:
    return {key: tensor for path in directory.glob("*.safetensors") for key, tensor in load_file(path).items()}


def changed(model: PreTrainedModel, *names: str, std: float = 0.05) -> PreTrainedModel:
    """Add noise to the parameters with these endings."""
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(names):
                parameter.add_(torch.randn_like(parameter), alpha=std)
    return model


EXACT: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"target_modules": "all-linear", "r": 4}, {}),
    ("llama", {"target_modules": ["q_proj", "down_proj"], "r": 4, "rank_pattern": {"q_proj": 2}}, {}),
    ("llama", {"target_modules": ["embed_tokens", "v_proj"], "r": 4}, {"tie_word_embeddings": False}),
    ("gpt2", {"target_modules": ["c_attn", "c_fc"], "r": 4}, {}),
    ("bert", {"target_modules": ["query", "value"], "r": 4, "bias": "all"}, {}),
    ("mixtral", {"target_modules": ["q_proj"], "target_parameters": ["gate_up_proj", "down_proj"], "r": 4}, {}),
]


@pytest.mark.parametrize(("family", "method", "config"), EXACT)
@pytest.mark.parametrize("goal", [("--rank", 4), ("--energy", 1)])
def test_a_merged_adapter_is_found_again(
    tmp_path: Path, family: str, method: dict[str, Any], config: dict[str, Any], goal: tuple[object, ...]
) -> None:
    base = save_base(build(family, **config), tmp_path / "base")
    adapter = adapt(build(family, **config), tmp_path / "adapter", **method)
    peftlab.merge_checkpoint(adapter, base, tmp_path / "tuned")
    found = extracted(tmp_path / "tuned", base, tmp_path / "again", *goal)
    assert found["error"] < 1e-4 and all(row["error"] < 1e-4 and row["exact"] for row in found["modules"])
    assert all(row["rank"] <= 4 for row in found["modules"])
    peftlab.merge_checkpoint(tmp_path / "again", base, tmp_path / "merged")
    ours, theirs = weights(tmp_path / "merged"), weights(tmp_path / "tuned")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-5, msg=key)


def test_peft_and_peftlab_compute_what_the_finetuned_model_computes(tmp_path: Path) -> None:
    ids = torch.arange(1, 21).view(2, 10)
    base = save_base(build("llama"), tmp_path / "base")
    tuned = changed(build("llama"), "q_proj.weight", "norm.weight", "layers.1.mlp.down_proj.weight")
    found = extracted(save_base(tuned, tmp_path / "tuned"), base, tmp_path / "adapter", "--energy", 1)
    assert found["whole"] and all("norm" in name for name in found["whole"]) and found["biases"] == 0
    theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), str(tmp_path / "adapter"))
    ours = peftlab.load_adapter(AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter")
    for model in (theirs, ours):
        torch.testing.assert_close(model.eval()(ids).logits, tuned(ids).logits, rtol=1e-4, atol=1e-5)
    check = peftlab.check_adapter(tmp_path / "adapter", str(base))
    assert not check.unmatched and not check.missing and check.consumers["peft"].loads is True


@pytest.mark.parametrize("energy", [0.5, 0.9])
def test_the_error_is_the_tail_of_the_singular_values(tmp_path: Path, energy: float) -> None:
    base, tuned = build("llama"), changed(build("llama"), "q_proj.weight")
    places = save_base(tuned, tmp_path / "tuned"), save_base(base, tmp_path / "base")
    found = extracted(*places, tmp_path / "adapter", "--energy", energy)
    for row in found["modules"]:
        delta = (tuned.get_submodule(row["name"]).weight - base.get_submodule(row["name"]).weight).detach()
        square = torch.linalg.svdvals(delta.double()).square()
        tail = float(square[row["rank"] :].sum() / square.sum()) ** 0.5
        assert row["error"] == pytest.approx(tail, rel=1e-3) and 1 - tail**2 >= energy
        assert 1 - float(square[row["rank"] - 1 :].sum() / square.sum()) < energy
        weight = base.get_submodule(row["name"]).weight.detach()
        assert row["ratio"] == pytest.approx(float(delta.norm() / weight.norm()), rel=1e-3)


def test_a_large_matrix_is_factored_at_random_with_its_error_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extract, "RANDOMISED_SIDE", 64)
    generator = torch.Generator().manual_seed(0)
    spectrum = torch.logspace(0, -3, 96)
    left, right = (torch.linalg.qr(torch.randn(n, 96, generator=generator)).Q for n in (160, 96))
    for matrix in ((left * spectrum) @ right.t(), ((left * spectrum) @ right.t()).t()):
        result = low_rank_factors(matrix, rank=8)
        missed = float((matrix - result.b @ result.a).norm() / matrix.norm())
        best = float(spectrum[8:].norm() / spectrum.norm())
        assert not result.exact and result.error == pytest.approx(missed, rel=1e-3)
        assert best * 0.999 <= result.error <= best * 1.01
    low = torch.randn(160, 4, generator=generator) @ torch.randn(4, 96, generator=generator)
    assert low_rank_factors(low, rank=8).error < 1e-5
    assert low_rank_factors(low, energy=0.999).exact


def test_a_head_that_the_base_lacks_is_stored_whole(tmp_path: Path) -> None:
    tuned = changed(build("bert"), "query.weight")
    body = BertModel(tuned.config)
    body.load_state_dict(build("bert").bert.state_dict())
    base = save_base(body, tmp_path / "base")
    found = extracted(save_base(tuned, tmp_path / "tuned"), base, tmp_path / "adapter", "--rank", 32)
    assert found["whole"] == ["classifier"] and found["architecture"] == "BertForSequenceClassification"
    peftlab.merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    ours, theirs = weights(tmp_path / "merged"), weights(tmp_path / "tuned")
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-5, msg=key)


@pytest.mark.parametrize("tied", [True, False])
def test_a_vocabulary_that_has_grown_is_stored_whole(tmp_path: Path, tied: bool) -> None:
    base = save_base(build("llama", tie_word_embeddings=tied), tmp_path / "base")
    tuned = changed(build("llama", tie_word_embeddings=tied), "q_proj.weight")
    tuned.resize_token_embeddings(99)
    found = extracted(save_base(tuned, tmp_path / "tuned"), base, tmp_path / "adapter", "--energy", 1)
    assert set(found["whole"]) == {"model.embed_tokens"} | (set() if tied else {"lm_head"})
    assert any("tokenizer" in note for note in found["notes"])
    peftlab.merge_checkpoint(tmp_path / "adapter", base, tmp_path / "merged")
    ours, theirs = weights(tmp_path / "merged"), weights(tmp_path / "tuned")
    assert ours.keys() == theirs.keys() and ours["model.embed_tokens.weight"].shape[0] == 99
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=1e-5, msg=key)


def test_shards_and_dtypes(tmp_path: Path) -> None:
    base = save_base(build("llama"), tmp_path / "base", max_shard_size="20KB")
    tuned = changed(build("llama"), "q_proj.weight").to(torch.bfloat16)
    place = save_base(tuned, tmp_path / "tuned")
    found = extracted(place, base, tmp_path / "adapter", "--rank", 8)
    assert any("bfloat16" in note for note in found["notes"])
    assert (base / "model.safetensors.index.json").exists()


def copy_with(model: PreTrainedModel, place: Path, change: Any) -> Path:
    save_base(model, place)
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps(config | change))
    return place


@pytest.mark.parametrize(
    ("tuned", "options", "named"),
    [
        (lambda: build("llama"), {"rank": 4}, "equal"),
        (lambda: changed(build("llama"), "norm.weight"), {"rank": 4}, "only tensors that are stored whole"),
        (lambda: build("gpt2"), {"rank": 4}, "not one model"),
        (lambda: build("llama", intermediate_size=40), {"rank": 4}, r"gate_proj\.weight has shape \(40, 32\)"),
        (lambda: changed(build("llama"), "q_proj.weight", std=float("nan")), {"rank": 4}, "q_proj: contains NaN"),
        (lambda: changed(build("llama"), "q_proj.weight"), {}, "--rank"),
        (lambda: changed(build("llama"), "q_proj.weight"), {"rank": 4, "energy": 0.9}, "--rank"),
        (lambda: changed(build("llama"), "q_proj.weight"), {"energy": 1.5}, "energy"),
        (lambda: changed(build("llama"), "q_proj.weight"), {"rank": 0}, "rank 0"),
    ],
)
def test_what_cannot_be_extracted_is_named_and_nothing_is_written(
    tmp_path: Path, tuned: Any, options: dict[str, Any], named: str
) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    place = save_base(tuned(), tmp_path / "tuned")
    with pytest.raises(PeftlabError, match=named):
        peftlab.extract_adapter(place, base, tmp_path / "adapter", **options)
    assert not (tmp_path / "adapter").exists()


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    place = copy_with(build("llama"), tmp_path / "tuned", {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    with pytest.raises(PeftlabError, match="quantised"):
        peftlab.extract_adapter(place, base, tmp_path / "adapter", rank=4)


def test_each_modules_error_is_shown(tmp_path: Path) -> None:
    base = save_base(build("llama"), tmp_path / "base")
    place = save_base(changed(build("llama"), "q_proj.weight"), tmp_path / "tuned")
    arguments = ["adapter", "extract", str(place), "--base", str(base), "-o", str(tmp_path / "a"), "--rank", "4"]
    shown = CliRunner().invoke(app, arguments, catch_exceptions=False, env={"COLUMNS": "120"}).stdout
    assert all(f"model.layers.{i}.self_attn.q_proj" in shown for i in (0, 1))
    assert CliRunner().invoke(app, [*arguments, "--overwrite", "--quiet"]).output == ""


def test_the_base_is_only_read_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than a pair of tensors of the checkpoints is held at once."""
    import gc
    import weakref

    from peftlab.checkpoints.tensors import Shard

    alive: list[Any] = []
    most = 0
    read = Shard.read

    def counted(self: Shard, key: str, buffer: Tensor | None = None) -> Tensor:
        nonlocal most
        tensor = read(self, key, buffer)
        alive.append(weakref.ref(tensor))
        gc.collect()
        most = max(most, sum(each() is not None for each in alive))
        return tensor

    monkeypatch.setattr(Shard, "read", counted)
    base = save_base(build("llama"), tmp_path / "base")
    place = save_base(changed(build("llama"), "proj.weight"), tmp_path / "tuned")
    gc.freeze()  # what is alive by now need not be looked at again
    try:
        peftlab.extract_adapter(place, base, tmp_path / "adapter", rank=2)
    finally:
        gc.unfreeze()
    assert most <= 2


def test_tensors_that_the_class_does_not_read_are_compared(tmp_path: Path) -> None:
    """A layer for further tokens: equal it is counted, missing it is noted, changed it is refused."""
    base = save_base(build("llama"), tmp_path / "base")
    tuned = build("llama")
    with torch.no_grad():
        tuned.model.layers[0].self_attn.q_proj.weight.add_(0.1)
    tuned = save_base(tuned, tmp_path / "tuned")

    def add(directory: Path, value: torch.Tensor) -> None:
        file = directory / "model.safetensors"
        save_file(load_file(file) | {"mtp.fc.weight": value}, file, metadata={"format": "pt"})

    add(base, torch.ones(3, 4))
    found = extract_adapter(tuned, base, tmp_path / "missing", rank=1)
    assert any("lacks 1 tensors of the base" in note and "mtp.fc.weight" in note for note in found.notes)
    add(tuned, torch.ones(3, 4))
    assert extract_adapter(tuned, base, tmp_path / "equal", rank=1).unchanged == found.unchanged + 1
    add(tuned, torch.zeros(3, 4))
    with pytest.raises(PeftlabError, match=r"1 tensors.*no parameter for differ, mtp\.fc\.weight"):
        extract_adapter(tuned, base, tmp_path / "changed", rank=1)
    assert not (tmp_path / "changed").exists()
