"""``python -m rollpacker`` is the command ``rollpacker``."""

from rollpacker.cli import main

if __name__ == "__main__":
    main()
