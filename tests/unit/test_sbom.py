"""`firstlight sbom`: the locks as CycloneDX."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy import cli

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "roles" / "vllm_install" / "files" / "locks"


def bill(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert cli.main(["sbom", *argv]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("name", ["cuda-0.20.1", "cpu-0.20.1", "cpu-0.26.0"])
def test_every_package_of_the_lock_and_the_installer_stand_in_it(capsys: pytest.CaptureFixture[str], name: str) -> None:
    found = bill(capsys, name)
    assert found["bomFormat"] == "CycloneDX"
    text = (LOCKS / f"{name}.txt").read_text() + (LOCKS / "uv.txt").read_text()
    pins = set(re.findall(r"(?m)^([a-z0-9-]+)(?:\[[^\]]*\])?==([^\s;]+)", text))
    assert {(part["name"], part["version"]) for part in found["components"]} == pins
    assert all(part["purl"].startswith(f"pkg:pypi/{part['name']}@") for part in found["components"])
    listed = {prop["value"] for part in found["components"] for prop in part["properties"]}
    assert listed == set(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))


def test_the_reference_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    found = bill(capsys)
    assert found["metadata"]["component"]["name"] == "firstlight-cuda"
    assert "pkg:pypi/vllm@0.20.1" in {part["purl"] for part in found["components"]}
    (root,) = [entry for entry in found["dependencies"] if entry["ref"] == "firstlight"]
    assert len(root["dependsOn"]) == len(found["components"])


def test_it_can_be_written_to_a_file(tmp_path: Path) -> None:
    assert cli.main(["sbom", "cpu-0.20.1", "--output", str(tmp_path / "bom.json")]) == 0
    assert json.loads((tmp_path / "bom.json").read_text())["specVersion"] == "1.6"


def test_it_is_valid_by_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert cli.main(["sbom", "uv"]) == 0
    try:
        problem = validator.validate_str(capsys.readouterr().out)
    except Exception as error:
        if "Missing" not in type(error).__name__:
            raise
        pytest.skip("the library's validator is not installed")
    assert problem is None


def test_an_unknown_lock_is_named_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sbom", "rocm-1.0"]) == 2
    assert "cuda-0.20.1" in capsys.readouterr().err


def test_a_lock_without_hashes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lock.txt").write_text("vllm==0.20.1\n")
    assert cli.main(["sbom", str(tmp_path / "lock.txt")]) == 2
    assert "--hash=sha256" in capsys.readouterr().err
