"""Telling why pip or uv failed, from what it wrote: one cause, one remedy, the decisive lines kept."""

from __future__ import annotations

import re
import signal

from .errors import FirstlightError

_TAIL_LINES = 25
_CREDENTIALS = re.compile(r"(?<=://)[^/\s@]+@")

# First match wins: the most particular cause stands first. Text, kind, what, fix.
_CAUSES: tuple[tuple[str, str, str, str], ...] = (
    (
        r"No space left on device|os error 28\b|Disk quota exceeded",
        "disk-full",
        "the disk is full.",
        "Free space on the file system of {root} ({free} free; an install takes 6 GiB for CPU and about twice that"
        " for CUDA), or set vllm_install_root to a larger one.",
    ),
    (
        r"[Hh]ash mismatch|DO NOT MATCH THE HASHES|hashes are required in --require-hashes|No hashes were provided",
        "hash-mismatch",
        "the index handed out a file that the lock does not know.",
        "Do not install it. Find out what changed the file (a mirror, a proxy, a local wheel), or make a lock for your"
        " index.",
    ),
    (
        r"invalid peer certificate|UnknownIssuer|CERTIFICATE_VERIFY_FAILED|self.signed certificate",
        "certificate-unknown",
        "the index's TLS certificate is not trusted on this host.",
        "Install your authority's certificate on the host and set vllm_install_environment:"
        " {{SSL_CERT_FILE: /etc/ssl/certs/ca-certificates.crt}}.",
    ),
    (
        r"40[13] (?:Forbidden|Unauthorized)|status code 40[13]|401 Client Error|403 Client Error",
        "index-denied",
        "the index refused access.",
        "Give the host credentials for it in /root/.netrc, or set vllm_install_index_url to an index open to it.",
    ),
    (
        r"[Nn]etwork connectivity is disabled|dns error|error sending request|[Cc]onnection refused|[Cc]onnection reset"
        r"|timed out|Temporary failure in name resolution|Failed to fetch|Network is unreachable|Max retries exceeded",
        "network",
        "the package index could not be reached.",
        "Check the host's network and proxy settings, set vllm_install_index_url to an index that the host reaches,"
        " or install from a wheel folder: vllm_install_offline: true with vllm_install_find_links.",
    ),
    (
        r"nvcc was not found|CUDA_HOME environment variable is not set|nvcc: not found|No such file.*nvcc",
        "nvcc-missing",
        "flash-attn is built from source and there is no CUDA compiler.",
        "Install the CUDA 13.0 toolkit, name a wheel folder in vllm_install_find_links, or set"
        " vllm_install_flash_attn: none.",
    ),
    (
        r"Killed\b|signal: 9|SIGKILL|cc1plus: out of memory|ninja: build stopped.*Killed",
        "out-of-memory",
        "a step was killed, most likely for lack of memory.",
        "Set vllm_install_max_jobs: 1, or free memory on the host.",
    ),
    (
        r"no wheels? with a matching|doesn't have a source distribution or wheel for the current platform"
        r"|only has wheels for the following|is not a supported wheel on this platform|requires-python|Requires-Python",
        "platform-unsupported",
        "a package has no file for this Python or this architecture.",
        "Use CPython 3.10 to 3.13 on x86_64 or aarch64: set vllm_install_python to such an interpreter.",
    ),
    (
        r"was not found in the (?:package registry|provided package locations)|there is no version of"
        r"|No matching distribution|Could not find a version",
        "package-missing",
        "the index or wheel folder lacks a package of the lock.",
        "Use an index that has every file of the lock, or add the missing one to the wheel folder.",
    ),
    (
        r"Permission denied|Read-only file system|os error 13\b|os error 30\b",
        "permission-denied",
        "a folder cannot be written to.",
        "Run with become: true, and put vllm_install_root on a writable file system.",
    ),
    (
        r"Failed to build|error: command .* failed|Build backend failed",
        "build-failed",
        "a package could not be built.",
        "Read the compiler's message above; a wheel folder in vllm_install_find_links avoids the build.",
    ),
)


def redact(text: str) -> str:
    """Take user names and passwords out of URLs."""
    return _CREDENTIALS.sub("***@", text)


def explain(output: str, status: int, *, doing: str, root: str, free: str) -> FirstlightError:
    """Turn an installer's failure into an error that says what to do.

    Args:
        output: what it wrote, stdout and stderr together.
        status: its exit status, negative for a signal.
        doing: the step, like ``vLLM and 174 packages``.
        root: the folder that it installed under.
        free: the space left there, like ``0.3 GiB``.
    """
    clean = redact(output).strip()
    tail = "\n".join(clean.splitlines()[-_TAIL_LINES:])
    kind, what, fix = "install-failed", f"the installer ended with status {status}.", "Read its message above."
    if status == -signal.SIGKILL:
        clean += "\nKilled"
    for pattern, found_kind, found_what, found_fix in _CAUSES:
        if re.search(pattern, clean):
            kind, what, fix = found_kind, found_what, found_fix.format(root=root, free=free)
            break
    return FirstlightError(what, where=f"installing {doing}", why=f"It said:\n{tail}\n", fix=fix, kind=kind)
