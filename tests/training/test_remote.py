"""Runs whose output_dir is a URL: on a local S3 server, and in fsspec's memory."""

from __future__ import annotations

import sys
from pathlib import Path

import fsspec
import pytest
import tiny
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from typer.testing import CliRunner

import peftlab
from peftlab.cli.app import app
from peftlab.errors import PeftlabError
from peftlab.pipelines.merge import run_merge
from peftlab.recipe.load import load_recipe
from peftlab.remote import RemoteDirectory, local_place
from tests.forked import python

KILLED_AT = Path(__file__).with_name("killed_at.py")
STEPS = {"save_every": 2, "eval_every": 6, "max_steps": 6}
ADAPTER = "adapter/adapter_model.safetensors"


@pytest.fixture(scope="module")
def server():
    """The address of a local S3 server."""
    threaded = pytest.importorskip("moto.server", reason="moto[server] is not installed").ThreadedMotoServer(port=0)
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    threaded.start()
    host, port = threaded.get_host_and_port()
    yield f"http://{host}:{port}"
    threaded.stop()


@pytest.fixture
def keys(server, monkeypatch):
    """Let s3fs find the server and its keys in the environment, as it finds everything."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "tests")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-of-the-tests")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


@pytest.fixture
def bucket(keys):
    """The URL of an empty bucket."""
    system = fsspec.filesystem("s3", skip_instance_cache=True)
    system.mkdir("runs")
    yield "s3://runs"
    system.rm("runs", recursive=True)


@pytest.fixture
def memory():
    """A URL in the memory of this process."""
    MemoryFileSystem.store.clear()
    yield "memory://runs"
    MemoryFileSystem.store.clear()


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """A function that moves on to a machine without any files."""
    places = iter(range(100))

    def another():
        monkeypatch.setenv("PEFTLAB_CACHE", str(tmp_path / f"machine-{next(places)}"))

    another()
    return another


@pytest.fixture
def written(model, rows, tmp_path):
    """A function that writes the recipe of a run and returns its file."""

    def write(output_dir, changes=None, **train):
        values = {**tiny.recipe(model, rows, output_dir, **STEPS, **train), **(changes or {})}
        return tiny.write_recipe(values, tmp_path / "recipe.yaml")

    return write


@pytest.fixture(scope="module")
def whole(model, rows, tmp_path_factory):
    """The directory of the same run on this machine's disk, never stopped."""
    run = tmp_path_factory.mktemp("whole") / "run"
    tiny.run(tiny.recipe(model, rows, run, **STEPS))
    return run


def stored(url):
    return {name: RemoteDirectory(url).read(name) for name in RemoteDirectory(url).versions()}


def assert_same(files, whole):
    """Assert that what is at the URL is a run like the one on the disk: the same files, and adapter, metrics and marks the same bytes."""
    on_disk = {path.relative_to(whole).as_posix() for path in whole.rglob("*") if path.is_file()}
    assert set(files) == on_disk
    for name in (ADAPTER, "metrics.jsonl", "peftlab.json", "adapter/peftlab.json"):
        assert files[name] == (whole / name).read_bytes(), name


@pytest.mark.long
def test_a_run_on_s3_is_killed_and_resumed_on_another_machine(bucket, written, whole, machine):
    url = f"{bucket}/deep/run"
    killed = python(KILLED_AT, "run", written(url), KILLED="before checkpoints/step-00000004.pt")
    assert killed.returncode == -9, killed.stderr[-3000:]
    there = stored(url)
    assert [name for name in there if name.startswith("checkpoints/step")] == ["checkpoints/step-00000002.pt"]
    assert (whole / "metrics.jsonl").read_bytes().startswith(there["metrics.jsonl"])
    with pytest.raises(PeftlabError, match=rf"{url} exists already; .*peftlab resume {url}"):
        peftlab.run(written(url))
    machine()
    resumed = CliRunner().invoke(app, ["resume", url])
    assert resumed.exit_code == 0 and f"uploaded: {url}" in resumed.output, resumed.output
    files = stored(url)
    assert_same(files, whole)
    assert not any(b"a-secret-of-the-tests" in content for content in files.values())
    assert load_recipe(local_place(url, "runs") / "recipe.yaml").output_dir == url


def test_a_run_is_stopped_resumed_and_used(memory, written, whole, machine, tmp_path, capsys):
    """A signal stops it; the command that the message names, with this machine's directory, continues it at the URL."""
    url = f"{memory}/run"
    with tiny.stopped_after(3):
        peftlab.run(written(url))
    assert f"uploaded: {url}" in capsys.readouterr().out
    peftlab.resume(local_place(url, "runs"))
    assert_same(stored(url), whole)
    machine()
    texts = ["a good film", "dull plot"]
    found, expected = (peftlab.predict(run, texts).probabilities for run in (url, whole))
    assert found.tolist() == expected.tolist()
    reported = CliRunner().invoke(app, ["report", url, str(whole), "-o", str(tmp_path / "both.html")])
    assert reported.exit_code == 0 and (tmp_path / "both.html").is_file(), reported.output
    copied = local_place(url, "references")
    assert not list(copied.glob("checkpoints")) and not local_place(url, "runs").exists()


