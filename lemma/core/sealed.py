"""Objects as bytes with a mark that only ranks of the same run can make: what anybody else sent is never unpickled."""

from __future__ import annotations

import hmac
import pickle
from typing import Any

from lemma.core.errors import UserError

MARK_BYTES = 32
KEY_VARIABLE = "LEMMA_RANKS_KEY"


def seal(value: Any, key: bytes) -> bytes:
    data = pickle.dumps(value)
    return hmac.digest(key, data, "sha256") + data


def unseal(sealed: bytes, key: bytes, rank: int) -> Any:
    mark, data = sealed[:MARK_BYTES], sealed[MARK_BYTES:]
    if not hmac.compare_digest(mark, hmac.digest(key, data, "sha256")):
        raise UserError(
            f"what came from rank {rank} does not carry the key of this run",
            fix=f"give the ranks of all machines the same {KEY_VARIABLE}, and open their ports to nobody else",
        )
    return pickle.loads(data)
