"""Documents name existing files, modules, links and commands; their lines fit an editor."""

import json
import math
import re
import shlex
import statistics
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

import megasparse
from megasparse.cli.main import parser_of, split
from megasparse.config.schema import Config
from megasparse.planning.dry_run import dry_run
from tests.helpers.cases import together
from tests.helpers.documents import commands, runs
from tests.planning.test_configs import reduced
from tests.test_imports import MAY_IMPORT

ROOT = Path(__file__).parents[1]
NAMED = ("README.md", "CONTRIBUTING.md", "tokenizers/README.md")
DOCUMENTS = [*(ROOT / name for name in NAMED), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("megasparse", "launch", "tools", "configs", "tests", "docs", "tokenizers")
MADE = ("tokenizers/books.model", "tokenizers/bert.json", "tokenizers/multi30k.model", "tokenizers/small.model")
"""Files that a reader makes or brings."""
PATHS = ("run.directory=", "data.path=", "task.source=")
"""Settings that may repeat the default, to show the reader's own path."""
PLACEHOLDERS = {"NAME", "test_NAME", "my", "test_my", "mine"}
"""Stems of placeholders for a reader's files."""


@together("path", DOCUMENTS)
def test_files_and_links_that_a_document_names_exist(path):
    text = path.read_text(encoding="utf-8")
    named = re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w\.(?:py|json|md|sbatch|svg|yaml))\b", text)
    missing = {name for name in named if not (ROOT / name).exists() and name not in MADE}
    missing = {name for name in missing if Path(name).stem not in PLACEHOLDERS}
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    missing |= {link for link in links if not (path.parent / link).exists()}
    assert not missing, f"{path.name} names {sorted(missing)}"


@together("name", NAMED)
def test_links_to_headings_from_outside_the_site_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#([^)]+)\)", text):
        target = (ROOT / name).parent / link if link else ROOT / name
        headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {slugify(heading, "-") for heading in headings}, f"{name} names {link}#{anchor}"


@together("path", DOCUMENTS)
def test_an_option_on_a_separate_line_continues_a_command(path):
    assert not re.findall(r"^ {4,}[^#\n]*[^\\\n]\n {4,}--\w", path.read_text(encoding="utf-8"), re.M)


@together("path", DOCUMENTS)
def test_commands_of_a_document_are_commands(path):
    for words in commands(path.read_text(encoding="utf-8")):
        name, rest = split(words)
        assert name is not None, f"{path.name}: {shlex.join(words)}"
        if "--help" in rest:
            continue
        try:
            args = parser_of(name).parse_args(rest)
        except SystemExit:
            pytest.fail(f"{path.name}: {shlex.join(words)}")
        assert name != "compare" or not args.set or args.output, f"{shlex.join(words)} needs --output"


@together("path", DOCUMENTS)
def test_settings_of_a_command_are_not_the_defaults(path):
    """Settings of a loop have the same keys: one of its commands must differ from the run without them."""
    changed = {}
    for words in commands(path.read_text(encoding="utf-8")):
        pairs = [(i, value) for i, value in enumerate(words) if words[i - 1] == "--set" and not value.startswith(PATHS)]
        if words[0] in ("pretrain", "finetune") and pairs:
            dropped = {i - below for i, _ in pairs for below in (0, 1)}
            plain = [word for i, word in enumerate(words) if i not in dropped]
            keys = (words[0], words[1], *(value.partition("=")[0] for _, value in pairs))
            changed[keys] = changed.get(keys, False) or runs(words) != runs(plain) or not runs(words)
    assert not [keys for keys, differs in changed.items() if not differs]


@pytest.mark.slow
def test_pretrainings_of_documents_dry_run_scaled_down():
    """Each model once."""
    models = {}
    for path in DOCUMENTS:
        trained = [words for words in commands(path.read_text(encoding="utf-8")) if "--help" not in words]
        small = [reduced(run) for words in trained for run in runs(words) if isinstance(run, Config)]
        models |= {config.model.model_dump_json(): (path, config) for config in small}
    for path, config in models.values():
        try:
            assert math.isfinite(dry_run(config).loss)
        except Exception as error:
            error.add_note(str(path))
            raise


def test_commands_are_found_in_documents():
    text = "Text.\n\n    megasparse plan quickstart \\\n      --gpus 8    # a comment\n\n    python x.py\n"
    assert commands(text) == [["plan", "quickstart", "--gpus", "8"]]
    assert commands("```bash\nmegasparse plan quickstart\n```\n") == [["plan", "quickstart"]]
    assert sum(len(commands(path.read_text(encoding="utf-8"))) for path in DOCUMENTS) > 30


