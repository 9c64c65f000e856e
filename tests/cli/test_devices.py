"""``--device``: where models are put, and what is said where there is no such device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from peftlab import PeftlabError
from peftlab.cli.app import app
from peftlab.drafting.base import TargetLoader
from peftlab.drafting.heads import MedusaKind, write_medusa
from peftlab.environment import resolve_device
from peftlab.models.load import load_base, load_tokenizer
from tests.drafting.draft_models import medusa
from tests.training import tiny


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(
    ("name", "said"), [("cudda", "did you mean 'cuda'"), ("tpu", "one of auto, cpu, cuda, mps"), ("cuda:7", "one of")]
)
def test_a_name_that_is_no_device(name: str, said: str) -> None:
    with pytest.raises(PeftlabError, match=said):
        resolve_device(name)


def test_auto_is_a_device_that_computes() -> None:
    assert torch.ones(2, device=resolve_device("auto")).sum().item() == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "RECIPE"],
        ["eval", "nowhere"],
        ["predict", "nowhere", "ROWS"],
        ["merge", "nowhere"],
        ["generate", "--target", "nowhere", "--prompt", "Once"],
        ["draft", "plan", "--target", "nowhere"],
        ["draft", "bench", "--target", "nowhere", "--prompts", "PROMPTS"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_without_a_gpu_cuda_is_one_message_and_nothing_is_made(arguments: list[str], tmp_path: Path) -> None:
    model, rows = tiny.save_model(tmp_path / "bert"), tiny.save_rows(tmp_path / "rows.csv")
    recipe = tiny.write_recipe(tiny.recipe(model, rows, tmp_path / "run"), tmp_path / "recipe.yaml")
    (tmp_path / "prompts.txt").write_text("Once upon a time\n")
    files = {"RECIPE": recipe, "ROWS": rows, "PROMPTS": tmp_path / "prompts.txt"}
    before = sorted(tmp_path.rglob("*"))
    if arguments[0] == "predict":
        arguments = [*arguments, "--recipe", str(recipe)]
    found = invoke(*(files.get(argument, argument) for argument in arguments), "--device", "cuda").exception
    assert isinstance(found, PeftlabError) and str(found).startswith("device cuda: there is none here"), found
    assert sorted(tmp_path.rglob("*")) == before


def test_target_and_heads_are_put_where_they_are_asked_to_be(stories: Path, tmp_path: Path) -> None:
    """The meta device stands for any that is not the CPU."""
    write_medusa(medusa(load_base(str(stories), "AutoModelForCausalLM")[0], heads=1).heads, tmp_path / "heads")
    meta, wide = torch.device("meta"), torch.float32
    loader = TargetLoader(str(stories), load_tokenizer(str(stories)), wide, torch.bfloat16, meta, pack=True)
    heads = MedusaKind.open_heads(str(tmp_path / "heads"), loader)
    assert {tensor.device for tensor in (*loader.target.parameters(), *loader.target.buffers())} == {meta}
    assert {(p.device, p.dtype) for p in heads.parameters()} == {(meta, torch.bfloat16)}


def test_what_was_measured_says_where(stories: Path, tmp_path: Path) -> None:
    found = invoke("draft", "plan", "--target", stories, "--context", 8, "--repeats", 1, "--max-gamma", 1, "--json", "-",
                   "--device", "cpu")  # fmt: skip
    assert found.exit_code == 0, found.exception
    plan = json.loads(found.stdout)
    assert plan["device"] == "cpu" and plan["target"] == str(stories) and "doubts" in plan["conditions"]
