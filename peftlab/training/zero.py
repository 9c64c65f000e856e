"""DeepSpeed's ZeRO 1 and 2: optimiser state and gradients spread over processes, parameters whole.

DeepSpeed steps the optimiser inside ``accelerator.backward`` and keeps no gradient behind; the rest of the loop
does not notice. Nothing here imports DeepSpeed, which is installed by whoever wants it.
"""

from __future__ import annotations

import os
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedType, compare_versions, gather_object, is_deepspeed_available

from peftlab.errors import PeftlabError
from peftlab.training.sharded import spread_state, whole

OLDEST = "0.18"  # of DeepSpeed: those before take no notice of ``torch_autocast``


def zero_plugin(settings: Any) -> DeepSpeedPlugin | None:
    """Return DeepSpeed's configuration where accelerate's own asks for it, else None.

    Batch, accumulation, clipping and precision are the recipe's, whatever the configuration says of them.

    Args:
        settings: a recipe's ``train`` section.

    Raises:
        PeftlabError: another ZeRO stage than 1 and 2, offloading, an optimiser or schedule of DeepSpeed's own,
            fp16, ``train.compile``, or no DeepSpeed.
    """
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    asked = "accelerate's configuration asks for DeepSpeed"
    if not is_deepspeed_available() or compare_versions("deepspeed", "<", OLDEST):
        raise PeftlabError(f"{asked}: install it, {OLDEST} or newer (`pip install 'peftlab[deepspeed]'`)")
    plugin = DeepSpeedPlugin()
    config = plugin.deepspeed_config
    if plugin.zero_stage == 3:
        raise PeftlabError(f"{asked}'s ZeRO 3, which shards the parameters; for that use FSDP with fsdp_version: 2")
    if plugin.zero_stage not in (1, 2):
        raise PeftlabError(f"{asked}'s ZeRO {plugin.zero_stage}; set zero_stage to 1 or 2")
    if plugin.offload_optimizer_device not in (None, "none"):
        raise PeftlabError(f"{asked} with offload_optimizer_device, which exchanges the optimiser; set it to none")
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise PeftlabError(f"{asked} with its own {key}; leave it out: the recipe decides")
    if settings.precision == "fp16":
        raise PeftlabError("train.precision=fp16 is not for DeepSpeed; use bf16 or fp32")
    if settings.compile:
        raise PeftlabError("train.compile is not for DeepSpeed; set it to false")
    steps = settings.gradient_accumulation_steps
    config.update(
        {
            # DeepSpeed only checks that these agree: the loop deals out the batches.
            "train_micro_batch_size_per_gpu": 1,
            "train_batch_size": steps * int(os.environ.get("WORLD_SIZE", "1")),
            "gradient_accumulation_steps": steps,
            "gradient_clipping": settings.max_grad_norm or 0.0,
            # DeepSpeed's own bf16 rounds the frozen weights for good; autocast leaves parameters and gradients in fp32.
            "bf16": {"enabled": False},
            "fp16": {"enabled": False},
            "torch_autocast": {
                "enabled": settings.precision == "bf16",
                "dtype": "bfloat16",
                "lower_precision_safe_modules": [],
            },
        }
    )
    return plugin


def optimiser_state(optimiser: Any, accelerator: Accelerator) -> Any:
    """Return what a checkpoint holds of the optimiser: its state, under ZeRO the list of each process's part.

    Every process must call it.
    """
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return whole(optimiser.state_dict())
    return gather_object([whole(_partition(optimiser).state_dict())])


def restore_optimiser(optimiser: Any, state: Any, accelerator: Accelerator) -> None:
    """Load what ``optimiser_state`` returned; the model holds its checkpoint's parameters already.

    Raises:
        PeftlabError: the state is of a run under ZeRO and this one is not, or the other way round.
    """
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    if zero != isinstance(state, list):
        begun, now = ("without", "with") if zero else ("with", "without")
        raise PeftlabError(f"the run was begun {begun} DeepSpeed and cannot go on {now} it")
    if not zero:
        optimiser.load_state_dict(spread_state(optimiser, state))
        return
    optimiser.optimizer.refresh_fp32_params()  # the copies that are stepped: else the next step undoes the loading
    _partition(optimiser).load_state_dict(state[accelerator.process_index])


def _partition(optimiser: Any) -> Any:
    """Return the AdamW over this process's part: inside DeepSpeed's optimiser, inside accelerate's."""
    return optimiser.optimizer.optimizer
