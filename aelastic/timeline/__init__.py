"""Event logs in, a picture and a trace out: `aelastic timeline`.

`files` finds the logs; `reader` makes entries of their lines, `node_reader` the story of one agent, `merge` that of
the run (values in `model`).  `html` fills in the page, `page.html`, with the data of the picture from `chart`, of
`boxes`, and `page.js`, which draws it, and `page.css`; `perfetto` is the trace; `text` says lengths of time.
"""

__all__ = ["command", "files", "reader", "text"]
