"""The style guide as a test. What cannot be checked here, ruff, mypy or import-linter check.

To pass, change the code rather than the table of exceptions: it may only shrink.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ronde
from ronde import errors
from ronde.cli import bench, doctor, run, store, trace

ROOT = Path(__file__).parents[2]
FILE_LINES = 800  # a file is one whole idea; one that is longer has several
FUNCTION_LINES = 70
VAGUE_NAMES = {"common", "helper", "helpers", "misc", "util", "utils"}

# "path" or "path::function" and its number of lines.
EXCEPTIONS: dict[str, int] = {}


def sources(*suffixes: str, under: str = "src cpp tests benchmarks examples") -> Iterator[tuple[str, str]]:
    """Path (relative to the root) and text of every source file with one of the suffixes."""
    for folder in under.split():
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes:
                yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


@functools.cache
def nodes(text: str) -> list[ast.AST]:
    """All nodes of a Python file."""
    return list(ast.walk(ast.parse(text)))


def python_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function, nested ones and methods too."""
    for node in nodes(text):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


# Constructs that make a reader stumble, and a way to say it better.
BANNED = {
    r"\bmakes? no sense\b": "say what is expected",
    r"\bmeans? nothing\b": "say: has no effect",
    r"(?i)\bwhoever\b": "name the actor",
    r"(?:^|[.:;] |\| )Who (?!.*\?)": "name the actor: a waiting client retries, not: who waits tries again",
    r"(?i)\bby (?:itself|themselves)\b": "leave it out",
    r"(?i)(?<!one )\bof (?:its|their) own\b": "say: separate, or leave it out",
    r"(?i)\bas ever\b|\banyhow\b": "leave it out",
    r"(?i)\bso (?:long|many)\b(?! times)": "say how long or how many",
    r"(?i)\b(?:lookout|signpost|venue)\b": "use the field's term",
    r"(?i)\b(?:tells?|says?) more\b": "say: see",
    r"(?i)\bequally many\b": "say: the same number of",
    r"(?i)\bfor want of\b": "say: because there is no",
    r"(?i)\banew\b": "say: again",
}

# What may contain braces without meaning them. The first of these that starts wins.
NOT_CODE = re.compile(
    r"""
    //[^\n]* | /\*.*?\*/ |                                          # comments
    R"(?P<tag>[^(\s]*)\(.*?\)(?P=tag)" | "(?:\\.|[^"\\\n])*" |      # strings
    (?<!\w)'(?:\\.|[^'\\\n])+'                                      # characters, but not the ' in 1'000
    """,
    re.DOTALL | re.VERBOSE,
)
PREPROCESSOR = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
SCOPE = re.compile(
    r"(?:(?:public|protected|private)\s*:\s*)?(?:template\s*<.*>\s*)?(?:inline\s+)?"
    r"(?:namespace|class|struct|union|enum|extern)\b",
    re.DOTALL,
)


def cpp_functions(text: str) -> Iterator[tuple[str, int]]:
    """Name and number of lines of every function: what stands in braces, after (), in a namespace or class."""

    def blank(match: re.Match[str]) -> str:
        return re.sub(r"[^\n]", " ", match[0])

    text = PREPROCESSOR.sub(blank, NOT_CODE.sub(blank, text))
    scopes: list[bool] = []  # of every open brace: does it belong to a namespace or class?
    head = 0  # where the statement begins that the next brace may belong to
    first = 0  # where the function begins that we are in
    for match in re.finditer(r"[{};]", text):
        outside = all(scopes)
        if match[0] == "{":
            statement = text[head : match.start()].strip()
            if outside:
                first = match.start() - len(text[head : match.start()].lstrip())
            scopes.append(outside and SCOPE.match(statement) is not None)
        elif match[0] == "}":
            was_scope = scopes.pop()
            name = re.search(r"([\w~:]+)\s*\(", text[first : match.end()])
            if all(scopes) and not was_scope and name:
                yield name[1], text.count("\n", first, match.end()) + 1
        head = match.end()
    assert not scopes, "cannot be measured: braces do not balance"


