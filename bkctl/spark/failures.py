"""Failures of Spark as errors of bkctl, in one line: the error that a source or job raised, else the cause Spark logs.

Tasks and planners run in Python processes of Spark. Their errors reach the driver as text: a Python traceback within
the message of an error of Spark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from bkctl import errors
from bkctl.errors import BkctlError, is_interrupt

#: A line of a traceback that names an error of bkctl.
_BKCTL_ERROR: Final = re.compile(r"^\s*(?:\S+: )?bkctl\.errors\.(\w+): (.*)$", re.MULTILINE)
#: Starts the text that a query raises to fail with a BkctlError: its message and a line feed follow.
ERROR_START: Final = "\nbkctl.errors.BkctlError: "
#: A line of a log or a Java stack trace that names an error.
_JAVA_CAUSE: Final = re.compile(
    r"\s*(?::|Caused by:|Exception in thread \"[^\"]*\")?\s*(?:\w+\.)+(\w*(?:Exception|Error): .{1,500})"
)
#: The line of a Python traceback behind its frames; the error's message is optional.
_PYTHON_CAUSE: Final = re.compile(r"(?:\w+\.)*(\w+(?:: .{1,500})?)")
_TRACEBACK: Final = "Traceback (most recent call last):"


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise a failure of Spark inside the block as one BkctlError (`plain_error`), and an interrupt as itself.

    PySpark ends an interrupted call with a last message to the JVM; if that fails, the interrupt still counts.
    """
    try:
        yield
    except Exception as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from None
        # Nothing of PySpark is imported for this: the local engine may run without it.
        modules = {kind.__module__.partition(".")[0] for kind in type(error).__mro__}
        # PySpark's iterators over rows raise EOFError when the JVM ends.
        if isinstance(error, EOFError) or not modules.isdisjoint(("pyspark", "py4j")):
            raise plain_error(error) from error
        raise


def plain_error(error: BaseException) -> BkctlError:
    """Return the error of bkctl that made Spark fail, else a BkctlError with the cause that Spark names."""
    own = source_error(error)
    if own is not None:
        return own
    text = str(error)
    causes = [cause] if (cause := _python_cause(text)) else java_causes(text)
    lines = causes or [line.strip() for line in text.splitlines() if line.strip()][:1]
    return BkctlError(f"Spark: {lines[-1] if lines else type(error).__name__}", hint="--verbose shows its log")


def source_error(error: BaseException) -> BkctlError | None:
    """Return the error of a source or job that made Spark fail, with its class and message; None if there is none."""
    found = _BKCTL_ERROR.findall(str(error))
    if not found:
        return None
    name, message = found[-1]  # Earlier ones are its causes.
    return error_named(name, message.strip())


def error_named(name: str, message: str) -> BkctlError | None:
    """Return an error of the class `name` of `bkctl.errors` with this message; None if the class does not exist."""
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, BkctlError)):
        return None
    named: BkctlError = BkctlError.__new__(kind)
    BkctlError.__init__(named, message)
    return named


def java_causes(text: str) -> list[str]:
    """Return the errors that the lines of a log or a Java stack trace name, without their packages."""
    found: list[str] = []
    for line in text.splitlines():
        match = _JAVA_CAUSE.match(line)
        # A cause that the line before quotes in full adds nothing.
        if match is not None and not (found and match[1].partition(": ")[2] in found[-1]):
            found.append(match[1])
    return found


def _python_cause(text: str) -> str | None:
    """Return the error that the last Python traceback in `text` names, without its package; None without one."""
    cause, in_traceback = None, False
    for line in text.splitlines():
        if line.rstrip().endswith(_TRACEBACK):
            in_traceback = True
        elif in_traceback and line.strip() and not line.startswith(" "):
            in_traceback = False
            match = _PYTHON_CAUSE.match(line)
            cause = match[1] if match else cause
    return cause
