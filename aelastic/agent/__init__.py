"""One run of an agent: what lies between the worker group and the shells."""
