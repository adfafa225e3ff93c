"""``python -m disthooks.launcher``, the same as ``disthooks launch``."""

import sys

from disthooks.launcher.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
