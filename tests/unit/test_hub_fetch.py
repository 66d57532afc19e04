"""Fetching a pinned revision. A stand-in for huggingface_hub answers; the program that asks it is the real one."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.hub_fetch import Snapshot, check, fetch, is_whole

COMMIT = "0123456789abcdef" * 2 + "01234567"
SECRET = "hf_0123456789abcdefghijklmnop"

# What hub_child uses of huggingface_hub, over a folder instead of a network. Each call is noted.
STANDIN = """\
import fnmatch, hashlib, json, os, pathlib, shutil, sys
HUB = pathlib.Path(r"{hub}")
class GatedRepoError(Exception): pass
class RepositoryNotFoundError(Exception): pass
class LocalEntryNotFoundError(Exception): pass
def note(**what):
    with (HUB.parent / "calls").open("a") as log: log.write(json.dumps(what) + "\\n")
def fault():
    path = HUB.parent / "fault"
    if path.exists(): raise globals()[path.read_text()]("server said: no, token {secret}")
class Item:
    def __init__(self, path):
        data = path.read_bytes()
        self.rfilename, self.size = str(path.relative_to(HUB)), len(data)
        self.lfs = {{"sha256": hashlib.sha256(data).hexdigest()}} if path.suffix == ".safetensors" else None
class HfApi:
    def __init__(self, endpoint=None, token=None): note(api=endpoint, token=token)
    def model_info(self, repo, revision, files_metadata):
        fault()
        items = [Item(path) for path in sorted(HUB.rglob("*")) if path.is_file()]
        return type("Info", (), {{"sha": revision, "siblings": items}})
def snapshot_download(repo, revision, local_dir, allow_patterns, token, endpoint, max_workers):
    note(argv=sys.argv, environ=dict(os.environ), files=allow_patterns)
    for name in allow_patterns:
        to = pathlib.Path(local_dir, name)
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists():
            note(sent=name)
            shutil.copy(HUB / name, to)
            if (HUB.parent / "corrupt").exists(): to.write_bytes(to.read_bytes()[:-1] + b"?")
class utils:
    @staticmethod
    def filter_repo_objects(names, allow_patterns, ignore_patterns):
        fits = lambda name, patterns: any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
        names = [name for name in names if not allow_patterns or fits(name, allow_patterns)]
        return [name for name in names if not fits(name, ignore_patterns or [])]
sys.modules["huggingface_hub"] = sys.modules[__name__]
sys.modules["huggingface_hub.utils"] = utils
"""


class Hub:
    """The stand-in, a Python that has it, and a request for its repository."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "hub"
        self.files.mkdir()
        for name, text in (("config.json", "{}"), ("model.safetensors", "weights"), ("original/big.pth", "old")):
            (self.files / name).parent.mkdir(exist_ok=True)
            (self.files / name).write_text(text)
        (folder / "standin.py").write_text(STANDIN.format(hub=self.files, secret=SECRET))
        # a Python in which the stand-in is there before the program starts
        python = folder / "python"
        python.write_text(
            f"#!{sys.executable} -IS\n"
            f"import sys; sys.path.insert(0, {str(folder)!r}); import standin\n"
            "sys.argv = sys.argv[2:]; exec(compile(sys.argv[1], 'hub_child', 'exec'), {'__name__': '__main__'})\n"
        )
        python.chmod(0o755)
        self.snapshot = Snapshot(
            repo="Owner/Name-1.0",
            revision=COMMIT,
            root=str(folder / "models"),
            python=str(python),
            ignore=("original/*",),
        )

    @property
    def calls(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in (self.folder / "calls").read_text().splitlines()]

    @property
    def sent(self) -> list[object]:
        return [call["sent"] for call in self.calls if "sent" in call]


@pytest.fixture
def hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path)


def test_a_revision_is_fetched_once_into_a_folder_of_its_own(hub: Hub) -> None:
    assert not is_whole(hub.snapshot)
    assert fetch(hub.snapshot) == {"config.json": 2, "model.safetensors": 7}
    assert hub.snapshot.folder.name == "Owner--Name-1.0@01234567"
    assert is_whole(hub.snapshot)
    assert not (hub.snapshot.folder / "original").exists()


def test_an_interrupted_fetch_goes_on_where_it_was(hub: Hub) -> None:
    hub.snapshot.folder.mkdir(parents=True)
    (hub.snapshot.folder / "config.json").write_text("{}")
    fetch(hub.snapshot)
    assert hub.sent == ["model.safetensors"]


@pytest.mark.parametrize("damage", ["missing", "shorter", "marker"])
def test_a_damaged_folder_is_not_whole_and_is_mended(hub: Hub, damage: str) -> None:
    fetch(hub.snapshot)
    weights = hub.snapshot.folder / "model.safetensors"
    if damage == "missing":
        weights.unlink()
    elif damage == "shorter":
        weights.write_text("weigh")
    else:
        (hub.snapshot.folder / ".firstlight.json").write_text("{")
    assert not is_whole(hub.snapshot)
    if damage == "shorter":
        # the size differs from the hub's list: the file is removed, and the next run fetches it
        with pytest.raises(FirstlightError):
            fetch(hub.snapshot)
    fetch(hub.snapshot)
    assert is_whole(hub.snapshot)


