"""An installer's failure is told with its cause and a remedy."""

from __future__ import annotations

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_failure import explain, redact


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("error: Failed to install: torch\n  Caused by: No space left on device (os error 28)", "disk-full"),
        ("  Failed to download `idna==3.10`\n  Hash mismatch for `idna==3.10`", "hash-mismatch"),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.", "hash-mismatch"),
        (
            "  Caused by: invalid peer certificate: UnknownIssuer",
            "certificate-unknown",
        ),
        (
            "Caused by: HTTP status client error (401 Unauthorized)",
            "index-denied",
        ),
        ("  Caused by: error sending request for url (https://x/)\n  Caused by: dns error", "network"),
        ("  Caused by: tcp connect error: Connection refused (os error 111)", "network"),
        ("No solution found\nBecause vllm was not found in the package registry", "package-missing"),
        ("Because vllm was not found in the provided package locations", "package-missing"),
        ("error: Failed to build `flash-attn==2.8.3`\n  nvcc was not found.", "nvcc-missing"),
        (
            "Failed to build `flash-attn`\n c++: fatal error: Killed signal terminated program",
            "out-of-memory",
        ),
        ("error: Failed to build `flash-attn==2.8.3`\n  error: unknown type", "build-failed"),
        ("hint: torch has no wheels with a matching Python ABI tag (e.g., `cp315`)", "platform-unsupported"),
        ("error: failed to create directory `/opt/x`: Permission denied (os error 13)", "permission-denied"),
        ("error: something new", "install-failed"),
    ],
)
def test_the_cause_is_named(output: str, kind: str) -> None:
    error = explain(output, 1, doing="vLLM", root="/opt/firstlight", free="0.1 GiB")
    assert error.kind == kind
    assert error.fix
    assert output.splitlines()[-1].strip() in error.why


def test_a_killed_installer_ran_out_of_memory() -> None:
    assert explain("", -9, doing="vLLM", root="/opt", free="9 GiB").kind == "out-of-memory"


def test_a_full_disk_says_where_and_how_much_is_left() -> None:
    error = explain("No space left on device", 1, doing="vLLM", root="/opt/firstlight", free="0.1 GiB")
    assert "/opt/firstlight" in error.fix
    assert "0.1 GiB" in error.fix


def test_only_the_end_of_a_long_output_is_kept() -> None:
    error = explain("\n".join(f"line {n}" for n in range(1000)), 1, doing="vLLM", root="/opt", free="1 GiB")
    assert "line 999" in error.why
    assert "line 900" not in error.why


def test_passwords_in_urls_are_not_shown() -> None:
    text = "Failed to fetch https://user:s3cret@index.example/simple/torch/"
    assert redact(text) == "Failed to fetch https://***@index.example/simple/torch/"
    assert "s3cret" not in explain(text, 1, doing="x", root="/", free="").message
