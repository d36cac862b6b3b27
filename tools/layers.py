"""The folders of the package from the ground up, and their picture in docs/development/architecture.md.

A module may import from its own folder and from those below it.  `tests/core/test_layers.py` reads this list.
"""

from __future__ import annotations

from html import escape
from typing import NamedTuple

PICTURE = "docs/development/layers.svg"


class Layer(NamedTuple):
    """A folder of the package, or modules at its top that stand on the same ground."""

    names: tuple[str, ...]
    sentence: str
    is_folder: bool = True


def _folder(name: str, sentence: str) -> Layer:
    return Layer((name,), sentence)


def _modules(*names: str, sentence: str) -> Layer:
    return Layer(names, sentence, is_folder=False)


LAYERS = (
    _folder("base", "what everything stands on: cores, records, the event loop, this machine"),
    _folder("training", "what a training script imports: recovery in place, notices"),
    _folder("diagnose", "why a worker died, where it hangs: failures, stacks, rules"),
    _modules("errors", "health_check_server", sentence="what a program imports"),
    _folder("workers", "processes of this machine: cold, warm, guarded; the store; CPUs"),
    _modules("procs", sentence="the worker back end: processes of this machine"),
    _folder("rdzv", "agents agree on rounds: log, leader, member, protocol, stores"),
    _modules("settings", "spec", "logs_specs", sentence="all that a user can set"),
    _folder("logs", "workers' output, from their files to the console"),
    _folder("observe", "run events, the state of the run, and every view of it"),
    _modules("result", "event_log", "sd_notify", sentence="what a program imports"),
    _folder("agent", "runs one node: the worker group's core, generations, watches, requests"),
    _modules("supervisor", "notice", sentence="what a program imports: await Supervisor(spec).run()"),
    _folder("tools", "beside a run: timeline, time spent, rehearsals"),
    _folder("cli", "arguments in, exit code out; the commands; doctor"),
    _modules("timeline", sentence="python -m aelastic.timeline"),
    _folder("compat", "torch's interfaces, with aelastic behind them"),
    _modules("elastic_agent", "launch", "run", "__main__", sentence="what a program imports, python -m"),
    _folder("under", "runs other programs with aelastic in place of torch's launcher"),
)
HEIGHT_OF = {name: height for height, layer in enumerate(LAYERS) for name in layer.names}

# The picture, in pixels.
_WIDTH, _FOLDER, _MODULES, _GAP, _MARGIN = 860, 42, 26, 6, 12
_INDENT = 28


def pages() -> dict[str, str]:
    """The picture, by its path."""
    return {PICTURE: picture()}


def picture() -> str:
    """Draws the layers, the lowest at the bottom."""
    parts, top = list[str](), _MARGIN
    for layer in reversed(LAYERS):
        height = _FOLDER if layer.is_folder else _MODULES
        parts.append(_box(layer, top, height))
        top += height + _GAP
    total = top - _GAP + _MARGIN
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" width="{_WIDTH}" height="{total}" '
        'role="img" aria-label="The folders of the package, from the ground up" '
        'font-family="system-ui, sans-serif" font-size="14">'
    )
    ground = f'<rect width="{_WIDTH}" height="{total}" fill="#ffffff"/>'
    return "\n".join([head, ground, *parts, "</svg>", ""])


def _box(layer: Layer, top: int, height: int) -> str:
    left = _MARGIN if layer.is_folder else _MARGIN + _INDENT
    width = _WIDTH - _MARGIN - left
    fill, line = ("#e8eef7", "#5a7aa8") if layer.is_folder else ("#f7f7f7", "#bbbbbb")
    suffix = "/" if layer.is_folder else ".py"
    names = "  ".join(f"{name}{suffix}" for name in layer.names)
    middle = top + height / 2 + 5
    name_style, size = ('font-weight="bold"', 14) if layer.is_folder else ("", 12)
    right = _WIDTH - _MARGIN - 12
    return "\n".join(
        [
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="4" fill="{fill}" stroke="{line}"/>',
            _text(f'x="{left + 12}" y="{middle:g}" font-size="{size}" fill="#1f2d3d" {name_style}', names),
            _text(f'x="{right}" y="{middle:g}" font-size="{size}" fill="#44546a" text-anchor="end"', layer.sentence),
        ]
    )


def _text(attributes: str, text: str) -> str:
    return f"<text {attributes}>{escape(text)}</text>"
