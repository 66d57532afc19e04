"""The one error that firstlight raises on purpose.

Every message answers four questions in one order: what is wrong, where, why it matters, and how to mend it.
"""

from __future__ import annotations


class FirstlightError(Exception):
    """A fault that the user can act on.

    Args:
        what: one sentence, what is wrong, with the values seen.
        where: the variable, file, unit or host part concerned.
        why: what would go wrong if it were let through; empty when ``what`` says it.
        fix: one imperative sentence, the exact value to set where it can be computed.
        kind: short identifier for programs, ``lower-case-with-hyphens``.
    """

    def __init__(self, what: str, *, where: str, fix: str, why: str = "", kind: str = "invalid") -> None:
        self.what, self.where, self.why, self.fix, self.kind = what, where, why, fix, kind
        super().__init__(self.message)

    @property
    def message(self) -> str:
        """The text that a user reads: ``<where>: <what> <why> Fix: <fix>``."""
        return " ".join(part for part in (f"{self.where}: {self.what}", self.why, f"Fix: {self.fix}") if part)

    def as_dict(self) -> dict[str, str]:
        """The same, for module results and JSON reports."""
        return {"kind": self.kind, "what": self.what, "where": self.where, "why": self.why, "fix": self.fix}
