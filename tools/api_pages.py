"""The reference of what programs may use: `docs/reference/api.md`, from the docstrings of the public names."""

from __future__ import annotations

import ast
import re

from cores import is_core
from markdown import code, lines, table
from sources import Source, fields_of, find, methods_of, source

PAGE = "docs/reference/api.md"
# Modules whose names programs import from there, with the names; none named: all that are public.
MODULES: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("aelastic.training", "Recovery in place, beside `in_place`", ("Round", "Late", "Value", "ResumableSampler")),
    ("aelastic.training.frameworks.accelerate", "Recovery in place with accelerate", ("reset_accelerate",)),
    ("aelastic.training.frameworks.lightning", "Recovery in place with Lightning", ("InPlace",)),
    ("aelastic.training.frameworks.transformers", "Recovery in place with transformers", ("train_in_place",)),
    ("aelastic.observe.run_events", "Run events, which observers receive", ()),
    (
        "aelastic.rdzv.stores.store",
        "Your own store, which keeps the text that names the leader",
        ("Store",),
    ),
    ("aelastic.rdzv.registry", "Rendezvous back ends by name", ("AgentContext", "register", "names")),
    (
        "aelastic.logs_specs",
        "Where the output of workers goes, compatible with torch",
        ("LogsDest", "LogsSpecs", "DefaultLogsSpecs"),
    ),
    (
        "aelastic.health_check_server",
        "Your own health check server",
        ("NoHealthCheckServer", "create_healthcheck_server", "HealthCheckServerFactory"),
    ),
)
# In this order; other homes of names follow.
FIRST = (
    "aelastic.supervisor", "aelastic.spec", "aelastic.settings", "aelastic.diagnose.hangs.options", "aelastic.result",
    "aelastic.base.errors", "aelastic.errors", "aelastic.diagnose.failures.failure", "aelastic.workers.states",
    "aelastic.workers.backend",
)  # fmt: skip
SIGNATURE_MAX = 70  # characters of arguments on one line
SECTION = re.compile(r"^(Args|Raises|Returns|Yields):$", re.MULTILINE)
ITEM = re.compile(r"^ {4}(\w[\w.*]*): ", re.MULTILINE)
ENUMS = {"Enum", "StrEnum", "IntFlag", "IntEnum"}


def pages() -> dict[str, str]:
    """The page, by its path below the root of the repository."""
    package = source("aelastic")
    homes = dict[Source, list[ast.stmt]]()
    for name in public_names():
        found = find(package, name)
        assert found is not None, f"aelastic.__all__ has {name}, and it is not found"
        homes.setdefault(found[0], []).append(found[1])
    parts = [
        "## `aelastic`",
        "Import names from the package: `from aelastic import Supervisor`. Each is loaded at first use.",
    ]
    for module in sorted(homes, key=_place):
        parts += [_entry(module, made, "aelastic") for made in sorted(homes[module], key=lambda stmt: stmt.lineno)]
    for name, title, wanted in MODULES:
        module = source(name)
        parts += [f"## `{name}`", f"{title}."]
        parts += [_entry(home, made, name) for home, made in _definitions(module, wanted)]
    return {PAGE: lines(HEAD, *parts)}


HEAD = """\
<!-- Generated from the docstrings by `make docs`: change these, not this page. -->

# API reference

The names that programs may import. Everything else may change without notice. *torch:* names the counterpart in
torchelastic, if there is one. Durations are in seconds."""


def public_names() -> list[str]:
    """`aelastic.__all__`."""
    made = source("aelastic").definition("__all__")
    assert isinstance(made, ast.Assign)
    names: list[str] = ast.literal_eval(made.value)
    return names


def _place(module: Source) -> tuple[int, str]:
    return (FIRST.index(module.name) if module.name in FIRST else len(FIRST), module.name)


def _definitions(module: Source, wanted: tuple[str, ...]) -> list[tuple[Source, ast.stmt]]:
    """The definitions of these names, or of all that are public, in the module or where it has them from."""
    own = [each for each in module.tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef)]
    if not wanted:
        return [(module, each) for each in own if not each.name.startswith("_") and ast.get_docstring(each)]
    found = {name: find(module, name) for name in wanted}
    missing = [name for name, each in found.items() if each is None]
    assert not missing, f"{module.name} has no {', '.join(missing)}"
    return [each for each in found.values() if each is not None]


def _entry(module: Source, made: ast.stmt, imported_from: str) -> str:
    match made:
        case ast.ClassDef():
            return _class(module, made, imported_from)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return lines(
                f"### {made.name}", f"```python\n{_signature(made, is_wrapped=True)}\n```", *_described(made)
            ).rstrip()
        case _:
            return lines(f"### {ast.unparse(made).partition(' ')[0]}", f"```python\n{ast.unparse(made)}\n```").rstrip()


