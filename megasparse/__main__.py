"""`python -m megasparse` runs the command `megasparse`."""

from megasparse.cli.main import main

if __name__ == "__main__":
    main()
