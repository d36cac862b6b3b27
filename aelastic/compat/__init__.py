"""torch's interfaces, with aelastic behind them.

- `launcher`: `LaunchConfig`, `elastic_launch` and what `torch.distributed.run` offers
- `elastic_agent`: torch's agent as a class
"""

__all__: list[str] = []
