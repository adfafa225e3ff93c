"""``python -m disthooks.run.launcher``, the same as ``disthooks launch``."""

import sys

from disthooks.run.launcher.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
