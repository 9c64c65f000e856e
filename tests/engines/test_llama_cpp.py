"""What peftlab writes, in llama.cpp: the same tokens as in transformers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
import transformers

import peftlab
from peftlab.checkpoints.gguf import TYPES
from peftlab.checkpoints.gguf import write_model as write_gguf_model
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.errors import PeftlabError
from peftlab.references import locate
from tests.engines.models import ADAPTERS, NEW_TOKENS, assert_greedy, prompts
from tests.gguf_models import MODELS, TEXTS, write_adapter, write_model

pytestmark = pytest.mark.engines
PROMPT = "Once upon a time, there was a little girl named Lily."
COUNT = 40


def merge(place: Path, kind: str, out: str = "x.gguf", adapter: str = "adapter") -> Path:
    merge_checkpoint(place / adapter, None, place / out, MergeOptions(gguf_type=kind))
    return place / out


def greedy(model: torch.nn.Module, prompt: list[int], ends: list[int]) -> tuple[list[int], list[float]]:
    """Return a model's greedy tokens up to one that ends the text, and the margin of each before the second best."""
    tokens, margins = list(prompt), []
    with torch.no_grad():
        for _ in range(COUNT):
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            tokens.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
            if tokens[-1] in ends:
                break
    return tokens[len(prompt) :], margins


def assert_same(found: list[int], expected: list[int], margins: list[float], near: float = 1e-3) -> None:
    """Assert that tokens are equal up to the first near tie; the token that ends a text is not among them."""
    for place, (one, other) in enumerate(zip(found, expected, strict=False)):
        if one != other:
            assert margins[place] < near, f"token {place}: {one}, not {other}, by a margin of {margins[place]:.2g}"
            return
    assert len(found) >= len(expected) - 1


@pytest.mark.shows("llama.cpp", "merged model: {name}, F32", "transformers' tokens, tokenizer and chats")
@pytest.mark.parametrize("name", MODELS)
def test_a_merged_model_gives_transformers_tokens(name: str, serve: Callable, tmp_path: Path) -> None:
    base = write_model(name, tmp_path / "base")
    write_adapter(base, tmp_path / "adapter")
    model = peftlab.load_adapter(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "adapter").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(base)
    prompt = tokens(PROMPT)["input_ids"]
    with serve(merge(tmp_path, "f32")) as engine:
        assert_same(engine.generate(prompt, COUNT), *greedy(model, prompt, tokens.all_special_ids))
        for text in TEXTS:
            assert engine.tokenize(text) == tokens(text)["input_ids"], text
        if tokens.chat_template:
            messages = [{"role": "user", "content": "Hi!"}]
            shown = tokens.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            assert engine.post("apply-template", messages=messages)["prompt"] == shown


def assert_beside_base(base: Path, serve: Callable) -> None:
    """Convert the adapter beside a base, serve both, and assert that the tokens are those of the adapted model."""
    place = base.parent
    write_adapter(base, place / "none", scale=0.0)
    peftlab.convert_adapter(place / "adapter", place / "adapter.gguf", "llama.cpp")
    model = peftlab.load_adapter(transformers.AutoModelForCausalLM.from_pretrained(base), place / "adapter").eval()
    tokens = transformers.AutoTokenizer.from_pretrained(base)
    prompt = tokens(PROMPT)["input_ids"]
    with serve(merge(place, "f32", adapter="none"), place / "adapter.gguf") as engine:
        assert_same(engine.generate(prompt, COUNT), *greedy(model, prompt, tokens.all_special_ids))


@pytest.mark.shows("llama.cpp", "adapter beside its base: {name}", "transformers' tokens")
@pytest.mark.parametrize("name", ["llama", "qwen2-yarn", "qwen3", "gemma3", "phi3", "gpt2"])
def test_an_adapter_beside_its_base_gives_transformers_tokens(name: str, serve: Callable, tmp_path: Path) -> None:
    base = write_model(name, tmp_path / "base")
    pattern = {} if name in ("gpt2", "phi3") else {"rank_pattern": {"q_proj": 2}}
    write_adapter(base, tmp_path / "adapter", use_rslora=True, **pattern)
    assert_beside_base(base, serve)


@pytest.mark.shows("llama.cpp", "adapter of embeddings and head: {name}", "transformers' tokens")
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_an_adapter_of_embeddings_and_head(name: str, serve: Callable, tmp_path: Path) -> None:
    embedding, head = ("wte", "lm_head") if name == "gpt2" else ("embed_tokens", "lm_head")
    base = write_model(name, tmp_path / "base", tie_word_embeddings=False)
    write_adapter(base, tmp_path / "adapter", target_modules=[embedding, head])
    assert_beside_base(base, serve)


