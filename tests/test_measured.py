"""Figures in documents are those of the files in docs/measured and docs/pictures, which commands wrote."""

import statistics

import pytest

from tests.helpers.measured import assert_shown, read, spread

FULL_WINDOW, FACTS = ("full", "192 window"), "192 Smart Bird, taught with facts"


def attention(length):
    rows = [row for row in read("measured/attention_cpu.json")["rows"] if row["length"] == length]
    return {row["implementation"]: (row["forward_backward"]["median"], row["extra_bytes"] / 1e9) for row in rows}


def reliability():
    found = read("measured/corruption_check.json")
    yield (
        f"{found['forwards']} forward passes of a micro-batch, {found['bytes_read'] / 1e6:.1f} MB of weights read "
        f"(each twice), 64 bytes sent by each rank: {found['check_seconds']:.2f} s beside a step of "
        f"{found['step_seconds']:.2f} s and {found['micro_batches']} micro-batches"
    )

    warm, cold = read("measured/recovery.json"), read("measured/recovery_cold.json")
    split = ", ".join(f"{name} {value:.1f}" for name, value in warm["median_seconds"].items() if name != "whole")
    imports = cold["median_seconds"]["import"] + cold["median_seconds"]["build"]
    cpu, cold_cpu = (sum(found["median_cpu_seconds"].values()) for found in (warm, cold))
    yield (
        f"{warm['median_seconds']['whole']:.1f} s from the kill to the end of the first new step, median of "
        f"{warm['kills']} ({split}; the longest {warm['longest_seconds']:.1f} s)"
    )
    yield (
        f"with none in reserve {cold['median_seconds']['whole']:.1f} s, of which importing and building take "
        f"{imports:.1f} s. A rank's own CPU seconds: {cpu:.1f} and {cold_cpu:.1f}"
    )
    yield (
        f"{warm['kills']} kills, {warm['resumes']} resumes, {warm['differing_losses']} differing losses, "
        f"{warm['lost_or_repeated_samples']} steps with other samples"
    )

    hour = read("measured/goodput.json")
    yield (
        f"beside other work: {hour['goodput']:.3f}; {hour['kills']} kills, {hour['steps']:,} steps of "
        f"{hour['median_step_seconds']:.2f} s, {hour['median_seconds']['whole']:.1f} s from a kill to the end of the "
        f"first new step, median, the longest {hour['longest_seconds']:.1f} s"
    ).replace("work: 0", "work: ")


def readme():
    found, quickstart = attention(65_536), read("measured/quickstart.json")["summary"]
    ours, gzip, xz = (quickstart[key] for key in ("bits_per_dim", "gzip_bits_per_dim", "xz_bits_per_dim"))
    (lsh, memory), (sdpa, _), (hf, hf_memory) = (found[name] for name in ("lsh", "sdpa", "hf"))
    yield (
        f"| attention of 65,536 tokens, forward and backward | {lsh:.1f} s | SDPA {sdpa:.0f} s, HuggingFace's Reformer "
        f"(2M keys, ours M) {hf:.0f} s |"
    )
    yield f"| the same, memory | {memory:.1f} GB | HuggingFace's {hf_memory:.1f} GB |"
    yield f"| quickstart, held-out bits/dim | {ours:.3f} | gzip {gzip:.3f}, xz {xz:.3f} |"
    yield f"gzip -9 {gzip:.3f} "
    yield f"this model {ours:.3f} "
    rows = [row for row in read("measured/decoder_passkey.json")["rows"] if row["trial"] is None]
    nats = {name: statistics.mean(row["nats"] for row in rows if row["arm"] == name) for name in (*FULL_WINDOW, FACTS)}
    window, taught = (f"{nats[name] - nats['full']:.3f}"[1:] for name in ("192 window", FACTS))
    yield f"nats above full attention | {taught} | window, sinks {window} |"
    killed = read("measured/recovery.json")
    yield (
        f"| kill −9 at random moments, {killed['kills']} times | {killed['differing_losses']} bits differ, "
        f"{killed['lost_or_repeated_samples']} samples lost |"
    )
    yield f"its file {quickstart['file_bits_per_dim']:.3f} "
    yield f"{read('measured/quickstart.json')['seconds'] / 60:.0f} minutes on two quiet cores"


def performance():
    found = attention(65_536)
    lsh, sdpa, hf, peer = (found[name][0] for name in ("lsh", "sdpa", "hf", "reformer-pytorch"))
    yield f"at 64K LSH took {lsh:.1f} s, SDPA {sdpa:.0f} s, HuggingFace's Reformer {hf:.0f} s, "
    yield f"reformer-pytorch {peer:.0f} s."


