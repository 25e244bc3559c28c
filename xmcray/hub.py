"""The Hugging Face Hub: URLs `hf://[datasets/]OWNER/NAME[@REVISION][/PATH]`.

Reading them is left to huggingface_hub's file system, which fsspec finds by itself. A folder is
written as one commit here: that file system makes a commit of each file, so that readers would see
half of a folder.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from xmcray.errors import StorageError

PREFIX = "hf://"
EXPECTED = "hf://OWNER/NAME or hf://datasets/OWNER/NAME, both with @REVISION and /PATH if needed"
REMEDY = "check the URL, the network and HF_TOKEN"
_URL = re.compile(
    # Without the lookahead, "datasets" would be the owner in hf://datasets/OWNER, which lacks a name.
    r"hf://(?P<kind>datasets/|spaces/)?(?!datasets/|spaces/)(?P<owner>[\w.-]+)/(?P<name>[\w.-]+)"
    r"(@(?P<revision>[\w.%-]+))?(/(?P<path>.*))?"
)


@dataclass(frozen=True, slots=True)
class HubPath:
    """A folder of a repository on the Hub.

    Attributes:
        repo_type: "model", "dataset" or "space".
        repo_id: OWNER/NAME.
        revision: branch, tag or commit; the default branch if None.
        path: folder inside the repository; "" for all of it.
    """

    repo_type: str
    repo_id: str
    revision: str | None
    path: str

    @classmethod
    def parse(cls, url: str) -> HubPath:
        """The parts of a URL.

        Raises:
            StorageError: it is not such a URL.
        """
        match = _URL.fullmatch(url.rstrip("/"))
        if match is None:
            raise StorageError(f"found {url}, expected {EXPECTED}")
        repo_type = (match["kind"] or "models/")[:-2]
        repo_id = f"{match['owner']}/{match['name']}"
        # A branch such as refs/pr/1 is written refs%2Fpr%2F1.
        revision = unquote(match["revision"]) if match["revision"] else None
        return cls(repo_type, repo_id, revision, match["path"] or "")


def commit_folder(folder: Path, url: str, message: str, replace: bool = False) -> None:
    """Writes a folder to the Hub as one commit. A repository that is not there yet is made private.

    Args:
        folder: its files.
        url: where they go.
        message: of the commit.
        replace: remove what else is there; earlier commits keep it.
    Raises:
        StorageError: no connection, no rights, or not such a URL.
    """
    target = HubPath.parse(url)
    with _reaching(url):
        from huggingface_hub import HfApi

        api = HfApi()
        api.create_repo(target.repo_id, repo_type=target.repo_type, private=True, exist_ok=True)
        api.upload_folder(
            repo_id=target.repo_id,
            repo_type=target.repo_type,
            revision=target.revision,
            path_in_repo=target.path or None,
            folder_path=folder,
            commit_message=message,
            delete_patterns="*" if replace else None,
        )


def downloaded_folder(url: str) -> Path:
    """A local copy of a folder on the Hub, in huggingface_hub's cache.

    Raises:
        StorageError: no connection and no copy, no rights, or not such a URL.
    """
    source = HubPath.parse(url)
    with _reaching(url):
        from huggingface_hub import snapshot_download

        patterns = f"{source.path}/*" if source.path else None
        folder = snapshot_download(
            source.repo_id,
            repo_type=source.repo_type,
            revision=source.revision,
            allow_patterns=patterns,
        )
    return Path(folder) / source.path


@contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turns the many errors of huggingface_hub and its network library into one."""
    try:
        yield
    except Exception as error:
        # The first line says what; the others are advice on that library's own functions.
        reason = str(error).strip().split("\n")[0]
        raise StorageError(
            f"{url} cannot be used ({type(error).__name__}: {reason}); {REMEDY}"
        ) from error