@pytest.mark.shows("llama.cpp", "merged model in {kind}", "log-probabilities of the file's values")
@pytest.mark.parametrize("kind", TYPES)
def test_each_type_loads_and_predicts_alike(kind: str, serve: Callable, tmp_path: Path) -> None:
    base = write_model("qwen2", tmp_path / "base")
    write_adapter(base, tmp_path / "adapter", scale=0.05)
    read = transformers.AutoModelForCausalLM.from_pretrained(base)
    path = merge(tmp_path, kind)
    peftlab.checkpoints.gguf.load_values(read, path)
    tokens = transformers.AutoTokenizer.from_pretrained(base)
    prompt = tokens(PROMPT)["input_ids"]
    with serve(path) as engine:
        best = engine.post("completion", prompt=prompt, n_predict=1, temperature=0, n_probs=5)
    with torch.no_grad():
        expected = read(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    # The engine also rounds activations, to fp16 or to 8 bits.
    within = 1e-3 if kind == "f32" else 0.3
    for each in best["completion_probabilities"][0]["top_logprobs"]:
        assert abs(each["logprob"] - float(expected[each["id"]])) < within


@pytest.mark.shows("llama.cpp", "quantised to {kind}", "the bytes of llama.cpp's own quantiser")
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.startswith("q")])
def test_the_engine_quantises_to_the_same_bytes(
    kind: str, quantised: Callable[[Path, str], dict[str, str]], tmp_path: Path
) -> None:
    write_adapter(write_model("llama", tmp_path / "base"), tmp_path / "adapter")
    ours = gguf.GGUFReader(merge(tmp_path, kind)).tensors
    exact = merge(tmp_path, "f32", "f32.gguf")
    theirs = quantised(exact, kind.upper())
    theirs["output.weight"] = quantised(exact, "Q8_0")["output.weight"]  # in 4 and 5 bits too
    digests = {each.name: hashlib.sha256(each.data.tobytes()).hexdigest() for each in ours if len(each.shape) == 2}
    different = [name for name in digests if digests[name] != theirs[name]]
    assert not different


@pytest.mark.shows("llama.cpp", "merged model: stories Llama, F32", "transformers' tokens")
def test_a_real_model_of_stories(stories: Path, serve: Callable, tmp_path: Path) -> None:
    write_adapter(stories, tmp_path / "adapter", scale=0.02)
    model = peftlab.load_adapter(transformers.AutoModelForCausalLM.from_pretrained(stories), tmp_path / "adapter")
    tokens = transformers.AutoTokenizer.from_pretrained(stories)
    prompt = tokens(PROMPT)["input_ids"]
    with serve(merge(tmp_path, "f32")) as engine:
        assert_same(engine.generate(prompt, COUNT), *greedy(model.eval(), prompt, tokens.all_special_ids))
        for text in TEXTS:
            assert engine.tokenize(text) == tokens(text)["input_ids"], text


@pytest.mark.shows("llama.cpp", "merged model: SmolLM2-135M from GGUF, F32", "transformers' tokens")
def test_a_gguf_base(smollm2: str, serve: Callable, tmp_path: Path) -> None:
    place = locate(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(place.parent, gguf_file=place.name, dtype=torch.float32)
    peftlab.inject_lora(model, r=4, target_modules=["q_proj", "k_proj", "down_proj"])
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(0, 0.02)
    peftlab.save_adapter(model, tmp_path / "adapter", base=smollm2)
    tokens = transformers.AutoTokenizer.from_pretrained(place.parent, gguf_file=place.name)
    prompt = tokens(PROMPT)["input_ids"]
    with serve(merge(tmp_path, "f32")) as engine:
        assert_same(engine.generate(prompt, COUNT), *greedy(model.eval(), prompt, tokens.all_special_ids))
        for text in TEXTS:
            assert engine.tokenize(text) == tokens(text)["input_ids"], text
    peftlab.convert_adapter(tmp_path / "adapter", tmp_path / "adapter.gguf", "llama.cpp")
    with serve(place, tmp_path / "adapter.gguf") as engine:  # in Q4_1, as it is
        assert engine.generate(prompt, 4)
    with serve(merge(tmp_path, "keep", "keep.gguf")) as engine:
        assert engine.generate(prompt, 4)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_of_peft(
    name: str,
    target: Path,
    adapters: dict[str, Path],
    adapted: Callable[[str], transformers.PreTrainedModel],
    serve: Callable,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """What ``adapter convert`` writes gives peft's tokens, with the base beside it; what it cannot write is refused."""
    try:
        peftlab.convert_adapter(adapters[name], tmp_path / "adapter.gguf", "llama.cpp", base=str(target))
    except PeftlabError as error:
        assert not (tmp_path / "adapter.gguf").exists()
        reason = str(error).replace(f"{adapters[name]}: ", "").partition(";")[0]
        record_property("shows", ["llama.cpp", f"adapter: {name}", f"refused: {reason}"])
        return
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    write_gguf_model(model, target, tmp_path / "base.gguf")
    expected = adapted(name)
    with serve(tmp_path / "base.gguf", tmp_path / "adapter.gguf") as engine:
        for ids in prompts(target):
            assert_greedy(expected, ids, [token for token in engine.generate(ids, NEW_TOKENS) if token != 2])
    record_property("shows", ["llama.cpp", f"adapter: {name}", "peft's tokens"])
