"""``python -m disthooks.run``."""

from disthooks.run.main import main

if __name__ == "__main__":
    main()
