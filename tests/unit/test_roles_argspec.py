"""What the collection documents is what it does: roles' variables and modules' options."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.parent.parent for path in (ROOT / "roles").glob("*/meta/argument_specs.yml"))
MODULES = sorted(path.stem for path in (ROOT / "plugins" / "modules").glob("*.py") if not path.stem.startswith("_"))
TYPES = {"str", "int", "float", "bool", "list", "dict", "path", "raw"}
# what documentation and argument spec of a module must agree on
AGREED = {"type": "str", "required": False, "default": None, "choices": None, "elements": None, "aliases": []}


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def is_template(value: object) -> bool:
    return isinstance(value, str) and "{{" in value


def role_defaults(role: Path) -> dict[str, Any]:
    return load(role / "defaults" / "main.yml") or {}


def role_options(role: Path) -> dict[str, Any]:
    specs = load(role / "meta" / "argument_specs.yml")["argument_specs"]
    return {name: option for spec in specs.values() for name, option in (spec.get("options") or {}).items()}


def test_every_role_has_defaults_and_argument_specs() -> None:
    roles = {path for path in (ROOT / "roles").iterdir() if path.is_dir()}
    assert roles == set(ROLES)
    assert [role.name for role in ROLES if not (role / "defaults" / "main.yml").is_file()] == []
    assert [role.name for role in ROLES if not (role / "meta" / "main.yml").is_file()] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_roles_argument_specs_have_the_keys_of_its_defaults(role: Path) -> None:
    options, defaults = role_options(role), role_defaults(role)
    optional = {name for name, option in options.items() if not option.get("required")}
    assert sorted(optional) == sorted(defaults)
    assert [name for name, option in options.items() if option.get("required") and name in defaults] == []


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_a_roles_argument_specs_have_the_values_of_its_defaults(role: Path) -> None:
    options, defaults = role_options(role), role_defaults(role)
    wrong = {
        name: (option.get("default", "none given"), defaults[name])
        for name, option in options.items()
        if name in defaults and not _documented(option, defaults[name])
    }
    assert wrong == {}


def _documented(option: Mapping[str, Any], default: object) -> bool:
    if is_template(default) and option["type"] not in {"str", "path"}:
        # the expression is text, which is no default of another type; words take its place
        return "default" not in option and "By default " in str(option["description"])
    return "default" in option and option["default"] == default and type(option["default"]) is type(default)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_variable_of_a_role_bears_its_name_and_is_described_and_typed(role: Path) -> None:
    for name, option in role_options(role).items():
        assert name.startswith(f"{role.name}_"), name
        assert option.get("description"), name
        assert option.get("type") in TYPES, name
        if option["type"] == "list":
            assert option.get("elements") in TYPES, name
    for name in load_vars(role):
        assert name.lstrip("_").startswith(f"{role.name}_"), name


def load_vars(role: Path) -> dict[str, Any]:
    path = role / "vars" / "main.yml"
    return (load(path) or {}) if path.is_file() else {}


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_default_has_the_type_that_is_documented(role: Path) -> None:
    kinds = {"str": str, "path": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict}
    for name, value in role_defaults(role).items():
        option = role_options(role)[name]
        if option["type"] == "raw" or is_template(value):
            continue
        assert isinstance(value, kinds[option["type"]]), (name, value)
        assert (type(value) is bool) == (option["type"] == "bool"), (name, value)
        if "choices" in option:
            assert value in option["choices"], (name, value)


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_every_default_is_commented(role: Path) -> None:
    """A comment stands above a variable, or above the run of variables that it belongs to."""
    above = ""
    for line in (role / "defaults" / "main.yml").read_text(encoding="utf-8").splitlines():
        if re.match(r"\w+:", line):
            assert above, f"{role.name}: {line}"
        elif line.startswith("#"):
            above = line
        elif not line.strip():
            above = ""


@pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
def test_variables_that_hold_secrets_are_marked_as_such(role: Path) -> None:
    for name, option in role_options(role).items():
        if re.search(r"(api_key|_token|password|secret)$", name):
            assert option.get("no_log") is True, name


def module_call(name: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which a module makes its AnsibleModule."""

    class Made(Exception):  # noqa: N818 - it carries a result
        def __init__(self, arguments: dict[str, Any]) -> None:
            self.arguments = arguments

    def make(argument_spec: dict[str, Any], **arguments: Any) -> None:
        raise Made({"argument_spec": argument_spec, **arguments})

    module = importlib.import_module(f"ansible_collections.firstlight.vllm.plugins.modules.{name}")
    monkeypatch.setattr(module, "AnsibleModule", make)
    with pytest.raises(Made) as caught:
        module.main()
    return caught.value.arguments


