"""`docs/map.md` names files, which must exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROW = re.compile(r"^\| [^|]+ \| ([^|]+) \|$", re.MULTILINE)


def test_every_place_on_the_map_exists() -> None:
    rows = ROW.findall((ROOT / "docs" / "map.md").read_text())[2:]
    places = [
        place for row in rows for place in re.findall(r"`([\w./-]+)`", row) if "/" in place or place == "Dockerfile"
    ]
    assert len(places) > len(rows), "some rows name several places"
    assert [place for place in places if not (ROOT / place).exists()] == []
