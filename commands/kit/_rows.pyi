from collections.abc import Sequence
from typing import Any

API: int

def join_rows(pieces: tuple[str, ...], columns: tuple[Sequence[Any], ...], count: int, /) -> str | None: ...
