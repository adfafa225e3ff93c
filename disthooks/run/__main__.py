"""``python -m disthooks.run``."""

from disthooks.run.launcher.worker import main

if __name__ == "__main__":
    main()
