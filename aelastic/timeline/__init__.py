"""Event logs in, a picture and a trace out: `python -m aelastic.timeline`."""
