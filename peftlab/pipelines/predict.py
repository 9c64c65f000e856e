"""Predicts rows without labels: classes with probabilities, numbers, tags of words, choices.

Of texts, or paths of images, in memory, or of the rows of a file or a stream, written beside them.
"""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from peftlab.errors import PeftlabError
from peftlab.files import Json, replacing, write_text
from peftlab.progress import note
from peftlab.registry import resolve
from peftlab.tasks.data import Table, is_missing, read_lines, read_table
from peftlab.tasks.table import find_task

if TYPE_CHECKING:
    from torch import Tensor

    from peftlab.pipelines.evaluate import Trained
    from peftlab.tasks.batches import Row
    from peftlab.tasks.labelled import Answers, Predictions


STREAM = "-"
Columns = Mapping[str, Sequence[object]]


def predict_file(
    reference: str | Path,
    source: str,
    out: str,
    text: Sequence[str] = (),
    recipe_name: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    overwrite: bool = False,
    device: str = "auto",
    on_rows: Callable[[int], None] | None = None,
) -> Predictions:
    """Predict every row of a file and write the rows with ``prediction`` and, by class, ``probability NAME``.

    Args:
        reference, recipe_name, overrides, device, on_rows: as for ``predict``.
        source: csv, tsv, json, jsonl (``.gz`` too) or parquet; for ``image/classification`` also a directory of images;
            ``-`` reads stdin: JSON objects or texts, one a line. A text stands for the model's text column, whatever
            that is called.
        out: csv, jsonl or parquet; ``-`` writes JSON objects to stdout, one a line.
        text: the text column, or the two columns of a pair; default: those that the recipe names. A list is written to
            csv as its JSON text.
        overwrite: replace a file that is there.

    Raises:
        PeftlabError: what ``predict`` raises; a format, column or text that cannot be used; or ``out`` exists.
    """
    overrides = list(overrides)
    write = _writer(out, overwrite)
    table = read_lines(sys.stdin.buffer, "stdin") if source == STREAM else read_table(Path(source))
    if len(table) == 0:
        raise PeftlabError(f"{table.path}: no rows")
    _refuse_output_columns(table, ["prediction"])  # a file that was labelled before
    # What is wrong with the files is said before anything heavy is imported.
    from peftlab.environment import resolve_device
    from peftlab.pipelines.evaluate import PREDICTED_BY, find_trained

    resolve_device(device)
    trained = find_trained(reference, recipe_name, overrides, PREDICTED_BY)
    answers = answers_of(trained)
    texts = ["text"] if source == STREAM and [*table.columns] == ["text"] else []  # lines without column names
    names = tuple(text or texts or trained.recipe.data.text or find_task(trained.recipe.task).text)
    if trained.recipe.data.drop_missing:
        table = _with_inputs(table, names)
    rows = answers.read(table, names, trained.recipe.data)
    found = predict(reference, rows, recipe_name, overrides, device=device, on_rows=on_rows)  # type: ignore[arg-type]
    _refuse_output_columns(table, found.columns())
    write({**dict(table.columns.items()), **found.columns()})
    return found


def _with_inputs(table: Table, names: Sequence[str]) -> Table:
    """Return a table without the rows that lack a value of a column in ``names``; how many they are is printed."""
    needed = [table.columns[name] for name in names if name in table.columns]
    kept = [row for row in range(len(table)) if not any(is_missing(column[row]) for column in needed)]
    if not kept:
        raise PeftlabError(f"{table.path}: no rows; every row lacks a text")
    if len(kept) == len(table):
        return table
    note(f"left out: {len(table) - len(kept):,} of {len(table):,} rows (text missing)")
    return table.take(list(table.columns), kept)


def _refuse_output_columns(table: Table, names: Iterable[str]) -> None:
    taken = [name for name in names if name in table.columns]
    if taken:
        raise PeftlabError(f"{table.path}: has a column {taken[0]!r} already, which would be overwritten")


def _writer(out: str, overwrite: bool) -> Callable[[Columns], None]:
    """Return the function that writes columns to ``out``; what is wrong with ``out`` is found before anything runs."""
    if out == STREAM:
        return lambda columns: print(_json_lines(columns), end="")
    path = Path(out)
    make = _FORMATS.get(path.suffix.lower())
    if make is None:
        raise PeftlabError(f"{path}: predictions are written as {', '.join(_FORMATS)}")
    if path.exists() and not overwrite:
        raise PeftlabError(f"{path} exists already; --overwrite replaces it")
    return lambda columns: make(path, columns)


def _json_lines(columns: Columns) -> str:
    rows = zip(*columns.values(), strict=True)
    written = (json.dumps(_plain(dict(zip(columns, row, strict=True))), ensure_ascii=False) for row in rows)
    return "".join(f"{line}\n" for line in written)


def _csv(path: Path, columns: Columns) -> None:
    text = io.StringIO(newline="")
    plain, quoting = (csv.writer(text, lineterminator="\n", quoting=how) for how in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL))
    for row in [tuple(columns), *zip(*columns.values(), strict=True)]:
        cells = [_cell(value) for value in row]
        # Python below 3.13 leaves a carriage return alone in a cell unquoted, where readers end the row.
        (quoting if any("\r" in str(cell) for cell in cells) else plain).writerow(cells)
    write_text(path, text.getvalue())


