"""Event logs in, a picture and a trace out: `python -m aelastic.timeline`.

`command` finds the logs; `reader` makes entries of their lines, `node_reader` the story of one agent, `merge` that of
the run (values in `model`).  `html` is the page, `svg` the picture in it, of `boxes`, with the style and script of
`assets`; `perfetto` is the trace; `text` says lengths of time.
"""

__all__: list[str] = []
