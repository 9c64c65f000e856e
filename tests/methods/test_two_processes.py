"""Two processes with half a batch each against one with all of it."""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
from tiny_models import batch, trained
from torch.nn.parallel import DistributedDataParallel

from peftlab.methods.inject import trainable_parameters
from tests.forked import two

COMBINATIONS = [("lora", "llama"), ("houlsby", "bert"), ("bitfit", "bert")]


def _worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    gradients = {}
    for method, architecture in COMBINATIONS:
        model = DistributedDataParallel(torch.load(f"{folder}/{method}.pt", weights_only=False))
        half = {key: value.chunk(2)[rank] for key, value in batch(architecture, n=8).items()}
        model(**half).loss.backward()
        gradients[method] = {name: p.grad for name, p in trainable_parameters(model.module).items()}
        # Freed after the process group, its reducer would free that in turn, and wait with Python's lock for gloo's
        # thread, which may be waiting for the lock.
        del model
    torch.save(gradients, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_gradients_of_two_processes_are_those_of_one(tmp_path):
    models = {method: trained(method, architecture) for method, architecture in COMBINATIONS}
    for method, model in models.items():
        torch.save(model, tmp_path / f"{method}.pt")
    ended = two(__file__, tmp_path)
    assert not any(each.returncode for each in ended), "\n".join(each.stderr for each in ended)
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for method, architecture in COMBINATIONS:
        model = models[method]
        model(**batch(architecture, n=8)).loss.backward()
        for name, parameter in trainable_parameters(model).items():
            for part in parts:
                torch.testing.assert_close(part[method][name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


if __name__ == "__main__":
    _worker(int(os.environ["RANK"]), sys.argv[1])
