"""The rules of the house. A rule that stands here holds; one that does not is a wish.

Every table of exceptions carries a reason per entry, and an entry that is no longer needed fails.
"""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from firstlight.spec import errors
from tests.tree import PACKAGE, ROOT, SOURCES, TESTS, relative, tree_of

SKIPPED_FOLDERS = {".git", ".hypothesis", "__pycache__", "build", "dist", "node_modules"}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40
LONG_FILES: dict[str, str] = {}
"""Path -> why this file may be longer."""
LONG_FUNCTIONS: dict[str, str] = {}
"""path:qualified name -> why this function may be longer."""
FOREIGN_ERRORS = {
    "AttributeError": "the protocol of __getattr__",
    "SystemExit": "the protocol of a script",
    "StopIteration": "the protocol of an iterator",
    "Exit": "the exit code of a command",
}
"""Exceptions outside our hierarchy that may be raised, and by which right."""
STANDALONE = {"firstlight/adapt/record.py": "is copied beside reference code, where nothing else of us is installed"}
"""Files that raise an error of their own, because they import nothing of ours."""
BLANKET_EXCEPTS = {
    "firstlight/text/json_form.py": "tokenizers raises the bare class for every flaw of a file",
    "firstlight/engine/async_engine.py": "the main function of a worker, and where a client's request enters it",
    "firstlight/serve/app.py": "where an HTTP request enters",
}
"""Path -> which boundary stands there: a process (worker main, request handler, plug-in load), or a library that leaves no choice."""
ENVIRONMENT_READERS = {
    "firstlight/cli.py": "bounds how many compiled kernels oneDNN keeps, which is memory and no result",
    "firstlight/fetch/catalogue.py": "XDG_CACHE_HOME says where models lie, not what they compute",
    "firstlight/fetch/wheel.py": "hands the environment on to pip, with its working folder set",
}
"""Path -> why a file reads the environment although no variable may change a result."""
MANAGERS = {"CacheManager": "the one owner of blocks"}
"""Classes that may be called a manager: they hide more than they forward."""

