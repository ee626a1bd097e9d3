"""`python -m unisono.cli` is the command `unisono`."""

from unisono.cli._app import main

if __name__ == "__main__":
    main()
