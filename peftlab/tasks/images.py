"""Images: files that are read when they are used; ``image/classification``, a class for each; images of conversations.

The rows of a task hold paths. ``load_images`` opens each file once, to refuse what is no image before anything trains;
pixels are decoded when a batch is made, by Pillow and the model's own image processor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from datasets import Dataset
from torch import Tensor
from transformers import PreTrainedModel

from peftlab.errors import PeftlabError, reason
from peftlab.files import open_regular, typed_value
from peftlab.models.load import eval_mode
from peftlab.tasks.batches import Row
from peftlab.tasks.conversations import Conversation, Picture
from peftlab.tasks.data import FOLDER_COLUMNS, Columns, Fault, Table, is_missing, label_indices, names, refuse
from peftlab.tasks.labelled import OneClass
from peftlab.tasks.labelled_rows import Examples, load_own, refuse_faulty_rows
from peftlab.tasks.problem import ModelSource
from peftlab.tasks.table import DataConfig, Task
from peftlab.untyped import Processor

if TYPE_CHECKING:
    from PIL.Image import Image


Inputs = dict[str, Tensor]
"""A batch: the inputs of a model's forward by name."""


# --- Files of images.
_HEAD = 2**16  # bytes of a file that its digest is of: all of a small image, and what tells large ones apart
_CLIPPED = ("I", "F")  # modes of more than eight bits, of which conversion to RGB would keep the darkest shades alone
_ORIENTATION, _QUARTER_TURNS = 0x0112, (5, 6, 7, 8)  # the tag of how a camera was held; values of a quarter's turn
_WITH_PREVIEW = "MPO"  # what Pillow calls a photograph with a preview behind it


@contextmanager
def opened_image(path: str | Path) -> Iterator[Image]:
    """Open an image for the block, without decoding its pixels; what is wrong with it, found then or in the block, is
    a ``PeftlabError`` that names the file."""
    import PIL.Image

    with open_regular(path) as file:
        try:
            with PIL.Image.open(file) as image:
                yield image
        except PeftlabError:
            raise
        except PIL.UnidentifiedImageError:
            raise PeftlabError(f"{path}: not an image that Pillow can read") from None
        except PIL.Image.DecompressionBombError as error:
            raise PeftlabError(f"{path}: too large an image ({reason(error)})") from None
        except Exception as error:  # decoders raise anything for damaged files
            raise PeftlabError(f"{path}: a damaged image ({reason(error)})") from None


def check_image(path: str | Path) -> tuple[str, tuple[int, int]]:
    """Return the digest of an image's file, and its size; ``PeftlabError`` where RGB cannot show it, or it is none.

    Args:
        path: of the file, whose pixels are not decoded.
    """
    with opened_image(path) as image:
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) in _QUARTER_TURNS:
            width, height = height, width
        if image.mode.startswith(_CLIPPED):
            raise PeftlabError(f"{path}: its pixels have more than 8 bits (mode {image.mode}); save it with 8")
        if getattr(image, "is_animated", False) and image.format != _WITH_PREVIEW:
            raise PeftlabError(f"{path}: has {getattr(image, 'n_frames', 0)} frames; save the one to be read")
    with open_regular(path) as file:
        head = file.read(_HEAD)
        return hashlib.sha256(head + str(file.seek(0, 2)).encode()).hexdigest(), (width, height)


def read_image(path: str | Path) -> Image:
    """Return an image in RGB, turned as its camera says, on white where it is transparent.

    Args:
        path: of the file.
    """
    from PIL import Image, ImageOps

    with opened_image(path) as image:
        image = ImageOps.exif_transpose(image)
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")


def image_paths(table: Table, column: str, faults: list[Fault]) -> tuple[list[str], list[str]]:
    """Return the path and the digest of each row's image; cells and files that are none are added to ``faults``.

    Args:
        table: the file, from whose directory paths count, or the directory of the images.
        column: of the paths.
        faults: receives what is wrong.
    """
    values = table.column(column, "data.image")
    home = table.path if table.path.is_dir() else table.path.parent
    bad = [row for row, value in enumerate(values) if not isinstance(value, str) and not is_missing(value)]
    faults += table.fault(column, "is no path of an image", bad)
    paths = [str(home / str(value)) for value in values]
    digests, problems = [""] * len(paths), {}
    for row, value in enumerate(values):
        if isinstance(value, str) and not is_missing(value):
            try:
                digests[row], _ = check_image(paths[row])
            except PeftlabError as error:
                problems[row] = str(error)
    if problems:
        faults += table.fault(column, f"names no image that can be used ({next(iter(problems.values()))})", [*problems])
    return paths, digests


