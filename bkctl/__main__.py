"""The entry point, also of `python -m bkctl`: interrupts are handled first, then the command line runs."""

from __future__ import annotations

from bkctl.commands.kit.interrupts import end_at_once


def main() -> None:
    """Run the command line of this process and exit."""
    end_at_once()
    from bkctl.commands.main import main as run_command_line

    run_command_line()


if __name__ == "__main__":
    main()
