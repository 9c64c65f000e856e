"""What vLLM makes of merged models, adapters and drafts, beside transformers and beside what ``adapter check`` says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from peftlab.checkpoints.engines import check_adapter, convert_adapter
from peftlab.checkpoints.merge import merge_checkpoint
from tests.command_line import invoke
from tests.engines.conftest import PYTHON
from tests.engines.models import NEW_TOKENS, PROMPTS, assert_greedy, follows, prompts

pytestmark = pytest.mark.engines
Vllm = Callable[[dict[str, Any]], list[Any]]
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

ADAPTERS: dict[str, dict[str, Any]] = {
    "all linear maps": {"target_modules": ALL},
    "query and value": {"target_modules": ["q_proj", "v_proj"]},
    "one projection": {"target_modules": ["k_proj"]},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "gate alone": {"target_modules": ["gate_proj"]},
    "rank 1": {"target_modules": ALL, "r": 1},
    "rank 3": {"target_modules": ALL, "r": 3},
    "rank 20": {"target_modules": ["q_proj", "v_proj"], "r": 20},
    "rslora": {"target_modules": ALL, "use_rslora": True},
    "rank pattern": {"target_modules": ALL, "rank_pattern": {"q_proj": 8, "down_proj": 2}},
    "alpha pattern": {"target_modules": ALL, "alpha_pattern": {"v_proj": 32, "up_proj": 1}},
    "some layers": {"target_modules": ALL, "layers_to_transform": [0, 3]},
    "output layer": {"target_modules": ["q_proj", "lm_head"]},
    "embedding": {"target_modules": ["v_proj", "embed_tokens"]},
    "dora": {"target_modules": ALL, "use_dora": True},
    "bias": {"target_modules": ALL, "bias": "lora_only"},
    "lora_bias": {"target_modules": ALL, "lora_bias": True},
    "saved module": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "token rows": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 7]},
    "pissa": {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": "pissa"},
    "replaced layer": {"target_modules": ["q_proj"], "exclude_modules": ["model.layers.1.self_attn.q_proj"]},
}


@pytest.fixture(scope="session")
def adapters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters written by peft, each with factors that change what the model writes."""
    root, found = tmp_path_factory.mktemp("adapters"), {}
    for number, (name, options) in enumerate(ADAPTERS.items()):
        torch.manual_seed(number)
        base = transformers.AutoModelForCausalLM.from_pretrained(target)
        config = peft.LoraConfig(**{"task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, **options})
        model = peft.get_peft_model(base, config)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if parameter.requires_grad and "magnitude" not in key:
                    parameter.add_(0.08 * torch.randn_like(parameter))
        found[name] = root / name.replace(" ", "-")
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="session")
def adapted(target: Path, adapters: dict[str, Path]) -> Callable[[str], transformers.PreTrainedModel]:
    """Returns the model that peft makes of an adapter."""

    def load(name: str) -> transformers.PreTrainedModel:
        base = transformers.AutoModelForCausalLM.from_pretrained(target)
        return peft.PeftModel.from_pretrained(base, adapters[name]).eval()

    return load


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
    name: str, served: dict[str, Any], adapters: dict[str, Path], adapted: Callable[[str], Any], target: Path
) -> None:
    """What the rule calls loadable gives peft's tokens; what it refuses is refused or gives other tokens."""
    reading = check_adapter(adapters[name], str(target)).consumers["vllm"]
    right = all_follow(adapted(name), target, served[name])
    told = served[name] if isinstance(served[name], str) else "other tokens than peft's"
    assert reading.loads == right, f"check: {reading.loads} ({reading.reason}); vLLM: {'right' if right else told}"


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_converted_adapter(name: str, served: dict[str, Any], adapted: Callable[[str], Any], target: Path) -> None:
    if f"{name}, converted" not in served:
        pytest.skip("adapter convert refuses it")
    assert all_follow(adapted(name), target, served[f"{name}, converted"])


def test_a_merged_model(vllm: Vllm, target: Path, adapters: dict[str, Path], tmp_path: Path) -> None:
    merge_checkpoint(adapters["all linear maps"], str(target), tmp_path / "merged")
    job = {"llm": {"model": str(tmp_path / "merged"), "dtype": "float32", "max_model_len": 128}}
    (outputs,) = vllm(job | {"prompts": prompts(target), "max_new_tokens": NEW_TOKENS})
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for ids, output in zip(prompts(target), outputs, strict=True):
        assert_greedy(merged, ids, output)


DRAFTS = {
    "eagle3": "draft={kind: eagle3, steps: 2} method=null",
    "model": "draft={kind: model, truncate: {layers: [0, 5]}} method={name: full}",
    "pard": "draft={kind: pard} method={name: full}",
}


@pytest.mark.parametrize("kind", DRAFTS)
def test_a_draft(
    kind: str, vllm: Vllm, target: Path, shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trained here, exported, served: the engine's outputs are its own plain ones, its acceptance is within ours."""
    text = (shared / "data" / "lm" / "tinyshakespeare.txt").read_text().splitlines()
    lines = [line for line in text if len(line) > 20]
    for name, chosen in (("train", lines[:160]), ("held_out", lines[5000:5024])):
        (tmp_path / f"{name}.txt").write_text("\n".join(chosen) + "\n")
    recipe = tmp_path / "draft.yaml"
    recipe.write_text(
        f"kind: draft\ntarget: {target}\ndraft: {{kind: eagle3}}\nmethod: null\n"
        f"data: {{prompts: {tmp_path}/train.txt, max_prompts: 128, held_out: 8, max_new_tokens: 24, batch_size: 16}}\n"
        "train: {max_steps: 60, batch_size: 8, max_length: 96, lr: 3e-3}\ngamma: 3\n"
    )
    run, out = tmp_path / "run", tmp_path / "bench.json"
    overrides = [part if part.startswith("draft") else f"method{part}" for part in DRAFTS[kind].split(" method")]
    assert invoke("run", recipe, *overrides, f"output_dir={run}").exit_code == 0
    monkeypatch.setenv("PEFTLAB_ENGINES", str(PYTHON))
    options = ["--prompts", tmp_path / "held_out.txt", "--max-new-tokens", 32, "--gamma", 3, "--repeats", 1]
    done = invoke("draft", "bench", "--target", target, "--draft", run, *options, "--engine", "vllm", "--json", out)
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    low, high = found["drafters"]["draft"]["accepted_share_interval"]
    assert found["engine"]["lossless"] and low <= found["engine"]["accepted_share"] <= high
    assert all(of["near_tie"] for of in found["engine"]["divergences"])
