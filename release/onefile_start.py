"""Start the program in one file, by the Python that it was built for: its modules in C work with no other.

`release/onefile` puts this into the file in the place of shiv's own start, with VERSION filled in. Every Python can
read it, the second one, too.
"""

import os
import sys

VERSION = "3.11"

if ".".join(str(part) for part in sys.version_info[:2]) != VERSION:
    name = "python" + VERSION
    # A program of this name that is another Python comes here again.
    if os.environ.get("BKCTL_STARTED_BY") != name:
        os.environ["BKCTL_STARTED_BY"] = name
        for directory in os.environ.get("PATH", os.defpath).split(os.pathsep):
            path = os.path.join(directory, name)
            if os.access(path, os.X_OK):
                os.execv(path, [path] + sys.argv)  # noqa: RUF005
    found = sys.executable + " is Python " + ".".join(str(part) for part in sys.version_info[:3])
    sys.exit(
        "bkctl: " + sys.argv[0] + " needs Python " + VERSION + ", and " + found + ". "
        "Install " + name + ", or use the file for a Python that is here."
    )
os.environ.pop("BKCTL_STARTED_BY", None)

import _bootstrap  # noqa: E402

_bootstrap.bootstrap()
