// Draws the picture from the data in the page, once, and moves it as the reader zooms.  Times are seconds since the
// run began; the data are as `chart.py` has them.
(() => {
  const byId = (id) => document.getElementById(id), chart = byId('chart'), find = byId('find');
  const { length: T, rows, nodes, restarts, heat } = JSON.parse(byId('data').textContent);
  // Drawn as wide as the room on a small screen or in a small picture, where a scaled one could not be read.
  const room = chart.getBoundingClientRect().width, WIDTH = room && room < 1000 ? Math.round(room) : 1200;
  const LEFT = WIDTH < 600 ? 96 : 172, W = WIDTH - LEFT - 14;  // of the names, of the plot
  const NAME_MAX = Math.floor(LEFT / 8);  // letters
  const FLAGS = 24, ABOVE = FLAGS + 22;  // above the rows: the numbers of the restarts, then the times
  const HEAT = 16, OVER = restarts.length ? HEAT + 6 : 0;  // where the run lost time, above all that
  const START_PART = 0.22;  // of a worker's row, along its lower edge
  const LETTER = 6.4;  // of a sans-serif letter of 11 pixels, on average, rounded up
  const LABEL = 80;  // pixels from one time of the axis to the next, at least
  const LINES_MAX = 60;  // with more restarts in sight their lines would hide the rows
  const LEAST = Math.min(T, 2e-6);
  // What moves as the reader zooms.
  const rects = [], texts = [], marks = [], lines = [], flags = [];

  function add(parent, name, attributes = {}, words = '') {
    const el = document.createElementNS('http://www.w3.org/2000/svg', name);
    for (const [key, value] of Object.entries(attributes)) el.setAttribute(key, value);
    if (words) el.textContent = words;
    return parent.appendChild(el);
  }
  const tip = (el, words) => { add(el, 'title', {}, words); return el; };

  // The rows, from the top: of each node its agent, then its workers.

  let height = rows.gap / 2;
  for (const node of nodes) {
    node.top = height;
    node.height = rows.agent + rows.worker * node.workers.length + rows.gap;
    height += node.height;
  }
  chart.setAttribute('viewBox', `0 ${-OVER} ${WIDTH} ${ABOVE + height + OVER + 8}`);

  function drawHeat() {
    add(chart, 'text', { class: 'rank', x: LEFT - 8, y: HEAT - OVER - 4 }, 'time lost');
    const strip = add(chart, 'svg', { class: 'heats', x: LEFT, y: -OVER, width: W, height: HEAT });
    add(strip, 'rect', { class: 'ground', width: W, height: HEAT });
    for (const { from, to, share, words } of heat) {
      const high = Math.max(2, HEAT * share);
      tip(add(strip, 'rect', { class: 'heat', 'data-from': from, 'data-to': to, x: from / T * W, y: HEAT - high,
        width: (to - from) / T * W - 0.6, height: high }), words);
    }
    return add(strip, 'rect', { id: 'window', height: HEAT, width: 0 });
  }

  function drawNames(node) {
    const who = add(chart, 'g', { class: 'who' });
    // Where a line of text stands that is centred on its row.
    const put = (kind, x, middle, size, words) =>
      add(who, 'text', { class: kind, x, y: ABOVE + node.top + middle + size * 0.35, style: `font-size:${size}px` }, words);
    const name = node.name.length > NAME_MAX ? `${node.name.slice(0, NAME_MAX - 1)}…` : node.name;
    tip(put('name', 4, (rows.agent - 1) / 2, Math.min(12, rows.agent - 0.5), name), `${node.name}, agent ${node.pid}`);
    if (rows.worker >= 10) node.ranks.forEach((words, row) =>
      put('rank', LEFT - 8, rows.agent + (row + 0.5) * rows.worker, Math.min(11, rows.worker - 1), words));
    return who;
  }

  function block(parent, s, e, attributes, words) {
    const el = tip(add(parent, 'rect', { ...attributes, 'data-s': s, 'data-e': e }), words);
    rects.push({ el, s, e });
  }

  // A stretch of time in a row, with its words; they stand above what covers so much of its lower edge.
  function drawBox(parent, { s, e, known = e, classes, words, label, ...data }, y, height, below = 0) {
    const named = Object.fromEntries(Object.entries(data).map(([name, value]) => [`data-${name}`, value]));
    const place = { y, height };
    if (known > s || e <= known) block(parent, s, known, { class: `block ${classes}`, ...place, ...named }, words);
    if (e > known) block(parent, known, e, { class: `block ${classes} guess`, ...place }, words);
    if (!label || height <= 12) return;
    const kind = e - known > known - s ? 'guess' : classes.split(' ')[1];
    const el = add(parent, 'text', { class: `in ${kind}`, y: y + height / 2 + 4 - below * 0.75 }, label);
    texts.push({ el, s, e, w: label.length * LETTER + 8 });
  }

  function drawWorker(parent, boxes, y) {
    const height = rows.worker - (rows.worker > 6 ? 2 : 1), isStart = ({ classes }) => classes.startsWith('start');
    const strip = boxes.some(isStart) ? START_PART * height : 0;
    for (const box of boxes)
      if (isStart(box)) drawBox(parent, box, y + 0.5 + height - strip, strip);
      else drawBox(parent, box, y + 0.5, height, strip);
  }

  function drawMark(parent, node, { at, kind, sign, row, words }) {
    const y = node.top + (row === null ? rows.agent / 2 : rows.agent + rows.worker * (row + 0.5));
    const el = add(parent, 'g', { class: `mark ${kind}`, 'data-s': at });
    if (kind === 'failure') {
      // Within the block that ended with the failure: the next one begins at once.
      const r = rows.worker > 12 ? 6 : rows.worker > 6 ? 4 : 3, c = r * 0.45;
      const inside = add(el, 'g', { transform: `translate(${-r} 0)` });
      add(inside, 'circle', { r });
      add(inside, 'path', { d: `M${-c} ${-c}L${c} ${c}M${-c} ${c}L${c} ${-c}` });
    } else add(el, 'text', { y: 4 }, sign);
    marks.push({ el: tip(el, words), s: at, y });
  }

  function drawNode(node) {
    const el = add(plot, 'g', { class: 'node', 'data-name': node.name });
    for (const box of node.agent) drawBox(el, box, node.top + 1, rows.agent - 3);
    node.workers.forEach((boxes, row) => drawWorker(el, boxes, node.top + rows.agent + row * rows.worker));
    for (const mark of node.marks) drawMark(el, node, mark);
    return el;
  }

  function drawRestart({ number, s, e, words }) {
    block(plot, s, e, { class: 'restart', 'data-number': number, y: 0, height }, words);
    lines.push({ el: add(plot, 'line', { class: 'restart-line', y2: height }), s });
    const el = tip(add(numbers, 'g', { class: 'flag', 'data-number': number }), words);
    add(el, 'rect', { y: -9, height: 18, rx: 9 });
    add(el, 'text', { y: 4 });
    flags.push({ el, s, number });
  }

  const view = restarts.length ? drawHeat() : null;
  for (const node of nodes) node.who = drawNames(node);
  // Wider than the plot: a number in the middle of its first or last moment is seen as a whole.
  const above = add(chart, 'svg', { class: 'above', x: LEFT - 14, y: 0, width: W + 28, height: ABOVE,
    viewBox: `-14 0 ${W + 28} ${ABOVE}` });
  const numbers = add(above, 'g', { class: 'flags' }), axis = add(above, 'g', { class: 'axis' });
  const plot = add(chart, 'svg', { class: 'plot', x: LEFT, y: ABOVE, width: W, height });
  const ground = add(plot, 'rect', { class: 'ground', width: W, height }), grid = add(plot, 'g', { class: 'grid' });
  restarts.forEach(drawRestart);
  for (const node of nodes) node.el = drawNode(node);
  const chosen = add(plot, 'rect', { id: 'chosen', height, width: 0 });

  // What is in sight: from `a` to `b`.

  let a = 0, b = T;
  const STEPS = [];
  for (let p = -6; p < 1; p++) for (const d of [1, 2, 5]) STEPS.push(d * 10 ** p);
  STEPS.push(10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000);
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
    const text = first === last ? `${first}` : `${first}–${last}`, width = Math.max(18, 9 + text.length * 6.7);
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
    for (const { el, s, number } of flags) {
      show(el, false);
      if (s < a || s > b) continue;
      let flag = put(X(s), number, number, el);
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
    plot.classList.toggle('crowded', lines.filter(({ s }) => s >= a && s <= b).length > LINES_MAX);
    if (view) {
      view.setAttribute('x', a / T * W);
      view.setAttribute('width', b - a < T ? Math.max((b - a) / T * W, 2) : 0);
    }
    const most = Math.max(2, Math.min(10, Math.floor(W / LABEL)));
    const step = STEPS.find((step) => (b - a) / step <= most) ?? (b - a) / most;
    axis.replaceChildren(); grid.replaceChildren();
    for (let n = Math.ceil(a / step - 1e-9); n * step <= b; n++) {
      const x = X(n * step), anchor = x < 8 ? 'start' : x > W - 24 ? 'end' : 'middle';
      add(grid, 'line', { x1: x, x2: x, y2: height });
      add(axis, 'text', { x, y: ABOVE - 7, 'text-anchor': anchor }, label(n * step, step));
    }
  }
  function go(from, to) {
    const length = Math.min(Math.max(to - from, LEAST), T);
    a = Math.min(Math.max(from, 0), T - length); b = a + length;
    draw();
  }
  const zoom = (factor, at) => go(at - (at - a) * factor, at + (b - at) * factor);
  const time = (event) => {
    const { left, width } = ground.getBoundingClientRect();
    return a + Math.min(Math.max((event.clientX - left) / width, 0), 1) * (b - a);
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
  for (const node of nodes) node.said = `${node.name} ${node.el.textContent}`.toLowerCase();
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
    byId('found').textContent = asked ? `${count} of ${nodes.length} nodes` : '';
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
  if (asked && +asked[2] > +asked[1]) go(+asked[1], +asked[2]); else draw();
  document.documentElement.classList.add('live');
})();
