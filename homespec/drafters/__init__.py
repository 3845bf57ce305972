"""The draft mechanisms, one file each.

A new drafter keeps the `Drafter` protocol of `homespec.decoding.types`, gets its line in DRAFTERS,
and its construction in `homespec.engine`.
"""

from homespec.decoding.types import Drafter
from homespec.drafters.draft_model import DraftModelDrafter
from homespec.drafters.ngram import NgramDrafter
from homespec.drafters.none import NoDrafter

DRAFTERS: dict[str, type[Drafter]] = {
    "none": NoDrafter,
    "ngram": NgramDrafter,
    "draft_model": DraftModelDrafter,
}
