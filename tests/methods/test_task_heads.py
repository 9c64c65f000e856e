"""The task head is what the task class adds to its base class: transformers' own account of it.

A base model's state dict is loaded into the task class; what transformers then reports as missing, and would
initialise afresh, is the head. All of it on the meta device, with transformers' default configurations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import peftlab
from peftlab.methods.base import parameters_under
from peftlab.methods.inject import trainable_parameters
from peftlab.models.architectures import task_head

TASKS = (
    "AUDIO_CLASSIFICATION", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR", "CTC", "DEPTH_ESTIMATION",
    "DOCUMENT_QUESTION_ANSWERING", "IMAGE_CLASSIFICATION", "INSTANCE_SEGMENTATION", "MASKED_IMAGE_MODELING",
    "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION", "OBJECT_DETECTION", "QUESTION_ANSWERING", "SEMANTIC_SEGMENTATION",
    "SEQUENCE_CLASSIFICATION", "TABLE_QUESTION_ANSWERING", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION",
    "TOKEN_CLASSIFICATION", "UNIVERSAL_SEGMENTATION", "VIDEO_CLASSIFICATION",
)  # fmt: skip
QUICK = (
    "AlbertForMultipleChoice", "BartForSequenceClassification", "BertForNextSentencePrediction",
    "BertForTokenClassification", "CLIPForImageClassification", "ElectraForQuestionAnswering",
    "FunnelForQuestionAnswering", "GPT2ForSequenceClassification", "GteForSequenceClassification",
    "LlamaForSequenceClassification", "MT5ForQuestionAnswering", "PerceiverForSequenceClassification",
    "RobertaForSequenceClassification", "Siglip2ForImageClassification", "SiglipForImageClassification",
    "SwinForMaskedImageModeling", "T5ForQuestionAnswering", "T5ForTokenClassification", "TapasForQuestionAnswering",
    "UMT5ForQuestionAnswering", "ViTForImageClassification", "Wav2Vec2ForCTC", "WavLMForXVector",
    "WhisperForAudioClassification", "XLNetForQuestionAnsweringSimple",
)  # fmt: skip
LANGUAGE_MODELS = (
    "BertForMaskedLM", "BartForConditionalGeneration", "BertForPreTraining", "DistilBertForMaskedLM", "GPT2LMHeadModel",
    "LlamaForCausalLM", "T5ForConditionalGeneration", "WhisperForConditionalGeneration",
)  # fmt: skip
BASES = ("BertModel", "BartModel", "CLIPModel", "T5EncoderModel", "T5Model", "WhisperModel", "DINOv3ViTBackbone")


def shipped(task: str) -> list[tuple[str, str]]:
    """Return model types and class names of a task; the classes that are their own base class are left out."""
    table = getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES")
    every = [(kind, name) for kind, names in table.items() for name in _names(names)]
    return [(kind, name) for kind, name in every if name not in _names(modeling_auto.MODEL_MAPPING_NAMES.get(kind, ()))]


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def fresh(kind: str, name: str) -> tuple[Any, set[str]] | None:
    """Return a task model, and the parameters that its base model's checkpoint lacks.

    None where there is no base class, or the default configuration or what is installed does not suffice.
    """
    for size in ({"num_hidden_layers": 1}, {}):
        try:
            config = CONFIG_MAPPING[kind](**size)
            base = getattr(transformers, _names(modeling_auto.MODEL_MAPPING_NAMES[kind])[0])
            with torch.device("meta"), no_init_weights():
                model, info = getattr(transformers, name).from_pretrained(
                    None, config=config, state_dict=base(config).state_dict(), output_loading_info=True,
                    device_map={"": "meta"},
                )  # fmt: skip
        except (ImportError, KeyError, NotImplementedError, RuntimeError, StrictDataclassError, TypeError, ValueError):
            continue
        return model, {key for key, _ in model.named_parameters()} & set(info["missing_keys"])
    return None


@pytest.mark.parametrize("name", QUICK)
def test_what_the_base_checkpoint_lacks(name: str) -> None:
    kind = next(kind for task in TASKS for kind, other in shipped(task) if other == name)
    built = fresh(kind, name)
    assert built is not None
    model, missing = built
    assert missing and set(parameters_under(model, task_head(model))) == missing
    peftlab.inject_lora(model, r=1, target_modules="all-linear")  # the head is found in an injected model, too
    assert set(parameters_under(model, task_head(model))) == missing
    assert {name for name in trainable_parameters(model) if "lora_" not in name} == missing


@pytest.mark.long
@pytest.mark.parametrize("task", TASKS)
def test_every_class_of_a_task(task: str) -> None:
    compared = 0
    for kind, name in shipped(task):
        if built := fresh(kind, name):
            model, missing = built
            assert set(parameters_under(model, task_head(model))) == missing, name
            compared += 1
    assert compared >= len(shipped(task)) / 3


@pytest.mark.parametrize("kind", ["granite_speech5_ctc", "lasr_ctc", "parakeet_ctc"])
def test_ctc_classes_that_are_their_own_base(kind: str) -> None:
    with torch.device("meta"), no_init_weights():
        model = transformers.AutoModelForCTC.from_config(CONFIG_MAPPING[kind]())
    assert task_head(model) == ["ctc_head"]


@pytest.mark.parametrize("name", [*LANGUAGE_MODELS, *BASES])
def test_language_models_and_base_models_have_none(name: str) -> None:
    kind = getattr(transformers, name)
    with torch.device("meta"), no_init_weights():
        assert task_head(kind(kind.config_class())) == []


def whisper() -> Any:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=16, decoder_layers=1,
        decoder_attention_heads=2, decoder_ffn_dim=16, num_mel_bins=8, max_source_positions=10, num_labels=3,
        classifier_proj_size=8, use_weighted_layer_sum=True, pad_token_id=0, vocab_size=20,
    )  # fmt: skip
    return transformers.WhisperForAudioClassification(config).eval()


def test_a_parameter_of_the_head_beside_its_modules(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    inputs = {"input_features": torch.randn(2, 8, 20)}
    model = peftlab.inject_lora(whisper(), r=2)
    assert task_head(model) == ["layer_weights", "projector", "classifier"]
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter += torch.randn_like(parameter)
        expected = model(**inputs).logits
    peftlab.save_adapter(model, tmp_path)
    with torch.no_grad():
        assert torch.equal(peftlab.load_adapter(whisper(), tmp_path)(**inputs).logits, expected)
        theirs = peft.PeftModel.from_pretrained(whisper(), str(tmp_path))
        torch.testing.assert_close(theirs(**inputs).logits, expected, rtol=1e-5, atol=1e-5)
