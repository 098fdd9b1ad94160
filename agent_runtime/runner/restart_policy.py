"""When an engine that died is started again: at once, unless it keeps dying."""

from dataclasses import dataclass

DEATHS_IN_A_ROW = 10
"""So many deaths without a new seal between them are no accident: the pod fails, where people and alerts look."""
QUICK_SECONDS = 10.0
"""An engine that dies sooner than this has hardly begun: opening storage, sandboxes and journals takes a few seconds."""
FIRST_PAUSE_SECONDS = 0.2
LONGEST_PAUSE_SECONDS = 10.0
"""Ten deaths then take half a minute: long enough for what passes by itself, such as a name that is not yet resolved."""


@dataclass(frozen=True)
class Deaths:
    """Deaths of the engine since its last progress, and those of them in a row that came quickly."""

    in_a_row: int = 0
    quick: int = 0

    def another(self, *, lived_seconds: float, progress: bool) -> "Deaths":
        """After one more death. `progress`: that engine sealed something before it died."""
        before = Deaths() if progress else self
        quick = before.quick + 1 if lived_seconds < QUICK_SECONDS else 0
        return Deaths(before.in_a_row + 1, quick)

    @property
    def too_many(self) -> bool:
        """Give up: starting it again leads nowhere."""
        return self.in_a_row >= DEATHS_IN_A_ROW

    @property
    def pause_seconds(self) -> float:
        """How long to wait before the next start. A single death costs no wait."""
        if self.quick < 2:
            return 0.0
        return float(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (self.quick - 2)))
