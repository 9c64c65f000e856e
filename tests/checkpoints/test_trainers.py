"""``save_pretrained`` of an injected model, and transformers' Trainer with its checkpoints."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import peftlab
from peftlab.methods.config import config_class
from peftlab.methods.inject import trainable_parameters

SIZE: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60,
    "max_position_embeddings": 20, "num_labels": 3,
}  # fmt: skip


class Rows(Dataset[dict[str, Tensor]]):
    """Sixteen rows whose label shows in their first token."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(5, 60, (8,), generator=generator)
        return {"input_ids": ids, "labels": torch.tensor(int(ids[0]) % 3)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("base")
    BertForSequenceClassification(BertConfig(**SIZE)).save_pretrained(directory)
    return str(directory)


def load(reference: str) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(reference)


def injected(base: str, method: str = "lora") -> Any:
    torch.manual_seed(1)
    fields = {"lora": {"r": 4, "lora_dropout": 0.1}, "houlsby": {"bottleneck": 4}}
    return peftlab.inject(load(base), config_class(method)(**fields.get(method, {})))


def stirred(model: Any) -> Any:
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter += 0.2 * torch.randn_like(parameter)
    return model


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        return model(torch.stack([Rows()[i]["input_ids"] for i in range(4)]).to(model.device)).logits.cpu()


def files(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.parametrize("method", ["lora", "houlsby", "bitfit", "full", "head"])
def test_save_pretrained_writes_the_adapter(method: str, base: str, tmp_path: Path) -> None:
    model = stirred(injected(base, method))
    model.save_pretrained(tmp_path / "ours")
    peftlab.save_adapter(model, tmp_path / "same")
    assert files(tmp_path / "ours") == {"adapter_config.json", "adapter_model.safetensors"}
    for name in files(tmp_path / "ours"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "same" / name).read_bytes()
    with safe_open(tmp_path / "ours" / "adapter_model.safetensors", "pt") as file:
        assert len(file.keys()) == len(trainable_parameters(model))
    assert torch.equal(logits(peftlab.load_adapter(load(base), tmp_path / "ours")), logits(model))


def test_transformers_never_reads_the_base_alone_from_it(base: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = stirred(injected(base))
    model.save_pretrained(tmp_path / "lora")
    torch.testing.assert_close(logits(load(str(tmp_path / "lora"))), logits(model), rtol=1e-5, atol=1e-5)
    stirred(injected(base, "houlsby")).save_pretrained(tmp_path / "houlsby")
    with pytest.raises(Exception, match=r"peft_type|PEFT|adapter"):  # peft's own words for what it cannot read
        load(str(tmp_path / "houlsby"))


def test_merged_and_removed_models_save_plainly(base: str, tmp_path: Path) -> None:
    model = stirred(injected(base))
    expected = logits(model)
    merged = peftlab.merge(copy.deepcopy(model))
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(load(str(tmp_path / "merged"))), expected, rtol=1e-4, atol=1e-5)
    assert "save_pretrained" not in vars(merged)
    kept = peftlab.unmerge(peftlab.merge(model, keep=True))
    kept.save_pretrained(tmp_path / "again")
    assert torch.equal(logits(peftlab.load_adapter(load(base), tmp_path / "again")), expected)
    peftlab.remove(kept).save_pretrained(tmp_path / "removed")
    assert torch.equal(logits(load(str(tmp_path / "removed"))), logits(load(base)))


@pytest.mark.parametrize("twin", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_saves_itself(twin: Any, base: str, tmp_path: Path) -> None:
    model = stirred(injected(base))
    other = twin(model)
    stirred(stirred(other)).save_pretrained(tmp_path / "other")
    model.save_pretrained(tmp_path / "model")
    assert torch.equal(logits(peftlab.load_adapter(load(base), tmp_path / "other")), logits(other))
    assert torch.equal(logits(peftlab.load_adapter(load(base), tmp_path / "model")), logits(model))
    assert not torch.equal(logits(other), logits(model))
    del model
    other.save_pretrained(tmp_path / "alone")
    assert torch.equal(logits(peftlab.load_adapter(load(base), tmp_path / "alone")), logits(other))


def test_gathered_values_are_written_in_place_of_the_models(base: str, tmp_path: Path) -> None:
    model, other = injected(base), stirred(injected(base))
    values = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    model.save_pretrained(tmp_path / "given", state_dict=values)
    assert torch.equal(logits(peftlab.load_adapter(load(base), tmp_path / "given")), logits(other))
    assert not torch.equal(logits(model), logits(other))
    model.save_pretrained(tmp_path / "elsewhere", is_main_process=False)
    assert not (tmp_path / "elsewhere").exists()
    with pytest.raises(peftlab.PeftlabError, match=r"state_dict has no bert\..*lora_A"):
        model.save_pretrained(tmp_path / "none", state_dict={})
    with pytest.raises(peftlab.PeftlabError, match="written without variant"):
        model.save_pretrained(tmp_path / "none", variant="fp16")
    assert not (tmp_path / "none").exists()


def test_the_idiom_of_accelerates_loops_writes_the_adapter(base: str, tmp_path: Path) -> None:
    model = stirred(injected(base))
    model.save_pretrained(tmp_path / "plain")
    model.save_pretrained(tmp_path / "torch", save_function=torch.save)
    model.save_pretrained(
        tmp_path / "loop", is_main_process=True, save_function=torch.save, state_dict=model.state_dict()
    )
    for name in ("torch", "loop"):
        assert files(tmp_path / name) == files(tmp_path / "plain")
        for file in files(tmp_path / "plain"):
            assert (tmp_path / name / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_a_plain_module_gets_no_such_method() -> None:
    model = peftlab.inject_lora(nn.Sequential(nn.Linear(4, 4)), r=1)
    assert not hasattr(model, "save_pretrained")


class AdapterTrainer(peftlab.AdapterCheckpoints, Trainer):
    """What docs/guide/trainers.md shows."""


def arguments(directory: Path, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(directory), per_device_train_batch_size=4, learning_rate=1e-2, num_train_epochs=2, seed=0,
        save_strategy="steps", save_steps=2, report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=100, **options,
    )  # fmt: skip


def test_checkpoints_of_a_trainer_load_and_merge(base: str, tmp_path: Path) -> None:
    model = injected(base)
    trainer = Trainer(model, arguments(tmp_path / "run"), train_dataset=Rows())
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    for place in (tmp_path / "final", tmp_path / "run" / "checkpoint-8"):
        assert "model.safetensors" not in files(place)
        assert torch.equal(logits(peftlab.load_adapter(load(base), place)), logits(model))
    peftlab.merge_checkpoint(str(tmp_path / "run" / "checkpoint-8"), base, str(tmp_path / "merged"))
    assert not {name for name in files(tmp_path / "merged") if name.endswith((".pt", ".pth", ".bin"))}
    torch.testing.assert_close(logits(load(str(tmp_path / "merged"))), logits(model), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(logits(model), logits(load(base)), atol=1e-2)


@pytest.mark.parametrize("method", ["lora", "bitfit"])
def test_a_resumed_trainer_ends_as_an_uninterrupted_one(method: str, base: str, tmp_path: Path) -> None:
    whole = injected(base, method)
    AdapterTrainer(whole, arguments(tmp_path / "whole"), train_dataset=Rows()).train()
    resumed = injected(base, method)
    trainer = AdapterTrainer(resumed, arguments(tmp_path / "resumed"), train_dataset=Rows())
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert trainer.state.global_step == 8
    for name, parameter in trainable_parameters(whole).items():
        assert torch.equal(resumed.get_parameter(name), parameter), name


def test_the_best_model_at_the_end(base: str, tmp_path: Path) -> None:
    scores = iter([0.1, 0.9, 0.2, 0.3])
    model = injected(base)
    trainer = AdapterTrainer(
        model,
        arguments(
            tmp_path, eval_strategy="steps", eval_steps=2, load_best_model_at_end=True, metric_for_best_model="score"
        ),
        train_dataset=Rows(),
        eval_dataset=Rows(),
        compute_metrics=lambda prediction: {"score": next(scores)},
    )
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-4")
    assert torch.equal(logits(model), logits(peftlab.load_adapter(load(base), tmp_path / "checkpoint-4")))
    assert not torch.equal(logits(model), logits(peftlab.load_adapter(load(base), tmp_path / "checkpoint-8")))


def test_other_checkpoints_are_read_as_a_trainer_does(base: str, tmp_path: Path) -> None:
    whole = load(base)
    AdapterTrainer(whole, arguments(tmp_path / "whole"), train_dataset=Rows()).train()
    assert (tmp_path / "whole" / "checkpoint-4" / "model.safetensors").exists()
    resumed = load(base)
    trainer = AdapterTrainer(resumed, arguments(tmp_path / "resumed"), train_dataset=Rows())
    trainer.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert torch.equal(logits(resumed), logits(whole))


def test_gradient_checkpointing_changes_nothing(base: str, tmp_path: Path) -> None:
    models = [injected(base), injected(base)]
    for model, on in zip(models, (False, True), strict=True):
        settings = arguments(tmp_path / str(on), gradient_checkpointing=on)
        Trainer(model, settings, train_dataset=Rows()).train()
    torch.testing.assert_close(logits(models[1]), logits(models[0]), rtol=1e-4, atol=1e-5)


def documented(heading: str, base: str) -> str:
    """Return the first Python block below a heading of docs/guide/trainers.md, about the model at ``base``."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "trainers.md").read_text()
    block = page.split(f"## {heading}\n")[1].split("```python\n")[1].split("```")[0]
    assert '"FacebookAI/roberta-base"' in block
    return block.replace('"FacebookAI/roberta-base"', repr(base))


def test_the_documented_trainer(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"train_rows": Rows(), "validation_rows": Rows()}
    exec(documented("transformers' Trainer", base), names)
    merged = names["model"]
    torch.testing.assert_close(logits(load("merged").to(merged.device)), logits(merged), rtol=1e-5, atol=1e-6)
    back = peftlab.load_adapter(load(base).to(merged.device), "adapter")
    torch.testing.assert_close(logits(back), logits(merged), rtol=1e-4, atol=1e-5)


def test_the_documented_loop(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [Rows()[i] for i in range(4)]
    batches = [{key: torch.stack([row[key] for row in rows]) for key in rows[0]}] * 2
    names: dict[str, Any] = {"batches": batches}
    exec(documented("A plain loop", base), names)
    assert torch.equal(logits(peftlab.load_adapter(load(base), "adapter")), logits(names["model"]))
    assert not torch.equal(logits(names["model"]), logits(load(base)))
