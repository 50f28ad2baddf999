"""The key that the ranks of a run share."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from lemma.core.errors import UserError
from lemma.core.sealed import KEY_VARIABLE


def shared_key() -> bytes:
    """The key that a launcher or the user gave, else the one in the user's home, which is made where there is none."""
    given = os.environ.get(KEY_VARIABLE)
    return given.encode() if given else _key_of_home()


def _key_of_home() -> bytes:
    file = Path(os.environ.get("LEMMA_CACHE") or "~/.cache/lemma").expanduser() / "ranks.key"
    try:
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            whole = file.with_name(f"ranks-{secrets.token_hex(8)}.key")
            with open(os.open(whole, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                opened.write(secrets.token_hex(32))
            with suppress(FileExistsError):  # another rank was first
                os.link(whole, file)
            whole.unlink()
        return file.read_bytes()
    except OSError as error:
        raise UserError(
            f"the key of the ranks cannot be kept in {file} ({error.strerror})",
            fix=f"set {KEY_VARIABLE} to the same secret for all ranks",
        ) from error