def results():
    found = read("measured/calibration.json")
    names = ["mixed with the uniform distribution", "mixed with the training split's frequencies", "at a temperature"]
    plain, dear, cost = (found[key] for key in ("plain", "dear_tokens", "dear_bits_per_dim"))
    yield f"| as they are | | {plain['validation']:.4f} | {plain['test']:.4f} |"
    for name, row in zip(names, found["calibrated"], strict=True):
        chosen = f"share {row['share']:.5f}" if "share" in row else f"{row['temperature']:.2f}"
        yield f"| {name} | {chosen} | {row['validation']:.4f} | {row['test']:.4f} |"
    yield f"are {dear['validation']} in validation and {dear['test']} in test; they take "
    yield f"{cost['validation']:.3f} and {cost['test']:.3f} bits/dim".replace("0.", ".")
    for name, arm in read("measured/translation_streams.json")["arms"].items():
        shown_name = name.replace("embedding once", "`embedding_once`")
        bleu = f"{arm['test']['bleu']:.1f} |" if "test" in arm else ""
        yield f"| {shown_name} | {', '.join(f'{nats:.3f}' for nats in arm['held_out'].values())} | {bleu}"
    whole = {name: arm["0"]["test"] for name, arm in read("measured/quickstart_whole.json").items()}
    norm, rate = whole["RMSNorm, SwiGLU"], whole["learning rate 6e-3"]
    yield f"RMSNorm with SwiGLU {norm:.3f}, a learning rate of 6e-3 {rate:.3f}, "
    yield f"as it was before {plain['validation']:.3f}"
    seconds = read("measured/quickstart_steps.json")["step_seconds"]
    now, before = (statistics.median(seconds[name]) for name in ("quickstart", "quickstart_relu"))
    yield f"three times by turns, {now / before - 1:.0%}".replace("%", " %")
    shipped = read("measured/quickstart.json")
    ours = shipped["summary"]["bits_per_dim"]
    yield f"{shipped['steps']:,} steps, which fit into ten minutes: {ours:.3f} on the test split"
    for found in (arm["0"] for arm in read("measured/quickstart_tried.json").values()):
        curve = " | ".join(f"{found['held_out'][step]:.3f}" for step in ("200", "300", "400"))
        if found["test"] is not None:  # the evaluation after training: here of the validation split
            yield f"{curve} | {found['test']:.3f} |"


def experiments():
    for name, arm in read("measured/residual_streams.json").items():
        found = arm["0"]
        held_out = " | ".join(f"{found['held_out'][step]:.3f}" for step in ("100", "200", "300", "400"))
        yield f"| {name} | {held_out} | {found['test']:.3f} |"
    rows = {arm: row["loss"] for arm, row in read("measured/minilm_attention.json")["rows"].items()}
    yield f"Before the attention was replaced: {rows['before']:.3f} nats"
    yield f"| full | {rows['before']:.3f} | {rows['full']:.3f} |"
    for arm, name in (("yoso_e", "YOSO in expectation"), ("yoso_32", "YOSO-32"), ("lsh", "LSH, 2 rounds")):
        behind, accuracy = rows[arm] - rows["full"], read("measured/minilm_attention.json")["rows"][arm]["accuracy"]
        after = f"{rows[arm]:.3f} | {accuracy * 100:.1f} | {behind:.3f}".replace("| 0.", "| .")
        yield f"| {name} | {rows[f'{arm}-start']:.3f} | {after} |"
    without, with_it = (read("measured/residual_bits.json")["runs"][bits]["held_out"]["500"] for bits in ("null", "14"))
    yield f"held-out bits/dim {with_it:.3f} with it and {without:.3f} without"
    trials = [trial["numbers"] for claim in read("claims/claims.json") for trial in claim["trials"]]
    errors = {arm: max(found[arm] for found in trials if arm in found) for arm in ("fp32, ReLU", "fp32, GELU")}
    relu, gelu = (f"{error:.1e}".replace("e-0", "e-") for error in errors.values())
    yield f"the gradient was off by {relu} (GELU: {gelu} in all of them)"


def switches():
    runs = read("measured/smart_bird_switches.json")["runs"]
    for sketch in ("attention", "transformer"):
        found = [[100 * run["accuracy"] for run in runs[f"{sketch}; {way}"].values()] for way in ("top K", "draws")]
        both = " | ".join(f"{statistics.mean(x):.1f} ± {statistics.stdev(x):.1f}" for x in found)
        yield f"| `{sketch}` | {both} |"


