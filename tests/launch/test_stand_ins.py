"""The stand-ins themselves: what they write down and play holds when scripts call them side by side."""

import subprocess
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"
SIDE_BY_SIDE = """
source play.sh
for number in {0..39}; do
  { record program "$number" $'two\\nlines' "$LONG"; play kind; } &
done
wait
"""


def test_calls_side_by_side_are_neither_torn_nor_answered_twice(stage):
    stage.answers("kind", *(f"echo answer-{number}" for number in range(40)))
    long = "x" * 5000  # longer than bash writes at once
    result = subprocess.run(
        ["bash", "-c", SIDE_BY_SIDE],
        cwd=STAND_INS,
        env=stage.variables | {"LONG": long},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert sorted(result.stdout.split()) == sorted(f"answer-{number}" for number in range(40))
    expected = [[str(number), "two\nlines", long] for number in range(40)]
    assert sorted(stage.calls("program")) == sorted(expected)
