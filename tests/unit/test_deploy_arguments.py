"""Bad arguments of `deploy.run` are refused by name before anything starts."""

from __future__ import annotations

import contextlib
import datetime
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support_deploy import build_collection, hosts

import deploy
from deploy import arguments, environment


@pytest.fixture(scope="module", autouse=True)
def _collection(tmp_path_factory: pytest.TempPathFactory) -> None:
    root = build_collection(tmp_path_factory.mktemp("collections"))
    patch = pytest.MonkeyPatch()
    patch.setattr(environment, "collections_root", lambda: root)
    yield
    patch.undo()


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"playbook": "sight"}, deploy.PlaybookError, "there is no 'sight'. Fix: Give one of mended, rescued"),
        ({"playbook": "../site"}, deploy.PlaybookError, "there is no '../site'"),
        ({"playbook": None}, deploy.ArgumentError, "playbook: expected str, found None"),
        ({"inventory": "no/such/file.yml"}, deploy.InventoryError, "inventory: '/.*/no/such/file.yml' does not exist"),
        ({"inventory": ""}, deploy.InventoryError, "inventory: .* does not exist"),
        ({"inventory": []}, deploy.InventoryError, "neither a path"),
        ({"inventory": [3]}, deploy.InventoryError, "3 is not a path"),
        ({"inventory": {}}, deploy.InventoryError, "expected a mapping of groups"),
        ({"inventory": {"all": ["h1"]}}, deploy.InventoryError, "group 'all' is .'h1'., not a mapping"),
        ({"inventory": {"all": {"hosts": ["h1"]}}}, deploy.InventoryError, "all.hosts is .'h1'., not a mapping"),
        ({"inventory": {"all": {"h1": {}}}}, deploy.InventoryError, "has a key 'h1'.*Put hosts under all.hosts"),
        ({"inventory": {"all": {"children": {"gpu": 3}}}}, deploy.InventoryError, "group 'gpu' is 3"),
        ({"inventory": "all:\n  hosts: ["}, deploy.InventoryError, "the text is not YAML"),
        ({"inventory": "one\ntwo"}, deploy.InventoryError, "expected a mapping of groups, found 'one two'"),
        ({"extravars": "no/such.yml"}, deploy.ExtraVarsError, "the file '/.*/no/such.yml' does not exist"),
        ({"extravars": 3}, deploy.ExtraVarsError, "3 is neither a mapping nor the path"),
        ({"extravars": [3]}, deploy.ExtraVarsError, "3 is neither a mapping nor the path"),
        ({"extravars": {"a-b": 1}}, deploy.ExtraVarsError, "'a-b' is no name of a variable"),
        ({"extravars": {3: 1}}, deploy.ExtraVarsError, "3 is no name of a variable"),
        ({"extravars": {"a": {1, 2}}}, deploy.ExtraVarsError, r"a \(set\) is not JSON-able"),
        ({"extravars": {"a": math.nan}}, deploy.ExtraVarsError, r"a \(float\) is not JSON-able"),
        ({"extravars": {"a": [datetime.datetime.min]}}, deploy.ExtraVarsError, r"a \(list\) is not JSON-able"),
        ({"limit": " "}, deploy.ArgumentError, "limit: ' ' names no host"),
        ({"limit": "a\nb"}, deploy.ArgumentError, "names no host"),
        ({"timeout": -1}, deploy.ArgumentError, "timeout: -1 is not a number of seconds above 0"),
        ({"timeout": 0}, deploy.ArgumentError, "timeout: 0"),
        ({"timeout": math.inf}, deploy.ArgumentError, "timeout: inf"),
        ({"timeout": "5"}, deploy.ArgumentError, "timeout: '5'"),
        ({"verbosity": 6}, deploy.ArgumentError, "verbosity: 6 is not a whole number from 0 to 5"),
        ({"verbosity": True}, deploy.ArgumentError, "verbosity: True"),
        ({"forks": 0}, deploy.ArgumentError, "forks: 0"),
        ({"check": "yes"}, deploy.ArgumentError, "check: expected bool, found 'yes'"),
    ],
)
def test_a_bad_argument_is_refused_by_name(changed: dict[str, object], error: type, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        deploy.run(**{"inventory": hosts("h1"), **changed})  # type: ignore[arg-type]
    assert isinstance(caught.value, deploy.DeployError)
    assert isinstance(caught.value, ValueError)


def test_the_value_of_a_bad_variable_is_not_repeated_for_it_may_be_a_secret() -> None:
    with pytest.raises(deploy.ExtraVarsError) as caught:
        arguments.check_extravars({"key": {"hunter2"}})
    assert "hunter2" not in str(caught.value)


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(deploy.ExtraVarsError, match="not JSON-able"):
        arguments.check_extravars({"a": loop})


def test_inventories_of_every_kind_are_understood(tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("all:\n")
    assert arguments.check_inventory(None) == ((), None)
    assert arguments.check_inventory(file) == ((str(file),), None)
    assert arguments.check_inventory([str(file), tmp_path]) == ((str(file), str(tmp_path)), None)
    assert arguments.check_inventory("gpu1,gpu2") == (("gpu1,gpu2",), None)
    sources, inline = arguments.check_inventory("all:\n  hosts:\n    gpu1:\n")
    assert sources == ()
    assert json.loads(inline or b"") == {"all": {"hosts": {"gpu1": None}}}


def test_mappings_become_json_paths_become_text_and_nothing_becomes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "v.yml"
    file.write_text("a: 1\n")
    got = arguments.check_extravars([{"a": tmp_path, "b": {"c": (1, 2)}}, file, {}])
    assert got == (json.dumps({"a": str(tmp_path), "b": {"c": [1, 2]}}).encode(), file)
    assert arguments.check_extravars(None) == ()
    assert arguments.check_extravars({}) == ()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


names = st.text("abcz_09", min_size=1, max_size=8).filter(str.isidentifier)


@given(st.dictionaries(names, json_values, min_size=1, max_size=3))
def test_every_json_able_mapping_arrives_unchanged(values: dict[str, object]) -> None:
    (content,) = arguments.check_extravars(values)
    assert isinstance(content, bytes)
    assert json.loads(content) == values


@given(st.one_of(st.text(), st.integers(), st.binary(), st.lists(st.text()), json_values))
def test_no_argument_brings_out_an_undocumented_error(value: object) -> None:
    for check in (arguments.check_inventory, arguments.check_extravars):
        with contextlib.suppress(deploy.ArgumentError):
            check(value)  # type: ignore[operator]
