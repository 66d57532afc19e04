"""``firstlight sbom``: what is installed on a host, as CycloneDX, read from the hash locks."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.venv_plan import Pin, parse_lock

from deploy import environment
from deploy.errors import ArgumentError, InstallationError

if TYPE_CHECKING:
    from cyclonedx.model.bom import Bom

LOCKS = Path("roles", "vllm_install", "files", "locks")
DEFAULT = "cuda-0.20.1"
UV = "uv"  # the installer is put on hosts, too

_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")
_EPILOG = """The list is that of the locks: every package with its exact version and the SHA-256 of each of its
published files, the installer uv included. It does not tell what a site adds to them.

exit status: 0 it was written; 1 the library for it is missing; 2 there is no such lock."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the command line."""
    parser = subparsers.add_parser(
        "sbom",
        help="list what is installed on a host as CycloneDX JSON, from the hash lock",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "lock", metavar="LOCK", nargs="?", default=DEFAULT, help="a lock's name or path (default %(default)s)"
    )
    parser.add_argument("--output", "-o", metavar="FILE", help="write it there instead of standard output")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Write the list; return the exit status."""
    path = lock_path(args.lock)
    uv = lock_path(UV)
    pins = [pin for each in (path, uv) for pin in _read(each)]
    text = render(path.stem, pins)
    if args.output:
        try:
            Path(args.output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"--output: {error}.", "Give a path that can be written.") from error
    else:
        sys.stdout.write(text)
    return 0


def lock_path(name: str) -> Path:
    """The file of a lock.

    Raises:
        ArgumentError: there is none by this name.
    """
    folder = environment.collections_root() / environment.COLLECTION / LOCKS
    path = Path(name) if "/" in name or name.endswith(".txt") else folder / f"{name}.txt"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in folder.glob("*.txt") if each.stem != UV))
        raise ArgumentError(f"LOCK: there is no {name!r}.", f"Give one of {known}, or the path of a lock.")
    return path


def _read(path: Path) -> list[Pin]:
    try:
        return parse_lock(path.read_text(encoding="utf-8"), str(path))
    except FirstlightError as error:
        raise ArgumentError(f"LOCK: {error.where}: {error.what}", error.fix) from error


def render(name: str, pins: list[Pin]) -> str:
    """The list as CycloneDX 1.6 JSON, checked against its schema's rules by the library.

    Args:
        name: what is installed, for instance ``cuda-0.20.1``.
        pins: its packages.

    Raises:
        InstallationError: the library is missing.
    """
    try:
        output = importlib.import_module("cyclonedx.output")
        schema = importlib.import_module("cyclonedx.schema")
    except ModuleNotFoundError as error:
        raise InstallationError(
            "cyclonedx-python-lib is not installed.", f"Run `{sys.executable} -m pip install 'firstlight[sbom]'`."
        ) from error
    writer = output.make_outputter(bill(name, pins), schema.OutputFormat.JSON, schema.SchemaVersion.V1_6)
    text: str = writer.output_as_string(indent=2)
    return text + "\n"


def bill(name: str, pins: list[Pin]) -> Bom:
    """The list in the library's own terms: the environment, which depends on each of its packages."""
    from cyclonedx.model import HashAlgorithm, HashType, Property  # noqa: PLC0415 - an extra
    from cyclonedx.model.bom import Bom  # noqa: PLC0415
    from cyclonedx.model.component import Component, ComponentType  # noqa: PLC0415
    from packageurl import PackageURL  # noqa: PLC0415

    platform, _, version = name.partition("-")
    root = Component(
        name=f"firstlight-{platform}", version=version or None, type=ComponentType.APPLICATION, bom_ref="firstlight"
    )
    bom = Bom()
    bom.metadata.component = root
    components = []
    for pin in pins:
        url = PackageURL("pypi", None, pin.name, pin.version)
        digests = sorted(set(_HASH.findall(pin.text)))
        components.append(
            Component(
                name=pin.name,
                version=pin.version,
                type=ComponentType.LIBRARY,
                bom_ref=str(url),
                purl=url,
                # a component has one digest; a package has one for each of its files, any of which may be installed
                hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digests[0])] if len(digests) == 1 else None,
                properties=[Property(name="firstlight:sha256", value=digest) for digest in digests],
            )
        )
    for component in components:
        bom.components.add(component)
    bom.register_dependency(root, components)
    return bom
