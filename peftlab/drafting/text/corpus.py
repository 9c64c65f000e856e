"""A corpus that drafts are copied from: read, tokenised and indexed once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from peftlab.decoding.model_free import END, SuffixAutomaton
from peftlab.errors import PeftlabError
from peftlab.references import locate
from peftlab.tasks.data import listed, quoted, read_table, read_text, table_suffix

_COLUMNS = ("text", "response", "completion", "answer", "output")


def read_documents(source: str) -> list[str]:
    """Return the texts of a corpus.

    Args:
        source: a table (``.jsonl``, ``.json``, ``.csv``, ``.tsv``, ``.parquet``), one text a row, from the first of
            its columns text, response, completion, answer and output; any other file is one text.

    Raises:
        PeftlabError: no such file, no such column, a row that is not a text, or nothing but white space.
    """
    path = locate(source, "corpus")
    if not isinstance(path, Path) or not path.is_file():
        raise PeftlabError(f"corpus {source!r}: no such file")
    texts: list[str] = []
    if table_suffix(path) is None:
        texts.append(read_text(path))
    else:
        table = read_table(path)
        name = next((name for name in _COLUMNS if name in table.columns), None)
        if name is None:
            raise PeftlabError(
                f"{path}: no column to copy from ({', '.join(_COLUMNS)}); columns: {listed(table.columns, 50)}"
            )
        for row, text in enumerate(table.columns[name]):
            if not isinstance(text, str):
                raise PeftlabError(f"{table.where(row)}: {name} is not a text, but {quoted(text)}")
            texts.append(text)
    if not any(text.strip() for text in texts):
        raise PeftlabError(f"{path}: no text in it")
    return texts


def index_corpus(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> SuffixAutomaton:
    """Return the automaton of all documents' tokens; no copy crosses from one to the next."""
    corpus = SuffixAutomaton()
    for document in documents:
        for token in (*tokenizer(document, add_special_tokens=False)["input_ids"], END):
            corpus.extend(token)
    return corpus