def test_a_restarted_run_continues_from_its_url(memory, written, whole, machine, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    with tiny.stopped_after(3):
        peftlab.run(written(f"{memory}/run"))
    machine()
    peftlab.run(written(f"{memory}/run"))
    assert_same(stored(f"{memory}/run"), whole)


def test_merging_and_starting_from_a_run_at_a_url(memory, written, tmp_path):
    peftlab.run(written(f"{memory}/first"))
    run_merge(f"{memory}/first", out=tmp_path / "merged", verify=False)
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    first = peftlab.run(written(f"{memory}/second", {"init_from": f"{memory}/first"}))
    assert first.steps == 6
    with pytest.raises(PeftlabError, match=r"is or contains the run to start from \(memory://runs/second\)"):
        peftlab.run(written(f"{memory}/second", {"init_from": f"{memory}/second"}), overwrite=True)


def test_only_a_run_is_replaced(memory, written, whole, machine):
    url = f"{memory}/run"
    fsspec.filesystem("memory").pipe_file("/runs/run/notes.txt", b"mine")
    with pytest.raises(PeftlabError, match=r"exists already and was not written by peftlab"):
        peftlab.run(written(url), overwrite=True)
    fsspec.filesystem("memory").rm_file("/runs/run/notes.txt")
    peftlab.run(written(url, seed=4))
    fsspec.filesystem("memory").pipe_file("/runs/run/notes.txt", b"mine")
    machine()
    peftlab.run(written(url), overwrite=True)
    files = stored(url)
    assert files.pop("notes.txt") == b"mine"
    assert_same(files, whole)
    with pytest.raises(PeftlabError, match=r"memory://runs/none: no run here"):
        peftlab.resume(f"{memory}/none")


class Failing(MemoryFileSystem):
    """Memory that refuses so many uploads of a file."""

    protocol = "failing"
    left = 0
    name = ""

    def put_file(self, lpath, rpath, *arguments, **named):
        if rpath.endswith(Failing.name) and Failing.left:
            Failing.left -= 1
            raise ConnectionError("the connection was reset")
        super().put_file(lpath, rpath, *arguments, **named)

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(path.replace("failing://", "memory://"))


@pytest.fixture
def failing(memory, monkeypatch):
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr("peftlab.remote.time.sleep", lambda seconds: None)
    return "failing://runs/run"


def test_an_upload_that_fails_twice_is_made_again(failing, written, whole, capsys):
    Failing.name, Failing.left = "step-00000004.pt", 2
    peftlab.run(written(failing))
    assert_same(stored(failing), whole)
    assert Failing.left == 0 and "not uploaded" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["step-00000004.pt", "results.json"])
def test_what_cannot_be_uploaded_stays_on_this_machine(name, failing, written, whole, capsys):
    """The run ends with an error that names the directory; resumed there, it uploads what it has."""
    Failing.name, Failing.left = name, 10**6
    with pytest.raises(PeftlabError) as caught:
        peftlab.run(written(failing))
    place = local_place(failing, "runs")
    assert f"{name}: cannot be written (the connection was reset)" in str(caught.value)
    assert str(place) in str(caught.value) and f"peftlab resume {failing}" in str(caught.value)
    assert (place / ADAPTER).read_bytes() == (whole / ADAPTER).read_bytes()
    files = stored(failing)
    assert any(file.startswith("checkpoints/") for file in files) and "results.json" not in files
    Failing.left = 0
    peftlab.resume(failing)
    assert_same(stored(failing), whole)


def test_a_url_that_fails_at_the_start_trains_nothing(failing, written):
    Failing.name, Failing.left = "recipe.yaml", 10**6
    with pytest.raises(PeftlabError, match=r"recipe.yaml: cannot be written"):
        peftlab.run(written(failing))
    assert not list(local_place(failing, "runs").glob("checkpoints/*.pt"))


def test_an_incomplete_directory_is_not_read(memory, written, machine):
    url = f"{memory}/run"
    peftlab.run(written(url))
    fsspec.filesystem("memory").rm_file("/runs/run/adapter/peftlab.json")  # removed first, uploaded last
    machine()
    with pytest.raises(PeftlabError, match="neither a run, an adapter nor a model"):
        peftlab.predict(url, ["a good film"])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("file:///runs/run", "write its path, without file://"),
        ("https://host/run", "runs cannot be stored there"),
        ("s4://runs/run", "s4: unknown protocol (did you mean 's3'?)"),
        ("sftp://me:key@host/run", "sftp://...: contains a password"),
        ("s3://", "not a URL"),
    ],
)
def test_urls_that_no_run_is_stored_at(url, words, written):
    with pytest.raises(PeftlabError) as caught:
        load_recipe(written(url))
    assert words in str(caught.value) and "output_dir" in str(caught.value)


@pytest.mark.parametrize(
    ("url", "package", "extra"),
    [
        ("s3://runs/run", "s3fs", "s3"),
        ("gs://runs/run", "gcsfs", "gcs"),
        ("abfs://runs@account.dfs.core.windows.net/run", "adlfs", "azure"),
    ],
)
def test_without_the_package(url, package, extra, written, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(_registry, url.partition(":")[0], raising=False)
    with pytest.raises(PeftlabError, match=rf"pip install 'peftlab\[{extra}\]'"):
        load_recipe(written(url))


def test_a_missing_bucket_and_missing_keys(keys, written, monkeypatch):
    with pytest.raises(PeftlabError, match=r"s3://nowhere/run.*: cannot be (listed|written) \(.*bucket"):
        peftlab.run(written("s3://nowhere/run"))


def test_tables_and_other_outputs_have_no_url(written, whole):
    with pytest.raises(PeftlabError, match="only single runs have a URL"):
        load_recipe(written("s3://runs/run"), ["sweep.lr=[1e-3, 1e-2]"])
    with pytest.raises(PeftlabError, match="only the output_dir of a run may be a URL"):
        run_merge(whole, out="s3://runs/merged", verify=False)


def test_machines_of_one_run_need_one_cache(memory, written, monkeypatch):
    monkeypatch.delenv("PEFTLAB_CACHE")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(PeftlabError, match="set PEFTLAB_CACHE to one that all of them share"):
        peftlab.run(written(f"{memory}/run"))
