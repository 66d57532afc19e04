"""The program that talks to a model hub, run by the Python of the vLLM environment, which has huggingface_hub.

It reads one JSON object from stdin (the token comes that way: argv and environment can be read by others) and
writes one as its last line. Files that are there already are kept, one half fetched is continued.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import sys
from typing import Any


def sha256(path: str) -> str:
    """Digest of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as handle:  # noqa: PTH123 -- this file is handed over as text and stays plain
        while chunk := handle.read(1 << 24):
            digest.update(chunk)
    return digest.hexdigest()


def fetch(order: dict[str, Any]) -> dict[str, Any]:
    """List the files of the revision, fetch them, and check sizes and digests against the hub's list."""
    hub: Any = importlib.import_module("huggingface_hub")
    utils: Any = importlib.import_module("huggingface_hub.utils")
    token = order["token"] or False  # False: not even a token that lies about on the host
    api = hub.HfApi(endpoint=order["endpoint"] or None, token=token)
    info = api.model_info(order["repo"], revision=order["revision"], files_metadata=True)
    names = set(
        utils.filter_repo_objects(
            [item.rfilename for item in info.siblings],
            allow_patterns=order["allow"] or None,
            ignore_patterns=order["ignore"] or None,
        )
    )
    wanted = [item for item in info.siblings if item.rfilename in names]
    space = os.statvfs(order["dest"])
    present = sum(
        os.path.getsize(path)  # noqa: PTH202
        for path in (os.path.join(order["dest"], item.rfilename) for item in wanted)  # noqa: PTH118
        if os.path.exists(path)  # noqa: PTH110
    )
    needed = sum(item.size or 0 for item in wanted) - present
    free = space.f_bavail * space.f_frsize
    if needed > free:
        return {"error": "DiskFull", "needed": needed, "free": free}
    hub.snapshot_download(
        order["repo"],
        revision=order["revision"],
        local_dir=order["dest"],
        allow_patterns=sorted(names),
        token=token,
        endpoint=order["endpoint"] or None,
        max_workers=order["workers"],
    )
    files = {}
    for item in wanted:
        path = os.path.join(order["dest"], item.rfilename)  # noqa: PTH118
        size = os.path.getsize(path)  # noqa: PTH202
        expected = item.lfs["sha256"] if item.lfs else None
        if (item.size is not None and size != item.size) or (expected and sha256(path) != expected):
            os.unlink(path)  # noqa: PTH108
            return {"error": "Mismatch", "message": item.rfilename}
        files[item.rfilename] = size
    return {"commit": info.sha, "files": files}


def main() -> None:
    """Read the order, do it, answer."""
    order = json.load(sys.stdin)
    try:
        answer = fetch(order)
    except Exception as error:  # whatever it is, the parent tells it in its own words
        status = getattr(getattr(error, "response", None), "status_code", None)
        answer = {"error": type(error).__name__, "message": str(error)[:2000], "status": status}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
