"""Makes a picture and a trace of event logs: `aelastic timeline` (`cli/timeline.py`).

`files` finds the logs; `reader` turns lines into entries, `node_reader` those into the story of one agent,
`merge` into that of the run (values in `model`).  `html` fills in the page, `page.html`, with the data
of the picture from `chart`, of `boxes`, and `page.js`, which draws it, and `page.css`; `perfetto` is the trace;
`text` words lengths of time.  `chain` follows what set off a restart, over all nodes; `aelastic why` prints it, too.
"""

__all__ = ["chain", "files", "html", "merge", "model", "perfetto", "reader", "text"]
