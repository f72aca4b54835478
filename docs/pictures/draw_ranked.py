"""Draw docs/lab/decoders.md's picture of `ranked` attention: error and nats against the share of pairs scored.

python docs/pictures/draw_ranked.py  # reads ../measured/decoder_ranked.json, writes ranked.svg next to itself
"""

import json
from pathlib import Path

from megasparse.evaluation.outputs import COLOURS, GREY, new_figure, save_figure

FOLDER = Path(__file__).parent


def main() -> None:
    content = json.loads((FOLDER.parent / "measured" / "decoder_ranked.json").read_text())
    figure, (left, right) = new_figure(2)
    for number, name in enumerate(dict.fromkeys(row["buckets"] for row in content["curve"])):
        points = [(row["pairs"], row["error"]) for row in content["curve"] if row["buckets"] == name]
        left.plot(*zip(*points, strict=True), "o-", ms=3, color=COLOURS[number], label=name)
    left.axhline(content["all_pairs"], color=GREY, ls="--", label="all pairs")
    left.set(yscale="log", title="error of the heads' outputs", xlabel="share of pairs scored")
    full = {(row["text"], row["length"]): row["nats"] for row in content["rows"] if row["arm"] == "full"}
    arms: dict[str, list[tuple[float, float]]] = {}
    for row in content["rows"]:
        if row["arm"] != "full":
            point = row["scored"], row["nats"] - full[row["text"], row["length"]]
            arms.setdefault(row["arm"].split(",")[0], []).append(point)
    for number, (name, points) in enumerate(arms.items()):
        right.plot(*zip(*points, strict=True), "o", ms=4, color=COLOURS[number], label=name)
    right.axhline(0.03, color=GREY, ls=":")
    right.legend(frameon=False, fontsize="small", labelcolor=GREY)
    right.set(title="nats per token above full attention", xlabel="share of pairs scored", yscale="log")
    save_figure(figure, FOLDER / "ranked.svg")


if __name__ == "__main__":
    main()
