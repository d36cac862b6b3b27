"""The page that a browser gets at `/`: what `/status` says, for people, taken anew every two seconds.

Pure text, in the look of the timeline.  Its script asks this server alone, changes nothing, and shows what comes as
text; the policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --raised: #f5f6f8; --ink: #1b1f24; --soft: #5c6670;
  --line: #d9dde2; --good: #2066a8; --bad: #b84300; --still: #6a7480; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --raised: #1d2126; --ink: #e6e9ec; --soft: #9aa5b0;
  --line: #343b43; --good: #3d8fdb; --bad: #d9601a; --still: #707c89; } }
body { margin: 0 auto; padding: 20px 16px 40px; max-width: 900px; background: var(--ground); color: var(--ink);
  font: 14px/1.45 system-ui, "Segoe UI", "DejaVu Sans", Helvetica, Arial, sans-serif; }
h1 { margin: 0; font-size: 22px; overflow-wrap: anywhere; } h2 { margin: 26px 0 8px; font-size: 16px; }
.badge { display: inline-block; margin-left: 10px; padding: 2px 10px; border-radius: 11px; font-size: 12.5px;
  vertical-align: 3px; color: #fff; background: var(--still); }
.badge.HEALTHY, .badge.SUCCEEDED { background: var(--good); }
.badge.FAILED, .badge.UNHEALTHY { background: var(--bad); }
p { margin: 4px 0 0; overflow-wrap: anywhere; } .soft, th { color: var(--soft); font-weight: 400; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 18px 0 0; }
dt { color: var(--soft); } dd { margin: 0; font-size: 17px; font-weight: 650; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 0 3px 14px; white-space: nowrap; border-top: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; padding-left: 0; } thead th { border: 0; }
@media (max-width: 480px) { th, td { padding-left: 8px; font-size: 13px; } th { white-space: normal; } }
pre { padding: 10px 12px; background: var(--raised); border-radius: 8px; overflow-x: auto; white-space: pre-wrap; }
"""

SCRIPT = """
const el = (id) => document.getElementById(id), text = (id, words) => { el(id).textContent = words ?? ''; };
const span = (s) => s < 60 ? `${Math.round(s)} s` : s < 3600 ? `${Math.floor(s / 60)} min ${Math.round(s % 60)} s`
  : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
const bytes = (n) => n == null ? '' : `${(n / 2 ** 20).toFixed(0)} MiB`;
function cells(row, values) {
  for (const value of values) row.appendChild(document.createElement('td')).textContent = value ?? '';
}
function show(told) {
  const now = Date.parse(told.time), ago = (time) => span((now - Date.parse(time)) / 1000), round = told.round;
  text('name', told.run?.run_id ?? 'no run yet');
  text('state', told.state);
  el('state').className = `badge ${told.state}`;
  document.title = `${told.state}: ${told.run?.run_id ?? 'aelastic'}`;
  text('reason', [told.reason, told.waiting].filter(Boolean).join(' \\u00b7 '));
  text('where', told.run && `${told.run.entrypoint} on ${told.run.host}, agent ${told.run.pid}`);
  const has = round?.restart_count, may = told.run?.max_restarts;
  const done = told.progress, left = done?.remaining_s == null ? '' : `, ${span(done.remaining_s)} left`;
  const facts = { phase: told.phase, 'since then': ago(told.since), 'since the start': told.run && ago(told.run.began),
    round: round?.round, 'world size': round?.world_size, nodes: round?.group_world_size,
    'restarts charged': round && `${has} of ${may}${may && has >= may ? ', none left' : ''}`,
    progress: done && `step ${done.step}${done.total ? ` of ${done.total}` : ''}${left}` };
  el('facts').replaceChildren();
  for (const [name, value] of Object.entries(facts)) if (value != null) {
    const box = el('facts').appendChild(document.createElement('div'));
    box.appendChild(document.createElement('dt')).textContent = name;
    box.appendChild(document.createElement('dd')).textContent = value;
  }
  el('workers').replaceChildren();
  for (const worker of told.workers ?? []) cells(el('workers').appendChild(document.createElement('tr')),
    [worker.rank, worker.local_rank, worker.id, worker.state, worker.cpu_s?.toFixed(1), bytes(worker.rss_bytes)]);
  el('hasWorkers').hidden = !told.workers?.length;
  const last = told.last_failure;
  el('failed').hidden = !last;
  if (last) text('failure', `rank ${last.rank}: ${last.message}\\n${last.traceback ?? ''}`);
  const again = told.last_restart, why = again?.cause === 'failure' && last ? `: ${last.message.split('\\n')[0]}` : '';
  text('restart', again && `Last restart ${ago(again.at)} ago: ${again.reason}${why}`);
}
async function ask() {
  try {
    show(await (await fetch('status', { cache: 'no-store' })).json());
    text('heard', '');
  } catch { text('heard', 'The agent does not answer any more: it has ended, or cannot be reached.'); }
  setTimeout(ask, 2000);
}
ask();
"""
_HASH = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; script-src '{_HASH}'; "
    "frame-ancestors 'none'"
)

PAGE = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,"><title>aelastic</title><style>{STYLE}</style></head><body>
<h1><span id="name">…</span><span id="state" class="badge" role="status"></span></h1>
<p id="reason" role="status"></p><p id="where" class="soft"></p><p id="heard" role="alert"></p>
<dl id="facts"></dl><p id="restart" class="soft"></p>
<section id="hasWorkers" hidden><h2>Workers of this node</h2><div class="scroll"><table><thead><tr><th>rank</th>
<th>local rank</th><th>pid</th><th>state</th><th>CPU s</th><th>memory</th></tr></thead>
<tbody id="workers"></tbody></table></div></section>
<section id="failed" hidden><h2>Last failure</h2><pre id="failure"></pre></section>
<p class="soft">This page asks <a href="status">status</a> every two seconds and changes
nothing; there are <a href="metrics">metrics</a>, <a href="livez?verbose">livez</a> and
<a href="readyz?verbose">readyz</a>, too.</p>
<noscript>Without JavaScript read <a href="status">status</a>.</noscript>
<script>{SCRIPT}</script></body></html>
"""
