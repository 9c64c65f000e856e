"""The reference page is what the schema says now, and the JSON Schema knows every key."""

from __future__ import annotations

from peftlab.drafting.config import DraftData, DraftObjective
from peftlab.drafting.table import DRAFTS
from peftlab.methods.config import METHODS, config_class
from peftlab.recipe import library
from peftlab.recipe.document import json_schema, reference_markdown
from peftlab.recipe.errors import fields
from peftlab.recipe.schema import KINDS, DraftRecipe, FinetuneRecipe
from peftlab.registry import resolve
from peftlab.training.config import TrainConfig


def test_the_page_is_up_to_date() -> None:
    page = library.recipes_root().parent / "docs" / "reference" / "recipes.md"
    assert page.read_text(encoding="utf-8") == reference_markdown(), "run python -m peftlab.recipe.document"


def test_every_key_has_a_row_with_a_meaning() -> None:
    page = reference_markdown()
    drafts = (DraftRecipe, DraftData, DraftObjective)
    models = [FinetuneRecipe, TrainConfig, *drafts, *(config_class(name) for name in METHODS)]
    models += [resolve(kind.config) for kind in DRAFTS.values()]
    for model in models:
        for name, field in fields(model).items():
            assert name in ("name", "kind") or (field.description and f"| `{name}` |" in page), (
                f"{model.__name__}.{name}"
            )


def test_json_schema() -> None:
    schema = json_schema()
    kinds = {}
    for (kind, model), reference in zip(KINDS.items(), schema["anyOf"], strict=True):
        kinds[kind] = recipe = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        assert set(recipe["properties"]) == set(model.model_fields)
        assert recipe["additionalProperties"] is False
    assert set(kinds["finetune"]["required"]) == {"model", "task", "output_dir"}
    assert set(kinds["draft"]["required"]) == {"kind", "target", "draft", "data", "output_dir"}
    methods = kinds["finetune"]["properties"]["method"], kinds["draft"]["properties"]["method"]["anyOf"][0]
    assert all(set(method["discriminator"]["mapping"]) == set(METHODS) for method in methods)
    draft, reference = kinds["draft"]["properties"]["draft"]["anyOf"]
    assert set(draft["discriminator"]["mapping"]) == set(DRAFTS) and reference == {"type": "string"}