BANNED_WORDS = {
    "helper", "helpers", "util", "utils", "common", "misc", "impl", "page", "pages", "cfg", "ctx", "mgr", "req", "reqs",
}
"""Words that no name of ours holds; `base_` and `Base` are banned in front."""
BANNED_NAMES = {"data", "info"}
"""Whole names that say nothing; `data_begin` says something."""
BANNED_FUNCTIONS = {"process", "handle"}
BANNED_FILES = BANNED_WORDS | BANNED_NAMES | {"base"}


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """(qualified name, node) of every function and method, nested ones included."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            inner = f"{prefix}{child.name}." if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) else prefix
            yield from walk(child, inner)

    yield from walk(tree_of(path), "")


def text_files() -> Iterator[tuple[Path, str]]:
    """Every readable text file of the tree, dot-files included, environments and caches left out."""
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in SKIPPED_FOLDERS and not name.startswith(".venv") and not name.endswith("_cache")]
        for file in files:
            path = Path(folder) / file
            try:
                yield path, path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def test_room_init_files_are_empty() -> None:
    """Only the top one and those that describe a back-end hold code."""
    full = [relative(path) for path in SOURCES if path.name == "__init__.py" and path.stat().st_size]
    assert [] == [path for path in full if path != "firstlight/__init__.py" and not re.fullmatch(r"firstlight/backends/\w+/__init__\.py", path)]


def test_file_lengths() -> None:
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert set(LONG_FILES) == {path for path, length in lengths.items() if length > MAX_FILE_LINES}


def test_function_lengths() -> None:
    """The docstring is not counted."""
    long = {}
    for path in SOURCES:
        for name, node in functions(path):
            docs = node.body[0] if ast.get_docstring(node) else None
            length = (node.end_lineno or 0) - node.lineno + 1 - ((docs.end_lineno or 0) - docs.lineno + 1 if docs else 0)
            if length > MAX_FUNCTION_LINES:
                long[f"{relative(path)}:{name}"] = length
    assert set(LONG_FUNCTIONS) == set(long), long


def undocumented(path: Path) -> Iterator[str]:
    """Public names without a docstring; overloads and overrides marked as such are left out."""
    if path.stat().st_size and not ast.get_docstring(tree_of(path)):
        yield relative(path)

    def walk(body: list[ast.stmt], prefix: str) -> Iterator[str]:
        for node in body:
            if isinstance(node, ast.If | ast.Try | ast.With):
                yield from walk(node.body, prefix)
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            marks = {ast.unparse(mark).split(".")[-1] for mark in node.decorator_list}
            if not ast.get_docstring(node) and not marks & {"overload", "override", "setter"}:
                yield f"{prefix}.{node.name}"
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}.{node.name}")

    yield from walk(tree_of(path).body, relative(path))


def test_every_public_name_has_a_docstring() -> None:
    assert [] == [name for path in SOURCES for name in undocumented(path)]


def test_a_part_is_two_files_of_one_name() -> None:
    """What it needs in parts/, what it does in layers/; values inside a part (an activation) have no module."""

    def kinds(folder: str, pattern: str) -> set[str]:
        files = (PACKAGE / folder).glob("*.py")
        return {path.stem for path in files if re.search(pattern.format(path.stem), path.read_text(encoding="utf-8"), re.MULTILINE)}

    parts, layers = kinds("parts", r'^    kind: str = "{}"'), kinds("layers", r'^@part\("{}"\)')
    assert {"kda", "mla"} <= layers
    assert layers == parts


def test_an_operator_is_one_file_of_its_name() -> None:
    program = "import firstlight.ops.declared; from firstlight.ops.registry import OPERATORS; print(*OPERATORS)"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split()
    assert [] == [name for name in run.stdout.split() if {name, "cases"} - function_names(PACKAGE / "ops" / f"{name}.py")]


def test_shape_letters_have_a_legend() -> None:
    """The common ones at the top of ops/declared.py, all others at the top of the file that uses them."""
    common = ast.get_docstring(tree_of(PACKAGE / "ops" / "declared.py")) or ""
    found = []
    for path in SOURCES:
        legend = common + (ast.get_docstring(tree_of(path)) or "")
        names = {name for _, name in defined_names(path) if re.fullmatch(r"[a-z]\w*_[A-Z][A-Z0-9]*", name)}
        letters = {letter for name in names for letter in name.rpartition("_")[2] if letter.isalpha()}
        found += [f"{relative(path)}: {letter}" for letter in sorted(letters) if not re.search(rf"\b{letter}\b", legend)]
    assert [] == found


def words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def defined_names(path: Path) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that a file names itself; names of other packages are theirs."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.value.lineno, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.lineno, node.asname


def test_no_banned_names() -> None:
    found = []
    for path in SOURCES:
        banned = BANNED_NAMES | (BANNED_FUNCTIONS & function_names(path))
        for line, name in defined_names(path):
            if words(name) & BANNED_WORDS or name.strip("_") in banned or re.match(r"_*base_|_*Base[A-Z]", name):
                found.append(f"{relative(path)}:{line} {name}")
    assert [] == found


def function_names(path: Path) -> set[str]:
    """Bare names of the functions of a file."""
    return {node.name for _, node in functions(path)}


def test_no_banned_file_names() -> None:
    names = [path for path in PACKAGE.rglob("*") if "__pycache__" not in path.parts and "assets" not in path.parts]
    assert [] == [relative(path) for path in names if words(path.stem) & BANNED_FILES]


def test_managers_are_few() -> None:
    found = {node.name for path in SOURCES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef) and node.name.endswith("Manager")}
    assert found <= set(MANAGERS)


def test_code_is_ascii() -> None:
    programs = (ROOT / "tests" / "serve" / "npm").glob("*.mjs")
    files = [*SOURCES, *programs, ROOT / "docs" / "generate.py", ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / ".ci" / "run"]
    assert [] == [relative(path) for path in files if not path.read_bytes().isascii()]


def test_tests_are_ascii_outside_of_strings() -> None:
    """Text in other scripts is a legitimate test input, not a name or a comment."""
    found = []
    for path in TESTS:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type in (tokenize.NAME, tokenize.COMMENT, tokenize.OP) and not token.string.isascii():
                found.append(f"{relative(path)}:{token.start[0]}")
    assert [] == found


def test_todos_have_an_issue_or_a_condition() -> None:
    """`TODO(#12): ...` or `TODO(when torch >= 3): ...`."""
    found = []
    for path in [*SOURCES, *TESTS]:
        for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type == tokenize.COMMENT and re.search(r"\b(TODO|FIXME|XXX|HACK)\b(?!\((#\d+|when [^)]+)\): \S)", token.string):
                found.append(f"{relative(path)}:{token.start[0]} {token.string}")
    assert [] == found


def raised(path: Path) -> Iterator[tuple[int, str, ast.Call | None]]:
    """(line, class name, call) of every raise that names its exception."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = node.exc if isinstance(node.exc, ast.Call) else None
            target = call.func if call else node.exc
            name = target.attr if isinstance(target, ast.Attribute) else target.id if isinstance(target, ast.Name) else ""
            if name[:1].isupper():
                yield node.lineno, name, call


