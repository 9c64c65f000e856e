"""The programs that read adapters, as a table: whose rule is derived from which version of its source.

The rules say what that version does with a file; they are small functions beside this table. A program of which a rule
does not speak (another architecture, say) gets "unknown", never a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peftlab.errors import PeftlabError, did_you_mean


@dataclass(frozen=True)
class Verdict:
    """Whether a program reads an adapter as it was trained, and why.

    Attributes:
        loads: ``True``: as meant, with the settings that ``reason`` names; ``False``: refused, or read as something
            else; ``"unknown"``: there is no rule.
        reason: what decides.
    """

    loads: bool | Literal["unknown"]
    reason: str


@dataclass(frozen=True)
class Consumer:
    """A program that reads adapters.

    Attributes:
        rule: ``(Fit) -> Verdict``, as "module:function".
        source: the version that the rule was derived from, and its files; ``{peft}`` is the installed version.
        date: of that version; empty where the program itself is asked today.
        note: how to serve a converted directory; ``{rank}`` is its rank. Empty: nothing is converted for it.
    """

    rule: str
    source: str
    date: str = ""
    note: str = ""


_HERE = "peftlab.checkpoints.consumers."

CONSUMERS: dict[str, Consumer] = {
    "peftlab": Consumer(_HERE + "installed:peftlab_rule", "peftlab {peftlab}, by planning what it would do"),
    "peft": Consumer(_HERE + "installed:peft_rule", "peft {peft}, by loading it"),
    "vllm": Consumer(
        _HERE + "vllm:rule",
        "vLLM 0.33.0: vllm/lora/peft_helper.py, lora_model.py, lora_weights.py, model_manager.py, utils.py, "
        "layers/fused_moe.py, model_executor/models/",
        "2026-11-02",
        "serve with --enable-lora --max-lora-rank {rank}",
    ),
    "sglang": Consumer(
        _HERE + "sglang:rule",
        "SGLang 0.5.23: sglang/srt/lora/lora.py, lora_config.py, lora_manager.py, mem_pool.py, utils.py",
        "2026-10-30",
        "serve with --enable-lora --lora-paths NAME=DIR",
    ),
    "llama.cpp": Consumer(
        _HERE + "llamacpp:rule",
        "llama.cpp 0c1e57098, as in llama-cpp-python 0.3.36: convert_lora_to_gguf.py, conversion/, "
        "src/llama-adapter.cpp, src/llama-graph.cpp",
        "2026-10-01",
        "convert with convert_lora_to_gguf.py, then --lora FILE",
    ),
    "lorax": Consumer(
        _HERE + "lorax:rule",
        "LoRAX a7394ba: server/lorax_server/adapters/lora.py, models/model.py, models/flash_*.py",
        "2026-05-28",
        "pass the directory as adapter_id with adapter_source=local",
    ),
}
ENGINES = tuple(name for name, row in CONSUMERS.items() if row.note)


def engine(name: str) -> str:
    """Return the engine that ``name`` means, however its letters and dots are written (vLLM, llama.cpp, llamacpp).

    Raises:
        PeftlabError: there is none; the nearest name is in the message.
    """
    plain = {each.replace(".", ""): each for each in ENGINES}
    found = plain.get(name.lower().replace(".", ""))
    if found is None:
        raise PeftlabError(f"no engine {name!r}{did_you_mean(name, ENGINES)}: one of {', '.join(ENGINES)}")
    return found
