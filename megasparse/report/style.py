"""How a report looks, and the little that moves in it: the values under the pointer."""

STYLE = """
:root{--paper:#fcfcfb;--ink:#1d2126;--dim:#68717c;--rule:#e3e5e8;--card:#fff;--mark:#fff3cf;--accent:#1f6feb;
--k0:#1f6feb;--k1:#d9480f;--k2:#2b8a3e;--k3:#9c36b5;--k4:#c08400;--k5:#0b7285;--k6:#c2255c;--k7:#5c7cfa;--k8:#66a80f;
--k9:#868e96;--bad:#d6336c;--warn:#e8890c;--good:#2b8a3e}
@media(prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e8ea;--dim:#98a1ab;--rule:#2c3238;--card:#1b1f24;
--mark:#4a3c10;--accent:#6ea8fe;--k0:#6ea8fe;--k1:#ff922b;--k2:#69db7c;--k3:#da77f2;--k4:#ffd43b;--k5:#3bc9db;
--k6:#f783ac;--k7:#91a7ff;--k8:#a9e34b;--k9:#adb5bd;--bad:#ff6b9d;--warn:#ffa94d;--good:#69db7c}}
*{box-sizing:border-box}
body{margin:0 auto;padding:24px 20px 60px;max-width:1320px;background:var(--paper);color:var(--ink);
font:15px/1.45 system-ui,sans-serif}
h1{font-size:26px;margin:0 0 2px;overflow-wrap:anywhere}h2{font-size:18px;margin:34px 0 10px}
h3{font-size:15px;margin:18px 0 6px}small,.dim{color:var(--dim);font-weight:400}p{margin:4px 0}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(165px,1fr));gap:10px;margin:18px 0}
.tiles div{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:9px 12px}
.tiles b{display:block;font-size:20px;font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
.tiles span{color:var(--dim);font-size:13px}
.bar{height:5px;border-radius:3px;background:var(--rule);overflow:hidden}.bar i{display:block;height:100%;
background:var(--accent)}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,400px),1fr));gap:12px}
figure{margin:0;background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:9px 11px 7px}
figcaption{font-weight:600;font-size:14px;min-height:21px;overflow-wrap:anywhere}
figcaption output{float:right;font-weight:400;font-size:12.5px;color:var(--dim);font-variant-numeric:tabular-nums}
svg{display:block;width:100%;height:auto;overflow:visible}svg text{fill:var(--dim);font-size:11.5px}
svg path{fill:none}.g{stroke:var(--rule)}.c{stroke-width:1.8;stroke-linejoin:round}.raw{stroke-width:1;opacity:.32}
.d{stroke-width:2.2;stroke-dasharray:6 3}.dots{stroke-width:5;stroke-linecap:round;stroke-dasharray:none}
.c0{stroke:var(--k0)}.c1{stroke:var(--k1)}.c2{stroke:var(--k2)}.c3{stroke:var(--k3)}.c4{stroke:var(--k4)}
.c5{stroke:var(--k5)}.c6{stroke:var(--k6)}.c7{stroke:var(--k7)}.c8{stroke:var(--k8)}.c9{stroke:var(--k9)}
.k0{--k:var(--k0)}.k1{--k:var(--k1)}.k2{--k:var(--k2)}.k3{--k:var(--k3)}.k4{--k:var(--k4)}
.k5{--k:var(--k5)}.k6{--k:var(--k6)}.k7{--k:var(--k7)}.k8{--k:var(--k8)}.k9{--k:var(--k9)}
.m{stroke:var(--dim);stroke-width:1.2;stroke-dasharray:2 3;opacity:.8}.skipped,.spike{stroke:var(--bad)}
.straggler,.damaged{stroke:var(--warn)}.restart{stroke:var(--accent)}
.legend{display:flex;flex-wrap:wrap;gap:2px 13px;font-size:12.5px;color:var(--dim)}
.legend span::before{content:"";display:inline-block;width:15px;height:3px;margin:0 5px 3px 0;background:var(--k)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13.5px;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid var(--rule);vertical-align:top}
th{color:var(--dim);font-weight:500}td.n,th.n{text-align:right}tr.changed td{background:var(--mark)}
td code{overflow-wrap:anywhere}code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:10px 12px;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:340px;overflow-y:auto;margin:6px 0}
details{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:8px 13px;margin:8px 0}
summary{cursor:pointer;font-weight:600}
.shown{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,290px),1fr));gap:12px}
.shown .text{grid-column:1/-1}.shown img{display:block;width:100%}.small{image-rendering:pixelated}
.dot{display:inline-block;width:9px;height:9px;border-radius:5px;margin-right:6px;background:var(--dim)}
.dot.skipped,.dot.spike{background:var(--bad)}.dot.straggler,.dot.damaged{background:var(--warn)}
.dot.restart{background:var(--accent)}.dot.good{background:var(--good)}
"""

SCRIPT = """
const short = v => Math.abs(v) >= 1e4 || (v && Math.abs(v) < 1e-3) ? v.toExponential(3) : String(+v.toPrecision(4));
for (const svg of document.querySelectorAll('svg[data-x]')) {
  const [x0, x1] = svg.dataset.x.split(',').map(Number), [y0, y1, log] = svg.dataset.y.split(',').map(Number);
  const out = svg.parentNode.querySelector('output');
  const lines = [...svg.querySelectorAll('[data-label]')].map(p => [p.dataset.label,
    [...p.getAttribute('d').matchAll(/[ML]([-\\d.]+) ([-\\d.]+)/g)].map(m => [+m[1], +m[2]])]);
  svg.addEventListener('pointermove', e => {
    const at = new DOMPoint(e.clientX, e.clientY).matrixTransform(svg.getScreenCTM().inverse()).x;
    if (at < LEFT || at > RIGHT) { out.textContent = ''; return; }
    const values = lines.slice(0, 4).map(([label, points]) => {
      const [, y] = points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      const part = (BOTTOM - y) / (BOTTOM - TOP);
      return label + ' ' + short(log ? y0 * (y1 / y0) ** part : y0 + part * (y1 - y0));
    });
    const step = Math.round(x0 + (at - LEFT) / (RIGHT - LEFT) * (x1 - x0));
    out.textContent = 'step ' + step + ': ' + values.join(', ');
  });
  svg.addEventListener('pointerleave', () => out.textContent = '');
}
"""
"""LEFT, RIGHT, TOP and BOTTOM are the edges of a chart."""
