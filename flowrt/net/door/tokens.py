"""The secrets that let peers in: made, kept in files that their owner alone can read, and read back."""

from __future__ import annotations

import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

from flowrt.base.errors import AuthenticationError

MAX_TOKEN = 1024
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{1,1024}")


def new_token() -> str:
    """A secret of 256 bits."""
    return secrets.token_urlsafe(32)


def save_token(path: str | os.PathLike[str], token: str) -> None:
    """Write ``token`` to a new file that its owner alone can read."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(checked(token) + "\n")


def load_token(path: str | os.PathLike[str]) -> str:
    """The token in a file. `AuthenticationError` if it cannot be read, is empty, or others can read it."""
    try:
        with open(path, encoding="ascii") as file:
            about = os.fstat(file.fileno())
            token = file.read(MAX_TOKEN + 2).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise AuthenticationError(f"cannot read the token file {os.fspath(path)}: {error}") from error
    check_private(about, f"the token file {os.fspath(path)}")
    if not _TOKEN.fullmatch(token):
        raise AuthenticationError(f"the token file {os.fspath(path)} is empty or holds more than a token")
    return token


def read_token(pipe: int) -> str:
    """The token in the first line of a pipe, of which nothing else is read. `AuthenticationError` if that is none."""
    said = b""
    while not said.endswith(b"\n") and len(said) <= MAX_TOKEN and (more := os.read(pipe, 1)):
        said += more
    if not _TOKEN.fullmatch(token := said.decode("ascii", "replace").strip()):
        raise AuthenticationError("the first line of stdin is no token")
    return token


def check_private(about: os.stat_result, what: str) -> None:
    """Raise `AuthenticationError` where others than who runs this can read a file with a secret in it.

    A group may read what is root's and who runs this is not: so Kubernetes gives a secret to a pod that is not root.
    """
    mode = stat.S_IMODE(about.st_mode)
    given = 0o040 if about.st_uid == 0 and os.geteuid() != 0 else 0
    if mode & 0o077 & ~given:
        raise AuthenticationError(f"others can read {what} (mode {mode:03o}); chmod 600 it")


def checked(token: str) -> str:
    """``token``, if it is one; raises `AuthenticationError`."""
    if not _TOKEN.fullmatch(token):
        raise AuthenticationError("a token is 1 to 1024 letters, digits and ._~+/=-; new_token() makes one")
    return token


def own_token() -> str:
    """This user's token for clusters within this machine: made at the first use, readable by its owner alone."""
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config")
    path = Path(base) / "flowrt" / "token"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            _publish_token(path)
    except OSError as error:
        raise AuthenticationError(f"cannot make the token file {path}: {error}; set FLOWRT_TOKEN_FILE") from error
    return load_token(path)


def _publish_token(path: Path) -> None:
    """Make a whole token file appear at ``path`` at once; of several processes, the first one's counts."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        draft = Path(folder) / "token"
        save_token(draft, new_token())
        try:
            os.link(draft, path)
        except FileExistsError:
            return
