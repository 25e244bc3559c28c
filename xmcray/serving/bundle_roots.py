"""Which bundles an administrator may name over HTTP.

Without a limit, the admin token could make the server ask any address that it reaches, test which
files exist, and create folders anywhere. So `swap` and `compact` only take what lies below a root.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path

from xmcray.errors import ConfigError, one_line
from xmcray.serving.problems import ProblemError
from xmcray.serving.settings import ADMIN_TOKEN, TOKEN, ServeConfig
from xmcray.serving.state_folder import folder_name

log = logging.getLogger(__name__)

# Longest name in a path; a temporary name is some characters longer, and disks allow 255 bytes.
MAX_NAME = 200
MAX_PATH = 1024
WEB = ("http", "https")
LOCAL = ("file", "local")


class BundleRoots:
    """The folders and URLs below which bundles are loaded and written.

    They are the folders that hold the configured bundles, the state folder, and
    `ServeConfig.bundle_roots`. A configured bundle on a web server does not open that server. What
    the server itself keeps in the state folder is not among them.

    Args:
        config: settings.
    Raises:
        ConfigError: a root is a chain of file systems, or no plain folder or URL.
    """

    def __init__(self, config: ServeConfig) -> None:
        state = Path(os.path.realpath(config.state_dir))
        self._folders = [state]
        own_names = [TOKEN, ADMIN_TOKEN, *map(folder_name, config.bundles)]
        self._own = [Path(os.path.realpath(state / name)) for name in own_names]
        self._urls: list[str] = []
        for root in config.bundle_roots:
            self._add(root)
            self._look_at(root)
        for bundle in config.bundles.values():
            self._add_folder_of(bundle)

    def check(self, location: str) -> None:
        """Refuses a folder or URL that is not below a root, without looking at what is there.

        Args:
            location: path or URL from a request.
        Raises:
            ProblemError: `refused`.
        """
        try:
            scheme, path = _split(location)
        except ConfigError as error:
            raise ProblemError("refused", str(error)) from None
        if scheme:
            # Whole names: s3://models-of-others is not below s3://models.
            url = f"{scheme}://{path}/"
            is_below = any(url.startswith(f"{root}/") for root in self._urls)
        else:
            # Symbolic links must not lead out of a root.
            folder = Path(os.path.realpath(path))
            is_below = any(folder.is_relative_to(root) for root in self._folders)
            self._refuse_own(folder)
        if not is_below:
            roots = ", ".join([*map(str, self._folders), *self._urls])
            raise ProblemError(
                "refused",
                f"{one_line(location)} is not below a folder of bundles of this server, expected one of: {roots};"
                " the setting `bundle_roots` names more",
            )

    def _refuse_own(self, folder: Path) -> None:
        """Refuses a folder in which the server keeps tokens, logs, or what was swapped in."""
        for own in self._own:
            if folder.is_relative_to(own):
                raise ProblemError(
                    "refused",
                    f"{one_line(folder)} is what the server itself keeps in its state folder,"
                    f" expected a folder that is not {one_line(own)} nor below it; choose another",
                )

    def _add(self, root: str) -> None:
        scheme, path = _split(root)
        if scheme:
            self._urls.append(f"{scheme}://{path}")
        else:
            self._folders.append(Path(os.path.realpath(path)))

    def _look_at(self, root: str) -> None:
        """Warns of a configured folder that is not there, because its name may be mistyped.

        It may also be made later, such as that of `xmcray continual`.
        """
        if "://" not in root and not Path(root).is_dir():
            log.warning(
                "bundle_roots: %s is not a folder, expected one; make it, or correct the setting",
                root,
            )

    def _add_folder_of(self, bundle: str) -> None:
        """Adds the folder that holds a configured bundle."""
        try:
            scheme, path = _split(bundle)
        except ConfigError:
            # The operator may serve from a chain of file systems, but requests may not name one.
            return
        if scheme:
            parent, slash, _ = path.rpartition("/")
            if slash and scheme not in WEB:
                self._urls.append(f"{scheme}://{parent}")
            return
        # The bundle may be a symbolic link to the current one of another folder. Both folders count.
        folder_of_link = Path(os.path.realpath(Path(path).absolute().parent))
        folder_of_bundle = Path(os.path.realpath(path)).parent
        for folder in (folder_of_link, folder_of_bundle):
            # A bundle directly below / does not open the whole disk.
            if folder != Path(folder.anchor):
                self._folders.append(folder)


def _split(location: str) -> tuple[str, str]:
    """Scheme and path of a location; the scheme of a local path is "".

    Raises:
        ConfigError: a chain of file systems, or a path that could mean another one.
    """
    shown = one_line(location if location.isprintable() else ascii(location))
    # For example reference:: and simplecache::, which open a second URL that this one names.
    if "::" in location:
        raise ConfigError(f"{shown} chains file systems, expected one plain folder or URL")
    names = location.split("/")
    too_long = any(len(name.encode("utf-8", "replace")) > MAX_NAME for name in names)
    if too_long or len(location) > MAX_PATH or not location.isprintable():
        raise ConfigError(
            f"{shown} is no usable path, expected printable characters, names of at most"
            f" {MAX_NAME} bytes and {MAX_PATH} characters in all"
        )
    scheme, separator, path = location.partition("://")
    if not separator:
        return "", location
    if scheme in LOCAL:
        # fsspec reads such paths by rules of its own: ~ is the home folder.
        raise ConfigError(f"{shown} is a path of this machine; write it without {scheme}://")
    # Such as a query, a user, an escape, or a step upwards: the path below a root must be literal.
    if not re.fullmatch("[a-z][a-z0-9+.-]*", scheme) or re.search(r"[?#@%\\]", path):
        raise ConfigError(f"{shown} is no plain URL, expected SCHEME://BUCKET/PATH")
    names = path.rstrip("/").split("/")
    if any(name in ("", ".", "..") for name in names):
        raise ConfigError(f"{shown} has an empty name or `..` in its path; write it out")
    return scheme, "/".join(names)
