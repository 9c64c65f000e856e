"""What every test shares: a number of torch threads, no hub, and the data beside the checkout."""

from __future__ import annotations

import gc
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
from hypothesis import settings

from peftlab.errors import PeftlabError
from peftlab.references import locate
from tests.packages import MINILM, REVIEWS, SMOLLM2

settings.register_profile("any machine", deadline=None)  # however busy it is
settings.load_profile("any machine")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

# Files of more than some fifteen seconds.
LONGEST = (
    "table/test_table_run.py",
    "drafting/test_draft_runs.py",
    "documents/test_documented_commands.py",
    "drafting/test_kinds_end_to_end.py",
    "decoding/test_sampled_decoding.py",
    "decoding/test_lossless_gate.py",
    "training/test_distributed.py",
    "table/test_draft_tables.py",
    "decoding/test_benchmark.py",
    "training/test_language_runs.py",
    "drafting/test_live_updates.py",
    "training/test_state.py",
    "drafting/test_eagle3_runs.py",
    "checkpoints/test_merge.py",
    "methods/test_method_contract.py",
)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The data beside the checkout; a test that needs it is skipped where it is absent."""
    path = Path(__file__).resolve().parents[2] / "shared"
    if not path.is_dir():
        pytest.skip("no ../shared beside the checkout")
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first: a worker that took one of them last would end long after the others."""
    place = {file: i for i, file in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.split("::")[0].removeprefix("tests/"), len(place)))


def pytest_collection_finish() -> None:
    """Spare what is imported by now the searches for garbage, which were a tenth of the suite's time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def empty_plots(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave the plots of reports empty: to draw them takes a third of a tiny run, and tests/reporting does it."""
    if "reporting" in request.path.parts:
        yield
        return
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
