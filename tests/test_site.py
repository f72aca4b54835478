"""The site: its reference contains every configuration key, its pages fit a phone and need no other host."""

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import megasparse.attention  # noqa: F401  (registers the mechanisms)
from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.messages import all_keys
from megasparse.config.schema import Config
from tests.helpers.cases import together

ROOT = Path(__file__).parents[1]
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NO_BROWSER = "no Chromium or Chrome on this machine to render the pages"
FRAME = '<iframe src="{}" style="width: 390px; height: 800px; border: 0"></iframe>'
WIDTHS = """<script>onload = () => {
  const frames = [...document.querySelectorAll("iframe")];
  const widths = frames.map(frame => [frame.getAttribute("src"), frame.contentDocument.documentElement.scrollWidth]);
  document.body.innerHTML = `<pre>${JSON.stringify(Object.fromEntries(widths))}</pre>`;
}</script>"""


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def hooks():
    specification = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def dom_of(url):
    """Return the document after its scripts have run."""
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", "--dump-dom", url]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout


@together("page", ["configuration", "attention", "finetuning"])
def test_the_reference_explains_every_key(page):
    entries = list(hooks().GENERATED[f"reference/{page}.md"]())
    headings = {re.match(r"#+ `(.*)`", entry)[1]: entry for entry in entries}
    expected = {
        "configuration": {key for key in all_keys(Config) if ".attention." not in key},
        "attention": {key for key in all_keys(Config) if key.startswith("model.attention.")},
        "finetuning": {key for key in all_keys(FinetuneConfig) if key.split(".")[0] not in hooks().SHARED},
    }[page]
    missing = {key for key in expected if key not in headings and ".attention." not in key.removeprefix("model.")}
    assert not missing
    keys = [key for key, entry in headings.items() if entry.startswith("### ") and not key.endswith("attention")]
    meanings = {key: headings[key].split("\n\n")[2:] for key in keys}
    assert not [key for key, texts in meanings.items() if not texts or texts[0].startswith("In the papers:")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
def test_search_finds_a_key_by_its_bare_name(site):
    index = json.loads((site / "search/search_index.json").read_text())
    titles = [re.sub("<[^>]+>", "", entry["title"]) for entry in index["docs"]]
    words = {word: title for title in titles for word in re.split(index["config"]["separator"], title)}
    assert words["gradient_clipping"] == "training.gradient_clipping"


@pytest.mark.slow
def test_pages_load_nothing_from_other_hosts(site):
    html = r"""<(?:(?:script|img|iframe|source)\b[^>]*\bsrc|link\b[^>]*\bhref)=["']?(?:https?:)?//[^>]*"""
    css = r"""(?:url\(|@import)\s*["']?(?:https?:)?//[^)]*"""
    files = [(path, html) for path in site.rglob("*.html")] + [(path, css) for path in site.rglob("*.css")]
    assert len(files) > 60
    assert not {path.name: loads for path, pattern in files if (loads := re.findall(pattern, path.read_text()))}


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_search_works_in_pages_that_are_opened_as_files(site):
    results = dom_of((site / "index.html").as_uri() + "?q=gradient_clipping")
    assert "reference/configuration.html?h=gradient_clipping#" in results


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason=NO_BROWSER)
def test_no_page_overflows_a_phone(site):
    text = (site / "offload.html").read_text()
    (site / "wide.html").write_text(re.sub("<article.*?>", r'\g<0><div style="width: 600px">wide</div>', text))
    pages = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    (site / "phone.html").write_text("".join(map(FRAME.format, pages)) + WIDTHS)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/phone.html"
        dom = dom_of(url)
        server.shutdown()
    result = re.search("<pre>(.*)</pre>", dom)
    assert result is not None, dom[-500:]
    assert [page for page, width in json.loads(result[1]).items() if width > 390] == ["wide.html"]