# --- ``image/classification``.
@dataclass(frozen=True)
class Images(Examples):
    """One split of images; ``text`` has their paths.

    Attributes:
        digests: SHA-256 of each file's first 64 KiB and its size: equal for equal images.
    """

    digests: Sequence[str] = ()

    def contents(self) -> Iterable[tuple[object, ...]]:
        """Yield digest and label of each row."""
        return zip(self.digests, self.label or [None] * len(self), strict=True)

    def dataset(self) -> Dataset:
        """Return the examples as an in-memory dataset: ``text``, ``digest``, and ``label`` where it exists."""
        return super().dataset().add_column("digest", [*self.digests])


def load_images(
    task: Task, data: DataConfig, classes: Sequence[str] | None = None
) -> tuple[Task, dict[str, Examples], dict[str, int]]:
    """Read ``image/classification`` from the user's files, as ``load_own`` does: paths, digests and classes.

    ``data.path`` is a table with the columns ``image`` and ``label``, a directory of such tables, a directory with a
    folder of images for each class, or one with folders ``train`` and ``validation`` (``valid``, ``dev``) of these.

    Args:
        task: the table's row.
        data: the recipe's data section.
        classes: a trained model's class names in label order; the files may lack some of them but contain no others.
    """

    def read(
        tables: Mapping[str, Table], columns: Columns, faults: list[Fault]
    ) -> tuple[dict[str, Examples], Sequence[str]]:
        (image,), (label,) = columns.inputs, columns.labels
        found = {split: image_paths(table, image, faults) for split, table in tables.items()}
        labelled = {split: table for split, table in tables.items() if label in table.columns}
        spelled = {split: [[name] for name in names(table, label, faults)] for split, table in labelled.items()}
        refuse_faulty_rows(faults)
        placed, class_names = label_indices(labelled, label, spelled, classes)
        labels = {split: [places[0] for places in rows] for split, rows in placed.items()}
        return {s: Images(paths, None, labels.get(s), digests) for s, (paths, digests) in found.items()}, class_names

    return load_own(task, data, read)


class ImageClass(OneClass):
    """Answers with the class of an image; the loss is cross-entropy."""

    auto_class = "AutoModelForImageClassification"
    pipeline = "image-classification"

    def processor(self, source: ModelSource) -> Processor:
        """Load the model's image processor."""
        return source.image_processor()

    def tokens(self, split: Dataset, tokenizer: Processor, max_length: int) -> Dataset:
        """Return the rows with ``image``, the path, and ``length`` 1: pixels are read when a batch is made."""
        rows = split.rename_column("text", "image").remove_columns("digest")
        return rows.add_column("length", [1] * len(rows))

    def check_inputs(self, reference: str, model: PreTrainedModel, tokenizer: Processor, tokens: Dataset) -> None:
        """Raise ``PeftlabError`` where the model refuses the first image as its processor makes it."""
        if len(tokens) == 0:
            return
        pixels = self.collate(tokenizer)([tokens[0]])["pixel_values"]
        try:
            with torch.inference_mode(), eval_mode(model):
                model(pixel_values=pixels.to(model.device))
        except (ValueError, RuntimeError) as error:
            shape = " x ".join(map(str, pixels.shape[1:]))
            raise PeftlabError(
                f"{reference}: its image processor makes {shape} (channels, height, width) of an image, which the "
                f"model does not take: {reason(error)}"
            ) from None

    def collate(self, tokenizer: Processor) -> Callable[[Sequence[Row]], dict[str, Tensor]]:
        """Return the function to ``pixel_values``, [rows, channels, height, width], and ``labels`` of shape (rows,)."""

        def collate(rows: Sequence[Row]) -> dict[str, Tensor]:
            images = [read_image(typed_value(row, "image", str, "an example")) for row in rows]
            try:
                batch = {"pixel_values": tokenizer(images=images, return_tensors="pt")["pixel_values"]}
            except ValueError as error:
                sizes = ", ".join(sorted({f"{image.width} x {image.height}" for image in images}))
                kind = type(tokenizer).__name__
                raise PeftlabError(f"{kind} makes no batch of images of {sizes}: {reason(error)}") from None
            if "label" in rows[0]:
                batch["labels"] = torch.tensor([row["label"] for row in rows], dtype=torch.int64)
            return batch

        return collate

    def shown(self, row: Row, label: object, tokenizer: Processor) -> list[tuple[str, bool]]:
        """Return an image's path, its size, what it became, and its class."""
        path = typed_value(row, "image", str, "an example")
        with opened_image(path) as image:
            before = f"{image.width} x {image.height}, {image.mode}"
        pixels = self.collate(tokenizer)([{"image": path}])["pixel_values"][0]
        shape = " x ".join(map(str, pixels.shape))
        after = f"{shape} numbers from {float(pixels.min()):.2f} to {float(pixels.max()):.2f}"
        return [
            (f"{path} ({before}) as {after}: ", False),
            *([] if label is None else [(self.label_name(label), True)]),
        ]

    def read(self, table: Table, names: Sequence[str], data: DataConfig) -> list[object]:
        """Return the paths of a file's rows, or of a directory of images."""
        faults: list[Fault] = []
        column = FOLDER_COLUMNS[0] if table.path.is_dir() else (names or [data.image or "image"])[0]
        paths, _ = image_paths(table, column, faults)
        refuse(faults)
        return list(paths)

    def rows(self, given: Sequence[object]) -> Examples:
        """Return paths as a split without labels."""
        odd = next((place for place, row in enumerate(given) if not isinstance(row, str | Path)), None)
        if odd is not None:
            raise PeftlabError(f"row {odd}: is no path of an image")
        paths = [str(row) for row in cast(Sequence[str | Path], given)]
        return Images(paths, None, None, [check_image(path)[0] for path in paths])


