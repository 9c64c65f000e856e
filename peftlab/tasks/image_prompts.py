"""Prompts with images as token ids, for models that are decoded here and for drafts of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from peftlab.errors import PeftlabError
from peftlab.models.image_tokens import SeeingEmbedding, image_id, text_id
from peftlab.models.load import eval_mode, load_processor
from peftlab.tasks.conversations import Conversation, Message, read_turns
from peftlab.tasks.generated import prompt_ids
from peftlab.tasks.images import inputs_of, with_pictures
from peftlab.tasks.language_examples import check_placeholders, prompt_of, tokenizer_of, with_image_tokens
from peftlab.untyped import Attributes, Processor, Unwrapped

_TOLERANCE = 1e-3  # of logits, relative to the largest one, where both are computed in fp32


class ImagePrompts:
    """What a model of images and text reads of prompts: ids in which each image has its own (``models.image_tokens``).

    Files are read when the model reads a prompt with them. Before the first of them is decoded, its logits are compared
    with those that the model computes of its processor's inputs.

    Args:
        reference: of the model. options: with which its processor is loaded.
    """

    def __init__(self, reference: str, options: Attributes | None = None) -> None:
        self._reference, self._options = reference, options or {}
        self._files: dict[int, str] = {}
        self._model: PreTrainedModel | None = None
        self._example: tuple[str, list[str], list[int]] | None = None  # a prompt to compare: text, files and ids

    @cached_property
    def processor(self) -> Processor:
        """The model's processor, loaded when this is first read."""
        loaded: Processor = load_processor(self._reference, **self._options)
        return loaded

    def encode(self, messages: Sequence[Message], where: str, home: Path) -> list[int]:
        """Return the token ids of a conversation that ends with the prompt for the model's answer.

        Args:
            messages: with parts of type ``image``. where: names the prompt in errors.
            home: the directory that paths count from.

        Raises:
            PeftlabError: a file that is no image, a part that is none, or a template that writes no image.
        """
        turns = read_turns([*messages], where, images=True)
        answered: list[Message] = [*turns, {"role": "assistant", "content": "a"}]
        row, processor = with_pictures(Conversation(answered, where), home), self.processor
        text, token = prompt_of(row, processor), processor.image_token
        check_placeholders(processor, text, len(row.pictures), where)
        ids, tokenizer = prompt_ids(row, text, processor), tokenizer_of(processor)
        placeholder: int = tokenizer.get_vocab()[token]
        longer, placed = with_image_tokens(processor, text, row.pictures)
        images = list[int]()
        for picture, place in zip(row.pictures, placed, strict=True):
            image = image_id(picture.digest, placeholder)
            self._files[image] = picture.path
            images += [image] * longer[slice(*place.filled)].count(token)
        following = iter(images)
        found = [next(following) if i == placeholder else i for i in ids]
        if self._example is None:
            self._example = text, [picture.path for picture in row.pictures], found
            self._check()
        return found

    def attach(self, model: PreTrainedModel) -> None:
        """Let the embeddings of a model read the images of these prompts.

        Args:
            model: of images and text, on its device.
        """
        own: Unwrapped = model
        own.set_input_embeddings(SeeingEmbedding(own.get_input_embeddings(), self._states))
        self._model = model
        self._check()

    def _states(self, image: int) -> Tensor:
        """Return the states of an image's tokens, [n, H], by the model's part that sees."""
        token = self.processor.image_token
        found = {**inputs_of(self.processor, [token], [[self._files[image]]], "right")}
        model: Unwrapped = self._model
        inputs = {key: found[key].to(model.device) for key in found if key not in _OF_TEXT}
        seen = model.get_image_features(**inputs).pooler_output
        return torch.cat([*seen]) if isinstance(seen, list | tuple) else seen.flatten(0, -2)

    @torch.no_grad()
    def _check(self) -> None:
        """Refuse a model whose logits of a prompt are not those of its processor's inputs."""
        if self._model is None or self._example is None:
            return
        text, files, ids = self._example
        model: Unwrapped = self._model
        inputs = {k: v.to(model.device) for k, v in inputs_of(self.processor, [text], [files], "right").items()}
        mine = torch.tensor([ids], device=model.device)
        name = type(model).__name__
        if not torch.equal(inputs["input_ids"], text_id(mine)):
            raise PeftlabError(f"{self._reference}: its processor makes other tokens of an image than its tokenizer")
        with eval_mode(model):
            try:
                expected = model(**inputs, use_cache=False).logits[0, -1].float()
                found = model(input_ids=mine, use_cache=False).logits[0, -1].float()
            except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
                raise PeftlabError(f"{self._reference}: {name} cannot be decoded with images here: {error}") from None
        gap = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        if gap > max(_TOLERANCE, float(torch.finfo(model.dtype).eps) ** 0.5):
            raise PeftlabError(
                f"{self._reference}: {name} places or masks the tokens of images in a way of its own, so that it is "
                "not decoded with images here; LLaVA, Idefics3 and SmolVLM are"
            )


_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