OURS = {name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, errors.FirstlightError)}


def test_errors_have_a_fact_and_a_fix() -> None:
    """Two arguments, neither of them blank; no naked FirstlightError, because a caller could not tell it apart."""
    found = []
    for path in SOURCES:
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id not in OURS:
                continue
            given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg in ("fact", "fix"))]
            blank = [item for item in given if isinstance(item, ast.Constant) and not str(item.value).strip()]
            if len(given) != 2 or blank or node.func.id == "FirstlightError":
                found.append(f"{relative(path)}:{node.lineno} {ast.unparse(node)[:100]}")
    assert [] == found


def test_only_our_errors_are_raised() -> None:
    found = []
    for path in SOURCES:
        own = {node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef)}
        allowed = own if relative(path) in STANDALONE else OURS | set(FOREIGN_ERRORS)
        found += [f"{relative(path)}:{line} {name}" for line, name, _ in raised(path) if name not in allowed]
    assert [] == found


def test_standalone_files_import_nothing_of_ours() -> None:
    imports = [(name, node) for name in STANDALONE for node in ast.walk(tree_of(ROOT / name)) if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    assert [] == [f"{name}:{node.lineno}" for name, node in imports if "firstlight" in ast.unparse(node)]


def test_blanket_excepts_stand_at_boundaries_only() -> None:
    """One that cleans up and raises again swallows nothing."""

    def blanket(node: ast.AST) -> bool:
        if not isinstance(node, ast.ExceptHandler):
            return False
        if isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None:
            return False
        kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        return any(kind is None or (isinstance(kind, ast.Name) and kind.id in ("Exception", "BaseException")) for kind in kinds)

    assert set(BLANKET_EXCEPTS) == {relative(path) for path in SOURCES if any(blanket(node) for node in ast.walk(tree_of(path)))}


def test_the_environment_changes_no_result() -> None:
    def reads(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os" and node.attr in ("environ", "getenv")

    assert set(ENVIRONMENT_READERS) == {relative(path) for path in SOURCES if any(reads(node) for node in ast.walk(tree_of(path)))}


FOREIGN = [
    r"/work/", r"(?<![\w.-])/root/", r"(?<![\w/-])shared/(design|reference|data|tools|hooks)", r"\bsub-?agents?\b",
    r"\b(another|other|each|every|next|previous) helpers?\b", r"\b(this|our|my|your|an earlier|each|every|previous|later|next|coding) sessions?\b",
    r"\bthe founder\b", r"\bas an? (AI|language model)\b",
]


def test_the_tree_speaks_of_the_product_only() -> None:
    """No path of a machine and no trace of how it was made."""
    pattern = re.compile("|".join(FOREIGN), re.IGNORECASE)
    found = []
    for path, text in text_files():
        if path != Path(__file__).resolve():
            found += [f"{relative(path)}: {match.group()}" for match in pattern.finditer(text)]
    assert [] == found
