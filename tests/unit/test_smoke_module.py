"""The module `smoke` as Ansible runs it, and what it hands on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.firstlight.vllm.plugins.module_utils import smoke_diagnosis, smoke_evidence, smoke_run
from ansible_collections.firstlight.vllm.plugins.module_utils.errors import FirstlightError
from ansible_collections.firstlight.vllm.plugins.module_utils.smoke_run import Report, SmokeFailure
from ansible_collections.firstlight.vllm.plugins.module_utils.systemd import JournalEntry, Systemd
from ansible_collections.firstlight.vllm.plugins.modules import smoke
from support_fake_vllm import WRONG, serve

RECORDED_DEATH = (
    "(Worker_TP0 pid=1978) ERROR 11-29 22:04:17 [multiproc_executor.py:960] torch.AcceleratorError: CUDA error: an "
    "illegal memory access was encountered"
)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke_run, "_LOOK_AGAIN_S", 0.005)


def call(capsys: pytest.CaptureFixture[str], **options: Any) -> dict[str, Any]:
    """Run the module's entry point and return what it printed for Ansible."""
    arguments = {"model": "m", "samples": 1, "bursts": [2], "prompts": ["is_prime"], **options}
    with patch_module_args(arguments), pytest.raises(SystemExit):
        smoke.main()
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    config = {
        "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 5]},
        "eagle_aux_hidden_state_layer_ids": [2, 6],
        "sliding_window": 2048,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_good_server_gives_a_report_and_changes_nothing(capsys: pytest.CaptureFixture[str], drafter: Path) -> None:
    start = {"ready": True, "ready_s": 91.4, "phases": [{"name": "imports", "seconds": 91.4}], "watch": {}}
    with serve() as fake:
        result = call(capsys, base_url=fake.url, drafter=str(drafter), start=start)
    assert result["changed"] is False
    assert result["verdict"] == "right"
    assert result["acceptance"]["length"] == 11.0
    report = result["report"]
    assert report["answer"] == result["answer"]
    assert report["ready_s"] == 91.4
    assert report["phases"][0]["name"] == "imports"
    assert report["model"] == "m"
    assert report["verified_at"] == result["verified_at"]
    assert "watch" not in report


def test_check_mode_sends_nothing_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with serve() as fake:
        result = call(capsys, base_url=fake.url, drafter="/not/there/yet", _ansible_check_mode=True)
    assert fake.requests == []
    assert result["changed"] is False
    assert result["report"] == {}
    assert "no request was sent" in result["msg"]


def test_a_low_acceptance_fails_with_the_drafters_own_values(capsys: pytest.CaptureFixture[str], drafter: Path) -> None:
    start = {"evidence": {"log_taps": [1, 5], "compile_cache_reused": False, "available_kv_gib": 3.5}}
    with serve(accepted_per_draft=0) as fake:
        result = call(capsys, base_url=fake.url, drafter=str(drafter), start=start)
    assert result["failed"] is True
    failure = result["failure"]
    assert failure["id"] == "drafter-low-acceptance"
    assert set(failure) == {"id", "cause", "remedy", "seen"}
    assert failure["seen"][0] == "taps: the log says (1, 5) and it should say (2, 6)."
    assert any("248070" in seen for seen in failure["seen"])
    assert "Fix:" in result["msg"]
    assert result["firstlight_report"]["acceptance"]["length"] == 1.0


def test_evidence_given_by_hand_wins_over_what_was_read(capsys: pytest.CaptureFixture[str], drafter: Path) -> None:
    with serve(accepted_per_draft=0) as fake:
        result = call(capsys, base_url=fake.url, drafter=str(drafter), evidence={"log_taps": [9], "expected_taps": [9]})
    assert any("(9) as the config asks" in seen for seen in result["failure"]["seen"])


def test_a_warning_reaches_ansible_and_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # where it ends up depends on whether this process has also been a controller
    warned: list[str] = []
    monkeypatch.setattr("ansible.module_utils.basic.AnsibleModule.warn", lambda self, text, **_: warned.append(text))
    with serve(accepted_per_draft=1) as fake:
        result = call(capsys, base_url=fake.url)
    assert any("below 2.5" in warning for warning in warned)
    assert any("below 2.5" in warning for warning in result["report"]["warnings"])


def test_a_wrong_answer_fails_and_the_answer_is_in_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(answers={"is_prime": lambda number: WRONG}) as fake:
        result = call(capsys, base_url=fake.url)
    assert result["failure"]["id"] == "answers-wrong"
    assert result["report"]["answer"] == WRONG


def test_the_key_is_nowhere_in_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    with serve(api_key="canary-2b7e") as fake:
        result = call(capsys, base_url=fake.url, api_key="canary-2b7e")
    assert result["verdict"] == "right"
    result.pop("invocation", None)  # Ansible masks it there by no_log
    assert "canary-2b7e" not in json.dumps(result)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prompts": ["no_such"]}, "no built-in prompt"),
        ({"samples": 0}, "samples"),
        ({"bursts": [0]}, "bursts"),
        ({"base_url": "localhost:1"}, "no base URL"),
        ({"evidence": {"log_taps": "2"}}, "evidence"),
        ({"drafter": "/no/such/folder"}, "cannot be read"),
        ({"min_acceptance_length": 3, "warn_acceptance_length": 2}, "warn_acceptance_length"),
    ],
)
def test_a_bad_option_fails_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str], options: dict[str, Any], says: str
) -> None:
    with serve() as fake:
        result = call(capsys, **{"base_url": fake.url, **options})
    assert result["failed"] is True
    assert says in result["msg"]
    assert "Fix:" in result["msg"]
    assert fake.requests == []


