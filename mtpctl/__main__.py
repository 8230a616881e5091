"""`python -m mtpctl`."""

from mtpctl.cli import main

if __name__ == "__main__":
    main()
