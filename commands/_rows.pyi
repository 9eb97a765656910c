from typing import Any

API: int

def join_rows(pieces: tuple[str, ...], columns: tuple[list[Any] | memoryview, ...], count: int, /) -> str | None: ...