def test_lines_fit_an_editor_and_the_readme_a_sitting():
    long = [
        f"{path.name}:{number}"
        for path in [*DOCUMENTS, ROOT / "CHANGELOG.md"]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if len(line) > 120 and not line.startswith("|")
    ]
    assert not long
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= 6500
    guides = [path for path in DOCUMENTS if path.parent.name not in ("lab", "reference")]
    words = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").split()) for path in guides}
    assert sum(words.values()) <= 18_000 and max(words.values()) <= 1_200, words


def test_the_drawn_layers_equal_the_imports():
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = [re.findall(r"(\w+)(?:/|\.py)", line[:39]) for line in text.split("```")[1].splitlines()]
    floor = {part: -number for number, row in enumerate(rows) for part in row}
    parts = {*MAY_IMPORT} - {"__main__", "__init__"}
    assert {*floor} == parts | {"launch", "tools"}
    wrong = [(part, below) for part in parts for below in MAY_IMPORT[part] if floor[below] >= floor[part]]
    assert not wrong


def test_the_site_has_every_page_and_every_public_name():
    docs = ROOT / "docs"
    pages = {path.relative_to(docs).as_posix() for path in {*docs.rglob("*.md")} - {*docs.glob("lab/*")}}
    listed = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert sorted(listed) == sorted(pages)
    names = re.findall(r"^::: megasparse\.([\w.]+)$", (ROOT / "docs/reference/python.md").read_text(), re.MULTILINE)
    assert names == [*(f"{module}.{name}" for name, module in megasparse._MODULES.items()), "functional"]


def _read(name):
    lines = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return [json.loads(line) for line in lines.splitlines()] if name.endswith("l") else json.loads(lines)


def _gpu(name, figure="both ms", card="h200"):
    """A figure of a check's last run."""
    return [row["figures"][figure] for row in _read(f"measured/{card}.jsonl") if row["name"] == name][-1]


def _cpu(kind):
    rows = _read("measured/attention_cpu.json")["rows"]
    row = next(row for row in rows if (row["implementation"], row["length"]) == (kind, 65536))
    return row["forward_backward"]["median"], row["extra_bytes"] / 1e9


def _spread(runs):
    tests = [run["test"] for run in runs if run.get("learning_rate", 6e-3) == 6e-3]
    return statistics.mean(tests), statistics.stdev(tests)


def _decoder(arm):
    """Keys per query and nats, means over the seeds, and passkeys found."""
    rows = [row for row in _read("measured/decoder_passkey.json")["rows"] if row["arm"] == arm]
    scored = [row for row in rows if row["trial"] is None]
    found = sum(row["found"] for row in rows if row["trial"] is not None)
    return *(statistics.mean(row[key] for row in scored) for key in ("keys", "nats")), found


def _tables(arm, *corpora):
    """Bits/dim of the test split of an arm with tables and Muon, seed 0, at the better rate."""
    settings = {"arm": arm, "rate": 9e-3, "seed": 0, "steps": 150, "tables": "rows in use"}
    scores = {row["corpus"]: row["test"] for row in TABLES["rows"] if settings.items() <= row.items()}
    return [scores[corpus] for corpus in corpora]


TABLES = _read("measured/pays_tables.json")
FIVE, SIX = (
    ("client", "code", "wikipedia", "books", "recall"),
    ("client", "models", "code", "wikipedia", "books", "recall"),
)
FOUR = ("client", "wikipedia", "code", "books")
GAINS = {corpus: _tables("window", corpus)[0] - _tables("shifted lsh", corpus)[0] for corpus in SIX}
QUICKSTART = _read("measured/quickstart.json")
SUMMARY = QUICKSTART["summary"]
FILE_BYTES = (SUMMARY["file_bits_per_dim"] - SUMMARY["bits_per_dim"]) * QUICKSTART["evaluation"]["dims"] / 8
"""Bytes of the compressed test split above its code length."""
PPMD = [
    _read("measured/recipe_compressors.json")["wikipedia"][f"PPMd -o16{text}"] for text in ("", " after training bytes")
]
BITS = [
    _read("measured/pays_compressors.json")["corpora"][corpus]["bits_per_byte"] for corpus in ("client", "wikipedia")
]
FULL, TAUGHT, WINDOW = map(_decoder, ("full", "192 Smart Bird, taught with facts", "192 window"))
UNSEEN = {}
for arm in ("full", "taught"):
    rows = [row for row in _read("measured/decoder_unseen_smollm2.json")["rows"] if row["arm"] == arm]
    UNSEEN[arm] = [statistics.mean(row[key] for row in rows) for key in ("keys", "nats")]
