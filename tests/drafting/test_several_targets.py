"""One draft for several targets: text and distributions of each, acceptance by each, and what is refused."""

from __future__ import annotations

import json
import shutil
from operator import mul
from pathlib import Path

import pytest
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from peftlab.drafting.acceptance import measure
from peftlab.drafting.text import make_dataset
from peftlab.errors import PeftlabError
from peftlab.pipelines.recipes import run_recipe
from peftlab.recipe.load import load_recipe
from peftlab.tasks.prompts import Request

SMALL = ["data.samples=1", "data.max_new_tokens=16", "train.max_length=48", "train.max_steps=12", "train.eval_every=6"]


@pytest.fixture(scope="module")
def other(stories: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of the same tokens that writes something else."""
    place = tmp_path_factory.mktemp("other") / "model"
    model = AutoModelForCausalLM.from_pretrained(stories)
    layers = model.model.layers
    layers[1].mlp.load_state_dict(layers[3].mlp.state_dict())
    model.save_pretrained(place)
    AutoTokenizer.from_pretrained(stories).save_pretrained(place)
    return place


def test_one_draft_learns_from_both(stories: Path, other: Path, tmp_path: Path) -> None:
    wanted = [f"target={stories}", f"data.targets=[{other}]", *SMALL, f"output_dir={tmp_path / 'both'}"]
    run_recipe(load_recipe("draft/ci", wanted))
    results = json.loads((tmp_path / "both" / "results.json").read_text())
    splits = ["prompts", f"prompts, {other}"]
    assert [*results["metrics"]] == splits and results["train_examples"] == 2 * 8
    for split in splits:
        assert results["metrics"][split]["acceptance"] > results["baseline_metrics"][split]["acceptance"] + 0.02
    each = results["held_out"]
    pooled = sum(map(mul, each["tokens"], each["acceptance"])) / sum(each["tokens"])
    assert pooled == pytest.approx(results["metrics"]["prompts"]["acceptance"], abs=1e-4) and len(each["tokens"]) == 2
    draft = AutoModelForCausalLM.from_pretrained(tmp_path / "both" / "merged").eval()
    texts = [json.loads(line) for path in tmp_path.glob("draft-data/*/part*") for line in path.read_text().splitlines()]
    assert len(texts) == 2 * 10 and len({tuple(text["response_ids"]) for text in texts}) > 10, "each wrote its own"
    held = [Request(text["prompt_ids"], text["response_ids"]) for text in texts]
    for place, split in zip((stories, other), splits, strict=True):
        target = AutoModelForCausalLM.from_pretrained(place).eval()
        rates = [measure(target, draft, make_dataset(own)).rates()["acceptance"] for own in (held[8:10], held[18:20])]
        assert any(rate == pytest.approx(results["merged_metrics"][split]["acceptance"], abs=1e-4) for rate in rates)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft={kind: eagle3}", "method=null"], "draft kind eagle3 is for one target"),
        (["draft={kind: pard}"], "draft kind pard is for one target"),
        (["objective.name=topk_kl", "data.top_k=4"], "topk_kl stores the probabilities of one target"),
        (["data.targets=[]"], "data.targets"),
    ],
)
def test_what_does_not_go_together(stories: Path, tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(PeftlabError, match=message):
        load_recipe("draft/ci", [f"target={stories}", f"data.targets=[{stories}]", "output_dir=out", *overrides])


def test_targets_of_other_tokens_are_refused_by_name(stories: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(stories)
    tokenizer.add_tokens([AddedToken("zebra")])
    tokenizer.save_pretrained(tmp_path / "zebra")
    shutil.copy(stories / "config.json", tmp_path / "zebra")
    wanted = [f"target={stories}", f"data.targets=[{tmp_path / 'zebra'}]", *SMALL, f"output_dir={tmp_path / 'out'}"]
    with pytest.raises(PeftlabError, match=r"the tokenizer of .*zebra is not the target's: 1 entries differ"):
        run_recipe(load_recipe("draft/ci", wanted))
    assert not (tmp_path / "out").exists()
