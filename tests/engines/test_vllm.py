"""What vLLM makes of merged models, adapters and drafts, beside transformers and beside what ``adapter check`` says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from safetensors.torch import load_file

from peftlab.checkpoints.engines import check_adapter, convert_adapter
from peftlab.checkpoints.merge import merge_checkpoint
from peftlab.checkpoints.merge_plan import MergeOptions
from peftlab.checkpoints.quantised import FP8, compress, decompress
from tests.engines.models import ADAPTERS, NEW_TOKENS, PROMPTS, assert_greedy, follows, prompts

pytestmark = pytest.mark.engines
Vllm = Callable[[dict[str, Any]], list[Any]]


@pytest.fixture(scope="session")
def served(
    vllm: Vllm, target: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Outputs of vLLM: of the base, of each adapter, and of each that ``adapter convert --to vllm`` writes."""
    root, directories = tmp_path_factory.mktemp("converted"), {}
    for name, place in adapters.items():
        directories[name] = place
        try:
            convert_adapter(place, root / place.name, "vllm", base=str(target))
            directories[f"{name}, converted"] = root / place.name
        except Exception as error:
            assert type(error).__name__ == "PeftlabError", error
    job = {
        "llm": {"model": str(target), "dtype": "float32", "max_model_len": 128, "enable_lora": True}
        | {"max_lora_rank": 32, "max_loras": 1, "max_cpu_loras": 2},
        "prompts": prompts(target),
        "max_new_tokens": NEW_TOKENS,
        "adapters": [str(place) for place in directories.values()],
    }
    return dict(zip(["base", *directories], vllm(job), strict=True))


def all_follow(model: transformers.PreTrainedModel, target: Path, outputs: Any) -> bool:
    """Return whether outputs are the model's greedy ones for all prompts."""
    return not isinstance(outputs, str) and all(map(follows, [model] * len(PROMPTS), prompts(target), outputs))


def test_the_base(served: dict[str, Any], target: Path) -> None:
    base = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    for ids, output in zip(prompts(target), served["base"], strict=True):
        assert_greedy(base, ids, output)


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_as_check_says(
    name: str,
    served: dict[str, Any],
    adapters: dict[str, Path],
    adapted: Callable[[str], Any],
    target: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """What the rule calls loadable gives peft's tokens; what it refuses is refused or gives other tokens."""
    reading = check_adapter(adapters[name], str(target)).consumers["vllm"]
    right = all_follow(adapted(name), target, served[name])
    told = served[name] if isinstance(served[name], str) else "other tokens than peft's"
    assert reading.loads == right, f"check: {reading.loads} ({reading.reason}); vLLM: {'right' if right else told}"
    refused = "refused" if isinstance(served[name], str) else "other tokens than peft's"
    record_property("shows", ["vllm", f"adapter: {name}", "peft's tokens" if right else refused])


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_converted_adapter(name: str, served: dict[str, Any], adapted: Callable[[str], Any], target: Path) -> None:
    if f"{name}, converted" not in served:
        pytest.skip("adapter convert refuses it")
    assert all_follow(adapted(name), target, served[f"{name}, converted"])


def test_a_merged_model(
    vllm: Vllm,
    target: Path,
    adapters: dict[str, Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    merge_checkpoint(adapters["all linear maps"], str(target), tmp_path / "merged")
    job = {"llm": {"model": str(tmp_path / "merged"), "dtype": "float32", "max_model_len": 128}}
    (outputs,) = vllm(job | {"prompts": prompts(target), "max_new_tokens": NEW_TOKENS})
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for ids, output in zip(prompts(target), outputs, strict=True):
        assert_greedy(merged, ids, output)
    record_property("shows", ["vllm", "merged model", "transformers' tokens"])


@pytest.mark.shows("vllm", "merged model in fp8", "tokens of its values, each map's inputs rounded to fp8 as well")
def test_a_model_merged_in_fp8(vllm: Vllm, target: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    merge_checkpoint(adapters["query and value"], str(target), tmp_path / "merged", MergeOptions(dtype=FP8))
    job = {"llm": {"model": str(tmp_path / "merged"), "dtype": "float32", "max_model_len": 128}}
    (outputs,) = vllm(job | {"prompts": prompts(target), "max_new_tokens": NEW_TOKENS})
    stored = load_file(tmp_path / "merged" / "model.safetensors")
    rounded = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    for name, module in rounded.named_modules():
        if f"{name}.weight_scale" in stored:
            module.weight.data = decompress(stored[f"{name}.weight"], stored[f"{name}.weight_scale"])
            # A row of inputs has a scale of its own, as a row of weights has.
            module.register_forward_pre_hook(lambda _, args: decompress(*compress(args[0][0]))[None])
        elif f"{name}.weight" in stored:
            module.weight.data = stored[f"{name}.weight"]
    assert sum(name.endswith("_scale") for name in stored) == 7 * rounded.config.num_hidden_layers
    for ids, output in zip(prompts(target), outputs, strict=True):
        assert_greedy(rounded, ids, output, near=0.05)  # what is added in another order may be rounded to the next code