STEPS = [_gpu(f"step, {arm}", "s") for arm in ("as configured", "hashed layers full", "all layers full")]
LORA = [row for row in _read("measured/decoder_fits.json")["rows"] if row["trained"] == "adapters"][:3]
"""SmolLM2-135M and Llamas of 1B and 8B; decoder_64k trains 300 steps of 4 sequences."""
AT_64K = "{}, 65,536 tokens, batch × heads 8"
GRAPHS = [_gpu(AT_64K.format(kind) + ", graph") for kind in ("lsh", "flash", "cudnn")]
EAGER = [_gpu(AT_64K.format(kind)) for kind in ("yoso", "smart_bird", "flash", "cudnn")]
FIGURES = {  # page -> printed text and its values; leading zeros and line breaks do not count
    "README.md": [
        ("xz -9 {:.3f}", [SUMMARY["xz_bits_per_dim"]]),
        ("bzip2 -9 {:.3f}", [SUMMARY["bzip2_bits_per_dim"]]),
        ("this model {:.3f}", [SUMMARY["bits_per_dim"]]),
        ("its file {:.3f}", [SUMMARY["file_bits_per_dim"]]),
        ("| {:.1f} ms | flash SDPA {:.1f} ms, cuDNN {:.1f} ms", GRAPHS),
        ("no offload | {:.3f} s | {:.3f} s with full", STEPS[::2]),
        ("{:.1f} GB on one H100, no offload", [_gpu("step, as configured", "GB", "h100")]),
        ("{:.1f} s, {:.1f} GB | SDPA {:.0f} s, {:.2f} GB", [*_cpu("lsh"), *_cpu("sdpa")]),
        ("Reformer {:.0f} s, {:.1f} GB", _cpu("hf")),
        ("xz -9, primed {:.3f}", [SUMMARY["primed_xz_bits_per_dim"]]),
        ("| {:.3f} | PPMd (7-Zip, order 16) {:.3f}, {:.3f} after the training", [SUMMARY["bits_per_dim"], *PPMD]),
        ("text; xz {:.3f}, {:.3f}", [SUMMARY["xz_bits_per_dim"], SUMMARY["primed_xz_bits_per_dim"]]),
        (
            "| {:.0f} GB and {:.0f} GB of CPU memory, planned",
            [LORA[2][f"{side}_at_1M"] / 1e9 for side in ("gpu", "cpu")],
        ),
        ("{:.1f}, {:.1f}, {:.1f} hours on one H100 (planned)", [row["seconds"]["64K"] * 1200 / 3600 for row in LORA]),
        ("{:.1f}, {:.1f}, {:.1f} GB (planned)", [row["gpu"] / 1e9 for row in LORA]),
        ("{:.2f} on client code, {:.2f} on Wikipedia, {:.2f} on Django", [GAINS[c] for c in FOUR[:3]]),
        ("{:.2f} on books", [GAINS["books"]]),
        (
            "LHA so {:.2f}, {:.2f}, {:.2f}, {:.2f}",
            [_tables("window", c)[0] - _tables("shifted lha", c)[0] for c in FOUR],
        ),
        ("[{:.0f} keys, not {:,.0f}]", [UNSEEN["taught"][0], UNSEEN["full"][0]]),
        ("SmolLM2: {:.3f} nats lost on 20 texts", [UNSEEN["taught"][1] - UNSEEN["full"][1]]),
    ],
    "docs/should-i-use-it.md": [
        ("32 tokens | {:.3f} | {:.3f} | {:.3f} | {:.3f} | {:.3f} |", _tables("window", *FIVE)),
        ("layer | {:.3f} | {:.3f} | {:.3f} | {:.3f} | {:.3f} |", _tables("ngram", *FIVE)),
        ("there | **{:.3f}** | **{:.3f}** | **{:.3f}** | **{:.3f}** | {:.3f} |", _tables("shifted lsh", *FIVE)),
        (
            "LHA with shifted keys there | {:.3f} | {:.3f} | {:.3f} | {:.3f} | **{:.3f}** |",
            _tables("shifted lha", *FIVE),
        ),
        ("PPMd | {:.3f}; {:.3f} |", [BITS[0][name] for name in ("xz -9e", "PPMd7 -o 16")]),
        ("| {:.3f}; {:.3f} |", [BITS[1][name] for name in ("xz -9e", "PPMd7 -o 16")]),
        ("{:.3f} s on an H200 (plain torch, no offload), {:.3f} s", STEPS[:2]),
        ("hashed layers, and {:.3f} s", STEPS[2:]),
        ("{:.1f} and {:.1f} ms per operation, flash attention {:.1f} and cuDNN {:.1f}", EAGER),
        ("{:.0f} keys per query at 4,096 tokens, full attention {:,.0f}", [TAUGHT[0], FULL[0]]),
        ("loses {:.3f} nats per token", [TAUGHT[1] - FULL[1]]),
        ("sinks loses {:.3f}", [WINDOW[1] - FULL[1]]),
        ("{} of 100 passkeys; full attention finds {}", [TAUGHT[2], FULL[2]]),
        ("On Wikipedia {:.0f} % of", [100 * TABLES["repetitions"]["wikipedia"]]),
        ("gains {:.2f} bits/dim; in a", [GAINS["wikipedia"]]),
        ("{:.0f} % do, and it gains {:.2f}", [100 * TABLES["repetitions"]["models"], GAINS["models"]]),
    ],
    "docs/when-hashing-pays.md": [
        *(
            (
                name + " | {:.3f} | {:.3f} | **{:.3f}**",
                [_tables(arm, corpus)[0] for arm in ("window", "ngram", "shifted lsh")],
            )
            for name, corpus in (
                ("client code", "client"),
                ("models", "models"),
                ("Django", "code"),
                ("Wikipedia", "wikipedia"),
            )
        ),
        ("has {:.3f}, {:.3f}, {:.3f}, {:.3f}, {:.3f} and {:.3f}, in this order", _tables("shifted lha", *SIX)),
        ("{:.3f}, {:.3f}, {:.3f} on Django", [_tables(arm, "code")[0] for arm in ("lsh", "lha", "full")]),
        ("{:.3f}, {:.3f}, {:.3f}", [_tables(arm, "wikipedia")[0] for arm in ("lsh", "lha", "full")]),
    ],
    "docs/cookbook.md": [("({:.0f} bytes longer on the quickstart's", [FILE_BYTES])],
    "docs/index.md": [
        ("{:.0f} times as fast as flash", [GRAPHS[1] / GRAPHS[0]]),
        ("{:.3f} bits per byte", [SUMMARY["bits_per_dim"]]),
        ("xz {:.3f}, PPMd {:.3f}", [SUMMARY["xz_bits_per_dim"], PPMD[0]]),
    ],
}


