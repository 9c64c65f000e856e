"""A tokenizer as the fields of a GGUF file.

llama.cpp knows by a name how a tokenizer splits text; which name it is follows from tokenizer.json. The files of most
decoders are read here, to the same result as transformers', whose import takes seconds; it loads all others.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import Json, read_object
from peftlab.models.load import load_tokenizer
from peftlab.untyped import TokenizerJson

Fields = dict[str, object]
"""Fields of a GGUF file by name: integers, numbers, texts, truth values, lists."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_BYTES, _BYTES_ALONE = ("ByteLevel", True), ("ByteLevel", False)
# The steps of the pre-tokenizer, and whether a word that is a token is not merged, -> llama.cpp's name.
_PRE_TOKENIZERS: dict[tuple[tuple[object, ...], bool], str] = {
    ((_BYTES,), False): "gpt-2",
    ((("Digits", True), _BYTES), False): "smollm",
    ((("Split", rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"), _BYTES_ALONE), True): "llama-bpe",
    ((("Split", rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"), _BYTES_ALONE), False): "dbrx",
    ((("Split", rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}|{_REST}"), _BYTES_ALONE), False): "qwen2",
    ((
        ("Split", rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}|{_CASED_REST}"),
        _BYTES_ALONE,
    ), True): "tekken",
    ((
        (
            "Split",
            rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
            rf"\p{{N}}{{1,3}}|{_CASED_REST}",
        ),
        _BYTES_ALONE,
    ), False): "gpt-4o",
}  # fmt: skip
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


@dataclass(frozen=True)
class Tokens:
    """A tokenizer as GGUF has it: fields with their full names, and notes on what the engine does otherwise."""

    fields: Fields
    notes: list[str]


@dataclass(frozen=True)
class _Tokenizer:
    """What a GGUF file takes from a tokenizer.

    Attributes:
        raw: its tokenizer.json. vocabulary: the id of each token's text.
        special: ids by what they stand for, as ``bos``. ids: of the text "a".
        template: of chats; several by name.
    """

    raw: TokenizerJson
    vocabulary: dict[str, int]
    special: dict[str, int]
    ids: list[int]
    template: str | dict[str, str] | None


def tokenizer_fields(directory: Path, size: int) -> Tokens:
    """Return the tokenizer of a model directory, with ``size`` tokens: those without a text are unused."""
    tokenizer = _read(directory) or _load(directory)
    raw, vocabulary, special = tokenizer.raw, tokenizer.vocabulary, tokenizer.special
    model = raw["model"]
    if max(vocabulary.values()) >= size:
        raise PeftlabError(
            f"the tokenizer has {max(vocabulary.values()) + 1} tokens, the model's embedding {size} rows: a GGUF file "
            "has one row for each token"
        )
    if model["type"] != "BPE":
        raise PeftlabError(f"a tokenizer of type {model['type']} cannot be written as a GGUF file: only BPE is known")
    texts = [f"[PAD{index}]" for index in range(size)]
    types = [_UNUSED] * size
    for text, index in vocabulary.items():
        texts[index], types[index] = text, _NORMAL
    for token in raw["added_tokens"]:
        types[token["id"]] = _CONTROL if token["special"] else _USER
    merges = [merge.split(" ") if isinstance(merge, str) else list(merge) for merge in model["merges"]]
    notes: list[str] = []
    if model.get("byte_fallback"):
        fields = _sentencepiece(raw, special.get("unk"), texts, types, merges, notes)
    else:
        fields = _byte_level(raw, merges, notes)
    fields |= {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": types}
    for name in ("bos", "eos", "unk", "sep", "pad"):
        if name in special:
            key = {"unk": "unknown", "sep": "seperator", "pad": "padding"}.get(name, name)  # the format's spelling
            fields[f"tokenizer.ggml.{key}_token_id"] = special[name]
    fields |= _ends(directory, special.get("eos"))
    ids = tokenizer.ids
    fields["tokenizer.ggml.add_bos_token"] = bool(ids) and ids[0] == special.get("bos")
    fields["tokenizer.ggml.add_eos_token"] = len(ids) > 1 and ids[-1] == special.get("eos")
    template = tokenizer.template
    if isinstance(template, dict):
        others = {name: text for name, text in template.items() if name != "default"}
        fields |= {f"tokenizer.chat_template.{name}": text for name, text in others.items()}
        fields |= {"tokenizer.chat_templates": list(others)} if others else {}
        template = template.get("default")
    if template:
        fields["tokenizer.chat_template"] = template
    return Tokens(fields, notes)


# Reading the files.

_AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")  # classes that do what tokenizer.json says
_BYTE_LEVEL: dict[str, Json] = {"type": "ByteLevel", "add_prefix_space": False}
_QWEN_SPLIT: dict[str, Json] = {
    "type": "Split",
    "pattern": {"Regex": rf"{_CONTRACTIONS}|{_WORD}\p{{L}}+|\p{{N}}|{_REST}"},
    "behavior": "Isolated",
    "invert": False,
}


@dataclass(frozen=True)
class _Class:
    """What a class of transformers does whatever tokenizer.json says.

    Attributes:
        special: the defaults of special tokens. prefix: the default of ``add_prefix_space``.
        steps: its normalizer and pre-tokenizer. bytes: whether text without a token becomes tokens of bytes.
    """

    special: dict[str, str]
    prefix: bool
    steps: dict[str, Json]
    bytes: bool = False


_END = "<|endoftext|>"
_CLASSES = {
    "LlamaTokenizer": _Class(
        {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
        True,
        {
            "normalizer": None,
            "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first"},
        },
        bytes=True,
    ),
    "Qwen2Tokenizer": _Class(
        {"unk_token": _END, "eos_token": _END, "pad_token": _END},
        False,
        {
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [_QWEN_SPLIT, {**_BYTE_LEVEL, "use_regex": False}],
            },
        },
    ),
    "GPT2Tokenizer": _Class(
        {"unk_token": _END, "bos_token": _END, "eos_token": _END},
        False,
        {"normalizer": None, "pre_tokenizer": {**_BYTE_LEVEL, "use_regex": True}},
    ),
}


def _load(directory: Path) -> _Tokenizer:
    """Return a tokenizer as transformers loads it."""
    try:
        tokenizer = load_tokenizer(str(directory))
    except PeftlabError as error:
        raise PeftlabError(f"a GGUF file contains its tokenizer, and the model has none that loads: {error}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise PeftlabError(f"{type(tokenizer).__name__} has no tokenizer.json, which a GGUF file is made from")
    names = ("bos", "eos", "unk", "sep", "pad")
    special = {name: getattr(tokenizer, f"{name}_token_id", None) for name in names}
    return _Tokenizer(
        json.loads(backend.to_str()),
        tokenizer.get_vocab(),
        {name: index for name, index in special.items() if index is not None},
        tokenizer("a")["input_ids"],
        tokenizer.chat_template,
    )


def _read(directory: Path) -> _Tokenizer | None:
    """Return a tokenizer as transformers would load it, without transformers; None where that is not certain.

    Its class does what tokenizer.json says, or is one of ``_CLASSES``; its special tokens are added tokens of that
    file; no file of an earlier format adds to it.
    """
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    try:
        config, settings = read_object(directory / "config.json"), read_object(directory / "tokenizer_config.json")
        text = file.read_text(encoding="utf-8")
        inner = Tokenizer.from_str(text)
    except Exception:  # loading it says what is wrong
        return None
    earlier = [] if "added_tokens_decoder" in settings else ["special_tokens_map.json", "added_tokens.json"]
    if any((directory / name).exists() for name in (*earlier, "tekken.json", "additional_chat_templates")):
        return None
    if any(settings.get(key) for key in ("auto_map", "fast_tokenizer_files", "init_inputs")):
        return None
    raw = json.loads(inner.to_str())
    kind, name = config.get("model_type"), settings.get("tokenizer_class")
    if not isinstance(name, str) or raw["padding"] is not None or settings.get("backend", "tokenizers") != "tokenizers":
        return None
    name = _class_name(str(kind), name, '"ByteLevel"' in text)
    if name not in _CLASSES and name not in _AS_IT_IS:
        return None
    named: dict[str, Json] = {}
    if name in _CLASSES:
        row = _CLASSES[name]
        if raw["model"]["type"] != "BPE" or settings.get("add_prefix_space") not in (None, row.prefix):
            return None
        raw |= row.steps
        raw["model"] |= {"byte_fallback": row.bytes, "ignore_merges": False}
        named |= row.special
    named |= {key: value for key, value in settings.items() if key.endswith("_token") and not isinstance(value, bool)}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    texts = {key: value for key, value in texts.items() if value is not None}
    further = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    added = {token["content"]: token["special"] for token in raw["added_tokens"]}
    if not isinstance(further, list) or not all(
        isinstance(text, str) and added.get(text) for text in (*texts.values(), *further)
    ):
        return None
    if (stated := settings.get("added_tokens_decoder")) is not None:
        own = {str(token["id"]): (token["content"], token["special"]) for token in raw["added_tokens"]}
        if not isinstance(stated, dict) or own != {
            index: (token.get("content"), token.get("special", False)) if isinstance(token, dict) else None
            for index, token in stated.items()
        }:
            return None
    vocabulary: dict[str, int] = inner.get_vocab()
    if kind == "mistral" and len(vocabulary) > 100_000:  # some of which transformers mends
        return None
    inner.no_truncation()
    special = {key.removesuffix("_token"): vocabulary[str(text)] for key, text in texts.items()}
    stored = settings.get("chat_template")
    template: str | dict[str, str] | None = stored if isinstance(stored, str) else None
    if isinstance(stored, list):
        if not all(isinstance(each, dict) and each.keys() >= {"name", "template"} for each in stored):
            return None
        template = {str(each["name"]): str(each["template"]) for each in stored if isinstance(each, dict)}
    if (written := directory / "chat_template.jinja").is_file():
        template = written.read_text(encoding="utf-8")
    return _Tokenizer(raw, vocabulary, special, inner.encode("a").ids, template)


def _class_name(model_type: str, name: str, byte_level: bool) -> str:
    """Return the class that transformers takes for a model's tokenizer.

    Args:
        model_type: of the model. name: of the class that its tokenizer_config.json names.
        byte_level: whether its tokenizer.json is.
    """
    name = name.removesuffix("Fast") if name not in _AS_IT_IS else name
    if model_type == "qwen2":  # often named wrongly
        return "Qwen2Tokenizer"
    if model_type == "mistral" or (name == "LlamaTokenizer" and byte_level):
        return "TokenizersBackend"
    return name if model_type in ("llama", "qwen3") else ""  # merging any other imports transformers before


# The fields.


def _ends(directory: Path, eos: int | None) -> Fields:
    """Return the field of a second token that ends an answer, as chat models have in their generation_config.json."""
    file = directory / "generation_config.json"
    named = read_object(file).get("eos_token_id") if file.is_file() else None
    others = [index for index in named if index != eos] if isinstance(named, list) else []
    return {"tokenizer.ggml.eot_token_id": others[0]} if others else {}


def _parts(step: dict[str, Json] | None, several: str) -> list[dict[str, Json]]:
    """Return the steps of a normalizer or pre-tokenizer of tokenizer.json, of which several may be a ``Sequence``."""
    if step is None:
        return []
    inner = step.get(several) if step["type"] == "Sequence" else [step]
    return [part for part in inner if isinstance(part, dict)] if isinstance(inner, list) else []


def _byte_level(raw: TokenizerJson, merges: list[list[str]], notes: list[str]) -> Fields:
    """Return the fields of a byte-level BPE tokenizer."""
    steps: list[object] = []
    for part in _parts(raw["pre_tokenizer"], "pretokenizers"):
        kind, pattern = part["type"], part.get("pattern")
        if kind == "ByteLevel" and not part["add_prefix_space"]:
            steps.append((kind, part.get("use_regex", True)))
        elif kind == "Digits":
            steps.append((kind, part["individual_digits"]))
        elif kind == "Split" and isinstance(pattern, dict) and part["behavior"] == "Isolated" and not part["invert"]:
            steps.append((kind, pattern.get("Regex")))
        else:
            steps.append(json.dumps(part))
    name = _PRE_TOKENIZERS.get((tuple(steps), bool(raw["model"].get("ignore_merges"))))
    if not merges and raw["pre_tokenizer"] and steps[-1:] in ([_BYTES], [_BYTES_ALONE]):
        name = "gpt-2"  # each byte is a token, however text is split first
    if name is None:
        raise PeftlabError(
            f"the tokenizer splits text by {json.dumps(raw['pre_tokenizer'])}, for which llama.cpp's name is not known "
            f"here; known are {', '.join(_PRE_TOKENIZERS.values())}"
        )
    for part in _parts(raw["normalizer"], "normalizers"):
        if part["type"] != "NFC":
            raise PeftlabError(f"the tokenizer's normalizer {part['type']} cannot be expressed in a GGUF file")
        notes.append("llama.cpp does not normalise text to NFC as this tokenizer does: send it normalised text")
    joined = [" ".join(part.replace(" ", "\u0120") for part in pair) for pair in merges]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": joined}


def _sentencepiece(
    raw: TokenizerJson,
    unknown: int | None,
    texts: list[str],
    types: list[int],
    merges: list[list[str]],
    notes: list[str],
) -> Fields:
    """Return the fields of a SentencePiece tokenizer; mark its unknown token and its bytes in ``types``.

    Where tokenizer.json merges pairs in an order, SentencePiece merges the pair whose result has the highest score:
    minus the rank of the first merge that makes it.
    """
    prefix, spaces = False, False
    for part in [*_parts(raw["normalizer"], "normalizers"), *_parts(raw["pre_tokenizer"], "pretokenizers")]:
        kind, pattern = part["type"], part.get("pattern")
        if kind == "Prepend" and part["prepend"] == "\u2581":
            prefix = True
        elif kind == "Metaspace" and part.get("replacement") == "\u2581":
            prefix, spaces = part.get("prepend_scheme", "always") != "never", True
        elif kind == "Replace" and pattern == {"String": " "} and part["content"] == "\u2581":
            spaces = True
        elif not (kind == "Split" and pattern == {"String": " "} and spaces):  # there are none left to split at
            raise PeftlabError(f"the tokenizer's step {json.dumps(part)} cannot be expressed in a GGUF file")
    if not spaces:
        raise PeftlabError("the tokenizer does not write spaces as \u2581, as SentencePiece does")
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    known, pairs = set(texts), {(left, right) for left, right in merges}
    splits = ((text[:at], text[at:]) for text in ranks for at in range(1, len(text)))
    lacking = [pair for pair in splits if pair[0] in known and pair[1] in known and pair not in pairs]
    if lacking:
        notes.append(
            f"llama.cpp merges any two tokens that make a third; tokenizer.json does not merge {len(lacking)} such "
            f"pairs, {lacking[0]} for one: some texts may be split otherwise"
        )
    for index, text in enumerate(texts):
        if index == unknown:
            types[index] = _UNKNOWN
        elif types[index] == _NORMAL and _BYTE_TOKEN.fullmatch(text):
            types[index] = _BYTE
    scores = [
        float(-ranks.get(text, len(merges))) if kind == _NORMAL else 0.0
        for text, kind in zip(texts, types, strict=True)
    ]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