# --- what the drafter's config tells ---------------------------------------------------------------------------


def test_the_taps_that_the_log_must_show_are_one_above_the_layers(drafter: Path) -> None:
    assert smoke_evidence.from_drafter(str(drafter)) == {
        "expected_taps": [2, 6],
        "mask_token_id": 248070,
        "sliding_window": 2048,
    }


def test_the_reference_formula_is_told_beside_the_configured_taps(tmp_path: Path) -> None:
    config = {"num_target_layers": 8, "dflash_config": {"target_layer_ids": [0, 4]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert smoke_evidence.from_drafter(str(tmp_path)) == {"expected_taps": [1, 5], "formula_taps": [2, 6]}


def test_no_drafter_tells_nothing() -> None:
    assert smoke_evidence.from_drafter("") == {}


@pytest.mark.parametrize("text", ["", "[]", "{", "nul"])
def test_an_unreadable_drafter_config_is_told_by_its_path(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(FirstlightError, match=r"config\.json"):
        smoke_evidence.from_drafter(str(tmp_path))


# --- what the journal tells ------------------------------------------------------------------------------------


class Journal(Systemd):
    """A journal of given lines; a stand-in for the host's."""

    def __init__(self, lines: list[str]) -> None:
        self.lines = lines
        self.asked: list[str] = []

    def sync_journal(self) -> None:
        pass

    def journal_lines(
        self, invocation_id: str, after_cursor: str | None = None, *, unit: str | None = None
    ) -> tuple[list[JournalEntry], str | None]:
        self.asked.append(invocation_id)
        return [JournalEntry(0.0, 1, line, "") for line in self.lines], None


def failure_of(kind: str) -> SmokeFailure:
    fault = FirstlightError("it died.", where="load", fix="look.", kind=kind)
    return SmokeFailure(fault, ["HTTP 500"], Report())


def explain(kind: str, lines: list[str]) -> dict[str, Any]:
    return smoke_diagnosis.explain(failure_of(kind), "vllm", "abc", systemd=Journal(lines), sleep=lambda seconds: None)


def test_a_recorded_death_under_load_is_told_with_the_journals_cause() -> None:
    log = (Path(__file__).parent.parent / "data" / "smoke" / "dies-under-load.log").read_text().splitlines()
    told = explain("died-under-load", log)
    assert told["id"] == "cudagraph-replay-fault", told
    assert "It showed in the smoke test: load: it died." in told["cause"]
    assert told["seen"][0].startswith("journal: ")
    assert told["seen"][-1] == "HTTP 500"


def test_a_journal_that_knows_no_cause_leaves_the_smoke_tests_own() -> None:
    told = explain("died-under-load", ["nothing of note"])
    assert told["id"] == "died-under-load"
    assert told["remedy"] == "look."


def test_wrong_answers_are_not_looked_up_in_the_journal() -> None:
    journal = Journal([RECORDED_DEATH])
    told = smoke_diagnosis.explain(failure_of("answers-wrong"), "vllm", systemd=journal, sleep=lambda seconds: None)
    assert told["id"] == "answers-wrong"
    assert journal.asked == []


def test_an_unreadable_journal_is_said_and_hides_nothing() -> None:
    class Broken(Journal):
        def sync_journal(self) -> None:
            raise FirstlightError("no journal", where="journalctl", fix="x")

    told = smoke_diagnosis.explain(
        failure_of("server-reset"), "vllm", "abc", systemd=Broken([]), sleep=lambda seconds: None
    )
    assert told["id"] == "server-reset"
    assert told["seen"][-1] == "the journal could not be read: no journal"
