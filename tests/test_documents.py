"""Documents say what is: their code runs, their links lead somewhere, their tables agree with the tree."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from tests.tree import DOCUMENTS, PACKAGE, PROJECT, ROOT, relative

README = (ROOT / "README.md").read_text(encoding="utf-8")
MAX_LINES_IN_ALL = 26_000
MAX_DECISION_LINES = 60
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@cache
def generator() -> ModuleType:
    """docs/generate.py as a module."""
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["operators.md", "errors.md", "cli.md", "metrics.md"])
def test_generated_pages_are_committed(name: str) -> None:
    """`make docs` writes them."""
    assert generator().MARK + generator().PAGES[name]() == (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_every_generated_page_is_checked() -> None:
    assert {"operators.md", "errors.md", "cli.md", "metrics.md", "python.md"} == set(generator().PAGES)


def run(arguments: list[str], folder: Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """A program as a reader starts it: from another folder, with the commands of this environment in front."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, cwd=folder, env=environment, input=text, capture_output=True, text=True, timeout=240)


def test_readme_python_blocks_run(tmp_path: Path) -> None:
    """All of them in order, as one program."""
    blocks = [body for language, body in FENCE.findall(README) if language.split()[:1] == ["python"]]
    assert blocks
    result = run([sys.executable, "-W", "error:::firstlight", "-"], tmp_path, "\n".join(blocks))
    assert 0 == result.returncode, result.stderr


def test_readme_shell_blocks_run(tmp_path: Path) -> None:
    """Those marked `bash run`."""
    blocks = [body for language, body in FENCE.findall(README) if language.split() == ["bash", "run"]]
    assert blocks
    for body in blocks:
        result = run(["bash", "-euo", "pipefail", "-c", body], tmp_path)
        assert (0, True) == (result.returncode, bool(result.stdout.strip())), f"{body}{result.stdout}{result.stderr}"


def test_make_targets_named_in_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for path in DOCUMENTS for name in re.findall(r"(?:`|^)make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE)}
    assert {"demo", "test"} <= named
    assert named <= targets


def anchors(path: Path) -> set[str]:
    """What a renderer makes of the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_relative_links_lead_somewhere() -> None:
    broken = []
    for path in DOCUMENTS:
        prose = FENCE.sub("", path.read_text(encoding="utf-8"))
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, anchor = target.partition("#")
            goal = (path.parent / file).resolve() if file else path
            if not goal.exists() or (anchor and anchor not in anchors(goal)):
                broken.append(f"{relative(path)}: {target}")
    assert [] == broken


def test_files_named_in_documents_exist() -> None:
    """A path in back-ticks that starts with a folder of ours is a promise, inside a command too."""
    missing = []
    for path in DOCUMENTS:
        spans = re.findall(r"`([^`\n]+)`", FENCE.sub("", path.read_text(encoding="utf-8")))
        names = [name for span in spans for name in re.findall(r"(?<![\w./-])(?:firstlight|docs|tests|train|\.ci)/[\w./-]*", span)]
        missing += [f"{relative(path)}: {name}" for name in names if not (ROOT / name).exists()]
    assert [] == missing


def budgets() -> dict[str, tuple[int, str]]:
    """Room -> (lines, question) from the plan in docs/index.md."""
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([^|]+) \|", text, re.MULTILINE)
    return {name: (int(lines.replace(",", "")), question) for name, lines, question in rows}


def lines_of(room: str) -> int:
    """Lines of Python in a room, or in the file of that name."""
    files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else sorted((PACKAGE / room).rglob("*.py"))
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)


def test_every_room_is_on_the_plan_with_its_question() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()} | {path.stem for path in PACKAGE.glob("[!_]*.py")}
    assert set() == rooms - set(budgets())
    assert [] == [name for name, (_, question) in budgets().items() if not question.strip().endswith("?")]


def test_line_budget() -> None:
    """A room that outgrows its number needs a smaller room or a decision in docs/adr."""
    over = {name: lines_of(name) for name, (limit, _) in budgets().items() if lines_of(name) > limit}
    assert {} == over
    assert sum(len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")) <= MAX_LINES_IN_ALL


def test_decisions_are_numbered_and_short() -> None:
    """docs/adr/NNNN-title.md: context, decision, consequences, at most a page."""
    files = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert [f"{number:04}" for number in range(1, len(files) + 1)] == [path.name[:4] for path in files]
    for path in files:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert ["## Context", "## Decision", "## Consequences"] == [line for line in lines if line.startswith("## ")], path.name
        assert len(lines) <= MAX_DECISION_LINES, path.name


def test_every_dependency_has_a_reason() -> None:
    """The tables of the decision on dependencies name the same packages as pyproject.toml and the package.json of tests."""
    text = (ROOT / "docs" / "adr" / "0009-dependencies.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([\w-]+)` \| [^|]+ \|", text, re.MULTILINE)
    extras = PROJECT["project"]["optional-dependencies"]
    declared = {re.split(r"[<>=\[]", line)[0] for lines in [PROJECT["project"]["dependencies"], *extras.values()] for line in lines}
    declared |= set(json.loads((ROOT / "tests" / "serve" / "npm" / "package.json").read_text(encoding="utf-8"))["dependencies"])
    assert sorted(declared) == sorted(explained)
    assert set() == {line for name, lines in extras.items() if name != "test" for line in lines} - set(extras["test"])


def test_changelog_opens_with_this_version() -> None:
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert PROJECT["project"]["version"] == versions[0]


def test_glossary_defines_each_word_once() -> None:
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(words) > 30
    assert len(words) == len(set(words))
