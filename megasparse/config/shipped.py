"""The configurations that come with megasparse, found by their names, and the table that one of them reads."""

import difflib
from pathlib import Path

from megasparse.errors import ConfigError

PACKAGE = Path(__file__).parents[1]
SUFFIX = ".json"


def shipped_configs() -> dict[str, Path]:
    """The file of each shipped configuration by its name: its path in configs/, such as "finetune/glue_rte"."""
    # An installed package holds the folder; in a checkout it lies beside the package.
    folder = next((place for place in (PACKAGE / "configs", PACKAGE.parent / "configs") if place.is_dir()), None)
    files = sorted(folder.rglob(f"*{SUFFIX}")) if folder else []
    return {file.relative_to(folder).as_posix().removesuffix(SUFFIX): file for file in files if folder}


def find_file(name_or_path: str | Path) -> Path:
    """The file that `name_or_path` names: a path, or where there is none one that comes with megasparse, such as
    "configs/finetune/reviews.csv".
    """
    path, name = Path(name_or_path), str(name_or_path)
    shipped = PACKAGE / name
    return shipped if name.startswith("configs/") and not path.exists() and shipped.is_file() else path


def find_config(name_or_path: str | Path) -> Path:
    """The file that `name_or_path` names: a path, or a shipped configuration ("reformer_64k", "finetune/glue_rte", or
    "glue_rte" where one file alone has that name).

    Raises ConfigError where there is neither.
    """
    path, name = Path(name_or_path), str(name_or_path)
    if path.is_file():
        return path
    shipped = shipped_configs()
    wanted = name.removeprefix("configs/").removesuffix(SUFFIX)
    matching = [wanted] if wanted in shipped else [other for other in shipped if other.endswith(f"/{wanted}")]
    if len(matching) == 1:
        return shipped[matching[0]]
    if path.exists():  # a device or a folder: reading it says what is wrong
        return path
    known = {other.rpartition("/")[2]: other for other in shipped} | {other: other for other in shipped}
    near = matching or [known[other] for other in difflib.get_close_matches(wanted, known, n=1)]
    hint = f'Did you mean "{near[0]}"?' if near else "Give a JSON file, or the name of one in configs/"
    raise ConfigError(name, "cannot be read (no such file, and no such shipped configuration)", hint)
