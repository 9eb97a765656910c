"""The entry point, also of `python -m bkctl`: interrupts are handled first, then the command line runs."""

from __future__ import annotations

import os
import sys

from bkctl.commands.kit.interrupts import end_at_once


def main() -> None:
    """Run the command line of this process and exit."""
    end_at_once()
    if "_BKCTL_COMPLETE" in os.environ:
        from bkctl.commands.kit.completion import complete
        from bkctl.commands.main import root

        complete(root(), os.environ["_BKCTL_COMPLETE"], sys.argv[1:])
    from bkctl.commands.main import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
