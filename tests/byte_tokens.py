"""A tokenizer of bytes with a chat template and the special tokens that it writes."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(
    template: str | None,
    specials: Sequence[str],
    *,
    bos: str,
    eos: str,
    adds_bos: bool = False,
    named: dict[str, str] | None = None,
) -> PreTrainedTokenizerFast:
    """Return it: the special tokens have the first ids, then come the 256 bytes.

    Args:
        named: attribute to special token, where a model's processor asks its tokenizer for them.
        adds_bos: whether the tokenizer begins every text with the BOS token, as Llama's do.
    """
    names = list(dict.fromkeys([bos, eos, *specials]))
    vocabulary = {name: i for i, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    own = Tokenizer(models.BPE(vocabulary, []))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    own.decoder = decoders.ByteLevel()
    own.add_special_tokens(names)
    if adds_bos:
        own.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, vocabulary[bos])])
    made = PreTrainedTokenizerFast(
        tokenizer_object=own,
        bos_token=bos,
        eos_token=eos,
        pad_token=eos,
        additional_special_tokens=names,
        **({"model_specific_special_tokens": named} if named else {}),
    )
    made.chat_template = template
    return made