def _cell(value: object) -> object:
    return json.dumps(_plain(value), ensure_ascii=False) if isinstance(value, list | Mapping) else value


def _plain(value: object) -> Json:
    """Return a cell as JSON has it: a time, a decimal number or bytes of a parquet file as text, NaN as null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "backslashreplace")
    return value if value is None or isinstance(value, str | int | float) else str(value)


def _parquet(path: Path, columns: Columns) -> None:
    import pyarrow
    from pyarrow import parquet

    def typed(values: Sequence[object]) -> pyarrow.Array:
        try:
            return pyarrow.array(list(values))
        except pyarrow.ArrowException:  # of several types, as JSON may have them
            return pyarrow.array([None if value is None else str(_cell(value)) for value in values])

    with replacing(path) as temporary:
        parquet.write_table(pyarrow.table({name: typed(values) for name, values in columns.items()}), temporary)


_FORMATS: dict[str, Callable[[Path, Columns], None]] = {
    ".csv": _csv,
    ".jsonl": lambda path, columns: write_text(path, _json_lines(columns)),
    ".parquet": _parquet,
}


Texts = Sequence[str] | Sequence[tuple[str, str]] | Sequence[Sequence[str]] | Sequence[tuple[str, Sequence[str]]]
"""Single texts; pairs for a task of pairs; lists of words for ``text/tokens``; for ``text/choice`` pairs of a text, it
may be empty, and a list of choices; paths for ``image/classification``."""


def predict(
    reference: str | Path,
    texts: Texts,
    recipe_name: str | Path | None = None,
    overrides: Iterable[str] = (),
    *,
    device: str = "auto",
    on_rows: Callable[[int], None] | None = None,
) -> Predictions:
    """Return the predictions for ``texts`` of the model that ``reference`` names.

    Args:
        reference: a run, an adapter or a model, as ``peftlab.evaluate`` takes it.
        texts: texts, or pairs where the task has pairs; longer ones than ``train.max_length`` tokens are truncated; or
            the paths of images.
        recipe_name: the recipe that names the task; default: ``recipe.yaml`` in that directory or above it.
        overrides: as for ``peftlab run``, of what predictions depend on (``evaluate.PREDICTED_BY``):
            ``train.eval_batch_size``, ``train.max_length``; in ``predict_file`` ``data.drop_missing`` too.
        device: as for ``peftlab.run``.
        on_rows: called with the number of rows of each batch as it begins.

    Raises:
        PeftlabError: no recipe is found, its task has no labels, there is no such model or one that is not trained,
            or a text is empty or not of the task's shape.
    """
    from peftlab.checkpoints.adapter import load_adapter
    from peftlab.models.load import eval_mode
    from peftlab.pipelines.evaluate import PREDICTED_BY, find_trained, refuse_untrained
    from peftlab.pipelines.finetune import model_source
    from peftlab.reporting.facts import length_lines
    from peftlab.tasks.batches import split_rows
    from peftlab.tasks.labelled import Evaluation, load_classifier, tokens_for
    from peftlab.training.distributed import accelerator_on

    accelerator = accelerator_on(device)
    trained = find_trained(reference, recipe_name, overrides, PREDICTED_BY)
    answers, settings = answers_of(trained), trained.recipe.train
    if len(texts) == 0:
        raise PeftlabError("no rows to predict")
    examples = answers.rows(texts).dataset()
    processor, model, fresh = load_classifier(answers, model_source(trained.loaded), settings.max_length)
    if trained.adapter is None:
        refuse_untrained(trained.loaded.model, fresh)
    else:
        load_adapter(model, trained.adapter)
    tokens = tokens_for(str(reference), answers, model, processor, settings.max_length, examples)
    for line in length_lines({"": split_rows(tokens, settings.max_length)}, settings.max_length):
        note(line)
    collate = answers.collate(processor)

    def counted(rows: Sequence[Row]) -> dict[str, Tensor]:
        if on_rows is not None:
            on_rows(len(rows))
        return collate(rows)

    evaluation = Evaluation(answers, {}, counted, settings.eval_batch_size)
    prepared = accelerator.prepare(model)
    with eval_mode(prepared):
        return answers.predictions(evaluation.outputs(prepared, tokens))


def answers_of(trained: Trained) -> Answers:
    """Return the kind of answers of a trained model's task, with the model's class names."""
    task, classes = find_task(trained.recipe.task), trained.class_names()
    if not task.labelled:
        raise PeftlabError(f"task {task.name} has no labels to predict; peftlab generate --target writes text")
    if classes is None and not task.labels and task.classed:
        raise PeftlabError(f"{trained.place}: does not say what its classes are called")
    texts = tuple(trained.recipe.data.text or task.text)
    answers: Answers = resolve(task.answers)(
        replace(task, labels=task.labels if classes is None else classes, text=texts)
    )
    return answers
