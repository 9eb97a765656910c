"""`python -m bkctl`: the command line."""

from bkctl.commands.main import main

if __name__ == "__main__":
    main()