@pytest.mark.slow
def test_files_and_functions_are_short() -> None:
    found = {}
    for path, text in sources(".py", ".cc", ".h"):
        if (lines := len(text.splitlines())) > FILE_LINES:
            found[path] = lines
        functions = python_functions if path.endswith(".py") else cpp_functions
        found |= {f"{path}::{name}": lines for name, lines in functions(text) if lines > FUNCTION_LINES}
    assert found == EXCEPTIONS, "split what is too long; take out of EXCEPTIONS what no longer is"


def test_the_measure_of_cpp_functions() -> None:
    text = """
        namespace a { // {
        struct alignas(64) S {
          int f() const { return "}"[0] + '{'; }
          S(int x) : x_(x) {
            if (x) { g(); }
          }
        };
        template <class T>
        void long_one(T x)
        {
          auto inner = [&] {
            return 1'000;
          };
        }
        }"""
    assert list(cpp_functions(text)) == [("f", 1), ("S", 3), ("long_one", 7)]


def test_no_two_classes_have_the_same_name() -> None:
    places: dict[str, list[str]] = {}
    for path, text in sources(".py", under="src"):
        if "/compat/packages/" not in path:  # where Horovod has chosen the names
            for node in nodes(text):
                if isinstance(node, ast.ClassDef):
                    places.setdefault(node.name, []).append(path)
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_names_say_what_a_module_is_for() -> None:
    for path, _ in sources(".py", ".cc", ".h"):
        if not path.startswith("src/ronde/compat/packages/horovod/"):  # where Horovod has chosen the names
            assert not VAGUE_NAMES & set(Path(path).with_suffix("").parts), (
                f"{path}: name it after its purpose"
            )


def test_one_module_reads_the_environment() -> None:
    # Puts a worker's environment in place, and may import nothing of ours.
    zygote = "src/ronde/launch/templates/zygote.py"
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for path, text in sources(".py", under="src"):
        used = set()
        for node in nodes(text):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                used.add(node.attr)
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                used |= {alias.name for alias in node.names}
        assert path in ("src/ronde/environment.py", zygote) or not used & names, (
            f"{path}: use ronde.environment"
        )
    for path, text in sources(".cc", ".h", under="cpp"):
        assert not re.search(r"\b(secure_)?getenv\b|\benviron\b", NOT_CODE.sub("", text)), (
            f"{path}: pass it in"
        )


SMALL_LINES = 60
# Programs that are started by their names, and modules that plugins of other packages import.
STARTED_OR_PUBLIC = {
    "ronde.backends.base", "ronde.launch.clusters.base", "ronde.launch.mpi.rank_task", "ronde.launch.mpi.remote_shell",
    "ronde.process.die_with_parent",
}  # fmt: skip


def test_a_small_module_has_two_customers() -> None:
    """A few lines with one customer belong to that customer."""
    customers: dict[str, set[str]] = {}
    small = set()
    for path, text in sources(".py", under="src"):
        module = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
        if text.count("\n") < SMALL_LINES and "__" not in module and "packages" not in module:
            small.add(module)
        for node in nodes(text):
            if isinstance(node, ast.ImportFrom) and node.module:
                for used in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                    customers.setdefault(used, set()).add(path)
    lonely = [module for module in sorted(small) if len(customers.get(module, ())) < 2]
    assert [module for module in lonely if module not in STARTED_OR_PUBLIC] == []


def test_only_a_few_rooms_use_the_native_module() -> None:
    store = tuple(f"src/ronde/stores/{name}.py" for name in ("request_handler", "server", "tcp"))
    channel = "src/ronde/net/message_channel.py"
    centers = "src/ronde/ml/clustering/points.py"
    lasso = "src/ronde/ml/linear/coordinate_descent.py"
    words = "src/ronde/ml/words/training.py"
    topics = "src/ronde/ml/topics/"
    trees = "src/ronde/ml/trees/"
    groups = "src/ronde/torch/distributed/"
    model = "src/ronde/bench/collective_traffic.py"
    allowed = (
        "src/ronde/comm/",
        "src/ronde/engine/",
        "src/ronde/stall/",
        *store,
        channel,
        centers,
        lasso,
        words,
        topics,
        trees,
        groups,
        model,
        "src/ronde/__init__.py",
    )
    for path, text in sources(".py", under="src"):
        if path.startswith(allowed):
            continue
        for node in nodes(text):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
                assert not any("_native" in name.split(".") for name in names), f"{path}: go through these"