def _class(module: Source, cls: ast.ClassDef, imported_from: str) -> str:
    bases = [ast.unparse(base) for base in cls.bases]
    base = f" ({', '.join(each for each in bases if each not in {'ABC', 'Record'})})".replace(" ()", "")
    text, arguments, others = _sections(cls)
    parts = [f"### {cls.name}", f"`{imported_from}.{cls.name}`{base}", text]
    if is_core(cls):
        return lines(*parts, f"A core: its phases and events are in [`{module.file}`](../../{module.file}).").rstrip()
    if ENUMS & {each.rpartition(".")[2] for each in bases}:
        members = [stmt for stmt in cls.body if isinstance(stmt, ast.Assign)]
        parts.append(table(("", ""), [(code(ast.unparse(each)), module.comment_of(each)) for each in members]))
    elif "__init__" in (own := methods_of(cls)):
        parts += [f"```python\n{_signature(own['__init__'], cls.name, is_wrapped=True)}\n```", *_items(arguments)]
    else:
        parts += _fields(module, cls, arguments)
    parts += others
    methods = [_method(each) for each in cls.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    return lines(*parts, "\n".join(each for each in methods if each)).rstrip()


def _fields(module: Source, cls: ast.ClassDef, arguments: dict[str, str]) -> list[str]:
    if settings := _settings(module, cls):
        return [table(("field", "type", "default", "option", ""), settings)]
    defaults = {
        ast.unparse(stmt.target): ast.unparse(stmt.value)
        for stmt in cls.body
        if isinstance(stmt, ast.AnnAssign) and stmt.value is not None
    }
    rows = [
        (
            code(each.name),
            code(each.type),
            _default(module, defaults.get(each.name)),
            arguments.get(each.name) or each.comment,
        )
        for each in fields_of(module, cls)
        if not each.name.startswith("_")
    ]
    return [table(("field", "type", "default", ""), rows)] if rows else []


def _settings(module: Source, cls: ast.ClassDef) -> list[tuple[str, ...]]:
    """A row for each field that is a setting: those of the class, then those of the classes that it inherits from."""
    rows = list[tuple[str, ...]]()
    for stmt in cls.body:
        match stmt:
            case ast.AnnAssign(target=ast.Name(name), value=ast.Call(func=ast.Name("setting"), args=args)):
                default, _, text, *options = args
                assert isinstance(text, ast.Constant), f"{cls.name}.{name}: its words are a plain string"
                shown = "" if ast.unparse(default) == "REQUIRED" else _default(module, ast.unparse(default))
                kind = code(ast.unparse(stmt.annotation))
                rows.append((code(name), kind, shown, _option_name(options), str(text.value)))
            case _:
                pass
    for base in cls.bases:
        found = find(module, base)
        if found is not None and isinstance(found[1], ast.ClassDef):
            rows += _settings(found[0], found[1])
    return rows


def _option_name(options: list[ast.expr]) -> str:
    texts = [each.value for option in options for each in ast.walk(option) if isinstance(each, ast.Constant)]
    names = [name for text in texts if isinstance(text, str) for name in text.split()]
    return next((code(name) for name in names if name.startswith("--")), "")


def _default(module: Source, text: str | None) -> str:
    """A default, and of a constant its value."""
    if text is None:
        return ""
    made = find(module, text) if text.isupper() else None
    if made is not None and isinstance(value := getattr(made[1], "value", None), ast.Constant):
        return code(ast.unparse(value))
    return code("{}" if text.startswith("field(default_factory=dict") else text)


def _method(method: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    if method.name.startswith("_"):
        return ""
    decorators = {ast.unparse(each) for each in method.decorator_list}
    kind = "".join(f"{each} " for each in ("classmethod", "staticmethod", "abstractmethod") if each in decorators)
    if "property" in decorators:
        returns = f": {ast.unparse(method.returns)}" if method.returns else ""
        head = f"{method.name}{returns}"
    else:
        head = _signature(method)
    text, arguments, others = _sections(method)
    told = [text.replace("\n\n", " "), *(f"`{name}`: {its}" for name, its in arguments.items()), *others]
    caption = " ".join(" ".join(each.split()) for each in told if each)
    return f"- {f'*{kind.strip()}* ' if kind else ''}`{head}`" + (f"<br>{caption}" if caption else "")


def _signature(function: ast.FunctionDef | ast.AsyncFunctionDef, name: str = "", *, is_wrapped: bool = False) -> str:
    arguments = ast.unparse(function.args)
    arguments = re.sub(r"^(self|cls)(, |$)", "", arguments)
    if is_wrapped and len(arguments) > SIGNATURE_MAX:
        arguments = "\n" + "".join(f"    {each},\n" for each in _parts(arguments))
    returns = f" -> {ast.unparse(function.returns)}" if function.returns and not name else ""
    prefix = "async " if isinstance(function, ast.AsyncFunctionDef) else ""
    return f"{prefix}{name or function.name}({arguments}){returns}"


def _parts(arguments: str) -> list[str]:
    """The text of each argument: they are separated by the commas outside all brackets."""
    parts, depth = [""], 0
    for char in arguments:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and not depth:
            parts.append("")
        else:
            parts[-1] += char
    return [part.strip() for part in parts]


def _described(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    text, arguments, others = _sections(node)
    return [text, *_items(arguments), *others]


def _items(arguments: dict[str, str]) -> list[str]:
    return ["\n".join(f"- `{name}`: {text}" for name, text in arguments.items())] if arguments else []


def _sections(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, dict[str, str], list[str]]:
    """A docstring: its text, its arguments, and what else it has, a paragraph each."""
    text, *rest = SECTION.split(ast.get_docstring(node) or "")
    arguments, others = dict[str, str](), list[str]()
    for title, body in zip(rest[::2], rest[1::2], strict=True):
        _, *pairs = ITEM.split(body)
        items = dict(zip(pairs[::2], (" ".join(each.split()) for each in pairs[1::2]), strict=True))
        if title == "Args":
            arguments = items
        elif items and title == "Raises":
            others.append("Raises " + "; ".join(f"`{name}`: {its.rstrip('.')}" for name, its in items.items()) + ".")
        else:
            others.append(f"{title}: {' '.join(body.split())}")
    return _indented_as_code(text.strip()), arguments, others


def _indented_as_code(text: str) -> str:
    return text.replace("\n    ", "\n      ") if "\n    " in text else text
