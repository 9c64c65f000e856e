"""Plain encoders whose configuration alone describes them: as the class of transformers has them, and inspected alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import models
import pytest
import transformers
from torch import nn

from peftlab.errors import PeftlabError
from peftlab.methods.config import METHODS
from peftlab.models.architectures import ENCODERS, plain_model
from peftlab.models.load import empty_model, tied_names
from peftlab.pipelines.inspect import inspect_model


def config_of(name: str, **changes: Any) -> transformers.PretrainedConfig:
    family = next(
        name.removesuffix(task) for task in ("Model", "ForMaskedLM", "ForSequenceClassification") if name.endswith(task)
    )
    config = getattr(transformers, f"{family}Config")(
        **(models.SMALL | {"max_position_embeddings": 40, "type_vocab_size": 3} | changes)
    )
    config.architectures = [name]
    return config


def layers(model: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    """The layers that a method may adapt, or stand in for."""
    kinds = (nn.Linear, nn.Embedding, nn.LayerNorm, nn.Dropout)
    return sorted(((n, type(m)) for n, m in model.named_modules() if isinstance(m, kinds)), key=str)


@pytest.mark.parametrize("name", ENCODERS)
def test_a_plain_encoder_has_the_names_the_shapes_and_the_ties_of_its_class(name: str) -> None:
    config = config_of(name, num_labels=5)
    ours, theirs = plain_model(config.to_diff_dict() | {"architectures": [name]}), empty_model(name, config)
    assert ours is not None and type(ours).__name__ == name
    for every in (True, False):
        shapes = [[(n, p.shape) for n, p in m.named_parameters(remove_duplicate=every)] for m in (ours, theirs)]
        assert shapes[0] == shapes[1]
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert layers(ours) == layers(theirs) and tied_names(ours) == tied_names(theirs)
    assert {parameter.device.type for parameter in ours.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ENCODERS)
def test_inspection_counts_as_on_the_class_itself(name: str, tmp_path: Path) -> None:
    """Named as the class, the model is transformers' own."""
    config_of(name, num_labels=3).save_pretrained(tmp_path)
    cases: list[tuple[str, dict[str, Any]]] = [
        *((method, {}) for method in METHODS),
        ("lora", {"target_modules": "all-linear"}),
    ]
    for method, fields in [*cases, ("lora", {"target_modules": ["dense"]}), ("lora", {"target_modules": ["nothing"]})]:
        found: list[object] = []
        for auto_class in (None, name):
            try:
                found.append(inspect_model(str(tmp_path), method, fields, auto_class))
            except PeftlabError as error:
                found.append(str(error))
        assert found[0] == found[1]


@pytest.mark.parametrize("change", [
    {"hidden_size": "32"}, {"num_hidden_layers": 0}, {"num_attention_heads": 3}, {"is_decoder": True},
    {"tie_word_embeddings": False}, {"auto_map": {"AutoModel": "x.Y"}}, {"quantization_config": {"quant_method": "x"}},
    {"architectures": ["BertForPreTraining"]}, {"model_type": "roberta"}, {"type_vocab_size": None}, {"id2label": 3},
    {"position_embedding_type": "relative_key"}, {"add_cross_attention": True},
])  # fmt: skip
def test_what_is_not_plain_is_left_to_the_class(change: dict[str, Any]) -> None:
    values = json.loads(config_of("BertForMaskedLM").to_json_string()) | {"architectures": ["BertForMaskedLM"]}
    assert plain_model(values) is not None
    assert plain_model(values | change) is None
