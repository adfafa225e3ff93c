"""``python -m disthooks.run``."""

from disthooks.launcher.worker import main

if __name__ == "__main__":
    main()
