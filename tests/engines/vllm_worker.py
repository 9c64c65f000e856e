"""One job for vLLM, run by the interpreter of vLLM's own environment: JSON on stdin, a line of JSON on stdout.

The job: ``llm`` (arguments of ``LLM``), ``prompts`` (token ids), ``max_new_tokens``, ``adapters`` (directories; each is
asked for all prompts, after the model without one). The answer: ``outputs``, a list of token ids for each prompt, for
the model and for each adapter, or the error that refused it.
"""

import json
import os
import sys

job = json.load(sys.stdin)
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
stdout = os.dup(1)
os.dup2(2, 1)  # the engine's own lines are no part of the answer

from vllm import LLM, SamplingParams  # noqa: E402
from vllm.lora.request import LoRARequest  # noqa: E402

llm = LLM(**job["llm"], enforce_eager=True, enable_prefix_caching=False)
prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
sampling = SamplingParams(temperature=0, max_tokens=job["max_new_tokens"], ignore_eos=True)


def outputs(adapter):
    return [list(of.outputs[0].token_ids) for of in llm.generate(prompts, sampling, lora_request=adapter)]


answers = [outputs(None)]
for number, directory in enumerate(job.get("adapters", []), start=1):
    adapter = LoRARequest(f"adapter{number}", number, directory)
    try:
        llm.llm_engine.add_lora(adapter)  # first: a request whose adapter is refused would stay in the queue for ever
        answers.append(outputs(adapter))
    except Exception as error:
        answers.append(f"{type(error).__name__}: {error}")
os.write(stdout, json.dumps({"outputs": answers}).encode() + b"\n")