TARGETS = {
    "sampled": "sampled, 256 queries",
    "256 features": "256 random features",
    "64 features": "64 random features",
    "sampled, normalized": "sampled, queries and keys normalised",
    "256 features, normalized": "256 features of normalised ones",
}


def lha_targets():
    runs = read("measured/lha_targets.json")["runs"]

    def behind(arm, first):
        """Nats behind another arm, with the standard error over seeds."""
        apart = [runs[arm][seed]["loss"] - runs[first][seed]["loss"] for seed in ("0", "1", "2")]
        return f"{statistics.mean(apart):.3f} ± {statistics.stdev(apart) / 3**0.5:.3f}".replace("0.", ".")

    for arm, name in TARGETS.items():
        loss, accuracy, kept, bound = (
            [run[key] for run in runs[arm].values()] for key in ("loss", "accuracy", "utility", "utility_bound")
        )
        shares = f"{statistics.mean(kept):.3f} ({statistics.mean(bound):.3f})".replace("0.", ".")
        last = "|" if arm == "sampled" else f"{behind(arm, 'sampled')} |"
        yield f"| {name} | {spread(loss)} | {100 * statistics.mean(accuracy):.1f} | {shares} | {last}"
    yield f"are {behind('256 features, normalized', 'sampled, normalized')} behind them"
    yield f"with 256 features {behind('256 features, normalized', '256 features')}, which is no verdict"


def yoso_error():
    """In the largest number, of MiniLM's queries and keys."""
    errors = read("measured/yoso_error_minilm.json")["largest_error"]
    for hashes, said in (("32", "{} at 128 tokens, {} at 256"), ("128", "128 hashes: {}, {}")):
        found = (errors[length][hashes] for length in ("128", "256"))
        yield said.format(*(f"{x['mean']:.2f} ± {x['half']:.2f}".replace("0.", ".") for x in found))


def scaling():
    found, alone = read("measured/scaling.json"), read("measured/scaling_one_gpu.json")["rows"]
    rows = {(row["configuration"], row["gpu"], row["gpus"], row["sequence"]): row for row in [*found["rows"], *alone]}
    for (name, gpu, gpus, ranks), row in rows.items():
        size = f"{row['peak'] / 1e9:.1f} GB{'' if row['fits'] else ', too much'}"
        time = f"{row['step_seconds']:.3g} s | {row['exposed']:.0%} | {row['tokens_a_second_and_gpu']:,.0f}"
        kept = f"{row['goodput']['share']:.1%} | {row['cost_of_a_billion_tokens']:,.0f}".replace("%", " %", 1)
        time = time.replace("%", " %")
        yield f"| {name} | {gpus} {gpu} | {ranks} | {size} | {time} | {kept} |"
    for key in PARTED:
        row = rows[key]
        parts = " | ".join(f"{seconds:.2f}" for seconds in row["seconds"].values())
        yield f"| {key[0]}, {key[2]} {key[1]}, {key[3]} | {parts} | {row['traffic_seconds']['all_to_all']:.2f} |"
        traffic = (row["traffic"][link] / 1e9 for link in ("all_to_all", "nvlink", "node_to_network", "pcie"))
        yield f"| {key[0]}, {key[2]} {key[1]}, {key[3]} | {' | '.join(f'{size:,.1f}' for size in traffic)} |"
    lsh, lha = (rows[name, "H100", 8, 8]["step_seconds"] for name in ("llama_8b_1m", "llama_8b_1m_lha"))
    assert lsh <= 40 and lha <= 40
    yield f"met, as planned.** {lsh:.1f} s with LSH, {lha:.1f} s with LHA"
    one, narrow = rows["llama_8b_1m", "H100", 1, 1], rows["llama_8b_1m_one_gpu", "H100", 1, 1]
    assert one["fits"] and narrow["fits"]
    yield f"{narrow['peak'] / 1e9:.1f} GB and {narrow['step_seconds']:.0f} s a step"
    yield f"fp32 {one['peak'] / 1e9:.1f} GB and {one['step_seconds']:.0f} s"
    node = rows["llama_8b_1m", "H100", 8, 8]
    for ranks, said in ((32, "takes {:.1f} s, {} % of linear"), (64, "take {:.1f} s for one sequence, {} % of linear")):
        row = rows["llama_8b_1m", "H100", 64, ranks]
        share = row["tokens_a_second_and_gpu"] / node["tokens_a_second_and_gpu"]
        yield said.format(row["step_seconds"], f"{share:.0%}"[:-1])
    for step in found["published"]:
        error = step["predicted_seconds"] / step["seconds"] - 1
        assert abs(error) < 0.2
        seconds = f"{step['seconds']:.3g} s | {step['predicted_seconds']:.3g} s | {error * 100:+.0f} %"
        yield f"| {step['name']} | {seconds} | {step['at_30_percent_mfu']:.3g} s |"


