"""Style sheet and script of the timeline.

The script only moves and hides what `svg` drew; without it the whole run is seen.  The colours can be told apart by
colour-blind readers (Paul Tol's muted scheme for phases; blue, orange and grey for how workers ended), and none of them
says anything that is not said in words, too.
"""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --raised: #f5f6f8; --ink: #1b1f24; --soft: #5c6670;
  --line: #d9dde2; --restart: #c4420f; --band: rgba(196, 66, 15, .10);
  --good: #2066a8; --bad: #b84300; --still: #6a7480; --accent: #2066a8; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --raised: #1d2126; --ink: #e6e9ec; --soft: #9aa5b0;
  --line: #343b43; --restart: #ff9a5c; --band: rgba(255, 154, 92, .15);
  --good: #3d8fdb; --bad: #d9601a; --still: #707c89; --accent: #7db9f2; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 28px 32px 40px; max-width: 1640px; background: var(--ground); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; }
h1 { margin: 0; font-size: 22px; font-weight: 650; overflow-wrap: anywhere; }
h2 { margin: 30px 0 10px; font-size: 16px; font-weight: 650; }
.badge { display: inline-block; margin-left: 10px; padding: 2px 10px; border-radius: 11px; font-size: 12.5px;
  font-weight: 600; vertical-align: 3px; color: #fff; background: var(--still); }
.badge.succeeded { background: #2066a8; } .badge.failed { background: #b84300; }
.facts { margin: 4px 0 0; color: var(--soft); overflow-wrap: anywhere; }
.facts b { color: var(--ink); font-weight: 600; }
.spent { margin: 20px 0 4px; }
.spent .bar { display: flex; height: 12px; border-radius: 6px; overflow: hidden; background: var(--line); gap: 1px; }
.spent .bar span { min-width: 2px; }
.spent dl { display: flex; flex-wrap: wrap; gap: 6px 34px; margin: 10px 0 0; }
.spent dt, .spent dd { display: inline; margin: 0; } .spent dt { color: var(--soft); margin-right: 8px; }
.spent dd { color: var(--soft); }
.spent dd b { font-size: 17px; font-weight: 650; margin-right: 6px; color: var(--ink); }
.dot { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; vertical-align: -1px; }
.starting { background: #aa4499; } .training { background: #44aa99; } .restarting { background: #c4420f; }
.ending { background: #88ccee; }
.tools { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 20px; margin: 24px 0 6px; font-size: 12.5px;
  color: var(--soft); }
.tools .zoom { display: none; gap: 4px; align-items: center; margin-left: auto; } .live .tools .zoom { display: flex; }
button { font: inherit; color: var(--ink); background: var(--raised); border: 1px solid var(--line);
  border-radius: 6px; padding: 2px 10px; cursor: pointer; } button:hover { border-color: var(--soft); }
.card button { display: none; font-size: 12px; } .live .card button { display: inline-block; }
.legend { display: flex; flex-wrap: wrap; gap: 2px 13px; } .legend span { white-space: nowrap; }
.legend em { font-style: normal; font-weight: 600; color: var(--ink); margin-right: 4px; }
.legend b { display: inline-block; min-width: 11px; margin-right: 6px; text-align: center; color: var(--ink); }
.touch { display: none; } @media (hover: none) { .mouse { display: none; } .touch { display: inline; } }
.frame { border: 1px solid var(--line); border-radius: 8px; padding: 8px 8px 6px; overflow-x: auto; }
svg { display: block; } #chart { width: 100%; min-width: 860px; height: auto; user-select: none; }
svg text { font-family: inherit; font-size: 11px; fill: var(--ink); }
.ground { fill: var(--raised); } .grid line { stroke: var(--line); stroke-width: 1; }
.axis text { fill: var(--soft); font-variant-numeric: tabular-nums; }
text.name { font-weight: 650; } text.rank { fill: var(--soft); text-anchor: end; }
.restart { fill: var(--band); } .restart-line { stroke: var(--restart); stroke-width: 1.2; stroke-dasharray: 4 3; }
.flag rect { fill: var(--restart); } .flag text { fill: var(--ground); text-anchor: middle; font-weight: 650; }
.block { rx: 2px; stroke: none; } .block:hover { filter: brightness(1.12); }
rect.rendezvous { fill: #aa4499; } rect.spawn { fill: #ddcc77; } rect.run { fill: #44aa99; }
rect.detect { fill: #cc6677; }
rect.stop { fill: #882255; } rect.await { fill: #a9b0b7; } rect.barrier { fill: #88ccee; }
i.rendezvous { background: #aa4499; } i.spawn { background: #ddcc77; } i.run { background: #44aa99; }
i.detect { background: #cc6677; } i.stop { background: #882255; } i.await { background: #a9b0b7; }
i.barrier { background: #88ccee; } i.succeeded { background: var(--good); } i.failed { background: var(--bad); }
i.stopped { background: var(--still); } i.open { background: #a99ae0; }
rect.succeeded { fill: var(--good); } rect.failed { fill: var(--bad); } rect.stopped { fill: var(--still); }
rect.warm { fill: #ee7733; } rect.cold { fill: #cde4f5; stroke: #10151a; stroke-width: 1.2; stroke-dasharray: 3 2; }
i.warm { background: #ee7733; } i.cold { background: #cde4f5; border: 1.5px dashed #10151a; }
rect.open { fill: #a99ae0; } rect.guess { opacity: .38; }
text.in { fill: #fff; pointer-events: none; }
text.in.spawn, text.in.run, text.in.detect, text.in.await, text.in.barrier, text.in.open { fill: #10151a; }
text.in.guess { fill: var(--ink); }
.mark circle { fill: var(--ground); stroke: var(--bad); stroke-width: 1.6; }
.mark path { stroke: var(--bad); stroke-width: 1.8; stroke-linecap: round; }
.mark text { font-weight: 700; text-anchor: middle; paint-order: stroke; stroke: var(--ground); stroke-width: 3px; }
#chosen { fill: var(--accent); opacity: .22; pointer-events: none; }
.plot { cursor: crosshair; }
.card { border: 1px solid var(--line); border-radius: 8px; padding: 12px 16px 10px; margin: 0 0 12px; }
.card h3 { margin: 0; font-size: 14.5px; font-weight: 650; display: flex; gap: 10px; align-items: baseline; }
.card h3 .took { color: var(--restart); } .card h3 button { margin-left: auto; font-weight: 400; }
.card p { margin: 3px 0 8px; overflow-wrap: anywhere; } .card p.why { color: var(--soft); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { font-weight: 500; color: var(--soft); font-size: 12px; text-align: right; padding: 2px 0 4px 18px;
  white-space: nowrap; }
td { text-align: right; padding: 3px 0 3px 18px; white-space: nowrap; border-top: 1px solid var(--line); }
th:first-child, td:first-child, th.left, td.left { text-align: left; padding-left: 0; }
td.left, td.text { white-space: normal; overflow-wrap: anywhere; } td.text, th.text { text-align: left; }
td.nothing { color: var(--soft); } td.falls { width: 42%; padding-left: 22px; }
th.falls { text-align: left; padding-left: 22px; }
th.falls span { float: right; }
.falls div { position: relative; height: 14px; background: var(--raised); border-radius: 3px; overflow: hidden; }
.falls i { position: absolute; top: 0; bottom: 0; min-width: 1.5px; }
.scroll { overflow-x: auto; }
.notes { color: var(--soft); padding-left: 18px; margin: 6px 0 0; } .notes li { overflow-wrap: anywhere; }
.crowded .restart-line { display: none; } .heats { cursor: pointer; } .heats .ground { fill: var(--raised); }
.heat { fill: var(--restart); } #window { fill: var(--accent); opacity: .25; pointer-events: none; }
#find { font: inherit; width: 20em; max-width: 100%; padding: 2px 8px; color: var(--ink); background: var(--ground);
  border: 1px solid var(--line); border-radius: 6px; } #found { min-width: 6em; }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 1px; }
@media (max-width: 700px) { body { padding: 14px 12px 28px; } .tools .zoom { margin-left: 0; flex-wrap: wrap; }
  .frame { padding: 4px 2px; } .card { padding: 10px; } .card h3 { flex-wrap: wrap; } td, th { padding-left: 10px; } }
@media (max-width: 480px) { body { padding: 12px 8px 24px; } .card { padding: 8px 6px; }
  .falls, th .dot { display: none; }
  th { white-space: normal; vertical-align: bottom; } th, td { padding-left: 5px; font-size: 10.5px; }
  td:first-child, td:last-child { white-space: normal; overflow-wrap: anywhere; } }
@page { size: A4 landscape; margin: 10mm; }
@media print { :root { --ground: #fff; --raised: #f0f1f3; --ink: #000; --soft: #444; --line: #bbb; --restart: #c4420f;
  --good: #2066a8; --bad: #b84300; --still: #6a7480; } body { padding: 0; max-width: none; font-size: 11px;
  print-color-adjust: exact; -webkit-print-color-adjust: exact; }
  .tools .zoom, .card button { display: none !important; } .card { break-inside: avoid; }
  .frame, .scroll { overflow: visible; border: 0; padding: 0; } #chart { min-width: 0; max-height: 182mm; } }
"""

SCRIPT = """
(() => {
  const chart = document.getElementById('chart'), plot = chart.querySelector('.plot');
  const W = +chart.dataset.width, T = +chart.dataset.length, LEAST = Math.min(T, 2e-6);
  const chosen = document.getElementById('chosen');
  const axis = chart.querySelector('.axis'), grid = chart.querySelector('.grid');
  const read = (query) => [...chart.querySelectorAll(query)].map((el) => ({ el, s: +el.dataset.s,
    e: +(el.dataset.e ?? el.dataset.s), w: +el.dataset.w, y: el.dataset.y }));
  const rects = read('rect[data-s]'), texts = read('text[data-s]'), marks = read('.mark');
  const lines = read('.restart-line'), flags = read('.flag');
  const STEPS = [];
  for (let p = -6; p < 1; p++) for (const d of [1, 2, 5]) STEPS.push(d * 10 ** p);
  STEPS.push(10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000);
  let a = 0, b = T;
  const view = document.getElementById('window'), find = document.getElementById('find');
  const show = (el, is) => is ? el.removeAttribute('display') : el.setAttribute('display', 'none');
  const two = (n) => String(n).padStart(2, '0');
  function label(t, step) {
    if (step >= 60) {
      const m = Math.round(t / 60);
      return step >= 3600 || m >= 60 ? `${Math.floor(m / 60)}:${two(m % 60)} h` : `${m} min`;
    }
    const digits = Math.max(0, Math.ceil(-Math.log10(step) - 1e-9));
    if (t < 60) return `${+t.toFixed(digits)} s`;
    const h = Math.floor(t / 3600), m = Math.floor(t % 3600 / 60), s = (t % 60).toFixed(digits);
    const seconds = s.padStart(digits ? digits + 3 : 2, '0');
    return h ? `${h}:${two(m)}:${seconds}` : `${m}:${seconds} min`;
  }
  function put(x, first, last, el) {
    const text = first === last ? `${first}` : `${first}\\u2013${last}`, width = Math.max(18, 9 + text.length * 6.7);
    return { x, first, last, el, text, width, left: Math.min(x - 9, W + 13 - width) };
  }
  function draw() {
    const scale = W / (b - a), X = (t) => (t - a) * scale;
    for (const { el, s, e } of rects) {
      const is = e >= a && s <= b;
      show(el, is);
      if (!is) continue;
      const x = Math.max(X(s), -9), end = Math.min(X(e), W + 9);
      el.setAttribute('x', x); el.setAttribute('width', Math.max(end - x - 0.8, 1.5));
    }
    for (const { el, s, e, w } of texts) {
      const x = Math.max(X(s), 0), is = Math.min(X(e), W) - x >= w;
      show(el, is);
      if (is) el.setAttribute('x', x + 5);
    }
    for (const { el, s, y } of marks) {
      show(el, s >= a && s <= b);
      el.setAttribute('transform', `translate(${X(s)} ${y})`);
    }
    for (const { el, s } of lines) {
      show(el, s >= a && s <= b);
      el.setAttribute('x1', X(s)); el.setAttribute('x2', X(s));
    }
    const groups = [];
    for (const { el, s } of flags) {
      show(el, false);
      if (s < a || s > b) continue;
      let flag = put(X(s), +el.dataset.number, +el.dataset.number, el);
      while (groups.length && flag.left < groups.at(-1).left + groups.at(-1).width + 2) {
        const before = groups.pop();
        flag = put(before.x, before.first, flag.last, before.el);
      }
      groups.push(flag);
    }
    for (const { el, left, width, text } of groups) {
      show(el, true);
      el.setAttribute('transform', `translate(${left} 12)`);
      el.querySelector('rect').setAttribute('width', width);
      const label = el.querySelector('text');
      label.setAttribute('x', width / 2);
      label.textContent = text;
    }
    plot.classList.toggle('crowded', lines.filter(({ s }) => s >= a && s <= b).length > 60);
    if (view) {
      view.setAttribute('x', a / T * W);
      view.setAttribute('width', b - a < T ? Math.max((b - a) / T * W, 2) : 0);
    }
    const step = STEPS.find((step) => (b - a) / step <= 10) ?? (b - a) / 10;
    axis.replaceChildren(); grid.replaceChildren();
    for (let n = Math.ceil(a / step - 1e-9); n * step <= b; n++) {
      const x = X(n * step), anchor = x < 8 ? 'start' : x > W - 24 ? 'end' : 'middle';
      add(grid, 'line', { x1: x, x2: x, y2: grid.dataset.height });
      add(axis, 'text', { x, y: axis.dataset.y, 'text-anchor': anchor }).textContent = label(n * step, step);
    }
  }
  function add(parent, name, attributes) {
    const el = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) el.setAttribute(key, value);
    return parent.appendChild(el);
  }
  function go(from, to) {
    const length = Math.min(Math.max(to - from, LEAST), T);
    a = Math.min(Math.max(from, 0), T - length); b = a + length;
    draw();
  }
  const zoom = (factor, at) => go(at - (at - a) * factor, at + (b - at) * factor);
  const time = (event) => {
    const ground = plot.querySelector('.ground').getBoundingClientRect();
    return a + Math.min(Math.max((event.clientX - ground.left) / ground.width, 0), 1) * (b - a);
  };
  plot.addEventListener('wheel', (event) => {
    const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
    if (event.ctrlKey || event.metaKey || event.altKey) zoom(Math.exp(Math.sign(event.deltaY) * 0.25), time(event));
    else if (Math.abs(sideways) > (event.shiftKey ? 0 : Math.abs(event.deltaY)))
      go(a + Math.sign(sideways) * (b - a) / 12, b + Math.sign(sideways) * (b - a) / 12);
    else return;
    event.preventDefault();
  }, { passive: false });
  let from = null;
  plot.addEventListener('pointerdown', (event) => {
    if (event.button !== 0) return;
    from = time(event);
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener('pointermove', (event) => {
    if (from === null) return;
    const to = time(event), scale = W / (b - a);
    chosen.setAttribute('x', (Math.min(from, to) - a) * scale);
    chosen.setAttribute('width', Math.abs(to - from) * scale);
  });
  const drop = (event, does) => {
    if (from === null) return;
    const to = time(event), start = from;
    from = null;
    chosen.setAttribute('width', 0);
    if (does && Math.abs(to - start) > (b - a) / 150) go(Math.min(start, to), Math.max(start, to));
  };
  plot.addEventListener('pointerup', (event) => drop(event, true));
  plot.addEventListener('pointercancel', (event) => drop(event, false));
  plot.addEventListener('dblclick', () => go(0, T));
  const ways = { in: () => zoom(0.5, (a + b) / 2), out: () => zoom(2, (a + b) / 2), all: () => go(0, T),
    left: () => go(a - (b - a) / 4, b - (b - a) / 4), right: () => go(a + (b - a) / 4, b + (b - a) / 4) };
  for (const button of document.querySelectorAll('button[data-way]')) button.onclick = () => ways[button.dataset.way]();
  for (const button of document.querySelectorAll('button[data-s]')) button.onclick = () => {
    const s = +button.dataset.s, e = +button.dataset.e, margin = Math.max((e - s) * 0.4, 1e-5);
    go(s - margin, e + margin);
    chart.scrollIntoView({ block: 'nearest', behavior: 'smooth' });
  };
  chart.querySelector('.heats')?.addEventListener('click', ({ target: { dataset } }) => {
    const from = +dataset.from, to = +dataset.to;
    if (dataset.from) go(2 * from - to, 2 * to - from); else go(0, T);
  });
  // Finds nodes, and what was said of them: the others are folded away.
  const nodes = [...chart.querySelectorAll('.node')].map((el, place) => ({ el, height: +el.dataset.height,
    who: chart.querySelectorAll('.who')[place], said: `${el.dataset.name} ${el.textContent}`.toLowerCase() }));
  const told = [...document.querySelectorAll('.card, .list tbody tr')].map((el) => [el, el.textContent.toLowerCase()]);
  const [, top, width, whole] = chart.getAttribute('viewBox').split(' ').map(Number);
  find.oninput = () => {
    const asked = find.value.trim().toLowerCase();
    let folded = 0, count = 0;
    for (const { el, who, height, said } of nodes) {
      const is = said.includes(asked);
      for (const part of [el, who]) {
        show(part, is);
        part.setAttribute('transform', `translate(0 ${-folded})`);
      }
      if (is) count++; else folded += height;
    }
    chart.setAttribute('viewBox', `0 ${top} ${width} ${whole - folded}`);
    for (const [el, said] of told) el.hidden = !said.includes(asked);
    document.getElementById('found').textContent = asked ? `${count} of ${nodes.length} nodes` : '';
  };
  const spans = rects.filter(({ el }) => el.classList.contains('restart'));
  const jump = (span) => span && go(span.s - (span.e - span.s) * 0.4, span.e + (span.e - span.s) * 0.4);
  ways.next = () => jump(spans.find(({ s }) => s > (a + b) / 2 || (b - a === T)));
  ways.before = () => jump(spans.findLast(({ e }) => e < (a + b) / 2));
  const keys = { ArrowLeft: 'left', ArrowRight: 'right', '+': 'in', '=': 'in', '-': 'out', 0: 'all', n: 'next',
    p: 'before' };
  document.addEventListener('keydown', (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target === find) {
      if (event.key === 'Escape') { find.value = ''; find.oninput(); find.blur(); }
    } else if (event.key === '/') { find.focus(); event.preventDefault(); }
    else if (keys[event.key]) { ways[keys[event.key]](); event.preventDefault(); }
  });
  const asked = /^#t=([0-9.]+),([0-9.]+)$/.exec(location.hash);
  if (asked && +asked[2] > +asked[1]) go(+asked[1], +asked[2]);
  document.documentElement.classList.add('live');
})();
"""

# The only script that the page lets run, whatever a log has brought into it.
SCRIPT_HASH = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
