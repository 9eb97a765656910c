from collections.abc import Callable
from typing import Any

API: int

def lines(
    found: list[tuple[Any, Any]], begin: int, custom_texts: Callable[[bytes], tuple[str, str] | None], /
) -> tuple[str, int]: ...
