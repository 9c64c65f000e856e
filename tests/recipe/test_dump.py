"""A resolved recipe written as YAML loads to an equal recipe, whatever is in it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from peftlab.recipe import library
from peftlab.recipe.load import dump_recipe, load_recipe
from peftlab.recipe.schema import FinetuneRecipe

# Text that YAML could take for something else, and any other text.
words = st.sampled_from(
    ["no", "null", "~", "1e-4", "0x1", "=", "<<", "2024-01-01", "- a", "a: b", "#", "", " a ", "*a"]
)
text = words | st.text(max_size=20)
positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_nan=False)
count = st.integers(min_value=2, max_value=10**12)
share = st.floats(min_value=0, max_value=1, exclude_min=True, exclude_max=True)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


lora = st.fixed_dictionaries(
    {"name": st.just("lora"), "r": count, "lora_alpha": positive},
    optional={
        "target_modules": text.filter(bool) | st.lists(text.filter(bool), min_size=1),
        "rank_pattern": st.dictionaries(text, count, max_size=3),
        "modules_to_save": maybe(st.lists(text, min_size=1, max_size=3)),
    },
)
train = st.fixed_dictionaries(
    {},
    optional={
        "epochs": positive,
        "max_steps": maybe(count),
        "lr": positive,
        "warmup": share | st.integers(1, 10**6),
        "betas": st.lists(share, min_size=2, max_size=2),
        "trackers": st.lists(st.sampled_from(["tensorboard", "wandb"])),
        "scheduler": st.sampled_from(["linear", "cosine", "constant"]),
        "gradient_checkpointing": st.booleans() | st.just("selective"),
    },
)
own_data = st.fixed_dictionaries(
    {"path": text, "text": st.lists(text, min_size=1, max_size=2), "label": text},
    optional={
        "validation": maybe(count | share),
        "bins": st.tuples(text, text)
        .filter(lambda names: names[0] != names[1])
        .map(lambda names: {names[0]: [None, -0.5], names[1]: [0.5, None]}),
    },
)
recipes = st.fixed_dictionaries(
    {
        "model": text,
        "task": st.just("text/classification"),
        "data": own_data,
        "method": lora | st.just({"name": "full"}) | st.just({"name": "head"}),
        "train": train,
        "merge": maybe(st.booleans()),
        "revision": maybe(text),
        "output_dir": text,
    }
).map(FinetuneRecipe.model_validate)


@given(
    recipe=recipes,
    header=st.text(st.characters(categories=["L", "N", "P", "S", "Z"], include_characters="\n"), max_size=40),
)
def test_dump_loads_to_an_equal_recipe(recipe: FinetuneRecipe, header: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(dump_recipe(recipe, header), encoding="utf-8", newline="")
        assert load_recipe(path) == recipe


def test_dump_is_complete_readable_and_headed() -> None:
    recipe = load_recipe("quickstart")
    lines = dump_recipe(recipe, "Resolved.\n\nSecond.").splitlines()
    assert lines[:4] == ["# Resolved.", "#", "# Second.", "kind: finetune"]
    assert "revision: null" in lines
    assert "    negative: [null, -0.5]" in lines
    assert {line.split(":")[0].strip() for line in lines[3:]} >= set(FinetuneRecipe.model_fields)


def test_dump_of_every_shipped_recipe(tmp_path: Path) -> None:
    for name in library.files():
        path = tmp_path / "recipe.yaml"
        path.write_text(dump_recipe(load_recipe(name)))
        assert load_recipe(path) == load_recipe(name)