def build():
    found = read("measured/build.json")
    largest = found["peak"] - found["held"]
    for name, key in (
        ("pieces of the weights, bf16", "pieces"),
        ("held in the end", "held"),
        ("peak, counted by the tensors that exist", "peak"),
        ("peak, planned", "planned"),
        ("peak, resident, less what the process had before", "resident"),
    ):
        yield f"| {name} | {found[key] / 1e9:.2f} GB |"
    yield f"| largest weight, the head | {largest / 1e9:.2f} GB |"
    yield f"| the whole model on the meta device | {found['meta_seconds']:.1f} s |"
    yield f"| its pieces, and DeepSpeed's optimizer | {found['build_seconds']:.0f} s |"
    yield f"{found['weights'] / 1e9:.2f} billion weights"
    yield f"its bucket of {found['bucket'] / 1e9:.2f} GB"
    yield f"Without the bucket {(found['peak'] - found['bucket']) / 1e9:.2f} GB"


def long_pass():
    plain, grouped = read("measured/million_tokens.json")["rows"]
    yield f"{plain['memory/peak_bytes'] / 1e9:.2f} GB at a rank's peak, {plain['speed/step_seconds']:.0f} s"
    yield f"head_groups={grouped['head_groups']}`) {grouped['memory/peak_bytes'] / 1e9:.2f} GB"
    for row in read("measured/long_pass.json")["rows"]:
        sizes = [f"{row[key] / 1e9:.3f} GB" for key in ("predicted", "allocated")]
        error = row["predicted"] / row["allocated"] - 1
        assert abs(error) <= 0.1 and row["largest"] <= row["stream"]
        shape = f"{row['tokens']:,} | {row['d_model']:,} | {row['head_groups']}"
        rest = f"{100 * error:+.2f} % | {row['largest'] / 1e9:.3f} GB".replace("-", "−")
        yield f"| {row['case']} | {shape} | {' | '.join(sizes)} | {rest} |"


def yoso_table4():
    """What YOSO and full attention keep for the backward at each length, and their seconds at the last."""
    files = {hashes: read(f"measured/yoso_table4_{hashes}.json")["rows"] for hashes in (16, 32, 64, 128)}
    ours = {m: [row for row in rows if row["implementation"] == "yoso"] for m, rows in files.items()}
    full = {m: [row for row in rows if row["implementation"] == "full"] for m, rows in files.items()}
    kept = {m: ", ".join(f"{row['kept_bytes'] / 1e6:.1f}" for row in rows) for m, rows in ours.items()}
    lengths = ", ".join(f"{row['length']:,}" for row in ours[16])
    beside = ", ".join(f"{row['kept_bytes'] / 1e6:.1f}" for row in full[16])
    yield f"YOSO-16 {kept[16]} MB at {lengths} tokens, YOSO-32 {kept[32]}"
    yield f"YOSO-64 {kept[64]}, YOSO-128 {kept[128]}"
    yield f"full attention {beside}"
    seconds = ", ".join(f"{rows[-1]['forward_backward']['median']:.1f}" for rows in ours.values())
    yield f"YOSO-16, 32, 64, 128 take {seconds} s at 4,096 tokens"
    for rows in full.values():
        yield f"full attention {rows[-1]['forward_backward']['median']:.1f};"


PARTED = [
    ("llama_8b_1m", "H100", 8, 8),
    ("llama_8b_1m", "A100", 8, 8),
    ("llama_8b_1m", "H100", 64, 32),
    ("llama_8b_1m", "H100", 64, 64),
    ("llama_8b_1m_lha", "H100", 8, 8),
    ("llama_1b_256k", "H100", 8, 8),
]


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ("../README.md", readme),
        ("performance.md", performance),
        ("reliability.md", reliability),
        ("experiments.md", experiments),
        ("attention.md", switches),
        ("attention.md", lha_targets),
        ("papers.md", yoso_table4),
        ("papers.md", yoso_error),
        ("results.md", results),
        ("scaling.md", scaling),
        ("scaling.md", build),
        ("scaling.md", long_pass),
    ],
)
def test_figures_are_those_of_the_measured_files(document, rows):
    assert_shown(document, rows())
