"""A directory with everything that the pages speak of: tiny models under the names of large ones, files, two runs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, RobertaConfig, RobertaForMaskedLM

from peftlab.checkpoints.adapter import save_adapter
from peftlab.methods.inject import inject_lora, trainable_parameters
from tests.byte_tokens import byte_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
ENCODER, CHAT = "FacebookAI/roberta-base", "HuggingFaceTB/SmolLM2-135M-Instruct"
CHAT_COPIES = (
    "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-1.5B-Instruct", "models/base", "models/finetuned", "path/to/my-finetuned-model",
    "path/to/stories260K", "T", "D", "TARGET", "DRAFT", "target", "draft",
)  # fmt: skip
ADAPTER_COPIES = ("french", "polite", "adapters/legal", "adapters/medical")
ROWS = {
    "sentences.csv": "sentence\nIt is raining.\nRaining it.\n",
    "ratings.csv": "text,sentiment\n" + "a fine film,2.5\na dull plot,-1.5\n" * 12,
    "tickets.csv": "subject,body,queue\n" + "Card,charged twice,billing\nLogin,it fails,support\n" * 12,
    "new_tickets.csv": "subject,body,queue\n" + "Card,charged again,billing\nLogin,no,support\n" * 2,
    "my.yaml": f"model: {ENCODER}\ntask: text/classification\n"
    "data: {path: texts, text: [body], label: queue, validation: null}\nmethod: {name: lora}\noutput_dir: runs/mine-too\n",
    **{f"texts/{split}.csv": "body,queue\nIt fails,support\nToo dear,billing\n" * 4 for split in ("train", "validation")},
    "new.csv": "plot\nA ship sinks.\nTwo meet.\n",
    "films.csv": "plot,genres\n" + "A ship sinks.,drama|action\nTwo meet.,drama\n" * 8,
    "tinyshakespeare.txt": "First Citizen: Before we proceed any further, hear me speak.\n\n" * 40,
    "glue_data/CoLA/train.tsv": "gj04\t1\t\tIt rains.\ngj04\t0\t*\tRain it.\n" * 8,
    "glue_data/CoLA/dev.tsv": "gj04\t1\t\tHe left.\ngj04\t0\t*\tHe left it of.\n" * 2,
    **{f"e2e/{split}.txt": "name : Alimentum | area : city||Alimentum is in the city .\n" * 8 for split in
       ("train", "valid", "test")},
}  # fmt: skip
TABLES: dict[str, dict[str, object]] = {
    "gsm8k_train.jsonl": {"question": "How much is 1 + 1?", "answer": "It is two. #### 2"},
    "gsm8k_test.jsonl": {"question": "How much is 1 + 2?", "answer": "It is three. #### 3"},
    "questions.jsonl": {"question": "Where is Rome?", "prompt": "Where is Rome?"},
    "prompts.jsonl": {"prompt": "Once upon a time"},
    "others.jsonl": {"prompt": "There was a king"},
    "FILE.jsonl": {"prompt": "Once upon a time"},
    "answers.jsonl": {"answer": "Once upon a time there was a cat."},
    "log.jsonl": {"prompt": "Once upon", "response": " a time there was a cat"},
    "new_chats.jsonl": {
        "messages": [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "Farewell."}]
    },
    "chats.jsonl": {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]},
    "pairs.jsonl": {"prompt": "Hi", "chosen": "Hello.", "rejected": "Go."},
}


def furnish(place: Path) -> None:
    """Write models, adapters and files; ``place`` is the working directory."""
    tokenizer = byte_tokenizer(TEMPLATE, [], bos="<s>", eos="</s>")
    size = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    encoder = RobertaConfig(**size, num_hidden_layers=2, max_position_embeddings=520, pad_token_id=1)
    decoder = LlamaConfig(
        **size, num_hidden_layers=4, max_position_embeddings=640, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        tie_word_embeddings=False,
    )  # fmt: skip
    for model, name in ((RobertaForMaskedLM(encoder), ENCODER), (LlamaForCausalLM(decoder), CHAT)):
        model.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    for copy in CHAT_COPIES:
        shutil.copytree(place / CHAT, place / copy)
    shutil.copytree(place / ENCODER, place / "MODEL")
    _adapters(place)
    for name, text in ROWS.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    for name, row in TABLES.items():
        (place / name).write_text(f"{json.dumps(row)}\n" * 24)


def _adapters(place: Path) -> None:
    """Write adapters of the encoder and the decoder, and a finetuned model that one of them makes."""
    classifier = transformers.AutoModelForSequenceClassification.from_pretrained(place / ENCODER)
    save_adapter(inject_lora(classifier, r=2), place / "run/checkpoint-500", base=ENCODER)
    model = LlamaForCausalLM.from_pretrained(place / "models/base")
    inject_lora(model, r=2)
    with torch.no_grad():
        for parameter in trainable_parameters(model).values():
            parameter.normal_(std=0.02)
    save_adapter(model, place / "my-adapter", base="models/base")
    for copy in ADAPTER_COPIES:
        shutil.copytree(place / "my-adapter", place / copy)
    finetuned = LlamaForCausalLM.from_pretrained(place / "models/base")
    finetuned.model.layers[1].self_attn.q_proj.weight.data.add_(0.01)
    finetuned.save_pretrained(place / "models/finetuned")