def test_only_the_border_knows_python() -> None:
    for path, text in sources(".cc", ".h", under="cpp"):
        known = re.search(r"#include\s*[<\"](Python\.h|nanobind/|pybind11/)", text)
        assert path.startswith("cpp/binding/") or not known, f"{path}: only cpp/binding may know Python"


def documents() -> Iterator[tuple[str, str]]:
    """Name and text of what people read: the pages, the help texts, and the docstrings of public names."""
    pages = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")]
    for path in [*pages, *sorted(ROOT.glob("docs/**/*.md"))]:
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
    yield "ronde run --help", run.full_help()
    yield "ronde store --help", store.HELP
    yield "ronde trace --help", trace.HELP
    yield "ronde bench --help", bench.HELP
    yield "ronde doctor --help", doctor.HELP
    for name in ronde.__all__:
        member = getattr(ronde, name)
        yield f"help(ronde.{name})", inspect.getdoc(member) or ""
        methods = vars(member).items() if inspect.isclass(member) else ()
        for method, function in methods:
            if inspect.isfunction(function) and not method.startswith("_"):
                yield f"help(ronde.{name}.{method})", inspect.getdoc(function) or ""


def test_what_people_read_has_no_banned_constructs() -> None:
    found = [
        f"{name}: {match[0]!r}: {better}"
        for name, text in documents()
        for pattern, better in BANNED.items()
        for match in re.finditer(pattern, text, re.MULTILINE)
    ]
    assert found == []


def test_public_names_are_frozen() -> None:
    frozen = (ROOT / "tests/unit/public_names.txt").read_text().split()
    assert sorted(ronde.__all__) == sorted(frozen), "people rely on these names; see ARCHITECTURE.md"
    missing = [name for name in ronde.__all__ if not hasattr(ronde, name)]
    assert not missing, "listed in ronde.__all__ but not there"


def test_the_api_reference_has_all_public_names() -> None:
    pages = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("docs/api/*.md"))
    assert [name for name in ronde.__all__ if not re.search(rf"\b{name}\b", pages)] == []


@pytest.mark.parametrize("engine", ["spark", "ray", "dask", "flink"])
def test_the_api_reference_has_all_names_for_an_engine(engine: str) -> None:
    source = (ROOT / "src/ronde" / engine / "__init__.py").read_text(encoding="utf-8")
    page = (ROOT / "docs/api" / f"{engine}.md").read_text(encoding="utf-8")
    names = ast.literal_eval(source.partition("__all__ = ")[2].partition("]")[0] + "]")
    assert [name for name in names if not re.search(rf"(function|class):: {name}\b", page)] == []


def test_the_tree_of_errors_is_true() -> None:
    drawn: dict[str, str] = {}
    ancestors: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"([│├└─ ]*)([A-Z]\w+Error)\b", line):
            del ancestors[len(match[1]) // 4 :]
            drawn[match[2]] = ancestors[-1] if ancestors else "Exception"
            ancestors.append(match[2])
    classes = {name: getattr(errors, name) for name in errors.__all__}
    assert drawn == {name: value.__bases__[0].__name__ for name, value in classes.items()}


EVERY_VERB = """
import pkgutil, ronde.cli
for each in pkgutil.iter_modules(ronde.cli.__path__, "ronde.cli."):
    __import__(each.name)
"""


@pytest.mark.parametrize(
    "program",
    [
        "import ronde",
        "import ronde.cli; sys.argv = ['ronde', 'run', '--help']; ronde.cli.main()",
        EVERY_VERB,
    ],
    ids=["import ronde", "ronde run --help", "every verb"],
)
def test_loads_no_framework(program: str) -> None:
    report = "print('loaded:', {'numpy', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", f"import atexit, sys; atexit.register(lambda: {report})\n{program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "loaded: set()" in done.stdout
