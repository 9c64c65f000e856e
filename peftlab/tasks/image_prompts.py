"""Prompts with images as token ids, for models that are decoded here and for drafts of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from peftlab.errors import PeftlabError
from peftlab.models.image_tokens import LIMIT, image_id, text_id
from peftlab.models.load import eval_mode, load_processor
from peftlab.tasks.conversations import Conversation, Message, read_turns
from peftlab.tasks.generated import prompt_ids
from peftlab.tasks.images import read_image, with_pictures
from peftlab.tasks.language_examples import check_placeholders, prompt_of, tokenizer_of, with_image_tokens
from peftlab.untyped import Attributes, Processor, Unwrapped

if TYPE_CHECKING:
    from PIL.Image import Image

_KEPT = 64  # images whose states are kept
_TOLERANCE = 1e-3  # of logits, relative to the largest one, where both are computed in fp32


class SeeingEmbedding(nn.Embedding):
    """A model's embeddings [V, H], which put an image's states in the place of its tokens.

    Args:
        embedding: the model's own, whose weight this is.
        read: image's id -> its states [n, H], for its n tokens in order.
    """

    def __init__(self, embedding: nn.Embedding, read: Callable[[int], Tensor]):
        size, width = embedding.weight.shape
        super().__init__(size, width, padding_idx=embedding.padding_idx, device="meta")
        self.weight = embedding.weight
        # Its class may scale rows (Gemma's). It is called by a method, so that it is no module of this one: same keys.
        self._rows = embedding.forward
        self._read = read
        self._states = OrderedDict[int, Tensor]()

    def forward(self, input: Tensor) -> Tensor:
        """Return the embeddings of ids [b, n], [b, n, H]."""
        rows = self._rows(text_id(input))
        if not bool((input >= LIMIT).any()):
            return rows
        rows = rows.clone()
        for number, ids in enumerate(input):
            for image in ids[ids >= LIMIT].unique().tolist():
                places, states = (ids == image).nonzero()[:, 0], self._of(image)
                if len(places) % len(states):  # the same image may be shown twice in a text
                    raise PeftlabError(f"an image has {len(states)} states for {len(places)} tokens")
                repeated = states.repeat(len(places) // len(states), 1)
                rows[number, places] = repeated.to(rows.dtype)
        return rows

    @torch.no_grad()
    def _of(self, image: int) -> Tensor:
        """Return the states of an image; those of the images that were used last are kept."""
        states = self._states.pop(image, None)
        self._states[image] = self._read(image) if states is None else states
        if len(self._states) > _KEPT:
            self._states.popitem(last=False)
        return self._states[image]


class ImagePrompts:
    """What a model of images and text reads of prompts: ids in which each image has its own (``models.image_tokens``).

    Files are read when the model reads a prompt with them. As soon as both model and prompts are there, its logits for
    a made image are compared with those that it computes of its processor's inputs.

    Args:
        reference: of the model. options: with which its processor is loaded.
    """

    def __init__(self, reference: str, options: Attributes | None = None) -> None:
        self._reference, self._options = reference, options or {}
        self._files: dict[int, str] = {}
        self._model: PreTrainedModel | None = None
        self._checked = False  # whether the model's logits were compared

    @cached_property
    def processor(self) -> Processor:
        """The model's processor, loaded when this is first read."""
        loaded: Processor = load_processor(self._reference, **self._options)
        return loaded

    @cached_property
    def _placeholder(self) -> int:
        """The id of the token that a template writes for an image."""
        placeholder: int = tokenizer_of(self.processor).get_vocab()[self.processor.image_token]
        return placeholder

    @property
    def _made(self) -> int:
        """The id of the tokens of the made image."""
        return image_id("0", self._placeholder)

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
        longer, places = with_image_tokens(processor, text, row.pictures)
        images = list[int]()
        for picture, place in zip(row.pictures, places, strict=True):
            image = image_id(picture.digest, self._placeholder)
            self._files[image] = picture.path
            images += [image] * longer[slice(*place.filled)].count(token)
        self._check()
        following = iter(images)
        return [next(following) if i == self._placeholder else i for i in prompt_ids(row, text, processor)]

    def attach(self, model: PreTrainedModel) -> None:
        """Let the embeddings of a model read the images of these prompts.

        Args:
            model: of images and text, on its device.
        """
        own: Unwrapped = model
        own.set_input_embeddings(SeeingEmbedding(own.get_input_embeddings(), self._states))
        self._model = model
        self._check()

    @torch.no_grad()
    def _states(self, image: int) -> Tensor:
        """Return the states of an image's tokens, [n, H], by the model's part that sees."""
        shown = _made_image() if image == self._made else read_image(self._files[image])
        model: Unwrapped = self._model
        found = self._inputs(self.processor.image_token, shown)
        seen = model.get_image_features(**{key: found[key] for key in found if key not in _OF_TEXT}).pooler_output
        return torch.cat([*seen]) if isinstance(seen, list | tuple) else seen.flatten(0, -2)

    def _inputs(self, text: str, image: Image) -> dict[str, Tensor]:
        """Return what the model's own processor makes of a text with one image."""
        model: Unwrapped = self._model
        found = self.processor(text=[text], images=[[image]], return_tensors="pt", add_special_tokens=False)
        return {key: value.to(model.device) for key, value in found.items()}

    @torch.no_grad()
    def _check(self) -> None:
        """Refuse a model whose logits of a text with an image are not those of its processor's inputs."""
        if self._checked or self._model is None or not self._files:
            return
        self._checked = True
        model: Unwrapped = self._model
        name = type(model).__name__
        inputs = self._inputs(f"a{self.processor.image_token}b", _made_image())
        ids = inputs["input_ids"]
        mine = ids.where(ids != self._placeholder, self._made)
        with eval_mode(model):
            try:
                expected = model(**inputs, use_cache=False).logits[0, -1].float()
                found = model(input_ids=mine, use_cache=False).logits[0, -1].float()
            except (AttributeError, LookupError, PeftlabError, RuntimeError, TypeError, ValueError) as error:
                raise PeftlabError(f"{self._reference}: {name} is not decoded with images here: {error}") from None
        gap = float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-6))
        if gap > max(_TOLERANCE, float(torch.finfo(model.dtype).eps) ** 0.5):
            raise PeftlabError(
                f"{self._reference}: {name} is not decoded with images here: it places or masks their tokens in a way "
                "of its own; LLaVA, Idefics3 and SmolVLM are"
            )


_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")


def _made_image() -> Image:
    """Return an image that is wider than high, and no two parts of which are equal."""
    from PIL import Image

    width, height = 224, 160
    pixels = bytes((x * y // 97) % 256 for y in range(height) for x in range(3 * width))
    return Image.frombytes("RGB", (width, height), pixels)
