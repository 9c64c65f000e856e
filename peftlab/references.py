"""References to models and data: hub id, path, URL, or file of an installed package; downloads, and uploads to the hub.

A reference is a hub id (``FacebookAI/roberta-base``), a local path, or ``package:NAME/path``: files of an
installed Python package, found through its metadata and read as files. The package is never imported.

Where the hub does not answer, its client retries every file for half a minute; so one request is made first, and if it
fails only the local cache is used.
"""

from __future__ import annotations

import os
import re
import time
from functools import lru_cache
from importlib import metadata
from pathlib import Path

from peftlab.errors import PeftlabError, did_you_mean, nearest, reason
from peftlab.files import is_url

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_TIMEOUT = 5.0  # seconds for the hub to answer
_HUB_REMEMBERED = 60  # seconds for which its answer, or the lack of one, is remembered


def locate(reference: str, what: str = "model") -> Path | str:
    """Return the local path that ``reference`` names, or the reference itself if it is a hub id.

    Args:
        reference: hub id, local path, or ``package:NAME/path`` (NAME is the distribution or the import name).
        what: the name of the thing in error messages.

    Raises:
        PeftlabError: a package that is not installed, a file that is not there, or a malformed id. ``org/name`` is
            a file that is not there, too, where ``org`` is a directory and the hub's cache has no such model.
    """
    if reference.startswith("package:"):
        return _in_package(reference, what)
    path = Path(os.path.expanduser(reference))
    if os.path.exists(path):  # Path.exists raises for names that are too long or unreadable
        return path
    looks_local = reference.startswith((".", "/", "~")) or reference.count("/") > 1 or path.suffix == ".gguf"
    if looks_local or not _HUB_ID.fullmatch(reference):
        raise PeftlabError(f"{what} {reference!r}: no such file or directory{similar_path(reference)}")
    owner = reference.rpartition("/")[0]
    if owner and os.path.isdir(owner) and not _cached(reference):
        raise PeftlabError(
            f"{what} {reference!r}: no such file or directory: {owner!r} is a directory here, and this is not in "
            f"it{similar_path(reference)}; to use a hub id of that name, run in another working directory"
        )
    return reference


def local_copy(reference: str | Path) -> str:
    """Return the directory of this machine that a run's URL stands for, downloaded; any other reference unchanged.

    Checkpoints are not downloaded.

    Raises:
        PeftlabError: there is no run at the URL.
    """
    if not is_url(reference):
        return str(reference)
    from peftlab.remote import download_run

    return str(download_run(str(reference)))


def similar_path(reference: str) -> str:
    """Return ``" (did you mean 'x'?)"`` for what is spelled most like the last part of a path, beside it."""
    path = Path(os.path.expanduser(reference))
    siblings = [p.name for p in path.parent.iterdir()] if os.path.isdir(path.parent) else []
    return did_you_mean(path.name, siblings)


def refuse_misspelt(reference: str, what: str = "model") -> None:
    """Raise ``PeftlabError`` if a hub id can only be a misspelt path: the hub is not asked, and its cache lacks it.

    Args:
        reference: a hub id.
        what: the name of the thing in the message.
    """
    values = (os.environ.get(name, "").upper() for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
    if not any(value in ("1", "ON", "YES", "TRUE") for value in values):
        return
    if (hint := similar_path(reference)) and not _cached(reference):
        raise PeftlabError(
            f"{what} {reference!r}: no such directory{hint}, no such model in the hub's local cache, and the hub is "
            "not asked (HF_HUB_OFFLINE)"
        )


def _cached(hub_id: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(hub_id, "config.json"), str)


def _in_package(reference: str, what: str) -> Path:
    name, _, inner = reference.removeprefix("package:").partition("/")
    if not name:
        raise PeftlabError(f"{what} {reference!r} names no package; write package:NAME/path")
    try:
        distribution = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        providers = metadata.packages_distributions()
        if name not in providers:
            installed = [d.metadata["Name"] for d in metadata.distributions()]
            hint = did_you_mean(name, installed) or f"; pip install --no-deps {name}"
            raise PeftlabError(f"{what} {reference!r}: package {name!r} is not installed{hint}") from None
        distribution = metadata.distribution(providers[name][0])
        inner = f"{name}/{inner}"
    root = Path(str(distribution.locate_file("")))
    files = [str(f) for f in distribution.files or []]
    import_names = {f.split("/")[0] for f in files}
    candidates = [inner, *(f"{top}/{inner}" for top in sorted(import_names))]
    for candidate in candidates:
        if inner and (root / candidate).exists() and ".." not in candidate.split("/"):
            return root / candidate
    close = nearest(inner, files)
    hint = f"; nearest: {', '.join(close)}" if close else ""
    raise PeftlabError(f"{what} {reference!r}: package {name!r} has no {inner!r}{hint}")


def unreachable() -> str:
    """Return why the hub cannot be asked for files now; an empty string where it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return _hub_problem(constants.ENDPOINT, int(time.monotonic() / _HUB_REMEMBERED))


@lru_cache(maxsize=1)
def _hub_problem(endpoint: str, when: int) -> str:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=HUB_TIMEOUT)
    except Exception as error:  # the transport's own types, which differ with the client's version
        return f"{endpoint} does not answer ({reason(error)})"
    return ""


def snapshot(hub_id: str, what: str, *, revision: str | None = None) -> Path:
    """Return the local directory of a model repository, downloaded if the hub answers and the cache lacks it.

    Args:
        hub_id: the repository.
        what: the name of the thing in error messages.
        revision: git revision; default: the newest.

    Raises:
        PeftlabError: no such repository, or no hub and no copy in the cache.
    """
    from huggingface_hub import snapshot_download

    others = ["*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot", "onnx/*", "openvino/*"]
    offline = unreachable()
    try:
        place = snapshot_download(hub_id, revision=revision, ignore_patterns=others, local_files_only=bool(offline))
    except Exception as error:  # the transport's own types too
        if offline:
            raise PeftlabError(
                f"{what} {hub_id!r}: no such directory{similar_path(hub_id)}, no such model in the hub's local cache, "
                f"and {offline}"
            ) from None
        raise PeftlabError(f"{what} {hub_id!r}: {reason(error)}") from None
    return Path(place)


def upload(directory: Path, repository: str) -> None:
    """Upload a directory to a repository of the hub, which is created, private, if it does not exist.

    Args:
        directory: the finished output.
        repository: the repository's id.

    Raises:
        PeftlabError: the hub does not answer, or refuses the upload.
    """
    from huggingface_hub import HfApi

    problem = unreachable()
    if not problem:
        try:
            HfApi().create_repo(repository, private=True, exist_ok=True)
            HfApi().upload_folder(repo_id=repository, folder_path=directory)
        except Exception as error:  # the transport's own types too
            problem = reason(error)
    if problem:
        raise PeftlabError(f"{directory} is complete, but was not uploaded to {repository!r}: {problem}") from None
