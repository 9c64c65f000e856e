"""Keys of draft recipes as they were spelled before ``draft.kind``, and how they are spelled now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from peftlab.files import Json

_MEDUSA = (
    "write draft: {kind: medusa, heads: ...} with its settings beside it; method: null trains the heads alone, "
    "method: {name: lora} the target too"
)


def former_spellings(recipe: Mapping[str, Json]) -> list[tuple[tuple[str, ...], str]]:
    """Return the keys of ``recipe`` that were spelled otherwise before, each with the present spelling."""
    return list(_draft_keys(recipe)) if recipe.get("kind") == "draft" else []


def _draft_keys(recipe: Mapping[str, Json]) -> Iterator[tuple[tuple[str, ...], str]]:
    method, draft = recipe.get("method"), recipe.get("draft")
    medusa = isinstance(method, dict) and method.get("name") == "medusa"
    if medusa:
        yield ("method",), f"method: medusa is a kind of draft, not a method; {_MEDUSA}"
    if "early_exit" in recipe:
        yield ("early_exit",), "early_exit: is a kind of draft; write draft: {kind: early_exit, exits: [k]}"
    if "vocabulary" in recipe:
        yield ("vocabulary",), "vocabulary: belongs to the draft; write draft: {kind: ..., vocabulary: N}"
    if isinstance(draft, dict) and "truncate" in draft and "kind" not in draft and "early_exit" not in recipe:
        yield ("draft",), "draft: names no kind; write draft: {kind: model, truncate: {layers: [...]}}"
    if draft is None and not medusa:
        yield (), "draft: missing; name a model, or write {kind: ..., ...}"
