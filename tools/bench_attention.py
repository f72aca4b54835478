"""The same as `megasparse bench attention`; `--help` shows examples."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megasparse.cli.main import door

main = door("bench attention")

if __name__ == "__main__":
    main()