def documentation(name: str) -> dict[str, Any]:
    module = importlib.import_module(f"ansible_collections.firstlight.vllm.plugins.modules.{name}")
    doc = yaml.safe_load(module.DOCUMENTATION)
    for fragment in doc.get("extends_documentation_fragment") or []:
        stem, _, part = fragment.removeprefix("firstlight.vllm.").partition(".")
        extra = importlib.import_module(f"ansible_collections.firstlight.vllm.plugins.doc_fragments.{stem}")
        text = getattr(extra.ModuleDocFragment, part.upper() or "DOCUMENTATION")
        for key, value in yaml.safe_load(text).items():
            doc.setdefault(key, {}).update(value)
    return doc


def compare(documented: Mapping[str, Any], spec: Mapping[str, Any], where: str) -> list[str]:
    wrong = [f"{where}: {name} is documented only" for name in documented.keys() - spec.keys()]
    wrong += [f"{where}: {name} is not documented" for name in spec.keys() - documented.keys()]
    for name in documented.keys() & spec.keys():
        doc, actual = documented[name], spec[name]
        for key, usual in AGREED.items():
            if doc.get(key, usual) != actual.get(key, usual):
                wrong.append(f"{where}: {name}.{key}: {doc.get(key, usual)!r} != {actual.get(key, usual)!r}")
        if not doc.get("description"):
            wrong.append(f"{where}: {name} has no description")
        wrong += compare(doc.get("suboptions") or {}, actual.get("options") or {}, f"{where}.{name}")
    return wrong


@pytest.mark.parametrize("name", MODULES)
def test_a_modules_documentation_is_its_argument_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = module_call(name, monkeypatch)["argument_spec"]
    assert compare(documentation(name).get("options") or {}, spec, name) == []


@pytest.mark.parametrize("name", MODULES)
def test_a_module_has_check_mode_and_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module_call(name, monkeypatch).get("supports_check_mode") is True
    attributes = documentation(name)["attributes"]
    assert attributes["check_mode"]["support"] in {"full", "partial"}
    assert attributes["diff_mode"]["support"] in {"full", "partial", "none", "N/A"}


@pytest.mark.parametrize("name", MODULES)
def test_a_modules_examples_and_return_values_are_whole(name: str) -> None:
    module = importlib.import_module(f"ansible_collections.firstlight.vllm.plugins.modules.{name}")
    doc = documentation(name)
    assert doc["module"] == name
    assert doc["short_description"]
    assert doc["author"]
    examples = yaml.safe_load(module.EXAMPLES)
    options = set(doc.get("options") or {})
    for task in examples:
        used = task.get(f"firstlight.vllm.{name}")
        assert used is None or isinstance(used, dict), task
        assert set(used or {}) <= options, task
    assert any(f"firstlight.vllm.{name}" in task for task in examples)
    for key, value in (yaml.safe_load(module.RETURN) or {}).items():
        assert value.get("description"), key
        assert value.get("returned"), key
        assert value.get("type"), key
        kinds = {"str": str, "int": int, "float": (int, float), "bool": bool, "list": list, "dict": dict}
        assert "contains" in value or isinstance(value.get("sample"), kinds[value["type"]]), key


@pytest.mark.parametrize("name", MODULES)
def test_options_that_hold_secrets_are_never_logged(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = module_call(name, monkeypatch)["argument_spec"]
    for option, details in spec.items():
        if re.search(r"(api_key|token|password|secrets?)$", option) and details.get("type") != "bool":
            assert details.get("no_log") is True, option
