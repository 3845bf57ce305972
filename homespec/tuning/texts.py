"""Short texts on which a draft is compared with its target: what people ask a home server for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt, and an answer to judge; without one the target writes it (greedily or sampled)."""

    kind: str
    prompt: str
    answer: str | None = None
    greedy: bool = True


_FUNCTION = '''\
def load_readings(path, station):
    """Return the readings of one station, oldest first."""
    readings = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["station"] == station:
                readings.append((row["time"], float(row["value"])))
    readings.sort()
    return readings
'''

SAMPLES = (
    Sample("chat", "Why does bread dough have to rest before it is baked?"),
    Sample(
        "code",
        "Write a Python class for a bank account with deposit, withdraw and a history of both.",
    ),
    Sample(
        "prose",
        "Write the opening of a short story about a lighthouse keeper who finds a letter.",
        greedy=False,
    ),
    Sample(
        "chat",
        "What should I check before I buy a used bicycle?",
        "Start with the frame: look along the tubes for dents, cracks and rust, above all where "
        "they are welded. Then spin both wheels; they should run straight and stop without a "
        "scraping sound. Squeeze the brakes hard and push the bicycle forward to see whether they "
        "hold. Shift through every gear while someone lifts the back wheel. Finally, take it for "
        "a ride of ten minutes, and ask the seller for a proof of purchase.",
    ),
    Sample(
        "prose",
        "Describe a small harbour town in the early morning.",
        "Before the sun is up the harbour belongs to the gulls. They walk along the wall as if "
        "they had rented it, and only step aside when the first van comes down the hill with ice "
        "for the boats. A light goes on over the bakery, then another in the pilot's office, and "
        "the smell of diesel mixes with that of warm bread. Nobody speaks much. Ropes are thrown, "
        "engines cough, and one after the other the boats slip out past the lamp at the end of "
        "the pier.",
    ),
    Sample(
        "edit",
        f"Add type annotations to this function:\n\n{_FUNCTION}",
        "```python\n"
        + _FUNCTION.replace(
            "(path, station)", "(path: str, station: str) -> list[tuple[str, float]]"
        ).replace("readings = []", "readings: list[tuple[str, float]] = []")
        + "```\n",
    ),
)
