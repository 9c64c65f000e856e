"""A table on a Ray cluster of two nodes on this machine: lost nodes, signals, failures, and what cannot be reached."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from peftlab.errors import PeftlabError
from peftlab.files import LOCK, locked, read_json, remove_lost_lock
from peftlab.pipelines.recipes import run_recipe
from peftlab.pipelines.table import CellsFailed, Stopped
from peftlab.recipe.schema import TableRecipe

ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def cluster(_own_cache: None) -> Iterator[Any]:
    """A head without CPUs, so that cells run on other nodes; a test adds what it needs."""
    utils = pytest.importorskip("ray.cluster_utils")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))  # of the workers
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        head = {"num_cpus": 0, "include_dashboard": False, "ray_client_server_port": port}
        started = utils.Cluster(True, head_node_args=head)
        started.client = f"ray://127.0.0.1:{port}"
        patch.setenv("RAY_ADDRESS", started.address)
        yield started
        started.shutdown()


@pytest.fixture
def node(cluster: Any) -> Iterator[Any]:
    """A node with one CPU, beside the head."""
    yield cluster.add_node(num_cpus=1)
    for each in list(cluster.worker_nodes):
        cluster.remove_node(each, allow_graceful=False)


def table(values: dict[str, Any], **changes: Any) -> TableRecipe:
    return TableRecipe.model_validate({**values, **changes})


def wait(condition: Callable[[], Any]) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end and not condition():
        time.sleep(0.01)


def long_cells(values: dict[str, Any], steps: int) -> dict[str, Any]:
    train = {**values["train"], "max_steps": steps, "eval_every": steps, "save_every": 5}
    return {**values, "tasks": ["glue/cola"], "train": train}


@pytest.mark.long  # most of a minute, in which it waits for Ray
def test_a_lost_node_changes_no_score_and_no_adapter(
    values: dict[str, Any], tmp_path: Path, cluster: Any, node: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two tasks, one whose data is broken: its cells fail and are not tried again."""
    values = {**long_cells(values, 150), "tasks": ["glue/cola", "glue/mrpc"]}
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "train.tsv").write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\nmaybe\t1\t2\tgood\tbad\n")
    recipe = table(values, per_task={"glue/mrpc": {"data": {"path": str(broken)}}})
    cells = Path(values["output_dir"], "cells")
    failures: list[str] = []

    def run() -> None:
        with pytest.raises(CellsFailed) as caught:
            run_recipe(recipe, on="ray", shard="0/1")
        failures.extend(str(caught.value).splitlines())

    running = threading.Thread(target=run)
    running.start()  # here nodes come and go, which Ray wants in the main thread
    wait(lambda: list(cells.glob("cola-lora-seed0/checkpoints/step-*.pt")) or not running.is_alive())
    cluster.remove_node(node, allow_graceful=False)
    assert not (cells / "cola-lora-seed0" / "results.json").exists(), "the node was lost while the first cell ran"
    cluster.add_node(num_cpus=1)
    running.join()
    printed = capsys.readouterr().out
    assert "4 cells in part 0/1, 0 with results; 1 at a time on Ray\n" in printed and "[4/4]" in printed
    steps = (cells / "cola-lora-seed0" / "metrics.jsonl").read_text().splitlines()
    assert len([line for line in steps if '"loss"' in line and '"lr"' in line]) == 150, "each step once"
    assert len(failures) == 3 and failures[0].startswith("2 of 4 cells failed")
    for name in ("mrpc-lora-seed0", "mrpc-head-seed0"):
        assert any(name in line and "unknown label 'maybe'" in line for line in failures)
        assert (cells / f"{name}.log").read_text().count("error: ") == 1

    alone = {**values, "tasks": ["glue/cola"], "output_dir": str(tmp_path / "alone")}
    run_recipe(table(alone), cpus=1)
    for name in ("cola-lora-seed0", "cola-head-seed0"):
        here, there = cells / name, Path(alone["output_dir"], "cells", name)
        assert (here / ADAPTER).read_bytes() == (there / ADAPTER).read_bytes()
        scores = [
            {key: read_json(each / "results.json")[key] for key in ("score", "metrics", "last_metrics", "steps")}  # type: ignore[index,call-overload]
            for each in (here, there)
        ]
        assert scores[0] == scores[1]
        assert (here / "provenance.json").exists() and here.with_name(f"{name}.log").read_text()


@pytest.mark.long
def test_a_signal_stops_the_cells_with_checkpoints(values: dict[str, Any], node: Any) -> None:
    values = long_cells(values, 4000)
    cells = Path(values["output_dir"], "cells")

    def stop() -> None:
        wait(lambda: list(cells.glob("*/checkpoints/step-*.pt")))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Stopped, match=r"stopped by SIGTERM; continue with `peftlab resume .* --on ray`") as caught:
        run_recipe(table(values), on="ray")
    assert caught.value.status == 143
    assert "stopped by SIGINT after step" in (cells / "cola-lora-seed0.log").read_text()
    assert not (cells / "cola-head-seed0").exists()
    assert (cells.parent / "table.csv").exists()


@pytest.mark.long
def test_a_cluster_by_the_address_of_its_client_server(values: dict[str, Any], cluster: Any, node: Any) -> None:
    assert run_recipe(table(values, tasks=["glue/cola"]), on=cluster.client).cells == 2
    results = Path(values["output_dir"], "cells").glob("*/results.json")
    assert {path.parent.name for path in results} == {"cola-lora-seed0", "cola-head-seed0"}


def test_a_lock_that_a_lost_host_holds(tmp_path: Path) -> None:
    with locked(tmp_path / LOCK, tmp_path):
        assert (tmp_path / LOCK).read_text() == f"{socket.gethostname()} {os.getpid()}\n"
        remove_lost_lock(tmp_path, [socket.gethostname()])
        with (
            pytest.raises(
                PeftlabError, match=rf"another process is writing it \({socket.gethostname()}, process \d+\)"
            ),
            locked(tmp_path / LOCK, tmp_path),
        ):
            pass
        remove_lost_lock(tmp_path, ["another"])
        with locked(tmp_path / LOCK, tmp_path):
            pass


@pytest.mark.parametrize(
    ("on", "cpus", "said"),
    [
        ("rya", None, r"--on rya: one of local, ray .*did you mean 'ray'"),
        ("ray://", None, r"--on ray://: one of local"),
        ("ray://127.0.0.1:1", None, r"--on ray://127\.0\.0\.1:1: no Ray cluster can be reached: "),
        ("ray", None, r"--on ray \(127\.0\.0\.1:1, from RAY_ADDRESS\): no Ray cluster can be reached: "),
        ("ray", 0, r"--cpus 0: a cell needs at least one CPU core"),
    ],
)
def test_what_cannot_be_reached(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, on: str, cpus: int | None, said: str
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(PeftlabError, match=said):
        run_recipe(table(values), on=on, cpus=cpus)
    assert not Path(values["output_dir"]).exists()


def test_without_ray(values: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(PeftlabError, match=r"--on ray needs Ray: pip install 'peftlab\[ray\]'"):
        run_recipe(table(values), on="ray")
