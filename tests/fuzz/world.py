"""The sound files that inputs are mutated from: two tiny models, adapters of each form, data, recipes, a merge."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import peftlab
from peftlab.checkpoints.adapter import save_adapter
from peftlab.methods.inject import make_config, trainable_parameters
from tests.image_models import save_vision_language

WORDS = ["good", "bad", "film", "plot", "dull", "fine", "the", "a", "was", "very", "and", "not"]
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]", "bos_token": "[BOS]"}
CLASSES = ("bad", "fine", "good")
ADAPTERS = {
    "lora": ("lora", {"r": 4, "lora_alpha": 8}),
    "patterns": (
        "lora",
        {
            "r": 4,
            "use_rslora": True,
            "target_modules": ["query", "value", "output.dense"],
            "rank_pattern": {"value": 2},
            "alpha_pattern": {"0.attention.self.query": 3.0},
        },
    ),
    "dora": ("lora", {"r": 2, "use_dora": True, "target_modules": ["query", "intermediate.dense"]}),
    "bitfit": ("bitfit", {}),
    "head": ("head", {}),
}
TEXTS = ("the film was good", "a dull plot", "very fine and not bad", "the plot was not good", "bad bad film", "fine")


@dataclass(frozen=True)
class World:
    """Where the sound files are.

    Attributes:
        root: the directory that holds all of them; everything in it may be copied and mutated.
    """

    root: Path

    @property
    def base(self) -> Path:
        """A BERT classifier of three classes with its tokenizer."""
        return self.root / "base"

    @property
    def sharded(self) -> Path:
        """The same in several weight files."""
        return self.root / "sharded"

    @property
    def llama(self) -> Path:
        """A Llama with its tokenizer."""
        return self.root / "llama"

    def adapter(self, name: str) -> Path:
        """An adapter for ``base``, one of ``ADAPTERS``."""
        return self.root / "adapters" / name

    @property
    def run(self) -> Path:
        """A run directory: a recipe of one's own task, and its adapter."""
        return self.root / "run"

    @property
    def data(self) -> Path:
        """A directory of train.csv and validation.csv."""
        return self.root / "data"

    @property
    def heads(self) -> Path:
        """Two Medusa heads for ``llama``."""
        return self.root / "heads"

    @property
    def sees(self) -> Path:
        """A model of images and text, with its processor."""
        return self.root / "sees"

    @property
    def merge(self) -> Path:
        """``base`` with the adapter ``lora`` merged into it."""
        return self.root / "merged"


def build(root: Path) -> World:
    """Make all files below ``root``."""
    world = World(root)
    torch.manual_seed(0)
    tokenizer = _tokenizer()
    model = _stirred(transformers.BertForSequenceClassification(_bert(len(tokenizer))), 0.3)
    model.save_pretrained(world.base)
    tokenizer.save_pretrained(world.base)
    model.save_pretrained(world.sharded, max_shard_size="8KB")
    tokenizer.save_pretrained(world.sharded)
    llama = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=4, eos_token_id=None, pad_token_id=0, tie_word_embeddings=True,
    )  # fmt: skip
    _stirred(transformers.LlamaForCausalLM(llama), 0.3).save_pretrained(world.llama)
    tokenizer.save_pretrained(world.llama)
    _heads(world.heads, len(tokenizer))
    for name, (method, fields) in ADAPTERS.items():
        injected = transformers.AutoModelForSequenceClassification.from_pretrained(world.base)
        peftlab.inject(injected, make_config(method, **fields))
        for parameter in trainable_parameters(injected).values():
            parameter.data += 0.2 * torch.randn_like(parameter)
        save_adapter(injected, world.adapter(name), base=str(world.base))
    _data(world.data)
    save = transformers.AutoModelForSequenceClassification.from_pretrained(world.base)
    peftlab.load_adapter(save, world.adapter("lora"))
    save_adapter(save, world.run / "adapter", base=str(world.base))
    (world.run / "recipe.yaml").write_text(json.dumps(_recipe(world)))
    from peftlab.checkpoints.merge import merge_checkpoint

    merge_checkpoint(world.adapter("lora"), world.base, world.merge)
    save_vision_language("llava", world.sees)
    (world.root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in TEXTS[:3]))
    return world


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[BOS]", *WORDS]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(vocabulary)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=32, **SPECIAL)


def _bert(vocabulary: int) -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=32, id2label=dict(enumerate(CLASSES)), label2id={c: i for i, c in enumerate(CLASSES)},
        pad_token_id=0,
    )  # fmt: skip


def _heads(directory: Path, rows: int) -> None:
    directory.mkdir()
    shapes = {f"blocks.{i}.layers.0.weight": (16, 16) for i in range(2)}
    shapes |= {f"lm_heads.{i}.weight": (rows, 16) for i in range(2)}
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, directory / "model.safetensors")
    sizes = {
        "num_heads": 2,
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "vocab_size": rows,
        "truncated_vocab_size": rows,
    }
    kind = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "medusa_fc_bias": False,
        "original_lm_head": False,
    }
    (directory / "config.json").write_text(json.dumps(kind | sizes))


def _stirred(model: transformers.PreTrainedModel, std: float) -> transformers.PreTrainedModel:
    for parameter in model.parameters():
        parameter.data += std * torch.randn_like(parameter)
    return model.eval()


def _data(directory: Path) -> None:
    directory.mkdir()
    for split in ("train", "validation"):
        rows = "".join(f"{text},{CLASSES[i % 3]}\n" for i, text in enumerate(TEXTS))
        (directory / f"{split}.csv").write_text("text,label\n" + rows)


def _recipe(world: World) -> dict[str, object]:
    return {
        "model": str(world.base),
        "task": "text/classification",
        "data": {"path": str(world.data), "text": ["text"], "label": "label"},
        "method": {"name": "lora", "r": 4, "lora_alpha": 8},
        "train": {"max_steps": 2, "batch_size": 4, "max_length": 16},
        "output_dir": str(world.run),
    }
