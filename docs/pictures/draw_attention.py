"""Draw the time and the memory of one attention operation on a CPU against length.

python docs/pictures/draw_attention.py  # reads ../measured/attention_cpu.json, writes attention_*.svg next to itself
"""

import json
from pathlib import Path

from megasparse.evaluation.outputs import COLOURS, new_figure, save_figure

HERE = Path(__file__).parent
LABELS = {
    "lsh": "megasparse, lsh",
    "sdpa": "full attention (SDPA)",
    "hf": "Reformer (Hugging Face)",
    "reformer-pytorch": "reformer-pytorch",
}


def main() -> None:
    rows = json.loads((HERE.parent / "measured/attention_cpu.json").read_text())["rows"]
    values = {
        "time": ("seconds, forward and backward", lambda row: row["forward_backward"]["median"]),
        "memory": ("GB", lambda row: row["extra_bytes"] / 1e9),
    }
    for name, (title, value) in values.items():
        figure, (axes,) = new_figure(1)
        figure.set_size_inches(4.1, 3.1)  # a phone's width
        for colour, (implementation, label) in zip(COLOURS, LABELS.items(), strict=False):
            series = {row["length"]: value(row) for row in rows if row["implementation"] == implementation}
            width = 2.5 if implementation == "lsh" else 1.5
            axes.loglog([*series], [*series.values()], "o-", color=colour, linewidth=width, label=label)
        axes.set_xticks([*series], [f"{length >> 10}K" for length in series])
        axes.minorticks_off()
        axes.set(title=title, xlabel="tokens")
        save_figure(figure, HERE / f"attention_{name}.svg")


if __name__ == "__main__":
    main()
