"""The house: imports go down only, files stay readable, words and citations resolve.

Everything is read from the source, nothing is imported.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titans_jax"
FILES = sorted(path for path in PACKAGE.rglob("*.py"))

# From the ground up: a module may import from its own floor and from those below.
FLOORS = (
    ("errors", "registry", "plots", "quiet_lines", "xla_flags"),
    ("ops",),
    ("memory.rule",),
    ("memory.gates", "memory.state"),
    ("memory.rule.gate_choices",),
    ("memory.rule.presets",),
    ("memory.rule.later_presets", "memory.rule.atlas_presets"),
    ("memory.forms",),
    ("memory.pallas",),
    ("memory.checks",),
    ("memory.interface",),
    ("memory",),
    ("config",),
    ("sharding", "data"),
    ("layers",),
    ("models",),
    ("training", "inference", "evaluation"),
    ("tpu",),
    ("bench",),
    ("studies",),
    ("commands", "cli"),
)
# What the numerics do without, so that they can be used without it.
NOT_BELOW_CONFIG = {"flax", "grain", "orbax", "tyro", "rich", "tensorflow_datasets"}
LONGEST = 450


def module_of(path: Path) -> str:
    """ "memory.forms.decay", or "memory" for its `__init__`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in FILES}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}


def floor(module: str) -> int | None:
    """That of the most particular name: "memory" holds what no room of it does, its `__init__`."""
    held = [
        (len(name), number)
        for number, names in enumerate(FLOORS)
        for name in names
        if module == name or module.startswith(name + ".")
    ]
    return max(held)[1] if held else None


def imported(tree: ast.Module) -> set[str]:
    """Full names that a module imports, wherever in it: of `from a import b`, "a.b"."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def own_imports(tree: ast.Module) -> set[str]:
    """The package's modules that a module imports; a name of a package is its `__init__`'s."""
    found = set()
    for name in imported(tree):
        parts = name.split(".")
        if parts[0] != "titans_jax":
            continue
        inner = ".".join(parts[1:])
        while inner and inner not in MODULES:
            inner = inner.rpartition(".")[0]
        found.add(inner)
    return found - {""}


def test_every_module_has_a_floor():
    assert [name for name in MODULES if name and floor(name) is None] == []


def test_imports_go_down():
    up = []
    for module in MODULES:
        if not module:
            continue
        up += [f"{module} imports {other}" for other in own_imports(TREES[module]) if floor(other) > floor(module)]
    assert sorted(up) == []


def test_no_two_modules_import_each_other():
    """Nor more of them in a circle; what a function imports when it is called does not count."""

    def at_import(module):
        statements = [node for node in TREES[module].body if isinstance(node, (ast.Import, ast.ImportFrom))]
        return own_imports(ast.Module(statements, []))

    # A package's `__init__` imports its modules, which import their siblings: only modules can be in a circle.
    edges = {m: {o for o in at_import(m) if not is_package(o)} for m in MODULES if not is_package(m)}
    while ends := [module for module, others in edges.items() if not others & edges.keys()]:
        for module in ends:
            del edges[module]
    assert sorted(edges) == []


def is_package(module):
    return MODULES[module].name == "__init__.py"


@pytest.mark.parametrize("part", ["memory", "ops"])
def test_numerics_need_no_framework(part):
    found = [
        f"{module} imports {name}"
        for module in MODULES
        if module.split(".")[0] == part
        for name in imported(TREES[module])
        if name.split(".")[0] in NOT_BELOW_CONFIG
    ]
    assert sorted(found) == []


def test_the_platform_is_asked_for_in_ops_alone():
    asking = [
        module
        for module, tree in TREES.items()
        if not module.startswith("ops.")
        and any(
            "target_platform" in (getattr(node, "id", ""), getattr(node, "attr", ""), getattr(node, "name", ""))
            for node in ast.walk(tree)
        )
    ]
    assert asking == []


def test_no_form_asks_for_the_class_of_a_rule_s_part():
    """What a form needs to know of a part, the part declares."""
    parts = {
        node.name
        for module, tree in TREES.items()
        if module.startswith("memory.rule.")
        and module.rpartition(".")[2] in ("architectures", "biases", "retentions", "algorithms")
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }
    assert {"Retention", "L2", "Linear"} <= parts
    asking = [
        f"{module}:{node.lineno}"
        for module, tree in TREES.items()
        if not module.startswith("memory.rule.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", "") in ("isinstance", "issubclass")
        and parts
        & {
            part.id if isinstance(part, ast.Name) else part.attr
            for part in ast.walk(node.args[1])
            if isinstance(part, (ast.Name, ast.Attribute))
        }
    ]
    assert asking == []


def test_no_file_is_too_long_to_read():
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in FILES}
    assert {name: lines for name, lines in long.items() if lines > LONGEST} == {}


WRITTEN = [
    path
    for folder in ("titans_jax", "configs", "tests", "launch")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".sh") and path != Path(__file__)
]


def test_citations_resolve():
    """Documents that are not in the repository cannot be looked up: cite a paper's equation, or memory/README.md."""
    unknown = re.compile(r"papers\.md|\bpapers \d|\bdesign(\.md)? \d|design\.md")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in WRITTEN
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if unknown.search(line)
    ]
    assert found == []


def test_cited_sections_exist():
    """ "memory/README.md, Coefficients" names a heading of it; so does what is cited of later_models.md."""
    missing = []
    for page in ("README", "later_models"):
        headings = re.findall(r"^## ([^:\n]+)", (PACKAGE / "memory" / f"{page}.md").read_text(), re.M)
        for path in WRITTEN:
            text = re.sub(r"\s*\n[\s#]*", " ", path.read_text())
            for cited in re.findall(rf"memory/{page}\.md, ([A-Z][^.;:)]*)", text):
                if not any(cited.startswith(heading) for heading in headings):
                    missing.append(f"{path.relative_to(ROOT)}: {page}.md has no {cited[:40]}")
    assert missing == []


def test_links_between_pages_resolve():
    """A page names another by its path from its own folder."""
    pages = [path for path in [ROOT / "README.md", *WRITTEN] if path.suffix == ".md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)\)", page.read_text())]
    assert len(links) > 20
    assert [f"{page}: {link}" for page, link in links if "://" not in link and not (page.parent / link).exists()] == []


def docstrings(tree):
    """(line, text) of every docstring, of attributes too."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for inner in body if isinstance(body, list) else ():
            if (
                isinstance(inner, ast.Expr)
                and isinstance(inner.value, ast.Constant)
                and isinstance(inner.value.value, str)
            ):
                yield inner.lineno, inner.value.value


def test_no_docstring_is_a_genitive_without_its_noun():
    found = [
        f"{module}:{line}"
        for module, tree in TREES.items()
        for line, text in docstrings(tree)
        if text.strip().startswith("Of ")
    ]
    assert found == []
