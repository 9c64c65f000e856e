"""Whether names and shapes alone decide a merge: a plain LoRA adapter beside a plain decoder's weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from peftlab.checkpoints.adapter import Adapter
from peftlab.checkpoints.merge.options import MergeOptions
from peftlab.checkpoints.quantised import FP8
from peftlab.checkpoints.tensors import Shard
from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object
from peftlab.models.plain import PlainModel, plain_model


def plain_task_model(
    adapter: Adapter, directory: Path, shards: Sequence[Shard], options: MergeOptions
) -> PlainModel | None:
    """Return the model the adapter was trained in, on the meta device, made without transformers; None where it
    has to be asked.

    The base's files contain exactly the parameters of the class that the base's configuration and the adapter name,
    and the adapter contains low-rank factors of its layers and nothing else.
    """
    if not _factors_of_layers(adapter) or adapter.base.get("format"):
        return None
    if options.dtype == FP8 or options.trust_remote_code:
        return None
    # Where it is missing, transformers makes one of the model's defaults.
    if not (directory / "generation_config.json").is_file():
        return None
    try:
        base = read_object(directory / "config.json")
    except (PeftlabError, OSError):
        return None
    model = plain_model(_trained(adapter, base))
    stored = {key: tuple(entry.shape) for shard in shards for key, entry in shard.entries.items()}
    return model if model is not None and _shapes(model) == stored else None


def _factors_of_layers(adapter: Adapter) -> bool:
    """Whether the adapter's tensors are low-rank factors of maps in numbered layers, which nothing is tied to."""
    names = [name.rpartition(".") for name in adapter.tensors]
    return all(last in ("lora_A", "lora_B") and ".layers." in f".{owner}" for owner, _, last in names)


def _trained(adapter: Adapter, base: Mapping[str, Json]) -> dict[str, Json]:
    """Return the configuration of the merged model: the trained one's, or for a foreign adapter the base's own; an
    empty one where the two are of different models."""
    if not adapter.base:
        return dict(base) if adapter.task_type in (None, "CAUSAL_LM") else {}
    trained = adapter.base.get("config")
    same = isinstance(trained, dict) and trained.get("model_type") == base.get("model_type")
    if not isinstance(trained, dict) or not same or base.get("auto_map"):
        return {}
    return {**trained, "architectures": [adapter.base.get("architecture")]}


def _shapes(model: PlainModel) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the stored parameters: of two tied ones the first."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