# --- Images of conversations (``text/chat``).
def with_pictures(row: Conversation, home: Path) -> Conversation:
    """Return a conversation whose images were found: their files in ``pictures``, their digests in the turns.

    Args:
        row: as its file has it.
        home: the directory that paths count from.

    Raises:
        PeftlabError: a file that is no image; row and file are named.
    """
    pictures: list[Picture] = []

    def checked(part: dict[str, str]) -> dict[str, str]:
        if part["type"] != "image":
            return part
        path = str(home / part["path"])
        try:
            digest, size = check_image(path)
        except PeftlabError as error:
            raise PeftlabError(f"{row.where}: {error}") from None
        pictures.append(Picture(path, digest, size))
        return {"type": "image", "digest": digest}

    messages = []
    for message in row.messages:
        parts: list[dict[str, str]] = message.get("parts") or []  # type: ignore[assignment]
        found: dict[str, object] = {"parts": [checked(part) for part in parts]} if parts else {}
        messages.append({**message, **found})
    if not pictures:
        return row
    if row.texts is not None:
        raise PeftlabError(f"{row.where}: images, and a tool call as text (function_call); write it as tool_calls")
    return replace(row, messages=messages, pictures=tuple(pictures))  # type: ignore[arg-type]


def inputs_of(processor: Processor, texts: Sequence[str], images: Sequence[Sequence[str]], side: str) -> Inputs:
    """Return what the model's own processor makes of texts with placeholders, and their images, as one batch.

    Args:
        processor: of a model of images and text.
        texts: as the chat template wrote them.
        images: of each text the paths of its images, in order.
        side: where shorter texts are padded, ``left`` or ``right``.
    """
    read = [[read_image(path) for path in paths] for paths in images]
    found = processor(
        text=list(texts), images=read if any(read) else None, padding=True, padding_side=side, return_tensors="pt",
        add_special_tokens=False,
    )  # fmt: skip
    return {"input_ids": found["input_ids"], **found}


def prompt_inputs(processor: Processor, prompts: Sequence[str], images: Sequence[Sequence[str]]) -> Inputs:
    """Return prompts with images as a batch to generate from, padded on the left.

    Args:
        processor: of a model of images and text.
        prompts: as the chat template wrote them; images of turns behind a prompt are left out.
        images: of each prompt's conversation the paths of the images, in order.
    """
    token = processor.image_token
    shown = [paths[: prompt.count(token)] for prompt, paths in zip(prompts, images, strict=True)]
    return inputs_of(processor, prompts, shown, "left")


def collate_chat(processor: Processor, rows: Sequence[Row]) -> Inputs:
    """Return a batch with images: what the processor makes, padded on the right, and ``trained``, [rows, longest].

    Args:
        processor: of a model of images and text.
        rows: examples with ``text`` and ``images``.

    Raises:
        PeftlabError: an image is not the one that was there when the example was made.
    """
    batch = inputs_of(processor, [str(row["text"]) for row in rows], [_strings(row["images"]) for row in rows], "right")
    for ids, row in zip(batch["input_ids"], rows, strict=True):
        stored = torch.tensor(row["input_ids"])
        if len(stored) > len(ids) or not torch.equal(ids[: len(stored)], stored):
            raise PeftlabError(f"{', '.join(_strings(row['images']))}: has another size than before training")
    marks = [torch.tensor(row["trained"]) for row in rows]
    batch["trained"] = torch.nn.utils.rnn.pad_sequence(marks, batch_first=True)
    return batch


def _strings(value: object) -> Sequence[str]:
    return cast(Sequence[str], value)
