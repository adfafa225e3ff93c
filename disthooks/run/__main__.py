"""``python -m disthooks.run``."""

from disthooks.run.worker import main

if __name__ == "__main__":
    main()
