"""The reverse proxy on its host: nginx from the distribution, one site, a certificate.

nginx may serve other sites as well. Only firstlight's own files and the distribution's untouched default site are
dealt with, and a configuration that nginx refuses is taken back before anything is reloaded.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .errors import FirstlightError
from .host_command import CommandResult, Runner, run_command
from .processes import Listener, listeners, read_process, wait_until
from .systemd import Systemd

SERVICE = "nginx.service"
PACKAGES = {"nginx": "nginx-light", "openssl": "openssl"}  # program to the package that has it
SELF_SIGNED_DAYS = 825  # the longest that common clients accept
RENEW_BEFORE_S = 30 * 86400
_INSTALL_TIMEOUT_S = 900.0
_COMMAND_TIMEOUT_S = 60.0
_LISTEN_TIMEOUT_S = 15.0
_UNSPECIFIED = {"0.0.0.0", "::"}  # noqa: S104 - compared, not bound
_EVERYBODY = stat.S_IROTH | stat.S_IWOTH


@dataclass(frozen=True)
class Site:
    """What the proxy is to be.

    Attributes:
        text: nginx's configuration of the site.
        address: the IP address that it binds to; port: its TCP port.
        server_name: the name in a self-signed certificate; ``_`` takes the host's own.
        certificate: chain on the host; certificate_key: its key; both empty for a self-signed pair.
    """

    text: str
    address: str
    port: int
    server_name: str = "_"
    certificate: str = ""
    certificate_key: str = ""

    @property
    def self_signed(self) -> bool:
        """Whether the certificate is firstlight's to make."""
        return not self.certificate and not self.certificate_key


