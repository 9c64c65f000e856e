"""What every test shares: a number of torch threads, no hub, and the data beside the checkout."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A suite of one device, whatever the machine has: the CPU, or with `PEFTLAB_TEST_GPU=1 pytest -m device` the GPU.
if not os.environ.get("PEFTLAB_TEST_GPU"):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
# One thread a worker, also in the processes that tests start; `make test-cpus` sets two.
os.environ["OMP_NUM_THREADS"] = os.environ.get("PEFTLAB_TEST_THREADS", "1")

import pytest
import torch

from peftlab.errors import PeftlabError
from peftlab.references import locate
from tests.packages import MINILM, REVIEWS, SMOLLM2

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data beside the checkout; a test that needs it is skipped where it is absent."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("no ../shared beside the checkout")
    return path


@pytest.fixture(scope="module")
def empty_plots() -> Iterator[None]:
    """Leave the plots of reports empty: to draw them takes a third of a tiny run, and tests/reporting does it."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure, "savefig", lambda self, file, **options: file.write('<svg viewBox="0 0 1 1"></svg>'))
        yield


@pytest.fixture(scope="session")
def stories(shared: Path) -> Path:
    """A real Llama of 260 thousand parameters."""
    return shared / "data" / "weights" / "stories260K-hf"


def _package(reference: str) -> str:
    try:
        locate(reference)
    except PeftlabError as error:
        pytest.skip(str(error))
    return reference


@pytest.fixture(scope="session")
def minilm() -> str:
    """Reference of the MiniLM-L6 encoder that travels as a package."""
    return _package(MINILM)


@pytest.fixture(scope="session")
def smollm2() -> str:
    """Reference of the SmolLM2-135M GGUF that travels as a package."""
    return _package(SMOLLM2)


@pytest.fixture(scope="session")
def reviews() -> str:
    """Reference of the human-rated film-review sentences that travel as a package."""
    return _package(REVIEWS)
