"""``python -m disthooks`` is the command ``disthooks``."""

from __future__ import annotations

from disthooks.run.cli import main

if __name__ == "__main__":
    main()
