"""``python -m disthooks.launching``, the same as ``disthooks launch``."""

import sys

from disthooks.launching.main import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