@together("page", FIGURES)
def test_figures_equal_the_measured_files(page):
    written = re.sub(r"\b0\.", ".", " ".join((ROOT / page).read_text(encoding="utf-8").split()))
    printed = [re.sub(r"\b0\.", ".", form.format(*values)) for form, values in FIGURES[page]]
    assert not [text for text in printed if text not in written]


def test_counts_equal_their_tables():
    pages = ("docs/lab/claims.md", "docs/lab/index.md", "CHANGELOG.md")
    claims, index, changes = (" ".join((ROOT / page).read_text(encoding="utf-8").split()) for page in pages)
    verdicts = re.findall(r"\| (verified|partly|not shown|refuted) \|", claims)
    assert len(verdicts) == len(_read("measured/claims.json")["claims"])
    counts = ", ".join(f"{verdicts.count(name)} {name}" for name in ("verified", "partly", "not shown", "refuted"))
    assert counts in claims and counts in index and counts in changes
    corpora = json.loads((ROOT / "configs/comparisons/pays.json").read_text(encoding="utf-8"))["corpora"]
    assert "three of four corpora" in index and len(corpora) == 4
    assert "five of six corpora" in index and len(GAINS) == 6 and sorted(GAINS.values())[1] >= 0.1


def test_files_and_folders_of_the_packages_exist():
    packages = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("## Packages")[1].split("## ")[0]
    for item in re.split(r"\n(?=- |\n)", packages):
        if package := re.match(r"- `(\w+)/`", item):
            names = re.findall(r"`([\w*]+(?:\.py|\.json|(?=/)))/?`", item)[1:]  # files and folders inside it
            folder = ROOT / "megasparse" / package[1]
            assert not [name for name in names if not [*folder.rglob(name), *folder.parent.glob(name)]], item
