"""The guard of a cutover: it lives on the host, so a controller that goes away leaves the host with a server.

From the stop to the commit, a timer waits on the host, and a service is enabled that runs at boot. Either brings
the old server back when nobody has committed: the timer after its time, the service after a power loss. What they
run is one self-contained file made of this package's own modules, for the host's Python alone.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import sys
import zipfile
from pathlib import Path
from typing import Any

from .cutover import UNFINISHED, CutoverStore
from .errors import FirstlightError
from .files import write_atomically
from .host_view import Host
from .release import Layout
from .server_kinds import Wanted
from .server_restore import RestoreOptions, restore
from .systemd import Systemd

_PACKAGE = "firstlight_guard"
_MAIN = f"from {_PACKAGE}.cutover_guard import main\nraise SystemExit(main())\n"
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the same modules make the same file
_SERVICE = """\
[Unit]
Description=Bring back the server that {unit} was to replace, unless the cutover was committed
After=network.target docker.service podman.service nvidia-persistenced.service
ConditionPathExists={record}
StartLimitIntervalSec=3600
StartLimitBurst=5

[Service]
# not oneshot: a server ordered after multi-user.target must not wait for this to end
Type=exec
ExecStart={python} {program} --unit {unit} --state-dir {state_dir} --config-dir {config_dir} --port {port} {more}
Restart=on-failure
RestartSec=60
TimeoutStopSec=10

[Install]
WantedBy=multi-user.target
"""

_TIMER = """\
[Unit]
Description=Wait for the commit of the cutover to {unit}

[Timer]
OnActiveSec={seconds:.0f}s
AccuracySec=1s
"""


class Guard:
    """The guard of one managed unit.

    Args:
        store: the cutover that it watches.
        systemd: the host's service manager.
        config_dir: parent of the unit's configuration, ``/etc/firstlight``.
        unit_dir: where the administrator's units lie.
        python: the host's Python; the one that runs this by default.
    """

    def __init__(
        self,
        store: CutoverStore,
        systemd: Systemd,
        *,
        config_dir: Path = Path("/etc/firstlight"),
        unit_dir: Path = Path("/etc/systemd/system"),
        python: str = sys.executable,
    ) -> None:
        self._store, self._systemd, self._python = store, systemd, python
        self._config_dir = config_dir
        self.service = f"firstlight-guard-{store.unit}.service"
        self.timer = f"firstlight-guard-{store.unit}.timer"
        self._service_file, self._timer_file = unit_dir / self.service, unit_dir / self.timer
        self.program = store.folder / "restore.pyz"

    def arm(self, seconds: float, wanted: Wanted) -> None:
        """Have the host restore the old server by itself after ``seconds``, or at its next boot.

        Raises:
            FirstlightError: systemd refused.
        """
        self.write_program()
        service = _SERVICE.format(
            unit=self._store.unit,
            record=self._store.path,
            python=self._python,
            program=self.program,
            state_dir=self._store.folder.parent,
            config_dir=self._config_dir,
            port=wanted.port,
            more=f"--tolerated-gpu-mib {wanted.tolerated_gpu_mib} --gpus {' '.join(map(str, wanted.gpus))}".strip(),
        )
        write_atomically(self._service_file, service, 0o644)
        write_atomically(self._timer_file, _TIMER.format(unit=self._store.unit, seconds=seconds), 0o644)
        self._systemd.daemon_reload()
        self._systemd.enable(self.service)
        self._systemd.restart(self.timer)

    def disarm(self) -> bool:
        """Take the guard away; returns whether it was there. A guard that is running is let finish."""
        if not (self._service_file.exists() or self._timer_file.exists()):
            return False
        if self._timer_file.exists():
            self._systemd.stop(self.timer)
        if self._service_file.exists():
            self._systemd.disable(self.service)
        for path in (self._timer_file, self._service_file, self.program):
            path.unlink(missing_ok=True)
        self._systemd.daemon_reload()
        return True

    def write_program(self) -> None:
        """Write the self-contained program; it is only replaced when it differs."""
        text = build_program()
        with contextlib.suppress(FileNotFoundError):
            if self.program.read_bytes() == text:
                return
        self.program.parent.mkdir(parents=True, exist_ok=True)
        fresh = self.program.with_suffix(".new")
        fresh.write_bytes(text)
        fresh.chmod(0o700)
        fresh.replace(self.program)


def build_program() -> bytes:
    """Make the zip file that the host's Python runs, out of this module and all that it imports of its package."""
    package, _, this = __name__.rpartition(".")
    sources: dict[str, str] = {}
    wanted = [this]
    while wanted:
        name = wanted.pop()
        if name not in sources:
            module: Any = sys.modules[f"{package}.{name}"]
            # by the loader, since Ansible runs modules out of a zip file too
            sources[name] = module.__spec__.loader.get_source(module.__name__)
            wanted += _imports(sources[name])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        _add(archive, "__main__.py", _MAIN)
        _add(archive, f"{_PACKAGE}/__init__.py", "")
        for name, source in sorted(sources.items()):
            _add(archive, f"{_PACKAGE}/{name}.py", source)
    return buffer.getvalue()


def _imports(source: str) -> list[str]:
    """Names of the modules beside it that a module imports, relatively as all of this package do."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found += [node.module] if node.module else [alias.name for alias in node.names]
    return found


def _add(archive: zipfile.ZipFile, name: str, text: str) -> None:
    archive.writestr(zipfile.ZipInfo(name, _EPOCH), text)


def main(arguments: list[str] | None = None) -> int:
    """Restore the old server if the cutover is unfinished; what the guard's service runs."""
    parser = argparse.ArgumentParser(description="Bring back the server that an unfinished cutover stopped.")
    parser.add_argument("--unit", required=True)
    parser.add_argument("--state-dir", type=Path, required=True)
    parser.add_argument("--config-dir", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--tolerated-gpu-mib", type=int, default=512)
    parser.add_argument("--gpus", type=int, nargs="*", default=[])
    given = parser.parse_args(arguments)
    host = Host()
    store = CutoverStore(given.unit, given.state_dir)
    guard = Guard(store, host.systemd, config_dir=given.config_dir)
    wanted = Wanted(
        given.port,
        gpus=tuple(given.gpus),
        own_unit=f"{store.unit}.service",
        tolerated_gpu_mib=given.tolerated_gpu_mib,
    )
    options = RestoreOptions(wanted, Layout(store.unit, given.config_dir, given.state_dir))
    try:
        result = restore(host, store, guard.disarm, options, note="nobody committed the cutover in time")
    except FirstlightError as error:
        print(error.message, file=sys.stderr)
        return 1
    if result["phase"] not in UNFINISHED:
        guard.disarm()
    print(f"{result['reason']} (phase {result['phase'] or 'none'})")
    return 0