def test_a_file_that_is_not_what_the_hub_lists_is_removed(hub: Hub) -> None:
    (hub.folder / "corrupt").touch()
    with pytest.raises(FirstlightError) as caught:
        fetch(replace(hub.snapshot, allow=("*.safetensors",)))
    assert caught.value.kind == "hash-mismatch"
    assert not (hub.snapshot.folder / "model.safetensors").exists()
    assert not is_whole(hub.snapshot)


def test_other_patterns_are_another_request(hub: Hub) -> None:
    fetch(hub.snapshot)
    assert not is_whole(replace(hub.snapshot, ignore=()))


def test_the_token_is_in_no_argument_no_environment_and_no_file(hub: Hub) -> None:
    fetch(replace(hub.snapshot, token=SECRET))
    (call,) = [call for call in hub.calls if "argv" in call]
    assert SECRET not in json.dumps(call)
    assert {call["token"] for call in hub.calls if "token" in call} == {SECRET}, "but the hub gets it"
    kept = [path for path in hub.snapshot.folder.rglob("*") if path.is_file()]
    assert all(SECRET not in path.read_text() for path in kept)
    assert SECRET not in repr(replace(hub.snapshot, token=SECRET))


def test_a_token_on_the_host_is_not_used(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    fetch(hub.snapshot)
    assert {call["token"] for call in hub.calls if "token" in call} == {False}
    assert SECRET not in json.dumps(hub.calls)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("GatedRepoError", "gated-repo"),
        ("RepositoryNotFoundError", "repo-not-found"),
        ("LocalEntryNotFoundError", "hub-unreachable"),
        ("ValueError", "hub-failed"),
    ],
)
def test_a_refusal_is_told_by_its_cause_and_without_the_token(hub: Hub, error: str, kind: str) -> None:
    if error == "ValueError":
        (hub.folder / "standin.py").write_text((hub.folder / "standin.py").read_text() + "ValueError = ValueError\n")
    (hub.folder / "fault").write_text(error)
    with pytest.raises(FirstlightError) as caught:
        fetch(replace(hub.snapshot, token=SECRET))
    assert caught.value.kind == kind
    assert caught.value.fix
    assert SECRET not in caught.value.message


def test_a_full_disk_is_seen_before_the_fetch(hub: Hub) -> None:
    with (hub.files / "huge.bin").open("wb") as handle:
        os.truncate(handle.fileno(), 1)
    standin = hub.folder / "standin.py"
    standin.write_text(standin.read_text().replace("len(data)", "10**18"))
    with pytest.raises(FirstlightError) as caught:
        fetch(hub.snapshot)
    assert caught.value.kind == "disk-full"
    assert not hub.sent


def test_a_python_without_the_hub_client_is_told(hub: Hub) -> None:
    with pytest.raises(FirstlightError) as caught:
        fetch(replace(hub.snapshot, python=sys.executable))
    assert caught.value.kind == "hub-client-missing"


def test_a_python_that_is_not_there_is_told(hub: Hub) -> None:
    with pytest.raises(FirstlightError) as caught:
        fetch(replace(hub.snapshot, python="/nowhere/python"))
    assert caught.value.kind == "python-missing"


def test_offline_asks_nobody(hub: Hub) -> None:
    with pytest.raises(FirstlightError) as caught:
        fetch(replace(hub.snapshot, offline=True))
    assert caught.value.kind == "offline-incomplete"
    assert not (hub.folder / "calls").exists()


@pytest.mark.parametrize("revision", ["main", "v1.0", "", COMMIT[:8], COMMIT.upper(), COMMIT + "0", COMMIT + "\n"])
def test_what_is_not_a_commit_is_refused(hub: Hub, revision: str) -> None:
    with pytest.raises(FirstlightError) as caught:
        check(replace(hub.snapshot, revision=revision))
    assert caught.value.kind == "revision-not-pinned"
    assert "git ls-remote" in caught.value.fix


@pytest.mark.parametrize("repo", ["", "name", "../etc/passwd", "a/b/c", "a/..", "a b/c", "-x/y", "a/b\n", "a/b;c"])
def test_what_is_not_a_repository_is_refused(hub: Hub, repo: str) -> None:
    with pytest.raises(FirstlightError) as caught:
        check(replace(hub.snapshot, repo=repo))
    assert caught.value.kind == "repo-invalid"


def test_the_digest_is_of_the_whole_file(tmp_path: Path) -> None:
    from ansible_collections.firstlight.vllm.plugins.module_utils.hub_child import sha256  # noqa: PLC0415

    (tmp_path / "f").write_bytes(b"x" * (2**24 + 1))
    assert sha256(str(tmp_path / "f")) == hashlib.sha256(b"x" * (2**24 + 1)).hexdigest()
