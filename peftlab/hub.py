"""The Hugging Face hub: whether it can be reached, downloads, uploads.

Where it does not answer, its client retries every file for half a minute; so one request is made first, and if it
fails only the local cache is used.
"""

from __future__ import annotations

import time
from functools import lru_cache
from pathlib import Path

from peftlab.errors import PeftlabError
from peftlab.files import reason
from peftlab.references import similar_path

TIMEOUT = 5.0  # seconds for the hub to answer
REMEMBERED = 60  # seconds for which its answer, or the lack of one, is remembered


def unreachable() -> str:
    """Return why the hub cannot be asked for files now; an empty string where it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return _asked(constants.ENDPOINT, int(time.monotonic() / REMEMBERED))


@lru_cache(maxsize=1)
def _asked(endpoint: str, when: int) -> str:
    from huggingface_hub.utils import get_session

    try:
        get_session().head(endpoint, timeout=TIMEOUT)
    except Exception as error:  # the transport's own types, which differ with the client's version
        return f"{endpoint} does not answer ({reason(error)})"
    return ""


def snapshot(hub_id: str, what: str, *, revision: str | None = None) -> Path:
    """Return the local directory of a model repository, downloaded if the hub answers and the cache lacks it.

    Args:
        what: the name of the thing in error messages.

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
