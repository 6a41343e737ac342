"""What the demo encodes."""

from __future__ import annotations

QUERY = "Where is the animal sleeping?"

SENTENCES = (
    "The train to Geneva leaves at noon.",
    "She paints birds in watercolour.",
    "Interest rates rose again in March.",
    "The bakery sells rye bread on Fridays.",
    "He repaired the old bicycle himself.",
    "A cat naps in the sun.",
    "Rain is expected on the coast tonight.",
    "A compiler turns graphs into code.",
    "Our team won after extra time.",
    "The museum keeps a map from 1507.",
    "Children were singing next door.",
    "Two nurses work the night shift.",
)
