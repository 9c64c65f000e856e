"""Whatever stands in a file or an override, the answer is a recipe or one readable message."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from peftlab.drafting.config import DraftData, DraftObjective
from peftlab.errors import PeftlabError
from peftlab.methods.config import METHODS, config_class
from peftlab.recipe.load import load_recipe
from peftlab.recipe.schema import KINDS, DraftRecipe, FinetuneRecipe
from peftlab.tasks.table import DataConfig
from peftlab.training.config import TrainConfig

SECTIONS = {"data": DataConfig, "train": TrainConfig, "written": DraftData, "objective": DraftObjective}
SECTIONS |= {name: config_class(name) for name in METHODS}
KEYS = sorted(
    {
        *FinetuneRecipe.model_fields,
        *DraftRecipe.model_fields,
        *(key for m in SECTIONS.values() for key in m.model_fields),
        "rank",
        "x y",
    }
)

keys = st.sampled_from(KEYS)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(
    ["glue/cola", "text/classification", "lora", "full", "finetune", "linear", "no"]
)  # fmt: skip
values = st.recursive(scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(keys, v, max_size=4), max_leaves=12)
overrides = st.lists(
    st.text(max_size=12)
    | st.builds("{}.{}={}".format, keys, keys, values.map(json.dumps))
    | st.builds("{}={}".format, keys, values.map(json.dumps))
    | st.builds("~{}".format, keys),
    max_size=3,
)
bare = {"model": "a", "task": "glue/cola", "output_dir": "b"}
bare_draft = {"kind": "draft", "target": "a", "draft": "b", "data": {"prompts": ["c"]}, "output_dir": "d"}


@settings(max_examples=300)
@given(
    document=st.dictionaries(keys, values, max_size=6).map(lambda more: bare | more)
    | st.dictionaries(keys, values, max_size=4).map(lambda more: bare_draft | more)
    | values,
    changes=overrides,
)
def test_a_recipe_or_one_message(document: object, changes: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        path.write_text(json.dumps(document), encoding="utf-8")
        try:
            recipe = load_recipe(path, changes)
        except PeftlabError as error:
            told = str(error)
            assert told and "pydantic" not in told
            assert all(line.startswith((str(path), "override ")) for line in told.split("\n"))
        else:
            assert isinstance(recipe, tuple(KINDS.values()))


@given(text=st.text(max_size=60))
def test_any_text_as_a_file(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.yaml"
        path.write_bytes(text.encode())
        try:
            load_recipe(path)
        except PeftlabError as error:
            assert str(error).startswith(str(path))