@dataclass
class ProxyHost:
    """The host's nginx.

    Attributes:
        etc: its configuration folder.
        run: how programs are run; systemd: the service manager; which: how a program is found;
        listening: who listens on a port. Tests hand in their own.
    """

    etc: Path = Path("/etc/nginx")
    run: Runner = run_command
    systemd: Systemd = field(default_factory=Systemd)
    which: Callable[[str], str | None] = lambda program: shutil.which(program, path="/usr/sbin:/usr/bin:/sbin:/bin")
    listening: Callable[[int], list[Listener]] = listeners
    policy: Path = Path("/usr/sbin/policy-rc.d")

    @property
    def site_file(self) -> Path:
        """Where the site's configuration lies."""
        return self.etc / "conf.d" / "firstlight.conf"

    @property
    def certificate(self) -> Path:
        """The self-signed certificate."""
        return self.etc / "firstlight.crt"

    @property
    def key(self) -> Path:
        """Its key."""
        return self.etc / "firstlight.key"

    def ensure(self, site: Site, *, check: bool) -> list[str]:
        """Bring the proxy to the state asked for.

        Args:
            site: the state.
            check: only tell what would be done.

        Returns:
            What was, or would be, changed, in words; empty when all was as asked for.

        Raises:
            FirstlightError: before anything changed when the host cannot do it; later with nginx's own message and
                the earlier site back in place.
        """
        self._check_files(site)
        self._check_port(site)
        packages = [package for program, package in PACKAGES.items() if not self.which(program)]
        why_certificate = self._why_certificate(site) if site.self_signed else ""
        default = self._default_site(fresh="nginx-light" in packages)
        before = self.current()
        state = self.systemd.show(SERVICE)
        changes = [f"install {package}" for package in packages]
        changes += [f"make a self-signed certificate ({why_certificate})"] if why_certificate else []
        changes += ["take the distribution's default site away"] if default else []
        changes += ["write the site"] if before != site.text else []
        reload = bool(changes) and state.running
        changes += [] if state.running else ["start nginx"]
        changes += [] if state.enabled else ["enable nginx"]
        if check or not changes:
            return changes
        if packages:
            self._install(packages)
        if why_certificate:
            self._make_certificate(site)
        if default:
            with contextlib.suppress(FileNotFoundError):
                self._default_link.unlink()
        self._write_site(site.text, before)
        self.systemd.enable(SERVICE)
        if reload:
            self._require(["systemctl", "reload", SERVICE], "reload-failed", f"see `journalctl -u {SERVICE}`.")
        elif not state.running:
            self.systemd.start(SERVICE)
        self._wait_until_it_listens(site)
        return changes

    def remove(self, *, check: bool) -> list[str]:
        """Take the site and the self-signed pair away; nginx itself and a given certificate stay."""
        found = [path for path in (self.site_file, self.certificate, self.key) if path.exists()]
        if found and not check:
            for path in found:
                path.unlink()
            if self.systemd.show(SERVICE).running:
                self._require(["systemctl", "reload", SERVICE], "reload-failed", f"see `journalctl -u {SERVICE}`.")
        return [f"remove {path}" for path in found]

    def current(self) -> str:
        """The site's configuration as it is; empty when there is none."""
        try:
            return self.site_file.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    def _require(self, argv: list[str], kind: str, fix: str, timeout_s: float = _COMMAND_TIMEOUT_S) -> CommandResult:
        answer = self.run(argv, timeout_s)
        if answer.status != 0:
            raise FirstlightError(
                f"`{' '.join(argv)}` failed: {answer.complaint}", where="host", fix=fix[0].upper() + fix[1:], kind=kind
            )
        return answer

    def _check_files(self, site: Site) -> None:
        for variable, path in (
            ("proxy_certificate", site.certificate),
            ("proxy_certificate_key", site.certificate_key),
        ):
            if path and not Path(path).is_file():
                raise FirstlightError(
                    f"there is no file {path} on the host.",
                    where=variable,
                    fix="Put it there, or set both proxy_certificate and proxy_certificate_key to '' to have a"
                    " self-signed pair made.",
                    kind="certificate-missing",
                )
        key = site.certificate_key
        if key and Path(key).stat().st_mode & _EVERYBODY:
            raise FirstlightError(
                f"the private key {key} is open to every user of the host.",
                where="proxy_certificate_key",
                fix=f"Run `chmod 0600 {key}`.",
                kind="key-open",
            )

    def _check_port(self, site: Site) -> None:
        for listener in self.listening(site.port):
            if not ({listener.address, site.address} & _UNSPECIFIED or listener.address == site.address):
                continue
            process = read_process(listener.pid) if listener.pid else None
            if process is None or process.name != "nginx":
                holder = f"process {process.pid} ({process.command})" if process else "another process"
                raise FirstlightError(
                    f"port {site.port} is held by {holder}.",
                    where="proxy_port",
                    fix="Stop it, or set proxy_port to a free port.",
                    kind="port-taken",
                )

    def _why_certificate(self, site: Site) -> str:
        """Why the self-signed pair has to be made; empty when it is there and good."""
        if not self.certificate.is_file() or not self.key.is_file():
            return "there is none"
        asked = ["openssl", "x509", "-noout", "-in", str(self.certificate)]
        if self.run([*asked, "-checkend", str(RENEW_BEFORE_S)], _COMMAND_TIMEOUT_S).status != 0:
            return "the one there ends within 30 days"
        kind, name = _subject(site)
        option = "-checkip" if kind == "IP" else "-checkhost"
        told = self.run([*asked, option, name], _COMMAND_TIMEOUT_S)
        return "" if "does match" in told.stdout else f"the one there is not for {name}"

    def _make_certificate(self, site: Site) -> None:
        kind, name = _subject(site)
        with tempfile.TemporaryDirectory(dir=self.etc, prefix=".firstlight-") as holder:  # 0700
            made = Path(holder)
            self._require(
                [
                    "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                    "-days", str(SELF_SIGNED_DAYS), "-subj", "/CN=firstlight", "-addext",
                    f"subjectAltName={kind}:{name}", "-keyout", str(made / "key"), "-out", str(made / "crt"),
                ],
                "certificate-failed",
                "set proxy_certificate and proxy_certificate_key to a pair of your own.",
            )  # fmt: skip
            (made / "key").chmod(0o600)
            (made / "crt").chmod(0o644)
            (made / "key").replace(self.key)
            (made / "crt").replace(self.certificate)

    @property
    def _default_link(self) -> Path:
        return self.etc / "sites-enabled" / "default"

    def _default_site(self, *, fresh: bool) -> bool:
        """Whether the distribution's default site is (or, on a fresh install, will be) served on port 80."""
        link = self._default_link
        return fresh or (link.is_symlink() and link.resolve() == (self.etc / "sites-available" / "default").resolve())

    def _install(self, packages: list[str]) -> None:
        fix = "mend the host's package sources, or install nginx-light and openssl by hand."
        apt = ["apt-get", "-q", "-o", "DPkg::Lock::Timeout=120"]
        self._require([*apt, "update"], "packages-unreachable", fix, _INSTALL_TIMEOUT_S)
        with self._services_kept_down():
            install = ["env", "DEBIAN_FRONTEND=noninteractive", *apt, "install", "-y", "--no-install-recommends"]
            self._require([*install, *packages], "install-failed", fix, _INSTALL_TIMEOUT_S)

    @contextlib.contextmanager
    def _services_kept_down(self) -> Iterator[None]:
        """Keep the package from starting its default site (port 80 may be taken, and is nothing that was asked for).

        The policy holds only while this process lives: one that a killed run leaves behind forbids nothing.
        """
        if self.policy.exists():
            yield
            return
        forbid = f"[ ! -d /proc/{os.getpid()} ] || exit 101"
        self.policy.write_text(f"#!/bin/sh\n# firstlight, while it installs nginx\n{forbid}\n")
        self.policy.chmod(0o755)
        try:
            yield
        finally:
            self.policy.unlink()

    def _write_site(self, text: str, before: str) -> None:
        """Put the site in place; take it back when nginx refuses it."""
        _replace(self.site_file, text)
        answer = self.run(["nginx", "-t", "-q"], _COMMAND_TIMEOUT_S)
        if answer.status == 0:
            return
        if before:
            _replace(self.site_file, before)
        else:
            self.site_file.unlink()
        complaint = next((line for line in answer.stderr.splitlines() if "[emerg]" in line), answer.complaint)
        raise FirstlightError(
            f"nginx refuses its configuration: {complaint.partition('[emerg] ')[2] or complaint}",
            where=str(self.site_file),
            why="The site is as it was, and nginx was not reloaded.",
            fix="Correct the certificate, or the other file of nginx that the message names.",
            kind="nginx-refuses",
        )

    def _wait_until_it_listens(self, site: Site) -> None:
        def listens() -> bool:
            addresses = {listener.address for listener in self.listening(site.port)}
            return site.address in addresses

        if not wait_until(listens, _LISTEN_TIMEOUT_S):
            raise FirstlightError(
                f"nginx runs, but nothing listens on {site.address} port {site.port}.",
                where="proxy_address",
                fix=f"See `journalctl -u {SERVICE}` and /var/log/nginx/error.log; the host must have that address.",
                kind="proxy-not-listening",
            )


def _subject(site: Site) -> tuple[str, str]:
    """Kind (``IP`` or ``DNS``) and name that a self-signed certificate is for."""
    if site.server_name != "_":
        return "DNS", site.server_name
    address = ipaddress.ip_address(site.address)
    return ("DNS", os.uname().nodename) if address.is_unspecified else ("IP", str(address))


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.part")  # conf.d/*.conf does not include it
    part.write_text(text, encoding="utf-8")
    part.chmod(0o644)
    part.replace(path)
